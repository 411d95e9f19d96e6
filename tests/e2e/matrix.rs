//! The crash matrix: at every declared fault point a real daemon dies, and the next one finds or makes order. What was
//! acknowledged is there, in files and in the memory of a process, and nothing else is.

use std::collections::BTreeSet;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use dorm_server::faults::Point;

use crate::harness::{self, Agent, Options, Server};

mod scene;

use scene::Scene;

harness::tests![
    every_declared_point_is_driven,
    a_daemon_that_dies_while_agents_come_and_go_leaves_all_or_nothing,
    a_daemon_that_dies_while_an_agent_goes_to_sleep_or_wakes_loses_nothing_of_it,
    a_daemon_that_dies_in_a_snapshot_or_a_fork_loses_nothing_and_leaves_nothing,
    a_daemon_that_dies_in_a_rollback_leaves_one_of_the_two_whole,
    a_daemon_that_dies_while_an_agent_gets_another_isolation_leaves_its_files_whole,
    a_daemon_that_dies_over_an_agent_that_stands_still_loses_nothing_of_it,
    a_daemon_that_dies_over_what_slept_or_ended_leaves_what_it_was_or_nothing,
    a_daemon_that_dies_in_a_fork_of_files_of_the_past_or_of_several_leaves_whole_ones,
    a_daemon_that_dies_while_it_puts_boxes_away_or_brings_them_back_loses_nothing_of_them,
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
    /// Of one that goes with its box.
    SettleEphemeral,
    /// In standby, with its memory on disk already.
    SettleDurable,
    Delete,
    DeleteDurable,
    DeleteHibernated,
    Pause,
    Thaw,
    MakeDurable,
    Hibernate,
    HibernateAsleep,
    /// Out of standby, with its memory on disk already.
    HibernateDurable,
    Wake,
    /// With an image that cannot be used.
    WakeInVain,
    Snapshot,
    SnapshotAsleep,
    SnapshotHibernated,
    DeleteSnapshot,
    Fork,
    ForkFiles,
    /// Of what it was at a snapshot.
    ForkPast,
    /// Two at once.
    ForkSeveral,
    RollBack,
    /// What comes first in a rollback: a snapshot of what is there.
    KeepPresent,
    RollBackAsleep,
    RollBackDurable,
    RollBackHibernated,
    /// To a snapshot without memory.
    RollBackToFiles,
    /// The daemon ends in order, and puts what runs to disk.
    PutAway,
    /// The next one brings it back.
    GoOn,
    /// From the isolation of this run to another.
    Convert,
}

/// The acts of each test.
const GROUPS: [&[Act]; 9] = [
    &[Act::Create, Act::CreateEphemeral, Act::Start, Act::Stop, Act::StopAsleep, Act::Settle, Act::Delete],
    &[Act::Pause, Act::Thaw, Act::Hibernate, Act::Wake, Act::WakeInVain],
    &[Act::MakeDurable, Act::HibernateDurable, Act::Snapshot, Act::DeleteSnapshot, Act::Fork, Act::RollBackDurable],
    &[Act::RollBack],
    &[Act::Convert],
    &[
        Act::HibernateAsleep,
        Act::SnapshotAsleep,
        Act::SnapshotHibernated,
        Act::KeepPresent,
        Act::RollBackAsleep,
        Act::RollBackHibernated,
    ],
    &[
        Act::SettleEphemeral,
        Act::SettleDurable,
        Act::DeleteDurable,
        Act::DeleteHibernated,
        Act::RollBackToFiles,
    ],
    &[Act::ForkFiles, Act::ForkPast, Act::ForkSeveral],
    &[Act::PutAway, Act::GoOn],
];

/// Nothing goes to sleep by itself, but what sleeps is soon on disk too.
const DURABLE: &str = "[standby]\nafter = 0\ndurable_after = 0.1\nhibernate_after = 0\n";

