//! How memory images come back, within bounds, or wait until they can; and how they go, without a trace in the home.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::harness::{self, Agent, Options, Server};

harness::tests![
    a_durable_agent_in_standby_keeps_its_image_over_daemons_and_its_memory_over_a_reboot,
    a_durable_box_that_ends_in_its_sleep_loses_nothing,
    reading_the_files_of_an_agent_that_sleeps_costs_it_nothing,
    a_restore_that_does_not_come_to_an_end_is_given_up_and_the_memory_is_not,
    a_criu_that_is_killed_at_its_work_costs_no_memory,
    a_criu_that_is_killed_leaves_nothing_in_the_way_of_the_next,
    where_no_criu_is_found_memory_stays_where_it_is_and_all_else_goes_on,
    a_helper_that_stands_still_does_not_hold_up_the_daemons_end,
    an_image_that_is_given_up_leaves_no_strange_files_in_the_home,
    copies_of_the_files_of_an_agent_that_sleeps_have_no_strange_files,
    a_crash_leaves_no_strange_files_in_the_home,
];

const WAITING: &str = "sleep 8181";

/// A process that is in memory alone.
fn waiting(agent: &Agent) -> Result<()> {
    agent.exec_with(&["-d"], &["sleep", "8181"])?.succeeded().map(drop)
}

fn still_waits(agent: &Agent) -> Result<()> {
    agent.sh(&format!("pgrep -fx '{WAITING}'"))?.succeeded().context("the memory is lost")?;
    Ok(())
}

/// The CRIU that is kept ready for the next restore.
fn spare_criu(server: &Server) -> Result<Pid> {
    harness::eventually("a criu is ready", || {
        // With cgroups of version 2 it is in the daemon's own group until it is needed.
        let Some(criu) = harness::child_of(server.pid()?, ["criu", "swrk"]) else {
            return Ok(None);
        };
        // The daemon knows of it once it has nothing to do but wait.
        let took = || fs::read_to_string(format!("/proc/{criu}/schedstat")).unwrap_or_default();
        let before = took();
        thread::sleep(Duration::from_millis(100));
        Ok(Pid::from_raw(criu).filter(|_| took() == before))
    })
}

/// As a backup does, while the daemon runs or is stopped for it.
fn reading_the_files_of_an_agent_that_sleeps_costs_it_nothing() -> Result<()> {
    let server = Server::start()?;
    let agent = server.agent("read")?;
    waiting(&agent)?;
    let asleep = || -> Result<()> {
        agent.sh("rm -rf ~/a && mkdir -p ~/a/b && echo kept > ~/a/b/file")?.succeeded()?;
        agent.hibernate()
    };
    let home = server.data.join("pool/homes").join(&agent.id);
    let read = || -> Result<()> {
        let tar = Command::new("tar").args(["--create", "--file", "/dev/zero", "--directory"]).arg(&home).arg(".").status()?;
        ensure!(tar.success(), "tar: {tar}");
        rustix::fs::sync();
        Ok(())
    };
    asleep()?;
    read()?;
    still_waits(&agent)?;
    asleep()?;
    server.sigterm()?;
    // A pool in a file is read by nobody without a daemon.
    if home.exists() {
        read()?;
    }
    server.launch(&[])?;
    still_waits(&agent)
}

fn a_restore_that_does_not_come_to_an_end_is_given_up_and_the_memory_is_not() -> Result<()> {
    let server = Server::start()?;
    let agent = server.agent("endless")?;
    waiting(&agent)?;
    agent.hibernate()?;
    server.kill9()?;
    server.launch(&[("DORM_RESTORE_LIMIT", "1500")])?;
    kill_process(spare_criu(&server)?, Signal::STOP)?;
    let refused = server.dorm(&["wake", &agent.name])?;
    refused.refused(1, &["did not come to an end", "still on disk"])?;
    ensure!(agent.state()? == "hibernated", "it is {}", agent.show()?);
    server.in_order()?;
    // Nothing was held against the image, and the next restore has time enough.
    server.kill9()?;
    server.launch(&[])?;
    still_waits(&agent)
}

