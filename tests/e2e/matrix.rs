//! The crash matrix: at every declared fault point a real daemon dies, and the next one finds or makes order. What was
//! acknowledged is there, in files and in the memory of a process, and nothing else is.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use dorm_server::faults::Point;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::harness::{self, Agent, Options, Server};

harness::tests![
    every_declared_point_is_driven,
    a_daemon_that_dies_while_agents_come_and_go_leaves_all_or_nothing,
    a_daemon_that_dies_while_an_agent_goes_to_sleep_or_wakes_loses_nothing_of_it,
    a_daemon_that_dies_in_a_snapshot_or_a_fork_loses_nothing_and_leaves_nothing,
    a_daemon_that_dies_in_a_rollback_leaves_one_of_the_two_whole,
    a_daemon_that_dies_while_an_agent_gets_another_isolation_leaves_its_files_whole,
];

/// What passes through a point.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Act {
    Create,
    CreateEphemeral,
    Start,
    Stop,
    /// Out of standby.
    StopAsleep,
    Settle,
    Delete,
    Pause,
    Thaw,
    MakeDurable,
    Hibernate,
    Wake,
    /// With an image that cannot be used.
    WakeInVain,
    Snapshot,
    DeleteSnapshot,
    Fork,
    RollBack,
    /// From the isolation of this run to another.
    Convert,
}

/// The acts of each test.
const GROUPS: [&[Act]; 5] = [
    &[Act::Create, Act::CreateEphemeral, Act::Start, Act::Stop, Act::StopAsleep, Act::Settle, Act::Delete],
    &[Act::Pause, Act::Thaw, Act::Hibernate, Act::Wake, Act::WakeInVain],
    &[Act::MakeDurable, Act::Snapshot, Act::DeleteSnapshot, Act::Fork],
    &[Act::RollBack],
    &[Act::Convert],
];

/// Nothing goes to sleep by itself, but what sleeps is soon on disk too.
const DURABLE: &str = "[standby]\nafter = 0\ndurable_after = 0.1\nhibernate_after = 0\n";
const CALM: &str = "[standby]\nafter = 0\ndurable_after = 0\nhibernate_after = 0\n";

fn acts_of(point: Point) -> &'static [Act] {
    match point {
        Point::CreateHomeMade | Point::CreateRecorded => &[Act::Create, Act::CreateEphemeral],
        Point::StartRecorded | Point::StartBoxUp | Point::StartFinished => &[Act::Start, Act::Wake],
        Point::WakeBegun | Point::WakeRestored => &[Act::Wake],
        Point::WakeRefused | Point::WakeSetAside => &[Act::WakeInVain],
        Point::StopRecorded | Point::StopBoxGone | Point::StopFinished => &[Act::Stop],
        Point::StopThawed => &[Act::StopAsleep],
        Point::SettleRecorded | Point::SettleBoxGone => &[Act::Settle],
        Point::FreezeBegun | Point::FreezeFrozen | Point::FreezeRecorded => &[Act::Pause],
        Point::ThawBegun | Point::ThawThawed | Point::ThawRecorded => &[Act::Thaw],
        Point::ImageFrozen | Point::ImageMade | Point::ImageRecorded => &[Act::MakeDurable, Act::Hibernate],
        Point::HibernateRecorded
        | Point::HibernateImageRecorded
        | Point::HibernateBoxGone
        | Point::HibernateFinished => &[Act::Hibernate],
        Point::SnapshotFrozen
        | Point::SnapshotImageMade
        | Point::SnapshotHomeKept
        | Point::SnapshotThawed
        | Point::SnapshotSealed
        | Point::SnapshotRecorded => &[Act::Snapshot],
        Point::SnapshotForgotten | Point::SnapshotImageGone => &[Act::DeleteSnapshot],
        Point::RollBackRecorded
        | Point::RollBackStaged
        | Point::RollBackBoxGone
        | Point::RollBackHomeBack
        | Point::RollBackMemoryBack
        | Point::RollBackMoved
        | Point::RollBackFinished => &[Act::RollBack],
        Point::ConvertRecorded
        | Point::ConvertBoxGone
        | Point::ConvertHomeMade
        | Point::ConvertMoved
        | Point::ConvertFinished => &[Act::Convert],
        Point::ForkHomeMade | Point::ForkImageMade | Point::ForkRecorded | Point::ForkMade => &[Act::Fork],
        Point::DeleteRecorded
        | Point::DeleteBoxGone
        | Point::DeleteHomeGone
        | Point::DeleteSnapshotsGone
        | Point::DeleteImagesGone
        | Point::DeleteFinished => &[Act::Delete],
    }
}

