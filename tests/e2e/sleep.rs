//! Agents go to sleep by themselves, say why, and are woken by whatever reaches for them, once.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::ops::Range;
use std::process::{Command, Stdio};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::harness::{self, Agent, Options, Server};

harness::tests![
    an_idle_agent_goes_to_standby_becomes_durable_and_goes_to_disk,
    a_held_agent_and_one_to_be_kept_awake_stay_awake,
    when_an_agent_goes_to_sleep_is_changed_later_and_for_good,
    a_run_and_an_open_stream_keep_an_agent_awake,
    a_service_goes_to_sleep_with_its_agent_and_goes_on_with_it,
    beyond_the_budget_the_longest_asleep_goes_to_disk_first,
    what_sleeps_and_what_is_kept_of_it_is_shown_as_it_is,
    every_transition_is_told_to_those_who_follow,
    a_hundred_requests_to_a_sleeping_agent_cause_one_wake,
    a_paused_agent_outlives_a_killed_daemon_as_it_was,
    a_durable_standby_agent_outlives_a_reboot_with_its_memory,
    memory_that_went_on_after_it_became_durable_is_not_brought_back_old,
];

const QUICK: [&str; 6] = ["--standby-after", "0.4", "--durable-after", "0.4", "--hibernate-after", "2"];

/// A process that holds a secret, which it writes to a file whenever that is missing.
fn secret(agent: &Agent) -> Result<String> {
    let script = "s=$(head -c 9 /dev/urandom | base64); while :; do [ -e /tmp/secret ] || echo $s > /tmp/secret; sleep 0.05; done";
    agent.exec_with(&["-d"], &["bash", "-c", script])?.succeeded()?;
    tell(agent)
}

/// Has the process tell its secret anew.
fn tell(agent: &Agent) -> Result<String> {
    agent.sh("rm -f /tmp/secret")?.succeeded()?;
    agent.until("the secret is told", "test -s /tmp/secret")?;
    agent.sh_text("cat /tmp/secret")
}

/// To what it went, and why.
fn path(agent: &Agent) -> Result<Vec<(String, String)>> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    Ok(agent.events()?.iter().map(|e| (text(&e["to"]), text(&e["reason"]))).collect())
}

fn an_idle_agent_goes_to_standby_becomes_durable_and_goes_to_disk() -> Result<()> {
    let server = Server::shared()?;
    let agent = server.agent_with("idle", &QUICK)?;
    agent.sh("echo kept > ~/kept; (setsid sleep 4242 &) >/dev/null 2>&1 </dev/null")?.succeeded()?;
    agent.becomes("hibernated")?;
    let path = path(&agent)?;
    let at = |state: &str| path.iter().rposition(|(to, _)| to == state).with_context(|| format!("never {state}: {path:?}"));
    ensure!(at("standby")? < at("hibernated")?, "{path:?}");
    ensure!(path[at("standby")?].1.contains("idle for") && path[at("hibernated")?].1.contains("asleep for"), "{path:?}");
    let why = server.dorm(&["why", &agent.name])?.text()?;
    ensure!(why.contains("hibernated") && why.contains("memory image on disk"), "{why}");
    let listed = server.dorm(&["ls"])?.text()?;
    ensure!(listed.lines().any(|line| line.contains(&agent.name) && line.contains("hibernated")), "{listed}");
    ensure!(agent.sh_text("cat ~/kept; pgrep -f 'sleep 4242' >/dev/null && echo there")? == "kept\nthere");
    // Woken by that, it goes to sleep again, by way of an image that is whole before it lets go of its memory.
    harness::eventually("it is durable in standby", || {
        let shown = agent.show()?;
        Ok((shown["durable"] == true && shown["state"] != "running").then_some(()))
    })
}

