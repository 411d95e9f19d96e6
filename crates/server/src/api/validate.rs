//! What a request may ask for.

use dorm_engine::{Env, Isolation, Limits};

use super::errors::{ApiError, ApiResult};
use super::network;
use super::types::{AgentChange, NewAgent};
use crate::records::{AgentSpec, Sleep, SleepChange};

const MIB: u64 = 1 << 20;
const PIB: u64 = 1 << 50;
/// Of the environment as JSON: it has to fit into the boot message, beside the template's.
const MAX_ENV: usize = 64 * 1024;

/// Names of agents and templates: DNS labels that start with a letter.
pub(crate) fn name(kind: &str, name: &str) -> ApiResult<()> {
    let allowed = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    let fits = (1..=63).contains(&name.len())
        && name.bytes().all(allowed)
        && name.as_bytes()[0].is_ascii_lowercase()
        && !name.ends_with('-');
    if fits {
        return Ok(());
    }
    Err(ApiError::invalid(format!("{name:?} cannot be the name of {kind}")).hint(
        "a name is 1 to 63 lowercase letters, digits and hyphens; it starts with a letter and does not end with a hyphen",
    ))
}

pub(crate) fn env(env: &Env) -> ApiResult<()> {
    for (key, value) in env {
        let first = key.as_bytes().first().copied().unwrap_or(b'0');
        let fits = !first.is_ascii_digit() && key.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
        if !fits {
            return Err(
                ApiError::invalid(format!("{key:?} cannot be the name of an environment variable"))
                    .hint("such a name is letters, digits and underscores, and starts with no digit"),
            );
        }
        if value.contains('\0') {
            return Err(ApiError::invalid(format!(
                "the environment variable {key} holds a zero byte"
            )));
        }
    }
    let size = serde_json::to_string(env).map_or(usize::MAX, |json| json.len());
    if size > MAX_ENV {
        return Err(
            ApiError::invalid(format!("the environment is {size} bytes, more than {MAX_ENV}"))
                .hint("put large values into files"),
        );
    }
    Ok(())
}

/// What the agent is to be, with the defaults where the request is silent.
pub(super) fn spec(new: &NewAgent, defaults: &Limits) -> ApiResult<AgentSpec> {
    name("an agent", &new.name)?;
    env(&new.env)?;
    let cpu_millis = match new.cpus {
        None => defaults.cpu_millis,
        Some(cpus) if (0.01..=1024.0).contains(&cpus) => {
            // In range, so neither sign nor size is lost.
            (cpus * 1000.0).round() as u32
        }
        Some(cpus) => return Err(out_of_range("cpus", cpus, "0.01", "1024")),
    };
    let limits = Limits {
        cpu_millis,
        memory: bytes("memory", new.memory, defaults.memory, 32 * MIB)?,
        disk: bytes("disk", new.disk, defaults.disk, 64 * MIB)?,
        pids: match new.pids {
            None => defaults.pids,
            Some(pids @ 16..=4_194_304) => pids,
            Some(pids) => return Err(out_of_range("pids", pids, "16", "4194304")),
        },
        io_bps: defaults.io_bps,
    };
    Ok(AgentSpec {
        isolation: Isolation::default(),
        limits,
        env: new.env.clone(),
        sleep: Sleep {
            standby_after: millis("standby_after", new.standby_after)?,
            durable_after: millis("durable_after", new.durable_after)?,
            hibernate_after: millis("hibernate_after", new.hibernate_after)?,
            keep_awake: new.keep_awake,
        },
        network: network::policy(&new.network)?,
        volumes: Vec::new(),
    })
}

pub(super) fn sleep_change(change: &AgentChange) -> ApiResult<SleepChange> {
    let time = |what, given: Option<Option<f64>>| given.map(|seconds| millis(what, seconds)).transpose();
    Ok(SleepChange {
        standby_after: time("standby_after", change.standby_after)?,
        durable_after: time("durable_after", change.durable_after)?,
        hibernate_after: time("hibernate_after", change.hibernate_after)?,
        keep_awake: change.keep_awake,
    })
}

fn millis(what: &str, seconds: Option<f64>) -> ApiResult<Option<u64>> {
    match seconds {
        None => Ok(None),
        // In range, so neither sign nor size is lost.
        Some(seconds) if (0.0..=1e9).contains(&seconds) => Ok(Some((seconds * 1000.0).round() as u64)),
        Some(seconds) => Err(out_of_range(what, seconds, "0 seconds", "1000000000")),
    }
}

pub(crate) fn bytes(what: &str, asked: Option<u64>, default: u64, least: u64) -> ApiResult<u64> {
    match asked {
        None => Ok(default),
        Some(bytes) if (least..=PIB).contains(&bytes) => Ok(bytes),
        Some(bytes) => Err(out_of_range(
            what,
            bytes,
            &format!("{least} bytes ({} MiB)", least / MIB),
            "1 PiB",
        )),
    }
}

fn out_of_range(what: &str, found: impl std::fmt::Display, least: &str, most: &str) -> ApiError {
    ApiError::invalid(format!("{what} is {found}, which is out of range"))
        .hint(format!("from {least} to {most}"))
}
