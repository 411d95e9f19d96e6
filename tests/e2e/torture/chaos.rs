//! The rounds: a few operations at once, sometimes the end of the daemon in the middle of them, and a look at everything.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use dorm_server::faults::Point;

use crate::client::Answer;
use crate::harness::{Options, Server, World, orphans};
use crate::inspect;
use crate::model::{Agent, Kept};
use crate::operation::{News, Operation, absorb, perform, perhaps_rolled_back};
use crate::plan;
use crate::random::Random;

/// Agents go to sleep by themselves soon, so that this happens too.
const CONFIG: &str =
    "[standby]\nafter = 1.5\ndurable_after = 0.5\nhibernate_after = 3\n[defaults]\nmemory = \"256M\"\n";
const AT_ONCE: u64 = 4;
/// Longest delay before a kill: within the time that most operations take.
const WITHIN_MS: u64 = 350;

#[derive(Debug, Clone, Copy, PartialEq)]
enum Blow {
    None,
    /// `kill -9`, after so many milliseconds.
    Kill(u64),
    /// The daemon is started with this fault, and dies when it gets there.
    Arm(Point),
    Reboot,
    Orderly,
}

pub(crate) struct Torture {
    server: Arc<Server>,
    random: Random,
    agents: BTreeMap<String, Agent>,
    most: usize,
    names: u32,
    armed: Option<Point>,
    log: Vec<String>,
    file: File,
    verbose: bool,
    began: Instant,
    operations: u32,
    blows: BTreeMap<&'static str, u32>,
}

impl Torture {
    pub(crate) fn begin(seed: u64, most: usize, verbose: bool) -> Result<Self> {
        let server = Server::start_with(&Options {
            hibernate_boxes: true,
            config: CONFIG,
            ..Options::default()
        })?;
        Ok(Self {
            server,
            random: Random::new(seed),
            agents: BTreeMap::new(),
            most,
            names: 0,
            armed: None,
            log: Vec::new(),
            file: File::create(World::get().root.join("operations.log"))?,
            verbose,
            began: Instant::now(),
            operations: 0,
            blows: BTreeMap::new(),
        })
    }

    pub(crate) fn run(&mut self, time: Duration) -> Result<()> {
        let mut told = Instant::now();
        while self.began.elapsed() < time {
            self.round()?;
            if told.elapsed() > Duration::from_secs(20) {
                told = Instant::now();
                eprintln!("{}", self.summary());
            }
        }
        Ok(())
    }

    fn summary(&self) -> String {
        let seconds = self.began.elapsed().as_secs();
        let blows: Vec<_> = self
            .blows
            .iter()
            .map(|(what, count)| format!("{count} {what}"))
            .collect();
        let agents = self.agents.len();
        format!(
            "{seconds} s: {} operations, {agents} agents; {}",
            self.operations,
            blows.join(", ")
        )
    }

    /// Everything once more, then everything away.
    pub(crate) fn end(&mut self) -> Result<String> {
        if self.armed.take().is_some() {
            self.server.kill9()?;
            self.launch(None)?;
        }
        let names: Vec<String> = self.agents.keys().cloned().collect();
        let last = |agent: &Agent| {
            if agent.must_stop {
                Operation::Stop
            } else {
                Operation::Look
            }
        };
        let looks = names
            .iter()
            .map(|name| (name.clone(), last(&self.agents[name])))
            .collect();
        self.together(looks, Blow::None)?;
        inspect::settled(&self.server, &self.agents)?;
        for name in names {
            self.together(vec![(name, Operation::Delete)], Blow::None)?;
        }
        let code = self.server.sigterm()?;
        ensure!(code == 0, "the daemon left with {code}");
        let mut left = self.server.remains.of_daemon()?;
        left.extend(orphans());
        ensure!(left.is_empty(), "left behind: {left:?}");
        Ok(self.summary())
    }

    pub(crate) fn report(&self) -> String {
        let last = self.log.len().saturating_sub(25);
        format!(
            "{}\nthe last operations:\n{}",
            self.summary(),
            self.log[last..].join("\n")
        )
    }

    fn note(&mut self, line: String) {
        let line = format!("{:8.2} {line}", self.began.elapsed().as_secs_f64());
        if self.verbose {
            eprintln!("{line}");
        }
        // A log that cannot be written must not hide what is found.
        let _ = writeln!(self.file, "{line}");
        self.log.push(line);
    }

    fn round(&mut self) -> Result<()> {
        let mut names: Vec<String> = self.agents.keys().cloned().collect();
        let mut batch = Vec::new();
        for _ in 0..1 + self.random.below(AT_ONCE) {
            if names.is_empty() || self.agents.len() + batch.len() < self.most && self.random.once_in(4) {
                self.names += 1;
                batch.push((format!("a{}", self.names), Operation::New));
                continue;
            }
            let name = names.swap_remove(self.random.below(names.len() as u64) as usize);
            let crowded = self.agents.len() >= self.most;
            let agent = self.agents.get_mut(&name).context("a known agent")?;
            let operation = plan::operation(&mut self.random, agent, &mut self.names, crowded);
            batch.push((name, operation));
        }
        let blow = self.blow();
        self.together(batch, blow)
    }

    fn blow(&mut self) -> Blow {
        match self.random.below(100) {
            0..20 => Blow::Kill(self.random.below(WITHIN_MS)),
            20..38 => match self.random.pick(&Point::ALL) {
                Some(point) => Blow::Arm(*point),
                None => Blow::None,
            },
            38..42 => Blow::Reboot,
            42..45 => Blow::Orderly,
            _ => Blow::None,
        }
    }

