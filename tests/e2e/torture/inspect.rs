//! What is there, compared with what must be.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::harness::{Server, eventually};
use crate::model::{Agent, Snapshot};

fn get(server: &Server, path: &str) -> Result<Value> {
    let reply = server.http("GET", path, b"")?;
    ensure!(
        reply.status == 200,
        "GET {path}: {} {}",
        reply.status,
        reply.text()
    );
    reply.json()
}

fn list(value: Value) -> Result<Vec<Value>> {
    match value {
        Value::Array(list) => Ok(list),
        other => bail!("{other} is no list"),
    }
}

fn agents(server: &Server) -> Result<Vec<Value>> {
    list(get(server, "/v1/agents")?)
}

pub(crate) fn snapshots(server: &Server, name: &str) -> Result<Vec<Value>> {
    list(get(server, &format!("/v1/agents/{name}/snapshots"))?)
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

pub(crate) fn id_of(server: &Server, name: &str) -> Result<Option<String>> {
    let agent = agents(server)?.into_iter().find(|agent| agent["name"] == name);
    Ok(agent.map(|agent| text(&agent["id"])))
}

/// Takes a snapshot into the model that nobody was told of.
pub(crate) fn adopt_snapshot(server: &Server, name: &str, agent: &mut Agent, label: &str) -> Result<()> {
    for found in snapshots(server, name)? {
        let id = text(&found["id"]);
        if found["label"] == label && agent.snapshots.iter().all(|known| known.id != id) {
            let full = found["kind"] == "full";
            let worlds = if full {
                agent.worlds.clone()
            } else {
                agent.without_memory()
            };
            agent.snapshots.push(Snapshot { id, worlds });
        }
    }
    Ok(())
}

/// Waits until nothing is under way.
pub(crate) fn at_rest(server: &Server) -> Result<()> {
    eventually("every agent comes to rest", || {
        let under_way = agents(server)?.into_iter().any(|agent| {
            !matches!(
                agent["state"].as_str(),
                Some("stopped" | "running" | "standby" | "hibernated" | "failed")
            )
        });
        Ok((!under_way).then_some(()))
    })
    .with_context(|| format!("{:?}", agents(server)))
}

/// Records, host and model agree: soon, as agents go to sleep by themselves meanwhile.
pub(crate) fn settled(server: &Server, model: &BTreeMap<String, Agent>) -> Result<()> {
    let mut last = Vec::new();
    let agreed = eventually("records, host and model agree", || {
        last = differences(server, model)?;
        Ok(last.is_empty().then_some(()))
    });
    agreed.with_context(|| last.join("\n"))?;
    let lost = |agent: &Value| text(&agent["reason"]).contains("memory is lost");
    for agent in agents(server)? {
        ensure!(agent["state"] != "failed" && !lost(&agent), "{agent}");
    }
    Ok(())
}

fn differences(server: &Server, model: &BTreeMap<String, Agent>) -> Result<Vec<String>> {
    let mut found = Vec::new();
    let mut compare = |what: &str, is: BTreeSet<String>, should: BTreeSet<String>| {
        if is != should {
            let more: Vec<_> = is.difference(&should).collect();
            let less: Vec<_> = should.difference(&is).collect();
            found.push(format!("{what}: {more:?} too many, {less:?} missing"));
        }
    };
    let listed = agents(server)?;
    let ids = |with: &dyn Fn(&Value) -> bool| -> BTreeSet<String> {
        listed
            .iter()
            .filter(|agent| with(agent))
            .map(|agent| text(&agent["id"]))
            .collect()
    };
    let has_box = |agent: &Value| matches!(agent["state"].as_str(), Some("running" | "standby"));
    let remains = &server.remains;
    compare(
        "agents",
        ids(&|_| true),
        model.values().map(|agent| agent.id.clone()).collect(),
    );
    compare("homes", remains.homes(), ids(&|_| true));
    compare("boxes", remains.boxes(), ids(&has_box));
    let interfaces = remains.interfaces().len();
    let mut kept = BTreeSet::new();
    let mut with_memory = BTreeSet::new();
    for (name, agent) in model {
        let mut of_agent = BTreeSet::new();
        for snapshot in snapshots(server, name)? {
            of_agent.insert(text(&snapshot["id"]));
            if snapshot["kind"] == "full" {
                with_memory.insert(text(&snapshot["id"]));
            }
        }
        let known = agent
            .snapshots
            .iter()
            .map(|snapshot| snapshot.id.clone())
            .collect();
        kept.extend(of_agent.iter().cloned());
        compare(&format!("snapshots of {name}"), of_agent, known);
    }
    compare("snapshots in the pool", remains.snapshots(), kept);
    let boxes = ids(&has_box).len();
    if interfaces != boxes {
        found.push(format!("{interfaces} interfaces of {boxes} boxes"));
    }
    for (agent, images) in remains.images() {
        let own: Vec<_> = images.difference(&with_memory).collect();
        let known = model.values().any(|known| known.id == agent);
        // The one it has now. A box that was brought back by it, and has gone on, still has it.
        if own.len() > 1 || !known || own.iter().any(|name| name.contains('.')) {
            found.push(format!("images {own:?} of agent {agent}"));
        }
    }
    let missing: Vec<_> = with_memory
        .iter()
        .filter(|id| !remains.images().values().any(|of| of.contains(*id)))
        .collect();
    if !missing.is_empty() {
        found.push(format!("the memory of the snapshots {missing:?} is missing"));
    }
    let temporary = fs::read_dir(server.data.join("tmp"))?.count();
    if temporary > 0 {
        found.push(format!("{temporary} temporary files"));
    }
    Ok(found)
}
