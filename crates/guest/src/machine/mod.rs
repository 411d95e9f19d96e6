//! The guest as process 1 of a virtual machine.
//!
//! ```text
//!  kernel ──▶ /init (early) ──▶ the same program again, on the root disk ──▶ port: one serial line
//!             modules, mounts                                                  └▶ streams ──▶ orders, http::Server
//! ```
//!
//! A machine has no descriptor that was handed to it, and its network is the box's own: whatever the daemon wants comes over
//! a serial port that only root in the machine can open, and that this program holds open.

mod archive;
mod connections;
mod early;
mod identity;
mod modules;
mod orders;
mod port;
mod still;
mod volumes;

use std::io;
use std::os::fd::AsRawFd;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use dorm_proto::boot::BootConfig;
use tokio::sync::{mpsc, oneshot};

pub(crate) use early::{SECOND_STAGE, enter};
pub(crate) use modules::{CALLED_WITH, load_by_name};
pub(crate) use still::{join_file, until_released};

use crate::http::Server;
use crate::log::log;

/// What a machine is told at its start, and whom to tell that it serves.
pub(crate) struct Boot {
    pub(crate) config: BootConfig,
    answer: oneshot::Sender<Result<(), String>>,
}

impl Boot {
    pub(crate) fn ready(self) {
        let _ = self.answer.send(Ok(()));
    }

    pub(crate) fn failed(self, error: &io::Error) {
        let _ = self.answer.send(Err(error.to_string()));
    }
}

/// The way to the daemon.
pub(crate) struct Machine {
    booted: mpsc::Receiver<Boot>,
    server: Arc<OnceLock<Server>>,
}

impl Machine {
    /// Begins to listen for orders. Needs a runtime.
    pub(crate) fn start() -> io::Result<Self> {
        still::set_up();
        let (boots, booted) = mpsc::channel(1);
        let server = Arc::default();
        let orders = orders::Orders::new(boots, Arc::clone(&server));
        tokio::spawn(port::serve(port::open()?, orders));
        Ok(Self { booted, server })
    }

    pub(crate) async fn boot(&mut self) -> io::Result<Boot> {
        self.booted
            .recv()
            .await
            .ok_or_else(|| io::ErrorKind::BrokenPipe.into())
    }

    pub(crate) fn serve(&self, server: Server) {
        let _ = self.server.set(server);
    }
}

/// Whether this is process 1 of a machine.
pub(crate) fn is_one() -> bool {
    std::env::args().nth(1).as_deref() == Some(SECOND_STAGE)
}

/// What users expect of a computer and no box needs at its start.
pub(crate) fn load_later_modules() {
    let loaded = std::thread::Builder::new()
        .name("modules".into())
        .spawn(|| modules::load_all(early::KEPT_MODULES));
    if let Err(e) = loaded {
        log!("no modules are loaded: {e}");
    }
}

/// Turns the machine off. Everything that was written is on its disk before, in order.
pub(crate) fn power_off() -> io::Result<()> {
    /// How long the file server may take for what is under way to volumes.
    const VOLUMES_WITHIN: Duration = Duration::from_secs(2);
    const FIFREEZE: libc::c_ulong = 0xc004_5877;
    // SAFETY: sync takes nothing and gives nothing.
    unsafe { libc::sync() };
    volumes::hold(still::draw(), Instant::now() + VOLUMES_WITHIN);
    // A file system that takes no more writes is as clean as one that was unmounted, which the root never is.
    let frozen = std::fs::File::open("/").and_then(|root| {
        // SAFETY: the request takes an integer, and ignores it.
        crate::sys::check(unsafe { libc::ioctl(root.as_raw_fd(), FIFREEZE, 0) })
    });
    if let Err(e) = frozen {
        eprintln!("the root disk is left as it is: {e}");
    }
    // SAFETY: reboot takes an integer.
    crate::sys::check(unsafe { libc::reboot(libc::RB_POWER_OFF) }).map(drop)
}
