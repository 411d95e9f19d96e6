//! Boxes as hardened containers: process 1 of the box is a process of this machine, in namespaces of its own.

use std::path::Path;
use std::sync::Arc;

use async_trait::async_trait;
use dorm_sys::confine::SystemCallFilter;
use rustix::process::Signal;

use self::patience::Patience;
use self::spare::{Part, Spares};
use crate::criu::Criu;
use crate::engines::Kind;
use crate::home::Room;
use crate::host::{self, Host, LiveBox};
use crate::network;
use crate::{About, BoxRecord, BoxSpec, Dumped, EngineError, GuestStream, Listening, Result, about};

mod checkpoint;
mod patience;
mod recover;
mod spare;
mod start;

/// The container engine of one daemon.
#[derive(Debug)]
pub(crate) struct Container {
    host: Arc<Host>,
    /// The program that makes memory images, or why there is none.
    criu: Result<Criu, String>,
    spares: Arc<Spares>,
    /// That have become CRIU, where there is one.
    criu_spares: Option<Arc<Spares>>,
    /// With restores.
    patience: Patience,
}

impl Container {
    pub(crate) async fn open(config: &host::Config, host: Arc<Host>) -> Result<Self> {
        let failed = || EngineError::io("cannot prepare the container engine");
        let filter = SystemCallFilter::compile().map_err(failed())?.to_bytes();
        let (data, launcher) = (config.data.clone(), config.launcher.clone());
        let cgroups = host.cgroups.clone();
        let criu = tokio::task::spawn_blocking(move || {
            let canonical = std::fs::canonicalize(&data).unwrap_or_else(|_| data.clone());
            let places = [canonical.join("images"), canonical.join("tmp")];
            let held = |id: &str| cgroups.group(id).stats().map_or(0, |stats| stats.memory);
            crate::criu::orphans::wait(&places, held);
            crate::criu::find(&data, &launcher)
        })
        .await;
        let criu = criu.unwrap_or_else(|e| Err(e.to_string()));
        match &criu {
            Ok(criu) => tracing::debug!(version = criu.version, "memory images are made by criu"),
            Err(reason) => tracing::warn!(
                reason,
                "no memory images: containers can stand by and stop, but not hibernate"
            ),
        }
        Spares::sweep(&host.cgroups);
        let spares = |part| Spares::new(host.launcher.clone(), host.cgroups.clone(), part);
        Ok(Self {
            criu_spares: criu
                .as_ref()
                .ok()
                .map(|criu| spares(Part::Criu(criu.job(0, true)))),
            criu,
            spares: spares(Part::Launcher(filter)),
            patience: Patience::from_environment(),
            host,
        })
    }

    fn all_spares(&self) -> impl Iterator<Item = &Arc<Spares>> {
        std::iter::once(&self.spares).chain(&self.criu_spares)
    }
}

#[async_trait]
impl Kind for Container {
    async fn close(&self) {
        for spares in self.all_spares() {
            spares.close().await;
        }
    }

    async fn start(&self, spec: &BoxSpec) -> Result<BoxRecord> {
        self.host.occupy(spec, self.start_box(spec)).await
    }

    async fn restore(&self, spec: &BoxSpec, image: &Path) -> Result<BoxRecord> {
        let limit = self.patience.with(image);
        // Lives on until nothing of it moves any more.
        let mut restoring = std::pin::pin!(self.restore_box(spec, image));
        match tokio::time::timeout(limit, &mut restoring).await {
            Ok(restored) => restored,
            Err(_) => Err(patience::end(&self.host, &spec.id, limit).await),
        }
    }

    async fn recover(&self, spec: &BoxSpec, image: &Path) -> Result<Option<BoxRecord>> {
        self.recover_box(spec, image).await
    }

    async fn image_size(&self, live: &LiveBox) -> Result<u64> {
        let group = live.group.clone();
        let nameless = tokio::task::spawn_blocking(move || checkpoint::files_without_names(&group)).await;
        let nameless = nameless
            .unwrap_or_else(|e| Err(std::io::Error::other(e)))
            .map_err(EngineError::io("cannot measure the box's open files"))?;
        Ok(live.memory_in_no_file()? + nameless)
    }

    async fn dump(&self, live: &LiveBox, image: &Path, room: &mut Room) -> Result<Dumped> {
        self.dump_box(live, image, room).await
    }

    async fn connect(&self, live: &LiveBox) -> Result<Box<dyn GuestStream>> {
        let failed = || EngineError::io("cannot reach the guest");
        let inside = self.host.network.inside();
        let stream = inside
            .connect(Arc::clone(&live.netns), dorm_proto::boot::GUEST_SOCKET)
            .await
            .map_err(failed())?;
        Ok(Box::new(
            tokio::net::UnixStream::from_std(stream).map_err(failed())?,
        ))
    }

    async fn connect_port(&self, live: &LiveBox, port: u16) -> Result<Box<dyn GuestStream>> {
        let stream = self.host.network.inside().connect_port(&live.netns, port).await;
        match stream {
            Ok(stream) => Ok(Box::new(stream)),
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => {
                let id = live.id.clone();
                Err(EngineError::PortClosed { id, port })
            }
            Err(error) => Err(EngineError::io("cannot reach a port of the box")(error)),
        }
    }

    async fn listening(&self, live: &LiveBox) -> Result<Vec<Listening>> {
        let found = network::listening(live.process.pid);
        // Otherwise the number may be another process's by now.
        if live.process.has_ended() {
            return Err(EngineError::NotRunning(live.id.clone()));
        }
        found.map_err(EngineError::io("cannot read the ports of the box"))
    }

    async fn thaw(&self, live: &LiveBox) -> Result<()> {
        live.thaw()?;
        let names = live.take_names();
        if !names.is_empty() {
            let home = self.host.pool.home_path(&live.id);
            tokio::task::spawn_blocking(move || crate::criu::forget(&home, &names));
        }
        Ok(())
    }

    async fn ask_to_end(&self, live: &LiveBox) {
        let _ = live.process.signal(Signal::TERM);
        let _ = live.group.thaw();
    }

    fn can_checkpoint(&self) -> Result<(), String> {
        self.usable_criu().map(|_| ())
    }

    fn about(&self) -> About {
        let kernel = rustix::system::uname().release().to_string_lossy().into_owned();
        About {
            engine: format!("Linux {kernel}, the host's own"),
            accelerator: about::PROCESSOR.to_owned(),
            slow: false,
            files_by: about::HOME.to_owned(),
            memory_by: match self.usable_criu() {
                Ok(criu) => format!("images by CRIU {}", criu.version),
                Err(reason) => format!("nothing: {reason}"),
            },
        }
    }
}
