//! Boxes that take all they can get: only they themselves are hurt, and it is told as what it is.

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::harness::{self, Agent, Options, Server};

harness::tests![
    a_fork_bomb_hurts_its_own_box_only,
    a_memory_hog_is_killed_and_told,
    files_in_memory_count_as_memory,
    a_box_whose_guest_is_squeezed_answers_again,
    a_full_disk_is_told_and_can_be_emptied,
    a_rollback_does_not_begin_the_quota_anew,
    a_million_files_end_at_the_quota,
    what_the_host_counts_by_user_is_counted_by_box,
    boxes_that_came_back_from_disk_watch_as_much_as_others,
    terminals_of_a_box_have_an_end,
    two_busy_loops_share_half_a_core,
    traffic_with_the_disk_has_the_limit_that_was_set,
    the_guest_stays_small,
    stats_tell_what_is_used,
    the_memory_limit_holds_again_after_a_start,
    the_process_limit_holds_again_after_a_start,
    a_box_at_its_process_limit_comes_back_with_its_memory,
];

fn number(stats: &Value, field: &str) -> Result<u64> {
    stats[field].as_u64().with_context(|| format!("{field} in {stats}"))
}

/// The daemon and another box answer.
pub(crate) fn others_are_well(other: &Agent) -> Result<()> {
    ensure!(other.sh_text("echo well > ~/proof && cat ~/proof")? == "well");
    ensure!(other.server.get("/healthz")?.status == 200, "the daemon does not answer");
    Ok(())
}

fn a_fork_bomb_hurts_its_own_box_only() -> Result<()> {
    let server = Server::shared()?;
    let other = server.agent("bystander")?;
    // A kernel of its own needs more of a processor to get there, and a machine has no limit but its memory.
    let limits = match harness::engines::isolation() {
        Some(_) => ["--pids", "60", "--cpus", "1", "--memory", "256M"],
        None => ["--pids", "60", "--cpus", "0.3", "--memory", "2G"],
    };
    let agent = server.agent_with("bomb", &limits)?;
    let run = agent.exec_with(&["-d"], &["bash", "-c", "bomb() { bomb | bomb & }; bomb; sleep 3600"])?;
    run.succeeded()?;
    match harness::engines::isolation().as_deref() {
        Some("gvisor") => gvisor_has_no_thread_left(&agent, &other)?,
        Some(_) => a_machine_is_full_of_processes(&agent, &other)?,
        None => forks_are_refused(&agent)?,
    }
    others_are_well(&other)?;
    // Whatever it is by now.
    server.dorm(&["stop", &agent.name])?;
    agent.until("it starts again", "true")?;
    ensure!(agent.sh_text("pgrep -c bash || true")? == "0", "the bomb goes on");
    others_are_well(&other)
}

fn forks_are_refused(agent: &Agent) -> Result<()> {
    let stats = harness::eventually("a fork is refused", || {
        let stats = agent.stats()?;
        Ok((number(&stats, "forks_refused")? > 0).then_some(stats))
    })?;
    ensure!(number(&stats, "pids")? <= 60, "{stats}");
    let table = agent.server.dorm(&["stats", &agent.name])?.text()?;
    ensure!(table.contains("process limit"), "{table}");
    let refused = agent.exec(&["true"])?;
    if refused.code != 0 {
        let told = refused.stderr.to_lowercase();
        ensure!(told.contains("process") || told.contains("resource"), "{refused}");
    }
    Ok(())
}

/// It ends with the whole box then.
fn gvisor_has_no_thread_left(agent: &Agent, other: &Agent) -> Result<()> {
    let told = harness::eventually("the box ends, or a fork is refused", || {
        others_are_well(other)?;
        let shown = agent.show()?;
        if shown["state"] == "stopped" || shown["state"] == "failed" {
            return Ok(Some(shown["reason"].to_string()));
        }
        let refused = number(&agent.stats()?, "forks_refused")?;
        Ok((refused > 0).then(|| format!("{refused} forks refused")))
    })?;
    ensure!(told.contains("process 1 of the box ended") || told.contains("forks refused"), "{told}");
    Ok(())
}