fn a_held_agent_and_one_to_be_kept_awake_stay_awake() -> Result<()> {
    let server = Server::shared()?;
    let held = server.agent_with("held", &QUICK)?;
    server.dorm(&["hold", &held.name, "--for", "1h", "--reason", "somebody looks"])?.succeeded()?;
    // It may have gone to sleep before that, and a hold wakes nobody.
    held.wake()?;
    let awake = server.agent_with("awake", &[&QUICK[..], &["--keep-awake"]].concat())?;
    // Made after them, and asleep before them.
    server.agent_with("other", &QUICK)?.becomes("hibernated")?;
    ensure!(held.state()? == "running" && awake.state()? == "running", "{} {}", held.state()?, awake.state()?);
    let why = server.dorm(&["why", &held.name])?.text()?;
    ensure!(why.contains("somebody looks"), "{why}");
    let why = server.dorm(&["why", &awake.name])?.text()?;
    ensure!(why.contains("kept awake"), "{why}");
    ensure!(server.dorm(&["holds", &held.name])?.text()?.contains("somebody looks"));
    server.dorm(&["unhold", &held.name])?.succeeded()?;
    held.becomes("hibernated")
}

fn when_an_agent_goes_to_sleep_is_changed_later_and_for_good() -> Result<()> {
    let server = Server::start()?;
    let agent = server.agent_with("changed", &["--standby-after", "1h"])?;
    agent.sh("(setsid sleep 4242 &) >/dev/null 2>&1 </dev/null")?.succeeded()?;
    let set = |args: &[&str]| server.dorm(&[&["set", &agent.name], args].concat());
    let why = || server.dorm(&["why", &agent.name])?.text();
    // Another one that is made now and goes to sleep gives it the time to do so, too.
    let in_time = || server.agent_with("other", &["--standby-after", "1s"])?.becomes("standby");

    for (args, words) in [
        (&[][..], &["nothing to change", "--standby-after", "--keep-awake", "--isolation"][..]),
        (&["--standby-after", "soon"], &["`soon` is no time", "15m", "default"]),
        (&["--keep-awake=perhaps"], &["perhaps", "true", "false"]),
    ] {
        set(args)?.refused(2, words)?;
    }
    set(&["--hibernate-after", "90000d"])?.refused(1, &["hibernate_after", "out of range"])?;
    ensure!(why()?.contains("standby after 1h; from then on durable after 1m, hibernated after 10m"), "{}", why()?);

    let pid = agent.show()?["pid"].clone();
    let changed = server.json(&["set", &agent.name, "--standby-after", "1s", "--durable-after", "0", "--hibernate-after", "2h"])?;
    ensure!(changed[0]["standby_after"] == 1.0 && changed[0]["hibernate_after"] == 7200.0, "{changed}");
    agent.becomes("standby")?;
    ensure!(why()?.contains("standby after 1s; from then on durable never, hibernated after 2h"), "{}", why()?);
    let shown = server.dorm(&["show", &agent.name])?.text()?;
    ensure!(shown.contains("standby after:") && shown.contains("2h") && shown.contains("never"), "{shown}");

    set(&["--keep-awake"])?.succeeded()?;
    ensure!(agent.state()? == "standby", "it was woken: {}", agent.show()?);
    agent.wake()?;
    in_time()?;
    ensure!(agent.state()? == "running", "{}", why()?);
    server.kill9()?;
    server.launch(&[])?;
    ensure!(agent.show()?["keep_awake"] == true && agent.show()?["standby_after"] == 1.0, "{}", agent.show()?);
    in_time()?;
    ensure!(agent.state()? == "running" && why()?.contains("kept awake"), "{}", why()?);

    set(&["--keep-awake=false", "--hibernate-after", "default"])?.succeeded()?;
    agent.becomes("standby")?;
    let shown = agent.show()?;
    ensure!(shown["pid"] == pid && shown.get("hibernate_after").is_none(), "{shown}");
    agent.sh("pgrep -x sleep")?.succeeded()?;
    Ok(())
}

