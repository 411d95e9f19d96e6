//! Agents behind gVisor, as far as they differ from others. `DORM_E2E_ISOLATION=gvisor` runs the tests of what does not.

use std::fs;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};

use crate::harness::{self, Agent, Server};

harness::tests![
    a_box_behind_gvisor_has_another_kernel_and_is_what_auto_means,
    a_standby_that_was_broken_off_is_found_out,
    what_gvisor_cannot_save_is_named_and_goes_on,
    nothing_but_the_daemon_gets_through_the_guests_door,
    an_agent_goes_behind_gvisor_and_back_with_its_files,
];

/// Where `scripts/setup-gvisor` found no runsc to be had, it said so, and there is nothing to test.
fn behind_gvisor(server: &Arc<Server>, label: &str) -> Result<Agent> {
    if let Some(reason) = harness::engines::missing_for("gvisor")? {
        return Err(harness::engines::skipped("gvisor", reason));
    }
    server.agent_with(label, &["--isolation", "gvisor"])
}

fn a_box_behind_gvisor_has_another_kernel_and_is_what_auto_means() -> Result<()> {
    let server = Server::shared()?;
    let agent = behind_gvisor(&server, "sentry")?;
    ensure!(agent.show()?["isolation"] == "gvisor", "{}", agent.show()?);
    let shown = server.dorm(&["show", &agent.name])?.text()?;
    let says = ["gVisor, runsc ", "checkpoints by gVisor", "btrfs"].iter().all(|words| shown.contains(words));
    ensure!(says && (shown.contains("systrap") || shown.contains("kvm")), "{shown}");
    let host = rustix::system::uname();
    ensure!(agent.sh_text("uname -r")?.trim() != host.release().to_string_lossy(), "it has the host's kernel");
    ensure!(agent.root_text("dmesg")?.contains("gVisor"));
    // Or a machine, where those are quick.
    let chosen = server.agent_with("chosen", &["--isolation", "auto"])?;
    ensure!(chosen.show()?["isolation"] != "container", "{}", chosen.show()?);
    Ok(())
}

fn an_agent_goes_behind_gvisor_and_back_with_its_files() -> Result<()> {
    let server = Server::shared()?;
    let agent = behind_gvisor(&server, "commuter")?;
    agent.root("mkdir -m 2750 /srv/kept && echo one > /srv/kept/file && chown 1234:4321 /srv/kept/file && ln -s file /srv/kept/link")?.succeeded()?;
    let kernel = rustix::system::uname().release().to_string_lossy().into_owned();
    for (isolation, line) in [("container", "two"), ("gvisor", "three")] {
        agent.sh("echo lost > /dev/shm/memory")?.succeeded()?;
        server.dorm(&["set", &agent.name, "--isolation", isolation])?.succeeded()?;
        let shown = agent.show()?;
        ensure!(shown["isolation"] == isolation && shown["state"] == "running", "{shown}");
        ensure!((agent.sh_text("uname -r")? == kernel) == (isolation == "container"));
        ensure!(agent.sh("test -e /dev/shm/memory")?.code != 0, "its memory cannot have been kept");
        agent.root(&format!("echo {line} >> /srv/kept/file"))?.succeeded()?;
    }
    let kept = agent.root_text("cat /srv/kept/link; stat -c '%a %u %g' /srv/kept /srv/kept/file; readlink /srv/kept/link")?;
    ensure!(kept == "one\ntwo\nthree\n2750 0 0\n644 1234 4321\nfile", "{kept}");
    agent.hibernate()?;
    ensure!(agent.root_text("wc -l < /srv/kept/file")? == "3");
    Ok(())
}

/// The mark that says whether the tasks of a box are held.
fn mark(agent: &Agent) -> Result<std::path::PathBuf> {
    let runs = fs::read_dir("/run")?.flatten().map(|entry| entry.path().join(&agent.id));
    let run = runs.into_iter().find(|path| path.is_dir());
    Ok(run.context("the box has no run directory")?.join("held"))
}

fn a_standby_that_was_broken_off_is_found_out() -> Result<()> {
    let server = Server::start()?;
    let agent = behind_gvisor(&server, "doubtful")?;
    agent.sh("i=0; while true; do i=$((i+1)); echo $i > /tmp/ticks.new; mv /tmp/ticks.new /tmp/ticks; sleep 0.05; done >/dev/null 2>&1 &")?;
    agent.until("it ticks", "test -e /tmp/ticks")?;
    for held in [false, true] {
        if held {
            agent.pause()?;
        }
        let mark = mark(&agent)?;
        ensure!(mark.exists() == held, "{} while held is {held}", mark.display());
        server.kill9()?;
        // As a daemon leaves it that ends after it has begun to hold the tasks, or to let them go.
        fs::write(&mark, "")?;
        server.launch(&[])?;
        agent.pause()?;
        ensure!(fs::read(&mark)? == b"yes");
        let before: u64 = agent.sh_text("cat /tmp/ticks")?.trim().parse()?;
        ensure!(!mark.exists(), "the box goes on");
        agent.until("it ticks on", &format!("test $(cat /tmp/ticks) -gt {before}"))?;
    }
    agent.hibernate()?;
    agent.until("it ticks after the disk", "a=$(cat /tmp/ticks); sleep 0.2; test $(cat /tmp/ticks) -gt $a")
}

fn what_gvisor_cannot_save_is_named_and_goes_on() -> Result<()> {
    let server = Server::shared()?;
    let agent = behind_gvisor(&server, "nameless")?;
    agent.exec_with(&["-d"], &["bash", "-c", "exec 4> /tmp/gone; rm /tmp/gone; touch /tmp/holding; sleep 600"])?.succeeded()?;
    agent.until("the holder holds", "test -e /tmp/holding")?;
    server.dorm(&["hibernate", &agent.name])?.refused(4, &["memory cannot be saved", "deleted", "goes on as it was"])?;
    ensure!(agent.state()? == "running", "it is {}", agent.state()?);
    agent.sh("pkill sleep")?.succeeded()?;
    agent.until("the holder is gone", "! pgrep sleep")?;
    agent.hibernate()?;
    agent.sh("test -e /tmp/holding")?.succeeded()?;
    Ok(())
}

fn nothing_but_the_daemon_gets_through_the_guests_door() -> Result<()> {
    let server = Server::shared()?;
    let agent = behind_gvisor(&server, "knocking")?;
    // Who is cut off soon enough has no connection left to shut down.
    let knock = "import errno, socket
for words in [b'', b'h', b'0' * 64 + b'h', b'GET /files?path=/etc/shadow HTTP/1.1\\r\\nhost: x\\r\\n\\r\\n' + b' ' * 64]:
    s = socket.create_connection(('127.0.0.1', 49983), 30)
    try:
        s.sendall(words)
        s.shutdown(socket.SHUT_WR)
        print(len(s.recv(100)))
    except OSError as error:
        if not (isinstance(error, ConnectionError) or error.errno == errno.ENOTCONN): raise
        print(0)";
    ensure!(agent.python(knock)?.text()?.split_whitespace().all(|length| length == "0"));
    // Those that say nothing keep nobody out.
    let silent = "import socket, time
open('/tmp/silent', 'w') if [s for s in [socket.create_connection(('127.0.0.1', 49983)) for _ in range(100)]] else 0
time.sleep(600)";
    agent.exec_with(&["-d"], &["python3", "-c", silent])?.succeeded()?;
    agent.until("a hundred wait at the door", "test -e /tmp/silent")?;
    ensure!(agent.sh_text("echo through")?.trim() == "through");
    Ok(())
}