/// Its kernel ends processes for want of memory, or refuses more of them, and perhaps nothing else has a chance; QEMU is one process.
fn a_machine_is_full_of_processes(agent: &Agent, other: &Agent) -> Result<()> {
    harness::eventually("the bomb goes off", || {
        others_are_well(other)?;
        // Its kernel counts what it refused; whoever asks may be refused himself.
        let counted = agent.sh("grep -q '^max [1-9]' /sys/fs/cgroup/box/pids.events")?;
        let told = counted.stderr.to_lowercase();
        Ok((counted.code == 0 || told.contains("process") || told.contains("resource")).then_some(()))
    })
}

fn a_memory_hog_is_killed_and_told() -> Result<()> {
    let server = Server::shared()?;
    let other = server.agent("bystander")?;
    let agent = server.agent_with("hog", &["--memory", "128M"])?;
    let pid = agent.pid()?;
    let output = agent.exec(&["python3", "-c", "x = [bytearray(1 << 20) for _ in range(1024)]"])?;
    if harness::engines::behind_gvisor() {
        // How the process ended it does not tell, and it may end itself.
        ensure!(output.code != 0, "{output}");
        others_are_well(&other)?;
        agent.until("it is there, or starts again", "true")?;
        let told = match agent.pid()? == pid {
            true => number(&agent.stats()?, "oom_kills")? >= 1,
            false => agent.events()?.iter().any(|event| event["reason"].as_str().is_some_and(|why| why.contains("ended"))),
        };
        ensure!(told, "nobody says what happened: {} {:?}", agent.stats()?, agent.events()?);
        return others_are_well(&other);
    }
    ensure!(output.code == 137 && output.stderr.contains("out of memory"), "{output}");
    // Whom a machine's own kernel kills, nobody else counts.
    if !harness::engines::in_machines() {
        ensure!(number(&agent.stats()?, "oom_kills")? >= 1, "{}", agent.stats()?);
        ensure!(server.dorm(&["stats", &agent.name])?.text()?.contains("out of memory"));
    }
    ensure!(agent.sh_text("echo alive")? == "alive" && agent.pid()? == pid, "the box did not survive");
    others_are_well(&other)
}

fn files_in_memory_count_as_memory() -> Result<()> {
    // A machine has its own kernel in it, and QEMU takes some for itself.
    let (size, own) = if harness::engines::in_machines() { (256, 320 << 20) } else { (128, 0) };
    let agent = Server::shared()?.agent_with("shm", &["--memory", &format!("{size}M")])?;
    let output = agent.root("head -c 400M /dev/zero > /dev/shm/fill; code=$?; head -c 400M /dev/zero > /run/fill; exit $code")?;
    ensure!(output.code != 0, "400 MB fit into a box of {size}: {output}");
    ensure!(number(&agent.stats()?, "memory_used")? <= (size << 20) + own, "{}", agent.stats()?);
    agent.root("rm -f /dev/shm/fill /run/fill")?;
    ensure!(agent.sh_text("echo alive")? == "alive");
    Ok(())
}

fn a_box_whose_guest_is_squeezed_answers_again() -> Result<()> {
    let agent = Server::shared()?.agent_with("squeezed", &["--memory", "96M"])?;
    // All processes look for memory at once, so that each kill costs the more the more there are: minutes in emulation.
    let doublings = if harness::slowness() > 1 { 5 } else { 8 };
    let hogs = format!("import os\nfor _ in range({doublings}): os.fork()\nx = bytearray(64 << 20)");
    for _ in 0..3 {
        agent.exec(&["python3", "-c", &hogs])?;
    }
    ensure!(agent.sh_text("echo alive")? == "alive");
    Ok(())
}

