//! An agent's memory and running processes survive: in RAM, on disk, over the daemon's end and the machine's.

use std::fs;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::harness::{self, Server, Skip};

harness::tests![
    a_paused_agent_uses_no_processor_and_wakes_at_the_next_command,
    a_process_that_holds_a_value_only_in_memory_survives_on_disk,
    every_cycle_keeps_files_and_memory_of_the_one_before,
    a_hibernated_agent_survives_the_daemon_and_a_reboot_with_its_memory,
    a_shell_keeps_its_variables_listeners_and_pipes_their_ends,
    what_cannot_be_saved_is_named_and_goes_on,
    an_image_that_criu_refuses_is_told_of_and_costs_the_memory_alone,
    a_hibernated_agent_can_be_stopped_and_deleted,
    a_fork_goes_on_with_the_memory_under_a_name_of_its_own,
    a_fork_is_nobody_but_itself,
    a_fork_goes_on_with_a_connection_of_its_sources_address,
    a_rollback_brings_back_files_and_memory_and_can_be_undone,
    a_snapshot_tells_what_it_holds_beyond_the_one_before,
];

fn a_paused_agent_uses_no_processor_and_wakes_at_the_next_command() -> Result<()> {
    let server = Server::shared()?;
    let agent = server.agent("paused")?;
    agent.holder(32)?;
    let before = agent.held()?;
    agent.pause()?;
    let ticks = || -> Result<f64> { agent.stats()?["cpu_seconds"].as_f64().context("no cpu time") };
    let first = ticks()?;
    std::thread::sleep(std::time::Duration::from_millis(300));
    ensure!(ticks()? == first, "a frozen box used the processor");
    before.goes_on_in(&agent.held()?)?;
    ensure!(agent.state()? == "running");
    Ok(())
}

fn a_process_that_holds_a_value_only_in_memory_survives_on_disk() -> Result<()> {
    let server = Server::shared()?;
    let agent = server.agent("keeper")?;
    agent.holder(32)?;
    let before = agent.held()?;
    agent.hibernate()?;
    before.goes_on_in(&agent.held()?)
}

fn every_cycle_keeps_files_and_memory_of_the_one_before() -> Result<()> {
    let server = Server::shared()?;
    let agent = server.agent("cycles")?;
    agent.holder(32)?;
    let mut last = agent.held()?;
    for cycle in 0..8 {
        agent.sh(&format!("echo {cycle} >> ~/cycles"))?.succeeded()?;
        agent.hibernate()?;
        let now = agent.held()?;
        last.goes_on_in(&now)?;
        last = now;
    }
    ensure!(agent.sh_text("cat ~/cycles")?.split_whitespace().collect::<String>() == "01234567");
    Ok(())
}

fn a_hibernated_agent_survives_the_daemon_and_a_reboot_with_its_memory() -> Result<()> {
    let server = Server::start()?;
    let agent = server.agent("rebooted")?;
    agent.holder(32)?;
    let before = agent.held()?;
    agent.hibernate()?;
    server.kill9()?;
    server.launch(&[])?;
    ensure!(agent.state()? == "hibernated");
    let middle = agent.held()?;
    before.goes_on_in(&middle)?;
    agent.hibernate()?;
    server.simulate_reboot()?;
    server.launch(&[])?;
    middle.goes_on_in(&agent.held()?)
}

fn a_shell_keeps_its_variables_listeners_and_pipes_their_ends() -> Result<()> {
    let server = Server::shared()?;
    let agent = server.agent("shell")?;
    let script = "x=kept; exec 3> >(cat > /tmp/piped); exec 4> /tmp/unlinked; rm /tmp/unlinked; \
        echo one >&4; echo ready; until test -e /tmp/go; do sleep 0.05; done; \
        echo through >&3; echo \"$x\" > /tmp/said; cat /proc/self/fd/4 > /dev/null; echo two >&4 && echo open >> /tmp/said; sleep 0.5";
    agent.exec_with(&["-d"], &["bash", "-c", script])?.succeeded()?;
    let listen = "import socket, time; s = socket.create_server(('127.0.0.1', 4711)); \
        c, _ = s.accept(); c.sendall(b'hello'); c.close(); time.sleep(1)";
    agent.exec_with(&["-d"], &["python3", "-c", listen])?.succeeded()?;
    agent.until("the port is open", "ss -ltn | grep -q 4711")?;
    agent.hibernate()?;
    agent.sh("touch /tmp/go")?.succeeded()?;
    agent.until("the shell goes on", "grep -q open /tmp/said")?;
    ensure!(agent.sh_text("cat /tmp/said")?.split_whitespace().collect::<Vec<_>>() == ["kept", "open"]);
    agent.until("the pipe carries on", "grep -q through /tmp/piped")?;
    let heard = "import socket; print(socket.create_connection(('127.0.0.1', 4711)).recv(9).decode())";
    ensure!(agent.exec(&["python3", "-c", heard])?.text()?.trim() == "hello");
    Ok(())
}

