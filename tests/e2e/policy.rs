//! What single agents may reach: policies that hold from the first packet on, change at once, and are kept.

use std::net::{Ipv4Addr, SocketAddr};

use anyhow::{Result, ensure};

use crate::harness::{self, Agent, Options, Outside, Server};
use crate::network::{connect, is_error};

harness::tests![
    without_the_internet_only_what_is_allowed_is_reached,
    what_is_denied_is_out_of_reach_and_what_is_allowed_wins,
    a_changed_policy_cuts_what_it_forbids_and_nothing_else,
    an_allowed_name_is_reached_and_no_other_name_is_answered,
    a_name_that_leads_to_a_private_address_leads_nowhere,
    without_the_internet_no_name_is_asked_for,
    a_policy_is_kept_over_stop_sleep_and_fork,
    a_policy_holds_while_the_daemon_is_away_and_after_it_is_back,
    what_cannot_be_promised_is_refused,
];

/// Of a connection to an address: what came, or `no`.
fn reach(agent: &Agent, to: SocketAddr) -> Result<bool> {
    Ok(!is_error(&connect(agent, to)?))
}

fn net(agent: &Agent, args: &[&str]) -> Result<serde_json::Value> {
    agent.server.json(&[&["net", &agent.name], args].concat())
}

fn resolves(agent: &Agent, name: &str) -> Result<Option<String>> {
    let found = agent.sh(&format!("getent ahostsv4 {name} | head -1"))?.stdout();
    Ok(found.split_whitespace().next().map(str::to_owned))
}

fn without_the_internet_only_what_is_allowed_is_reached() -> Result<()> {
    let outside = Outside::get()?;
    let (there, other) = (outside.listen(outside.public)?, outside.listen(outside.other)?);
    let allow = outside.public.to_string();
    let agent = Server::shared()?.agent_with("closed", &["--no-internet", "--allow", &allow])?;
    ensure!(connect(&agent, there)? == outside.host.to_string());
    ensure!(!reach(&agent, other)?, "the box reached what nobody allowed");
    Ok(())
}

fn what_is_denied_is_out_of_reach_and_what_is_allowed_wins() -> Result<()> {
    let outside = Outside::get()?;
    let (there, other) = (outside.listen(outside.public)?, outside.listen(outside.other)?);
    let (public, second) = (outside.public.to_string(), outside.other.to_string());
    let agent = Server::shared()?.agent_with("denied", &["--deny", &second])?;
    ensure!(reach(&agent, there)? && !reach(&agent, other)?);
    net(&agent, &["--deny", "203.0.113.0/24", "--allow", &second, "--allow", &public])?;
    ensure!(reach(&agent, there)? && reach(&agent, other)?);
    net(&agent, &["--deny", "203.0.113.0/24"])?;
    ensure!(!reach(&agent, there)? && !reach(&agent, other)?);
    net(&agent, &["--open"])?;
    ensure!(reach(&agent, there)? && reach(&agent, other)?);
    Ok(())
}

/// Follows a connection: prints `tick` with all that comes, and at the end how it ended.
fn follow(agent: &Agent, to: SocketAddr) -> Result<String> {
    let script = format!(
        "import socket\ntry:\n s = socket.create_connection(('{}', {}))\n while s.recv(100): print('tick', flush=True)\n print('end')\n\
         except OSError as e: print('cut')",
        to.ip(),
        to.port()
    );
    let run = agent.exec_with(&["-d"], &["python3", "-c", &script])?.text()?;
    ticks(agent, &run, 0)?;
    Ok(run)
}

fn seen(agent: &Agent, run: &str) -> Result<String> {
    Ok(agent.server.dorm(&["logs", &agent.name, run])?.stdout().to_owned())
}

/// Waits for more than so many ticks; gives how many there are.
fn ticks(agent: &Agent, run: &str, more_than: usize) -> Result<usize> {
    harness::eventually("the connection goes on", || {
        let seen = seen(agent, run)?;
        ensure!(!seen.contains("cut"), "the connection was cut");
        let count = seen.matches("tick").count();
        Ok((count > more_than).then_some(count))
    })
}

fn a_changed_policy_cuts_what_it_forbids_and_nothing_else() -> Result<()> {
    let outside = Outside::get()?;
    let agent = Server::shared()?.agent("changing")?;
    let kept = follow(&agent, outside.ticks(outside.public)?)?;
    let cut = follow(&agent, outside.ticks(outside.other)?)?;
    net(&agent, &["--no-internet", "--allow", &outside.public.to_string()])?;
    harness::eventually("the forbidden connection is cut", || Ok(seen(&agent, &cut)?.contains("cut").then_some(())))?;
    let so_far = ticks(&agent, &kept, 0)?;
    ticks(&agent, &kept, so_far + 5)?;
    net(&agent, &["--open"])?;
    let so_far = ticks(&agent, &kept, 0)?;
    ticks(&agent, &kept, so_far + 5)?;
    Ok(())
}

