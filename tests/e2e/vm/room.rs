//! What a machine has of the host's disk and memory: as much as it was promised, and no longer than it needs it.

use std::fs;
use std::os::unix::fs::MetadataExt;

use anyhow::{Context, Result, ensure};

use super::needs_machines;
use crate::harness::{self, Server};

pub(super) fn a_file_named_as_a_machines_disk_is_a_file_of_the_machine() -> Result<()> {
    needs_machines()?;
    let server = Server::start()?;
    let folder = tempfile::tempdir()?;
    let recipe = folder.path().join("recipe.toml");
    fs::write(&recipe, "from = \"base\"\nrun = [\"truncate -s 100G /disk && echo mine > /memory\"]\n")?;
    server.dorm(&["template", "build", "named", "-f", &recipe.display().to_string()])?.succeeded()?;
    let named = ["-T", "named", "--isolation", "vm", "--memory", "256M", "--cpus", "1", "--disk", "3G"];
    let agent = server.agent_with("named", &named)?;
    let seen = agent.sh_text("stat -c %s /disk; cat /memory; df -B1 --output=size / | tail -n 1")?;
    let words: Vec<&str> = seen.split_whitespace().collect();
    ensure!(words.len() == 3 && words[0] == (100u64 << 30).to_string() && words[1] == "mine", "{seen}");
    // It has grown from what its template takes. The file system keeps some percent for itself.
    let (size, asked) = (words[2].parse::<u64>()?, 3 << 30);
    ensure!((asked / 16 * 15..=asked).contains(&size), "its disk is larger than it may be, or smaller than it was asked for: {seen}");
    Ok(())
}

pub(super) fn a_disk_that_qemu_makes_longer_gives_a_machine_no_more_room() -> Result<()> {
    needs_machines()?;
    let server = Server::shared()?;
    let agent = server.agent_with("longer", &["--isolation", "vm", "--memory", "256M", "--cpus", "1"])?;
    agent.stop()?;
    let limit = || Ok::<_, anyhow::Error>(agent.stats()?["disk_limit"].as_u64());
    let before = limit()?;
    // As who has broken out into QEMU could.
    let disk = server.data.join("pool/homes").join(&agent.id).join("disk");
    fs::File::options().write(true).open(disk)?.set_len(1 << 44)?;
    ensure!(before.is_some() && limit()? == before, "it may hold {:?} bytes, and {before:?} before", limit()?);
    Ok(())
}

/// Starts processes until it may not.
const MANY: &str = "
import os, signal, time
children = []
try:
    while len(children) < 300:
        child = os.fork()
        if child == 0:
            time.sleep(600)
            os._exit(0)
        children.append(child)
except BlockingIOError:
    pass
for child in children:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
print(len(children))
";

pub(super) fn runs_in_a_machine_have_as_many_processes_as_they_may() -> Result<()> {
    needs_machines()?;
    let server = Server::shared()?;
    let agent = server.agent_with("many", &["--isolation", "vm", "--memory", "256M", "--cpus", "1", "--pids", "60"])?;
    let started: u32 = agent.exec_with(&[], &["python3", "-c", MANY])?.text()?.parse()?;
    ensure!((40..60).contains(&started), "{started} processes were started");
    Ok(())
}

pub(super) fn what_a_machine_had_in_memory_is_nowhere_once_that_is_given_up() -> Result<()> {
    needs_machines()?;
    let server = Server::shared()?;
    let agent = server.agent_with("forgetful", &["--isolation", "vm", "--memory", "256M", "--cpus", "1"])?;
    let pool = server.data.join("pool");
    let take = |flags: &[&str]| Ok::<_, anyhow::Error>(server.dorm(&[&["snapshot", &agent.name], flags].concat())?.text()?.trim().to_owned());
    let has_memory = |snapshot: &str| pool.join("snapshots").join(snapshot).join("memory").exists();
    let full = take(&[])?;
    ensure!(has_memory(&full), "a full snapshot has no memory");
    ensure!(!has_memory(&take(&["--files-only"])?), "a snapshot of files has the memory");
    for (suffix, from) in [("live", &[][..]), ("full", &["--from", &full])] {
        let name = format!("{}-{suffix}", agent.name);
        server.dorm(&[&["fork", &agent.name, &name, "--files-only", "--no-start"], from].concat())?.succeeded()?;
        let fork = server.adopt(&name)?;
        ensure!(!pool.join("homes").join(&fork.id).join("memory").exists(), "a fork of files has the memory: {suffix}");
    }

    let memory = pool.join("homes").join(&agent.id).join("memory");
    agent.hibernate()?;
    ensure!(memory.exists(), "its memory is not in its home");
    agent.stop()?;
    ensure!(!memory.exists(), "it is stopped, and what was in its memory is still on disk");
    ensure!(agent.sh_text("echo started")? == "started");
    Ok(())
}