fn what_cannot_be_saved_is_named_and_goes_on() -> Result<()> {
    let server = Server::shared()?;
    let agent = server.agent("unsavable")?;
    agent.holder(32)?;
    let holder = "import ctypes, time; q = ctypes.CDLL(None).mq_open(b'/queue', 0o102, 0o600, None); assert q > 0; \
        open('/tmp/holding', 'w'); time.sleep(600)";
    agent.exec_with(&["-d"], &["python3", "-c", holder])?.succeeded()?;
    agent.until("the holder holds", "test -e /tmp/holding")?;
    let before = agent.held()?;
    let holder = agent.sh_text("pgrep -f mq_open | head -n 1")?;
    let named = format!("process {} (python3)", holder.trim());
    server.dorm(&["hibernate", &agent.name])?.refused(4, &["memory cannot be saved", &named, "path=/queue", "goes on as it was"])?;
    ensure!(agent.state()? == "running", "it is {}", agent.state()?);
    before.goes_on_in(&agent.held()?)?;
    ensure!(server.dorm(&["why", &agent.name])?.text()?.contains("could not be saved"));
    Ok(())
}

fn an_image_that_criu_refuses_is_told_of_and_costs_the_memory_alone() -> Result<()> {
    if harness::engines::isolation().is_some() {
        return Err(Skip("CRIU has no part in it".to_owned()).into());
    }
    let server = Server::shared()?;
    let agent = server.agent("refused")?;
    agent.holder(4)?;
    agent.sh("echo kept > ~/file")?.succeeded()?;
    agent.hibernate()?;
    let image = fs::read_dir(server.data.join("images").join(&agent.id))?.next().context("no image")??.path();
    // Every checksum is right, and what they are of is no inventory to CRIU.
    let mut inventory = fs::read(image.join("inventory.img"))?;
    inventory.iter_mut().take(8).for_each(|byte| *byte ^= 0xff);
    fs::write(image.join("inventory.img"), &inventory)?;
    let mut manifest: Value = serde_json::from_slice(&fs::read(image.join("manifest.json"))?)?;
    let checksum = &mut manifest["files"]["inventory.img"]["blake3"];
    ensure!(checksum.is_string(), "the manifest has no checksum of it");
    *checksum = blake3::hash(&inventory).to_hex().as_str().into();
    let manifest = manifest.to_string();
    fs::write(image.join("manifest.json"), &manifest)?;
    fs::write(image.join("manifest.blake3"), blake3::hash(manifest.as_bytes()).to_hex().as_str())?;

    ensure!(agent.sh_text("cat ~/file")? == "kept");
    ensure!(agent.sh("pgrep python3")?.code == 1, "something of the image runs");
    // By CRIU's word alone.
    let lost = |text: &str| text.contains("memory is lost") && !text.contains("checksum") && !text.contains("have changed");
    let shown = agent.show()?;
    ensure!(shown["state"] == "running" && shown["reason"].as_str().is_some_and(lost), "{shown}");
    let why = server.dorm(&["why", &agent.name])?.text()?;
    ensure!(lost(&why), "{why}");
    let images = server.remains.images().remove(&agent.id).unwrap_or_default();
    ensure!(images.iter().any(|name| name.ends_with(".bad")), "the image is not kept: {images:?}");
    agent.holder(4)?;
    let held = agent.held()?;
    agent.hibernate()?;
    held.goes_on_in(&agent.held()?)
}