fn a_full_disk_is_told_and_can_be_emptied() -> Result<()> {
    let server = Server::shared()?;
    let other = server.agent("bystander")?;
    let agent = server.agent_with_room("disk", 64, &[])?;
    let full = agent.root("dd if=/dev/urandom of=/root/fill bs=1M count=200; code=$?; sync; exit $code")?;
    let told = full.stderr.to_lowercase();
    ensure!(full.code != 0 && (told.contains("quota") || told.contains("no space")), "{full}");
    others_are_well(&other)?;
    let stats = agent.stats()?;
    let used = number(&stats, "disk_used")?;
    // Of a machine it is what its disk and its memory take, as far as they are written.
    ensure!(harness::engines::in_machines() || used > 32 << 20 && used <= 72 << 20, "{stats}");
    agent.root("rm /root/fill && sync && sleep 0.1")?.succeeded()?;
    harness::eventually("there is room again", || {
        Ok((agent.root("sync; head -c 8M /dev/urandom > /root/new && sync")?.code == 0).then_some(()))
    })?;
    agent.stop()?;
    ensure!(agent.root_text("stat -c %s /root/new")? == (8 << 20).to_string());
    Ok(())
}

/// Whether the kernel counts what is written for whoever wrote it.
fn counts_simply() -> bool {
    let filesystems = std::fs::read_dir("/sys/fs/btrfs").into_iter().flatten().flatten();
    let mut modes = filesystems.filter_map(|found| std::fs::read_to_string(found.path().join("qgroups/mode")).ok());
    modes.any(|mode| mode.trim() == "squota")
}

fn a_rollback_does_not_begin_the_quota_anew() -> Result<()> {
    let server = Server::shared()?;
    if !counts_simply() {
        eprintln!("skipped: this kernel has no simple quotas, and counts what the home alone holds");
        return Ok(());
    }
    let agent = server.agent_with("twice", &["--disk", "96M"])?;
    let write = |agent: &Agent, name: &str| agent.root(&format!("head -c 56M /dev/urandom > /root/{name} && sync"));
    write(&agent, "one")?.succeeded()?;
    let snapshot = server.dorm(&["snapshot", &agent.name, "--files-only"])?.text()?.trim().to_owned();
    server.dorm(&["rollback", &agent.name, &snapshot])?.succeeded()?;
    ensure!(number(&agent.stats()?, "disk_used")? > 48 << 20, "{}", agent.stats()?);
    ensure!(number(&agent.stats()?, "disk_limit")? == 96 << 20, "{}", agent.stats()?);
    ensure!(write(&agent, "two")?.code != 0, "it has 112M on a disk of 96M");
    // What a fork shares with its source is not its own.
    let name = format!("{}-fork", agent.name);
    server.dorm(&["fork", &agent.name, &name, "--from", &snapshot, "--files-only"])?.succeeded()?;
    let fork = server.adopt(&name)?;
    write(&fork, "two")?.succeeded()?;
    Ok(())
}

fn a_million_files_end_at_the_quota() -> Result<()> {
    let server = Server::shared()?;
    let other = server.agent("bystander")?;
    let agent = server.agent_with("inodes", &["--disk", "64M"])?;
    let script = r#"
import errno, os
os.mkdir("/root/many")
made = 0
try:
    while made < 1000000:
        os.mknod(f"/root/many/{made:0120d}")
        made += 1
except OSError as e:
    print(errno.errorcode[e.errno], made)
"#;
    let output = agent.python(script)?.text()?;
    ensure!(output.starts_with("EDQUOT") || output.starts_with("ENOSPC"), "a million files fit: {output}");
    others_are_well(&other)?;
    ensure!(agent.sh_text("echo alive")? == "alive");
    Ok(())
}

/// Python that takes all inotify instances and message queues it can get, and tells how many.
const TAKE_ALL: &str = "import ctypes, sys, time
c = ctypes.CDLL(None)
watches = sum(c.inotify_init1(0) >= 0 for _ in range(4000))
c.mq_open.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p]
queues = sum(c.mq_open(b'/q%d' % n, 0o102, 0o600, None) >= 0 for n in range(200))
print(watches, queues, flush=True)
time.sleep(float(sys.argv[1]))";

