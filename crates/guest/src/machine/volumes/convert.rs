//! Between the file server's words and those of the machine's kernel.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use dorm_proto::volume::{Attributes, NewTime, Owner, REMOVED, Time};
use fuser::{Errno, FileAttr, FileType, FopenFlags, INodeNo, Request, TimeOrNow};

use super::tree::ROOT;

/// As the kernel is told of `inode`, which for a root is not the number that it has on disk.
pub(super) fn attributes(found: &Attributes, inode: u64) -> Result<FileAttr, Errno> {
    Ok(FileAttr {
        ino: INodeNo(inode),
        size: found.size,
        blocks: found.blocks,
        atime: time(found.accessed),
        mtime: time(found.modified),
        ctime: time(found.changed),
        crtime: UNIX_EPOCH,
        kind: kind(found.mode >> 12).ok_or(Errno::EIO)?,
        perm: (found.mode & 0o7777) as u16,
        nlink: found.links,
        uid: found.user,
        gid: found.group,
        rdev: found.device,
        blksize: found.block_size,
        flags: 0,
    })
}

/// From the number that both modes and entries of folders have for it.
pub(super) fn kind(number: u32) -> Option<FileType> {
    Some(match number << 12 {
        libc::S_IFIFO => FileType::NamedPipe,
        libc::S_IFCHR => FileType::CharDevice,
        libc::S_IFBLK => FileType::BlockDevice,
        libc::S_IFDIR => FileType::Directory,
        libc::S_IFREG => FileType::RegularFile,
        libc::S_IFLNK => FileType::Symlink,
        libc::S_IFSOCK => FileType::Socket,
        _ => return None,
    })
}

fn time(time: Time) -> SystemTime {
    let whole = Duration::from_secs(time.seconds.unsigned_abs());
    let base = match time.seconds >= 0 {
        true => UNIX_EPOCH.checked_add(whole),
        false => UNIX_EPOCH.checked_sub(whole),
    };
    let part = Duration::from_nanos(time.nanoseconds.into());
    base.and_then(|base| base.checked_add(part)).unwrap_or(UNIX_EPOCH)
}

pub(super) fn new_time(time: TimeOrNow) -> NewTime {
    match time {
        TimeOrNow::Now => NewTime::Now,
        TimeOrNow::SpecificTime(time) => NewTime::At(match time.duration_since(UNIX_EPOCH) {
            Ok(since) => Time {
                seconds: i64::try_from(since.as_secs()).unwrap_or(i64::MAX),
                nanoseconds: since.subsec_nanos(),
            },
            Err(before) => {
                // Parts of a second count forward, also before the epoch.
                let before = before.duration();
                let seconds = -i64::try_from(before.as_secs()).unwrap_or(i64::MAX);
                match before.subsec_nanos() {
                    0 => Time {
                        seconds,
                        nanoseconds: 0,
                    },
                    part => Time {
                        seconds: seconds - 1,
                        nanoseconds: 1_000_000_000 - part,
                    },
                }
            }
        }),
    }
}

pub(super) fn owner(request: &Request) -> Owner {
    Owner {
        user: request.uid(),
        group: request.gid(),
    }
}

/// The folder of removed files is nobody's business.
pub(super) fn is_secret(folder: INodeNo, name: &OsStr) -> bool {
    folder.0 == ROOT && name.as_bytes() == REMOVED
}

/// Whoever appends and does not read must not see in the kernel's memory what is elsewhere in the file by now.
pub(super) fn opened_with(flags: i32) -> FopenFlags {
    let appends = flags & libc::O_APPEND != 0 && flags & libc::O_ACCMODE == libc::O_WRONLY;
    match appends {
        true => FopenFlags::FOPEN_DIRECT_IO,
        false => FopenFlags::empty(),
    }
}

/// Programs choose those that begin so; the others mean something to the host's kernel.
pub(super) fn of_users(name: &OsStr) -> Option<String> {
    name.to_str()
        .filter(|name| name.starts_with("user."))
        .map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_come_back_as_they_were_also_before_the_epoch() {
        for seconds in [-5, -1, 0, 1, 1_700_000_000] {
            for nanoseconds in [0, 1, 999_999_999] {
                let given = Time { seconds, nanoseconds };
                assert_eq!(new_time(TimeOrNow::SpecificTime(time(given))), NewTime::At(given));
            }
        }
    }

    #[test]
    fn modes_say_what_a_file_is() {
        let kinds = [0o010, 0o002, 0o004, 0o006, 0o012, 0o001, 0o014].map(kind);
        assert_eq!(
            kinds,
            [
                Some(FileType::RegularFile),
                Some(FileType::CharDevice),
                Some(FileType::Directory),
                Some(FileType::BlockDevice),
                Some(FileType::Symlink),
                Some(FileType::NamedPipe),
                Some(FileType::Socket)
            ]
        );
        assert_eq!(kind(0), None);
    }
}