    fn together(&mut self, batch: Vec<(String, Operation)>, blow: Blow) -> Result<()> {
        if let Blow::Arm(point) = blow {
            self.note(format!("killed, and started again to die at {}", point.name()));
            self.server.kill9()?;
            self.launch(Some(point))?;
        }
        let server = Arc::clone(&self.server);
        let (answers, killed) = std::thread::scope(|scope| {
            let all: Vec<_> = batch
                .iter()
                .map(|(name, operation)| scope.spawn(|| perform(&server, name, operation)))
                .collect();
            let killed = match blow {
                Blow::Kill(after) => {
                    std::thread::sleep(Duration::from_millis(after));
                    server.kill9().map(|()| true)
                }
                _ => Ok(false),
            };
            let answers: Vec<Answer> = all
                .into_iter()
                .map(|thread| thread.join().expect("an operation does not panic"))
                .collect();
            (answers, killed)
        });
        let killed = killed?;
        let lost = answers.iter().any(|answer| matches!(answer, Answer::Lost(_)));
        let struck = self.armed.filter(|_| !killed && self.dies(lost));
        if let Some(point) = struck {
            *self.blows.entry("faults").or_default() += 1;
            self.note(format!("died at {}", point.name()));
            self.server.kill9()?;
        }
        ensure!(!self.server.has_ended(), "the daemon ended by itself");
        let shaken = killed || struck.is_some();
        if shaken {
            self.armed = None;
        }
        let mut news = Vec::new();
        for ((name, operation), answer) in batch.into_iter().zip(answers) {
            self.operations += 1;
            self.note(format!("{name}: {operation:?}: {}", answer.in_words()));
            let mut nobody = Agent::new(String::new());
            let agent = self.agents.get_mut(&name).unwrap_or(&mut nobody);
            let found = absorb(agent, &name, &operation, &answer, shaken)
                .with_context(|| format!("{name}: {operation:?}"))?;
            news.push((name, operation, found));
        }
        match blow {
            Blow::Reboot | Blow::Orderly if struck.is_some() => {}
            Blow::Reboot => {
                *self.blows.entry("reboots").or_default() += 1;
                self.note("the machine goes down".to_owned());
                // Who is gone, or cannot be asked because a fault strikes just now, may have kept anything.
                let kept = |name: &String| inspect::kept(&self.server, name).unwrap_or(Kept::Unknown);
                let kept: BTreeMap<String, Kept> = self
                    .agents
                    .keys()
                    .map(|name| (name.clone(), kept(name)))
                    .collect();
                self.server.simulate_reboot()?;
                self.armed = None;
                for (name, agent) in &mut self.agents {
                    agent.rebooted(kept[name]);
                }
                let born = news.iter_mut().filter_map(|(_, _, news)| news.born());
                born.for_each(|agent| agent.rebooted(Kept::Unknown));
            }
            Blow::Orderly => {
                *self.blows.entry("orderly ends").or_default() += 1;
                self.note("the daemon is ended in order".to_owned());
                self.server.sigterm()?;
                self.armed = None;
            }
            Blow::Kill(after) => {
                *self.blows.entry("kills").or_default() += 1;
                self.note(format!("killed after {after} ms"));
            }
            Blow::Arm(_) | Blow::None => {}
        }
        if !self.server.runs() {
            self.launch(None)?;
        }
        if shaken || matches!(blow, Blow::Reboot | Blow::Orderly) {
            self.server.at_rest()?;
        }
        for (name, operation, found) in news {
            self.settle(&name, &operation, found)
                .with_context(|| format!("{name}: {operation:?}"))?;
        }
        if shaken || matches!(blow, Blow::Reboot | Blow::Orderly) {
            inspect::settled(&self.server, &self.agents)?;
        }
        Ok(())
    }

    /// Whether the fault has struck. An answer that is lost tells of it a moment before the process is gone.
    fn dies(&self, lost: bool) -> bool {
        let until = Instant::now() + Duration::from_secs(if lost { 10 } else { 0 });
        while !self.server.has_ended() {
            if Instant::now() >= until {
                return false;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        true
    }

    fn launch(&mut self, fault: Option<Point>) -> Result<()> {
        self.armed = fault;
        match fault {
            // It may strike while the daemon puts in order what the one before left.
            Some(point) => match self.server.launch(&[("DORM_FAULT", point.name())]) {
                Ok(()) => Ok(()),
                Err(_) => {
                    *self.blows.entry("faults").or_default() += 1;
                    self.note(format!("died at {} while it started", point.name()));
                    self.armed = None;
                    self.server.launch(&[])
                }
            },
            None => self.server.launch(&[]),
        }
    }

    /// Finds out what an operation did whose answer was lost.
    fn settle(&mut self, name: &str, operation: &Operation, news: News) -> Result<()> {
        match news {
            News::None => {}
            News::Gone => {
                self.agents.remove(name);
            }
            News::Born(name, agent) => {
                self.agents.insert(name, *agent);
            }
            News::PerhapsBorn(name, mut agent) => {
                if let Some(id) = inspect::id_of(&self.server, &name)? {
                    agent.id = id;
                    self.agents.insert(name, *agent);
                }
            }
            News::PerhapsGone => {
                if inspect::id_of(&self.server, name)?.is_none() {
                    self.agents.remove(name);
                }
            }
            News::PerhapsSnapshot(label) => {
                let agent = self.agents.get_mut(name).context("a known agent")?;
                inspect::adopt_snapshot(&self.server, name, agent, &label)?;
                if let Operation::RollBack { to } = operation {
                    perhaps_rolled_back(agent, to);
                }
            }
            News::PerhapsNoSnapshot(id) => {
                let agent = self.agents.get_mut(name).context("a known agent")?;
                if !self.server.snapshots(name)?.iter().any(|found| found["id"] == id) {
                    agent.snapshots.retain(|snapshot| snapshot.id != id);
                }
            }
        }
        Ok(())
    }
}