fn a_criu_that_is_killed_at_its_work_costs_no_memory() -> Result<()> {
    let server = Server::start()?;
    let agent = server.agent("killed")?;
    waiting(&agent)?;
    agent.hibernate()?;
    let criu = spare_criu(&server)?;
    kill_process(criu, Signal::STOP)?;
    let refused = thread::scope(|scope| {
        let waking = scope.spawn(|| server.dorm(&["wake", &agent.name]));
        let mounts = format!("/proc/{}/mountinfo", criu.as_raw_nonzero());
        let has_home = || Ok(fs::read_to_string(&mounts)?.contains(&agent.id).then_some(()));
        let taken = harness::eventually("it is taken for the box", has_home);
        let killed = kill_process(criu, Signal::KILL);
        let refused = waking.join().map_err(|_| anyhow::anyhow!("the wake broke off"))?;
        taken.and(killed.map_err(Into::into)).and(refused)
    })?;
    refused.refused(1, &["criu was killed", "still on disk"])?;
    ensure!(agent.state()? == "hibernated", "it is {}", agent.show()?);
    server.in_order()?;
    still_waits(&agent)
}

/// Holds a file that has no name, and enough memory for a restore to be met at it.
const NAMELESS: &str = "import os, time
file = open('/home/user/nameless', 'w+')
print('kept', file=file, flush=True)
os.unlink('/home/user/nameless')
memory = os.urandom(200 << 20)
open('/home/user/ready', 'w')
while not os.path.exists('/home/user/ask'): time.sleep(0.05)
file.seek(0)
open('/home/user/answer.new', 'w').write(file.read())
os.rename('/home/user/answer.new', '/home/user/answer')";

/// CRIU makes a file for one without a name, and takes it away at its end.
fn a_criu_that_is_killed_leaves_nothing_in_the_way_of_the_next() -> Result<()> {
    let server = Server::start()?;
    let agent = server.agent("nameless")?;
    agent.exec_with(&["-d"], &["python3", "-c", NAMELESS])?.succeeded()?;
    agent.until("it holds the file", "test -e ready")?;
    let home = server.data.join("pool/homes").join(&agent.id).join("home/user");
    let ghosts = || -> Result<Vec<String>> {
        let names = fs::read_dir(&home)?.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
        let names: Result<Vec<String>> = names.collect();
        Ok(names?.into_iter().filter(|name| name.ends_with(".ghost")).collect())
    };
    // A restore that is over before it is met has to be done again.
    for _ in 0..20 {
        agent.hibernate()?;
        let criu = spare_criu(&server)?;
        let woken = thread::scope(|scope| {
            let waking = scope.spawn(|| server.dorm(&["wake", &agent.name]));
            while !waking.is_finished() {
                if !ghosts()?.is_empty() {
                    let _ = kill_process(criu, Signal::KILL);
                    break;
                }
            }
            waking.join().map_err(|_| anyhow::anyhow!("the wake broke off"))?
        })?;
        if woken.code != 0 {
            woken.refused(1, &["criu was killed", "still on disk"])?;
            ensure!(!ghosts()?.is_empty(), "the killed criu has left nothing");
            agent.wake()?;
            ensure!(ghosts()?.is_empty(), "it is left in the home: {:?}", ghosts()?);
            agent.sh("touch ask")?.succeeded()?;
            return agent.until("the file is read", "grep -qx kept answer");
        }
    }
    anyhow::bail!("no restore was met at its work")
}

/// Every program of this host by a link in `folder`, but CRIU.
fn link_all_but_criu(folder: &Path) -> Result<()> {
    for from in ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin"] {
        let programs = fs::read_dir(from).into_iter().flatten().flatten();
        for program in programs.filter(|program| program.file_name() != "criu") {
            match symlink(program.path(), folder.join(program.file_name())) {
                // The first one is found, as in a path.
                Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(error.into()),
                _ => {}
            }
        }
    }
    Ok(())
}

