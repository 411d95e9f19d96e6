//! The engine of each box: whatever its isolation, the rest of dorm sees an [`Engine`].
//!
//! What differs from one isolation to another is behind [`Kind`]; what does not, such as limits, is the [`Host`]'s.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use crate::container::Container;
use crate::gvisor::Gvisor;
use crate::home::{Pool, Room};
use crate::host::image::Still;
use crate::host::{Config, Host, LiveBox};
use crate::network;
use crate::vm::Vm;
use crate::{
    About, BoxExit, BoxRecord, BoxSpec, BoxStats, Dumped, Engine, EngineError, GuestStream, Id, Isolation,
    Listening, Result,
};

/// What an isolation does in its own way. The methods mean what those of [`Engine`] with the same names do.
#[async_trait]
pub(crate) trait Kind: std::fmt::Debug + Send + Sync {
    /// Brings up a box, by [`Host::occupy`].
    async fn start(&self, spec: &BoxSpec) -> Result<BoxRecord>;

    async fn restore(&self, spec: &BoxSpec, image: &Path) -> Result<BoxRecord>;

    async fn recover(&self, spec: &BoxSpec, image: &Path) -> Result<Option<BoxRecord>>;

    /// About how many bytes an image of the box takes beside its home.
    async fn image_size(&self, live: &LiveBox) -> Result<u64> {
        live.memory_in_no_file()
    }

    /// `room` is what was kept for the image; who has to let the box go on in between keeps it anew.
    async fn dump(&self, live: &LiveBox, image: &Path, room: &mut Room) -> Result<Dumped>;

    async fn connect(&self, live: &LiveBox) -> Result<Box<dyn GuestStream>>;

    async fn connect_port(&self, live: &LiveBox, port: u16) -> Result<Box<dyn GuestStream>>;

    async fn listening(&self, live: &LiveBox) -> Result<Vec<Listening>>;

    async fn worked(&self, live: &LiveBox) -> Result<Duration> {
        Ok(Duration::from_micros(live.stats()?.cpu_usec))
    }

    async fn freeze(&self, live: &LiveBox) -> Result<()> {
        live.freeze().await
    }

    async fn thaw(&self, live: &LiveBox) -> Result<()> {
        live.thaw()
    }

    /// The host has taken charge of a box that another daemon started.
    fn adopted(&self, _: &LiveBox) {}

    /// Tells the guest to end all processes, and thaws the box so that it can; told again, the guest is to be quick about it.
    async fn ask_to_end(&self, live: &LiveBox);

    /// How long the guest has once it is told again.
    fn farewell(&self) -> Duration {
        Duration::from_secs(2)
    }

    fn can_run(&self) -> Result<(), String> {
        Ok(())
    }

    fn can_checkpoint(&self) -> Result<(), String>;

    fn about(&self) -> About;

    /// Ends what is kept ready for boxes to come. Boxes are left as they are.
    async fn close(&self) {}
}

/// All the engines of one daemon.
#[derive(Debug)]
pub struct Engines {
    host: Arc<Host>,
    container: Container,
    gvisor: Gvisor,
    vm: Vm,
}

impl Engines {
    pub async fn open(config: &Config, pool: Pool) -> Result<Self> {
        let host = Arc::new(Host::open(config, pool).await?);
        let (container, gvisor, vm) = tokio::join!(
            Container::open(config, Arc::clone(&host)),
            Gvisor::open(&config.data, Arc::clone(&host)),
            Vm::open(&config.data, Arc::clone(&host)),
        );
        Ok(Self {
            container: container?,
            gvisor,
            vm: vm?,
            host,
        })
    }

    /// Takes back what was set up on this machine, unless boxes still run.
    pub async fn close(&self) {
        for isolation in Isolation::ALL {
            self.kind(isolation).close().await;
        }
        self.host.close().await;
    }

    /// The addresses of all boxes.
    pub fn addresses(&self) -> network::Range {
        self.host.network.range()
    }

    fn kind(&self, isolation: Isolation) -> &dyn Kind {
        match isolation {
            Isolation::Container => &self.container,
            Isolation::Vm => &self.vm,
            Isolation::Gvisor => &self.gvisor,
        }
    }

