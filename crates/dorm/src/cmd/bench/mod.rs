//! `dorm bench`: how fast a running daemon is, beside the bare limits of the machine it runs on.

mod aims;
mod bare;
mod create;
mod crowd;
mod engines;
mod exec;
mod files;
pub(crate) mod glance;
mod host_files;
mod load;
mod nginx;
mod peers;
mod proxy;
mod report;
mod runc;
mod snapshot;
mod spawn;
mod standby;
mod wake;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use dorm_engine::criu::bare::Bare;
use dorm_server::api::types::{Agent, Lifetime, NewAgent, Template};
use dorm_server::isolation::Choice;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::cli::Global;
use crate::client::wire::StartRequest;
use crate::client::{Client, agent_path, encode};
use crate::exit::{INTERRUPTED, Quiet};
use crate::size::Size;
use crate::{output, progress};
use report::Report;

/// How long Ctrl-C waits for what must not be broken off.
const PATIENCE: Duration = Duration::from_secs(10);

/// Measure this daemon beside the bare limits of its machine
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Example: dorm bench --runs 50 --only standby --only wake\n\nWhatever it makes on the daemon is deleted at its end, also at Ctrl-C."
)]
pub(crate) struct Args {
    /// How often each is measured; what takes long a quarter as often, and transfers three times
    #[arg(long, default_value_t = 100, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    runs: u32,
    /// Only these; `engines` is measured only if it is named
    #[arg(long, value_name = "NAME")]
    only: Vec<What>,
    /// How many forks `forks` makes
    #[arg(long, default_value_t = 100, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    forks: u32,
    /// How many agents `hibernated` puts to disk
    #[arg(long, default_value_t = 1000, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    hibernated: u32,
    /// What `homes` fills the large home with
    #[arg(long, default_value = "5G", value_name = "SIZE", value_parser = large_home)]
    home: Size,
    /// What the agents are made from
    #[arg(long, default_value = "base")]
    template: String,
}

