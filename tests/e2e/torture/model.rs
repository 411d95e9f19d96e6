//! What must be true of the agents, whatever happened to the daemon.
//!
//! An operation whose answer was lost was done or not: the agent is then in one of several possible
//! worlds. Looking at it rules out those that it is not in. If none is left, something that was
//! acknowledged is lost, or something came back that was gone.

use std::collections::{BTreeMap, BTreeSet};

/// A counter in the memory of a process: at least `least`, and more by as many increments as were not answered.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Memory {
    pub(crate) token: u64,
    pub(crate) least: u64,
    pub(crate) slack: u64,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct World {
    pub(crate) files: BTreeMap<String, String>,
    pub(crate) memory: Option<Memory>,
}

impl World {
    fn forgetful(&self) -> Self {
        Self {
            memory: None,
            ..self.clone()
        }
    }
}

/// What an agent shows when it is looked at.
#[derive(Debug)]
pub(crate) struct Seen {
    pub(crate) files: BTreeMap<String, String>,
    pub(crate) memory: Option<(u64, u64)>,
}

/// What the daemon says of an agent's memory while nothing is asked of it, a moment before the machine goes down.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Kept {
    /// It sleeps, and is on disk as it is.
    Whole,
    /// That it runs is recorded, and with that, that no image of before is of any use. It may go to sleep, as it is, until then.
    Awake,
    /// A wake may not be recorded yet, and there may be an image of before it.
    Unknown,
}

#[derive(Debug, Clone)]
pub(crate) struct Snapshot {
    pub(crate) id: String,
    pub(crate) worlds: BTreeSet<World>,
}

#[derive(Debug, Clone)]
pub(crate) struct Agent {
    pub(crate) id: String,
    pub(crate) worlds: BTreeSet<World>,
    pub(crate) snapshots: Vec<Snapshot>,
    /// Files whose write was not answered: they may still change, and nothing is said of them.
    pub(crate) loose: BTreeSet<String>,
    /// Its memory is on disk, that was acknowledged, and nobody has reached for it since.
    pub(crate) on_disk: bool,
    pub(crate) files_made: u32,
    /// Before anything else: what runs in it is not known.
    pub(crate) must_stop: bool,
}

impl Agent {
    pub(crate) fn new(id: String) -> Self {
        Self {
            id,
            worlds: BTreeSet::from([World::default()]),
            snapshots: Vec::new(),
            loose: BTreeSet::new(),
            on_disk: false,
            files_made: 0,
            must_stop: false,
        }
    }

    /// Another that begins as this one is, or was in `worlds`.
    pub(crate) fn fork(&self, id: String, worlds: BTreeSet<World>) -> Self {
        Self {
            id,
            worlds,
            snapshots: Vec::new(),
            on_disk: false,
            ..self.clone()
        }
    }

    pub(crate) fn change(&mut self, change: impl Fn(&mut World)) {
        let worlds = std::mem::take(&mut self.worlds);
        self.worlds = worlds
            .into_iter()
            .map(|mut world| {
                change(&mut world);
                world
            })
            .collect();
    }

    /// Perhaps it is as in `others`.
    pub(crate) fn perhaps(&mut self, others: impl IntoIterator<Item = World>) {
        self.worlds.extend(others);
    }

    pub(crate) fn without_memory(&self) -> BTreeSet<World> {
        self.worlds.iter().map(World::forgetful).collect()
    }

    pub(crate) fn may_have_no_memory(&self) -> bool {
        self.worlds.iter().any(|world| world.memory.is_none())
    }

    /// Nothing is said of `file` any more.
    pub(crate) fn let_go(&mut self, file: &str) {
        self.loose.insert(file.to_owned());
        self.change(|world| {
            world.files.remove(file);
        });
    }

    /// The machine went down. What was not put to disk is lost, or as old as what happened to be there, unless that was given up.
    pub(crate) fn rebooted(&mut self, kept: Kept) {
        if self.on_disk || kept == Kept::Whole {
            return;
        }
        let lost = self.without_memory();
        if kept == Kept::Awake {
            return self.perhaps(lost);
        }
        let older = self.worlds.iter().filter_map(|world| {
            let memory = world.memory.as_ref()?;
            let (least, slack) = (0, memory.least + memory.slack);
            let memory = Memory {
                least,
                slack,
                ..memory.clone()
            };
            Some(World {
                memory: Some(memory),
                ..world.clone()
            })
        });
        let older: Vec<_> = older.collect();
        self.perhaps(older);
        self.perhaps(lost);
    }

    /// Leaves the worlds that fit with what was seen. The error says what was expected.
    pub(crate) fn look(&mut self, seen: &Seen) -> Result<(), String> {
        let fits = |world: &World| -> Option<World> {
            let firm = |entry: &(&String, &String)| !self.loose.contains(entry.0);
            if !seen.files.iter().filter(firm).eq(world.files.iter().filter(firm)) {
                return None;
            }
            let memory = match (&world.memory, seen.memory) {
                (None, None) => None,
                (Some(memory), Some((token, count)))
                    if memory.token == token
                        && (memory.least..=memory.least + memory.slack).contains(&count) =>
                {
                    let slack = memory.slack - (count - memory.least);
                    Some(Memory {
                        token,
                        least: count,
                        slack,
                    })
                }
                _ => return None,
            };
            Some(World {
                files: world.files.clone(),
                memory,
            })
        };
        let left: BTreeSet<World> = self.worlds.iter().filter_map(fits).collect();
        if left.is_empty() {
            return Err(format!("it is {seen:?}\nand should be one of {:?}", self.worlds));
        }
        self.worlds = left;
        Ok(())
    }
}
