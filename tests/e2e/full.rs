//! The disk is full: whoever asks is told so and what to do, agents are as they were, and everything goes on when there
//! is room again.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};
use rustix::fs::{FallocateFlags, fallocate, ftruncate, statvfs, syncfs};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::harness::{self, Agent, Options, Output, Server, Skip};
use crate::streams::{is_told_that_it_lost_the_box, waiting_client};

harness::tests![
    a_full_disk_leaves_agents_as_they_are_until_there_is_room,
    whichever_write_the_disk_is_full_at_nothing_is_lost,
    what_is_begun_or_ended_on_a_full_disk_is_so_or_not_and_nothing_is_lost,
    a_pool_in_a_file_outlives_memory_and_others_that_fill_the_disk_below_it,
    open_files_without_names_take_no_room_of_a_pool_in_a_file,
    nothing_is_acknowledged_that_cannot_be_recorded,
    a_box_that_ends_on_a_full_disk_has_ended_before_that_can_be_recorded,
    a_disk_that_is_full_has_room_again_once_something_is_deleted,
    a_daemon_that_is_started_on_a_full_disk_keeps_the_boxes_that_it_finds,
];

const DISK: u64 = 1 << 30;
/// Room for records, and not for memory.
const LITTLE: u64 = 12 << 20;

/// A file that takes the room of others.
pub(crate) struct Ballast(PathBuf);

impl Ballast {
    pub(crate) fn beside(server: &Server) -> Result<Self> {
        Ok(Self(server.data.parent().context("a data directory lies somewhere")?.join("ballast")))
    }

    /// Takes all room but this.
    pub(crate) fn fill(&self, left: u64) -> Result<()> {
        let file = File::create(&self.0)?;
        let mut size = 0;
        for piece in [64 << 20, 1 << 20, 64 << 10, 4 << 10] {
            while fallocate(&file, FallocateFlags::empty(), size, piece).is_ok() {
                size += piece;
            }
        }
        ftruncate(&file, size.saturating_sub(left))?;
        Ok(syncfs(&file)?)
    }

    /// Takes room until whoever is not root has this left.
    fn leave(&self, left: u64) -> Result<()> {
        let file = File::create(&self.0)?;
        syncfs(&file)?;
        let taken = room(&self.0)?.checked_sub(left).context("there is no room to take")?;
        fallocate(&file, FallocateFlags::empty(), 0, taken)?;
        Ok(syncfs(&file)?)
    }

    pub(crate) fn remove(&self) -> Result<()> {
        fs::remove_file(&self.0)?;
        Ok(syncfs(File::open(self.0.parent().context("it lies somewhere")?)?)?)
    }
}

impl Drop for Ballast {
    fn drop(&mut self) {
        let _ = self.remove();
    }
}

/// Bytes that whoever is not root may still write there.
fn room(at: &Path) -> Result<u64> {
    let told = statvfs(at)?;
    Ok(told.f_bavail * told.f_frsize)
}

/// The memory of a machine is a file of its home: none of this holds for it.
fn needs_images() -> Result<()> {
    match harness::engines::in_machines() {
        true => Err(Skip("its memory is a file of its home".to_owned()).into()),
        false => Ok(()),
    }
}

fn small_server() -> Result<Arc<Server>> {
    let server = Server::start_with(&Options { disk: Some(DISK), leave_boxes: true, config: harness::CALM, ..Options::default() })?;
    server.dorm(&["template", "build", "base"])?.succeeded()?;
    Ok(server)
}

/// What its holder holds.
fn word(agent: &Agent) -> Result<String> {
    Ok(agent.held()?.word)
}

fn is_full(output: &Output) -> Result<()> {
    output.refused(1, &["give the data directory more room"])
}

