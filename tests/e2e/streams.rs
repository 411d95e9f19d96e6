//! Clients and connections, when the agent at their other end is put to disk on purpose.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use rustix::process::{Pid, Signal, kill_process};

use crate::harness::{self, Agent, Options, Outside, Server, Terminal};

harness::tests![
    a_detached_run_goes_on_and_all_of_its_output_is_there,
    an_open_exec_stream_is_attached_again_with_nothing_lost,
    a_client_whose_run_went_with_a_rollback_is_told_that_it_lost_the_box,
    a_client_that_waits_for_its_run_does_not_undo_a_stop,
    a_file_on_its_way_out_arrives_whole_although_a_snapshot_is_taken,
    a_shell_on_a_terminal_keeps_its_variables_and_is_woken_by_a_key,
    input_on_its_way_is_neither_lost_nor_sent_twice,
    processes_that_lose_their_input_with_the_box_change_no_file,
    connections_to_the_outside_end_and_listeners_go_on,
    an_orderly_end_puts_agents_to_disk_and_the_next_daemon_goes_on_with_those_that_ran,
    connections_that_nobody_accepted_stand_in_no_ones_way,
];

/// Numbered lines, quick and slow in turn, and an exit code.
const LINES: &str = "for i in $(seq 0 999); do printf '%049d\\n' $i; [ $((i % 50)) = 0 ] && { [ -e /tmp/quick ] || sleep 0.1; }; done; exit 4";

fn complete(text: &str) -> Result<()> {
    let wrong = text.lines().enumerate().find(|(i, line)| *line != format!("{i:049}"));
    ensure!(wrong.is_none() && text.len() == 50_000, "{} bytes came, wrong from {wrong:?} on", text.len());
    Ok(())
}

fn a_detached_run_goes_on_and_all_of_its_output_is_there() -> Result<()> {
    let server = Server::shared()?;
    let agent = server.agent("detached")?;
    let run = agent.exec_with(&["-d"], &["bash", "-c", LINES])?.text()?;
    agent.hibernate()?;
    agent.wake()?;
    agent.hibernate()?;
    agent.sh("touch /tmp/quick")?.succeeded()?;
    let followed = server.dorm(&["logs", "-f", &agent.name, &run])?;
    ensure!(followed.code == 4, "{followed}");
    complete(&followed.stdout())
}

fn an_open_exec_stream_is_attached_again_with_nothing_lost() -> Result<()> {
    let server = Server::shared()?;
    let agent = server.agent("attached")?;
    let mut client = server
        .command(&["exec", &agent.name, "--", "bash", "-c", LINES])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    let mut output = BufReader::new(client.stdout.take().context("piped")?);
    let mut text = String::new();
    output.read_line(&mut text)?;
    agent.hibernate()?;
    agent.sh("touch /tmp/quick")?.succeeded()?;
    output.read_to_string(&mut text)?;
    ensure!(client.wait()?.code() == Some(4));
    complete(&text)
}