fn a_run_and_an_open_stream_keep_an_agent_awake() -> Result<()> {
    let server = Server::shared()?;
    let running = server.agent_with("at-work", &QUICK)?;
    running.exec_with(&["-d"], &["sh", "-c", "until test -e /tmp/enough; do sleep 0.2; done"])?.succeeded()?;
    let streaming = server.agent_with("streaming", &QUICK)?;
    let mut client = server.command(&["exec", "-i", &streaming.name, "--", "cat"]).stdin(Stdio::piped()).stdout(Stdio::null()).spawn()?;
    let why = |agent: &Agent| -> Result<String> { server.dorm(&["why", &agent.name])?.text() };
    harness::eventually("the stream is open", || Ok(why(&streaming)?.contains("is open").then_some(())))?;
    server.agent_with("idler", &QUICK)?.becomes("hibernated")?;
    ensure!(running.state()? == "running", "{}", why(&running)?);
    ensure!(streaming.state()? == "running", "{}", why(&streaming)?);
    harness::eventually("the run is named", || Ok(why(&running)?.contains("in progress").then_some(())))?;
    drop(client.stdin.take());
    ensure!(client.wait()?.success());
    running.sh("touch /tmp/enough")?.succeeded()?;
    running.becomes("hibernated")?;
    streaming.becomes("hibernated")
}

fn a_service_goes_to_sleep_with_its_agent_and_goes_on_with_it() -> Result<()> {
    let server = Server::shared()?;
    let agent = server.agent_with("serving", &QUICK)?;
    agent.exec_with(&["--service"], &["true"])?.refused(2, &["--detach"])?;
    let script = "import itertools, time\nfor n in itertools.count():\n  time.sleep(1)\n  print(n, flush=True)";
    let run = agent.exec_with(&["-d", "--service"], &["python3", "-c", script])?.text()?;
    agent.becomes("hibernated")?;
    let path = path(&agent)?;
    ensure!(path.iter().any(|(to, why)| to == "standby" && why.ends_with("but for a service")), "{path:?}");

    let runs = server.dorm(&["ps", &agent.name, "--runs"])?.text()?;
    ensure!(runs.lines().any(|line| line.contains(&run) && line.contains("running, a service")), "{runs}");
    let listed = server.json(&["ps", &agent.name, "--runs"])?;
    ensure!(listed[0]["keeps_awake"] == false, "{listed}");
    let count = || -> Result<u64> { Ok(server.dorm(&["logs", &agent.name, &run])?.text()?.lines().last().unwrap_or("0").parse()?) };
    let before = count()?;
    harness::eventually("it goes on", || Ok((count()? > before).then_some(())))
}

fn beyond_the_budget_the_longest_asleep_goes_to_disk_first() -> Result<()> {
    // Of two, and not of three: each holds 200 MB, beside what isolates it.
    let config = match harness::engines::isolation().as_deref() {
        Some("vm") => "[standby]\nmemory = \"1100M\"\n",
        Some(_) => "[standby]\nmemory = \"600M\"\n",
        None => "[standby]\nmemory = \"500M\"\n",
    };
    let server = Server::start_with(&Options { config, ..Options::default() })?;
    let hold = "import time; x = bytearray(b'x') * (200 << 20); open('/tmp/full', 'w'); time.sleep(600)";
    let agents = ["first", "second", "third"].map(|name| -> Result<Agent> {
        let agent = server.agent(name)?;
        agent.exec_with(&["-d"], &["python3", "-c", hold])?.succeeded()?;
        agent.until("it is full", "test -e /tmp/full")?;
        agent.pause()?;
        Ok(agent)
    });
    let [first, second, third] = agents;
    let (first, second, third) = (first?, second?, third?);
    first.becomes("hibernated")?;
    ensure!(path(&first)?.iter().any(|(_, why)| why.contains("memory is short")), "{:?}", path(&first)?);
    ensure!(second.state()? == "standby" && third.state()? == "standby", "{} {}", second.state()?, third.state()?);
    first.sh("pgrep python3")?.succeeded()?;
    Ok(())
}

