//! The power fails right after something was acknowledged: whatever the disk did not have by then is gone, and nothing that was
//! acknowledged is.

use std::sync::Arc;

use anyhow::{Result, ensure};

use crate::harness::holder::Held;
use crate::harness::{self, Agent, Options, Server};

harness::tests![
    what_sleeps_on_disk_is_there_with_its_memory_after_the_power_failed,
    what_was_kept_and_gone_back_to_is_there_after_the_power_failed,
    what_was_made_stopped_and_deleted_is_so_after_the_power_failed,
];

fn server() -> Result<Arc<Server>> {
    let server = Server::start_with(&Options { mains: true, config: harness::CALM, ..Options::default() })?;
    server.dorm(&["template", "build", "base"])?.succeeded()?;
    fails(&server)?;
    Ok(server)
}

fn fails(server: &Server) -> Result<()> {
    server.cut_power()?;
    server.launch(&[])
}

/// Whether its memory is that of before.
fn remembers(agent: &Agent, before: &Held) -> Result<()> {
    before.goes_on_in(&agent.held()?)
}

/// Nothing syncs them but what they are to survive.
fn write(agent: &Agent, word: &str) -> Result<()> {
    agent.sh(&format!("echo {word} > ~/word; head -c 3M /dev/urandom > ~/much; md5sum ~/much > ~/sum"))?.succeeded().map(drop)
}

/// Files are those of this word, and whole.
fn has(agent: &Agent, word: &str) -> Result<()> {
    let found = agent.sh_text("cat ~/word && md5sum --quiet --check ~/sum")?;
    ensure!(found == word, "{} has the files of `{found}`, not of `{word}`", agent.name);
    Ok(())
}

fn is(agent: &Agent, state: &str) -> Result<()> {
    ensure!(agent.state()? == state, "it is {}", agent.show()?);
    Ok(())
}

fn what_sleeps_on_disk_is_there_with_its_memory_after_the_power_failed() -> Result<()> {
    let server = server()?;
    let agent = server.agent("asleep")?;
    agent.holder(16)?;
    let held = agent.held()?;
    for word in ["first", "second"] {
        write(&agent, word)?;
        agent.hibernate()?;
        fails(&server)?;
        is(&agent, "hibernated")?;
        remembers(&agent, &held)?;
        has(&agent, word)?;
    }
    server.dorm(&["set", &agent.name, "--durable-after", "0.1"])?.succeeded()?;
    write(&agent, "third")?;
    agent.pause()?;
    harness::eventually("it is durable", || Ok((agent.show()?["durable"] == true).then_some(())))?;
    fails(&server)?;
    is(&agent, "hibernated")?;
    remembers(&agent, &held)?;
    has(&agent, "third")?;
    // What it does after that is not in the image: it starts from its files, and says so.
    fails(&server)?;
    ensure!(agent.sh("pgrep python3")?.code == 1, "a memory came back that is older than its files");
    has(&agent, "third")
}

fn what_was_kept_and_gone_back_to_is_there_after_the_power_failed() -> Result<()> {
    let server = server()?;
    let agent = server.agent("kept")?;
    agent.holder(16)?;
    let held = agent.held()?;
    write(&agent, "old")?;
    server.dorm(&["snapshot", &agent.name, "--label", "old"])?.succeeded()?;
    fails(&server)?;
    write(&agent, "new")?;
    server.dorm(&["snapshot", &agent.name, "--label", "new", "--files-only"])?.succeeded()?;
    fails(&server)?;
    ensure!(server.snapshots(&agent.name)?.len() == 2);
    let back = |label: &str| server.dorm(&["rollback", &agent.name, label])?.succeeded().map(drop);
    back("old")?;
    remembers(&agent, &held)?;
    has(&agent, "old")?;
    back("new")?;
    fails(&server)?;
    has(&agent, "new")?;
    ensure!(server.snapshots(&agent.name)?.len() == 4, "what was there before each rollback is not kept");
    server.dorm(&["fork", &agent.name, "copy", "--from", "old"])?.succeeded()?;
    fails(&server)?;
    has(&server.adopt("copy")?, "old")?;
    back("old")?;
    remembers(&agent, &held)
}

fn what_was_made_stopped_and_deleted_is_so_after_the_power_failed() -> Result<()> {
    let server = server()?;
    let agent = server.agent("made")?;
    fails(&server)?;
    write(&agent, "made")?;
    agent.stop()?;
    fails(&server)?;
    is(&agent, "stopped")?;
    has(&agent, "made")?;
    let gone = server.agent("gone")?;
    gone.hibernate()?;
    server.dorm(&["rm", "--yes", &gone.name])?.succeeded()?;
    fails(&server)?;
    ensure!(!server.names()?.contains(&gone.name), "a deleted agent is back");
    ensure!(server.remains.of_agent(&gone.id).is_empty(), "{:?}", server.remains.of_agent(&gone.id));
    has(&agent, "made")
}