fn a_full_disk_leaves_agents_as_they_are_until_there_is_room() -> Result<()> {
    let server = small_server()?;
    let agent = server.agent("full")?;
    agent.holder(48)?;
    agent.sh("echo old > ~/file; sync")?.succeeded()?;
    let held = word(&agent)?;
    server.dorm(&["snapshot", &agent.name, "--label", "old", "--files-only"])?.succeeded()?;
    agent.sh("echo new > ~/file; sync")?.succeeded()?;
    let same = |state: &str| -> Result<()> {
        ensure!(agent.state()? == state, "it is {}", agent.show()?);
        server.in_order()?;
        ensure!(word(&agent)? == held && agent.sh_text("cat ~/file")? == "new", "it is not as it was");
        Ok(())
    };
    let ballast = Ballast::beside(&server)?;
    ballast.fill(LITTLE)?;
    is_full(&server.dorm(&["hibernate", &agent.name])?)?;
    same("running")?;
    let why = server.dorm(&["why", &agent.name])?.text()?;
    ensure!(why.contains("could not be saved") && why.contains("no space"), "{why}");
    is_full(&server.dorm(&["snapshot", &agent.name])?)?;
    same("running")?;
    is_full(&server.dorm(&["fork", &agent.name, "copy"])?)?;
    same("running")?;
    is_full(&server.dorm(&["rollback", &agent.name, "old"])?)?;
    same("running")?;
    agent.pause()?;
    is_full(&server.dorm(&["hibernate", &agent.name])?)?;
    same("standby")?;
    ensure!(server.snapshots(&agent.name)?.len() == 1, "a snapshot is there that was not taken");
    ballast.remove()?;

    agent.hibernate()?;
    ballast.fill(0)?;
    let refused = server.dorm(&["wake", &agent.name])?;
    is_full(&refused)?;
    ensure!(agent.state()? == "hibernated", "it is {}", agent.show()?);
    ballast.remove()?;
    same("hibernated")?;
    server.dorm(&["rollback", &agent.name, "old"])?.succeeded()?;
    ensure!(agent.sh_text("cat ~/file")? == "old");
    Ok(())
}

/// What is refused is refused for want of room. A small record may find some that was freed meanwhile.
fn acknowledged(output: &Output) -> Result<bool> {
    if output.code != 0 {
        is_full(output)?;
    }
    Ok(output.code == 0)
}

fn whichever_write_the_disk_is_full_at_nothing_is_lost() -> Result<()> {
    let server = small_server()?;
    let agent = server.agent("swept")?;
    agent.holder(1)?;
    let held = word(&agent)?;
    let ballast = Ballast::beside(&server)?;
    let (mut refused, mut done) = (0, 0);
    // From no room at all to more than is needed: each step is full at another of the writes.
    for quarters in (0..16).chain((16..=120).step_by(13)) {
        agent.sh(&format!("echo {quarters} > ~/file; sync"))?.succeeded()?;
        server.dorm(&["snapshot", &agent.name, "--label", "before"])?.succeeded()?;
        ballast.fill(quarters << 18)?;
        let mut copies = Vec::new();
        for verb in ["snapshot", "fork", "hibernate", "rollback", "wake"] {
            let copy = format!("{}-{quarters}", agent.name);
            let mut args = vec![verb, &agent.name];
            match verb {
                "fork" => args.push(&copy),
                "rollback" => args.push("before"),
                _ => {}
            }
            let output = server.dorm(&args)?;
            let well = acknowledged(&output).with_context(|| format!("{verb} with {quarters} quarters of a megabyte left"))?;
            if well && verb == "fork" {
                copies.push(copy);
            }
            *(if well { &mut done } else { &mut refused }) += 1;
            let state = agent.state()?;
            ensure!(["running", "hibernated"].contains(&state.as_str()), "after {verb} with {quarters} quarters of a megabyte left: {}", agent.show()?);
        }
        ballast.remove()?;
        let told = (word(&agent)?, agent.sh_text("cat ~/file")?);
        ensure!(told == (held.clone(), quarters.to_string()), "with {quarters} quarters of a megabyte left, it is not as it was: {told:?}");
        for copy in copies {
            let copy = server.adopt(&copy)?;
            ensure!(word(&copy)? == held, "a fork that was acknowledged is not whole");
        }
        for snapshot in server.snapshots(&agent.name)? {
            let id = snapshot["id"].as_str().context("an id")?;
            server.dorm(&["snapshots", &agent.name, "--delete", id])?.succeeded()?;
        }
        server.in_order()?;
    }
    ensure!(refused > 20 && done > 20, "{refused} were refused, and {done} done");
    Ok(())
}