fn every_declared_point_is_driven() -> Result<()> {
    let names: BTreeSet<_> = Point::ALL.into_iter().map(Point::name).collect();
    ensure!(names.len() == Point::ALL.len(), "two points have one name");
    for point in Point::ALL {
        let acts = acts_of(point);
        let driven = acts.iter().all(|act| GROUPS.iter().any(|group| group.contains(act)));
        ensure!(!acts.is_empty() && driven, "no test drives the daemon to {}", point.name());
    }
    Ok(())
}

fn a_daemon_that_dies_while_agents_come_and_go_leaves_all_or_nothing() -> Result<()> {
    let stage = Stage::set(CALM)?;
    stage.play(GROUPS[0])
}

fn a_daemon_that_dies_while_an_agent_goes_to_sleep_or_wakes_loses_nothing_of_it() -> Result<()> {
    let stage = Stage::set(CALM)?;
    stage.play(GROUPS[1])
}

fn a_daemon_that_dies_in_a_snapshot_or_a_fork_loses_nothing_and_leaves_nothing() -> Result<()> {
    let stage = Stage::set(DURABLE)?;
    stage.play(GROUPS[2])
}

fn a_daemon_that_dies_in_a_rollback_leaves_one_of_the_two_whole() -> Result<()> {
    let stage = Stage::set(CALM)?;
    stage.play(GROUPS[3])
}

fn a_daemon_that_dies_while_an_agent_gets_another_isolation_leaves_its_files_whole() -> Result<()> {
    crate::vm::needs_machines()?;
    let stage = Stage::set(CALM)?;
    crate::vm::import_small(&stage.server)?;
    stage.play(GROUPS[4])
}

/// Holds a word in its memory alone, and tells it, or takes another.
const KEEPER: &str = "mkfifo /dev/shm/in /dev/shm/out; while :; do read -r new < /dev/shm/in || continue; \
    [ -n \"$new\" ] && word=$new; echo \"$word\" > /dev/shm/out; done";

/// One daemon after the other on the same data, and an agent that lives through them all.
struct Stage {
    /// Dropped before the server.
    keeper: Agent,
    server: Arc<Server>,
    mounts: Vec<String>,
}

impl Stage {
    fn set(config: &'static str) -> Result<Self> {
        let server = Server::start_with(&Options { leave_boxes: true, config, ..Options::default() })?;
        let keeper = server.agent("keeper")?;
        keeper.exec_with(&["-d"], &["bash", "-c", KEEPER])?.succeeded()?;
        keeper.until("the keeper listens", "test -p /dev/shm/out")?;
        Ok(Self { mounts: server.remains.mounts()?, keeper, server })
    }

    fn play(&self, acts: &[Act]) -> Result<()> {
        for (number, point) in Point::ALL.into_iter().enumerate() {
            for act in acts_of(point).iter().filter(|act| acts.contains(act)) {
                self.strike(*act, point, number)
                    .with_context(|| format!("a crash at {} in {act:?}", point.name()))?;
            }
        }
        Ok(())
    }

    fn strike(&self, act: Act, point: Point, number: usize) -> Result<()> {
        let server = &self.server;
        let scene = self.prepare(act, number)?;
        let pid = match act {
            Act::Settle => Some(scene.agent().pid()?),
            _ => None,
        };
        server.kill9()?;
        server.launch(&[("DORM_FAULT", point.name())])?;
        // The answer is lost with the daemon, or was given a moment before.
        drop(scene.drive(act, pid));
        let code = server.wait_for_end()?;
        ensure!(code == 128 + 6, "the daemon left with {code}");
        let last = format!("dies at the declared fault {}", point.name());
        ensure!(server.log_text()?.contains(&last), "it was another fault");
        server.launch(&[])?;
        server.in_order()?;
        let mounts = server.remains.mounts()?;
        ensure!(mounts == self.mounts, "mounts were {:?} and are {mounts:?}", self.mounts);
        scene.verify(act, point)?;
        server.in_order().context("afterwards")
    }

