//! Damage on disk, to memory images and to records: it is told, it costs what it befell and nothing else, and nothing of a
//! damaged image ever runs.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::harness::{self, Agent, Options, Server};

harness::tests![
    a_damaged_file_of_any_kind_costs_the_memory_and_never_the_files,
    a_fork_of_a_damaged_snapshot_is_refused_and_the_agent_goes_on,
    a_damaged_record_is_told_and_concerns_nobody_else,
];

#[derive(Debug, Clone, Copy)]
enum Damage {
    Flip,
    Cut,
    Remove,
}

const DAMAGES: [Damage; 3] = [Damage::Flip, Damage::Cut, Damage::Remove];

impl Damage {
    fn befalls(self, file: &Path) -> Result<()> {
        let mut bytes = fs::read(file)?;
        let middle = bytes.len() / 2;
        match self {
            Self::Flip => bytes[middle] ^= 1,
            Self::Cut => bytes.truncate(middle),
            Self::Remove => return Ok(fs::remove_file(file)?),
        }
        Ok(fs::write(file, bytes)?)
    }
}

/// An agent with a process that tells in a file of the home whenever it runs.
struct Ticking {
    agent: Agent,
    /// On the host.
    ticks: PathBuf,
}

impl Ticking {
    fn new(name: &str) -> Result<Self> {
        let agent = Server::shared()?.agent(name)?;
        let home = agent.sh_text("echo kept > ~/file; echo ~")?;
        let root = agent.server.data.join("pool/homes").join(&agent.id);
        let ticks = root.join(home.trim().trim_start_matches('/')).join("ticks");
        Ok(Self { agent, ticks })
    }

    fn start(&self) -> Result<()> {
        self.agent.sh("rm -f ~/ticks")?.succeeded()?;
        self.agent.exec_with(&["-d"], &["sh", "-c", "while :; do echo >> ~/ticks; sleep 0.01; done"])?.succeeded()?;
        self.agent.until("it ticks", "test -s ~/ticks")
    }

    fn count(&self) -> Result<u64> {
        Ok(fs::metadata(&self.ticks)?.len())
    }

    fn image(&self) -> Result<PathBuf> {
        let images = fs::read_dir(self.agent.server.data.join("images").join(&self.agent.id))?;
        let mut whole = images.filter_map(|entry| Some(entry.ok()?.path())).filter(|path| path.extension().is_none());
        whole.next().context("there is no image")
    }

    /// It is woken, and its memory is gone: it says so, to whoever asks and however, and its files are there.
    fn is_told_of_its_loss(&self) -> Result<()> {
        let (agent, server, before) = (&self.agent, &self.agent.server, self.count()?);
        ensure!(agent.sh_text("cat ~/file")? == "kept");
        ensure!(self.count()? == before, "something of a damaged image ran");
        let lost = |text: &str| text.contains("memory is lost");
        let shown = agent.show()?;
        ensure!(shown["state"] == "running" && shown["reason"].as_str().is_some_and(lost), "{shown}");
        ensure!(lost(&server.dorm(&["why", &agent.name])?.text()?), "`dorm why` does not tell");
        let events = agent.events()?;
        ensure!(events.last().is_some_and(|last| last["reason"].as_str().is_some_and(lost)), "{events:?}");
        let why = server.http("GET", &format!("/v1/agents/{}/why", agent.name), b"")?.json()?;
        ensure!(why["setback"]["what"].as_str().is_some_and(lost), "{why}");
        let images = server.remains.images();
        let aside = images.get(&agent.id).is_some_and(|of| of.iter().any(|name| name.ends_with(".bad")));
        ensure!(aside, "the image is not kept: {images:?}");
        Ok(())
    }
}

/// One file of each kind: numbers in their names tell apart those of one kind. Empty ones cannot be damaged.
fn kinds(image: &Path) -> Result<BTreeMap<String, String>> {
    let mut kinds = BTreeMap::new();
    for entry in fs::read_dir(image)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if entry.metadata()?.len() > 1 {
            kinds.insert(name.replace(|c: char| c.is_ascii_digit(), ""), name);
        }
    }
    Ok(kinds)
}

/// Some kinds that an image of this run must have. The first is of the memory itself, the second of what it belongs to.
fn certain_kinds() -> &'static [&'static str] {
    match harness::engines::isolation().as_deref() {
        Some("gvisor") => &["pages.img", "checkpoint.img", "pages_meta.img", "secret"],
        _ => &["pages-.img", "core-.img", "mm-.img", "pagemap-.img", "pstree.img"],
    }
}

fn a_damaged_file_of_any_kind_costs_the_memory_and_never_the_files() -> Result<()> {
    let ticking = Ticking::new("damage")?;
    ticking.agent.hibernate()?;
    let found = kinds(&ticking.image()?)?;
    ticking.agent.wake()?;
    for kind in certain_kinds().iter().chain(&["manifest.json", "manifest.blake"]) {
        ensure!(found.contains_key(*kind), "there is no {kind} in an image: {found:?}");
    }
    let every_kind = found.keys().zip(DAMAGES.into_iter().cycle());
    let memory = DAMAGES.map(|damage| (certain_kinds()[0], damage));
    let cases = every_kind.map(|(kind, damage)| (kind.as_str(), damage)).chain(memory);
    for (kind, damage) in cases {
        ticking.start()?;
        ticking.agent.hibernate()?;
        let image = ticking.image()?;
        let Some(file) = kinds(&image)?.remove(kind) else {
            continue;
        };
        damage.befalls(&image.join(&file))?;
        ticking.is_told_of_its_loss().with_context(|| format!("{file}: {damage:?}"))?;
    }
    Ok(())
}

