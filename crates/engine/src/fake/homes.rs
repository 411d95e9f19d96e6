//! Homes that exist only in memory.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;

use super::declared;
use crate::home::tree::Tree;
use crate::{Debian, EngineError, HomeUsage, Homes, Id, Kept, Layer, LogSink, Result, Space};

#[derive(Default)]
struct Pool {
    homes: BTreeMap<Id, FakeHome>,
    snapshots: BTreeMap<Id, FakeHome>,
    /// The image that left nothing in a snapshot.
    without: BTreeMap<Id, PathBuf>,
    /// To take the place of homes.
    staged: BTreeMap<Id, FakeHome>,
    templates: BTreeSet<Id>,
    volumes: BTreeMap<Id, tempfile::TempDir>,
    fail_creates: Vec<String>,
    fail_deletes: Vec<String>,
    fail_snapshots: Vec<String>,
    fail_exchanges: Vec<String>,
    full: bool,
    changes: u64,
}

#[derive(Debug, Clone, Default)]
struct FakeHome {
    limit: u64,
    /// Of what is on disk.
    generation: u64,
    /// Of the last change, which is not on disk until somebody asks for the generation.
    changed: u64,
    content: String,
}

impl FakeHome {
    fn commit(&mut self) -> u64 {
        self.generation = self.generation.max(self.changed);
        self.generation
    }
}

#[derive(Default)]
pub struct FakeHomes {
    pool: Mutex<Pool>,
}

impl FakeHomes {
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    fn pool(&self) -> MutexGuard<'_, Pool> {
        self.pool.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn add_template(&self, id: &Id) {
        self.pool().templates.insert(id.clone());
    }

    pub fn has(&self, id: &Id) -> bool {
        self.pool().homes.contains_key(id)
    }

    pub fn count(&self) -> usize {
        self.pool().homes.len()
    }

    /// The home vanishes, as after a lost disk.
    pub fn lose(&self, id: &Id) {
        self.pool().homes.remove(id);
    }

    pub fn fail_next_create(&self, reason: &str) {
        self.pool().fail_creates.push(reason.to_owned());
    }

    pub fn fail_next_delete(&self, reason: &str) {
        self.pool().fail_deletes.push(reason.to_owned());
    }

    pub fn fail_next_snapshot(&self, reason: &str) {
        self.pool().fail_snapshots.push(reason.to_owned());
    }

    pub fn fail_next_exchange(&self, reason: &str) {
        self.pool().fail_exchanges.push(reason.to_owned());
    }

    /// A process of the box changes a file.
    pub fn write(&self, id: &Id, content: &str) {
        let mut pool = self.pool();
        pool.changes += 1;
        let changed = pool.changes;
        let home = pool.homes.get_mut(id).expect("a home to write to");
        home.content = content.to_owned();
        home.changed = changed;
    }

    pub fn content(&self, id: &Id) -> Option<String> {
        self.pool().homes.get(id).map(|home| home.content.clone())
    }

    /// The image without whose traces the snapshot was taken.
    pub fn taken_without(&self, snapshot: &Id) -> Option<PathBuf> {
        self.pool().without.get(snapshot).cloned()
    }

    pub fn snapshot_count(&self) -> usize {
        self.pool().snapshots.len()
    }

    /// Whether the pool has no space left.
    pub fn fill(&self, full: bool) {
        self.pool().full = full;
    }

    fn put(&self, id: &Id, disk: u64) -> Result<()> {
        let mut pool = self.pool();
        if pool.full {
            return Err(EngineError::NoSpace { free: 0 });
        }
        let home = FakeHome {
            limit: disk,
            ..FakeHome::default()
        };
        pool.homes.insert(id.clone(), home);
        Ok(())
    }
}

#[async_trait]
impl Homes for FakeHomes {
    async fn create(&self, id: &Id, template: &Id, disk: u64) -> Result<()> {
        if let Some(reason) = self.pool().fail_creates.pop() {
            return Err(declared(reason));
        }
        if !self.pool().templates.contains(template) {
            return Err(EngineError::NoHome(template.clone()));
        }
        self.put(id, disk)
    }

    async fn delete(&self, id: &Id) -> Result<()> {
        let mut pool = self.pool();
        if let Some(reason) = pool.fail_deletes.pop() {
            return Err(declared(reason));
        }
        pool.homes.remove(id);
        Ok(())
    }

    async fn usage(&self, id: &Id) -> Result<HomeUsage> {
        let limit = self
            .pool()
            .homes
            .get(id)
            .map(|home| home.limit)
            .ok_or_else(|| EngineError::NoHome(id.clone()))?;
        Ok(HomeUsage { used: 4096, limit })
    }

    async fn set_limit(&self, id: &Id, disk: u64) -> Result<()> {
        match self.pool().homes.get_mut(id) {
            Some(home) => home.limit = disk,
            None => return Err(EngineError::NoHome(id.clone())),
        }
        Ok(())
    }

    async fn list(&self) -> Result<Vec<Id>> {
        Ok(self.pool().homes.keys().cloned().collect())
    }

    async fn templates(&self) -> Result<Vec<Id>> {
        Ok(self.pool().templates.iter().cloned().collect())
    }

    async fn create_empty(&self, id: &Id) -> Result<()> {
        self.put(id, u64::MAX)
    }

    async fn bootstrap(&self, id: &Id, debian: &Debian, log: LogSink) -> Result<()> {
        if !self.has(id) {
            return Err(EngineError::NoHome(id.clone()));
        }
        let _ = log.send(format!("bootstrapped {}", debian.suite));
        Ok(())
    }

