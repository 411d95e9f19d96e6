//! One act of the crash matrix: what it begins with, and what must be there after the crash.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use dorm_server::faults::Point;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use super::{Act, Stage};
use crate::harness::{self, Agent, Server};

pub(super) struct Scene<'a> {
    server: &'a Arc<Server>,
    keeper: &'a Agent,
    passing: Option<Agent>,
    /// What is in the file, and in the keeper's memory.
    word: String,
}

const COPY: &str = "copy";
/// As several copies are called.
const SEVERAL: [&str; 2] = ["copy-1", "copy-2"];
/// What is in both after the snapshot that is gone back to.
const NEWER: &str = "newer";

/// How the agent rests when the act begins.
#[derive(PartialEq)]
enum Rest {
    Running,
    Standby,
    /// In standby.
    Durable,
    Hibernated,
    Stopped,
}

impl Act {
    fn begins(self) -> Rest {
        match self {
            Self::Thaw | Self::StopAsleep | Self::HibernateAsleep | Self::SnapshotAsleep | Self::RollBackAsleep => {
                Rest::Standby
            }
            Self::HibernateDurable | Self::RollBackDurable | Self::SettleDurable | Self::DeleteDurable => Rest::Durable,
            Self::Wake
            | Self::WakeInVain
            | Self::SnapshotHibernated
            | Self::RollBackHibernated
            | Self::DeleteHibernated => Rest::Hibernated,
            Self::Start => Rest::Stopped,
            Self::Create
            | Self::CreateEphemeral
            | Self::Stop
            | Self::Settle
            | Self::SettleEphemeral
            | Self::Delete
            | Self::Pause
            | Self::MakeDurable
            | Self::Hibernate
            | Self::Snapshot
            | Self::DeleteSnapshot
            | Self::Fork
            | Self::ForkFiles
            | Self::ForkPast
            | Self::ForkSeveral
            | Self::RollBack
            | Self::RollBackToFiles
            | Self::KeepPresent
            | Self::PutAway
            | Self::GoOn
            | Self::Convert => Rest::Running,
        }
    }

    fn is_rollback(self) -> bool {
        use Act::{KeepPresent, RollBack, RollBackAsleep, RollBackDurable, RollBackHibernated, RollBackToFiles};
        matches!(
            self,
            RollBack | KeepPresent | RollBackAsleep | RollBackDurable | RollBackHibernated | RollBackToFiles
        )
    }

    fn is_deletion(self) -> bool {
        matches!(self, Self::Delete | Self::DeleteDurable | Self::DeleteHibernated)
    }
}

impl<'a> Scene<'a> {
    pub(super) fn prepare(stage: &'a Stage, act: Act, word: String) -> Result<Self> {
        let server = &stage.server;
        let passing = match act {
            Act::Start
            | Act::Stop
            | Act::StopAsleep
            | Act::Settle
            | Act::Delete
            | Act::DeleteDurable
            | Act::DeleteHibernated
            | Act::WakeInVain => Some(server.agent("passing")?),
            Act::SettleEphemeral => Some(server.agent_with("passing", &["--ephemeral"])?),
            // Its memory is lost.
            Act::RollBackToFiles => {
                let passing = server.agent("passing")?;
                super::keep(&passing)?;
                Some(passing)
            }
            Act::Convert => Some(server.agent_with("passing", &["-T", "small", "--memory", "256M", "--cpus", "1"])?),
            _ => None,
        };
        let scene = Scene { server, keeper: &stage.keeper, passing, word };
        let agent = scene.agent();
        if !matches!(act, Act::Create | Act::CreateEphemeral) {
            // A box that is given another isolation is stopped in order, and its small template has no `sync`.
            let sync = if act == Act::Convert { "" } else { "; sync" };
            agent.sh(&format!("echo {} > ~/file{sync}", scene.word))?.succeeded()?;
        }
        if scene.passing.is_none() || act == Act::RollBackToFiles {
            scene.tell(&scene.word)?;
        }
        let goes_back = act.is_rollback() || act == Act::ForkPast;
        if goes_back || act.is_deletion() || act == Act::DeleteSnapshot {
            scene.snapshot(act == Act::RollBackToFiles)?;
        }
        if goes_back {
            scene.tell(NEWER)?;
            agent.sh(&format!("echo {NEWER} > ~/file"))?.succeeded()?;
        }
        match act.begins() {
            Rest::Running => {}
            Rest::Stopped => agent.stop()?,
            Rest::Standby | Rest::Durable => {
                // What is recorded later must be recorded, and not that of an earlier sleep.
                scene.recorded("running")?;
                agent.pause()?;
                scene.recorded("standby")?;
            }
            Rest::Hibernated => agent.hibernate()?,
        }
        if act == Act::WakeInVain {
            scene.damage()?;
        }
        scene.ready(act)?;
        Ok(scene)
    }

