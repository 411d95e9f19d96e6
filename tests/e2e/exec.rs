//! Commands in a box: streams, exit codes, signals, terminals, detached runs.

use std::process::Stdio;

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};
use sha2::{Digest, Sha256};

use crate::harness::{self, Server, Terminal};

harness::tests![
    stdout_and_stderr_stay_apart,
    the_exit_code_is_passed_on,
    the_end_by_a_signal_is_told_as_128_and_its_number,
    a_missing_command_is_told_with_exit_code_127,
    a_command_that_cannot_be_executed_is_told_with_exit_code_126,
    arguments_arrive_as_they_were_given,
    five_megabytes_go_in_by_stdin,
    a_command_that_reads_no_stdin_ends_all_the_same,
    without_i_the_command_has_an_empty_stdin,
    twenty_megabytes_come_out_whole,
    a_reader_that_leaves_ends_the_command,
    user_folder_and_environment_can_be_chosen,
    an_unknown_user_and_an_unknown_folder_are_refused,
    the_default_user_has_its_home_and_a_useful_environment,
    sudo_works_without_a_password,
    a_timeout_ends_the_command_and_all_its_children,
    an_interrupt_reaches_the_command,
    a_termination_reaches_the_command,
    a_terminal_has_the_size_of_the_window_and_follows_it,
    a_terminal_passes_keys_on_and_shows_what_comes,
    a_shell_opens_and_ends_with_its_exit_code,
    a_detached_run_is_replayed_whole,
    following_a_detached_run_ends_with_it_and_its_exit_code,
    a_detached_run_goes_on_without_its_client,
    logs_of_an_unknown_run_are_refused,
    fifty_commands_run_at_once,
    orphans_are_reaped,
    ps_shows_the_processes_and_runs_of_the_box,
    the_output_of_a_command_can_be_had_as_json,
];

fn stdout_and_stderr_stay_apart() -> Result<()> {
    let agent = Server::shared()?.agent("streams")?;
    let output = agent.sh("echo out; echo err >&2; echo out again")?;
    ensure!(output.text()? == "out\nout again" && output.stderr == "err\n", "{output}");
    Ok(())
}

fn the_exit_code_is_passed_on() -> Result<()> {
    let agent = Server::shared()?.agent("codes")?;
    for code in [0, 1, 3, 42, 255] {
        ensure!(agent.sh(&format!("exit {code}"))?.code == code, "{code}");
    }
    Ok(())
}

fn the_end_by_a_signal_is_told_as_128_and_its_number() -> Result<()> {
    let agent = Server::shared()?.agent("signals")?;
    for (name, number) in [("KILL", 9), ("TERM", 15), ("SEGV", 11)] {
        let output = agent.sh(&format!("kill -{name} $$"))?;
        ensure!(output.code == 128 + number, "{output}");
    }
    Ok(())
}

fn a_missing_command_is_told_with_exit_code_127() -> Result<()> {
    let agent = Server::shared()?.agent("missing")?;
    agent.exec(&["no-such-program"])?.refused(127, &["no-such-program"])?;
    agent.exec(&["/no/such/program"])?.refused(127, &["/no/such/program"])
}

fn a_command_that_cannot_be_executed_is_told_with_exit_code_126() -> Result<()> {
    let agent = Server::shared()?.agent("plain-file")?;
    agent.exec(&["/etc/passwd"])?.refused(126, &["/etc/passwd"])
}

fn arguments_arrive_as_they_were_given() -> Result<()> {
    let agent = Server::shared()?.agent("arguments")?;
    let words = ["a b", "", "$HOME", "*", "'quoted\"", "-n", "--", "ünïcode", "new\nline"];
    let output = agent.exec(&[&["printf", "[%s]"], &words[..]].concat())?.text()?;
    ensure!(output == words.map(|w| format!("[{w}]")).concat(), "{output}");
    Ok(())
}