fn acts_of(point: Point) -> &'static [Act] {
    use Act::*;
    match point {
        Point::CreateHomeMade | Point::CreateRecorded => &[Create, CreateEphemeral],
        Point::StartRecorded | Point::StartFinished => &[Start, Wake, GoOn],
        // With an image of another, which is then told who it is.
        Point::StartBoxUp => &[Start, Wake, Fork, ForkFiles, RollBack, GoOn],
        Point::WakeRestored => &[Wake, Fork, ForkPast, ForkSeveral, RollBack, GoOn],
        Point::WakeBegun => &[Wake],
        Point::WakeRefused | Point::WakeSetAside => &[WakeInVain],
        Point::StopRecorded | Point::StopBoxGone | Point::StopFinished => &[Stop],
        Point::StopThawed => &[StopAsleep],
        Point::SettleBegun | Point::SettleBoxGone | Point::SettleRecorded => &[Settle, SettleDurable],
        Point::FreezeBegun | Point::FreezeFrozen | Point::FreezeRecorded => &[Pause],
        Point::ThawBegun | Point::ThawThawed | Point::ThawRecorded => &[Thaw],
        Point::ImageFrozen | Point::ImageRead => &[MakeDurable, Hibernate],
        Point::ImageRecorded => &[MakeDurable, Hibernate, PutAway],
        Point::ImageMade => &[MakeDurable, Hibernate, HibernateAsleep, PutAway],
        Point::HibernateRecorded | Point::HibernateBoxGone => {
            &[Hibernate, HibernateAsleep, HibernateDurable, PutAway]
        }
        Point::HibernateImageRecorded => &[Hibernate],
        Point::HibernateFinished => &[Hibernate, PutAway],
        Point::SnapshotThawed => &[Snapshot],
        Point::SnapshotFrozen | Point::SnapshotSealed => &[Snapshot, KeepPresent],
        Point::SnapshotImageMade => &[Snapshot, KeepPresent, RollBackAsleep, RollBackHibernated],
        Point::SnapshotHomeKept => &[Snapshot, SnapshotAsleep, SnapshotHibernated, KeepPresent, RollBackDurable],
        Point::SnapshotRecorded => &[Snapshot, SnapshotAsleep, SnapshotHibernated, KeepPresent],
        Point::SnapshotForgotten | Point::SnapshotImageGone => &[DeleteSnapshot],
        Point::RollBackStaged => {
            &[RollBack, RollBackAsleep, RollBackDurable, RollBackHibernated, RollBackToFiles]
        }
        Point::RollBackHomeBack => &[RollBack, RollBackHibernated, RollBackToFiles],
        Point::RollBackRecorded | Point::RollBackBoxGone | Point::RollBackMoved => &[RollBack],
        Point::RollBackFinished => &[RollBack, RollBackToFiles],
        Point::ConvertRecorded
        | Point::ConvertBoxGone
        | Point::ConvertHomeMade
        | Point::ConvertMoved
        | Point::ConvertFinished => &[Convert],
        Point::ForkHomeMade => &[Fork, ForkPast],
        Point::ForkImageMade => &[Fork, ForkFiles, ForkPast],
        Point::ForkRecorded => &[Fork, ForkFiles, ForkPast, ForkSeveral],
        Point::ForkMade => &[Fork, ForkFiles, ForkSeveral],
        Point::DeleteRecorded => &[Delete, DeleteDurable, DeleteHibernated, SettleEphemeral],
        Point::DeleteBoxGone => &[Delete, DeleteDurable, SettleEphemeral],
        Point::DeleteHomeGone | Point::DeleteImagesGone => &[Delete, DeleteHibernated],
        Point::DeleteSnapshotsGone => &[Delete],
        Point::DeleteFinished => &[Delete, DeleteDurable],
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
    let stage = Stage::set(harness::CALM)?;
    stage.play(GROUPS[0])
}

fn a_daemon_that_dies_while_an_agent_goes_to_sleep_or_wakes_loses_nothing_of_it() -> Result<()> {
    let stage = Stage::set(harness::CALM)?;
    stage.play(GROUPS[1])
}

fn a_daemon_that_dies_in_a_snapshot_or_a_fork_loses_nothing_and_leaves_nothing() -> Result<()> {
    let stage = Stage::set(DURABLE)?;
    stage.play(GROUPS[2])
}

fn a_daemon_that_dies_in_a_rollback_leaves_one_of_the_two_whole() -> Result<()> {
    let stage = Stage::set(harness::CALM)?;
    stage.play(GROUPS[3])
}