    /// Waits for what comes by itself before the act, whichever daemon there is.
    pub(super) fn ready(&self, act: Act) -> Result<()> {
        if act.begins() != Rest::Durable {
            return Ok(());
        }
        harness::eventually("it is durable", || {
            let shown = self.agent().show()?;
            ensure!(shown["state"] == "standby", "it is {shown}");
            Ok((shown["durable"] == true).then_some(()))
        })
    }

    pub(super) fn agent(&self) -> &Agent {
        self.passing.as_ref().unwrap_or(self.keeper)
    }

    fn call(&self, method: &str, rest: &str, body: &Value) -> Result<harness::Reply> {
        let body = if body.is_null() { Vec::new() } else { body.to_string().into_bytes() };
        self.server.http(method, &format!("/v1/agents{rest}"), &body)
    }

    pub(super) fn drive(&self, act: Act, pid: Option<i32>) -> Result<()> {
        let name = &self.agent().name;
        let post = |verb: &str, body: Value| self.call("POST", &format!("/{name}/{verb}"), &body);
        match act {
            Act::Create => self.call("POST", "", &json!({ "name": COPY }))?,
            Act::CreateEphemeral => self.call("POST", "", &json!({ "name": COPY, "lifetime": "ephemeral" }))?,
            Act::Start => post("start", Value::Null)?,
            Act::Stop | Act::StopAsleep => post("stop", json!({ "grace": 0.1 }))?,
            Act::Settle | Act::SettleEphemeral | Act::SettleDurable => {
                let pid = pid.and_then(Pid::from_raw).context("a running agent has a pid")?;
                kill_process(pid, Signal::KILL)?;
                // It may have to move to die.
                self.server.remains.thaw(&self.agent().id);
                return Ok(());
            }
            Act::PutAway => {
                let daemon = Pid::from_raw(self.server.pid()?).context("a daemon has a pid")?;
                return Ok(kill_process(daemon, Signal::TERM)?);
            }
            Act::GoOn => return Ok(()),
            Act::Delete | Act::DeleteDurable | Act::DeleteHibernated => self.call("DELETE", &format!("/{name}"), &Value::Null)?,
            Act::Pause | Act::MakeDurable => post("pause", Value::Null)?,
            Act::Thaw | Act::Wake | Act::WakeInVain => post("wake", Value::Null)?,
            Act::Hibernate | Act::HibernateAsleep | Act::HibernateDurable => post("hibernate", Value::Null)?,
            Act::Snapshot | Act::SnapshotAsleep | Act::SnapshotHibernated => post("snapshots", json!({ "label": "kept" }))?,
            Act::DeleteSnapshot => {
                let id = self.snapshot_of("old")?.context("there is no snapshot")?;
                self.call("DELETE", &format!("/{name}/snapshots/{id}"), &Value::Null)?
            }
            Act::Fork => post("fork", json!({ "name": COPY }))?,
            Act::ForkFiles => post("fork", json!({ "name": COPY, "files_only": true }))?,
            Act::ForkPast => post("fork", json!({ "name": COPY, "from": "old" }))?,
            Act::ForkSeveral => post("fork", json!({ "name": COPY, "count": SEVERAL.len() }))?,
            Act::RollBack
            | Act::KeepPresent
            | Act::RollBackAsleep
            | Act::RollBackDurable
            | Act::RollBackHibernated
            | Act::RollBackToFiles => post("rollback", json!({ "snapshot": "old" }))?,
            Act::Convert => self.call("PATCH", &format!("/{name}"), &json!({ "isolation": other_isolation() }))?,
        };
        Ok(())
    }

