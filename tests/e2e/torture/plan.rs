//! What to do next.

use crate::model::Agent;
use crate::operation::{Calm, Operation};
use crate::random::Random;

/// Something to do with an agent. `names` counts the agents that were ever made.
pub(crate) fn operation(random: &mut Random, agent: &mut Agent, names: &mut u32, crowded: bool) -> Operation {
    if agent.must_stop {
        return Operation::Stop;
    }
    let unremembering = agent.worlds.iter().all(|world| world.memory.is_none());
    loop {
        return match random.below(100) {
            0..14 => Operation::Look,
            14..22 => Operation::Upload {
                file: file(random, agent),
                content: format!("{:016x}", random.next()),
            },
            22..30 => Operation::Write {
                file: file(random, agent),
                content: format!("{:016x}", random.next()),
            },
            30..44 if unremembering => Operation::Keep {
                token: random.below(1 << 32),
            },
            30..44 => Operation::Count,
            44..50 => Operation::Pause,
            50..62 => Operation::Hibernate,
            62..66 => Operation::Wake,
            66..68 => Operation::Start,
            68..71 => Operation::Stop,
            71..73 => Operation::Hold,
            73..80 => Operation::Snapshot {
                label: format!("s{:08x}", random.below(1 << 32)),
                files_only: random.once_in(4),
            },
            80..83 => match random.pick(&agent.snapshots) {
                Some(snapshot) => Operation::DeleteSnapshot {
                    id: snapshot.id.clone(),
                },
                None => continue,
            },
            83..88 => match random.pick(&agent.snapshots) {
                Some(snapshot) => Operation::RollBack { to: snapshot.clone() },
                None => continue,
            },
            88..92 if crowded => Operation::Delete,
            88..92 => {
                *names += 1;
                let from = match random.once_in(2) {
                    true => random.pick(&agent.snapshots).cloned(),
                    false => None,
                };
                Operation::Fork {
                    name: format!("a{names}"),
                    from,
                    files_only: random.once_in(4),
                    start: !random.once_in(3),
                }
            }
            92..94 if crowded => Operation::Delete,
            92..94 => continue,
            _ => {
                let calm = [Calm::Pause, Calm::Hibernate, Calm::Wake, Calm::Run];
                let of = (0..3 + random.below(5)).filter_map(|_| random.pick(&calm).copied());
                Operation::Storm { of: of.collect() }
            }
        };
    }
}

/// A new name: nothing that is still under way for an older file can touch it.
fn file(random: &mut Random, agent: &mut Agent) -> String {
    let known: Vec<&String> = agent
        .worlds
        .first()
        .map(|world| world.files.keys().collect())
        .unwrap_or_default();
    match random.pick(&known) {
        Some(name) if random.once_in(2) && !agent.loose.contains(*name) => (*name).clone(),
        _ => {
            agent.files_made += 1;
            format!("f{}-{:06x}", agent.files_made, random.below(1 << 24))
        }
    }
}