/// What a table of the command line says of the one with `value` under `heading`. Between two columns no row has anything.
fn row(table: &str, heading: &str, value: &str) -> Result<BTreeMap<String, String>> {
    let lines: Vec<Vec<char>> = table.lines().map(|line| line.chars().collect()).collect();
    let width = lines.iter().map(Vec::len).max().unwrap_or(0);
    let mut columns: Vec<Range<usize>> = Vec::new();
    for at in (0..width).filter(|at| lines.iter().any(|line| line.get(*at).is_some_and(|c| *c != ' '))) {
        match columns.last_mut() {
            Some(last) if at <= last.end + 1 => last.end = at + 1,
            _ => columns.push(at..at + 1),
        }
    }
    let cell = |line: &[char], column: &Range<usize>| -> String {
        let end = column.end.min(line.len());
        line[column.start.min(end)..end].iter().collect::<String>().trim().to_owned()
    };
    let (headings, rows) = lines.split_first().context("an empty table")?;
    let cells = |line: &Vec<char>| -> BTreeMap<String, String> {
        columns.iter().map(|column| (cell(headings, column), cell(line, column))).collect()
    };
    let mut rows = rows.iter().map(cells);
    let found = rows.find(|row| row.get(heading).is_some_and(|found| found == value));
    found.with_context(|| format!("no {value} in {table}"))
}

/// Bytes of a size as people are told it, to a tenth of its unit.
fn bytes(size: &str) -> Result<f64> {
    let number = size.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = ["B", "K", "M", "G"].iter().position(|unit| *unit == &size[number.len()..]);
    let unit = unit.with_context(|| format!("`{size}` is no size"))?;
    Ok(number.parse::<f64>()? * f64::from(1 << (10 * unit)))
}

/// A time in milliseconds as the clock on the wall of this machine says it.
fn local(millis: i64) -> Result<String> {
    let date = Command::new("date").env_remove("TZ").args(["-d", &format!("@{}", millis.div_euclid(1000)), "+%F %T"]).output()?;
    ensure!(date.status.success(), "{}", String::from_utf8_lossy(&date.stderr));
    Ok(String::from_utf8(date.stdout)?.trim().to_owned())
}