    pub(super) fn verify(&self, act: Act, point: Point) -> Result<()> {
        if matches!(act, Act::PutAway | Act::GoOn) {
            self.agent().becomes("running").context("nobody brings it back")?;
        }
        let state = self.state(&self.agent().name)?;
        let expected = match (act, point) {
            (Act::Delete | Act::DeleteDurable | Act::DeleteHibernated | Act::SettleEphemeral, _) => None,
            (Act::Start, Point::StartFinished) => Some("running"),
            (Act::Start | Act::Stop | Act::StopAsleep | Act::Settle, _) => Some("stopped"),
            (Act::Pause, Point::FreezeRecorded) => Some("standby"),
            (Act::Pause, _) => Some("running"),
            (Act::Thaw, Point::ThawRecorded) => Some("running"),
            (Act::Thaw | Act::MakeDurable | Act::SnapshotAsleep, _) => Some("standby"),
            (
                Act::Hibernate
                | Act::HibernateAsleep
                | Act::HibernateDurable
                | Act::SettleDurable
                | Act::SnapshotHibernated,
                _,
            ) => Some("hibernated"),
            (Act::Wake, Point::StartRecorded | Point::WakeBegun) => Some("hibernated"),
            // It may have gone on.
            (Act::Wake, _) | (Act::RollBack, Point::StartBoxUp | Point::WakeRestored) => Some("running"),
            (Act::WakeInVain, Point::WakeSetAside) => Some("stopped"),
            (Act::WakeInVain, _) => Some("hibernated"),
            // Nothing has become of the rollback.
            (Act::KeepPresent, _) => Some("running"),
            (Act::RollBackAsleep, Point::SnapshotImageMade) => Some("standby"),
            (Act::RollBackDurable, Point::SnapshotHomeKept) => Some("standby"),
            (Act::RollBackHibernated, Point::SnapshotImageMade) => Some("hibernated"),
            (Act::RollBack, Point::RollBackFinished) => Some("hibernated"),
            // Finished as a stop: what it was is in a snapshot.
            (
                Act::RollBack
                | Act::RollBackAsleep
                | Act::RollBackDurable
                | Act::RollBackHibernated
                | Act::RollBackToFiles,
                _,
            ) => Some("stopped"),
            (Act::Convert, _) => Some("stopped"),
            (Act::Create | Act::CreateEphemeral | Act::Snapshot | Act::DeleteSnapshot, _) => Some("running"),
            (Act::Fork | Act::ForkFiles | Act::ForkPast | Act::ForkSeveral, _) => Some("running"),
            (Act::PutAway | Act::GoOn, _) => Some("running"),
        };
        ensure!(state.as_deref() == expected, "it is {state:?} and not {expected:?}: {:?}", self.server.agents());
        if expected == Some("stopped") {
            self.has_no_memory()?;
        }
        match act {
            Act::Create | Act::CreateEphemeral => self.verify_created(act, point),
            Act::Delete | Act::DeleteDurable | Act::DeleteHibernated | Act::SettleEphemeral => {
                let left = self.server.remains.of_agent(&self.agent().id);
                ensure!(left.is_empty(), "{left:?}");
                Ok(())
            }
            Act::Start | Act::Stop | Act::StopAsleep | Act::Settle => has_file(self.agent(), &self.word),
            Act::WakeInVain => self.verify_loss(),
            Act::RollBack
            | Act::KeepPresent
            | Act::RollBackAsleep
            | Act::RollBackDurable
            | Act::RollBackHibernated
            | Act::RollBackToFiles => self.verify_rollback(act, point, expected != Some("stopped")),
            Act::Convert => {
                let moved = matches!(point, Point::ConvertMoved | Point::ConvertFinished);
                let shown = self.agent().show()?;
                let expected = if moved { other_isolation().to_owned() } else { isolation() };
                ensure!(shown["isolation"] == expected, "{shown}");
                has_file(self.agent(), &self.word)
            }
            Act::Pause
            | Act::Thaw
            | Act::MakeDurable
            | Act::Hibernate
            | Act::HibernateAsleep
            | Act::HibernateDurable
            | Act::SettleDurable
            | Act::PutAway
            | Act::GoOn
            | Act::Wake => has_all(self.agent(), &self.word),
            Act::Snapshot | Act::SnapshotAsleep | Act::SnapshotHibernated | Act::DeleteSnapshot => {
                let there = self.snapshot_of(if act == Act::DeleteSnapshot { "old" } else { "kept" })?;
                ensure!(there.is_some() == (point == Point::SnapshotRecorded), "the snapshot is {there:?}");
                has_all(self.agent(), &self.word)?;
                if let Some(id) = there {
                    self.tell(NEWER)?;
                    self.goes_back_to(&id, &self.word, true)?;
                }
                self.forget_snapshots()
            }
            Act::Fork | Act::ForkFiles | Act::ForkPast => self.verify_fork(act, point),
            Act::ForkSeveral => self.verify_forks(point),
        }
    }

