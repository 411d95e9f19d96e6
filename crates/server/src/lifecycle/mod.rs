//! The heart: every agent's life, from its creation to its deletion.
//!
//! ```text
//!             create                                        delete (from anywhere)
//!               │                                                  │
//!               ▼    start, or something                   ┌───────▼──┐
//!          ┌─────────┐ reaches for it ┌──────────┐         │ deleting │──▶ gone
//!     ┌───▶│ stopped │───────────────▶│ starting │         └──────────┘
//!     │    └─────────┘                └────┬─────┘
//!     │         ▲                       ok │
//!     │    ┌────┴─────┐  stop, or   ┌──────▼──────┐  pause, or idle   ┌──────────┐
//!     │    │ stopping │◀────────────│   running   │──────────────────▶│ freezing │
//!     │    └────┬─────┘  box ended  └─▲─────────▲─┘                   └────┬─────┘
//!     │   error │                  ok │         │ thaw                     ▼
//!     │         │                ┌────┴───┐  ┌──┴─────┐ reached for  ┌─────────┐
//!     │         │                │ waking │  │ waking │◀─────────────│ standby │ (and durable, after
//!     │         │                └────▲───┘  └────────┘              └────┬────┘  a while)
//!     │         │     reached for     │              hibernate, pressure, │
//!     │         │                ┌────┴───────┐        a longer time ┌────▼────────┐
//!     │         │                │ hibernated │◀─────────────────────│ hibernating │
//!     │         ▼                └────────────┘                      └─────────────┘
//!     │    ┌──────────────────────────────────────┐
//!     └────│ failed: says why; start tries again  │──▶ starting
//!   stop   └──────────────────────────────────────┘
//! ```
//!
//! `stopped`, `running`, `standby`, `hibernated` and `failed` are states of rest. The others are passed
//! through while a transition is under way.
//!
//! - [`decide`] is the law: given a state and a request, what follows. It is pure.
//! - [`Agent`] is what the rest of the server holds of an agent: what it is, what state it is in, and
//!   methods that ask.
//! - `driver` is the one task that changes an agent. It exists only while there is something to do, so
//!   that an idle agent costs its record and nothing else. Everybody asks; only the driver acts.
//! - `transition` records, does the work, records the result. The work of each is a file of its
//!   own: `start`, `standby`, `hibernate`, `stop`, `delete`. `images` knows the folders of memory images.
//! - `convert` gives an agent another isolation.
//! - `snapshot`, `roll_back` and `fork` keep what an agent is, go back to it, and make others of it.
//! - `go_on` brings back what ran when the last daemon ended.
//! - `departed` has the last events of agents that are gone, for whoever follows them.
//! - `lag` records what was done at once: a freeze, a thaw or the end of a box waits for no disk.
//! - [`Links`] are the connections to a guest, which are cut before its memory is saved.
//! - [`idle`] puts agents to sleep that nobody uses. `hold` keeps them from it, and `sleep` is what each says about it.
//! - `watcher` waits for the end of a running box and asks the driver to settle it.
//! - [`Registry`] finds agents by name and id, and creates them.
//! - `reconcile` runs once when the daemon starts, before anything is answered: it adopts boxes
//!   that go on running, finishes what was under way, and removes what belongs to nobody.
//!
//! A transition is recorded before it begins and after it ended, and is answered only then; so
//! after a crash the store tells what to finish. Only a freeze, a thaw, and what follows the end of a box are recorded once they are over:
//! whatever the store says of them, the next daemon finds the box, or that there is none, and nothing is lost. An ephemeral agent is
//! deleted where a persistent one would come to rest in `stopped`.

mod agent;
mod convert;
mod create;
pub mod decide;
mod delete;
mod departed;
mod driver;
mod fork;
mod go_on;
mod hibernate;
mod hold;
pub mod idle;
mod images;
mod lag;
mod links;
mod network;
mod reach;
mod reconcile;
mod registry;
mod rest;
mod roll_back;
mod sleep;
mod snapshot;
mod standby;
mod start;
mod stop;
mod transition;
mod trouble;
mod watcher;
pub mod why;

#[cfg(test)]
mod tests;

pub use agent::{Agent, OpenRequest, Published};
pub use create::Creation;
pub use departed::Departed;
pub use fork::NewFork;
pub use links::{Asking, Held, Link, Links};
pub use reconcile::ReconcileError;
pub use registry::{BOX_LEFT, GOES_ON_WITH_THE_NEXT, Parts, Registry};
pub use roll_back::RolledBack;
pub use trouble::Trouble;
pub(crate) use trouble::in_full;