fn large_home(text: &str) -> Result<Size, String> {
    let size: Size = text.parse().map_err(|error| format!("{error}"))?;
    match size > snapshot::SMALL_HOME {
        true => Ok(size),
        false => Err("the large home is compared with one of 50 MiB, and has to be larger".to_owned()),
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum What {
    /// Make an agent, start it and run `true` in it
    Create,
    /// Run `true` in a running agent
    Exec,
    /// Upload and download a file
    Files,
    /// Requests and files through the daemon, beside a bare reverse proxy and a plain file server
    Proxy,
    /// Start /bin/true on the host
    Spawn,
    /// Run /bin/true by runc on the same root filesystem
    Runc,
    /// Write and read a file on the host
    HostFiles,
    /// Pause an agent and wake it, beside the freezer alone
    Standby,
    /// Put an agent to disk and wake it, beside CRIU alone
    Wake,
    /// Take snapshots of a running agent with its memory
    Snapshot,
    /// Snapshots and forks of a small and of a large home
    Homes,
    /// Fork an agent many times
    Forks,
    /// Keep many agents on disk
    Hibernated,
    /// Put a container with 100 MiB to disk and bring it back by podman and by runsc, where they are installed
    Peers,
    /// Every isolation that works here, beside its own bare limit; in emulation that takes minutes
    Engines,
}

const ALL: [What; 15] = [
    What::Spawn,
    What::Exec,
    What::Proxy,
    What::Runc,
    What::Create,
    What::Standby,
    What::Wake,
    What::Peers,
    What::Snapshot,
    What::Homes,
    What::Forks,
    What::Hibernated,
    What::HostFiles,
    What::Files,
    What::Engines,
];

/// What the measurements share.
struct Bench {
    client: Arc<Client>,
    template: Template,
    data: PathBuf,
    runs: u32,
    /// What dorm is made of, or why it cannot be measured from here.
    bare: Result<Bare, String>,
    /// Agents that were made and not yet deleted.
    made: Mutex<Vec<String>>,
    /// Held while something is under way that must not be broken off.
    unbroken: Arc<tokio::sync::Mutex<()>>,
}

pub(crate) async fn run(global: &Global, args: Args) -> Result<()> {
    let client = global.client()?;
    let template = client
        .get(&format!("/v1/templates/{}", encode(&args.template)))
        .await?;
    let bench = Bench::new(global, client, template, args.runs);
    let chosen = ALL.into_iter().filter(|what| match args.only.is_empty() {
        true => *what != What::Engines,
        false => args.only.contains(what),
    });
    let result = tokio::select! {
        result = bench.measure(chosen, &args) => result,
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
    fn new(global: &Global, client: Client, template: Template, runs: u32) -> Self {
        Self {
            client: Arc::new(client),
            template,
            bare: Bare::open(&global.data(), Path::new("/proc/self/exe")),
            data: global.data(),
            runs,
            made: Mutex::default(),
            unbroken: Arc::default(),
        }
    }

    async fn measure(&self, chosen: impl Iterator<Item = What>, args: &Args) -> Result<Report> {
        let mut report = Report::new(self.runs, &self.template);
        for what in chosen {
            let bar = progress::spinner(format!("measuring {what:?}"));
            let mut figures = Vec::new();
            let measured = match what {
                What::Create => vec![create::measure(self).await?],
                What::Exec => vec![exec::measure(self).await?],
                What::Proxy => proxy::measure(self).await?,
                What::Files => files::measure(self).await?,
                What::Spawn => spawn::measure(self.runs)?,
                What::Runc => vec![runc::measure(&self.data, &self.template, self.runs)?],
                What::HostFiles => host_files::measure(&self.data)?,
                What::Standby => standby::measure(self).await?,
                What::Wake => wake::measure(self).await?,
                What::Peers => peers::measure(self).await?,
                What::Snapshot => snapshot::live(self).await?,
                What::Homes => {
                    let measured;
                    (measured, figures) = snapshot::files(self, args.home).await?;
                    measured
                }
                What::Forks => {
                    let measured;
                    (measured, figures) = crowd::forks(self, args.forks).await?;
                    measured
                }
                What::Engines => {
                    let measured;
                    (measured, figures) = engines::measure(self).await?;
                    measured
                }
                What::Hibernated => {
                    let measured;
                    (measured, figures) = crowd::hibernated(self, args.hibernated).await?;
                    measured
                }
            };
            bar.finish_and_clear();
            report.measurements.extend(measured);
            report.figures.extend(figures);
        }
        aims::add_to(&mut report);
        Ok(report)
    }

    /// How often to measure what takes a good part of a second.
    fn slow_runs(&self) -> u32 {
        self.runs.div_ceil(4)
    }

    fn made(&self) -> std::sync::MutexGuard<'_, Vec<String>> {
        self.made.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Agents of these names are deleted at the end.
    fn will_make(&self, names: impl IntoIterator<Item = String>) {
        self.made().extend(names);
    }

    /// For an agent that is deleted at the end.
    fn new_name(&self) -> String {
        let name = format!("bench-{}", &dorm_engine::Id::random().as_str()[..10]);
        self.will_make([name.clone()]);
        name
    }

    /// `work` goes on to its end, even if whoever waits for it does not.
    async fn unbroken<T: Send + 'static, E: Into<anyhow::Error> + Send + 'static>(
        &self,
        work: impl Future<Output = Result<T, E>> + Send + 'static,
    ) -> Result<T> {
        let guard = self.unbroken.clone().lock_owned().await;
        let work = tokio::spawn(async move {
            let done = work.await;
            drop(guard);
            done
        });
        work.await
            .context("the measurement broke off")?
            .map_err(Into::into)
    }

    /// Has the daemon make something. It does so to the end, and only what is there can be deleted.
    async fn have_made<T: DeserializeOwned + Send + 'static>(
        &self,
        path: &str,
        request: &impl Serialize,
    ) -> Result<T> {
        let (client, path, request) = (
            self.client.clone(),
            path.to_owned(),
            serde_json::to_value(request)?,
        );
        self.unbroken(async move { client.post(&path, &request).await })
            .await
    }

    /// A request without a body about an agent.
    async fn ask(&self, agent: &str, what: &str) -> Result<()> {
        let _: serde_json::Value = self
            .client
            .post(&agent_path(agent, what), &serde_json::json!({}))
            .await?;
        Ok(())
    }

    /// What a script in the agent wrote, or `None` if it failed.
    async fn shell(&self, agent: &str, script: &str) -> Result<Option<String>> {
        let guest = self.client.guest(agent, Some("root"));
        let (output, _, end) = guest
            .run(&StartRequest::command("/bin/sh", ["-c", script]))
            .await?;
        Ok((end.code() == 0).then(|| String::from_utf8_lossy(&output).into_owned()))
    }

    /// A new agent that runs: a container, which is what it is compared with, whatever the daemon's default is.
    async fn agent(&self) -> Result<Agent> {
        self.make(Choice::Container, None, None).await
    }

    /// A new agent with this isolation and so much memory.
    async fn agent_of(&self, isolation: Choice, memory: u64) -> Result<Agent> {
        self.make(isolation, Some(memory), None).await
    }

    /// A new agent whose home may hold so many bytes.
    async fn agent_with_disk(&self, bytes: u64) -> Result<Agent> {
        self.make(Choice::Container, None, Some(bytes)).await
    }

    async fn make(&self, isolation: Choice, memory: Option<u64>, disk: Option<u64>) -> Result<Agent> {
        let request = NewAgent {
            isolation: Some(isolation),
            name: self.new_name(),
            template: Some(self.template.id.to_string()),
            cpus: None,
            memory,
            disk,
            pids: None,
            env: Default::default(),
            lifetime: Some(Lifetime::Persistent),
            standby_after: None,
            durable_after: None,
            hibernate_after: None,
            // What is measured is not to go to sleep meanwhile.
            keep_awake: true,
            public: false,
            network: Default::default(),
            volumes: Vec::new(),
            start: true,
        };
        self.have_made("/v1/agents", &request).await
    }

    async fn delete(&self, name: &str) -> Result<()> {
        self.client.delete(&agent_path(name, "")).await?;
        self.made().retain(|made| made != name);
        Ok(())
    }

    /// Deletes what an error or Ctrl-C left.
    async fn clean_up(&self) {
        let _ = tokio::time::timeout(PATIENCE, self.unbroken.lock()).await;
        let left = std::mem::take(&mut *self.made());
        for name in left {
            let _ = self.client.delete(&agent_path(&name, "")).await;
        }
    }
}