    /// On disk, but for that of snapshots, and what was set aside.
    fn has_no_memory(&self) -> Result<()> {
        let snapshots = self.server.snapshots(&self.agent().name)?;
        harness::eventually("its memory is given up", || {
            let images = self.server.remains.images().remove(&self.agent().id).unwrap_or_default();
            let is_own = |image: &String| !image.ends_with(".bad") && snapshots.iter().all(|one| one["id"] != **image);
            Ok((!images.iter().any(is_own)).then_some(()))
        })
    }

    fn verify_created(&self, act: Act, point: Point) -> Result<()> {
        let there = self.state(COPY)?;
        let legal = point == Point::CreateRecorded && act == Act::Create;
        ensure!(there.as_deref() == legal.then_some("stopped"), "it is {there:?}");
        if there.is_some() {
            let made = self.server.adopt(COPY)?;
            ensure!(made.sh_text("hostname")? == COPY);
        }
        self.server.dorm(&["new", COPY, "--no-start"])?.succeeded().context("the name cannot be used again")?;
        self.server.adopt(COPY).map(drop)
    }

    /// Aloud: its memory is lost, its files are not.
    fn verify_loss(&self) -> Result<()> {
        has_file(self.agent(), &self.word)?;
        let events = self.agent().events()?;
        let told = events.iter().any(|event| event["reason"].as_str().is_some_and(|why| why.contains("memory is lost")));
        ensure!(told, "{events:?}");
        let images = self.server.remains.images();
        let aside = images.get(&self.agent().id).is_some_and(|of| of.iter().any(|name| name.ends_with(".bad")));
        ensure!(aside, "the image was not set aside: {images:?}");
        Ok(())
    }

    fn verify_fork(&self, act: Act, point: Point) -> Result<()> {
        let copy = self.state(COPY)?;
        let expected = match (act, point) {
            (Act::ForkFiles, Point::ForkRecorded | Point::StartBoxUp) => Some("stopped"),
            (_, Point::ForkRecorded) => Some("hibernated"),
            (_, Point::WakeRestored | Point::StartBoxUp | Point::ForkMade) => Some("running"),
            _ => None,
        };
        ensure!(copy.as_deref() == expected, "the fork is {copy:?}");
        if copy.is_some() {
            let copy = self.server.adopt(COPY)?;
            is_itself(&copy)?;
            match act {
                Act::ForkFiles => has_file_alone(&copy, &self.word)?,
                _ => has_all(&copy, &self.word)?,
            }
        }
        if act != Act::ForkPast {
            return has_all(self.agent(), &self.word);
        }
        has_all(self.agent(), NEWER)?;
        self.goes_back_to("old", &self.word, true)?;
        self.forget_snapshots()
    }

