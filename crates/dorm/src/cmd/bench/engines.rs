//! Every isolation beside its own bare limit: what an agent with it costs, and how long it takes to be back.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use dorm_engine::criu::bare::Bare;
use dorm_engine::{BareQemu, BareRunsc, EngineError};
use dorm_server::api::types::{Agent, Fork};
use dorm_server::isolation::Choice;

use super::report::{Figure, Measurement, Samples};
use super::{Bench, exec, load, snapshot};
use crate::client::agent_path;

const SMALL: u64 = 256 << 20;
const LARGE: u64 = 4 << 30;
/// MiB that a process in each of the agents holds.
const HELD: u32 = 64;
/// What takes seconds in emulation is not done more often.
const MOST: u32 = 10;

/// What is measured of each.
pub(super) struct Names {
    create: &'static str,
    exec: &'static str,
    standby: &'static str,
    pub(super) wake: [&'static str; 2],
    pub(super) alone: [&'static str; 2],
    snapshot: &'static str,
    fork: &'static str,
    size: &'static str,
    running: &'static str,
    standing_by: &'static str,
}

macro_rules! names {
    ($kind:literal, $alone:literal) => {
        Names {
            create: concat!($kind, ": create + first exec"),
            exec: concat!($kind, ": exec of true"),
            standby: concat!($kind, ": wake from standby + exec of true"),
            wake: [
                concat!($kind, ": wake from disk, of 256 MiB"),
                concat!($kind, ": wake from disk, of 4 GiB"),
            ],
            alone: [concat!($alone, ", of 256 MiB"), concat!($alone, ", of 4 GiB")],
            snapshot: concat!($kind, ": live snapshot"),
            fork: concat!($kind, ": fork that runs"),
            size: concat!($kind, ": on disk, hibernated"),
            running: concat!($kind, ": memory of all its processes (PSS), running"),
            standing_by: concat!($kind, ": the same, in standby"),
        }
    };
}

const CONTAINER: Names = names!("container", "criu alone: restore");
const GVISOR: Names = names!("gvisor", "runsc alone: restore");
const CRIU_DUMP: &str = "criu alone: dump, of 256 MiB";
const RUNSC_RUN: &str = "runsc alone: run of true";
const RUNSC_CHECKPOINT: &str = "runsc alone: checkpoint, of 256 MiB";
const QEMU_BOOT: &str = "QEMU alone: boot until the guest speaks";
const QEMU_SAVE: &str = "QEMU alone: save, of 256 MiB";
pub(super) const VM: Names = names!("vm", "QEMU alone: restore until the guest answers");

pub(super) async fn measure(bench: &Bench) -> Result<(Vec<Measurement>, Vec<Figure>)> {
    let (mut measured, mut figures) = (Vec::new(), Vec::new());
    for (kind, names) in [
        (Choice::Container, &CONTAINER),
        (Choice::Gvisor, &GVISOR),
        (Choice::Vm, &VM),
    ] {
        // Also what is made once for each template.
        match bench.agent_of(kind, SMALL).await {
            Ok(agent) => bench.delete(&agent.name).await?,
            Err(why) => {
                measured.push(Measurement::skipped(names.create, format!("{why:#}")));
                continue;
            }
        }
        let one = Of { bench, kind, names };
        let (times, sizes) = one.measure().await?;
        measured.extend(times);
        figures.extend(sizes);
    }
    Ok((measured, figures))
}

/// What a bare engine took.
struct Alone {
    restored: Duration,
    /// To write an image, where that is measured.
    written: Option<Duration>,
}

struct Of<'a> {
    bench: &'a Bench,
    kind: Choice,
    names: &'a Names,
}

impl Of<'_> {
    fn runs(&self) -> u32 {
        self.bench.slow_runs().min(MOST)
    }

    async fn measure(&self) -> Result<(Vec<Measurement>, Vec<Figure>)> {
        let (bench, names) = (self.bench, self.names);
        let mut samples = Samples::new()?;
        for _ in 0..self.runs() {
            let begun = Instant::now();
            let agent = bench.agent_of(self.kind, SMALL).await?;
            exec::run_true(&bench.client.guest(&agent.name, Some("root"))).await?;
            samples.add(begun.elapsed())?;
            bench.delete(&agent.name).await?;
        }
        let mut measured = vec![Measurement::new(names.create, &samples, None)];
        if self.kind == Choice::Gvisor {
            measured.push(self.run_alone().await?);
        }
        let mut figures = Vec::new();
        for (n, memory) in [SMALL, LARGE].into_iter().enumerate() {
            let agent = bench.agent_of(self.kind, memory).await?;
            if let Some(why) = load::missing(bench, &agent.name).await? {
                bench.delete(&agent.name).await?;
                return Ok((vec![Measurement::skipped(names.create, why)], Vec::new()));
            }
            if n == 0 {
                figures.extend(self.weigh(&agent).await?);
            }
            load::hold(bench, &agent.name, HELD).await?;
            if n == 0 {
                measured.extend(self.awake(&agent).await?);
            }
            measured.extend(self.wake(&agent, n).await?);
            if n == 0 {
                bench.ask(&agent.name, "/hibernate").await?;
                figures.push(Figure::mib(names.size, self.on_disk(&agent).await?));
                if self.kind == Choice::Vm {
                    measured.push(self.boot_alone(&agent).await?);
                }
            }
            bench.delete(&agent.name).await?;
        }
        Ok((measured, figures))
    }