fn what_the_host_counts_by_user_is_counted_by_box() -> Result<()> {
    let server = Server::shared()?;
    let other = server.agent("bystander")?;
    let agent = server.agent("greedy")?;
    let run = agent.exec_with(&["-d", "-u", "root"], &["python3", "-c", TAKE_ALL, "3600"])?.text()?;
    let taken = harness::eventually("all is taken", || {
        let said = server.dorm(&["logs", &agent.name, &run])?.stdout();
        Ok(said.contains(' ').then(|| said.trim().to_owned()))
    })?;
    ensure!(!taken.starts_with("0 ") && !taken.ends_with(" 0"), "{taken}");
    let left = other.exec_with(&["-u", "root"], &["python3", "-c", TAKE_ALL, "0"])?.text()?;
    ensure!(left == taken, "one box took {taken} and left {left}");
    Ok(())
}

/// The kernel counts what they watch as root's, of which there are 128 instances on a machine as it comes.
fn boxes_that_came_back_from_disk_watch_as_much_as_others() -> Result<()> {
    let server = Server::shared()?;
    let watch = "import ctypes, sys, time
c = ctypes.CDLL(None)
print(sum(c.inotify_init1(0) >= 0 for _ in range(100)), flush=True)
time.sleep(float(sys.argv[1]))";
    let agents = [server.agent("watcher")?, server.agent("another")?];
    for agent in &agents {
        let run = agent.exec_with(&["-d"], &["python3", "-c", watch, "3600"])?.text()?;
        harness::eventually("it watches", || {
            let said = server.dorm(&["logs", &agent.name, &run])?.stdout();
            Ok((said.trim() == "100").then_some(()))
        })?;
        agent.hibernate()?;
        agent.wake()?;
        let events = agent.events()?;
        ensure!(events.last().is_some_and(|event| event["reason"] == "woken from disk"), "{events:?}");
    }
    ensure!(agents[0].exec(&["python3", "-c", watch, "0"])?.text()? == "100");
    Ok(())
}

fn terminals_of_a_box_have_an_end() -> Result<()> {
    let agent = Server::shared()?.agent("terminals")?;
    let open = "import os\nn = 0\ntry:\n while n < 5000: os.open('/dev/ptmx', os.O_RDWR); n += 1\nexcept OSError: pass\nprint(n)";
    let opened: u32 = agent.exec(&["python3", "-c", open])?.text()?.parse()?;
    ensure!((64..=512).contains(&opened), "{opened} terminals");
    Ok(())
}

fn two_busy_loops_share_half_a_core() -> Result<()> {
    let agent = Server::shared()?.agent_with("cpu", &["--cpus", "0.5"])?;
    let script = "(while :; do :; done) & (while :; do :; done) & sleep 3; kill %1 %2";
    let used = || -> Result<f64> { agent.stats()?["cpu_seconds"].as_f64().context("cpu_seconds") };
    let looked_at = || -> Result<()> {
        let (before, begun) = (used()?, std::time::Instant::now());
        agent.exec(&["bash", "-c", script])?.succeeded()?;
        let rate = (used()? - before) / begun.elapsed().as_secs_f64();
        ensure!(rate < 0.85, "two loops used {rate:.2} cores of half a core");
        ensure!(rate > 0.02, "the loops did not run: {rate:.2}");
        Ok(())
    };
    looked_at()?;
    if agent.show()?["isolation"] != "container" {
        return Ok(());
    }
    // Whoever brings it back has all cores.
    agent.hibernate()?;
    looked_at().context("after a wake from disk")
}

fn traffic_with_the_disk_has_the_limit_that_was_set() -> Result<()> {
    let config = "[defaults]\nio = \"8M\"\n";
    for beside_pool in [false, true] {
        let server = Server::start_with(&Options { beside_pool, config, ..Options::default() })?;
        if beside_pool {
            server.dorm(&["template", "build", "base"])?.succeeded()?;
        }
        let agent = server.agent("traffic")?;
        let files = ["io.max", "blkio.throttle.read_bps_device", "blkio.throttle.write_bps_device"];
        let groups = server.remains.cgroups().into_iter().map(|group| group.join(&agent.id));
        let set: Vec<String> = groups
            .flat_map(|group| files.map(|file| group.join(file)))
            .filter_map(|file| std::fs::read_to_string(file).ok())
            .collect();
        let limited = set.iter().all(|text| text.contains(&(8 << 20).to_string()));
        ensure!(!set.is_empty() && limited, "{set:?}");
        agent.root("head -c 2M /dev/urandom > /root/file && sync")?.succeeded()?;
    }
    Ok(())
}