fn five_megabytes_go_in_by_stdin() -> Result<()> {
    let server = Server::shared()?;
    let agent = server.agent("stdin")?;
    let input: Vec<u8> = (0..5_000_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let counted = server.dorm_with_input(&["exec", "-i", &agent.name, "--", "wc", "-c"], &input)?;
    ensure!(counted.text()?.trim() == "5000000", "{counted}");
    let sum = server.dorm_with_input(&["exec", "-i", &agent.name, "--", "sha256sum"], &input)?;
    ensure!(sum.text()?.starts_with(&hex(&Sha256::digest(&input))), "{sum}");
    Ok(())
}

fn a_command_that_reads_no_stdin_ends_all_the_same() -> Result<()> {
    let server = Server::shared()?;
    let agent = server.agent("unread")?;
    let output = server.dorm_with_input(&["exec", "-i", &agent.name, "--", "echo", "done"], &vec![b'x'; 3_000_000])?;
    ensure!(output.text()? == "done");
    Ok(())
}

fn without_i_the_command_has_an_empty_stdin() -> Result<()> {
    let server = Server::shared()?;
    let agent = server.agent("no-stdin")?;
    let output = server.dorm_with_input(&["exec", &agent.name, "--", "cat"], b"not for you")?;
    ensure!(output.text()?.is_empty());
    Ok(())
}

fn twenty_megabytes_come_out_whole() -> Result<()> {
    let agent = Server::shared()?.agent("much")?;
    let script = "import hashlib, os, sys\nh = hashlib.sha256()\nfor _ in range(320):\n b = os.urandom(65536)\n \
                  h.update(b)\n sys.stdout.buffer.write(b)\nsys.stdout.flush()\nprint(h.hexdigest(), file=sys.stderr)";
    let output = agent.exec(&["python3", "-c", script])?;
    output.succeeded()?;
    ensure!(output.bytes.len() == 320 * 65_536, "{} bytes came", output.bytes.len());
    ensure!(output.stderr.trim() == hex(&Sha256::digest(&output.bytes)), "the bytes are others");
    Ok(())
}

fn a_reader_that_leaves_ends_the_command() -> Result<()> {
    let server = Server::shared()?;
    let agent = server.agent("pipe")?;
    let mut child = server
        .command(&["exec", &agent.name, "--", "yes", "a-word-to-find"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()?;
    std::io::Read::read_exact(&mut child.stdout.take().context("piped")?, &mut [0; 4096])?;
    child.wait()?;
    harness::eventually("yes has ended in the box", || {
        Ok((!agent.sh("pgrep -f '^yes a-word'")?.stdout().contains(char::is_numeric)).then_some(()))
    })
}

fn user_folder_and_environment_can_be_chosen() -> Result<()> {
    let agent = Server::shared()?.agent("place")?;
    let flags = ["-u", "root", "-w", "/usr/share", "-e", "A=1 2", "-e", "B=="];
    let output = agent.exec_with(&flags, &["sh", "-c", "id -un; pwd; echo \"$A,$B,$HOME\""])?;
    ensure!(output.text()? == "root\n/usr/share\n1 2,=,/root", "{output}");
    let by_number = agent.exec_with(&["-u", "1000"], &["id", "-un"])?;
    ensure!(by_number.text()? == "user", "{by_number}");
    Ok(())
}

fn an_unknown_user_and_an_unknown_folder_are_refused() -> Result<()> {
    let agent = Server::shared()?.agent("nowhere")?;
    let output = agent.exec_with(&["-u", "nobody-here"], &["true"])?;
    ensure!(output.code != 0 && output.stderr.contains("nobody-here"), "{output}");
    let output = agent.exec_with(&["-w", "/no/such/folder"], &["true"])?;
    ensure!(output.code != 0 && output.stderr.contains("/no/such/folder"), "{output}");
    Ok(())
}

fn the_default_user_has_its_home_and_a_useful_environment() -> Result<()> {
    let agent = Server::shared()?.agent("defaults")?;
    let script = "id -u; pwd; echo $HOME $USER $LANG; for p in python3 git curl sudo ip nano pip3; do command -v $p; done";
    let output = agent.sh(script)?.text()?;
    ensure!(output.starts_with("1000\n/home/user\n/home/user user C.UTF-8\n"), "{output}");
    ensure!(output.lines().count() == 10, "{output}");
    Ok(())
}

fn sudo_works_without_a_password() -> Result<()> {
    let agent = Server::shared()?.agent("sudo")?;
    ensure!(agent.exec(&["sudo", "id", "-u"])?.text()? == "0");
    ensure!(agent.exec(&["sudo", "-n", "sh", "-c", "touch /usr/local/x && stat -c %U /usr/local/x"])?.text()? == "root");
    Ok(())
}

fn a_timeout_ends_the_command_and_all_its_children() -> Result<()> {
    let agent = Server::shared()?.agent("timeout")?;
    // Enough to begin, also on a machine that is emulated and busy.
    let timeout = if harness::slowness() > 1 { "15" } else { "5" };
    let output = agent.exec_with(&["--timeout", timeout], &["sh", "-c", "sleep 4321 & echo begun; sleep 4322"])?;
    ensure!(output.code == 124 && output.stdout() == "begun\n" && output.stderr.contains("timed out"), "{output}");
    let quick = agent.exec_with(&["--timeout", "60"], &["echo", "quick"])?;
    ensure!(quick.text()? == "quick");
    harness::eventually("the command's children have ended", || {
        Ok((!agent.sh("pgrep -f '^sleep 432'")?.stdout().contains(char::is_numeric)).then_some(()))
    })
}

/// Starts a command that says `ready`, sends the client a signal, and returns what the client did.
fn signalled(signal: Signal, script: &str) -> Result<(i32, String)> {
    let server = Server::shared()?;
    let agent = server.agent("signalled")?;
    let mut child = server
        .command(&["exec", &agent.name, "--", "bash", "-c", script])
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(child.stdout.take().context("piped")?));
    ensure!(lines.next().transpose()?.as_deref() == Some("ready"));
    kill_process(Pid::from_raw(child.id() as i32).context("a pid")?, signal)?;
    let rest: Vec<String> = lines.collect::<std::io::Result<_>>()?;
    Ok((child.wait()?.code().unwrap_or(-1), rest.join("\n")))
}

const TRAP: &str = "trap 'echo got INT; exit 7' INT; trap 'echo got TERM; exit 8' TERM; echo ready; while :; do sleep 0.05; done";

fn an_interrupt_reaches_the_command() -> Result<()> {
    let (code, said) = signalled(Signal::INT, TRAP)?;
    ensure!(code == 7 && said == "got INT", "{code}: {said}");
    Ok(())
}

fn a_termination_reaches_the_command() -> Result<()> {
    let (code, said) = signalled(Signal::TERM, TRAP)?;
    ensure!(code == 8 && said == "got TERM", "{code}: {said}");
    let (code, _) = signalled(Signal::TERM, "echo ready; exec sleep 4323")?;
    ensure!(code == 128 + 15, "{code}");
    Ok(())
}

fn a_terminal_has_the_size_of_the_window_and_follows_it() -> Result<()> {
    let server = Server::shared()?;
    let agent = server.agent("window")?;
    let script = "trap 'stty size; exit 5' WINCH; stty size; while :; do sleep 0.05; done";
    let command = server.command(&["exec", "-i", "-t", &agent.name, "--", "bash", "-c", script]);
    let mut terminal = Terminal::start(&command, 31, 97)?;
    terminal.sees("31 97")?;
    terminal.resize(17, 53)?;
    terminal.sees("17 53")?;
    ensure!(terminal.end()? == 5);
    Ok(())
}

fn a_terminal_passes_keys_on_and_shows_what_comes() -> Result<()> {
    let server = Server::shared()?;
    let agent = server.agent("keys")?;
    let command = server.command(&["exec", "-it", &agent.name, "--", "bash", "--norc", "-c", "test -t 0 && test -t 1 && read line; echo \"<$line>\"; cat"]);
    let mut terminal = Terminal::start(&command, 24, 80)?;
    terminal.press("hello there\r")?;
    terminal.sees("<hello there>")?;
    // Ctrl-C is the command's affair, not the client's.
    terminal.press("\x03")?;
    ensure!(terminal.end()? == 130);
    Ok(())
}

fn a_shell_opens_and_ends_with_its_exit_code() -> Result<()> {
    let server = Server::shared()?;
    let agent = server.agent("shell")?;
    let mut terminal = Terminal::start(&server.command(&["shell", &agent.name]), 24, 80)?;
    terminal.press("echo in-$((40+2)); tty\r")?;
    terminal.sees("in-42")?;
    terminal.sees("/dev/pts/")?;
    terminal.press("exit 9\r")?;
    ensure!(terminal.end()? == 9);
    Ok(())
}

/// Three million bytes on stdout, then a word on stderr.
const MUCH: &str = "i=0; while [ $i -lt 30000 ]; do printf '%099d\\n' $i; i=$((i+1)); done; echo last >&2";

fn a_detached_run_is_replayed_whole() -> Result<()> {
    let server = Server::shared()?;
    let agent = server.agent("detached")?;
    let run = agent.exec_with(&["-d"], &["bash", "-c", MUCH])?.text()?;
    ensure!(!run.is_empty() && !run.contains(char::is_whitespace), "{run}");
    server.dorm(&["logs", &agent.name, &run, "-f"])?.succeeded()?;
    for _ in 0..2 {
        let replay = server.dorm(&["logs", &agent.name, &run])?;
        replay.succeeded()?;
        ensure!(replay.bytes.len() == 3_000_000, "{} bytes of output", replay.bytes.len());
        let right = replay.stdout().lines().enumerate().all(|(i, line)| line == format!("{i:099}"));
        ensure!(right && replay.stderr.contains("last"), "the output is another: {}", replay.stderr);
    }
    Ok(())
}

fn following_a_detached_run_ends_with_it_and_its_exit_code() -> Result<()> {
    let server = Server::shared()?;
    let agent = server.agent("followed")?;
    let script = "echo first; until [ -e /tmp/go ]; do sleep 0.05; done; echo second; exit 6";
    let run = agent.exec_with(&["-d"], &["sh", "-c", script])?.text()?;
    let mut child = server
        .command(&["logs", "-f", &agent.name, &run])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(child.stdout.take().context("piped")?));
    ensure!(lines.next().transpose()?.as_deref() == Some("first"));
    agent.sh("touch /tmp/go")?.succeeded()?;
    ensure!(lines.next().transpose()?.as_deref() == Some("second"));
    ensure!(child.wait()?.code() == Some(6));
    Ok(())
}

fn a_detached_run_goes_on_without_its_client() -> Result<()> {
    let agent = Server::shared()?.agent("alone")?;
    agent.exec_with(&["-d"], &["sh", "-c", "sleep 0.3; echo done > ~/result"])?.succeeded()?;
    harness::eventually("the run has written its file", || {
        Ok((agent.sh("cat ~/result")?.stdout() == "done\n").then_some(()))
    })
}

fn logs_of_an_unknown_run_are_refused() -> Result<()> {
    let server = Server::shared()?;
    let agent = server.agent("no-run")?;
    server.dorm(&["logs", &agent.name, "no-such-run"])?.refused(3, &["no-such-run"])
}

fn fifty_commands_run_at_once() -> Result<()> {
    let agent = Server::shared()?.agent("crowd")?;
    let agent = &agent;
    std::thread::scope(|scope| {
        let runs: Vec<_> = (0..50)
            .map(|i| scope.spawn(move || agent.sh(&format!("sleep 0.2; echo {i}; exit {}", i % 7))))
            .collect();
        for (i, run) in runs.into_iter().enumerate() {
            let output = run.join().expect("no panic")?;
            ensure!(output.stdout() == format!("{i}\n") && output.code == i as i32 % 7, "{output}");
        }
        Ok(())
    })
}

fn orphans_are_reaped() -> Result<()> {
    let agent = Server::shared()?.agent("orphans")?;
    agent.sh("for i in 1 2 3 4 5 6 7 8; do (sleep 0.1 &) ; done; (true &)")?.succeeded()?;
    harness::eventually("no zombie and no orphan is left", || {
        let listed = agent.root_text("ps -eo stat=,ppid=,comm=")?;
        let left = listed.lines().any(|l| l.trim_start().starts_with('Z') || l.ends_with("sleep"));
        Ok((!left).then_some(()))
    })
}

fn ps_shows_the_processes_and_runs_of_the_box() -> Result<()> {
    let server = Server::shared()?;
    let agent = server.agent("ps")?;
    let run = agent.exec_with(&["-d"], &["sleep", "4324"])?.text()?;
    let table = server.dorm(&["ps", &agent.name])?.text()?;
    ensure!(table.contains("sleep 4324") && table.lines().any(|l| l.split_whitespace().nth(1) == Some("1")), "{table}");
    let processes = server.json(&["ps", &agent.name])?;
    let sleeping = processes.as_array().into_iter().flatten().find(|p| p["command"] == "sleep 4324");
    ensure!(sleeping.is_some_and(|p| p["user"] == "user" && p["rss"].as_u64() > Some(0)), "{processes}");
    let runs = server.json(&["ps", &agent.name, "--runs"])?;
    let known = runs.as_array().into_iter().flatten().find(|r| r["run"] == run.as_str());
    ensure!(known.is_some_and(|r| r["ended"] == false && r["command"] == "sleep"), "{runs}");
    Ok(())
}

fn the_output_of_a_command_can_be_had_as_json() -> Result<()> {
    let agent = Server::shared()?.agent("as-json")?;
    let output = agent.exec_with(&["--json"], &["sh", "-c", "echo out; echo err >&2; exit 3"])?;
    let value: serde_json::Value = serde_json::from_str(&output.stdout()).with_context(|| output.to_string())?;
    ensure!(output.code == 3 && value["exit_code"] == 3 && value["stdout"] == "out\n" && value["stderr"] == "err\n", "{value}");
    Ok(())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}
