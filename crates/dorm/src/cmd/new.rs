//! `dorm new`: makes an agent.

use std::time::Instant;

use anyhow::Result;
use dorm_server::api::types::{Agent, Lifetime, NewAgent, VolumeMount};
use dorm_server::isolation::Choice;

use super::net::PolicyArgs;
use super::{env_map, parse_env, parse_time};
use crate::cli::Global;
use crate::size::Size;
use crate::{output, progress};

/// Make an agent, and start it
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: dorm new demo --memory 2G --env EDITOR=nano")]
pub(crate) struct Args {
    /// Lowercase letters, digits and hyphens; becomes its host name
    name: String,
    /// What it starts from [default: base]
    #[arg(long, short = 'T', value_name = "TEMPLATE")]
    template: Option<String>,
    /// What stands between it and the machine: container, gvisor, vm, or auto for the strongest that works here
    #[arg(long, value_name = "KIND")]
    isolation: Option<Choice>,
    /// Cores, as 2 or 0.5
    #[arg(long, value_name = "N", value_parser = parse_cpus)]
    cpus: Option<f64>,
    /// As 512M or 2G
    #[arg(long, value_name = "SIZE")]
    memory: Option<Size>,
    /// What its home may hold beyond its template
    #[arg(long, value_name = "SIZE")]
    disk: Option<Size>,
    /// How many processes and threads it may have
    #[arg(long, value_name = "N")]
    pids: Option<u32>,
    /// Environment of all its runs; a bare NAME takes the value from here
    #[arg(long, short, value_name = "NAME=VALUE", value_parser = parse_env)]
    env: Vec<(String, String)>,
    /// Goes to standby after so long without use, as 15s or 5m; 0 is never
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    standby_after: Option<f64>,
    /// Has its memory on disk too after so long in standby; 0 is never
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    durable_after: Option<f64>,
    /// Goes to disk after so long in standby; 0 is never
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    hibernate_after: Option<f64>,
    /// Never goes to sleep by itself
    #[arg(long)]
    keep_awake: bool,
    /// Its ports need no token: whoever has a URL of it may open it
    #[arg(long)]
    public: bool,
    /// Mounts a volume there, as data:/data
    #[arg(long, value_name = "VOLUME:PATH", value_parser = parse_volume)]
    volume: Vec<VolumeMount>,
    #[command(flatten)]
    network: PolicyArgs,
    /// Goes away when its box ends
    #[arg(long)]
    ephemeral: bool,
    /// Leave it to the first use to start it
    #[arg(long)]
    no_start: bool,
}

/// What JSON cannot express would arrive as if nothing had been asked for.
fn parse_cpus(text: &str) -> Result<f64, String> {
    let cpus = text.parse::<f64>().ok().filter(|cpus| cpus.is_finite());
    cpus.ok_or_else(|| format!("`{text}` is no number of cores; write it as 2 or 0.5"))
}

fn parse_volume(text: &str) -> Result<VolumeMount, String> {
    match text.split_once(':') {
        Some((volume, path)) if !volume.is_empty() && path.starts_with('/') => Ok(VolumeMount {
            volume: volume.to_owned(),
            path: path.to_owned(),
        }),
        _ => Err(format!("`{text}` is no volume and path; write it as data:/data")),
    }
}

pub(crate) async fn run(global: &Global, args: Args) -> Result<()> {
    let begun = Instant::now();
    let request = NewAgent {
        name: args.name,
        template: args.template,
        isolation: args.isolation,
        cpus: args.cpus,
        memory: args.memory.map(|s| s.0),
        disk: args.disk.map(|s| s.0),
        pids: args.pids,
        env: env_map(args.env),
        lifetime: args.ephemeral.then_some(Lifetime::Ephemeral),
        standby_after: args.standby_after,
        durable_after: args.durable_after,
        hibernate_after: args.hibernate_after,
        keep_awake: args.keep_awake,
        public: args.public,
        network: args.network.into(),
        volumes: args.volume,
        start: !args.no_start,
    };
    let bar = progress::spinner(format!("making {}", request.name));
    let agent: Agent = global.client()?.post("/v1/agents", &request).await?;
    bar.finish_and_clear();
    if global.json {
        return output::json(&agent);
    }
    let seconds = begun.elapsed().as_secs_f64();
    output::line(format!(
        "{} is {} ({seconds:.2} s, template {}, id {})",
        agent.name, agent.state, agent.template, agent.id
    ))?;
    if let Some(on) = agent.runs_on.filter(|on| on.slow) {
        eprintln!(
            "note: it runs by {}; `dorm doctor` says what works here",
            on.accelerator
        );
    }
    Ok(())
}
