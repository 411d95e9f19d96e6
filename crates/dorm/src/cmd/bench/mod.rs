//! `dorm bench`: how fast a running daemon is, beside the bare limits of the machine it runs on.

mod create;
mod exec;
mod files;
mod host_files;
mod report;
mod runc;
mod spawn;

use std::sync::Mutex;

use anyhow::Result;
use dorm_server::api::types::{Agent, Lifetime, NewAgent, Template};

use crate::cli::Global;
use crate::client::{Client, agent_path, encode};
use crate::exit::{INTERRUPTED, Quiet};
use crate::{output, progress};
use report::{Aim, Report};

/// Measure this daemon beside the bare limits of its machine
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example: dorm bench --runs 50 --only exec\n\nMeasurements: create, exec, files, spawn, runc, host-files."
)]
pub(crate) struct Args {
    /// How often each is measured; transfers are measured three times
    #[arg(long, default_value_t = 100, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    runs: u32,
    /// Only these
    #[arg(long, value_name = "NAME")]
    only: Vec<What>,
    /// What the agents are made from
    #[arg(long, default_value = "base")]
    template: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum What {
    /// Make an agent, start it and run `true` in it
    Create,
    /// Run `true` in a running agent
    Exec,
    /// Upload and download a file
    Files,
    /// Start /bin/true on the host
    Spawn,
    /// Run /bin/true by runc on the same root filesystem
    Runc,
    /// Write and read a file on the host
    HostFiles,
}

const ALL: [What; 6] = [
    What::Spawn,
    What::Exec,
    What::Runc,
    What::Create,
    What::HostFiles,
    What::Files,
];

/// What the measurements share.
struct Bench {
    client: Client,
    template: Template,
    data: std::path::PathBuf,
    runs: u32,
    /// Agents that were made and not yet deleted.
    made: Mutex<Vec<String>>,
}

pub(crate) async fn run(global: &Global, args: Args) -> Result<()> {
    let client = global.client()?;
    let template = client
        .get(&format!("/v1/templates/{}", encode(&args.template)))
        .await?;
    let bench = Bench {
        client,
        template,
        data: global.data(),
        runs: args.runs,
        made: Mutex::default(),
    };
    let chosen = ALL
        .into_iter()
        .filter(|what| args.only.is_empty() || args.only.contains(what));
    let result = tokio::select! {
        result = bench.measure(chosen) => result,
        _ = tokio::signal::ctrl_c() => Err(Quiet(INTERRUPTED).into()),
    };
    bench.clean_up().await;
    let report = result?;
    if global.json {
        output::json(&report)
    } else {
        output::bytes(report.render().as_bytes())
    }
}

impl Bench {
    async fn measure(&self, chosen: impl Iterator<Item = What>) -> Result<Report> {
        let mut report = Report::new(self.runs, &self.template);
        for what in chosen {
            let bar = progress::spinner(format!("measuring {what:?}"));
            let measured = match what {
                What::Create => vec![create::measure(self).await?],
                What::Exec => vec![exec::measure(self).await?],
                What::Files => files::measure(self).await?,
                What::Spawn => spawn::measure(self.runs)?,
                What::Runc => vec![runc::measure(&self.data, &self.template, self.runs)?],
                What::HostFiles => host_files::measure(&self.data)?,
            };
            bar.finish_and_clear();
            report.measurements.extend(measured);
        }
        report.aim(Aim {
            name: "exec within 3 times of fork+exec",
            of: exec::NAME,
            against: spawn::FORK,
            at_most: 3.0,
        });
        report.aim(Aim {
            name: "create + first exec below runc run",
            of: create::NAME,
            against: runc::NAME,
            at_most: 1.0,
        });
        report.aim(Aim {
            name: "upload against a plain write",
            of: files::UPLOAD,
            against: host_files::WRITE,
            at_most: f64::INFINITY,
        });
        report.aim(Aim {
            name: "download against a plain read",
            of: files::DOWNLOAD,
            against: host_files::READ,
            at_most: f64::INFINITY,
        });
        Ok(report)
    }

    /// A new agent that runs.
    async fn agent(&self) -> Result<Agent> {
        let name = format!("bench-{}", &dorm_engine::Id::random().as_str()[..10]);
        self.made
            .lock()
            .unwrap_or_else(|p| p.into_inner())
            .push(name.clone());
        let request = NewAgent {
            name,
            template: Some(self.template.id.to_string()),
            cpus: None,
            memory: None,
            disk: None,
            pids: None,
            env: Default::default(),
            lifetime: Some(Lifetime::Persistent),
            standby_after: None,
            durable_after: None,
            hibernate_after: None,
            // What is measured is not to go to sleep meanwhile.
            keep_awake: true,
            public: false,
            start: true,
        };
        self.client.post("/v1/agents", &request).await
    }

    async fn delete(&self, name: &str) -> Result<()> {
        self.client.delete(&agent_path(name, "")).await?;
        self.made
            .lock()
            .unwrap_or_else(|p| p.into_inner())
            .retain(|made| made != name);
        Ok(())
    }

    /// Deletes what an error or Ctrl-C left.
    async fn clean_up(&self) {
        let left = std::mem::take(&mut *self.made.lock().unwrap_or_else(|p| p.into_inner()));
        for name in left {
            let _ = self.client.delete(&agent_path(&name, "")).await;
        }
    }
}
