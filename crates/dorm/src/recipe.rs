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

/// Recipes that come with the binary, by the template's name.
const BUILT_IN: [(&str, &str); 2] = [
    ("base", include_str!("recipes/base.toml")),
    (
        "code-interpreter-v1",
        include_str!("recipes/code-interpreter-v1.toml"),
    ),
];

macro_rules! embedded {
    ($($name:literal),* $(,)?) => {
        &[$(($name, include_str!(concat!("recipes/", $name)))),*]
    };
}

/// What they name as `source`.
const EMBEDDED: &[(&str, &str)] = embedded![
    "code-interpreter-v1/backlog.py",
    "code-interpreter-v1/charts.py",
    "code-interpreter-v1/contexts.py",
    "code-interpreter-v1/kernel.js",
    "code-interpreter-v1/kernel_ipython.py",
    "code-interpreter-v1/kernel_pipes.py",
    "code-interpreter-v1/languages.py",
    "code-interpreter-v1/outputs.py",
    "code-interpreter-v1/requirements.txt",
    "code-interpreter-v1/server.py",
    "code-interpreter-v1/start.sh",
    "code-interpreter-v1/startup.py",
];

/// Where the files lie that a recipe names.
#[derive(Clone, Copy)]
enum Beside<'a> {
    Folder(&'a Path),
    Binary,
}

impl Beside<'_> {
    fn read(self, source: &str) -> Result<Vec<u8>> {
        match self {
            Self::Folder(folder) => {
                let source = folder.join(source);
                std::fs::read(&source).with_context(|| format!("cannot read {}", source.display()))
            }
            Self::Binary => {
                let found = EMBEDDED.iter().find(|(name, _)| *name == source);
                let (_, content) = found.with_context(|| format!("{source} does not come with dorm"))?;
                Ok(content.as_bytes().to_owned())
            }
        }
    }
}

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
    start_keeps_awake: Option<bool>,
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

/// The recipe that comes with dorm for a template of this name.
pub(crate) fn built_in(name: &str) -> Option<Result<Recipe>> {
    let (_, text) = BUILT_IN.iter().find(|(built_in, _)| *built_in == name)?;
    Some(parse(text, name, Beside::Binary))
}

pub(crate) fn built_in_names() -> impl Iterator<Item = &'static str> {
    BUILT_IN.iter().map(|(name, _)| *name)
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
        Beside::Folder(path.parent().unwrap_or(Path::new("."))),
    )
}

fn parse(text: &str, name: &str, beside: Beside<'_>) -> Result<Recipe> {
    let written: Written = toml::from_str(text).map_err(|e| {
        Failure::new(Exit::Usage, format!("{name} is not a recipe"))
            .cause(anyhow::anyhow!("{}", e.to_string().trim_end()))
            .hint("a recipe has from, apt, files, run, env, user, workdir, start and start_keeps_awake; see `dorm help template build`")
    })?;
    let files = written
        .files
        .into_iter()
        .map(|file| inline(file, beside))
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
        start_keeps_awake: written.start_keeps_awake,
    })
}

fn inline(file: WrittenFile, beside: Beside<'_>) -> Result<RecipeFile> {
    let content = match (&file.source, file.content) {
        (Some(source), None) => {
            let read = beside.read(source);
            read.with_context(|| format!("a file of the recipe, {}, is not to be had", file.path))?
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
        let recipe = built_in("base").unwrap().unwrap();
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
    fn the_code_interpreter_has_all_of_its_files() {
        let recipe = built_in("code-interpreter-v1").unwrap().unwrap();
        assert_eq!(recipe.from, "base");
        assert_eq!(recipe.files.len(), EMBEDDED.len());
        assert!(recipe.files.iter().all(|file| !file.content.is_empty()));
    }

    #[test]
    fn files_are_sent_along() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("motd"), "hello").unwrap();
        let text = "from = \"base\"\n[[files]]\npath = \"/etc/motd\"\nsource = \"motd\"\nmode = \"0600\"\n\
                    [[files]]\npath = \"/etc/issue\"\ncontent = \"hi\"\n";
        let recipe = parse(text, "r.toml", Beside::Folder(folder.path())).unwrap();
        assert_eq!(
            (recipe.files[0].content.as_str(), recipe.files[0].mode.as_deref()),
            ("aGVsbG8=", Some("0600"))
        );
        assert_eq!(recipe.files[1].content, "aGk=");
    }

    #[test]
    fn an_unknown_key_is_named_with_its_line() {
        let error = parse("from = \"base\"\n\npackages = []\n", "r.toml", Beside::Binary).unwrap_err();
        let text = format!("{error:#}");
        assert!(text.contains("packages") && text.contains("line 3"), "{text}");
    }

    #[test]
    fn a_file_has_either_a_source_or_a_content() {
        let error = parse(
            "from = \"base\"\n[[files]]\npath = \"/a\"\n",
            "r.toml",
            Beside::Binary,
        )
        .unwrap_err();
        assert_eq!(
            error.to_string(),
            "the recipe's file /a needs either `source` or `content`"
        );
    }
}
