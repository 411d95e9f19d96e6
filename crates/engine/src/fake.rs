//! Engines and homes that exist only in memory, with declared faults.
//!
//! Both outlive whoever uses them, as real boxes and homes outlive a daemon: a second daemon given the
//! same parts finds what the first left behind.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use tokio::io::DuplexStream;
use tokio::sync::watch;

use crate::{
    BoxExit, BoxRecord, BoxSpec, BoxStats, Debian, Engine, EngineError, GuestStream, HomeUsage, Homes, Id,
    Layer, LogSink, Result, Space,
};

/// Answers a connection to a guest, as process 1 of a box would.
pub type FakeGuest = Arc<dyn Fn(Id, DuplexStream) + Send + Sync>;

#[derive(Default)]
struct World {
    boxes: BTreeMap<Id, FakeBox>,
    fail_starts: Vec<String>,
    fail_stops: Vec<String>,
    starts: u64,
    stops: u64,
    connects: u64,
    swept: Vec<Id>,
    specs: Vec<BoxSpec>,
}

struct FakeBox {
    record: BoxRecord,
    /// `None` while it runs.
    ended: watch::Sender<Option<BoxExit>>,
    /// Whether `stop` was called: then its end is no news.
    stopping: bool,
}

pub struct FakeEngine {
    world: Mutex<World>,
    guest: Mutex<Option<FakeGuest>>,
    starts_held: watch::Sender<bool>,
    stops_held: watch::Sender<bool>,
}

impl Default for FakeEngine {
    fn default() -> Self {
        Self {
            world: Mutex::default(),
            guest: Mutex::default(),
            starts_held: watch::Sender::new(false),
            stops_held: watch::Sender::new(false),
        }
    }
}

impl FakeEngine {
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    fn world(&self) -> MutexGuard<'_, World> {
        self.world.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Who answers connections to guests from now on.
    pub fn serve_guests(&self, guest: impl Fn(Id, DuplexStream) + Send + Sync + 'static) {
        *self.guest.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(guest));
    }

    /// The next start that is tried fails with this reason.
    pub fn fail_next_start(&self, reason: &str) {
        self.world().fail_starts.push(reason.to_owned());
    }

    /// The next stop that is tried fails with this reason, and the box stays.
    pub fn fail_next_stop(&self, reason: &str) {
        self.world().fail_stops.push(reason.to_owned());
    }

    /// While held, starts wait.
    pub fn hold_starts(&self, hold: bool) {
        self.starts_held.send_replace(hold);
    }

    /// While held, stops wait.
    pub fn hold_stops(&self, hold: bool) {
        self.stops_held.send_replace(hold);
    }

    /// The box of `id` ends by itself.
    pub fn kill(&self, id: &Id, reason: &str) {
        let world = self.world();
        let ended = &world.boxes.get(id).expect("a box to kill").ended;
        ended.send_replace(Some(BoxExit {
            reason: reason.to_owned(),
        }));
    }

    /// The host is switched off: no box is left, and nobody is told.
    pub fn reboot(&self) {
        self.world().boxes.clear();
    }

    pub fn is_running(&self, id: &Id) -> bool {
        self.world()
            .boxes
            .get(id)
            .is_some_and(|one| one.ended.borrow().is_none())
    }

    /// Starts that were tried, failed ones included.
    pub fn starts(&self) -> u64 {
        self.world().starts
    }

    pub fn stops(&self) -> u64 {
        self.world().stops
    }

    /// Streams to guests that were opened.
    pub fn connects(&self) -> u64 {
        self.world().connects
    }

    pub fn swept(&self) -> Vec<Id> {
        self.world().swept.clone()
    }

    /// What was last asked to be started.
    pub fn last_spec(&self) -> Option<BoxSpec> {
        self.world().specs.last().cloned()
    }
}

async fn while_held(held: &watch::Sender<bool>) {
    let _ = held.subscribe().wait_for(|held| !held).await;
}