fn what_is_begun_or_ended_on_a_full_disk_is_so_or_not_and_nothing_is_lost() -> Result<()> {
    needs_images()?;
    let server = Server::start_with(&Options { disk: Some(DISK), hibernate_boxes: true, config: harness::CALM, ..Options::default() })?;
    server.dorm(&["template", "build", "base"])?.succeeded()?;
    let (kept, ended) = (server.agent_with("kept", &["--durable-after", "0.1"])?, server.agent("ended")?);
    kept.holder(1)?;
    let held = word(&kept)?;
    let ballast = Ballast::beside(&server)?;
    let round = |quarters: u64| -> Result<()> {
        for agent in [&kept, &ended] {
            agent.sh(&format!("echo {quarters} > ~/file; sync"))?.succeeded()?;
        }
        ballast.fill(quarters << 18)?;
        let new = format!("new-{quarters}");
        let made = acknowledged(&server.dorm(&["new", &new])?)?;
        let stopped = acknowledged(&server.dorm(&["stop", &ended.name])?)?;
        let state = ended.state()?;
        ensure!(state == "stopped" || state == "running" && !stopped, "it is {}", ended.show()?);
        let before = SystemTime::now().duration_since(UNIX_EPOCH)?.as_millis() as i64;
        let paused = acknowledged(&server.dorm(&["pause", &kept.name])?)?;
        ensure!(kept.state()? == if paused { "standby" } else { "running" }, "it is {}", kept.show()?);
        // With less, not even the pause may be recorded yet, which comes first.
        if paused && quarters << 18 >= LITTLE {
            harness::eventually("its memory is on disk too, or it says why not", || {
                let why = server.http("GET", &format!("/v1/agents/{}/why", kept.name), b"")?.json()?;
                let trouble = why["setback"]["time"].as_i64() >= Some(before);
                Ok((trouble || kept.show()?["durable"] == true).then_some(()))
            })?;
        }
        let code = server.sigterm()?;
        ensure!(code == 0, "the daemon left with {code}");
        ballast.remove()?;
        server.launch(&[])?;
        server.in_order()?;
        let told = (word(&kept)?, kept.sh_text("cat ~/file")?);
        ensure!(told == (held.clone(), quarters.to_string()), "it is not as it was: {told:?}");
        ensure!(ended.sh_text("cat ~/file")? == quarters.to_string(), "its files are not as they were");
        ensure!(server.names()?.contains(&new) == made, "it was made: {made}; there are {:?}", server.names()?);
        if made {
            ensure!(server.adopt(&new)?.sh_text("hostname")? == new);
        }
        server.in_order()
    };
    for quarters in [0, 1, 4, 16, 48, 120] {
        round(quarters).with_context(|| format!("with {quarters} quarters of a megabyte left"))?;
    }
    Ok(())
}

/// Its size is what it may have at most, so that nothing grows but what the file takes of the disk.
const POOL: &str = "[standby]\nafter = 0\ndurable_after = 0\nhibernate_after = 0\n[pool]\nsize = \"1G\"\nmax = \"1G\"\n";
/// What is left to memory on the disk with the pool file, and megabytes of each image. Some of them fit, whatever dorm keeps free.
const LEFT_TO_MEMORY: u64 = 1536 << 20;
const LARGE: u32 = 256;
/// What of its room a btrfs may need for itself.
const MARGIN: u64 = 128 << 20;
/// Writes, and sees to it that it is on the disk, over and over.
const WRITER: &str = "n=0; until test -e /dev/shm/enough; do n=$((n + 1)); { echo $n > ~/count && sync ~/count; } || echo $n >> /dev/shm/refused; \
    sleep 0.1; done; touch /dev/shm/ended";

