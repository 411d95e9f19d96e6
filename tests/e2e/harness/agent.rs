//! An agent that a test made. It is deleted at the end of the test, and must leave nothing.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::cli::Output;
use super::leaked;
use super::server::Server;
use super::wait::eventually;

static COUNT: AtomicU32 = AtomicU32::new(0);

pub(crate) struct Agent {
    pub(crate) server: Arc<Server>,
    pub(crate) name: String,
    pub(crate) id: String,
}

/// A name that no other test uses.
pub(crate) fn unique(label: &str) -> String {
    format!("{label}-{}", COUNT.fetch_add(1, Ordering::Relaxed))
}

impl Server {
    /// A running agent with a name of its own.
    pub(crate) fn agent(self: &Arc<Self>, label: &str) -> Result<Agent> {
        self.agent_with(label, &[])
    }

    /// An agent made by `dorm new NAME` with further arguments.
    pub(crate) fn agent_with(self: &Arc<Self>, label: &str, args: &[&str]) -> Result<Agent> {
        let name = unique(label);
        let made = self.json(&[&["new", &name], args].concat())?;
        let id = made["id"].as_str().context("an agent has an id")?.to_owned();
        Ok(Agent {
            server: Arc::clone(self),
            name,
            id,
        })
    }

    /// One with room for so many megabytes of files, and no more. A machine's disk is larger, as its template is on it.
    pub(crate) fn agent_with_room(
        self: &Arc<Self>,
        label: &str,
        megabytes: u32,
        args: &[&str],
    ) -> Result<Agent> {
        let disk = format!("{megabytes}M");
        let agent = self.agent_with(label, &[&["--disk", &disk], args].concat())?;
        if super::engines::in_machines() {
            let fill = format!(
                "room=$(df --output=avail -BM / | tail -n 1 | tr -dc 0-9) && fallocate -l $((room - {megabytes}))M /var/ballast && sync"
            );
            agent.root(&fill)?.succeeded()?;
        }
        Ok(agent)
    }

    /// Takes charge of an agent that was made in another way.
    pub(crate) fn adopt(self: &Arc<Self>, name: &str) -> Result<Agent> {
        let shown = self.json(&["show", name])?;
        let id = shown["id"].as_str().context("an agent has an id")?.to_owned();
        Ok(Agent {
            server: Arc::clone(self),
            name: name.to_owned(),
            id,
        })
    }

    pub(crate) fn names(&self) -> Result<Vec<String>> {
        Ok(self
            .dorm(&["ls", "-q"])?
            .text()?
            .lines()
            .map(str::to_owned)
            .collect())
    }
}

impl Agent {
    /// Runs a program as the template's user.
    pub(crate) fn exec(&self, command: &[&str]) -> Result<Output> {
        self.exec_with(&[], command)
    }

    /// The same with flags of `dorm exec`.
    pub(crate) fn exec_with(&self, flags: &[&str], command: &[&str]) -> Result<Output> {
        self.server
            .dorm(&[&["exec"], flags, &[&self.name, "--"], command].concat())
    }

    pub(crate) fn sh(&self, script: &str) -> Result<Output> {
        self.exec(&["sh", "-c", script])
    }

    pub(crate) fn root(&self, script: &str) -> Result<Output> {
        self.exec_with(&["-u", "root"], &["bash", "-c", script])
    }

    /// Runs a Python script as root.
    pub(crate) fn python(&self, script: &str) -> Result<Output> {
        self.exec_with(&["-u", "root"], &["python3", "-c", script])
    }

    /// The same, of which nothing but success and its output matter.
    pub(crate) fn sh_text(&self, script: &str) -> Result<String> {
        self.sh(script)?.text()
    }

    pub(crate) fn root_text(&self, script: &str) -> Result<String> {
        self.root(script)?.text()
    }

    pub(crate) fn stop(&self) -> Result<()> {
        self.server.dorm(&["stop", &self.name])?.succeeded().map(drop)
    }

    pub(crate) fn start(&self) -> Result<()> {
        self.server.dorm(&["start", &self.name])?.succeeded().map(drop)
    }

    /// To standby.
    pub(crate) fn pause(&self) -> Result<()> {
        self.put_to("pause", "standby")
    }

    /// To disk.
    pub(crate) fn hibernate(&self) -> Result<()> {
        self.put_to("hibernate", "hibernated")
    }

    fn put_to(&self, verb: &str, state: &str) -> Result<()> {
        let shown = self.server.json(&[verb, &self.name])?;
        let shown = shown.get(0).unwrap_or(&shown);
        ensure!(shown["state"] == state, "after {verb} it is {shown}");
        Ok(())
    }

    pub(crate) fn wake(&self) -> Result<()> {
        self.server.dorm(&["wake", &self.name])?.succeeded().map(drop)
    }

    /// Waits until a script succeeds in the box.
    pub(crate) fn until(&self, what: &str, script: &str) -> Result<()> {
        eventually(what, || Ok((self.sh(script)?.code == 0).then_some(())))
    }

    /// Waits until it is in this state.
    pub(crate) fn becomes(&self, state: &str) -> Result<()> {
        eventually(&format!("{} is {state}", self.name), || {
            Ok((self.state()? == state).then_some(()))
        })
    }

    /// Its transitions, oldest first.
    pub(crate) fn events(&self) -> Result<Vec<Value>> {
        let events = self.server.json(&["events", &self.name, "-n", "1000"])?;
        let newest_first = events.as_array().context("events are a list")?;
        Ok(newest_first.iter().rev().cloned().collect())
    }

    pub(crate) fn show(&self) -> Result<Value> {
        self.server.json(&["show", &self.name])
    }

    pub(crate) fn state(&self) -> Result<String> {
        Ok(self.show()?["state"]
            .as_str()
            .context("an agent has a state")?
            .to_owned())
    }

    pub(crate) fn stats(&self) -> Result<Value> {
        Ok(self.server.json(&["stats", &self.name])?[0].clone())
    }

    /// Process 1 of the box, as the host sees it.
    pub(crate) fn pid(&self) -> Result<i32> {
        Ok(self.show()?["pid"]
            .as_i64()
            .context("a running agent has a pid")? as i32)
    }

    pub(crate) fn address(&self) -> Result<String> {
        Ok(self.show()?["address"]
            .as_str()
            .context("a running agent has an address")?
            .to_owned())
    }

    /// `NAME:PATH`, as `dorm cp` wants it.
    pub(crate) fn at(&self, path: &str) -> String {
        format!("{}:{path}", self.name)
    }

    fn delete(&self) -> Result<()> {
        if self.server.pid().is_err() || !self.server.names()?.contains(&self.name) {
            return Ok(());
        }
        self.server.dorm(&["rm", "--yes", &self.name])?.succeeded()?;
        let gone = !self.server.names()?.contains(&self.name);
        ensure!(gone, "{} is still listed after it was deleted", self.name);
        Ok(())
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        if let Err(error) = self.delete() {
            leaked([format!("agent {}: {error:#}", self.name)]);
        }
        if self.server.pid().is_ok() {
            let found = self.server.remains.of_agent(&self.id);
            leaked(
                found
                    .into_iter()
                    .map(|what| format!("{what}, of the deleted agent {}", self.name)),
            );
        }
    }
}
