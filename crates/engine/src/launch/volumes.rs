//! The file server of a machine's volumes: a process that has nothing but them.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use dorm_sys::confine::{self, SystemCallFilter};
use dorm_sys::mount::Detached;
use dorm_sys::process::Process;
use rustix::fs::{Mode, OFlags};

use super::launcher::unexpected;
use super::machine::{FILES, make_root};
use super::{Failure, Job, Launcher, Report, Spec, Step, Volume, report, rootfs};
use crate::volumes::Server;

/// The confined process: `mounts` are the first volume, the null device, and the other volumes. Returns when the machine hangs up.
pub(super) fn serve(mounts: Vec<Detached>, filter: &SystemCallFilter) -> Result<(), Failure> {
    rustix::process::setsid().step("make a session")?;
    // So that people know it when they see it.
    rustix::thread::set_name(c"dorm-volumes").step("take a name")?;
    let count = mounts.len() - 1;
    let folders: Vec<String> = (0..count).map(|number| format!("{FILES}-{number}")).collect();
    let mut places: Vec<&str> = folders.iter().map(String::as_str).collect();
    places.insert(1, "/dev/null");
    make_root(places.into_iter().zip(mounts))?;
    let roots: Result<Vec<OwnedFd>, _> = folders
        .iter()
        .map(|folder| {
            rustix::fs::open(
                folder,
                OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
                Mode::empty(),
            )
        })
        .collect();
    let roots = roots.step("open the volumes")?;
    // The modes that the machine's kernel asks for are those that are meant.
    rustix::process::umask(Mode::empty());
    let channel =
        rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdout(), 3).step("take the way to the machine")?;
    let null = rootfs::open_null().step("detach standard input and output")?;
    filter.install().step("install the system call filter")?;
    confine::keep_capabilities(confine::FILE_CAPABILITIES).step("drop capabilities")?;
    report(&Report::Serving);
    // The daemon may come and go.
    rootfs::replace_stdio(&null).step("detach standard input and output")?;
    // How it ends is of no interest to anybody who could hear it.
    let _ = crate::volumes::serve(UnixStream::from(channel), &Server::new(roots));
    Ok(())
}

/// The daemon's side: starts such a process, which serves `volumes` to the machine behind `channel` and is a member of the groups of
/// `join`. It is a child of this process.
pub(crate) async fn serve_volumes(
    launcher: &Path,
    join: Vec<PathBuf>,
    filter: &[u8],
    channel: OwnedFd,
    uid_base: u32,
    mut volumes: Vec<Volume>,
) -> io::Result<Process> {
    if volumes.is_empty() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let spec = Spec {
        home: volumes.remove(0).source,
        uid_base,
        volumes,
        job: Job::ServeVolumes,
    };
    let launcher = Launcher::start_with(launcher, join, Some(filter), Stdio::from(channel)).await?;
    let process = match launcher.launch(&spec).await {
        Ok(process) => process,
        Err(error) => {
            launcher.end().await;
            return Err(error);
        }
    };
    let said = launcher.report().await;
    launcher.end().await;
    match said {
        Ok(Report::Serving) => Ok(process),
        failed => {
            let _ = process.signal(rustix::process::Signal::KILL);
            crate::host::ended(&process).await;
            Err(failed.map_or_else(|error| error, |other| unexpected(&other)))
        }
    }
}
