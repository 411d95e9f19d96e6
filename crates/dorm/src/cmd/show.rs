//! `dorm show`: all there is to know about one agent.

use anyhow::Result;
use dorm_server::api::types::{Agent, Lifetime, Network};

use crate::cli::Global;
use crate::client::agent_path;
use crate::output::{self, age, time, wait};
use crate::size::Size;

/// Show one agent
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: dorm show demo --json | jq -r .state")]
pub(crate) struct Args {
    /// Name or id
    name: String,
}

pub(crate) async fn run(global: &Global, args: Args) -> Result<()> {
    let agent: Agent = global.client()?.get(&agent_path(&args.name, "")).await?;
    if global.json {
        return output::json(&agent);
    }
    let lifetime = match agent.lifetime {
        Lifetime::Persistent => "persistent",
        Lifetime::Ephemeral => "ephemeral",
    };
    let mut fields = vec![
        ("name", agent.name),
        ("id", agent.id.to_string()),
        (
            "state",
            format!("{} for {}: {}", agent.state, age(agent.since), agent.reason),
        ),
        ("template", agent.template),
        ("isolation", agent.isolation.to_string()),
    ];
    if let Some(on) = agent.runs_on {
        fields.extend([
            ("engine", on.engine),
            ("run by", on.accelerator),
            ("files kept by", on.files),
            ("memory kept by", on.memory),
        ]);
    }
    fields.extend([
        ("lifetime", lifetime.to_owned()),
        ("created", time(agent.created)),
        ("cpus", agent.cpus.to_string()),
        ("memory", Size(agent.memory).to_string()),
        ("disk", Size(agent.disk).to_string()),
        ("pids", agent.pids.to_string()),
    ]);
    if agent.network != Network::default() {
        fields.extend(super::net::fields(&agent.network));
    }
    fields.extend(
        agent
            .volumes
            .iter()
            .map(|mount| ("volume", format!("{} at {}", mount.volume, mount.path))),
    );
    let times = [
        ("standby after", agent.standby_after),
        ("durable after", agent.durable_after),
        ("hibernate after", agent.hibernate_after),
    ];
    fields.extend(
        times
            .iter()
            .filter_map(|(name, own)| Some((*name, wait((*own)?)))),
    );
    if agent.keep_awake {
        fields.push(("sleep", "never by itself".to_owned()));
    }
    if agent.public {
        fields.push(("ports", "public".to_owned()));
    }
    if let Some(size) = agent.image_size {
        let kind = if agent.durable { "current" } else { "stale" };
        fields.push(("memory image", format!("{} ({kind})", Size(size))));
    }
    fields.extend(agent.address.map(|address| ("address", address)));
    fields.extend(agent.pid.map(|pid| ("process 1", pid.to_string())));
    fields.extend(
        agent
            .env
            .into_iter()
            .map(|(name, value)| ("env", format!("{name}={value}"))),
    );
    output::fields(&fields)
}