fn where_no_criu_is_found_memory_stays_where_it_is_and_all_else_goes_on() -> Result<()> {
    let server = Server::start()?;
    let asleep = server.agent("asleep")?;
    waiting(&asleep)?;
    asleep.hibernate()?;
    let folder = tempfile::tempdir()?;
    link_all_but_criu(folder.path())?;
    let (programs, nothing) = (folder.path().display().to_string(), folder.path().join("criu").display().to_string());
    let without_criu = [("PATH", programs.as_str()), ("DORM_CRIU", nothing.as_str())];
    // What an earlier daemon found and noted is not there for this one.
    ensure!(server.data.join("criu.json").exists(), "the daemon has not noted what it found");
    server.kill9()?;
    server.launch(&without_criu)?;

    let awake = server.agent("awake")?;
    waiting(&awake)?;
    let why = "criu is not installed";
    let refused = server.dorm(&["hibernate", &awake.name])?;
    refused.refused(4, &["memory images cannot be made on this machine", why, "`dorm pause` and `dorm stop` work"])?;
    ensure!(awake.state()? == "running", "it is {}", awake.show()?);
    awake.pause()?;
    awake.wake()?;
    server.dorm_with_input(&["cp", "-", &awake.at("file")], b"copied")?.succeeded()?;
    server.dorm(&["snapshot", &awake.name, "--label", "files", "--files-only"])?.succeeded()?;
    ensure!(server.dorm(&["cp", &awake.at("file"), "-"])?.text()? == "copied");
    still_waits(&awake)?;

    let name = asleep.name.as_str();
    for verb in [&["wake", name][..], &["exec", name, "--", "true"]] {
        server.dorm(verb)?.refused(1, &["cannot be brought back on this machine now", why, "still on disk"])?;
        ensure!(asleep.state()? == "hibernated", "it is {}", asleep.show()?);
    }
    let mut doctor = server.command(&["doctor", "--json"]);
    doctor.envs(without_criu);
    let found: Vec<Value> = serde_json::from_str(&harness::run(doctor, b"")?.text()?)?;
    let criu = found.iter().find(|check| check["name"] == "criu").context("the doctor does not speak of criu")?;
    let says = criu["status"] == "warn" && criu["found"] == why && criu["fix"].to_string().contains("setup-criu");
    ensure!(says, "{criu}");
    server.in_order()?;

    server.kill9()?;
    server.launch(&[])?;
    still_waits(&asleep)?;
    awake.hibernate()?;
    still_waits(&awake)
}

fn a_helper_that_stands_still_does_not_hold_up_the_daemons_end() -> Result<()> {
    let server = Server::start()?;
    kill_process(spare_criu(&server)?, Signal::STOP)?;
    ensure!(server.sigterm()? == 0);
    server.launch(&[])
}

/// A file that is open under a name which is gone, and has another: CRIU gives it a third. And one whose name is no text.
const RENAMED: &str = "cd ~; echo linked > first; ln first second; exec 3< first; rm first; \
                       echo text > $'.\\344lter'; exec 4< $'.\\344lter'; touch ready; sleep 600";

/// Behind gVisor, whose images cannot have such files, it has the other name alone.
fn hold_a_renamed_file(agent: &Agent) -> Result<()> {
    if harness::engines::behind_gvisor() {
        return agent.sh("cd ~; echo linked > second")?.succeeded().map(drop);
    }
    agent.exec_with(&["-d"], &["bash", "-c", RENAMED])?.succeeded()?;
    agent.until("the files are there", "test -e ~/ready")?;
    agent.sh("rm ~/ready")?.succeeded().map(drop)
}

/// All files of the home that somebody would see, and that are there no more afterwards.
fn files(agent: &Agent) -> Result<String> {
    let found = agent.sh_text("ls -A ~ | grep -v '^\\.' | sort | tr '\\n' ' '; rm ~/*")?;
    Ok(found.trim().to_owned())
}

fn an_image_that_is_given_up_leaves_no_strange_files_in_the_home() -> Result<()> {
    let server = Server::shared()?;
    let agent = server.agent("traceless")?;
    let dorm = |args: &[&str]| server.dorm(args)?.succeeded().map(drop);
    for ways in [&["hibernate", "stop"][..], &["pause", "stop"], &["hibernate", "wake"], &["pause", "snapshot", "hibernate", "wake"]] {
        hold_a_renamed_file(&agent)?;
        for way in ways {
            dorm(&[way, &agent.name])?;
        }
        let found = files(&agent)?;
        ensure!(found == "second", "after {ways:?} there are {found}");
        agent.stop()?;
    }
    hold_a_renamed_file(&agent)?;
    let copy = format!("{}-copy", agent.name);
    dorm(&["snapshot", &agent.name, "--label", "full"])?;
    dorm(&["fork", &agent.name, &copy, "--from", "full", "--files-only"])?;
    let copy = server.adopt(&copy)?;
    for agent in [&agent, &copy] {
        let found = files(agent)?;
        ensure!(found == "second", "{} has {found}", agent.name);
    }
    Ok(())
}