    /// The others of those that died with the daemon may be whole, or not there at all.
    fn verify_forks(&self, point: Point) -> Result<()> {
        let states = SEVERAL.map(|name| self.state(name));
        let [first, second] = states;
        let states = [first?, second?];
        let all = |may: &[Option<&str>]| states.iter().all(|state| may.contains(&state.as_deref()));
        let some = |state: &str| states.iter().any(|found| found.as_deref() == Some(state));
        let legal = match point {
            Point::ForkRecorded => all(&[None, Some("hibernated")]) && some("hibernated"),
            Point::WakeRestored => all(&[None, Some("hibernated"), Some("running")]) && some("running"),
            _ => all(&[Some("running")]),
        };
        ensure!(legal, "the forks are {states:?}");
        for (name, _) in SEVERAL.iter().zip(&states).filter(|(_, state)| state.is_some()) {
            let copy = self.server.adopt(name)?;
            is_itself(&copy)?;
            has_all(&copy, &self.word)?;
        }
        has_all(self.agent(), &self.word)
    }

    /// The home is one of the two, as is the memory, if there is one. Both snapshots are whole, or the rollback has not begun.
    fn verify_rollback(&self, act: Act, point: Point, has_memory: bool) -> Result<()> {
        let begun = !matches!(
            point,
            Point::SnapshotFrozen
                | Point::SnapshotImageMade
                | Point::SnapshotHomeKept
                | Point::SnapshotSealed
                | Point::SnapshotRecorded
        );
        let newer = !begun || matches!(point, Point::RollBackRecorded | Point::RollBackStaged | Point::RollBackBoxGone);
        let word = if newer { NEWER } else { &self.word };
        match has_memory {
            true => has_all(self.agent(), word)?,
            false => has_file(self.agent(), word)?,
        }
        is_itself(self.agent())?;
        let all = self.server.snapshots(&self.agent().name)?;
        let label = |one: &&Value| one["label"].as_str().is_some_and(|label| label.starts_with("before the rollback"));
        let before = all.iter().find(label).and_then(|before| before["id"].as_str());
        let is_kept = begun || point == Point::SnapshotRecorded;
        ensure!(before.is_some() == is_kept, "what it was is in the snapshot {before:?}");
        if let Some(before) = before {
            self.goes_back_to(before, NEWER, true)?;
        }
        self.goes_back_to("old", &self.word, act != Act::RollBackToFiles)?;
        self.forget_snapshots()
    }

    fn goes_back_to(&self, snapshot: &str, word: &str, has_memory: bool) -> Result<()> {
        let path = format!("/{}/rollback", self.agent().name);
        let back = self.call("POST", &path, &json!({ "snapshot": snapshot }))?;
        ensure!(back.status == 200, "{}", back.text());
        let has = if has_memory { has_all } else { has_file_alone };
        has(self.agent(), word).with_context(|| format!("back at {snapshot}"))
    }

    fn tell(&self, word: &str) -> Result<()> {
        let heard = ask(self.agent(), word)?;
        ensure!(heard == word, "the keeper heard {heard}");
        Ok(())
    }

    fn state(&self, name: &str) -> Result<Option<String>> {
        let agents = self.server.agents()?;
        let found = agents.iter().find(|agent| agent["name"] == name);
        Ok(found.and_then(|agent| agent["state"].as_str().map(str::to_owned)))
    }