fn what_sleeps_and_what_is_kept_of_it_is_shown_as_it_is() -> Result<()> {
    const MEMORY: f64 = 48.0 * 1048576.0;
    // The memory of a machine is among its files.
    let in_machines = harness::engines::in_machines();
    let server = Server::shared()?;
    let agent = server.agent_with("shown", &["--standby-after", "0", "--durable-after", "0", "--hibernate-after", "1h"])?;
    agent.holder(48)?;
    let listed = || row(&server.dorm(&["ls"])?.text()?, "NAME", &agent.name);
    let in_json = || -> Result<Value> {
        let all = server.json(&["ls"])?;
        let found = all.as_array().and_then(|all| all.iter().find(|one| one["name"] == agent.name).cloned());
        found.with_context(|| format!("it is not in {all}"))
    };
    let why = || server.dorm(&["why", &agent.name])?.text();
    let now = || anyhow::Ok(SystemTime::now().duration_since(UNIX_EPOCH)?.as_millis() as i64);

    let (shown, data) = (listed()?, in_json()?);
    ensure!(shown["STATE"] == "running" && data["state"] == "running", "{shown:?} {data}");
    let idle = shown["IDLE"].strip_suffix('s').and_then(|seconds| seconds.parse::<u32>().ok());
    ensure!(idle.is_some() && data["idle"].as_f64() >= Some(0.0), "{shown:?} {data}");
    ensure!(in_machines || bytes(&shown["RAM"])? >= MEMORY && data["memory_used"].as_f64() >= Some(MEMORY), "{shown:?} {data}");
    ensure!(why()?.contains("never goes to standby by itself") && why()?.contains("nothing, until something changes"), "{}", why()?);

    let began = now()?;
    let take = |args: &[&str]| server.dorm(&[&["snapshot", &agent.name, "--label"], args].concat())?.text();
    let first = take(&["first"])?;
    agent.sh("head -c 5M /dev/urandom > ~/five; sync")?.succeeded()?;
    let second = take(&["second", "--files-only"])?;
    let ended = now()?;
    let (table, data) = (server.dorm(&["snapshots", &agent.name])?.text()?, server.json(&["snapshots", &agent.name])?);
    for (id, label, kind, parent) in [(&first, "first", "full", ""), (&second, "second", "files", first.as_str())] {
        let shown = row(&table, "ID", id)?;
        let data = data.as_array().and_then(|all| all.iter().find(|one| one["id"] == id.as_str())).context("it is not in JSON")?;
        let cells = ["LABEL", "KIND", "PARENT"].map(|heading| shown[heading].as_str());
        ensure!(cells == [label, kind, parent], "{shown:?}");
        ensure!(data["label"] == label && data["kind"] == kind && data["parent"].as_str().unwrap_or_default() == parent, "{data}");
        let made = data["made"].as_i64().context("without a time")?;
        ensure!((began..=ended).contains(&made) && shown["TIME"] == local(made)?, "{shown:?} {data}");
        let (memory, size) = (bytes(&shown["MEMORY"])?, data["size"].as_f64().context("without a size")?);
        ensure!((memory - size).abs() <= size / 10.0, "{shown:?} {data}");
        ensure!(if kind == "files" { size == 0.0 } else { in_machines || size >= MEMORY }, "{shown:?}");
        let (files, written) = (bytes(&shown["FILES"])?, data["files"].as_f64().context("without its files")?);
        ensure!((files - written).abs() <= written / 10.0, "{shown:?} {data}");
        ensure!(in_machines || kind == "full" || (5..8).contains(&(written as u64 >> 20)), "{shown:?}");
    }

    agent.pause()?;
    let (shown, data) = (listed()?, in_json()?);
    ensure!(shown["STATE"] == "standby" && shown["IDLE"].is_empty() && data["state"] == "standby", "{shown:?} {data}");
    ensure!(in_machines || bytes(&shown["RAM"])? >= MEMORY, "{shown:?}");
    let before = data["disk_used"].as_f64().context("without its disk")?;
    let data = server.json(&["why", &agent.name])?;
    let (since, at) = (data["since"].as_i64().context("since when?")?, data["next"]["at"].as_i64().context("and when next?")?);
    ensure!(data["state"] == "standby" && data["next"]["state"] == "hibernated", "{data}");
    ensure!((at - since - 3_600_000).abs() < 2000, "{data}");
    // It is computed anew whenever it is asked for, and may fall into another second.
    let next = |at: i64| Ok::<_, anyhow::Error>(format!("hibernated at {}, if it is idle until then", local(at)?));
    let said = why()?;
    let nexts = [next(at - 1000)?, next(at)?, next(at + 1000)?];
    ensure!(nexts.iter().any(|next| said.contains(next)), "{said} {data}");
    ensure!(said.contains("asked to pause") && said.contains("durable never, hibernated after 1h"), "{said}");

    agent.hibernate()?;
    let (shown, data) = (listed()?, in_json()?);
    ensure!(shown["STATE"] == "hibernated" && shown["IDLE"].is_empty() && shown["RAM"] == "0B", "{shown:?}");
    ensure!(data["state"] == "hibernated" && data["memory_used"] == 0 && data.get("idle").is_none(), "{data}");
    let (told, used) = (bytes(&shown["DISK"])?, data["disk_used"].as_f64().context("without its disk")?);
    ensure!((told - used).abs() <= used / 10.0, "{shown:?} {data}");
    ensure!(in_machines || used >= before + MEMORY, "it held {before}, and {used} with its memory");
    let said = why()?;
    ensure!(said.contains("nothing, until something changes") && said.contains("a memory image on disk"), "{said}");
    Ok(())
}

