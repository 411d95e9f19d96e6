//! What is done to agents, and what the model makes of the answers.

use std::collections::BTreeMap;

use anyhow::{Result, bail, ensure};
use serde_json::{Value, json};

use crate::client::{self, Answer};
use crate::harness::Server;
use crate::harness::engines::behind_gvisor;
use crate::model::{Agent, Memory, Seen, Snapshot};

#[derive(Debug, Clone)]
pub(crate) enum Operation {
    New,
    Look,
    Upload {
        file: String,
        content: String,
    },
    Write {
        file: String,
        content: String,
    },
    /// Starts the process that counts in its memory.
    Keep {
        token: u64,
    },
    Count,
    Pause,
    Hibernate,
    Wake,
    Start,
    Stop,
    Hold,
    Snapshot {
        label: String,
        files_only: bool,
    },
    DeleteSnapshot {
        id: String,
    },
    RollBack {
        to: Snapshot,
    },
    Fork {
        name: String,
        from: Option<Snapshot>,
        files_only: bool,
        start: bool,
    },
    Delete,
    /// Many things at once, none of which may lose anything.
    Storm {
        of: Vec<Calm>,
    },
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Calm {
    Pause,
    Hibernate,
    Wake,
    Run,
}

/// What gVisor cannot save.
const DELETED_FILE: &str = "exec 9> ~/.ghost; rm ~/.ghost; echo ghost >&9; ";
/// Holds a counter in its memory alone, and what it is given beside; answers on pipes.
const KEEPER: &str = "setsid bash -c 'BESIDE n=0; mkfifo /dev/shm/k.in; mkfifo /dev/shm/k.out; \
    while :; do read -r what < /dev/shm/k.in || continue; [ \"$what\" = more ] && n=$((n+1)); echo \"TOKEN $n\" > /dev/shm/k.out; done' \
    < /dev/null > /dev/null 2>&1 & until [ -p /dev/shm/k.out ]; do sleep 0.02; done";

fn ask(what: &str) -> String {
    format!(
        "if [ -p /dev/shm/k.out ]; then timeout 50 flock /dev/shm/k.lock bash -c 'echo {what} > /dev/shm/k.in; read a < /dev/shm/k.out; \
         echo memory $a'; else echo nothing; fi"
    )
}

pub(crate) fn perform(server: &Server, name: &str, operation: &Operation) -> Answer {
    let at = |rest: &str| format!("/v1/agents/{name}{rest}");
    let post = |rest: &str, body: Value| client::call(server, "POST", &at(rest), &body);
    match operation {
        Operation::New => client::call(server, "POST", "/v1/agents", &json!({ "name": name })),
        Operation::Look => {
            let list = "for f in ~/t/*; do [ -f \"$f\" ] && echo \"file ${f##*/} $(cat $f)\"; done; ";
            client::run(server, name, &format!("{list}{}", ask("same")))
        }
        Operation::Upload { file, content } => {
            client::upload(server, name, &format!("/home/user/t/{file}"), content)
        }
        Operation::Write { file, content } => {
            let script =
                format!("mkdir -p ~/t; printf %s {content} > ~/{file}.new && mv ~/{file}.new ~/t/{file}");
            client::run(server, name, &script)
        }
        Operation::Keep { token } => {
            let beside = if behind_gvisor() { "" } else { DELETED_FILE };
            let keeper = KEEPER
                .replace("BESIDE ", beside)
                .replace("TOKEN", &token.to_string());
            client::run(server, name, &keeper)
        }
        Operation::Count => client::run(server, name, &ask("more")),
        Operation::Pause => post("/pause", Value::Null),
        Operation::Hibernate => post("/hibernate", Value::Null),
        Operation::Wake => post("/wake", Value::Null),
        Operation::Start => post("/start", Value::Null),
        Operation::Stop => post("/stop", json!({ "grace": 0.2 })),
        Operation::Hold => post("/holds", json!({ "seconds": 3, "reason": "torture" })),
        Operation::Snapshot { label, files_only } => {
            post("/snapshots", json!({ "label": label, "files_only": files_only }))
        }
        Operation::DeleteSnapshot { id } => {
            client::call(server, "DELETE", &at(&format!("/snapshots/{id}")), &Value::Null)
        }
        Operation::RollBack { to } => post("/rollback", json!({ "snapshot": to.id })),
        Operation::Fork {
            name,
            from,
            files_only,
            start,
        } => {
            let from = from.as_ref().map(|snapshot| &snapshot.id);
            let fork = json!({ "name": name, "from": from, "files_only": files_only, "start": start });
            post("/fork", fork)
        }
        Operation::Delete => client::call(server, "DELETE", &at(""), &Value::Null),
        Operation::Storm { of } => storm(server, name, of),
    }
}

fn storm(server: &Server, name: &str, of: &[Calm]) -> Answer {
    let one = |calm: Calm| match calm {
        Calm::Pause => perform(server, name, &Operation::Pause),
        Calm::Hibernate => perform(server, name, &Operation::Hibernate),
        Calm::Wake => perform(server, name, &Operation::Wake),
        Calm::Run => client::run(server, name, "true"),
    };
    let answers: Vec<Answer> = std::thread::scope(|scope| {
        let all: Vec<_> = of.iter().map(|calm| scope.spawn(|| one(*calm))).collect();
        all.into_iter()
            .map(|thread| thread.join().expect("a request does not panic"))
            .collect()
    });
    // A stream may be cut by a hibernation that was asked for, and an agent that does not run cannot be put to sleep.
    let wrong = answers
        .into_iter()
        .find(|answer| matches!(answer, Answer::Refused { status, .. } if *status != 502 && *status != 409));
    wrong.unwrap_or(Answer::Done(Value::Null))
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn counted(line: &str) -> Option<(u64, u64)> {
    let mut words = line.strip_prefix("memory ")?.split(' ').map(str::parse);
    Some((words.next()?.ok()?, words.next()?.ok()?))
}

fn seen(output: &str) -> Result<Seen> {
    let mut files = BTreeMap::new();
    let mut memory = None;
    for line in output.lines() {
        if let Some((name, content)) = line.strip_prefix("file ").and_then(|rest| rest.split_once(' ')) {
            files.insert(name.to_owned(), content.to_owned());
        } else if line == "nothing" {
        } else if let Some(counted) = counted(line) {
            memory = Some(counted);
        } else {
            bail!("what does `{line}` mean?");
        }
    }
    Ok(Seen { files, memory })
}

/// What became of the agent itself.
#[derive(Debug)]
pub(crate) enum News {
    None,
    Gone,
    /// Another agent is there.
    Born(String, Box<Agent>),
    /// Perhaps another agent is there.
    PerhapsBorn(String, Box<Agent>),
    /// Perhaps it is gone.
    PerhapsGone,
    /// Perhaps it has a snapshot of this label, of what it is now.
    PerhapsSnapshot(String),
    PerhapsNoSnapshot(String),
}

impl News {
    /// Who is there, or perhaps, since the operation.
    pub(crate) fn born(&mut self) -> Option<&mut Agent> {
        match self {
            Self::Born(_, agent) | Self::PerhapsBorn(_, agent) => Some(agent),
            _ => None,
        }
    }
}

/// Changes the model by what an operation did. `shaken` tells that the daemon went down meanwhile.
pub(crate) fn absorb(
    agent: &mut Agent,
    name: &str,
    operation: &Operation,
    answer: &Answer,
    shaken: bool,
) -> Result<News> {
    let was_on_disk = std::mem::take(&mut agent.on_disk);
    let value = match answer {
        Answer::Done(value) => value,
        Answer::Refused { message, .. } if message.contains("does not run") && agent.may_have_no_memory() => {
            return Ok(News::None);
        }
        Answer::Refused { .. } | Answer::Lost(_) if shaken => return Ok(lost(agent, name, operation)),
        Answer::Refused { .. } | Answer::Lost(_) => bail!("{}", answer.in_words()),
    };
    match operation {
        Operation::New => {
            return Ok(News::Born(
                name.to_owned(),
                Box::new(Agent::new(text(&value["id"]))),
            ));
        }
        Operation::Look => agent.look(&seen(&text(value))?).map_err(anyhow::Error::msg)?,
        Operation::Upload { file, content } | Operation::Write { file, content } => {
            agent.loose.remove(file);
            agent.change(|world| {
                world.files.insert(file.clone(), content.clone());
            });
        }
        Operation::Keep { token } => agent.change(|world| {
            world.memory = Some(Memory {
                token: *token,
                least: 0,
                slack: 0,
            });
        }),
        Operation::Count => {
            let output = text(value);
            let found = counted(output.trim());
            ensure!(found.is_some() || output.trim() == "nothing", "it said {output}");
            let fits = |memory: &Option<Memory>| match (memory, found) {
                (None, None) => true,
                (Some(memory), Some((token, count))) => {
                    memory.token == token
                        && (memory.least + 1..=memory.least + 1 + memory.slack).contains(&count)
                }
                _ => false,
            };
            let all = std::mem::take(&mut agent.worlds);
            agent.worlds = all.iter().filter(|world| fits(&world.memory)).cloned().collect();
            ensure!(
                !agent.worlds.is_empty(),
                "it counted {found:?}\nand should be one of {all:?}"
            );
            agent.change(|world| {
                if let (Some(memory), Some((_, count))) = (&mut world.memory, found) {
                    memory.slack -= count - 1 - memory.least;
                    memory.least = count;
                }
            });
        }
        Operation::Hibernate => agent.on_disk = true,
        Operation::Pause | Operation::Wake | Operation::Start | Operation::Storm { .. } => {}
        Operation::Hold => agent.on_disk = was_on_disk,
        Operation::Stop => {
            agent.must_stop = false;
            agent.worlds = agent.without_memory();
        }
        Operation::Snapshot { .. } => {
            agent.on_disk = was_on_disk;
            let taken = snapshot(agent, value);
            agent.snapshots.push(taken);
        }
        Operation::DeleteSnapshot { id } => {
            agent.on_disk = was_on_disk;
            agent.snapshots.retain(|snapshot| snapshot.id != *id);
        }
        Operation::RollBack { to } => {
            let before = snapshot(agent, &value["before"]);
            agent.snapshots.push(before);
            agent.worlds.clone_from(&to.worlds);
        }
        Operation::Fork { name, .. } => {
            agent.on_disk = was_on_disk;
            let born = child(agent, operation, text(&value[0]["id"]));
            return Ok(News::Born(name.clone(), Box::new(born)));
        }
        Operation::Delete => return Ok(News::Gone),
    }
    Ok(News::None)
}

fn snapshot(agent: &Agent, value: &Value) -> Snapshot {
    let full = value["kind"] == "full";
    Snapshot {
        id: text(&value["id"]),
        worlds: if full {
            agent.worlds.clone()
        } else {
            agent.without_memory()
        },
    }
}

fn child(agent: &Agent, operation: &Operation, id: String) -> Agent {
    let Operation::Fork {
        from,
        files_only,
        start,
        ..
    } = operation
    else {
        unreachable!("only a fork has a child");
    };
    let worlds = from
        .as_ref()
        .map_or(&agent.worlds, |snapshot| &snapshot.worlds)
        .clone();
    let mut fork = agent.fork(id, worlds);
    fork.on_disk = !start;
    match files_only {
        true => Agent {
            worlds: fork.without_memory(),
            ..fork
        },
        false => fork,
    }
}

/// It was done or not.
fn lost(agent: &mut Agent, name: &str, operation: &Operation) -> News {
    match operation {
        Operation::New => return News::PerhapsBorn(name.to_owned(), Box::new(Agent::new(String::new()))),
        Operation::Upload { file, .. } | Operation::Write { file, .. } => agent.let_go(file),
        // Until it is stopped, nobody knows whether it is still being started.
        Operation::Keep { .. } => agent.must_stop = true,
        Operation::Count => agent.change(|world| {
            if let Some(memory) = &mut world.memory {
                memory.slack += 1;
            }
        }),
        Operation::Stop => {
            let stopped = agent.without_memory();
            agent.perhaps(stopped);
        }
        Operation::Snapshot { label, .. } => return News::PerhapsSnapshot(label.clone()),
        Operation::DeleteSnapshot { id } => return News::PerhapsNoSnapshot(id.clone()),
        Operation::RollBack { to } => {
            let label = format!("before the rollback to {}", to.id);
            return News::PerhapsSnapshot(label);
        }
        Operation::Fork { name, .. } => {
            return News::PerhapsBorn(name.clone(), Box::new(child(agent, operation, String::new())));
        }
        Operation::Delete => return News::PerhapsGone,
        Operation::Look
        | Operation::Pause
        | Operation::Hibernate
        | Operation::Wake
        | Operation::Start
        | Operation::Hold
        | Operation::Storm { .. } => {}
    }
    News::None
}

/// After an interrupted rollback: it is as it was, as it was meant to be, or either of them without its memory.
pub(crate) fn perhaps_rolled_back(agent: &mut Agent, to: &Snapshot) {
    let without = agent.without_memory();
    agent.perhaps(without);
    agent.perhaps(to.worlds.iter().cloned());
    let without = agent.without_memory();
    agent.perhaps(without);
}
