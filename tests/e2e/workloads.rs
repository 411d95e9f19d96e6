//! Programs as people run them, put to disk in the middle of their work and woken again.

use anyhow::{Context, Result, ensure};

use crate::harness::holder::{ASK, Held};
use crate::harness::{self, Agent, Server};

harness::tests![
    a_python_process_of_100_mb_counts_on,
    a_python_process_of_1_gb_comes_back_byte_for_byte,
    a_node_server_goes_on_serving_its_keep_alive_clients,
    redis_loses_nothing_that_it_acknowledged,
    postgresql_loses_nothing_that_it_acknowledged,
    fifty_sleeps_in_a_row_keep_every_change,
];

fn comes_back(megabytes: u32) -> Result<()> {
    let agent = Server::shared()?.agent("holder")?;
    agent.holder(megabytes)?;
    let before = agent.held()?;
    agent.hibernate()?;
    let after = agent.held()?;
    before.goes_on_in(&after)?;
    harness::eventually("it counts on", || Ok((agent.held()?.count > after.count).then_some(())))
}

fn a_python_process_of_100_mb_counts_on() -> Result<()> {
    comes_back(100)
}

fn a_python_process_of_1_gb_comes_back_byte_for_byte() -> Result<()> {
    comes_back(1024)
}

fn fifty_sleeps_in_a_row_keep_every_change() -> Result<()> {
    let agent = Server::shared()?.agent("fifty")?;
    agent.holder(8)?;
    let mut last = agent.held()?;
    for cycle in 0..50 {
        agent.hibernate()?;
        // New, changed, renamed and deleted files in every cycle, and the holder in between.
        let change = format!(
            "echo {cycle} >> ~/appended; echo {cycle} > ~/changed; echo {cycle} > ~/new-{cycle}; \
             [ {cycle} = 0 ] || {{ mv ~/new-$(({cycle} - 1)) ~/old-$(({cycle} - 1)); rm -f ~/old-$(({cycle} - 3)); }}; python3 -c \"{ASK}\""
        );
        let now = Held::from_answer(&agent.sh_text(&change)?)?;
        last.goes_on_in(&now).with_context(|| format!("in cycle {cycle}"))?;
        last = now;
    }
    let all: Vec<String> = (0..50).map(|cycle| cycle.to_string()).collect();
    ensure!(agent.sh_text("cat ~/appended")? == all.join("\n"));
    ensure!(agent.sh_text("cd; cat changed; ls | xargs")? == "49\nappended changed new-49 old-47 old-48");
    let woken = agent.events()?.iter().filter(|event| event["to"] == "hibernated").count();
    ensure!(woken == 50, "it was on disk {woken} times");
    Ok(())
}

/// Counts requests and connections in its memory.
const NODE: &str = r#"
const http = require('http');
let served = 0, connections = 0;
const secret = require('crypto').randomBytes(8).toString('hex');
const server = http.createServer((request, response) => {
  served += 1;
  response.end(JSON.stringify({ secret, served, connections }));
});
server.keepAliveTimeout = 0;
server.on('connection', () => { connections += 1; });
server.listen(8080, '0.0.0.0');
"#;

/// Four clients with a connection each, which they keep as long as it goes, and take up anew when it breaks. They say
/// what they got, in order.
const NODE_CLIENTS: &str = r#"
const http = require('http');
const fs = require('fs');
function client(number) {
  const agent = new http.Agent({ keepAlive: true, maxSockets: 1 });
  const again = () => setTimeout(ask, 20);
  function ask() {
    const request = http.get({ host: '127.0.0.1', port: 8080, agent, timeout: 20000 }, (response) => {
      let text = '';
      response.on('data', (data) => { text += data; });
      response.on('error', again);
      response.on('end', () => {
        fs.appendFileSync('/tmp/heard', `${number} ${JSON.parse(text).secret} ${JSON.parse(text).served}\n`);
        again();
      });
    });
    request.on('timeout', () => { fs.appendFileSync('/tmp/hung', `${number}\n`); request.destroy(); });
    request.on('error', again);
  }
  ask();
}
[0, 1, 2, 3].forEach(client);
"#;

fn a_node_server_goes_on_serving_its_keep_alive_clients() -> Result<()> {
    let agent = Server::with_workloads()?.agent_with("node", &["-T", "workloads"])?;
    agent.exec_with(&["-d"], &["node", "-e", NODE])?.succeeded()?;
    agent.until("node listens", "ss -ltn | grep -q 8080")?;
    agent.exec_with(&["-d"], &["node", "-e", NODE_CLIENTS])?.succeeded()?;
    for round in 1..=3 {
        // Every one of the clients is served, after every wake.
        agent.sh("sed -n '$=' /tmp/heard > /tmp/mark 2>/dev/null || echo 0 > /tmp/mark")?.succeeded()?;
        let all = "tail -n +$(($(cat /tmp/mark) + 1)) /tmp/heard | cut -d' ' -f1 | sort -u | wc -l | grep -qx 4";
        agent.until("all clients are served", all).with_context(|| format!("round {round}"))?;
        agent.hibernate()?;
    }
    ensure!(agent.sh("test -e /tmp/hung")?.code == 1, "a client hung");
    let heard = agent.sh_text("cat /tmp/heard")?;
    let secrets: std::collections::BTreeSet<_> = heard.lines().filter_map(|line| line.split(' ').nth(1)).collect();
    ensure!(secrets.len() == 1, "the server is another one: {secrets:?}");
    let served: Vec<u64> = heard.lines().filter_map(|line| line.rsplit(' ').next()?.parse().ok()).collect();
    let unique: std::collections::BTreeSet<_> = served.iter().collect();
    ensure!(unique.len() == served.len(), "the server's memory went back");
    Ok(())
}

