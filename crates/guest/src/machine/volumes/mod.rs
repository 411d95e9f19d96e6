//! The volumes of a machine: file systems in user space, whose files are with the box's file server on the host.
//!
//! ```text
//!  kernel ──▶ /dev/fuse ──▶ filesystem (one for each volume) ──▶ channel ──▶ serial port ──▶ file server
//!                              └ tree: names of inodes, open files
//! ```
//!
//! What a machine has mounted, open or asked for is in its memory and nowhere else, and sleeps with it.

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{OnceLock, PoisonError, RwLock};
use std::time::Instant;

use dorm_proto::volume::Request;
use fuser::{Config, Session, SessionACL};

use self::channel::Channel;
use self::volume::Volume;
use super::early::mount;
use super::{modules, still};
use crate::log::log;

mod channel;
mod convert;
mod filesystem;
mod tree;
mod volume;

const DEVICE: &str = "/dev/fuse";
const MODULE: &str = "fuse";

static CHANNEL: OnceLock<Channel> = OnceLock::new();
/// The id of the agent whose machine this is, which another has in a fork.
static OWNER: RwLock<String> = RwLock::new(String::new());

/// From now on, files that are removed while they are open have names of this agent's.
pub(super) fn belong_to(agent: &str) {
    agent.clone_into(&mut OWNER.write().unwrap_or_else(PoisonError::into_inner));
}

/// How names of removed files begin.
fn prefix() -> String {
    format!("{}-", OWNER.read().unwrap_or_else(PoisonError::into_inner))
}

/// Mounts the volumes of the box at `paths`. It waits for no server.
pub(super) fn mount_all(agent: &str, paths: &[String]) -> io::Result<()> {
    if paths.is_empty() {
        return Ok(());
    }
    modules::load_kept(MODULE)?;
    let channel = Channel::open()?;
    belong_to(agent);
    for (number, path) in (0u8..).zip(paths) {
        let tidy = Request::Tidy {
            volume: number,
            prefix: prefix(),
        };
        channel.ask(&tidy, &[], |_| ());
        let volume = Volume::new(number, channel.clone());
        mount_volume(volume, path)
            .map_err(|e| io::Error::new(e.kind(), format!("the volume at {path} cannot be mounted: {e}")))?;
    }
    let _ = CHANNEL.set(channel);
    Ok(())
}

fn mount_volume(volume: Volume, path: &str) -> io::Result<()> {
    fs::create_dir_all(path)?;
    let device: OwnedFd = fs::File::options().read(true).write(true).open(DEVICE)?.into();
    let options = format!(
        "fd={},rootmode=40755,user_id=0,group_id=0,allow_other,default_permissions",
        device.as_raw_fd()
    );
    // As in a container, devices mean nothing in a volume.
    mount("volume", path, "fuse.dorm", libc::MS_NODEV, &options)?;
    let session = Session::from_fd(volume, device, SessionACL::All, Config::default())?;
    let path = path.to_owned();
    std::thread::Builder::new()
        .name("volume".into())
        .stack_size(256 * 1024)
        .spawn(move || {
            if let Err(e) = session.run() {
                log!("the volume at {path} is gone: {e}");
            }
        })?;
    Ok(())
}

/// Before the machine stands still: returns when nothing is under way to the file server, and nothing will be until the machine goes on.
/// False if that takes too long: then it goes on at once. False, too, if the hold of this number is over meanwhile.
pub(super) fn hold(number: u64, until: Instant) -> bool {
    CHANNEL
        .get()
        .is_none_or(|channel| channel.hold(number, until, still::AT_MOST))
}

/// The machine goes on: the hold of this number is over, or whichever there is.
pub(super) fn go_on(of: Option<u64>) {
    if let Some(channel) = CHANNEL.get() {
        channel.end(of);
    }
}
