//! Making files as somebody, so that they are that user's from their first moment.

use dorm_proto::volume::Owner;
use rustix::io::Errno;
use rustix::thread::{Gid, Uid};

/// Does `work` as the owner of what it makes, with the rights that this thread has.
pub(super) fn as_owner<T>(owner: Owner, work: impl FnOnce() -> Result<T, Errno>) -> Result<T, Errno> {
    if owner.user == 0 && owner.group == 0 {
        return work();
    }
    let (user, group) = (user(owner.user)?, group(owner.group)?);
    let _back = Back;
    rustix::thread::set_thread_res_gid(Gid::ROOT, group, Gid::ROOT)?;
    rustix::thread::set_thread_res_uid(Uid::ROOT, user, Uid::ROOT)?;
    raise()?;
    work()
}

/// The number that means nobody to the kernel means nobody here.
pub(super) fn user(number: u32) -> Result<Uid, Errno> {
    match number {
        u32::MAX => Err(Errno::INVAL),
        number => Ok(Uid::from_raw(number)),
    }
}

pub(super) fn group(number: u32) -> Result<Gid, Errno> {
    match number {
        u32::MAX => Err(Errno::INVAL),
        number => Ok(Gid::from_raw(number)),
    }
}

/// Whoever ceases to be root ceases to use its capabilities, but may again.
fn raise() -> Result<(), Errno> {
    let mut sets = rustix::thread::capabilities(None)?;
    sets.effective = sets.permitted;
    rustix::thread::set_capabilities(None, sets)
}

struct Back;

impl Drop for Back {
    fn drop(&mut self) {
        let back = rustix::thread::set_thread_res_uid(Uid::ROOT, Uid::ROOT, Uid::ROOT)
            .and_then(|()| rustix::thread::set_thread_res_gid(Gid::ROOT, Gid::ROOT, Gid::ROOT))
            .and_then(|()| raise());
        if back.is_err() {
            // A thread that went on as somebody else would make files that are not theirs.
            std::process::abort();
        }
    }
}