fn a_hibernated_agent_can_be_stopped_and_deleted() -> Result<()> {
    let server = Server::shared()?;
    let agent = server.agent("dropped")?;
    agent.holder(32)?;
    agent.hibernate()?;
    agent.stop()?;
    ensure!(agent.state()? == "stopped");
    ensure!(agent.sh("pgrep python3")?.code != 0, "a process survived a stop");
    agent.hibernate()?;
    server.dorm(&["rm", "--yes", &agent.name])?.succeeded()?;
    ensure!(!server.data.join("images").join(&agent.id).exists(), "the image outlived its agent");
    Ok(())
}

fn a_fork_goes_on_with_the_memory_under_a_name_of_its_own() -> Result<()> {
    let server = Server::shared()?;
    let agent = server.agent("forked")?;
    agent.holder(32)?;
    let before = agent.held()?;
    let name = format!("{}-copy", agent.name);
    server.dorm(&["fork", &agent.name, &name])?.succeeded()?;
    let copy = server.adopt(&name)?;
    before.goes_on_in(&copy.held()?)?;
    ensure!(copy.sh_text("hostname; cat /etc/hostname")?.split_whitespace().all(|n| n == name));
    ensure!(copy.id != agent.id && copy.address()? != agent.address()?);
    copy.sh("echo mine > ~/only-here")?.succeeded()?;
    ensure!(agent.sh("test -e ~/only-here")?.code == 1, "the fork writes to the other's home");
    before.goes_on_in(&agent.held()?)
}

/// Sockets that hold an address of the box, a counter of seconds by the wall clock, and a generator of random numbers.
const RESIDENT: &str = r#"
import os, socket, time
own = os.environ["ADDRESS"]
tcp = socket.create_server((own, 4712))
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.bind((own, 0))
open("/tmp/resident", "w").close()
while not os.path.exists("/tmp/tell"):
    time.sleep(0.02)
with open("/tmp/told.new", "w") as out:
    print(int(time.time()), os.environ["DORM_AGENT_ID"], open("/run/dorm/agent-id").read().strip(), os.urandom(16).hex(), file=out)
os.rename("/tmp/told.new", "/tmp/told")
time.sleep(600)
"#;

fn a_fork_is_nobody_but_itself() -> Result<()> {
    let server = Server::shared()?;
    let agent = server.agent("original")?;
    let address = format!("ADDRESS={}", agent.address()?);
    agent.exec_with(&["-d", "-e", &address], &["python3", "-c", RESIDENT])?.succeeded()?;
    agent.until("the resident is at home", "test -e /tmp/resident")?;
    ensure!(agent.sh_text("echo $DORM_AGENT_ID; cat /run/dorm/agent-id")?.split_whitespace().all(|id| id == agent.id));
    agent.root("echo nameserver 192.0.2.9 > /etc/resolv.conf")?.succeeded()?;
    server.dorm(&["snapshot", &agent.name, "--label", "past"])?.succeeded()?;
    // By so much, a clock that has stood still since is told from one that is right.
    let tolerance = 2 * u64::from(harness::slowness());
    std::thread::sleep(Duration::from_secs(2 * tolerance));
    let name = format!("{}-fork", agent.name);
    server.dorm(&["fork", &agent.name, &name, "--from", "past", "--count", "2"])?.succeeded()?;
    let now = || anyhow::Ok(SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs());
    let mut numbers = Vec::new();
    for number in ["1", "2"] {
        let fork = server.adopt(&format!("{name}-{number}"))?;
        ensure!(fork.sh_text("echo $DORM_AGENT_ID")?.trim() == fork.id);
        ensure!(!fork.sh_text("cat /etc/hosts /etc/hostname")?.replace(&fork.name, "").contains(&agent.name));
        ensure!(fork.sh_text("cat /etc/resolv.conf")?.trim() == "nameserver 169.254.1.1");
        ensure!(fork.sh_text("hostname -I")?.trim() == fork.address()?);
        let asked = now()?;
        fork.sh("touch /tmp/tell")?.succeeded()?;
        fork.until("the resident tells", "test -e /tmp/told")?;
        let told = fork.sh_text("cat /tmp/told")?;
        let words: Vec<_> = told.split_whitespace().collect();
        let (clock, answered) = (words[0].parse::<u64>()?, now()?);
        let right = asked.saturating_sub(tolerance)..=answered + tolerance;
        ensure!(right.contains(&clock), "the clock was {clock} between {asked} and {answered}");
        ensure!(words[1] == agent.id && words[2] == fork.id, "{told}");
        numbers.push(words[3].to_owned());
        // What it is made of goes to disk and back as well.
        fork.hibernate()?;
        fork.sh("pgrep python3")?.succeeded()?;
    }
    ensure!(numbers[0] != numbers[1]);
    Ok(())
}

