//! A value that is kept for a workspace. It goes in, and never out.

use std::collections::BTreeMap;
use std::fmt;

use dorm_engine::Id;

use super::Workspace;

#[derive(Clone, PartialEq, Eq)]
pub struct SecretRecord {
    pub id: Id,
    pub workspace: Workspace,
    pub name: String,
    pub value: String,
    /// Counts the values that it had.
    pub version: i64,
    pub metadata: BTreeMap<String, String>,
    pub created: i64,
    pub updated: i64,
}

/// Without the value, so that no log holds it.
impl fmt::Debug for SecretRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SecretRecord")
            .field("id", &self.id)
            .field("name", &self.name)
            .field("version", &self.version)
            .finish_non_exhaustive()
    }
}