fn a_pool_in_a_file_outlives_memory_and_others_that_fill_the_disk_below_it() -> Result<()> {
    needs_images()?;
    let server = Server::start_with(&Options { mains: true, leave_boxes: true, config: POOL, ..Options::default() })?;
    server.dorm(&["template", "build", "base"])?.succeeded()?;
    let (writer, large, asleep) = (server.agent("writer")?, server.agent("large")?, server.agent("asleep")?);
    for (agent, megabytes) in [(&writer, 1), (&large, LARGE), (&asleep, 16)] {
        agent.holder(megabytes)?;
    }
    let held = [word(&writer)?, word(&large)?, word(&asleep)?];
    let same = |agent: &Agent, number: usize| -> Result<()> {
        ensure!(word(agent)? == held[number], "{} is not what it was", agent.name);
        Ok(())
    };
    writer.exec_with(&["-d"], &["bash", "-c", WRITER])?.succeeded()?;
    asleep.hibernate()?;

    // Others leave what the pool file has yet to take, and some; and memory takes that until it is refused.
    let image = fs::metadata(server.data.join("pool.img"))?;
    let unbacked = image.len().saturating_sub(512 * image.blocks());
    let ballast = Ballast::beside(&server)?;
    ballast.leave(unbacked + LEFT_TO_MEMORY)?;
    let mut taken = 0;
    while acknowledged(&server.dorm(&["snapshot", &large.name])?)? {
        taken += 1;
        ensure!(taken < 32, "the disk does not become full");
    }
    ensure!(taken > 0, "nothing was taken of the room that there was");
    is_full(&server.dorm(&["hibernate", &large.name])?)?;
    ensure!(large.state()? == "running", "it is {}", large.show()?);
    ensure!(server.snapshots(&large.name)?.len() == taken, "a snapshot is there that was not taken");

    // The pool has the room that it speaks of.
    let free = room(&server.data.join("pool"))?;
    let much = free.checked_sub(MARGIN).with_context(|| format!("the pool has {free} bytes left"))?;
    large.sh(&format!("head -c {much} /dev/zero > ~/much && sync ~/much"))?.succeeded()?;
    for agent in [&writer, &large] {
        agent.sh("echo new > ~/file && sync ~/file")?.succeeded().context("a home cannot be written")?;
    }
    let count = || anyhow::Ok(writer.sh_text("cat ~/count")?.parse::<u64>().unwrap_or(0));
    let before = count()?;
    harness::eventually("the writer goes on", || Ok((count()? > before).then_some(())))?;
    large.sh("rm ~/much && sync ~/file")?.succeeded()?;
    same(&writer, 0)?;
    same(&large, 1)?;
    same(&asleep, 2)?;

    // Others take all of it, while nobody writes.
    writer.sh("touch /dev/shm/enough")?.succeeded()?;
    writer.until("the writer ends", "test -e /dev/shm/ended")?;
    ensure!(writer.sh("test -e /dev/shm/refused")?.code == 1, "refused: {}", writer.sh_text("cat /dev/shm/refused")?);
    syncfs(File::open(server.data.join("pool"))?)?;
    ballast.fill(0)?;
    same(&writer, 0)?;
    same(&large, 1)?;
    is_full(&server.dorm(&["hibernate", &large.name])?)?;
    same(&large, 1)?;
    ballast.remove()?;

    for agent in [&writer, &large, &asleep] {
        agent.sh("echo newer > ~/file && sync ~/file")?.succeeded().context("a home cannot be written")?;
    }
    large.hibernate()?;
    same(&large, 1)?;
    ensure!(large.sh_text("cat ~/file")? == "newer");
    server.agent("later")?.sh("true")?.succeeded()?;
    server.in_order()
}

/// Megabytes of the file, and of what is left to memory.
const NAMELESS: u64 = 300;
const LEFT_BESIDE: u64 = 150;