fn a_fork_goes_on_with_a_connection_of_its_sources_address() -> Result<()> {
    let server = Server::shared()?;
    let agent = server.agent("connected")?;
    let connected = "import socket, time; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.connect(('169.254.1.1', 53)); \
        open('/tmp/connected', 'w'); time.sleep(600)";
    agent.exec_with(&["-d"], &["python3", "-c", connected])?.succeeded()?;
    agent.until("it is connected", "test -e /tmp/connected")?;
    let name = format!("{}-fork", agent.name);
    server.dorm(&["fork", &agent.name, &name])?.succeeded()?;
    let fork = server.adopt(&name)?;
    fork.sh("pgrep python3")?.succeeded()?;
    fork.hibernate()?;
    fork.sh("pgrep python3")?.succeeded()?;
    Ok(())
}

fn a_rollback_brings_back_files_and_memory_and_can_be_undone() -> Result<()> {
    let server = Server::shared()?;
    let agent = server.agent("rolled")?;
    agent.holder(32)?;
    let before = agent.held()?;
    let snapshot = server.dorm(&["snapshot", &agent.name, "--label", "before"])?.text()?.trim().to_owned();
    agent.sh("echo later > ~/later; pkill python3; rm /dev/shm/holder")?.succeeded()?;
    server.dorm(&["rollback", &agent.name, &snapshot])?.succeeded()?;
    before.goes_on_in(&agent.held()?)?;
    ensure!(agent.sh("test -e ~/later")?.code == 1);
    let snapshots = server.json(&["snapshots", &agent.name])?;
    let mut ids = snapshots.as_array().context("no list")?.iter().filter_map(|s| s["id"].as_str());
    let undo = ids.find(|id| *id != snapshot).context("the present was not kept")?.to_owned();
    server.dorm(&["rollback", &agent.name, &undo])?.succeeded()?;
    ensure!(agent.sh_text("cat ~/later")?.trim() == "later");
    Ok(())
}

fn a_snapshot_tells_what_it_holds_beyond_the_one_before() -> Result<()> {
    let server = Server::shared()?;
    let agent = server.agent("measured")?;
    for (file, megabytes) in [("first", 20), ("second", 5)] {
        agent.sh(&format!("head -c {megabytes}M /dev/urandom > ~/{file}"))?.succeeded()?;
        server.dorm(&["snapshot", &agent.name, "--files-only", "--label", file])?.succeeded()?;
    }
    let held = || -> Result<Vec<u64>> {
        let all = server.json(&["snapshots", &agent.name])?;
        let held = all.as_array().context("no list")?.iter().map(|one| one["files"].as_u64());
        held.collect::<Option<_>>().context("a snapshot without a size")
    };
    let close = |held: u64, megabytes: u64| (megabytes << 20..(megabytes + 3) << 20).contains(&held);
    // Copies of what they are compared with, its template among it, make no difference.
    let fork = format!("{}-fork", agent.name);
    server.dorm(&["fork", &agent.name, &fork, "--from", "first", "--no-start"])?.succeeded()?;
    let (_fork, _another) = (server.adopt(&fork)?, server.agent("beside")?);
    let both = held()?;
    ensure!(both.len() == 2 && close(both[0], 20) && close(both[1], 5), "they hold {both:?}");
    server.dorm(&["snapshots", &agent.name, "--delete", "first"])?.succeeded()?;
    let left = held()?;
    ensure!(left.len() == 1 && close(left[0], 25), "what is left holds {left:?}");
    Ok(())
}