fn an_allowed_name_is_reached_and_no_other_name_is_answered() -> Result<()> {
    let outside = Outside::get()?;
    let (there, other) = (outside.listen(outside.public)?, outside.listen(outside.other)?);
    let agent = Server::shared()?.agent_with("named", &["--no-internet", "--allow", "*.here.example"])?;
    ensure!(!reach(&agent, there)?, "an address was reachable before anybody asked for its name");
    ensure!(resolves(&agent, "A.Here.example")? == Some(outside.public.to_string()));
    ensure!(reach(&agent, there)?, "the name's address is not reachable");
    for name in ["here.example", "other.example", "some-name.example"] {
        ensure!(resolves(&agent, name)?.is_none(), "{name} was answered");
    }
    ensure!(!reach(&agent, other)?);
    // Whoever keeps the name keeps the address; whoever loses it does not.
    net(&agent, &["--no-internet", "--allow", "a.here.example", "--allow", "b.here.example"])?;
    ensure!(reach(&agent, there)?, "a name that is still allowed lost its address");
    net(&agent, &["--no-internet", "--allow", "b.here.example"])?;
    ensure!(!reach(&agent, there)?, "a name that is no longer allowed kept its address");
    // With no more than a few addresses denied, all names are answered.
    net(&agent, &["--deny", "203.0.113.0/24", "--allow", "other.example"])?;
    ensure!(resolves(&agent, "a.here.example")?.is_some() && resolves(&agent, "other.example")?.is_some());
    ensure!(reach(&agent, other)? && !reach(&agent, there)?);
    Ok(())
}

fn a_name_that_leads_to_a_private_address_leads_nowhere() -> Result<()> {
    let outside = Outside::get()?;
    let there = outside.listen(outside.private)?;
    let agent = Server::shared()?.agent_with("rebound", &["--no-internet", "--allow", "private.example"])?;
    ensure!(resolves(&agent, "private.example")? == Some(outside.private.to_string()));
    ensure!(!reach(&agent, there)?, "a name opened the way to a private address");
    Ok(())
}

fn without_the_internet_no_name_is_asked_for() -> Result<()> {
    Outside::get()?;
    let agent = Server::shared()?.agent_with("mute", &["--no-internet"])?;
    ensure!(resolves(&agent, "a.here.example")?.is_none(), "a name was resolved");
    net(&agent, &["--open"])?;
    ensure!(resolves(&agent, "a.here.example")?.is_some());
    Ok(())
}

/// Reaches the outside by name, and not its other address.
fn closed_but_for_here(agent: &Agent, there: SocketAddr, other: SocketAddr) -> Result<()> {
    ensure!(!reach(agent, other)?, "the policy is gone");
    ensure!(resolves(agent, "here.example")?.is_some(), "the name is not answered");
    ensure!(reach(agent, there)?, "the name's address is not reachable");
    Ok(())
}

fn a_policy_is_kept_over_stop_sleep_and_fork() -> Result<()> {
    let outside = Outside::get()?;
    let server = Server::shared()?;
    let (there, other) = (outside.listen(outside.public)?, outside.listen(outside.other)?);
    let agent = server.agent("kept")?;
    net(&agent, &["--no-internet", "--allow", "here.example"])?;
    closed_but_for_here(&agent, there, other)?;
    agent.stop()?;
    agent.start()?;
    closed_but_for_here(&agent, there, other)?;
    server.dorm(&["hibernate", &agent.name])?.succeeded()?;
    closed_but_for_here(&agent, there, other)?;
    let name = format!("{}-fork", agent.name);
    server.dorm(&["fork", &agent.name, &name])?.succeeded()?;
    let fork = server.adopt(&name)?;
    closed_but_for_here(&fork, there, other)?;
    // A policy that is changed while the agent sleeps holds when it wakes.
    server.dorm(&["hibernate", &agent.name])?.succeeded()?;
    net(&agent, &["--no-internet", "--allow", &outside.other.to_string()])?;
    ensure!(reach(&agent, other)? && !reach(&agent, there)?);
    Ok(())
}

fn a_policy_holds_while_the_daemon_is_away_and_after_it_is_back() -> Result<()> {
    let outside = Outside::get()?;
    let server = Server::start_with(&Options { leave_boxes: true, ..Options::default() })?;
    let (there, other) = (outside.listen(outside.public)?, outside.ticks(outside.other)?);
    let agent = server.agent_with("watched", &["--no-internet", "--allow", "here.example"])?;
    closed_but_for_here(&agent, there, other)?;
    let kept = follow(&agent, outside.ticks(outside.public)?)?;
    // Tries without end, and says so if it ever gets through.
    let script = format!(
        "import socket, time\nwhile True:\n try:\n  socket.create_connection(('{}', {}), timeout=1)\n  open('/tmp/through', 'w')\n \
         except OSError: time.sleep(0.002)",
        other.ip(),
        other.port()
    );
    agent.exec_with(&["-d"], &["python3", "-c", &script])?.succeeded()?;
    server.kill9()?;
    server.launch(&[])?;
    closed_but_for_here(&agent, there, other)?;
    let so_far = ticks(&agent, &kept, 0)?;
    ticks(&agent, &kept, so_far + 5)?;
    ensure!(agent.sh("test -e /tmp/through")?.code != 0, "the box got out while the daemon came back");
    Ok(())
}

fn what_cannot_be_promised_is_refused() -> Result<()> {
    let server = Server::shared()?;
    let agent = server.agent("strict")?;
    let private = Ipv4Addr::new(10, 1, 2, 3).to_string();
    for (args, reason) in [
        (["--allow", &private], "cannot be allowed"),
        (["--allow", "169.254.169.254"], "cannot be allowed"),
        (["--allow", "2001:db8::1"], "no IPv6"),
        (["--deny", "example.org"], "cannot be denied"),
        (["--deny", "10.0.0.1/8"], "bits set"),
        (["--allow", "not a name"], "no name"),
    ] {
        let refused = server.dorm(&[&["net", &agent.name], &args[..]].concat())?;
        ensure!(refused.code == 1 && refused.stderr.contains(reason), "{args:?}: {} {}", refused.code, refused.stderr);
    }
    ensure!(net(&agent, &[])?["internet"] == true, "a refused policy changed something");
    Ok(())
}