/// Their content is in an image as well, and no memory of the box.
fn open_files_without_names_take_no_room_of_a_pool_in_a_file() -> Result<()> {
    needs_images()?;
    let server = Server::start_with(&Options { mains: true, leave_boxes: true, config: POOL, ..Options::default() })?;
    server.dorm(&["template", "build", "base"])?.succeeded()?;
    let (holder, other) = (server.agent("holder")?, server.agent("other")?);
    let hold = format!("exec 3<> ~/file; head -c {NAMELESS}M /dev/urandom >&3; sync ~/file; rm ~/file; echo $$ > ~/pid; sleep infinity");
    holder.exec_with(&["-d"], &["bash", "-c", &hold])?.succeeded()?;
    holder.until("the file has lost its name", "test -s ~/pid")?;
    let content = || holder.sh_text("sha256sum < /proc/$(cat ~/pid)/fd/3");
    let before = content()?;

    let image = fs::metadata(server.data.join("pool.img"))?;
    let unbacked = image.len().saturating_sub(512 * image.blocks());
    let ballast = Ballast::beside(&server)?;
    ballast.leave(unbacked + (LEFT_BESIDE << 20))?;
    is_full(&server.dorm(&["hibernate", &holder.name])?)?;
    ensure!(room(&ballast.0)? >= unbacked, "what was promised to the pool was taken");
    ensure!(content()? == before, "it is not as it was");
    other.hibernate().context("there is room for one without such a file")?;
    ballast.remove()?;
    holder.hibernate()?;
    ensure!(content()? == before, "it did not come back as it was");
    server.in_order()
}

/// Makes agents until one cannot be recorded, and counts them.
fn until_refused(server: &Server, made: &mut usize) -> Result<()> {
    while acknowledged(&server.dorm(&["new", &format!("more-{made}"), "--no-start"])?)? {
        *made += 1;
        ensure!(*made < 100, "the disk does not become full");
    }
    Ok(())
}

fn nothing_is_acknowledged_that_cannot_be_recorded() -> Result<()> {
    let server = small_server()?;
    let agent = server.agent("recorded")?;
    agent.sh("sleep 5151 > /dev/null 2>&1 & echo kept > ~/file; sync")?.succeeded()?;
    let ballast = Ballast::beside(&server)?;
    ballast.fill(0)?;
    let mut made = 0;
    until_refused(&server, &mut made)?;
    let held = acknowledged(&server.dorm(&["hold", &agent.name, "--for", "1h"])?)?;
    ensure!(agent.state()? == "running" && server.get("/healthz")?.status == 200);
    agent.sh("pgrep -f 'sleep 5151'")?.succeeded().context("the box was ended")?;
    let stopped = acknowledged(&server.dorm(&["stop", &agent.name])?)?;
    server.kill9()?;
    ballast.remove()?;
    server.launch(&[])?;
    server.in_order()?;
    ensure!(agent.state()? == if stopped { "stopped" } else { "running" }, "it is {}", agent.show()?);
    ensure!(server.names()?.len() == made + 1, "{made} were acknowledged: {:?}", server.names()?);
    let holds = server.list(&format!("/v1/agents/{}/holds", agent.name))?;
    ensure!(holds.len() == usize::from(held), "{holds:?}");

    // The same daemon goes on, too.
    ballast.fill(0)?;
    until_refused(&server, &mut made)?;
    ballast.remove()?;
    server.dorm(&["new", "later", "--no-start"])?.succeeded()?;
    agent.start()?;
    agent.stop()?;
    ensure!(agent.sh_text("cat ~/file")? == "kept");
    server.in_order()?;
    for name in server.names()?.iter().filter(|name| **name != agent.name) {
        server.dorm(&["rm", "--yes", name])?.succeeded()?;
    }
    Ok(())
}