    /// All that is its own there: a machine's memory is among its files, and other memory is in the image.
    async fn on_disk(&self, agent: &Agent) -> Result<f64> {
        let all: Vec<Agent> = self.bench.client.get("/v1/agents?usage=true").await?;
        let this = all.iter().find(|one| one.id == agent.id);
        let used = this.and_then(|this| this.disk_used);
        Ok(used.context("cannot tell what a hibernated agent has on disk")? as f64)
    }

    /// What an agent in which nothing runs takes.
    async fn weigh(&self, agent: &Agent) -> Result<Vec<Figure>> {
        let Ok(bare) = &self.bench.bare else {
            return Ok(Vec::new());
        };
        let running = bare.pss(&agent.id).context("cannot weigh a running agent")?;
        self.bench.ask(&agent.name, "/pause").await?;
        let standing_by = bare.pss(&agent.id).context("cannot weigh an agent in standby")?;
        self.bench.ask(&agent.name, "/wake").await?;
        Ok(vec![
            Figure::mib(self.names.running, running as f64),
            Figure::mib(self.names.standing_by, standing_by as f64),
        ])
    }

    /// What does not lead over the disk.
    async fn awake(&self, agent: &Agent) -> Result<Vec<Measurement>> {
        let (bench, names) = (self.bench, self.names);
        let guest = bench.client.guest(&agent.name, Some("root"));
        let [mut run, mut standby, mut taken, mut forked] =
            [Samples::new()?, Samples::new()?, Samples::new()?, Samples::new()?];
        let (bare, mut dumped) = (self.dumps_alone(), Samples::new()?);
        for round in 0..=self.runs() {
            let begun = Instant::now();
            exec::run_true(&guest).await?;
            let ran = begun.elapsed();
            bench.ask(&agent.name, "/pause").await?;
            let begun = Instant::now();
            exec::run_true(&guest).await?;
            let woke = begun.elapsed();
            let begun = Instant::now();
            let kept = snapshot::take(bench, agent, false).await?;
            let snapshot = begun.elapsed();
            snapshot::forget(bench, agent, &kept).await?;
            let fork = self.fork(agent).await?;
            let dump = match &bare {
                Some(Ok(bare)) => Some(snapshot::dump_alone(bench, bare, agent).await?),
                _ => None,
            };
            // The first round fills caches.
            if round > 0 {
                run.add(ran)?;
                standby.add(woke)?;
                taken.add(snapshot)?;
                forked.add(fork)?;
                if let Some(took) = dump {
                    dumped.add(took)?;
                }
            }
        }
        let mut measured = vec![
            Measurement::new(names.exec, &run, None),
            Measurement::new(names.standby, &standby, None),
            Measurement::new(names.snapshot, &taken, None),
        ];
        measured.extend(bare.map(|bare| match bare {
            Ok(_) => Measurement::new(CRIU_DUMP, &dumped, None),
            Err(why) => Measurement::skipped(CRIU_DUMP, why),
        }));
        measured.push(Measurement::new(names.fork, &forked, None));
        Ok(measured)
    }

    /// By which a running agent's memory can be written with nothing of dorm around it; the others write it only where they have brought it
    /// back. The error says why it cannot.
    fn dumps_alone(&self) -> Option<Result<Bare, String>> {
        let usable = || {
            self.bench
                .bare
                .clone()
                .and_then(|bare| bare.has_criu().map(|()| bare))
        };
        (self.kind == Choice::Container).then(usable)
    }

    async fn fork(&self, agent: &Agent) -> Result<Duration> {
        let name = self.bench.new_name();
        let request = Fork {
            name: name.clone(),
            count: None,
            from: None,
            files_only: false,
            start: true,
        };
        let begun = Instant::now();
        let path = agent_path(&agent.name, "/fork");
        let _: Vec<Agent> = self.bench.have_made(&path, &request).await?;
        let took = begun.elapsed();
        self.bench.delete(&name).await?;
        Ok(took)
    }

