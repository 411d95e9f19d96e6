//! Volumes: data that outlives agents. Each is a subvolume of the pool with a name, and may be mounted by several
//! agents at once.
//!
//! Files first, then the record, which decides; deleted in the other order. Files without a record are removed at the
//! next start.

use std::collections::HashSet;
use std::sync::Arc;

use dorm_engine::home::tree::Tree;
use dorm_engine::{Homes, Id, VolumeMount};
use tokio::sync::{RwLock, RwLockReadGuard};

use crate::api::{ApiError, Code, validate};
use crate::lifecycle::{Registry, Trouble};
use crate::records::{VolumeRecord, Workspace, now};
use crate::store::{Store, StoreError};

/// Of one agent: each is a mount that has to be handed to its box.
const MAX_MOUNTS: usize = 16;
const LEAST: u64 = 1 << 20;

pub struct Volumes {
    store: Arc<dyn Store>,
    homes: Arc<dyn Homes>,
    registry: Arc<Registry>,
    /// What one may hold unless more is asked for.
    disk: u64,
    /// Held for reading while an agent is made that mounts one, and for writing while one is deleted.
    using: RwLock<()>,
}

/// The volumes of an agent that is being made. While this lives, none of them is deleted.
pub struct Mounts<'a> {
    pub mounts: Vec<VolumeMount>,
    _using: Option<RwLockReadGuard<'a, ()>>,
}

impl Volumes {
    /// `sweep` allows to remove the files of volumes that no record speaks of.
    pub async fn open(
        store: Arc<dyn Store>,
        homes: Arc<dyn Homes>,
        registry: Arc<Registry>,
        disk: u64,
        sweep: bool,
    ) -> Result<Arc<Self>, StoreError> {
        let volumes = Arc::new(Self {
            store,
            homes,
            registry,
            disk,
            using: RwLock::default(),
        });
        if sweep && volumes.store.damage().await?.is_empty() {
            volumes.sweep().await?;
        }
        Ok(volumes)
    }

    async fn sweep(&self) -> Result<(), StoreError> {
        let known: HashSet<Id> = self.store.volumes().await?.into_iter().map(|v| v.id).collect();
        let found = self.homes.volumes().await.unwrap_or_else(|error| {
            tracing::error!(%error, "the volumes on this machine could not be listed");
            Vec::new()
        });
        for id in found.iter().filter(|id| !known.contains(id)) {
            tracing::info!(%id, "removing a volume that has no record");
            if let Err(error) = self.homes.delete_volume(id).await {
                tracing::error!(%id, %error, "a volume that has no record could not be removed");
            }
        }
        Ok(())
    }

    pub(crate) async fn create(
        &self,
        workspace: &Workspace,
        name: &str,
        size: Option<u64>,
    ) -> Result<VolumeRecord, ApiError> {
        validate::name("a volume", name)?;
        let size = validate::bytes("size", size, self.disk, LEAST)?;
        let record = VolumeRecord {
            id: Id::random(),
            workspace: workspace.clone(),
            name: name.to_owned(),
            created: now(),
        };
        self.homes
            .create_volume(&record.id, size)
            .await
            .map_err(Trouble::engine("get a volume"))?;
        if let Err(error) = self.store.insert_volume(&record).await {
            if let Err(left) = self.homes.delete_volume(&record.id).await {
                tracing::error!(id = %record.id, error = %left, "the files of a volume that was not made are left");
            }
            return Err(error.into());
        }
        Ok(record)
    }

    /// By name.
    pub async fn list(&self, workspace: &Workspace) -> Result<Vec<VolumeRecord>, StoreError> {
        let mut volumes = self.store.volumes().await?;
        volumes.retain(|volume| volume.workspace == *workspace);
        Ok(volumes)
    }

    /// A name is looked for before an id.
    pub async fn find(&self, workspace: &Workspace, name_or_id: &str) -> Result<VolumeRecord, StoreError> {
        let volumes = self.list(workspace).await?;
        let by_name = volumes.iter().find(|volume| volume.name == name_or_id);
        let found = by_name.or_else(|| volumes.iter().find(|volume| volume.id.as_str() == name_or_id));
        found.cloned().ok_or_else(|| StoreError::NotFound {
            kind: "volume",
            name: name_or_id.to_owned(),
        })
    }

