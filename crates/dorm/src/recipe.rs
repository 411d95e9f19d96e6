//! Recipes as people write them, in TOML. Files are read here and sent along, so that the daemon needs
//! no access to the client's disk.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use dorm_server::api::types::{Recipe, RecipeFile};
use serde::Deserialize;

use crate::exit::{Exit, Failure};

/// The recipe of `base`, which comes with the binary.
const BASE: &str = include_str!("recipes/base.toml");

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    from: String,
    #[serde(default)]
    apt: Vec<String>,
    #[serde(default)]
    run: Vec<String>,
    #[serde(default)]
    env: BTreeMap<String, String>,
    user: Option<String>,
    workdir: Option<String>,
    start: Option<String>,
    #[serde(default)]
    files: Vec<WrittenFile>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenFile {
    path: String,
    /// A local file, relative to the recipe.
    source: Option<String>,
    /// Or the text itself.
    content: Option<String>,
    mode: Option<String>,
    owner: Option<String>,
}

pub(crate) fn base() -> Result<Recipe> {
    parse(BASE, "base.toml", Path::new("."))
}

pub(crate) fn read(path: &Path) -> Result<Recipe> {
    let text = std::fs::read_to_string(path).map_err(|e| {
        let exit = if e.kind() == std::io::ErrorKind::NotFound {
            Exit::NotFound
        } else {
            Exit::Error
        };
        Failure::new(exit, format!("cannot read the recipe {}", path.display())).cause(e)
    })?;
    parse(
        &text,
        &path.display().to_string(),
        path.parent().unwrap_or(Path::new(".")),
    )
}

fn parse(text: &str, name: &str, folder: &Path) -> Result<Recipe> {
    let written: Written = toml::from_str(text).map_err(|e| {
        Failure::new(Exit::Usage, format!("{name} is not a recipe"))
            .cause(anyhow::anyhow!("{}", e.to_string().trim_end()))
            .hint("a recipe has from, apt, files, run, env, user, workdir and start; see `dorm help template build`")
    })?;
    let files = written
        .files
        .into_iter()
        .map(|file| inline(file, folder))
        .collect::<Result<_>>()?;
    Ok(Recipe {
        from: written.from,
        apt: written.apt,
        files,
        run: written.run,
        env: written.env,
        user: written.user,
        workdir: written.workdir,
        start: written.start,
    })
}

fn inline(file: WrittenFile, folder: &Path) -> Result<RecipeFile> {
    let content = match (&file.source, file.content) {
        (Some(source), None) => {
            let source = folder.join(source);
            std::fs::read(&source)
                .with_context(|| format!("cannot read {} for {}", source.display(), file.path))?
        }
        (None, Some(content)) => content.into_bytes(),
        _ => {
            let message = format!(
                "the recipe's file {} needs either `source` or `content`",
                file.path
            );
            return Err(Failure::new(Exit::Usage, message).into());
        }
    };
    Ok(RecipeFile {
        path: file.path,
        content: BASE64_STANDARD.encode(content),
        mode: file.mode,
        owner: file.owner,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_base_recipe_is_one() {
        let recipe = base().unwrap();
        assert_eq!(recipe.from, "debian:bookworm");
        assert_eq!(recipe.user.as_deref(), Some("user"));
        for package in [
            "bash",
            "python3-venv",
            "git",
            "curl",
            "ca-certificates",
            "sudo",
            "procps",
            "iproute2",
            "nano",
        ] {
            assert!(recipe.apt.iter().any(|p| p == package), "{package} is missing");
        }
    }

    #[test]
    fn files_are_sent_along() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("motd"), "hello").unwrap();
        let text = "from = \"base\"\n[[files]]\npath = \"/etc/motd\"\nsource = \"motd\"\nmode = \"0600\"\n\
                    [[files]]\npath = \"/etc/issue\"\ncontent = \"hi\"\n";
        let recipe = parse(text, "r.toml", folder.path()).unwrap();
        assert_eq!(
            (recipe.files[0].content.as_str(), recipe.files[0].mode.as_deref()),
            ("aGVsbG8=", Some("0600"))
        );
        assert_eq!(recipe.files[1].content, "aGk=");
    }

    #[test]
    fn an_unknown_key_is_named_with_its_line() {
        let error = parse("from = \"base\"\n\npackages = []\n", "r.toml", Path::new(".")).unwrap_err();
        let text = format!("{error:#}");
        assert!(text.contains("packages") && text.contains("line 3"), "{text}");
    }

    #[test]
    fn a_file_has_either_a_source_or_a_content() {
        let error = parse(
            "from = \"base\"\n[[files]]\npath = \"/a\"\n",
            "r.toml",
            Path::new("."),
        )
        .unwrap_err();
        assert_eq!(
            error.to_string(),
            "the recipe's file /a needs either `source` or `content`"
        );
    }
}