    /// The engine of boxes to be.
    fn engine(&self, isolation: Isolation) -> Result<&dyn Kind> {
        let kind = self.kind(isolation);
        let can_run = kind.can_run();
        can_run.map_err(|reason| EngineError::NoEngine { isolation, reason })?;
        Ok(kind)
    }

    /// Whether the home is one that boxes of this isolation run on.
    fn has_its_form(&self, spec: &BoxSpec) -> Result<bool> {
        Ok(self.host.pool.is_machine(&spec.id)? == (spec.isolation == Isolation::Vm))
    }

    fn live(&self, id: &Id) -> Result<(Arc<LiveBox>, &dyn Kind)> {
        let live = self.host.live(id)?;
        let kind = self.kind(live.isolation);
        Ok((live, kind))
    }
}

#[async_trait]
impl Engine for Engines {
    async fn start(&self, spec: &BoxSpec) -> Result<BoxRecord> {
        let engine = self.engine(spec.isolation)?;
        if !self.has_its_form(spec)? {
            return Err(EngineError::OtherForm(spec.id.clone()));
        }
        engine.start(spec).await
    }

    async fn convert(&self, spec: &BoxSpec) -> Result<Vec<String>> {
        self.engine(spec.isolation)?;
        if self.host.live(&spec.id).is_ok() {
            return Err(EngineError::AlreadyRunning(spec.id.clone()));
        }
        let pool = &self.host.pool;
        match spec.isolation {
            Isolation::Vm => {
                let made = pool.prepare_machine(&spec.id, spec.uid_base, spec.limits.disk);
                made.await.map(|()| Vec::new())
            }
            Isolation::Container | Isolation::Gvisor if self.has_its_form(spec)? => Ok(Vec::new()),
            Isolation::Container | Isolation::Gvisor => self.vm.make_files(spec).await,
        }
    }

    async fn can_convert(&self, spec: &BoxSpec) -> Result<()> {
        self.engine(spec.isolation)?;
        if self.has_its_form(spec)? {
            return Ok(());
        }
        // Only a machine knows what is on its disk, and what a machine's disk holds can be had by a machine alone.
        self.vm.boots().await?;
        self.host.pool.has_room_to_convert(&spec.id).await
    }

    async fn forget_memory(&self, id: &Id) -> Result<()> {
        match self.host.live(id) {
            Ok(_) => Err(EngineError::AlreadyRunning(id.clone())),
            Err(_) => self.host.pool.forget_memory_of_machine(id).await,
        }
    }

    async fn leave_memory_out(&self, id: &Id) -> Result<()> {
        match self.host.live(id) {
            Ok(_) => Err(EngineError::AlreadyRunning(id.clone())),
            Err(_) => self.host.pool.leave_memory_out(id).await,
        }
    }

    async fn set_memory_aside(&self, id: &Id) -> Result<()> {
        let aside = self.host.pool.set_memory_aside(id);
        aside.map_err(EngineError::io("cannot keep the memory that cannot be used"))
    }

    async fn adopt(&self, spec: &BoxSpec, record: &BoxRecord) -> Result<bool> {
        let is_here = self.host.adopt(spec, record).await?;
        if is_here && let Ok((live, kind)) = self.live(&spec.id) {
            kind.adopted(&live);
        }
        Ok(is_here)
    }

    async fn recover(&self, spec: &BoxSpec, image: &Path) -> Result<Option<BoxRecord>> {
        self.engine(spec.isolation)?.recover(spec, image).await
    }

    async fn stop(&self, id: &Id, grace: Duration) -> Result<()> {
        if let Ok((live, kind)) = self.live(id) {
            self.host.ask_to_end(&live, kind, grace).await;
        }
        self.host.sweep(id).await
    }

    async fn exited(&self, id: &Id) -> Result<BoxExit> {
        self.host.exited(id).await
    }

    async fn connect(&self, id: &Id) -> Result<Box<dyn GuestStream>> {
        let (live, kind) = self.live(id)?;
        kind.connect(&live).await
    }