pub(super) fn files_are_not_kept_without_a_memory_that_has_what_the_disk_lacks() -> Result<()> {
    needs_machines()?;
    let server = Server::shared()?;
    let agent = server.agent_with("behind", &["--isolation", "vm", "--memory", "256M", "--cpus", "1"])?;
    agent.pause()?;
    // As the daemon does where the guest says that the disk is too slow.
    let memory = fs::File::open(server.data.join("pool/homes").join(&agent.id).join("memory"))?;
    rustix::fs::fsetxattr(&memory, c"trusted.dorm.unwritten", b"", rustix::fs::XattrFlags::empty())?;
    let fork = format!("{}-fork", agent.name);
    for refused in [&["snapshot", &agent.name, "--files-only"][..], &["fork", &agent.name, &fork, "--files-only"]] {
        server.dorm(refused)?.refused(4, &["the machine's disk has not taken all that was written yet"])?;
    }
    let full = server.dorm(&["snapshot", &agent.name])?.text()?.trim().to_owned();
    ensure!(agent.state()? == "standby", "it is {} after its snapshots", agent.state()?);
    // Its disk has everything by now.
    agent.wake()?;
    server.dorm(&["snapshot", &agent.name, "--files-only"])?.succeeded()?;
    // That of the snapshot has not.
    let from_full = ["fork", &agent.name, &fork, "--from", &full];
    server.dorm(&[&from_full[..], &["--files-only"]].concat())?.refused(4, &["the machine's disk has not taken all that was written yet"])?;
    server.dorm(&from_full)?.succeeded()?;
    let fork = server.adopt(&fork)?;
    ensure!(fork.sh_text("echo whole")? == "whole");
    Ok(())
}

/// Takes two connections into its queue, and none out of it.
const DEAF: &str = "import socket, time; s = socket.socket(); s.bind(('127.0.0.1', 8124)); s.listen(1); time.sleep(3600)";

pub(super) fn connections_that_nobody_accepts_leave_room_for_others() -> Result<()> {
    needs_machines()?;
    let server = Server::shared()?;
    let agent = server.agent_with("deaf", &["--isolation", "vm", "--memory", "256M", "--cpus", "1"])?;
    agent.exec_with(&["-d"], &["python3", "-c", DEAF])?.succeeded()?;
    agent.until("it listens", "ss -ltn | grep -q :8124")?;
    let url = server.json(&["url", &agent.name, "8124"])?;
    let token = url["token"].as_str().context("a token")?;
    let name = format!("8124-{}.localhost", agent.id);
    let headers = [("Host", name.as_str()), ("e2b-traffic-access-token", token)];
    std::thread::scope(|scope| {
        // More than there can be streams on which the guest has not said anything.
        for _ in 0..300 {
            let (server, headers) = (&server, &headers);
            scope.spawn(move || drop(server.http_with("GET", "/", headers, b"")));
        }
        agent.until("they wait", "test $(ss -tn state syn-sent | grep -c :8124) -gt 100")?;
        let heard = agent.sh_text("echo heard; pkill python3");
        ensure!(heard? == "heard");
        Ok(())
    })
}

/// Each with the megabytes that are taken, by what, and given up again, by what.
const TAKEN: [(&str, u64, &str, &str); 2] = [
    (
        "memory",
        150,
        "python3 -c \"x = b'x' * (150 << 20); open('/tmp/taken', 'w'); __import__('time').sleep(3600)\" >/dev/null 2>&1 & \
         until test -e /tmp/taken; do sleep 0.1; done",
        "pkill python3",
    ),
    ("disk", 300, "head -c 300M /dev/zero > /var/taken && sync", "rm /var/taken && sync"),
];

pub(super) fn what_a_machine_gives_up_the_host_has_again() -> Result<()> {
    needs_machines()?;
    let server = Server::shared()?;
    let agent = server.agent_with("frugal", &["--isolation", "vm", "--memory", "512M", "--cpus", "1"])?;
    let home = server.data.join("pool/homes").join(&agent.id);
    for (file, megabytes, take, give) in TAKEN {
        let holds = || -> Result<u64> { Ok((fs::metadata(home.join(file))?.blocks() * 512) >> 20) };
        agent.root(take)?.succeeded()?;
        // Not compared with what it held before: some of that may have been free already, and on its way back.
        let most = holds()?;
        ensure!(most >= megabytes / 10 * 9, "{megabytes} MB were taken, and the {file} holds {most} MB");
        agent.root(give)?.succeeded()?;
        harness::eventually(&format!("the {file} holds less than {most} MB again"), || {
            Ok((holds()? <= most - megabytes / 10 * 7).then_some(()))
        })?;
    }
    Ok(())
}