    async fn unpack(&self, id: &Id, _uid_base: u32, _layer: Layer, log: LogSink) -> Result<()> {
        if !self.has(id) {
            return Err(EngineError::NoHome(id.clone()));
        }
        let _ = log.send("unpacked a layer".to_owned());
        Ok(())
    }

    async fn seal(&self, id: &Id) -> Result<()> {
        let mut pool = self.pool();
        pool.homes
            .remove(id)
            .ok_or_else(|| EngineError::NoHome(id.clone()))?;
        pool.templates.insert(id.clone());
        Ok(())
    }

    async fn delete_template(&self, id: &Id) -> Result<()> {
        self.pool().templates.remove(id);
        Ok(())
    }

    async fn export_template(&self, id: &Id, to: &Path) -> Result<()> {
        if !self.pool().templates.contains(id) {
            return Err(EngineError::NoHome(id.clone()));
        }
        std::fs::write(to, b"a template").map_err(EngineError::io("wrote the template's file"))
    }

    async fn import_template(&self, id: &Id, from: &Path) -> Result<()> {
        std::fs::metadata(from).map_err(EngineError::io("read the template's file"))?;
        self.add_template(id);
        Ok(())
    }

    async fn space(&self) -> Result<Space> {
        let full = self.pool().full;
        Ok(Space {
            total: 1 << 40,
            free: if full { 0 } else { 1 << 39 },
        })
    }

    async fn snapshot(&self, id: &Id, snapshot: &Id, kept: Kept<'_>) -> Result<()> {
        let mut pool = self.pool();
        if let Some(reason) = pool.fail_snapshots.pop() {
            return Err(declared(reason));
        }
        if pool.full {
            return Err(EngineError::NoSpace { free: 0 });
        }
        let home = pool
            .homes
            .get(id)
            .cloned()
            .ok_or_else(|| EngineError::NoHome(id.clone()))?;
        pool.snapshots.insert(snapshot.clone(), home);
        if let Kept::Files(Some(image)) = kept {
            pool.without.insert(snapshot.clone(), image.to_owned());
        }
        Ok(())
    }

    async fn create_from_snapshot(&self, id: &Id, snapshot: &Id, disk: u64) -> Result<u64> {
        let mut pool = self.pool();
        if let Some(reason) = pool.fail_creates.pop() {
            return Err(declared(reason));
        }
        let mut home = pool
            .snapshots
            .get(snapshot)
            .cloned()
            .ok_or_else(|| EngineError::NoHome(snapshot.clone()))?;
        pool.changes += 1;
        (home.limit, home.generation) = (disk, pool.changes);
        pool.homes.insert(id.clone(), home);
        Ok(pool.changes)
    }

    async fn stage(&self, id: &Id, snapshot: &Id, disk: u64) -> Result<()> {
        let mut pool = self.pool();
        if pool.full {
            return Err(EngineError::NoSpace { free: 0 });
        }
        let home = pool.snapshots.get(snapshot).cloned();
        let mut home = home.ok_or_else(|| EngineError::NoHome(snapshot.clone()))?;
        home.limit = disk;
        pool.staged.insert(id.clone(), home);
        Ok(())
    }

    async fn unstage(&self, id: &Id) {
        self.pool().staged.remove(id);
    }

    async fn exchange(&self, id: &Id) -> Result<u64> {
        let mut pool = self.pool();
        if let Some(reason) = pool.fail_exchanges.pop() {
            return Err(declared(reason));
        }
        let staged = pool.staged.remove(id);
        let mut home = staged.ok_or_else(|| EngineError::NoHome(id.clone()))?;
        pool.changes += 1;
        home.generation = pool.changes;
        let generation = home.commit();
        pool.homes.insert(id.clone(), home);
        Ok(generation)
    }

    async fn delete_snapshot(&self, snapshot: &Id) -> Result<()> {
        self.pool().snapshots.remove(snapshot);
        Ok(())
    }

    async fn written_since(&self, snapshot: &Id, _before: &Id) -> Result<u64> {
        match self.pool().snapshots.contains_key(snapshot) {
            true => Ok(4096),
            false => Err(EngineError::NoHome(snapshot.clone())),
        }
    }

    async fn snapshots(&self) -> Result<Vec<Id>> {
        Ok(self.pool().snapshots.keys().cloned().collect())
    }

    async fn create_volume(&self, volume: &Id, _disk: u64) -> Result<()> {
        let directory = tempfile::tempdir().map_err(EngineError::io("cannot make the volume"))?;
        self.pool().volumes.insert(volume.clone(), directory);
        Ok(())
    }

    async fn delete_volume(&self, volume: &Id) -> Result<()> {
        self.pool().volumes.remove(volume);
        Ok(())
    }

    async fn volumes(&self) -> Result<Vec<Id>> {
        Ok(self.pool().volumes.keys().cloned().collect())
    }

    async fn volume_files(&self, volume: &Id) -> Result<Tree> {
        let pool = self.pool();
        let directory = pool.volumes.get(volume);
        let directory = directory.ok_or_else(|| EngineError::NoVolume(volume.clone()))?;
        Tree::open(directory.path()).map_err(EngineError::io("cannot open the volume"))
    }

    async fn generation(&self, id: &Id) -> Result<u64> {
        let mut pool = self.pool();
        let home = pool.homes.get_mut(id);
        Ok(home.ok_or_else(|| EngineError::NoHome(id.clone()))?.commit())
    }

    async fn is_unchanged(&self, id: &Id, since: u64) -> Result<bool> {
        let pool = self.pool();
        let home = pool.homes.get(id);
        Ok(home.ok_or_else(|| EngineError::NoHome(id.clone()))?.generation == since)
    }
}