/// Sleeps three times while `writer` writes rising numbers, and appends to /tmp/acknowledged what was acknowledged.
/// `missing` prints how many of the numbers in that file are not in the store; it looks into the file first, as writing goes on.
fn nothing_is_lost(agent: &Agent, writer: &str, missing: &str) -> Result<()> {
    let writer = format!("{writer}\nwhile : ; do n=$((${{n:-0}} + 1)); write $n && echo $n >> /tmp/acknowledged; done");
    agent.exec_with(&["-d"], &["bash", "-c", &writer])?.succeeded()?;
    for _ in 0..3 {
        agent.sh("touch /tmp/acknowledged; wc -l < /tmp/acknowledged > /tmp/mark")?.succeeded()?;
        let more = "[ $(wc -l < /tmp/acknowledged) -gt $(($(cat /tmp/mark) + 20)) ]";
        agent.until("writes are acknowledged", more)?;
        agent.hibernate()?;
    }
    let missing = agent.sh_text(missing)?;
    ensure!(missing == "0", "{missing} acknowledged writes are lost");
    Ok(())
}

fn redis_loses_nothing_that_it_acknowledged() -> Result<()> {
    let agent = Server::with_workloads()?.agent_with("redis", &["-T", "workloads"])?;
    // Nothing on disk: what is there after the wake was in its memory.
    agent.exec_with(&["-d"], &["redis-server", "--save", "", "--unixsocket", "/tmp/redis.sock"])?.succeeded()?;
    agent.until("redis answers", "redis-cli ping | grep -q PONG")?;
    // A subscriber on a connection of its own, which goes on.
    agent.exec_with(&["-d"], &["sh", "-c", "redis-cli -s /tmp/redis.sock subscribe news > /tmp/news"])?.succeeded()?;
    agent.until("the subscriber listens", "grep -q subscribe /tmp/news")?;
    nothing_is_lost(
        &agent,
        "write() { [ \"$(redis-cli sadd numbers $1 2>/dev/null)\" = 1 ]; }",
        "sort /tmp/acknowledged > /tmp/was; redis-cli smembers numbers | sort | comm -23 /tmp/was - | wc -l",
    )?;
    agent.sh("redis-cli publish news heard")?.succeeded()?;
    agent.until("the subscriber hears", "grep -q heard /tmp/news")
}

fn postgresql_loses_nothing_that_it_acknowledged() -> Result<()> {
    let agent = Server::with_workloads()?.agent_with("postgres", &["-T", "workloads"])?;
    agent.root("sed -i 's/scram-sha-256/trust/; s/peer/trust/' /etc/postgresql/15/main/pg_hba.conf && pg_ctlcluster 15 main start && su postgres -c \"createuser -s user && createdb user\"")?.succeeded()?;
    // A transaction that is open across all sleeps, in a session with a temporary table.
    let open = "mkfifo /tmp/session; exec 3<>/tmp/session; psql -qAt -v ON_ERROR_STOP=1 < /tmp/session > /tmp/answers 2>&1";
    agent.exec_with(&["-d"], &["bash", "-c", open])?.succeeded()?;
    agent.until("the session is open", "test -p /tmp/session")?;
    agent.sh("psql -qc 'create table numbers (n int primary key)'")?.succeeded()?;
    let begin = "echo \"begin; create temporary table held as select 42 as answer; insert into numbers values (-1); select 'begun';\" > /tmp/session";
    agent.sh(begin)?.succeeded()?;
    agent.until("the transaction is open", "grep -q begun /tmp/answers")?;
    nothing_is_lost(
        &agent,
        "write() { psql -qh 127.0.0.1 -c \"insert into numbers values ($1)\" 2>/dev/null; }",
        "sort /tmp/acknowledged > /tmp/was; psql -qAtc 'select n from numbers' | sort | comm -23 /tmp/was - | wc -l",
    )?;
    ensure!(agent.sh_text("psql -qAtc 'select count(*) from numbers where n < 0'")? == "0");
    agent.sh("echo \"select answer from held; commit; select 'committed';\" > /tmp/session")?.succeeded()?;
    agent.until("the transaction is committed", "grep -q committed /tmp/answers")?;
    ensure!(agent.sh_text("cat /tmp/answers | xargs")? == "begun 42 committed");
    ensure!(agent.sh_text("psql -qAtc 'select count(*) from numbers where n < 0'")? == "1");
    Ok(())
}
