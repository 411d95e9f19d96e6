//! What an engine is, for people who want to know what their agent runs on.

use serde::{Deserialize, Serialize};

/// What runs boxes of one isolation on this machine, and what keeps what is in them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct About {
    /// With its version; or why there is none, in words.
    pub engine: String,
    /// What runs the instructions of a box.
    pub accelerator: String,
    /// Whether that takes many times as long as the processor would.
    pub slow: bool,
    /// What keeps files, at every stop.
    pub files_by: String,
    /// What keeps memory and processes in a sleep; or why nothing does, in words.
    pub memory_by: String,
}

pub(crate) const PROCESSOR: &str = "the processor itself";
pub(crate) const HOME: &str = "its home, a btrfs subvolume";