/// A client that waits for a run, which has begun and does not end by itself.
pub(crate) fn waiting_client(agent: &Agent) -> Result<Child> {
    let mut client = agent
        .server
        .command(&["exec", &agent.name, "--", "sh", "-c", "echo begun; exec sleep 4711"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let mut begun = String::new();
    BufReader::new(client.stdout.take().context("piped")?).read_line(&mut begun)?;
    ensure!(begun == "begun\n", "{begun}");
    Ok(client)
}

pub(crate) fn is_told_that_it_lost_the_box(mut client: Child, mut stderr: impl Read) -> Result<String> {
    let mut told = String::new();
    stderr.read_to_string(&mut told)?;
    let code = client.wait()?.code();
    ensure!(code == Some(6) && told.contains("the connection to the box broke off"), "it left with {code:?}: {told}");
    Ok(told)
}

fn a_client_whose_run_went_with_a_rollback_is_told_that_it_lost_the_box() -> Result<()> {
    let server = Server::shared()?;
    let agent = server.agent("undone")?;
    server.dorm(&["snapshot", &agent.name, "--label", "before"])?.succeeded()?;
    let mut client = waiting_client(&agent)?;
    server.dorm(&["rollback", &agent.name, "before"])?.succeeded()?;
    let stderr = client.stderr.take().context("piped")?;
    is_told_that_it_lost_the_box(client, stderr).map(drop)
}

fn a_client_that_waits_for_its_run_does_not_undo_a_stop() -> Result<()> {
    let server = Server::shared()?;
    for hibernated in [false, true] {
        let agent = server.agent("left-stopped")?;
        let mut client = waiting_client(&agent)?;
        let mut stderr = BufReader::new(client.stderr.take().context("piped")?);
        if hibernated {
            agent.hibernate()?;
            let mut told = String::new();
            while !told.contains("goes on when it wakes") {
                ensure!(stderr.read_line(&mut told)? > 0, "it did not wait: {told}");
            }
        }
        server.dorm(&["stop", &agent.name, "--grace", "0"])?.succeeded()?;
        let told = is_told_that_it_lost_the_box(client, stderr)?;
        ensure!(told.contains("the agent is stopped: stopped on request"), "{told}");
        let events = agent.events()?;
        ensure!(events.last().is_some_and(|last| last["to"] == "stopped"), "it was started again: {events:?}");
    }
    Ok(())
}

fn a_file_on_its_way_out_arrives_whole_although_a_snapshot_is_taken() -> Result<()> {
    const LENGTH: u64 = 512 << 20;
    let server = Server::shared()?;
    let agent = server.agent("copied")?;
    agent.sh(&format!("truncate -s {LENGTH} /tmp/large"))?.succeeded()?;
    let folder = tempfile::tempdir()?;
    let target = folder.path().join("large");
    let mut client = server.command(&["cp", &agent.at("/tmp/large")]).arg(&target).stderr(Stdio::piped()).spawn()?;
    let pid = Pid::from_raw(i32::try_from(client.id())?).context("a pid")?;
    let arrived = || -> Result<u64> {
        let lengths = fs::read_dir(folder.path())?.map(|file| Ok(file?.metadata()?.len()));
        lengths.sum()
    };
    while arrived()? == 0 {
        ensure!(client.try_wait()?.is_none(), "it ended before anything came");
    }
    // Held in the midst of it.
    kill_process(pid, Signal::STOP)?;
    let held_at = arrived()?;
    // Until nothing moves any more, as all that is in between is full.
    thread::sleep(Duration::from_secs(2));
    let taken = server.dorm(&["snapshot", &agent.name]);
    kill_process(pid, Signal::CONT)?;
    taken?.succeeded()?;
    ensure!(held_at < LENGTH, "it was over before the snapshot");
    let copied = client.wait_with_output()?;
    ensure!(copied.status.success(), "{}: {}", copied.status, String::from_utf8_lossy(&copied.stderr));
    ensure!(fs::metadata(&target)?.len() == LENGTH && arrived()? == LENGTH, "{} bytes came", arrived()?);
    Ok(())
}

fn a_shell_on_a_terminal_keeps_its_variables_and_is_woken_by_a_key() -> Result<()> {
    let server = Server::shared()?;
    let agent = server.agent("shell")?;
    let mut terminal = Terminal::start(&server.command(&["shell", &agent.name]), 24, 80)?;
    terminal.press("said=only-in-$((40 + 2)); cd /tmp; echo rea''dy\r")?;
    terminal.sees("ready")?;
    agent.hibernate()?;
    // The client does not wake it by itself.
    terminal.sees("goes on when it wakes")?;
    ensure!(agent.state()? == "hibernated");
    terminal.press("echo \"<$said $PWD $(stty size)>\"\r")?;
    terminal.sees("<only-in-42 /tmp 24 80>")?;
    ensure!(agent.state()? == "running");
    agent.pause()?;
    terminal.press("echo \"again ${said}\"\r")?;
    terminal.sees("again only-in-42")?;
    terminal.press("exit 5\r")?;
    ensure!(terminal.end()? == 5, "{}", terminal.screen());
    Ok(())
}

/// Takes its time over what it is given.
const SLOW: &str = r#"
import os, time
kept = open('/tmp/got', 'wb', 0)
while part := os.read(0, 65536):
    kept.write(part)
    time.sleep(0.05)
"#;

fn input_on_its_way_is_neither_lost_nor_sent_twice() -> Result<()> {
    let server = Server::start()?;
    let agent = server.agent("fed")?;
    let mut client = server
        .command(&["exec", "-i", &agent.name, "--", "python3", "-c", SLOW])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()?;
    let sent: String = (0..100_000).map(|i| format!("{i:049}\n")).collect();
    let mut input = client.stdin.take().context("piped")?;
    let feeding = thread::spawn({
        let sent = sent.clone();
        move || input.write_all(sent.as_bytes())
    });
    let grown = |least: u64| agent.until("enough has come", &format!("[ $(stat -c %s /tmp/got) -ge {least} ]"));
    grown(300_000)?;
    agent.hibernate()?;
    agent.wake()?;
    grown(1_000_000)?;
    server.kill9()?;
    server.launch(&[])?;
    grown(2_000_000)?;
    server.dorm(&["snapshot", &agent.name])?.succeeded()?;
    let end = client.wait_with_output()?;
    ensure!(end.status.success(), "{}: {}", end.status, String::from_utf8_lossy(&end.stderr));
    feeding.join().map_err(|_| anyhow!("the input was not written"))??;
    let got = agent.sh_text("cat /tmp/got")?;
    ensure!(got == sent.trim_end(), "{} bytes of {} came, or others", got.len(), sent.len());
    Ok(())
}

/// What ends with the box must not run a step further: the files would no longer be those of the memory on disk.
fn processes_that_lose_their_input_with_the_box_change_no_file() -> Result<()> {
    let server = Server::shared()?;
    let agent = server.agent("bereft")?;
    let waiting = "exec 3<&0; for i in $(seq 60); do (read -r line <&3; echo \"$line\" > ~/went-on-$i) & done; echo ready; wait";
    let mut client = server
        .command(&["exec", "-i", &agent.name, "--", "bash", "-c", waiting])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    let mut ready = String::new();
    BufReader::new(client.stdout.take().context("piped")?).read_line(&mut ready)?;
    ensure!(ready == "ready\n", "{ready:?}");
    for _ in 0..8 {
        agent.hibernate()?;
        agent.wake()?;
        let gone_on = agent.sh("ls ~ | grep -c went-on; pgrep -c bash")?.stdout();
        ensure!(gone_on == "0\n61\n", "{gone_on:?}");
    }
    client.kill()?;
    client.wait()?;
    Ok(())
}

fn connections_to_the_outside_end_and_listeners_go_on() -> Result<()> {
    let server = Server::shared()?;
    let outside = Outside::get()?;
    let public = outside.public;
    let listener = outside.there(move || Ok(std::net::TcpListener::bind((public, 0))?))?;
    let address = listener.local_addr()?;
    let agent = server.agent("connected")?;
    // One that waits for an answer, which must not be for ever; then it takes up a new connection.
    let program = format!(
        "import os, socket, threading\n\
         server = socket.create_server(('0.0.0.0', 4713))\n\
         def talk(number):\n\
         \x20   s = socket.create_connection(('{}', {}))\n\
         \x20   open(f'/tmp/open-{{number}}', 'w').close()\n\
         \x20   try:\n\
         \x20       end = s.recv(1)\n\
         \x20       s.sendall(b'anybody')\n\
         \x20   except OSError as error:\n\
         \x20       end = b''\n\
         \x20   open(f'/tmp/ended-{{number}}', 'w').write('ended' if end == b'' else 'goes on')\n\
         talk(1)\n\
         threading.Thread(target=talk, args=(2,), daemon=True).start()\n\
         while True:\n\
         \x20   peer, _ = server.accept()\n\
         \x20   peer.sendall(b'here')\n\
         \x20   peer.close()\n",
        address.ip(),
        address.port()
    );
    agent.exec_with(&["-d"], &["python3", "-c", &program])?.succeeded()?;
    let (_first, _) = listener.accept()?;
    agent.until("it is connected", "test -e /tmp/open-1")?;
    agent.hibernate()?;
    agent.until("it hears of the end", "test -e /tmp/ended-1")?;
    ensure!(agent.sh_text("cat /tmp/ended-1")? == "ended");
    let (_second, _) = listener.accept()?;
    agent.until("it is connected again", "test -e /tmp/open-2")?;
    let heard = "import socket; print(socket.create_connection(('127.0.0.1', 4713)).recv(9).decode())";
    ensure!(agent.exec(&["python3", "-c", heard])?.text()? == "here");
    Ok(())
}

fn an_orderly_end_puts_agents_to_disk_and_the_next_daemon_goes_on_with_those_that_ran() -> Result<()> {
    let server = Server::start_with(&Options { hibernate_boxes: true, ..Options::default() })?;
    let agent = server.agent("shut-down")?;
    let run = agent.exec_with(&["-d"], &["bash", "-c", LINES])?.text()?;
    let asleep = server.agent("asleep")?;
    asleep.pause()?;
    ensure!(server.sigterm()? == 0);
    server.launch(&[])?;
    agent.becomes("running")?;
    let events = agent.events()?;
    let hibernated = |event: &serde_json::Value| event["to"] == "hibernated" && event["reason"] == "the daemon ends; it goes on with the next";
    ensure!(events.iter().any(hibernated), "{events:?}");
    ensure!(asleep.state()? == "hibernated", "{}", asleep.show()?);
    agent.sh("touch /tmp/quick")?.succeeded()?;
    complete(&server.dorm(&["logs", "-f", &agent.name, &run])?.stdout())
}

/// Listens and accepts nothing, with a connection in its queue; says so.
const IMPOLITE: &str = r#"
import socket, time
server = socket.socket()
server.bind(('127.0.0.1', 7070))
server.listen()
client = socket.create_connection(('127.0.0.1', 7070))
open('/tmp/queued', 'w').close()
time.sleep(1000)
"#;

fn connections_that_nobody_accepted_stand_in_no_ones_way() -> Result<()> {
    let agent = Server::shared()?.agent("impolite")?;
    agent.exec_with(&["-d"], &["python3", "-c", IMPOLITE])?.succeeded()?;
    agent.until("a connection is queued", "test -e /tmp/queued")?;
    agent.hibernate()?;
    agent.sh("pgrep -f 7070")?.succeeded()?;
    agent.sh("ss -ltn | grep -q 7070")?.succeeded().map(drop)
}
