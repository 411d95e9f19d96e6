//! How agents are isolated: what may be asked for, and what it comes to on this machine.

use std::fmt;
use std::str::FromStr;

use dorm_engine::{Engine, EngineError, Isolation};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What may be asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Choice {
    /// Namespaces and a system call filter on the machine's own kernel.
    Container,
    /// A kernel in user space, gVisor, that answers the agent's system calls.
    Gvisor,
    /// A virtual machine with a kernel of its own.
    Vm,
    /// The strongest of these that works here without being slow.
    Auto,
}

impl Choice {
    pub const ALL: [Self; 4] = [Self::Container, Self::Gvisor, Self::Vm, Self::Auto];

    pub fn as_str(self) -> &'static str {
        match self.exact() {
            Some(isolation) => isolation.as_str(),
            None => "auto",
        }
    }

    fn exact(self) -> Option<Isolation> {
        match self {
            Self::Container => Some(Isolation::Container),
            Self::Gvisor => Some(Isolation::Gvisor),
            Self::Vm => Some(Isolation::Vm),
            Self::Auto => None,
        }
    }

    /// What an agent is given for it, if such agents can be run here.
    pub(crate) fn settle(self, engine: &dyn Engine) -> Result<Isolation, EngineError> {
        let isolation = self.exact().unwrap_or_else(|| engine.strongest());
        match engine.can_run(isolation) {
            Ok(()) => Ok(isolation),
            Err(reason) => Err(EngineError::NoEngine { isolation, reason }),
        }
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Choice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|choice| choice.as_str() == text);
        found.ok_or_else(|| format!("`{text}` is no isolation; there are container, gvisor, vm and auto"))
    }
}
