//! Many agents at once.

use anyhow::{Context, Result, ensure};

use crate::harness::{self, Server};

harness::tests![
    three_hundred_stopped_agents_cost_little_memory,
    twenty_agents_start_and_stop_at_once,
];

/// Memory of the daemon, in bytes: `VmRSS` now, `VmHWM` at its most.
pub(crate) fn memory(server: &Server, what: &str) -> Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.pid()?))?;
    let line = status.lines().find(|l| l.starts_with(what)).context("no such line")?;
    Ok(line.split_whitespace().nth(1).context("a number")?.parse::<u64>()? * 1024)
}

fn rss(server: &Server) -> Result<u64> {
    memory(server, "VmRSS:")
}

fn three_hundred_stopped_agents_cost_little_memory() -> Result<()> {
    const MANY: u64 = 300;
    let server = Server::start()?;
    let make = |name: &str| -> Result<()> {
        let body = format!(r#"{{"name":"{name}","start":false}}"#);
        let reply = server.http("POST", "/v1/agents", body.as_bytes())?;
        ensure!(reply.status < 300, "{}: {}", reply.status, reply.text());
        Ok(())
    };
    // What the first requests cost is no agent's.
    (0..10).try_for_each(|i| make(&format!("first-{i}")))?;
    server.names()?;
    let before = rss(&server)?;
    (0..MANY).try_for_each(|i| make(&format!("many-{i}")))?;
    ensure!(server.names()?.len() as u64 == MANY + 10);
    let each = rss(&server)?.saturating_sub(before) / MANY;
    ensure!(each <= 64 * 1024, "{each} bytes for each stopped agent");
    server.sigterm()?;
    server.launch(&[])?;
    ensure!(server.names()?.len() as u64 == MANY + 10, "agents were lost");
    for name in server.names()? {
        let reply = server.http("DELETE", &format!("/v1/agents/{name}"), b"")?;
        ensure!(reply.status < 300, "{}: {}", reply.status, reply.text());
    }
    ensure!(server.remains.homes().is_empty());
    Ok(())
}

fn twenty_agents_start_and_stop_at_once() -> Result<()> {
    let server = Server::shared()?;
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..20)
            .map(|_| {
                scope.spawn(|| -> Result<()> {
                    let agent = server.agent("crowd")?;
                    ensure!(agent.sh_text("hostname")? == agent.name);
                    agent.stop()?;
                    ensure!(agent.sh_text("hostname")? == agent.name);
                    server.dorm(&["rm", "--yes", &agent.name])?.succeeded()?;
                    let left = server.remains.of_agent(&agent.id);
                    ensure!(left.is_empty(), "{left:?}");
                    Ok(())
                })
            })
            .collect();
        threads.into_iter().try_for_each(|t| t.join().expect("no panic"))
    })
}
