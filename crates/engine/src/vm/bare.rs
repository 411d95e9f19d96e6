//! QEMU with nothing of dorm around it, for `dorm bench` to compare with.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::AsRawFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream as Blocking};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use dorm_proto::vm::Order;
use rustix::fs::SeekFrom;
use tempfile::TempDir;
use tokio::net::UnixStream;

use super::checkpoint::{HARDWARE, STATE};
use super::command::{GUEST_SOCKET, Hardware, MONITOR_SOCKET};
use super::link::Link;
use super::monitor::Monitor;
use super::qemu::Qemu;
use super::reach::now_ms;
use crate::Id;
use crate::launch::machine::{DISK, INITRD, KERNEL, MEMORY, MODULES, TAP_FD};

const INTERFACE: &str = "dorm-bench";
const PAUSE: Duration = Duration::from_millis(1);
const WITHIN: Duration = Duration::from_secs(60);

/// For machines of the daemon whose data directory is `data`.
#[derive(Debug, Clone)]
pub struct BareQemu {
    data: PathBuf,
    qemu: Qemu,
}

impl BareQemu {
    /// The error says in words why there is nothing to compare with.
    pub fn open(data: &Path) -> Result<Self, String> {
        Ok(Self {
            data: data.to_owned(),
            qemu: Qemu::find(data)?,
        })
    }

    /// How long a plain QEMU takes to bring back a machine whose state is in `image`, until its guest answers, and then to save it again.
    /// It is given copies of the files in the home of `id`, which stay as they are.
    pub async fn restore(&self, id: &Id, image: &Path) -> io::Result<(Duration, Duration)> {
        let folder = self.copies(id, &[DISK, MEMORY])?;
        // As the files of the home are, which were in use until just now.
        for name in [DISK, MEMORY] {
            read_all(&folder.path().join(in_home(name)))?;
        }
        let state = File::open(image.join(STATE))?;
        let (saved, memory) = (
            File::create(folder.path().join(STATE))?,
            File::open(folder.path().join(in_home(MEMORY)))?,
        );
        let begun = Instant::now();
        let machine = self.start(id, image, folder.path(), true)?;
        let measured = within(async {
            let mut monitor = machine.monitor().await?;
            monitor.load(&state).await?;
            monitor.go_on().await?;
            let link = machine.link().await?;
            link.have_done(&Order::Clock { now_ms: now_ms() }).await?;
            let restored = begun.elapsed();
            monitor.stop().await?;
            let begun = Instant::now();
            monitor.save(&saved).await?;
            saved.sync_all()?;
            memory.sync_all()?;
            Ok((restored, begun.elapsed()))
        });
        let measured = measured.await;
        machine.end().await?;
        measured
    }

    /// How long a plain QEMU takes to boot a machine like the one whose state is in `image`, until its guest speaks.
    pub async fn boot(&self, id: &Id, image: &Path) -> io::Result<Duration> {
        let folder = self.copies(id, &[DISK])?;
        File::create(folder.path().join(in_home(MEMORY)))?.set_len(hardware_of(image)?.memory)?;
        let begun = Instant::now();
        let machine = self.start(id, image, folder.path(), false)?;
        let spoken = within(async { machine.link().await.map(|_| begun.elapsed()) }).await;
        machine.end().await?;
        spoken
    }

    fn copies(&self, id: &Id, names: &[&str]) -> io::Result<TempDir> {
        let pool = self.data.join("pool");
        let folder = tempfile::Builder::new().prefix("bench-").tempdir_in(&pool)?;
        for name in names.iter().map(|name| in_home(name)) {
            let from = File::open(pool.join("homes").join(id.as_str()).join(name))?;
            rustix::fs::ioctl_ficlone(File::create(folder.path().join(name))?, &from)?;
        }
        Ok(folder)
    }

