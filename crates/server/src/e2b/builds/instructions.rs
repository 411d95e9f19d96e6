//! What a build is to do, out of what the SDKs send.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;

use super::super::errors::{Error, Result};
use super::super::tags;
use crate::api::types::Recipe;
use crate::api::{AppState, validate};
use crate::records::{BuildRecord, Workspace};
use crate::store::StoreError;
use crate::templates::{Instruction, Script};

/// E2B's own image, which `base` stands for here.
const E2B_BASE: &str = "e2bdev/base";
const BASE: &str = "base";
/// What the SDKs' ready commands and E2B's sandboxes rely on.
const ON_DEBIAN: [&str; 6] = ["bash", "ca-certificates", "curl", "iproute2", "procps", "sudo"];

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(in crate::e2b) struct Start {
    from_image: Option<String>,
    from_template: Option<String>,
    /// Credentials, for a registry that this server does not pull from.
    from_image_registry: Option<Value>,
    force: bool,
    steps: Vec<Step>,
    start_cmd: Option<String>,
    ready_cmd: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Step {
    r#type: String,
    #[serde(default)]
    args: Vec<String>,
    files_hash: Option<String>,
    force: Option<bool>,
}

impl Start {
    /// There are no layers here: one that is to be made anew means the whole template.
    pub(super) fn force(&self) -> bool {
        self.force || self.steps.iter().any(|step| step.force == Some(true))
    }
}

pub(super) async fn read(
    state: &AppState,
    workspace: &Workspace,
    build: &BuildRecord,
    start: Start,
) -> Result<(Recipe, Script)> {
    let (from, from_image) = base(state, workspace, &start).await?;
    let apt = match from.starts_with("debian:") {
        true => ON_DEBIAN.map(str::to_owned).to_vec(),
        false => Vec::new(),
    };
    let instructions = start
        .steps
        .iter()
        .map(|step| instruction(state, workspace, step))
        .collect::<Result<Vec<_>>>()?;
    let given = |command: Option<String>| command.filter(|command| !command.trim().is_empty());
    let recipe = Recipe {
        from,
        apt,
        start: given(start.start_cmd),
        ..Recipe::default()
    };
    let script = Script {
        instructions,
        from_image,
        ready: given(start.ready_cmd),
        limits: build.limits,
        build: Some(build.id.clone()),
    };
    Ok((recipe, script))
}

/// What a build begins with, and whether that is an image.
async fn base(state: &AppState, workspace: &Workspace, start: &Start) -> Result<(String, bool)> {
    if let Some(template) = start.from_template.as_deref().filter(|name| !name.is_empty()) {
        let (name, tag) = tags::split(template);
        let name = tags::template(&name, tag.as_deref().unwrap_or(tags::DEFAULT))?;
        if !is_there(state, workspace, &name).await? {
            return Err(Error::invalid(format!(
                "fromTemplate {template:?}: there is no such template; `dorm template ls` shows what there is"
            )));
        }
        return Ok((name, false));
    }
    let image = start.from_image.as_deref().unwrap_or_default();
    if image.is_empty() {
        return Err(Error::invalid("fromImage or fromTemplate is missing"));
    }
    let path = image.split_once('@').map_or(image, |(path, _)| path);
    if path.strip_suffix(":latest").unwrap_or(path) == E2B_BASE {
        return Ok((BASE.to_owned(), false));
    }
    let (name, tag) = tags::split(path);
    let tagged = format!("{name}:{}", tag.as_deref().unwrap_or("latest"));
    // An image that was imported, or built here, under the image's own name.
    for candidate in [&tagged, &name] {
        if is_there(state, workspace, candidate).await? {
            return Ok((candidate.clone(), true));
        }
    }
    match tag {
        Some(suite) if name == "debian" && suite.bytes().all(|b| b.is_ascii_lowercase()) => {
            Ok((tagged, true))
        }
        _ => Err(Error::invalid(format!(
            "fromImage {image:?}: this server pulls from no registry{}. Save the image to a file and import it \
             (`dorm template import {tagged} FILE`), or begin with a template (`dorm template ls`)",
            match start.from_image_registry {
                Some(_) => ", whatever the credentials",
                None => "",
            }
        ))),
    }
}

async fn is_there(state: &AppState, workspace: &Workspace, name: &str) -> Result<bool> {
    match state.store.template_by_name_or_id(workspace, name).await {
        Ok(_) => Ok(true),
        Err(StoreError::NotFound { .. }) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

fn instruction(state: &AppState, workspace: &Workspace, step: &Step) -> Result<Instruction> {
    let kind = step.r#type.as_str();
    if step.args.iter().any(|arg| arg.contains('\0')) {
        return Err(Error::invalid(format!("{kind} holds a zero byte")));
    }
    let argument = |index: usize| step.args.get(index).filter(|text| !text.is_empty()).cloned();
    let needed = |index| argument(index).ok_or_else(|| Error::invalid(format!("{kind} says too little")));
    Ok(match kind {
        "RUN" => Instruction::Run {
            command: needed(0)?,
            user: argument(1).map(checked_user).transpose()?,
        },
        "COPY" => {
            let hash = step.files_hash.as_deref().unwrap_or_default();
            let archive = state.templates.upload(workspace, hash).ok_or_else(|| {
                Error::invalid(format!("the files of COPY with hash {hash:?} were not uploaded"))
            })?;
            Instruction::Copy {
                archive,
                from: inside(&needed(0)?)?,
                to: needed(1)?,
                user: argument(2).map(checked_user).transpose()?,
                mode: argument(3).map(|mode| octal(&mode)).transpose()?,
            }
        }
        "ENV" => {
            let pairs = step.args.chunks(2).filter(|pair| pair.len() == 2);
            let env: BTreeMap<_, _> = pairs.map(|pair| (pair[0].clone(), pair[1].clone())).collect();
            validate::env(&env)?;
            Instruction::Env(env)
        }
        "WORKDIR" => Instruction::Workdir(needed(0)?),
        "USER" => Instruction::User(checked_user(needed(0)?)?),
        other => {
            return Err(Error::invalid(format!(
                "{other:?} is no instruction that this server knows"
            )));
        }
    })
}

/// `user` or `user:group`; nothing that a program could take for an option.
fn checked_user(user: String) -> Result<String> {
    let fits = user.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_')
        && user
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || "_-.:".contains(c));
    match fits {
        true => Ok(user),
        false => Err(Error::invalid(format!("{user:?} is no user"))),
    }
}

fn octal(mode: &str) -> Result<u32> {
    let mode = u32::from_str_radix(mode, 8).ok().filter(|mode| *mode <= 0o7777);
    mode.ok_or_else(|| Error::invalid("a mode of COPY is not octal"))
}

/// The path as it is in the archive: without `.` and `..`.
fn inside(path: &str) -> Result<String> {
    let mut parts = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts
                    .pop()
                    .ok_or_else(|| Error::invalid(format!("COPY {path:?} leads out of the files")))?;
            }
            part => parts.push(part),
        }
    }
    Ok(match parts.is_empty() {
        true => ".".to_owned(),
        false => parts.join("/"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_those_of_the_archive() {
        for (given, expected) in [
            ("a/../b/./c", "b/c"),
            (".", "."),
            ("./x/", "x"),
            ("a b/*.txt", "a b/*.txt"),
        ] {
            assert_eq!(inside(given).unwrap(), expected);
        }
        assert!(inside("a/../../b").is_err());
    }

    #[test]
    fn users_are_no_options() {
        assert!(checked_user("www-data:www-data".to_owned()).is_ok());
        assert!(checked_user("_apt".to_owned()).is_ok());
        assert!(checked_user("-x".to_owned()).is_err());
        assert!(checked_user("a b".to_owned()).is_err());
    }
}