    fn prepare(&self, act: Act, number: usize) -> Result<Scene<'_>> {
        let server = &self.server;
        let word = format!("word-{number}-{act:?}");
        let passing = match act {
            Act::Start | Act::Stop | Act::StopAsleep | Act::Settle | Act::Delete | Act::WakeInVain => {
                Some(server.agent("passing")?)
            }
            Act::Convert => Some(server.agent_with("passing", &["-T", "small", "--memory", "256M", "--cpus", "1"])?),
            _ => None,
        };
        let scene = Scene { server, keeper: &self.keeper, passing, word };
        if !matches!(act, Act::Create | Act::CreateEphemeral) {
            // A box that is given another isolation is stopped in order, and its small template has no `sync`.
            let sync = if act == Act::Convert { "" } else { "; sync" };
            scene.agent().sh(&format!("echo {} > ~/file{sync}", scene.word))?.succeeded()?;
        }
        if scene.passing.is_none() {
            scene.tell(&scene.word)?;
        }
        match act {
            Act::Start => scene.agent().stop()?,
            Act::Delete => drop(scene.snapshot()?),
            Act::Thaw | Act::StopAsleep => {
                // What is recorded later must be recorded, and not that of an earlier sleep.
                scene.recorded("running")?;
                scene.agent().pause()?;
                scene.recorded("standby")?;
            }
            Act::Wake => scene.agent().hibernate()?,
            Act::WakeInVain => {
                scene.agent().hibernate()?;
                scene.damage()?;
            }
            Act::DeleteSnapshot => drop(scene.snapshot()?),
            Act::RollBack => {
                scene.snapshot()?;
                scene.tell("newer")?;
                scene.agent().sh("echo newer > ~/file")?.succeeded()?;
            }
            Act::Create
            | Act::CreateEphemeral
            | Act::Stop
            | Act::Settle
            | Act::Pause
            | Act::MakeDurable
            | Act::Hibernate
            | Act::Snapshot
            | Act::Convert
            | Act::Fork => {}
        }
        Ok(scene)
    }
}

/// One act, from what it begins with to what must be there after the crash.
struct Scene<'a> {
    server: &'a Arc<Server>,
    keeper: &'a Agent,
    passing: Option<Agent>,
    /// What is in the file, and in the keeper's memory.
    word: String,
}

const COPY: &str = "copy";