    fn recorded(&self, state: &str) -> Result<()> {
        harness::eventually(&format!("{state} is recorded"), || {
            let events = self.agent().events()?;
            Ok(events.last().is_some_and(|last| last["to"] == state).then_some(()))
        })
    }

    fn snapshot(&self, files_only: bool) -> Result<()> {
        let path = format!("/{}/snapshots", self.agent().name);
        let taken = self.call("POST", &path, &json!({ "label": "old", "files_only": files_only }))?;
        ensure!(taken.status < 300, "{}", taken.text());
        Ok(())
    }

    fn snapshot_of(&self, label: &str) -> Result<Option<String>> {
        let all = self.server.snapshots(&self.agent().name)?;
        let found = all.iter().find(|one| one["label"] == label);
        Ok(found.and_then(|one| one["id"].as_str().map(str::to_owned)))
    }

    fn forget_snapshots(&self) -> Result<()> {
        let name = &self.agent().name;
        for snapshot in self.server.snapshots(name)? {
            let id = snapshot["id"].as_str().context("a snapshot has an id")?;
            self.call("DELETE", &format!("/{name}/snapshots/{id}"), &Value::Null)?;
        }
        Ok(())
    }

    /// One bit of the image is not what it was.
    fn damage(&self) -> Result<()> {
        let images = self.server.data.join("images").join(&self.agent().id);
        let image = fs::read_dir(images)?.next().context("no image")??.path();
        // Pages of its memory, or the state of its devices.
        let mut largest = (0, PathBuf::new());
        for entry in fs::read_dir(&image)? {
            let entry = entry?;
            largest = largest.max((entry.metadata()?.len(), entry.path()));
        }
        let mut bytes = fs::read(&largest.1).with_context(|| format!("nothing in {}", image.display()))?;
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        Ok(fs::write(&largest.1, bytes)?)
    }
}

/// What agents of this run have unless they are told otherwise.
fn isolation() -> String {
    harness::engines::isolation().unwrap_or_else(|| "container".to_owned())
}

/// One for which a home has another form.
fn other_isolation() -> &'static str {
    if isolation() == "vm" { "container" } else { "vm" }
}

/// A file of the home, in which nothing is left that a memory image needed.
fn has_file(agent: &Agent, word: &str) -> Result<()> {
    // They go when a thaw is recorded.
    let found = harness::eventually("the names that CRIU made are gone", || {
        let found = agent.sh_text("cat ~/file; for name in ~/link_remap.*; do test ! -e $name || echo $name; done")?;
        Ok((!found.contains("link_remap")).then_some(found))
    })?;
    ensure!(found == word, "the file of {} holds {found} and not {word}", agent.name);
    Ok(())
}

/// And nothing in its memory.
fn has_file_alone(agent: &Agent, word: &str) -> Result<()> {
    has_file(agent, word)?;
    let found = ask(agent, "")?;
    ensure!(found == "nothing", "{} has the memory of {found}", agent.name);
    Ok(())
}

fn has_all(agent: &Agent, word: &str) -> Result<()> {
    let found = ask(agent, "")?;
    ensure!(found == word, "the memory of {} holds {found} and not {word}", agent.name);
    has_file(agent, word)
}

/// Whosever memory it came back with.
fn is_itself(agent: &Agent) -> Result<()> {
    let told = agent.sh_text("hostname; echo $DORM_AGENT_ID; cat /run/dorm/agent-id")?;
    let told: Vec<&str> = told.split_whitespace().collect();
    ensure!(told == [&agent.name, &agent.id, &agent.id], "{} is told that it is {told:?}", agent.name);
    Ok(())
}

/// What the keeper holds, after `new` has taken its place, unless that is empty.
fn ask(agent: &Agent, new: &str) -> Result<String> {
    let script = format!("test -p /dev/shm/in || {{ echo nothing; exit; }}; echo '{new}' > /dev/shm/in; cat /dev/shm/out");
    agent.sh_text(&script)
}