fn every_transition_is_told_to_those_who_follow() -> Result<()> {
    let server = Server::shared()?;
    let agent = server.agent("followed")?;
    let mut client = server
        .command(&["events", &agent.name, "--follow", "--json", "-n", "1"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut lines = BufReader::new(client.stdout.take().context("piped")?).lines();
    // The past, which tells that the stream is open.
    lines.next().context("no event")??;
    agent.pause()?;
    agent.wake()?;
    agent.hibernate()?;
    agent.wake()?;
    let mut seen = Vec::new();
    while seen.iter().filter(|to| *to == "running").count() < 2 {
        let event: Value = serde_json::from_str(&lines.next().context("the stream ended")??)?;
        let to = event["to"].as_str().unwrap_or_default().to_owned();
        ensure!(!event["reason"].as_str().unwrap_or_default().is_empty(), "without a reason: {event}");
        let rests = ["standby", "hibernated", "running"].contains(&to.as_str());
        ensure!(!rests || event["millis"].is_i64(), "without a duration: {event}");
        seen.push(to);
    }
    client.kill()?;
    client.wait()?;
    let rests: Vec<_> = seen.iter().filter(|to| ["standby", "hibernated", "running"].contains(&to.as_str())).collect();
    ensure!(rests == ["standby", "running", "hibernated", "running"], "{seen:?}");
    Ok(())
}

/// Waits until the last event says so, as a freeze and a thaw are recorded a moment later, and counts them all.
fn told(agent: &Agent, state: &str) -> Result<usize> {
    harness::eventually(&format!("the last event says {state}"), || {
        let events = agent.events()?;
        Ok(events.last().filter(|last| last["to"] == state).map(|_| events.len()))
    })
}

fn a_hundred_requests_to_a_sleeping_agent_cause_one_wake() -> Result<()> {
    let server = Server::shared()?;
    let agent = server.agent("wanted")?;
    let secret = secret(&agent)?;
    for (asleep, state) in [(Agent::pause as fn(&Agent) -> Result<()>, "standby"), (Agent::hibernate, "hibernated")] {
        asleep(&agent)?;
        let before = told(&agent, state)?;
        let health = format!("/v1/agents/{}/guest/health", agent.name);
        std::thread::scope(|scope| {
            let ask = || server.http("GET", &health, b"");
            let asked: Vec<_> = (0..100).map(|_| scope.spawn(ask)).collect();
            asked.into_iter().try_for_each(|thread| {
                let reply = thread.join().expect("asking does not panic")?;
                ensure!(reply.status == 204, "{}: {}", reply.status, reply.text());
                Ok(())
            })
        })?;
        told(&agent, "running")?;
        let woken = agent.events()?[before..].iter().filter(|event| event["to"] == "running").count();
        ensure!(woken == 1, "it was woken {woken} times: {:?}", &agent.events()?[before..]);
        ensure!(tell(&agent)? == secret, "its memory is another one");
    }
    Ok(())
}

fn a_paused_agent_outlives_a_killed_daemon_as_it_was() -> Result<()> {
    let server = Server::start()?;
    let agent = server.agent("paused")?;
    let secret = secret(&agent)?;
    agent.pause()?;
    told(&agent, "standby")?;
    server.kill9()?;
    server.launch(&[])?;
    ensure!(agent.state()? == "standby", "{}", agent.state()?);
    ensure!(tell(&agent)? == secret);
    server.kill9()?;
    server.launch(&[])?;
    ensure!(agent.state()? == "running" && tell(&agent)? == secret);
    Ok(())
}

fn durable(server: &std::sync::Arc<Server>, label: &str) -> Result<(Agent, String)> {
    let agent = server.agent_with(label, &["--durable-after", "0.2", "--hibernate-after", "0", "--standby-after", "0"])?;
    let secret = secret(&agent)?;
    agent.sh("sync")?.succeeded()?;
    agent.pause()?;
    harness::eventually("its memory is on disk", || Ok((agent.show()?["durable"] == true).then_some(())))?;
    ensure!(agent.state()? == "standby");
    Ok((agent, secret))
}

fn a_durable_standby_agent_outlives_a_reboot_with_its_memory() -> Result<()> {
    let server = Server::start()?;
    let (agent, secret) = durable(&server, "durable")?;
    server.simulate_reboot()?;
    server.launch(&[])?;
    ensure!(agent.state()? == "hibernated", "{}", agent.show()?);
    ensure!(tell(&agent)? == secret);
    Ok(())
}

fn memory_that_went_on_after_it_became_durable_is_not_brought_back_old() -> Result<()> {
    let server = Server::start()?;
    let (agent, _) = durable(&server, "stale")?;
    agent.sh("echo acknowledged > ~/later; sync")?.succeeded()?;
    server.simulate_reboot()?;
    server.launch(&[])?;
    // The thaw is recorded after it happened: without its record there is an image, which then is not used.
    ensure!(["stopped", "hibernated"].contains(&agent.state()?.as_str()), "{}", agent.show()?);
    ensure!(agent.sh_text("cat ~/later")? == "acknowledged");
    ensure!(agent.exec(&["pgrep", "bash"])?.code != 0, "an old memory was brought back");
    Ok(())
}