fn a_daemon_that_dies_while_an_agent_gets_another_isolation_leaves_its_files_whole() -> Result<()> {
    crate::vm::needs_machines()?;
    let stage = Stage::set(harness::CALM)?;
    crate::vm::import_small(&stage.server)?;
    stage.play(GROUPS[4])
}

fn a_daemon_that_dies_over_an_agent_that_stands_still_loses_nothing_of_it() -> Result<()> {
    let stage = Stage::set(harness::CALM)?;
    stage.play(GROUPS[5])
}

fn a_daemon_that_dies_over_what_slept_or_ended_leaves_what_it_was_or_nothing() -> Result<()> {
    let stage = Stage::set(DURABLE)?;
    stage.play(GROUPS[6])
}

fn a_daemon_that_dies_in_a_fork_of_files_of_the_past_or_of_several_leaves_whole_ones() -> Result<()> {
    let stage = Stage::set(harness::CALM)?;
    stage.play(GROUPS[7])
}

fn a_daemon_that_dies_while_it_puts_boxes_away_or_brings_them_back_loses_nothing_of_them() -> Result<()> {
    let stage = Stage::with(&Options { hibernate_boxes: true, config: harness::CALM, ..Options::default() })?;
    stage.play(GROUPS[8])
}

/// Holds a word in its memory alone, and tells it, or takes another.
const KEEPER: &str = "mkfifo /dev/shm/in /dev/shm/out; while :; do read -r new < /dev/shm/in || continue; \
    [ -n \"$new\" ] && word=$new; echo \"$word\" > /dev/shm/out; done";

/// Has a file open under a name that is gone while it has another, for which CRIU makes a third; gVisor saves none.
const RENAMED: &str = "echo held > ~/first; ln ~/first ~/second; exec 3< ~/first; rm ~/first;";

/// Has it hold a word from now on.
fn keep(agent: &Agent) -> Result<()> {
    let script = if harness::engines::behind_gvisor() { KEEPER } else { &format!("{RENAMED} {KEEPER}") };
    agent.exec_with(&["-d"], &["bash", "-c", script])?.succeeded()?;
    agent.until("the keeper listens", "test -p /dev/shm/out")
}

/// One daemon after the other on the same data, and an agent that lives through them all.
struct Stage {
    /// Dropped before the server.
    keeper: Agent,
    server: Arc<Server>,
    mounts: Vec<String>,
}

impl Stage {
    fn set(config: &'static str) -> Result<Self> {
        Self::with(&Options { leave_boxes: true, config, ..Options::default() })
    }

    fn with(options: &Options) -> Result<Self> {
        let server = Server::start_with(options)?;
        let keeper = server.agent("keeper")?;
        keep(&keeper)?;
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
        let scene = Scene::prepare(self, act, format!("word-{number}-{act:?}"))?;
        let pid = match act {
            Act::Settle | Act::SettleEphemeral | Act::SettleDurable => Some(scene.agent().pid()?),
            _ => None,
        };
        let last = format!("dies at the declared fault {}", point.name());
        let struck = || Ok::<_, anyhow::Error>(server.log_text()?.matches(&last).count());
        let before = struck()?;
        if act == Act::GoOn {
            let code = server.sigterm()?;
            ensure!(code == 0, "the daemon before it left with {code}");
        } else {
            server.kill9()?;
        }
        let answered = server.launch(&[("DORM_FAULT", point.name())]);
        // It goes to work by itself then, and may be dead before anybody can ask it.
        if act != Act::GoOn {
            answered?;
            scene.ready(act)?;
            // The answer is lost with the daemon, or was given a moment before.
            drop(scene.drive(act, pid));
        }
        if server.runs() {
            let code = server.wait_for_end()?;
            ensure!(code == 128 + 6, "the daemon left with {code}");
        }
        ensure!(struck()? == before + 1, "it was another fault");
        server.launch(&[])?;
        server.in_order()?;
        let mounts = server.remains.mounts()?;
        ensure!(mounts == self.mounts, "mounts were {:?} and are {mounts:?}", self.mounts);
        scene.verify(act, point)?;
        server.in_order().context("afterwards")
    }
}
