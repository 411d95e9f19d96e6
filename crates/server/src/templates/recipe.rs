//! Whether a recipe can be built, and the hash by which it is known.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde::Serialize;

use super::{Result, Script, TemplateError};
use crate::api::types::{Recipe, RecipeFile};

/// Changes whenever the same recipe would give another template than before.
const FORMAT: u32 = 1;
const DEBIAN: &str = "debian:";

/// What a template is made from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Source<'a> {
    Debian { suite: &'a str },
    Template { name: &'a str },
}

pub(super) fn source(recipe: &Recipe) -> Result<Source<'_>> {
    match recipe.from.strip_prefix(DEBIAN) {
        Some(suite) if is_word(suite, "-._") => Ok(Source::Debian { suite }),
        Some(suite) => Err(invalid(format!(
            "{suite:?} is not a Debian suite, such as `bookworm`"
        ))),
        None if recipe.from.is_empty() => Err(invalid(
            "`from` is missing: `debian:SUITE` or the name of a template",
        )),
        None => Ok(Source::Template { name: &recipe.from }),
    }
}

/// Everything that makes a template what it is, in an order that does not change.
#[derive(Serialize)]
pub(super) struct Identity<'a> {
    pub(super) recipe: &'a Recipe,
    /// Recipe hash of the parent, or its id where it was imported.
    pub(super) parent: Option<&'a str>,
    /// Hash of the host's certificates that are put into it.
    pub(super) host_ca: Option<&'a str>,
    /// Left out where there is none, so that recipes keep their hash.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) script: Option<&'a Script>,
}

impl Identity<'_> {
    pub(super) fn hash(&self) -> String {
        let identity = serde_json::to_vec(&(FORMAT, std::env::consts::ARCH, self));
        let identity = identity.expect("a recipe is made of strings, lists and sorted maps");
        blake3::hash(&identity).to_hex().to_string()
    }
}

/// A name, perhaps with a tag: `NAME:TAG`.
pub(crate) fn check_name(name: &str) -> Result<()> {
    let (plain, tag) = name.split_once(':').unwrap_or((name, "none"));
    let fits = |part: &str| {
        part.len() <= 63 && is_word(part, "-._") && !part.bytes().any(|b| b.is_ascii_uppercase())
    };
    if plain == "debian" && name != plain {
        return Err(invalid(format!(
            "{name:?} means Debian itself, and cannot name a template"
        )));
    }
    if fits(plain) && fits(tag) {
        return Ok(());
    }
    Err(invalid(format!(
        "{name:?} cannot name a template: 1 to 63 lowercase letters, digits, hyphens, dots and underscores, a letter or digit first; \
         after a colon, a tag may follow that is written alike"
    )))
}

pub(super) fn check(recipe: &Recipe) -> Result<()> {
    source(recipe)?;
    for package in &recipe.apt {
        if !is_word(package, "+-.:=~/") {
            return Err(invalid(format!("{package:?} is not a package name")));
        }
    }
    for file in &recipe.files {
        check_file(file)?;
    }
    if recipe
        .run
        .iter()
        .any(|command| command.trim().is_empty() || command.contains('\0'))
    {
        return Err(invalid("a command of `run` is empty or holds a zero byte"));
    }
    for (key, value) in &recipe.env {
        if key.is_empty() || key.contains(['=', '\0']) || value.contains('\0') {
            return Err(invalid(format!(
                "{key:?} cannot be set as an environment variable"
            )));
        }
    }
    if let Some(user) = &recipe.user
        && !is_word(user, "-._")
        && !user.starts_with('_')
    {
        return Err(invalid(format!("{user:?} is not a user name")));
    }
    if let Some(workdir) = &recipe.workdir {
        check_path(workdir)?;
    }
    if recipe
        .start
        .as_ref()
        .is_some_and(|start| start.trim().is_empty() || start.contains('\0'))
    {
        return Err(invalid("`start` is empty or holds a zero byte"));
    }
    Ok(())
}

pub(super) fn content(file: &RecipeFile) -> Result<Vec<u8>> {
    BASE64
        .decode(&file.content)
        .map_err(|e| invalid(format!("the content of {} is not base64: {e}", file.path)))
}

fn check_file(file: &RecipeFile) -> Result<()> {
    check_path(&file.path)?;
    content(file)?;
    if let Some(mode) = &file.mode
        && !u32::from_str_radix(mode, 8).is_ok_and(|mode| mode <= 0o7777)
    {
        return Err(invalid(format!(
            "the mode {mode:?} of {} is not octal, as `0644` is",
            file.path
        )));
    }
    if let Some(owner) = &file.owner {
        let mut parts = owner.splitn(2, ':');
        if !parts.all(|part| is_word(part.strip_prefix('_').unwrap_or(part), "-._")) {
            return Err(invalid(format!(
                "the owner {owner:?} of {} is not `user` or `user:group`",
                file.path
            )));
        }
    }
    Ok(())
}

fn check_path(path: &str) -> Result<()> {
    let fits = path.starts_with('/') && !path.contains('\0') && !path.split('/').any(|part| part == "..");
    if fits {
        Ok(())
    } else {
        Err(invalid(format!("{path:?} is not an absolute path without `..`")))
    }
}

/// Begins with a letter or digit, so that nothing takes it for an option.
fn is_word(word: &str, others: &str) -> bool {
    word.starts_with(|c: char| c.is_ascii_alphanumeric())
        && word
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || others.contains(c))
}

fn invalid(why: impl Into<String>) -> TemplateError {
    TemplateError::Invalid(why.into())
}