#[async_trait]
impl Engine for FakeEngine {
    async fn start(&self, spec: &BoxSpec) -> Result<BoxRecord> {
        {
            let mut world = self.world();
            world.starts += 1;
            world.specs.push(spec.clone());
        }
        while_held(&self.starts_held).await;
        let mut world = self.world();
        if let Some(reason) = world.fail_starts.pop() {
            return Err(EngineError::Start {
                step: "started".to_owned(),
                source: reason.into(),
            });
        }
        if world.boxes.contains_key(&spec.id) {
            return Err(EngineError::AlreadyRunning(spec.id.clone()));
        }
        let pid = i32::try_from(1000 + world.starts).unwrap_or(i32::MAX);
        let record = BoxRecord {
            pid,
            pid_start: world.starts,
            host_boot_id: "fake".to_owned(),
            guest_hash: "fake".to_owned(),
            engine: "fake".to_owned(),
        };
        let one = FakeBox {
            record: record.clone(),
            ended: watch::Sender::new(None),
            stopping: false,
        };
        world.boxes.insert(spec.id.clone(), one);
        Ok(record)
    }

    async fn adopt(&self, spec: &BoxSpec, record: &BoxRecord) -> Result<bool> {
        let mut world = self.world();
        let there = world
            .boxes
            .get(&spec.id)
            .is_some_and(|one| one.record == *record && one.ended.borrow().is_none());
        if !there {
            world.boxes.remove(&spec.id);
        }
        Ok(there)
    }

    async fn stop(&self, id: &Id, _grace: Duration) -> Result<()> {
        {
            let mut world = self.world();
            world.stops += 1;
            if let Some(one) = world.boxes.get_mut(id) {
                one.stopping = true;
            }
        }
        while_held(&self.stops_held).await;
        let mut world = self.world();
        if let Some(reason) = world.fail_stops.pop() {
            return Err(EngineError::Io {
                doing: reason,
                source: io::Error::other("declared fault"),
            });
        }
        world.boxes.remove(id);
        Ok(())
    }

    async fn exited(&self, id: &Id) -> Result<BoxExit> {
        let mut ended = {
            let world = self.world();
            let one = world
                .boxes
                .get(id)
                .ok_or_else(|| EngineError::NotRunning(id.clone()))?;
            one.ended.subscribe()
        };
        let exit = ended.wait_for(Option::is_some).await.map(|exit| exit.clone());
        let asked_for = self.world().boxes.get(id).is_none_or(|one| one.stopping);
        match exit {
            Ok(Some(exit)) if !asked_for => Ok(exit),
            _ => std::future::pending().await,
        }
    }

    async fn connect(&self, id: &Id) -> Result<Box<dyn GuestStream>> {
        if !self.is_running(id) {
            return Err(EngineError::NotRunning(id.clone()));
        }
        self.world().connects += 1;
        let guest = self.guest.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let (ours, theirs) = tokio::io::duplex(64 * 1024);
        match guest {
            Some(guest) => guest(id.clone(), theirs),
            None => drop(theirs),
        }
        Ok(Box::new(ours))
    }

    async fn stats(&self, id: &Id) -> Result<BoxStats> {
        if !self.is_running(id) {
            return Err(EngineError::NotRunning(id.clone()));
        }
        Ok(BoxStats {
            cpu_usec: 1_500_000,
            memory_bytes: 4 << 20,
            pids: 1,
            ..BoxStats::default()
        })
    }

    async fn sweep(&self, id: &Id) -> Result<()> {
        let mut world = self.world();
        world.boxes.remove(id);
        world.swept.push(id.clone());
        Ok(())
    }

    async fn present(&self) -> Result<Vec<Id>> {
        Ok(self.world().boxes.keys().cloned().collect())
    }
}

#[derive(Default)]
struct Pool {
    homes: BTreeMap<Id, u64>,
    templates: BTreeSet<Id>,
    fail_creates: Vec<String>,
    fail_deletes: Vec<String>,
    full: bool,
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

    /// Whether the pool has no space left.
    pub fn fill(&self, full: bool) {
        self.pool().full = full;
    }

    fn put(&self, id: &Id, disk: u64) -> Result<()> {
        let mut pool = self.pool();
        if pool.full {
            return Err(EngineError::NoSpace { free: 0 });
        }
        pool.homes.insert(id.clone(), disk);
        Ok(())
    }
}

fn declared(reason: String) -> EngineError {
    EngineError::Io {
        doing: reason,
        source: io::Error::other("declared fault"),
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
            .copied()
            .ok_or_else(|| EngineError::NoHome(id.clone()))?;
        Ok(HomeUsage { used: 4096, limit })
    }

    async fn set_limit(&self, id: &Id, disk: u64) -> Result<()> {
        match self.pool().homes.get_mut(id) {
            Some(limit) => *limit = disk,
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
}
