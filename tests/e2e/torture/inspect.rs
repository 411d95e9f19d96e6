//! What is there, compared with what must be.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::harness::order::differ;
use crate::harness::{Server, eventually};
use crate::model::{Agent, Kept, Snapshot};

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

pub(crate) fn id_of(server: &Server, name: &str) -> Result<Option<String>> {
    let agent = server.agents()?.into_iter().find(|agent| agent["name"] == name);
    Ok(agent.map(|agent| text(&agent["id"])))
}

/// What would be left of the memory of an agent of which nothing is asked.
pub(crate) fn kept(server: &Server, name: &str) -> Result<Kept> {
    let newest = server.list(&format!("/v1/agents/{name}/events?limit=1"))?;
    if newest.first().is_some_and(|event| event["to"] == "running") {
        return Ok(Kept::Awake);
    }
    let shown = server.http("GET", &format!("/v1/agents/{name}"), b"")?.json()?;
    let whole = shown["state"] == "standby" && shown["durable"] == true;
    Ok(if whole { Kept::Whole } else { Kept::Unknown })
}

/// Takes a snapshot into the model that nobody was told of.
pub(crate) fn adopt_snapshot(server: &Server, name: &str, agent: &mut Agent, label: &str) -> Result<()> {
    for found in server.snapshots(name)? {
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

/// Records, host and model agree: soon, as agents go to sleep by themselves meanwhile.
pub(crate) fn settled(server: &Server, model: &BTreeMap<String, Agent>) -> Result<()> {
    let mut last = Vec::new();
    let agreed = eventually("records, host and model agree", || {
        last = differences(server, model)?;
        Ok(last.is_empty().then_some(()))
    });
    agreed.with_context(|| last.join("\n"))?;
    let lost = |agent: &Value| text(&agent["reason"]).contains("memory is lost");
    for agent in server.agents()? {
        ensure!(agent["state"] != "failed" && !lost(&agent), "{agent}");
    }
    Ok(())
}

fn differences(server: &Server, model: &BTreeMap<String, Agent>) -> Result<Vec<String>> {
    let mut found = server.disorder()?;
    let listed = server.agents()?.iter().map(|agent| text(&agent["id"])).collect();
    let known = model.values().map(|agent| agent.id.clone()).collect();
    found.extend(differ("agents", &listed, &known));
    for (name, agent) in model {
        let listed = server.snapshots(name)?;
        let listed = listed.iter().map(|snapshot| text(&snapshot["id"])).collect();
        let known = agent
            .snapshots
            .iter()
            .map(|snapshot| snapshot.id.clone())
            .collect();
        found.extend(differ(&format!("snapshots of {name}"), &listed, &known));
    }
    let images = server.remains.images().into_values().flatten();
    let bad: Vec<_> = images.filter(|name| name.ends_with(".bad")).collect();
    if !bad.is_empty() {
        found.push(format!("images that were set aside: {bad:?}"));
    }
    Ok(found)
}