    /// Of whatever workspace: for who has its token.
    pub async fn by_id(&self, id: &Id) -> Result<Option<VolumeRecord>, StoreError> {
        Ok(self
            .store
            .volumes()
            .await?
            .into_iter()
            .find(|volume| volume.id == *id))
    }

    /// Names of the agents that mount it.
    pub fn users(&self, id: &Id) -> Vec<String> {
        let agents = self.registry.all().into_iter();
        let mut names: Vec<String> = agents
            .filter(|agent| agent.profile.spec.volumes.iter().any(|mount| mount.volume == *id))
            .map(|agent| agent.profile.name.clone())
            .collect();
        names.sort();
        names
    }

    pub(crate) async fn delete(&self, workspace: &Workspace, name_or_id: &str) -> Result<(), ApiError> {
        let _alone = self.using.write().await;
        let volume = self.find(workspace, name_or_id).await?;
        let users = self.users(&volume.id);
        if !users.is_empty() {
            let message = format!("the volume {} is mounted by {}", volume.name, users.join(", "));
            return Err(ApiError::new(Code::Conflict, message).hint("delete these agents first"));
        }
        self.store.delete_volume(workspace, &volume.id).await?;
        if let Err(error) = self.homes.delete_volume(&volume.id).await {
            // The next start tries again.
            tracing::error!(id = %volume.id, %error, "the files of a deleted volume are left");
        }
        Ok(())
    }

    pub(crate) async fn files(&self, id: &Id) -> Result<Tree, ApiError> {
        let files = self.homes.volume_files(id).await;
        Ok(files.map_err(Trouble::engine("be opened"))?)
    }

    /// The volumes that an agent asks for, each as a name or id and a place in its box.
    pub(crate) async fn mounts(
        &self,
        workspace: &Workspace,
        wanted: &[(String, String)],
    ) -> Result<Mounts<'_>, ApiError> {
        if wanted.is_empty() {
            return Ok(Mounts {
                mounts: Vec::new(),
                _using: None,
            });
        }
        if wanted.len() > MAX_MOUNTS {
            let message = format!("an agent mounts at most {MAX_MOUNTS} volumes");
            return Err(ApiError::invalid(message));
        }
        let using = self.using.read().await;
        let mut mounts: Vec<VolumeMount> = Vec::new();
        for (name, path) in wanted {
            let path = place(path)?;
            if mounts.iter().any(|mount| mount.path == path) {
                return Err(ApiError::invalid(format!(
                    "two volumes are to be mounted at {path}"
                )));
            }
            let volume = self.find(workspace, name).await?.id;
            mounts.push(VolumeMount { volume, path });
        }
        Ok(Mounts {
            mounts,
            _using: Some(using),
        })
    }
}

/// Where in a box a volume may be.
fn place(path: &str) -> Result<String, ApiError> {
    let trimmed = path.trim_end_matches('/');
    let allowed = |b: u8| b.is_ascii_alphanumeric() || b"-_./".contains(&b);
    let parts: Vec<&str> = trimmed.split('/').collect();
    let fits = trimmed.starts_with('/')
        && trimmed.len() <= 255
        && trimmed.bytes().all(allowed)
        && parts.iter().skip(1).all(|part| !matches!(*part, "" | "." | ".."));
    let own = [
        "proc", "sys", "dev", "run", "etc", "usr", "bin", "sbin", "lib", "lib64",
    ];
    let reserved = parts.len() == 2 && own.contains(&parts[1])
        || parts
            .get(1)
            .is_some_and(|first| ["proc", "sys", "dev", "run"].contains(first));
    if fits && !reserved {
        return Ok(trimmed.to_owned());
    }
    Err(
        ApiError::invalid(format!("a volume cannot be mounted at {path:?}")).hint(
            "an absolute path of letters, digits, `-`, `_` and `.`, outside of /proc, /sys, /dev and /run, as /data",
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::place;

    #[test]
    fn a_volume_goes_where_it_hides_nothing_that_a_box_needs() {
        for (path, place_of) in [
            ("/data", "/data"),
            ("/home/user/data/", "/home/user/data"),
            ("/usr/local/x", "/usr/local/x"),
        ] {
            assert_eq!(place(path).unwrap(), place_of);
        }
        for wrong in [
            "",
            "/",
            "data",
            "/a/../b",
            "/a//b",
            "/proc/x",
            "/dev",
            "/usr",
            "/run/dorm",
            "/a b",
            "/a]:b",
        ] {
            assert!(place(wrong).is_err(), "{wrong:?} was taken");
        }
    }
}
