//! The verbs, one file each.

pub(crate) mod bench;
pub(crate) mod completions;
pub(crate) mod cp;
pub(crate) mod doctor;
pub(crate) mod environment;
pub(crate) mod events;
pub(crate) mod exec;
pub(crate) mod key;
pub(crate) mod logs;
pub(crate) mod ls;
pub(crate) mod new;
pub(crate) mod ps;
pub(crate) mod rm;
pub(crate) mod serve;
pub(crate) mod shell;
pub(crate) mod show;
pub(crate) mod start;
pub(crate) mod stats;
pub(crate) mod stop;
pub(crate) mod template;

use std::collections::BTreeMap;

use anyhow::Result;
use serde_json::{Value, json};

use crate::{exit, output};

/// Does the same to several agents, goes on after an error, and leaves with the first error's code.
pub(crate) async fn each<F: AsyncFn(&str) -> Result<Value>>(
    names: &[String],
    as_json: bool,
    act: F,
) -> Result<()> {
    let mut first_code = None;
    let mut done = Vec::new();
    for name in names {
        match act(name).await {
            Ok(value) if as_json => done.push(value),
            Ok(_) => output::line(name)?,
            Err(e) => {
                let code = exit::report(&e, as_json);
                first_code.get_or_insert(code);
            }
        }
    }
    if as_json {
        output::json(&json!(done))?;
    }
    match first_code {
        Some(code) => Err(exit::Quiet(code).into()),
        None => Ok(()),
    }
}

/// `K=V`; a bare `K` takes its value from this program's environment.
pub(crate) fn parse_env(text: &str) -> Result<(String, String), String> {
    let (name, value) = match text.split_once('=') {
        Some((name, value)) => (name, value.to_owned()),
        None => (
            text,
            std::env::var(text).map_err(|_| format!("{text} is not set here; write {text}=VALUE"))?,
        ),
    };
    if name.is_empty() {
        return Err(format!("`{text}` has no name; write NAME=VALUE"));
    }
    Ok((name.to_owned(), value))
}

pub(crate) fn env_map(pairs: Vec<(String, String)>) -> BTreeMap<String, String> {
    pairs.into_iter().collect()
}

pub(crate) fn parse_seconds(text: &str) -> Result<f64, String> {
    match text.trim_end_matches('s').parse::<f64>() {
        Ok(seconds) if seconds.is_finite() && seconds >= 0.0 => Ok(seconds),
        _ => Err(format!("`{text}` is no number of seconds")),
    }
}