fn a_fork_of_a_damaged_snapshot_is_refused_and_the_agent_goes_on() -> Result<()> {
    let ticking = Ticking::new("damaged-snapshot")?;
    ticking.start()?;
    let (agent, server) = (&ticking.agent, &ticking.agent.server);
    let snapshot = server.dorm(&["snapshot", &agent.name])?.text()?;
    let image = server.data.join("images").join(&agent.id).join(snapshot.trim());
    Damage::Flip.befalls(&image.join(&kinds(&image)?[certain_kinds()[1]]))?;
    let copy = format!("{}-copy", agent.name);
    let forked = server.dorm(&["fork", &agent.name, &copy, "--from", snapshot.trim()])?;
    ensure!(forked.code != 0 && forked.stderr.contains("checksum"), "{forked}");
    ensure!(!server.names()?.contains(&copy), "a fork without its memory is there");
    let before = ticking.count()?;
    harness::eventually("the agent goes on", || Ok((ticking.count()? > before).then_some(())))
}

/// Runs statements on the records of a server whose daemon is away.
fn change_records(server: &Server, statements: &str) -> Result<()> {
    let script = "import sqlite3, sys; db = sqlite3.connect(sys.argv[1]); db.executescript(sys.argv[2]); db.commit()";
    let mut python = Command::new("python3");
    let changed = python.args(["-c", script]).arg(server.data.join("dorm.db")).arg(statements).output()?;
    ensure!(changed.status.success(), "{}", String::from_utf8_lossy(&changed.stderr));
    Ok(())
}

fn a_damaged_record_is_told_and_concerns_nobody_else() -> Result<()> {
    let server = Server::start_with(&Options { config: harness::CALM, ..Options::default() })?;
    let (whole, hurt, lost) = (server.agent("whole")?, server.agent("hurt")?, server.agent("lost")?);
    let pid = |agent: &Agent| anyhow::Ok(agent.show()?["pid"].clone());
    let pids = [pid(&hurt)?, pid(&lost)?];
    for (agent, name) in [(&whole, "whole-one"), (&hurt, "hurt-one")] {
        agent.sh("echo kept > ~/file")?.succeeded()?;
        server.dorm(&["snapshot", &agent.name, "--label", name])?.succeeded()?;
        for thing in ["volume", "key"] {
            server.dorm(&[thing, "create", name])?.succeeded()?;
        }
    }
    whole.hibernate()?;
    server.kill9()?;
    change_records(
        &server,
        "CREATE TABLE whole AS SELECT * FROM agents; UPDATE agents SET spec = '{' WHERE name LIKE 'hurt%'; UPDATE snapshots SET kind = 'half' WHERE label = 'hurt-one'; \
         UPDATE volumes SET id = 'elsewhere/' WHERE name = 'hurt-one'; UPDATE keys SET hash = x'00' WHERE name = 'hurt-one'; \
         UPDATE agents SET id = 'elsewhere/' WHERE name LIKE 'lost%';",
    )?;
    server.launch(&[])?;
    ensure!(whole.sh_text("cat ~/file")? == "kept" && server.snapshots(&whole.name)?.len() == 1);
    let shown = hurt.show()?;
    let damaged = |text: &Value| text.as_str().is_some_and(|text| text.contains("record is damaged"));
    ensure!(shown["state"] == "failed" && damaged(&shown["reason"]), "{shown}");
    for path in ["/v1/volumes", "/v1/keys"] {
        let names = server.list(path)?.iter().map(|one| one["name"].to_string()).collect::<String>();
        ensure!(names.contains("whole-one") && !names.contains("hurt-one"), "{path}: {names}");
    }
    let told = server.http("GET", "/v1/info", b"")?.json()?["damage"].to_string();
    for kind in ["agent", "snapshot", "volume", "key"] {
        ensure!(told.contains(kind), "nothing is told of the {kind}: {told}");
    }
    let doctor = server.dorm(&["doctor"])?.text()?;
    let line = doctor.lines().find(|line| line.starts_with("warn") && line.contains(" records "));
    ensure!(line.is_some_and(|line| line.contains("snapshot") && line.contains("key")), "{doctor}");
    // Whatever a damaged record spoke of is there still, for who can mend it.
    ensure!(server.remains.homes().contains(&hurt.id), "its home is gone");
    let volumes = fs::read_dir(server.data.join("pool/volumes"))?.count();
    ensure!(volumes == 2, "there are {volumes} volumes");
    server.agent("another")?.sh("true")?.succeeded()?;
    // So are the boxes, and they go on when it is mended.
    server.kill9()?;
    change_records(
        &server,
        "UPDATE agents SET (id, spec) = (SELECT id, spec FROM whole WHERE whole.name = agents.name) WHERE name IN (SELECT name FROM whole); \
         UPDATE snapshots SET kind = 'full' WHERE kind = 'half'; DROP TABLE whole;",
    )?;
    server.launch(&[])?;
    for (agent, pid) in [&hurt, &lost].into_iter().zip(pids) {
        let shown = agent.show()?;
        ensure!(shown["state"] == "running" && shown["pid"] == pid, "{shown}");
    }
    Ok(())
}