fn a_box_that_ends_on_a_full_disk_has_ended_before_that_can_be_recorded() -> Result<()> {
    let server = small_server()?;
    let (ended, durable) = (server.agent("ended")?, server.agent_with("durable", &["--durable-after", "0.1"])?);
    ended.sh("echo kept > ~/file; sync")?.succeeded()?;
    let saves = needs_images().is_ok();
    if saves {
        durable.holder(1)?;
        let held = word(&durable)?;
        durable.sh(&format!("echo {held} > ~/held; sync"))?.succeeded()?;
        durable.pause()?;
        harness::eventually("its memory is on disk too", || Ok((durable.show()?["durable"] == true).then_some(())))?;
    }
    let pids = [ended.pid()?, durable.pid()?];
    let mut client = waiting_client(&ended)?;
    let stderr = client.stderr.take().context("piped")?;
    let ballast = Ballast::beside(&server)?;
    ballast.fill(0)?;
    let mut made = 0;
    until_refused(&server, &mut made)?;
    for (agent, pid) in [(&ended, pids[0]), (&durable, pids[1])] {
        kill_process(Pid::from_raw(pid).context("a running agent has a pid")?, Signal::KILL)?;
        // It may have to move to die.
        server.remains.thaw(&agent.id);
    }
    ended.becomes("stopped")?;
    durable.becomes(if saves { "hibernated" } else { "stopped" })?;
    let told = is_told_that_it_lost_the_box(client, stderr)?;
    ensure!(told.contains("the agent is stopped: the box ended: "), "{told}");
    is_full(&server.dorm(&["exec", &ended.name, "true"])?)?;

    ballast.remove()?;
    for agent in [&ended, &durable] {
        harness::eventually("its end is recorded", || {
            let is_end = |event: &Value| event["reason"].as_str().is_some_and(|why| why.contains("of the box ended"));
            Ok(agent.events()?.iter().any(is_end).then_some(()))
        })?;
    }
    ensure!(ended.sh_text("cat ~/file")? == "kept");
    if saves {
        let held = word(&durable)?;
        ensure!(durable.sh_text("cat ~/held")? == held, "it holds {held} now");
    }
    server.in_order()
}

fn a_disk_that_is_full_has_room_again_once_something_is_deleted() -> Result<()> {
    let server = small_server()?;
    let (kept, deleted) = (server.agent("kept")?, server.agent("deleted")?);
    deleted.sh("head -c 64M /dev/urandom > ~/ballast; sync")?.succeeded()?;
    server.dorm(&["snapshot", &kept.name, "--label", "old", "--files-only"])?.succeeded()?;
    server.dorm(&["volume", "create", "spare"])?.succeeded()?;
    let ballast = Ballast::beside(&server)?;
    ballast.fill(0)?;
    until_refused(&server, &mut 0)?;
    server.dorm(&["snapshots", &kept.name, "--delete", "old"])?.succeeded()?;
    server.dorm(&["volume", "rm", "spare"])?.succeeded()?;
    server.dorm(&["rm", "--yes", &deleted.name])?.succeeded()?;
    ensure!(!server.names()?.contains(&deleted.name), "it is still there");
    // btrfs clears away what was deleted by and by.
    harness::eventually("there is room again", || {
        let made = acknowledged(&server.dorm(&["new", "later", "--no-start"])?)?;
        Ok(made.then_some(()))
    })?;
    kept.sh("echo new > ~/file; sync")?.succeeded()?;
    ballast.remove()?;
    server.in_order()?;
    for name in server.names()?.iter().filter(|name| **name != kept.name) {
        server.dorm(&["rm", "--yes", name])?.succeeded()?;
    }
    Ok(())
}

fn a_daemon_that_is_started_on_a_full_disk_keeps_the_boxes_that_it_finds() -> Result<()> {
    let server = small_server()?;
    let agents = [server.agent("awake")?, server.agent("woken")?];
    let found = |agent: &Agent| anyhow::Ok((word(agent)?, agent.show()?["pid"].clone()));
    for agent in &agents {
        agent.holder(1)?;
    }
    let before = [found(&agents[0])?, found(&agents[1])?];
    server.dorm(&["hold", &agents[0].name, "--for", "1s"])?.succeeded()?;
    agents[1].pause()?;
    let held = || server.list(&format!("/v1/agents/{}/holds", agents[0].name));
    harness::eventually("the hold is over", || Ok(held()?.is_empty().then_some(())))?;
    let ballast = Ballast::beside(&server)?;
    ballast.fill(0)?;
    let mut made = 0;
    until_refused(&server, &mut made)?;
    // Its thaw cannot be recorded.
    ensure!(word(&agents[1])? == before[1].0);
    server.kill9()?;
    server.launch(&[])?;
    ensure!([found(&agents[0])?, found(&agents[1])?] == before, "boxes were ended");
    ballast.remove()?;
    server.in_order()?;
    ensure!([found(&agents[0])?, found(&agents[1])?] == before, "boxes were ended");
    for made in 0..made {
        server.dorm(&["rm", "--yes", &format!("more-{made}")])?.succeeded()?;
    }
    Ok(())
}
