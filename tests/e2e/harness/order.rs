//! Whether the host has what the records say, and no more.

use std::collections::BTreeSet;
use std::fs;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::host::zombies_of;
use super::server::Server;
use super::wait::eventually;

impl Server {
    /// What is listed at `path`.
    pub(crate) fn list(&self, path: &str) -> Result<Vec<Value>> {
        let reply = self.http("GET", path, b"")?;
        ensure!(
            reply.status == 200,
            "GET {path}: {} {}",
            reply.status,
            reply.text()
        );
        match reply.json()? {
            Value::Array(list) => Ok(list),
            other => bail!("{other} is no list"),
        }
    }

    pub(crate) fn agents(&self) -> Result<Vec<Value>> {
        self.list("/v1/agents")
    }

    pub(crate) fn snapshots(&self, agent: &str) -> Result<Vec<Value>> {
        self.list(&format!("/v1/agents/{agent}/snapshots"))
    }

    /// Waits until nothing is under way.
    pub(crate) fn at_rest(&self) -> Result<()> {
        eventually("every agent comes to rest", || {
            let under_way = self.agents()?.into_iter().any(|agent| {
                !matches!(
                    agent["state"].as_str(),
                    Some("stopped" | "running" | "standby" | "hibernated" | "failed")
                )
            });
            Ok((!under_way).then_some(()))
        })
        .with_context(|| format!("{:?}", self.agents()))
    }

    /// Waits until records and host agree.
    pub(crate) fn in_order(&self) -> Result<()> {
        self.at_rest()?;
        let mut last = Vec::new();
        let agreed = eventually("records and host agree", || {
            last = self.disorder()?;
            Ok(last.is_empty().then_some(()))
        });
        agreed.with_context(|| last.join("\n"))
    }

    /// In what records and host differ.
    pub(crate) fn disorder(&self) -> Result<Vec<String>> {
        let mut found = Vec::new();
        let agents = self.agents()?;
        let ids = |with: &dyn Fn(&Value) -> bool| -> BTreeSet<String> {
            let of = agents.iter().filter(|agent| with(agent));
            of.map(|agent| text(&agent["id"])).collect()
        };
        let has_box = |agent: &Value| matches!(agent["state"].as_str(), Some("running" | "standby"));
        let remains = &self.remains;
        found.extend(differ("homes", &remains.homes(), &ids(&|_| true)));
        found.extend(differ("boxes", &remains.boxes(), &ids(&has_box)));
        let kept_for: Vec<_> = remains
            .run_directories()
            .difference(&ids(&has_box))
            .cloned()
            .collect();
        if !kept_for.is_empty() {
            found.push(format!("run directories of boxes that are not: {kept_for:?}"));
        }
        let (interfaces, boxes) = (remains.interfaces().len(), ids(&has_box).len());
        if interfaces != boxes {
            found.push(format!("{interfaces} interfaces of {boxes} boxes"));
        }
        let (mut kept, mut with_memory) = (BTreeSet::new(), BTreeSet::new());
        for agent in &agents {
            for snapshot in self.snapshots(&text(&agent["id"]))? {
                kept.insert(text(&snapshot["id"]));
                if snapshot["kind"] == "full" {
                    with_memory.insert(text(&snapshot["id"]));
                }
            }
        }
        found.extend(differ("snapshots in the pool", &remains.snapshots(), &kept));
        let images = remains.images();
        for (agent, images) in &images {
            let own = images
                .difference(&with_memory)
                .filter(|name| !name.ends_with(".bad"));
            let own: Vec<_> = own.collect();
            // The one it has now. A box that was brought back by it, and has gone on, still has it.
            let unknown = !ids(&|_| true).contains(agent);
            if own.len() > 1 || unknown || own.iter().any(|name| name.contains('.')) {
                found.push(format!("images {own:?} of agent {agent}"));
            }
        }
        let lacks = |id: &&String| !images.values().any(|of| of.contains(*id));
        let missing: Vec<_> = with_memory.iter().filter(lacks).collect();
        if !missing.is_empty() {
            found.push(format!("the memory of the snapshots {missing:?} is missing"));
        }
        let temporary = fs::read_dir(self.data.join("tmp"))?.count();
        if temporary > 0 {
            found.push(format!("{temporary} temporary files"));
        }
        found.extend(
            remains
                .strangers(self.pid()?)?
                .into_iter()
                .map(|who| format!("process {who}")),
        );
        found.extend(remains.lost(self.pid()?, &ids(&has_box)));
        let zombies = zombies_of(self.pid()?);
        if !zombies.is_empty() {
            found.push(format!("zombies {zombies:?}"));
        }
        Ok(found)
    }
}

/// In what a set differs from what it should be, in words.
pub(crate) fn differ(what: &str, is: &BTreeSet<String>, should: &BTreeSet<String>) -> Option<String> {
    let more: Vec<_> = is.difference(should).collect();
    let less: Vec<_> = should.difference(is).collect();
    (is != should).then(|| format!("{what}: {more:?} too many, {less:?} missing"))
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}