fn copies_of_the_files_of_an_agent_that_sleeps_have_no_strange_files() -> Result<()> {
    let server = Server::start_with(&Options { config: DURABLE_AT_ONCE, ..Options::default() })?;
    let agent = server.agent("copied")?;
    let dorm = |args: &[&str]| server.dorm(args)?.succeeded().map(drop);
    for sleeps in [|agent: &Agent| durable(agent).map(drop), |agent: &Agent| agent.hibernate()] {
        hold_a_renamed_file(&agent)?;
        waiting(&agent)?;
        sleeps(&agent)?;
        let state = agent.state()?;
        let (now, then) = (format!("{}-{state}-now", agent.name), format!("{}-{state}-then", agent.name));
        dorm(&["fork", &agent.name, &now, "--files-only"])?;
        dorm(&["snapshot", &agent.name, "--label", "files", "--files-only"])?;
        dorm(&["fork", &agent.name, &then, "--from", "files", "--files-only"])?;
        for copy in [now, then] {
            let copy = server.adopt(&copy)?;
            let found = files(&copy)?;
            ensure!(found == "second", "{} has {found}", copy.name);
        }
        // Its own memory needs them still.
        still_waits(&agent)?;
        dorm(&["rollback", &agent.name, "files"])?;
        let found = files(&agent)?;
        ensure!(found == "second", "after the rollback there are {found}");
    }
    Ok(())
}

fn a_crash_leaves_no_strange_files_in_the_home() -> Result<()> {
    let server = Server::start_with(&Options { leave_boxes: true, ..Options::default() })?;
    let agent = server.agent("crashed")?;
    for (verb, point) in [("snapshot", "snapshot/home-kept"), ("hibernate", "image/made"), ("hibernate", "image/recorded")] {
        hold_a_renamed_file(&agent)?;
        server.kill9()?;
        server.launch(&[("DORM_FAULT", point)])?;
        let _ = server.dorm(&[verb, &agent.name])?;
        server.wait_for_end()?;
        server.launch(&[])?;
        let found = files(&agent)?;
        ensure!(found == "second", "after a crash at {point} there are {found}");
        agent.stop()?;
    }
    Ok(())
}

const DURABLE_AT_ONCE: &str = "[standby]\nafter = 0\ndurable_after = 0.1\nhibernate_after = 0\n";

/// Puts it to standby, and gives the image that it then has.
fn durable(agent: &Agent) -> Result<String> {
    agent.pause()?;
    harness::eventually("it is durable", || {
        let saved = agent.server.json(&["why", &agent.name])?["memory"].to_string().contains("on disk");
        Ok(image(agent).filter(|_| saved))
    })
}

fn image(agent: &Agent) -> Option<String> {
    let images = agent.server.remains.images().remove(&agent.id).unwrap_or_default();
    images.into_iter().find(|name| !name.contains('.'))
}

fn a_durable_agent_in_standby_keeps_its_image_over_daemons_and_its_memory_over_a_reboot() -> Result<()> {
    let server = Server::start_with(&Options { leave_boxes: true, config: DURABLE_AT_ONCE, ..Options::default() })?;
    let agent = server.agent("durable")?;
    waiting(&agent)?;
    hold_a_renamed_file(&agent)?;
    let first = durable(&agent)?;
    server.kill9()?;
    server.launch(&[])?;
    ensure!(agent.state()? == "standby", "it is {}", agent.show()?);
    ensure!(image(&agent) == Some(first.clone()), "the image was made anew");
    // What it holds is the past once the box has gone on, and the next daemon knows.
    still_waits(&agent)?;
    let second = durable(&agent)?;
    ensure!(second != first, "an image of an earlier sleep is taken for the present one");
    server.kill9()?;
    server.launch(&[("DORM_FAULT", "thaw/thawed")])?;
    let _ = agent.sh("true");
    server.wait_for_end()?;
    server.launch(&[])?;
    ensure!(agent.state()? == "standby", "it is {}", agent.show()?);
    let third = durable(&agent)?;
    ensure!(third != second, "a box that has gone on is taken for its image");
    server.simulate_reboot()?;
    server.launch(&[])?;
    ensure!(agent.state()? == "hibernated", "it is {}", agent.show()?);
    still_waits(&agent)?;
    let found = files(&agent)?;
    ensure!(found == "second", "there are {found}");
    Ok(())
}

fn a_durable_box_that_ends_in_its_sleep_loses_nothing() -> Result<()> {
    let server = Server::start_with(&Options { leave_boxes: true, config: DURABLE_AT_ONCE, ..Options::default() })?;
    let agent = server.agent("killed")?;
    waiting(&agent)?;
    durable(&agent)?;
    // As the kernel does with what it ends for want of memory: it is killed, and may move to die.
    let pid = Pid::from_raw(agent.pid()?).context("a process has a pid")?;
    kill_process(pid, Signal::KILL)?;
    server.remains.thaw(&agent.id);
    agent.becomes("hibernated")?;
    let shown = agent.show()?;
    ensure!(shown["reason"].as_str().is_some_and(|reason| reason.contains("the box ended")), "{shown}");
    server.in_order()?;
    still_waits(&agent)
}