impl Scene<'_> {
    fn agent(&self) -> &Agent {
        self.passing.as_ref().unwrap_or(self.keeper)
    }

    fn call(&self, method: &str, rest: &str, body: &Value) -> Result<harness::Reply> {
        let body = if body.is_null() { Vec::new() } else { body.to_string().into_bytes() };
        self.server.http(method, &format!("/v1/agents{rest}"), &body)
    }

    fn drive(&self, act: Act, pid: Option<i32>) -> Result<()> {
        let name = &self.agent().name;
        let post = |verb: &str, body: Value| self.call("POST", &format!("/{name}/{verb}"), &body);
        match act {
            Act::Create => self.call("POST", "", &json!({ "name": COPY }))?,
            Act::CreateEphemeral => self.call("POST", "", &json!({ "name": COPY, "lifetime": "ephemeral" }))?,
            Act::Start => post("start", Value::Null)?,
            Act::Stop | Act::StopAsleep => post("stop", json!({ "grace": 0.1 }))?,
            Act::Settle => {
                let pid = pid.and_then(Pid::from_raw).context("a running agent has a pid")?;
                return Ok(kill_process(pid, Signal::KILL)?);
            }
            Act::Delete => self.call("DELETE", &format!("/{name}"), &Value::Null)?,
            Act::Pause | Act::MakeDurable => post("pause", Value::Null)?,
            Act::Thaw | Act::Wake | Act::WakeInVain => post("wake", Value::Null)?,
            Act::Hibernate => post("hibernate", Value::Null)?,
            Act::Snapshot => post("snapshots", json!({ "label": "kept" }))?,
            Act::DeleteSnapshot => {
                let id = self.snapshot_of("old")?.context("there is no snapshot")?;
                self.call("DELETE", &format!("/{name}/snapshots/{id}"), &Value::Null)?
            }
            Act::Fork => post("fork", json!({ "name": COPY }))?,
            Act::RollBack => post("rollback", json!({ "snapshot": "old" }))?,
            Act::Convert => self.call("PATCH", &format!("/{name}"), &json!({ "isolation": other_isolation() }))?,
        };
        Ok(())
    }

    fn verify(&self, act: Act, point: Point) -> Result<()> {
        let state = self.state(&self.agent().name)?;
        let expected: &[&str] = match (act, point) {
            (Act::Delete, _) => &[],
            (Act::Start, Point::StartFinished) => &["running"],
            (Act::Start | Act::Stop | Act::StopAsleep | Act::Settle, _) => &["stopped"],
            (Act::Pause, Point::FreezeRecorded) => &["standby"],
            (Act::Pause, _) => &["running"],
            (Act::Thaw, Point::ThawRecorded) => &["running"],
            (Act::Thaw | Act::MakeDurable, _) => &["standby"],
            (Act::Hibernate, _) => &["hibernated"],
            (Act::Wake, Point::StartRecorded | Point::WakeBegun) => &["hibernated"],
            // It may have gone on.
            (Act::Wake, _) => &["running"],
            (Act::WakeInVain, Point::WakeSetAside) => &["stopped"],
            (Act::WakeInVain, _) => &["hibernated"],
            // Finished as a stop: what it was is in a snapshot.
            (Act::RollBack, Point::RollBackFinished) => &["hibernated"],
            (Act::RollBack | Act::Convert, _) => &["stopped"],
            (Act::Create | Act::CreateEphemeral | Act::Snapshot | Act::DeleteSnapshot | Act::Fork, _) => &["running"],
        };
        let legal = match &state {
            Some(state) => expected.contains(&state.as_str()),
            None => expected.is_empty(),
        };
        ensure!(legal, "it is {state:?} and not {expected:?}: {:?}", self.server.agents());
        match act {
            Act::Create | Act::CreateEphemeral => self.verify_created(act, point),
            Act::Delete => {
                let left = self.server.remains.of_agent(&self.agent().id);
                ensure!(left.is_empty(), "{left:?}");
                Ok(())
            }
            Act::Start | Act::Stop | Act::StopAsleep | Act::Settle => self.has_file(&self.word),
            Act::WakeInVain => self.verify_loss(),
            Act::RollBack => self.verify_rollback(point),
            Act::Convert => {
                let moved = matches!(point, Point::ConvertMoved | Point::ConvertFinished);
                let shown = self.agent().show()?;
                let expected = if moved { other_isolation().to_owned() } else { isolation() };
                ensure!(shown["isolation"] == expected, "{shown}");
                self.has_file(&self.word)
            }
            Act::Pause | Act::Thaw | Act::MakeDurable | Act::Hibernate | Act::Wake => self.has_all(self.agent()),
            Act::Snapshot | Act::DeleteSnapshot => {
                let there = self.snapshot_of(if act == Act::Snapshot { "kept" } else { "old" })?;
                ensure!(there.is_some() == (point == Point::SnapshotRecorded), "the snapshot is {there:?}");
                self.forget_snapshots()?;
                self.has_all(self.agent())
            }
            Act::Fork => self.verify_fork(point),
        }
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
        self.has_file(&self.word)?;
        let events = self.agent().events()?;
        let told = events.iter().any(|event| event["reason"].as_str().is_some_and(|why| why.contains("memory is lost")));
        ensure!(told, "{events:?}");
        let images = self.server.remains.images();
        let aside = images.get(&self.agent().id).is_some_and(|of| of.iter().any(|name| name.ends_with(".bad")));
        ensure!(aside, "the image was not set aside: {images:?}");
        Ok(())
    }

    fn verify_fork(&self, point: Point) -> Result<()> {
        let copy = self.state(COPY)?;
        let expected = match point {
            Point::ForkRecorded => Some("hibernated"),
            Point::ForkMade => Some("running"),
            _ => None,
        };
        ensure!(copy.as_deref() == expected, "the fork is {copy:?}");
        if copy.is_some() {
            self.has_all(&self.server.adopt(COPY)?)?;
        }
        self.has_all(self.agent())
    }

    /// The home is one of the two, and both snapshots are whole.
    fn verify_rollback(&self, point: Point) -> Result<()> {
        let newer = matches!(point, Point::RollBackRecorded | Point::RollBackStaged | Point::RollBackBoxGone);
        self.has_file(if newer { "newer" } else { &self.word })?;
        if point == Point::RollBackFinished {
            self.has_all(self.agent())?;
        }
        let all = self.server.snapshots(&self.agent().name)?;
        let label = |one: &&Value| one["label"].as_str().is_some_and(|label| label.starts_with("before the rollback"));
        let before = all.iter().find(label).context("what it was is in no snapshot")?;
        for (id, word) in [(&before["id"], "newer"), (&json!("old"), &self.word)] {
            let back = self.call("POST", &format!("/{}/rollback", self.agent().name), &json!({ "snapshot": id }))?;
            ensure!(back.status == 200, "{}", back.text());
            self.has_file(word)?;
            ensure!(ask(self.agent(), "")? == word, "its memory is another");
        }
        self.forget_snapshots()
    }

    fn has_file(&self, word: &str) -> Result<()> {
        let found = self.agent().sh_text("cat ~/file")?;
        ensure!(found == word, "the file holds {found} and not {word}");
        Ok(())
    }

    fn has_all(&self, agent: &Agent) -> Result<()> {
        let word = ask(agent, "")?;
        ensure!(word == self.word, "its memory holds {word} and not {}", self.word);
        self.has_file(&self.word)
    }

    fn tell(&self, word: &str) -> Result<()> {
        let heard = ask(self.keeper, word)?;
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

    fn snapshot(&self) -> Result<()> {
        let path = format!("/{}/snapshots", self.agent().name);
        let taken = self.call("POST", &path, &json!({ "label": "old" }))?;
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

/// What the keeper holds, after `new` has taken its place, unless that is empty.
fn ask(agent: &Agent, new: &str) -> Result<String> {
    let script = format!("test -p /dev/shm/in || {{ echo nothing; exit; }}; echo '{new}' > /dev/shm/in; cat /dev/shm/out");
    agent.sh_text(&script)
}
