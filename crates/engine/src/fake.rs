//! Engines and homes that exist only in memory, with declared faults.
//!
//! Both outlive whoever uses them, as real boxes and homes outlive a daemon: a second daemon given the
//! same parts finds what the first left behind.

use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use tokio::io::DuplexStream;
use tokio::sync::watch;

use crate::{
    About, BoxExit, BoxRecord, BoxSpec, BoxStats, Dumped, Engine, EngineError, GuestStream, Id, Isolation,
    Listening, MemoryImage, Result,
};

mod homes;
mod world;

pub use homes::FakeHomes;
use world::World;

/// Answers a connection to a guest, as process 1 of a box would.
pub type FakeGuest = Arc<dyn Fn(Id, DuplexStream) + Send + Sync>;

pub struct FakeEngine {
    world: Mutex<World>,
    guest: Mutex<Option<FakeGuest>>,
    starts_held: watch::Sender<bool>,
    stops_held: watch::Sender<bool>,
    checkpoints_held: watch::Sender<bool>,
    seals_held: watch::Sender<bool>,
    restores_held: watch::Sender<bool>,
    conversions_held: watch::Sender<bool>,
    networks_held: watch::Sender<bool>,
}

impl Default for FakeEngine {
    fn default() -> Self {
        Self {
            world: Mutex::default(),
            guest: Mutex::default(),
            starts_held: watch::Sender::new(false),
            stops_held: watch::Sender::new(false),
            checkpoints_held: watch::Sender::new(false),
            seals_held: watch::Sender::new(false),
            restores_held: watch::Sender::new(false),
            conversions_held: watch::Sender::new(false),
            networks_held: watch::Sender::new(false),
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

    /// From now on, in every box, what answers for guests answers at this port too.
    pub fn open_port(&self, port: u16) {
        self.world().ports.insert(port);
    }

    /// The next start that is tried fails with this reason.
    pub fn fail_next_start(&self, reason: &str) {
        self.fail_next_start_with(EngineError::Start {
            step: "started".to_owned(),
            source: reason.into(),
        });
    }

    pub fn fail_next_start_with(&self, error: EngineError) {
        self.world().fail_starts.push(error);
    }

    /// The next stop that is tried fails with this reason, and the box stays.
    pub fn fail_next_stop(&self, reason: &str) {
        self.world().fail_stops.push(reason.to_owned());
    }

    pub fn fail_next_freeze(&self, reason: &str) {
        self.world().fail_freezes.push(reason.to_owned());
    }

    pub fn fail_next_thaw(&self, reason: &str) {
        self.world().fail_thaws.push(reason.to_owned());
    }

    /// The next checkpoint finds something that it cannot save.
    pub fn fail_next_checkpoint(&self, reason: &str) {
        self.fail_next_checkpoint_with(EngineError::CannotCheckpoint(reason.to_owned()));
    }

    pub fn fail_next_checkpoint_with(&self, error: EngineError) {
        self.world().fail_checkpoints.push(error);
    }

    /// Nobody can look whether a box is there.
    pub fn hide_boxes(&self, hidden: bool) {
        self.world().hidden = hidden;
    }

    pub fn fail_next_restore(&self, error: EngineError) {
        self.world().fail_restores.push(error);
    }

    /// The next home that is to get another form cannot.
    pub fn fail_next_conversion(&self, error: EngineError) {
        self.world().fail_conversions.push(error);
    }

    /// The next home that is to get another form is known not to have room, or an engine, for it.
    pub fn refuse_next_conversion(&self, error: EngineError) {
        self.world().refuse_conversion = Some(error);
    }

    /// While held, homes that are to get another form do not come to an end of it, unless they are swept.
    pub fn hold_conversions(&self, hold: bool) {
        self.conversions_held.send_replace(hold);
    }

    /// While held, boxes do not get another network policy.
    pub fn hold_networks(&self, hold: bool) {
        self.networks_held.send_replace(hold);
    }

    /// The next home that gets another form loses this.
    pub fn leave_out_next(&self, what: &str) {
        self.world().left_out.push(what.to_owned());
    }

    /// What the home had the form for when what this image has left in it was taken away.
    pub fn released(&self, image: &Path) -> Option<Isolation> {
        let world = self.world();
        let mut released = world.released.iter();
        released
            .find(|(released, _)| released == image)
            .map(|(_, form)| *form)
    }

    /// What homes were converted for.
    pub fn conversions(&self) -> Vec<Isolation> {
        self.world().conversions.clone()
    }

    /// Memory images can be neither made nor brought back here, for this reason.
    pub fn cannot_checkpoint(&self, reason: &str) {
        self.world().cannot_checkpoint = Some(reason.to_owned());
    }

    /// They can again.
    pub fn can_checkpoint_again(&self) {
        self.world().cannot_checkpoint = None;
    }

    pub fn hold_checkpoints(&self, hold: bool) {
        self.checkpoints_held.send_replace(hold);
    }

    /// While held, the memory of boxes that go on is not on disk yet.
    pub fn hold_seals(&self, hold: bool) {
        self.seals_held.send_replace(hold);
    }

    pub fn hold_restores(&self, hold: bool) {
        self.restores_held.send_replace(hold);
    }

    /// Puts something into the memory of the box, and nowhere else.
    pub fn remember(&self, id: &Id, what: &str) {
        self.world().boxes.get_mut(id).expect("a box").memory = what.to_owned();
    }

    pub fn memory(&self, id: &Id) -> Option<String> {
        self.world().boxes.get(id).map(|one| one.memory.clone())
    }

    /// The box's processes use so much more CPU.
    pub fn burn(&self, id: &Id, cpu: Duration) {
        let usec = u64::try_from(cpu.as_micros()).unwrap_or(u64::MAX);
        self.world().boxes.get_mut(id).expect("a box").cpu_usec += usec;
    }

    pub fn is_frozen(&self, id: &Id) -> bool {
        self.world().boxes.get(id).is_some_and(|one| *one.frozen.borrow())
    }

    pub fn freezes(&self) -> u64 {
        self.world().freezes
    }

    pub fn thaws(&self) -> u64 {
        self.world().thaws
    }

    /// Checkpoints that were tried, failed ones included.
    pub fn checkpoints(&self) -> u64 {
        self.world().checkpoints
    }

    pub fn restores(&self) -> u64 {
        self.world().restores
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
        if let Some(error) = world.fail_starts.pop() {
            return Err(error);
        }
        if world.boxes.contains_key(&spec.id) {
            return Err(EngineError::AlreadyRunning(spec.id.clone()));
        }
        if !world.has_its_form(spec) {
            return Err(EngineError::OtherForm(spec.id.clone()));
        }
        Ok(world.add(spec, String::new()))
    }

    async fn convert(&self, spec: &BoxSpec) -> Result<Vec<String>> {
        if self.world().has_its_form(spec) {
            return Ok(Vec::new());
        }
        let swept = self.world().swept.len();
        let is_swept = || self.world().swept[swept..].contains(&spec.id);
        let mut held = self.conversions_held.subscribe();
        let _ = held.wait_for(|held| !held || is_swept()).await;
        if is_swept() {
            return Err(declared("the machine has ended".to_owned()));
        }
        let mut world = self.world();
        if let Some(error) = world.fail_conversions.pop() {
            return Err(error);
        }
        world.forms.insert(spec.id.clone(), spec.isolation);
        world.conversions.push(spec.isolation);
        Ok(std::mem::take(&mut world.left_out))
    }

    async fn can_convert(&self, _: &BoxSpec) -> Result<()> {
        self.world().refuse_conversion.take().map_or(Ok(()), Err)
    }

    async fn adopt(&self, spec: &BoxSpec, record: &BoxRecord) -> Result<bool> {
        let mut world = self.world();
        if world.hidden {
            return Err(declared("too many open files".to_owned()));
        }
        let there = world
            .boxes
            .get(&spec.id)
            .is_some_and(|one| one.record == *record && one.ended.borrow().is_none());
        if !there {
            world.boxes.remove(&spec.id);
        }
        Ok(there)
    }

    async fn recover(&self, spec: &BoxSpec, _image: &Path) -> Result<Option<BoxRecord>> {
        let world = self.world();
        let living = world
            .boxes
            .get(&spec.id)
            .filter(|one| one.ended.borrow().is_none());
        Ok(living.map(|one| one.record.clone()))
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
        // A frozen guest does not answer.
        let mut frozen = self.world().living(id)?.frozen.subscribe();
        let _ = frozen.wait_for(|frozen| !frozen).await;
        self.world().connects += 1;
        let guest = self.guest.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let (ours, theirs) = tokio::io::duplex(64 * 1024);
        match guest {
            Some(guest) => guest(id.clone(), theirs),
            None => drop(theirs),
        }
        Ok(Box::new(ours))
    }

    async fn connect_port(&self, id: &Id, port: u16) -> Result<Box<dyn GuestStream>> {
        if !self.world().ports.contains(&port) {
            return Err(EngineError::PortClosed { id: id.clone(), port });
        }
        self.connect(id).await
    }

    async fn listening(&self, id: &Id) -> Result<Vec<Listening>> {
        let mut world = self.world();
        world.living(id)?;
        let address = std::net::Ipv4Addr::LOCALHOST.into();
        let ports = world.ports.iter();
        Ok(ports.map(|&port| Listening { port, address }).collect())
    }

    async fn worked(&self, id: &Id) -> Result<Duration> {
        Ok(Duration::from_micros(self.world().living(id)?.cpu_usec))
    }

    async fn stats(&self, id: &Id) -> Result<BoxStats> {
        let cpu_usec = self.world().living(id)?.cpu_usec;
        Ok(BoxStats {
            cpu_usec,
            memory_bytes: 4 << 20,
            pids: 1,
            ..BoxStats::default()
        })
    }

    async fn sweep(&self, id: &Id) -> Result<()> {
        let mut world = self.world();
        world.boxes.remove(id);
        world.swept.push(id.clone());
        drop(world);
        self.conversions_held.send_modify(|_| {});
        Ok(())
    }

    async fn freeze(&self, id: &Id) -> Result<()> {
        let mut world = self.world();
        world.freezes += 1;
        if let Some(reason) = world.fail_freezes.pop() {
            return Err(declared(reason));
        }
        world.living(id)?.frozen.send_replace(true);
        Ok(())
    }

    async fn thaw(&self, id: &Id) -> Result<()> {
        let mut world = self.world();
        world.thaws += 1;
        if let Some(reason) = world.fail_thaws.pop() {
            return Err(declared(reason));
        }
        let one = world.living(id)?;
        if one.frozen.send_replace(false) {
            one.cpu_usec += 1;
        }
        Ok(())
    }

    async fn dump(&self, id: &Id, image: &Path) -> Result<Dumped> {
        self.world().checkpoints += 1;
        while_held(&self.checkpoints_held).await;
        let memory = {
            let mut world = self.world();
            if let Some(error) = world.fail_checkpoints.pop() {
                return Err(error);
            }
            let one = world.living(id)?;
            if !*one.frozen.borrow() {
                return Err(EngineError::CannotCheckpoint("the box is not frozen".to_owned()));
            }
            one.memory.clone()
        };
        let (held, image) = (self.seals_held.clone(), image.to_owned());
        Ok(Dumped::new(async move {
            while_held(&held).await;
            std::fs::create_dir(&image).map_err(EngineError::io("made the image's directory"))?;
            let whole = format!("whole:{memory}");
            std::fs::write(image.join("memory"), &whole).map_err(EngineError::io("wrote the image"))?;
            Ok(MemoryImage {
                size: whole.len() as u64,
                guest_hash: "fake".to_owned(),
            })
        }))
    }

    async fn restore(&self, spec: &BoxSpec, image: &Path) -> Result<BoxRecord> {
        {
            let mut world = self.world();
            world.restores += 1;
            world.specs.push(spec.clone());
        }
        while_held(&self.restores_held).await;
        self.can_checkpoint(Isolation::default())
            .map_err(EngineError::CannotCheckpoint)?;
        let mut world = self.world();
        if let Some(error) = world.fail_restores.pop() {
            return Err(error);
        }
        if world.boxes.contains_key(&spec.id) {
            return Err(EngineError::AlreadyRunning(spec.id.clone()));
        }
        let text = std::fs::read_to_string(image.join("memory"))
            .map_err(|error| EngineError::BadImage(error.to_string()))?;
        let memory = text
            .strip_prefix("whole:")
            .ok_or_else(|| EngineError::BadImage("its checksum is wrong".to_owned()))?;
        Ok(world.add(spec, memory.to_owned()))
    }

    async fn release(&self, id: &Id, image: &Path) {
        let mut world = self.world();
        let form = world.forms.get(id).copied().unwrap_or_default();
        world.released.push((image.to_owned(), form));
    }

    async fn set_network(&self, spec: &BoxSpec) -> Result<()> {
        while_held(&self.networks_held).await;
        let mut world = self.world();
        world.living(&spec.id)?;
        world.specs.push(spec.clone());
        Ok(())
    }

    fn is_untouched(&self, _image: &Path) -> bool {
        false
    }

    fn can_run(&self, isolation: Isolation) -> std::result::Result<(), String> {
        match isolation {
            Isolation::Container | Isolation::Gvisor => Ok(()),
            Isolation::Vm => Err("the fake has none".to_owned()),
        }
    }

    fn strongest(&self) -> Isolation {
        Isolation::Gvisor
    }

    fn about(&self, isolation: Isolation) -> About {
        About {
            engine: format!("a fake {isolation}"),
            accelerator: "none".to_owned(),
            slow: isolation == Isolation::Vm,
            files_by: "a fake home".to_owned(),
            memory_by: "a fake image".to_owned(),
        }
    }

    fn can_checkpoint(&self, _: Isolation) -> std::result::Result<(), String> {
        match &self.world().cannot_checkpoint {
            Some(reason) => Err(reason.clone()),
            None => Ok(()),
        }
    }

    async fn present(&self) -> Result<Vec<Id>> {
        Ok(self.world().boxes.keys().cloned().collect())
    }
}

fn declared(reason: String) -> EngineError {
    EngineError::Io {
        doing: reason,
        source: io::Error::other("declared fault"),
    }
}