fn the_guest_stays_small() -> Result<()> {
    let server = Server::shared()?;
    let agent = server.agent("small")?;
    for _ in 0..20 {
        agent.exec(&["true"])?.succeeded()?;
    }
    agent.exec(&["head", "-c", "30M", "/dev/zero"])?.succeeded()?;
    server.dorm_with_input(&["cp", "-", &agent.at("/tmp/big")], &vec![7; 30 << 20])?.succeeded()?;
    server.dorm(&["cp", &agent.at("/tmp/big"), "-"])?.succeeded()?;
    harness::eventually("the guest is back to at most 5 MB", || {
        let status = agent.root_text("cat /proc/1/status")?;
        let line = status.lines().find(|l| l.starts_with("VmRSS:")).context("VmRSS")?;
        let kilobytes: u64 = line.split_whitespace().nth(1).context("a number")?.parse()?;
        Ok((kilobytes <= 5 * 1024).then_some(()))
    })
}

fn stats_tell_what_is_used() -> Result<()> {
    let server = Server::shared()?;
    let agent = server.agent("used")?;
    agent.exec_with(&["-d"], &["python3", "-c", "x = b'x' * (60 << 20); import time; time.sleep(3600)"])?.succeeded()?;
    agent.root("head -c 20M /dev/urandom > /root/file && sync")?.succeeded()?;
    harness::eventually("stats show the memory, the process and the file", || {
        let stats = agent.stats()?;
        let enough = number(&stats, "memory_used")? > 60 << 20
            && number(&stats, "memory_peak")? >= number(&stats, "memory_used")?
            && number(&stats, "pids")? >= 2
            && number(&stats, "disk_used")? >= 20 << 20
            && stats["state"] == "running";
        Ok(enough.then_some(()))
    })?;
    agent.stop()?;
    let stats = agent.stats()?;
    ensure!(number(&stats, "pids")? == 0 && number(&stats, "disk_used")? >= 20 << 20, "{stats}");
    Ok(())
}

fn the_memory_limit_holds_again_after_a_start() -> Result<()> {
    let agent = Server::shared()?.agent_with("held", &["--memory", "128M"])?;
    agent.stop()?;
    let output = agent.exec(&["python3", "-c", "x = [bytearray(1 << 20) for _ in range(1024)]"])?;
    // gVisor does not tell how a process ended whose memory the host took, and may end with it.
    let ended = if harness::engines::behind_gvisor() { output.code != 0 } else { output.code == 137 };
    ensure!(ended, "{output}");
    ensure!(agent.sh_text("echo alive")? == "alive");
    Ok(())
}

fn the_process_limit_holds_again_after_a_start() -> Result<()> {
    let agent = Server::shared()?.agent_with("held", &["--pids", "50"])?;
    agent.stop()?;
    let forks = "import os, sys\nn = 0\ntry:\n while n < 200:\n  if os.fork() == 0: __import__('time').sleep(5); os._exit(0)\n  n += 1\nexcept OSError: pass\nprint(n)";
    let made: u32 = agent.exec(&["python3", "-c", forks])?.text()?.parse()?;
    ensure!(made < 50, "{made} processes were made");
    Ok(())
}

fn a_box_at_its_process_limit_comes_back_with_its_memory() -> Result<()> {
    let agent = Server::shared()?.agent_with("crowded", &["--pids", "60"])?;
    let fill = "for i in $(seq 100); do sleep 7171 & done; wait";
    agent.exec_with(&["-d"], &["bash", "-c", fill])?.succeeded()?;
    let pids = || number(&agent.stats()?, "pids");
    harness::eventually("it is full", || Ok((pids()? == 60).then_some(())))?;
    agent.hibernate()?;
    agent.wake()?;
    let events = agent.events()?;
    ensure!(events.last().is_some_and(|event| event["reason"] == "woken from disk"), "{events:?}");
    ensure!((55..=60).contains(&pids()?), "{}", agent.stats()?);
    Ok(())
}