    async fn connect_port(&self, id: &Id, port: u16) -> Result<Box<dyn GuestStream>> {
        let (live, kind) = self.live(id)?;
        kind.connect_port(&live, port).await
    }

    async fn listening(&self, id: &Id) -> Result<Vec<Listening>> {
        let (live, kind) = self.live(id)?;
        kind.listening(&live).await
    }

    async fn stats(&self, id: &Id) -> Result<BoxStats> {
        self.host.live(id)?.stats()
    }

    async fn worked(&self, id: &Id) -> Result<Duration> {
        let (live, kind) = self.live(id)?;
        kind.worked(&live).await
    }

    async fn sweep(&self, id: &Id) -> Result<()> {
        self.host.forget(id);
        self.host.sweep(id).await
    }

    async fn freeze(&self, id: &Id) -> Result<()> {
        let (live, kind) = self.live(id)?;
        kind.freeze(&live).await
    }

    async fn thaw(&self, id: &Id) -> Result<()> {
        let (live, kind) = self.live(id)?;
        kind.thaw(&live).await
    }

    async fn dump(&self, id: &Id, image: &Path) -> Result<Dumped> {
        let (live, kind) = self.live(id)?;
        let mut room = self.host.pool.room_beside();
        room.keep(kind.image_size(&live)).await?;
        let dumped = kind.dump(&live, image, &mut room).await?;
        if let Err(error) = room.was_enough() {
            // That is as many files as there is memory.
            let _ = tokio::task::spawn_blocking(move || drop(dumped)).await;
            return Err(error);
        }
        Ok(dumped)
    }

    async fn restore(&self, spec: &BoxSpec, image: &Path) -> Result<BoxRecord> {
        self.engine(spec.isolation)?.restore(spec, image).await
    }

    async fn release(&self, id: &Id, image: &Path) {
        let (home, image) = (self.host.pool.home_path(id), image.to_owned());
        let released = tokio::task::spawn_blocking(move || {
            crate::criu::release(&home, &image);
            // The last restore may have been broken off.
            crate::criu::lay_ghosts(&home, &image);
        });
        let _ = released.await;
    }

    async fn set_network(&self, spec: &BoxSpec) -> Result<()> {
        self.host.live(&spec.id)?;
        self.host.network.apply(&spec.id, spec.slot, &spec.network).await
    }

    fn is_untouched(&self, image: &Path) -> bool {
        Still::is_marked(image)
    }

    fn can_run(&self, isolation: Isolation) -> Result<(), String> {
        self.kind(isolation).can_run()
    }

    fn strongest(&self) -> Isolation {
        strongest(|isolation| self.can_run(isolation).is_ok(), || self.vm.is_quick())
    }

    fn about(&self, isolation: Isolation) -> About {
        self.kind(isolation).about()
    }

    fn can_checkpoint(&self, isolation: Isolation) -> Result<(), String> {
        self.kind(isolation).can_checkpoint()
    }

    async fn present(&self) -> Result<Vec<Id>> {
        self.host.present()
    }
}

/// The strongest isolation that can be had and is not slow.
fn strongest(can_run: impl Fn(Isolation) -> bool, machines_are_quick: impl Fn() -> bool) -> Isolation {
    let by_strength = [Isolation::Vm, Isolation::Gvisor];
    let works =
        |isolation: &Isolation| can_run(*isolation) && (*isolation != Isolation::Vm || machines_are_quick());
    by_strength.into_iter().find(works).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quick_machine_is_stronger_than_gvisor_and_gvisor_than_a_container() {
        use Isolation::{Container, Gvisor, Vm};
        let of = |can_run: &[Isolation], quick| strongest(|isolation| can_run.contains(&isolation), || quick);
        assert_eq!(of(&[Container, Gvisor, Vm], true), Vm);
        assert_eq!(of(&[Container, Vm], true), Vm);
        // A slow one is nobody's choice but that of whoever asks for it.
        assert_eq!(of(&[Container, Gvisor, Vm], false), Gvisor);
        assert_eq!(of(&[Container, Vm], false), Container);
        assert_eq!(of(&[Container, Gvisor], true), Gvisor);
        assert_eq!(of(&[Container], true), Container);
    }
}