    /// To disk and back, beside what brings it back by itself.
    async fn wake(&self, agent: &Agent, n: usize) -> Result<Vec<Measurement>> {
        let bench = self.bench;
        let (mut woken, mut alone, mut written) = (Samples::new()?, Samples::new()?, Samples::new()?);
        let mut why = None;
        for round in 0..=self.runs() {
            bench.ask(&agent.name, "/hibernate").await?;
            let restored = self.restored_alone(agent).await?;
            let begun = Instant::now();
            bench.ask(&agent.name, "/wake").await?;
            let woke = begun.elapsed();
            if round > 0 {
                woken.add(woke)?;
                match restored {
                    Ok(took) => {
                        alone.add(took.restored)?;
                        if let Some(took) = took.written {
                            written.add(took)?;
                        }
                    }
                    Err(reason) => why = Some(reason),
                }
            }
        }
        load::still_held(bench, &agent.name).await?;
        let writes = match self.kind {
            Choice::Gvisor if n == 0 => Some(RUNSC_CHECKPOINT),
            Choice::Vm if n == 0 => Some(QEMU_SAVE),
            _ => None,
        };
        let mut measured = vec![Measurement::new(self.names.wake[n], &woken, None)];
        match why {
            Some(why) => measured.push(Measurement::skipped(self.names.alone[n], why)),
            None => {
                measured.push(Measurement::new(self.names.alone[n], &alone, None));
                measured.extend(writes.map(|name| Measurement::new(name, &written, None)));
            }
        }
        Ok(measured)
    }

    fn runsc(&self) -> Result<BareRunsc, String> {
        BareRunsc::open(&self.bench.data, Path::new("/proc/self/exe"))
    }

    /// The same files under runsc and nothing else.
    async fn run_alone(&self) -> Result<Measurement> {
        let template = self
            .bench
            .data
            .join("pool/templates")
            .join(self.bench.template.id.as_str());
        let runsc = match (self.runsc(), template.join("bin").exists()) {
            (Ok(runsc), true) => runsc,
            (Ok(_), false) => {
                return Ok(Measurement::skipped(
                    RUNSC_RUN,
                    "the template is not on this machine",
                ));
            }
            (Err(why), _) => return Ok(Measurement::skipped(RUNSC_RUN, why)),
        };
        let mut samples = Samples::new()?;
        for round in 0..=self.runs() {
            match runsc.run(&template).await {
                Ok(took) if round > 0 => samples.add(took)?,
                Ok(_) => {}
                Err(why) => return Ok(Measurement::skipped(RUNSC_RUN, why.to_string())),
            }
        }
        Ok(Measurement::new(RUNSC_RUN, &samples, None))
    }

    /// A machine like that of `agent`, which is on disk.
    async fn boot_alone(&self, agent: &Agent) -> Result<Measurement> {
        let (qemu, bare) = match (BareQemu::open(&self.bench.data), self.bench.bare.clone()) {
            (Ok(qemu), Ok(bare)) => (qemu, bare),
            (Err(why), _) | (_, Err(why)) => return Ok(Measurement::skipped(QEMU_BOOT, why)),
        };
        let image = bare.image_of(&agent.id)?;
        let mut samples = Samples::new()?;
        for _ in 0..self.runs() {
            let (qemu, id, image) = (qemu.clone(), agent.id.clone(), image.clone());
            let booted = async move {
                let booted = qemu.boot(&id, &image).await;
                booted.map_err(EngineError::io("QEMU alone cannot boot it"))
            };
            match self.bench.unbroken(booted).await {
                Ok(took) => samples.add(took)?,
                Err(why) => return Ok(Measurement::skipped(QEMU_BOOT, format!("{why:#}"))),
            }
        }
        Ok(Measurement::new(QEMU_BOOT, &samples, None))
    }

    /// The inner error says why there is nothing to compare with.
    async fn restored_alone(&self, agent: &Agent) -> Result<Result<Alone, String>> {
        let bare = match &self.bench.bare {
            Ok(bare) => bare.clone(),
            Err(why) => return Ok(Err(why.clone())),
        };
        let (image, id) = (bare.image_of(&agent.id)?, agent.id.clone());
        let restored = match self.kind {
            Choice::Container => {
                if let Err(why) = bare.has_criu() {
                    return Ok(Err(why));
                }
                let restored = async move { bare.restore(&id, &image).await };
                let restored = self.bench.unbroken(restored).await;
                restored.map(|restored| (restored, None))
            }
            Choice::Vm => {
                let qemu = match BareQemu::open(&self.bench.data) {
                    Ok(qemu) => qemu,
                    Err(why) => return Ok(Err(why)),
                };
                let restored = async move {
                    let restored = qemu.restore(&id, &image).await;
                    restored.map_err(EngineError::io("QEMU alone cannot bring it back"))
                };
                let restored = self.bench.unbroken(restored).await;
                restored.map(|(restored, written)| (restored, Some(written)))
            }
            Choice::Gvisor => {
                let runsc = match self.runsc() {
                    Ok(runsc) => runsc,
                    Err(why) => return Ok(Err(why)),
                };
                let memory = agent.memory;
                let restored = async move {
                    let restored = runsc.restore(&id, &image, memory).await;
                    restored.map_err(EngineError::io("runsc alone cannot bring it back"))
                };
                let restored = self.bench.unbroken(restored).await;
                restored.map(|(restored, written)| (restored, Some(written)))
            }
            Choice::Auto => return Ok(Err("it is no isolation of its own".to_owned())),
        };
        // What could not be measured spoils nothing else.
        Ok(match restored {
            Ok((restored, written)) => Ok(Alone { restored, written }),
            Err(why) => Err(format!("{why:#}")),
        })
    }
}
