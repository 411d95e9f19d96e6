//! The verbs, one file each.

pub(crate) mod bench;
pub(crate) mod completions;
pub(crate) mod cp;
pub(crate) mod doctor;
pub(crate) mod environment;
pub(crate) mod events;
pub(crate) mod exec;
pub(crate) mod fork;
pub(crate) mod hibernate;
pub(crate) mod hold;
pub(crate) mod key;
pub(crate) mod logs;
pub(crate) mod ls;
pub(crate) mod net;
pub(crate) mod new;
pub(crate) mod pause;
pub(crate) mod ports;
pub(crate) mod ps;
pub(crate) mod rm;
pub(crate) mod serve;
pub(crate) mod set;
pub(crate) mod shell;
pub(crate) mod show;
pub(crate) mod snapshot;
pub(crate) mod start;
pub(crate) mod stats;
pub(crate) mod stop;
pub(crate) mod template;
pub(crate) mod tls;
pub(crate) mod volume;
pub(crate) mod wake;
pub(crate) mod why;

use std::collections::BTreeMap;

use anyhow::Result;
use serde_json::{Value, json};

use crate::cli::Global;
use crate::client::agent_path;
use crate::{exit, output, progress};

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

/// Asks for `verb` of each agent, and shows what is being done meanwhile.
pub(crate) async fn ask_each(global: &Global, names: &[String], doing: &str, verb: &str) -> Result<()> {
    let client = global.client()?;
    each(names, global.json, async |name| {
        let bar = progress::spinner(format!("{doing} {name}"));
        let agent = client
            .post::<Value>(&agent_path(name, &format!("/{verb}")), &json!({}))
            .await;
        bar.finish_and_clear();
        agent
    })
    .await
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

/// Seconds, or a number with `s`, `m`, `h` or `d`.
pub(crate) fn parse_time(text: &str) -> Result<f64, String> {
    let units = [("s", 1.0), ("m", 60.0), ("h", 3600.0), ("d", 86400.0)];
    let with_unit = units
        .iter()
        .find_map(|(unit, seconds)| Some((text.strip_suffix(unit)?, *seconds)));
    let (number, unit) = with_unit.unwrap_or((text, 1.0));
    match number.parse::<f64>() {
        Ok(number) if number.is_finite() && number >= 0.0 => Ok(number * unit),
        _ => Err(format!("`{text}` is no time; write it as 90, 90s, 15m, 1h or 2d")),
    }
}

pub(crate) fn parse_seconds(text: &str) -> Result<f64, String> {
    match text.trim_end_matches('s').parse::<f64>() {
        Ok(seconds) if seconds.is_finite() && seconds >= 0.0 => Ok(seconds),
        _ => Err(format!("`{text}` is no number of seconds")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_units() {
        for (text, seconds) in [
            ("90", 90.0),
            ("90s", 90.0),
            ("15m", 900.0),
            ("1.5h", 5400.0),
            ("2d", 172_800.0),
        ] {
            assert_eq!(parse_time(text), Ok(seconds));
        }
        for wrong in ["", "h", "-1", "1hh", "1w", "inf"] {
            assert!(parse_time(wrong).is_err(), "{wrong} was taken");
        }
    }
}