    fn start(&self, id: &Id, image: &Path, folder: &Path, waiting: bool) -> io::Result<BareMachine> {
        let hardware = hardware_of(image)?;
        let prefix = format!("dorm-bench-{id}-");
        // A state is of a machine whose interface can do what a tap can. This one is in nobody's network.
        let tap = dorm_sys::tap::make(INTERFACE)?;
        rustix::io::fcntl_setfd(&tap, rustix::io::FdFlags::empty())?;
        let arguments = self.arguments(&hardware, folder, &prefix, tap.as_raw_fd(), waiting)?;
        let process = tokio::process::Command::new(&self.qemu.program)
            .args(arguments)
            .stdin(std::process::Stdio::null())
            .kill_on_drop(true)
            .spawn()?;
        Ok(BareMachine { prefix, process })
    }

    /// Those that dorm gives it, but for where its files are.
    fn arguments(
        &self,
        hardware: &Hardware,
        folder: &Path,
        prefix: &str,
        tap: i32,
        waiting: bool,
    ) -> io::Result<Vec<String>> {
        let initrd = std::fs::read_dir(self.data.join("guests"))?
            .filter_map(|entry| Some(entry.ok()?.path()))
            .find(|path| {
                path.file_name()
                    .is_some_and(|name| name.as_encoded_bytes().starts_with(b"initrd-"))
            })
            .ok_or(io::ErrorKind::NotFound)?;
        let modules = match hardware.modules {
            true => self.qemu.modules_of(hardware.kernel.as_deref()),
            false => Ok(PathBuf::new()),
        };
        let modules = modules.map_err(io::Error::other)?;
        let here = |path: &str, place: &Path| (format!("={path},"), format!("={},", place.display()));
        let within = [
            here(DISK, &folder.join(in_home(DISK))),
            here(MEMORY, &folder.join(in_home(MEMORY))),
            here(MODULES, &modules),
            (
                format!("path={GUEST_SOCKET}"),
                format!("path={prefix}{GUEST_SOCKET}"),
            ),
            (
                format!("path={MONITOR_SOCKET}"),
                format!("path={prefix}{MONITOR_SOCKET}"),
            ),
            (format!("fd={TAP_FD}"), format!("fd={tap}")),
        ];
        let told = hardware
            .arguments(waiting)
            .into_iter()
            .map(|argument| match argument.as_str() {
                KERNEL => self.qemu.kernel().display().to_string(),
                INITRD => initrd.display().to_string(),
                _ => within
                    .iter()
                    .fold(argument.clone(), |text, (from, to)| text.replace(from, to)),
            });
        Ok(told.collect())
    }
}

struct BareMachine {
    prefix: String,
    process: tokio::process::Child,
}

impl BareMachine {
    async fn monitor(&self) -> io::Result<Monitor> {
        Monitor::open(connect(&format!("{}{MONITOR_SOCKET}", self.prefix)).await?).await
    }

    async fn link(&self) -> io::Result<Link> {
        Link::begin(connect(&format!("{}{GUEST_SOCKET}", self.prefix)).await?).await
    }

    async fn end(mut self) -> io::Result<()> {
        self.process.kill().await
    }
}

async fn within<T>(measured: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    let done = tokio::time::timeout(WITHIN, measured).await;
    done.unwrap_or_else(|late| Err(late.into()))
}

/// Brings what a file holds, but for its holes, into the host's memory.
fn read_all(path: &Path) -> io::Result<()> {
    let mut file = File::open(path)?;
    let mut end = 0;
    while let Ok(data) = rustix::fs::seek(&file, SeekFrom::Data(end)) {
        end = rustix::fs::seek(&file, SeekFrom::Hole(data))?;
        rustix::fs::seek(&file, SeekFrom::Start(data))?;
        io::copy(&mut (&mut file).take(end - data), &mut io::sink())?;
    }
    Ok(())
}

fn hardware_of(image: &Path) -> io::Result<Hardware> {
    Ok(serde_json::from_slice(&std::fs::read(image.join(HARDWARE))?)?)
}

fn in_home(path: &str) -> &str {
    path.trim_start_matches('/')
}

/// As soon as it is there.
async fn connect(name: &str) -> io::Result<UnixStream> {
    let address = SocketAddr::from_abstract_name(name)?;
    loop {
        match Blocking::connect_addr(&address) {
            Ok(stream) => {
                stream.set_nonblocking(true)?;
                return UnixStream::from_std(stream);
            }
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => tokio::time::sleep(PAUSE).await,
            Err(error) => return Err(error),
        }
    }
}
