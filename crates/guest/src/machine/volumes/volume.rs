//! What a volume keeps, and how it asks.

use std::collections::{HashMap, VecDeque};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dorm_proto::volume::{Attributes, Entry, REMOVED, Reply, Request as Ask, entries};
use fuser::{
    Errno, FileAttr, FileHandle, FileType, Generation, INodeNo, ReplyAttr, ReplyDirectory, ReplyEmpty,
    ReplyEntry, ReplyXattr,
};

use super::channel::{Channel, Outcome};
use super::convert::{attributes, kind};
use super::tree::{ROOT, Tree};

/// How long the kernel may believe what it was told of a file, and the name of one that it has just made. Others change it meanwhile.
pub(super) const BELIEVED: Duration = Duration::from_millis(100);
/// A name is looked up each time: what others make or remove is seen at once.
const NAME_BELIEVED: Duration = Duration::ZERO;
/// But for those of folders on the way to it. If another folder has the name by now, the server tells, and the kernel looks again.
const FOLDER_BELIEVED: Duration = Duration::from_secs(1);

/// One volume.
#[derive(Clone)]
pub(super) struct Volume {
    pub(super) number: u8,
    pub(super) channel: Channel,
    tree: Arc<Mutex<Tree>>,
    /// What was read of folders and not yet asked for, by handle.
    listings: Arc<Mutex<HashMap<u64, Listing>>>,
}

#[derive(Default)]
struct Listing {
    /// What to ask for to get the entries.
    offset: u64,
    entries: VecDeque<Entry>,
}

impl Volume {
    pub(super) fn new(number: u8, channel: Channel) -> Self {
        Self {
            number,
            channel,
            tree: Arc::new(Mutex::new(Tree::new(number))),
            listings: Arc::default(),
        }
    }

    pub(super) fn tree(&self) -> MutexGuard<'_, Tree> {
        self.tree.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn forget_listing(&self, handle: FileHandle) {
        self.listings().remove(&handle.0);
    }

    fn listings(&self) -> MutexGuard<'_, HashMap<u64, Listing>> {
        self.listings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks for something that makes or finds an entry, and tells the kernel of it.
    pub(super) fn ask_entry(&self, ask: &Ask, data: &[u8], folder: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let (volume, name) = (self.clone(), name.to_owned());
        self.channel.ask(ask, data, move |outcome| {
            match volume.entry(outcome, folder, &name) {
                Ok(found) => {
                    let name_believed = match found.kind {
                        FileType::Directory => FOLDER_BELIEVED,
                        _ => NAME_BELIEVED,
                    };
                    reply.entry_with_ttls(&BELIEVED, &name_believed, &found, Generation(0));
                }
                Err(error) => reply.error(error),
            }
        });
    }

    pub(super) fn entry(&self, outcome: Outcome, folder: INodeNo, name: &OsStr) -> Result<FileAttr, Errno> {
        match found(outcome) {
            Ok(found) => {
                let told = attributes(&found, found.inode)?;
                self.tree().tell(folder.0, name.as_bytes(), found.inode);
                Ok(told)
            }
            Err(error) => {
                if error.code() == libc::ENOENT {
                    self.tree().gone(folder.0, name.as_bytes());
                }
                Err(error)
            }
        }
    }

    pub(super) fn ask_attributes(&self, ask: &Ask, inode: INodeNo, reply: ReplyAttr) {
        self.channel.ask(ask, &[], move |outcome| {
            match found(outcome).and_then(|found| attributes(&found, inode.0)) {
                Ok(found) => reply.attr(&BELIEVED, &found),
                Err(error) => reply.error(error),
            }
        });
    }

    pub(super) fn ask_done(&self, ask: &Ask, data: &[u8], reply: ReplyEmpty) {
        self.channel.ask(ask, data, |outcome| match outcome {
            Ok(_) => reply.ok(),
            Err(error) => reply.error(Errno::from_i32(error)),
        });
    }

    /// Asks for the bytes of an attribute, or how many there are.
    pub(super) fn ask_attribute(&self, ask: &Ask, size: u32, reply: ReplyXattr) {
        self.channel.ask(ask, &[], move |outcome| match outcome {
            Err(error) => reply.error(Errno::from_i32(error)),
            Ok((_, value)) if size == 0 => reply.size(value.len() as u32),
            Ok((_, value)) if value.len() > size as usize => reply.error(Errno::ERANGE),
            Ok((_, value)) => reply.data(&value),
        });
    }

    pub(super) fn hidden_name(inode: u64) -> String {
        format!("{}{inode:x}", super::prefix())
    }

    /// Reads what comes behind `offset` in a folder, and gives the kernel as much of it as it takes now.
    pub(super) fn read_folder(&self, inode: INodeNo, handle: FileHandle, offset: u64, reply: ReplyDirectory) {
        let ask = Ask::List {
            file: self.tree().file(inode.0, None),
            offset,
        };
        let volume = self.clone();
        self.channel.ask(&ask, &[], move |outcome| match outcome {
            Ok((_, data)) => {
                let mut entries = entries(&data);
                let next = entries.back().map(|last| last.next);
                if inode.0 == ROOT {
                    entries.retain(|entry| entry.name != REMOVED);
                }
                if let (true, Some(next)) = (entries.is_empty(), next) {
                    return volume.read_folder(inode, handle, next, reply);
                }
                let listing = Listing { offset, entries };
                volume.listings().insert(handle.0, listing);
                volume.list(handle, reply);
            }
            Err(error) => reply.error(Errno::from_i32(error)),
        });
    }

    /// Whether what comes behind `offset` was read already.
    pub(super) fn has_read(&self, handle: FileHandle, offset: u64) -> bool {
        self.listings()
            .get(&handle.0)
            .is_some_and(|listing| offset != 0 && listing.offset == offset && !listing.entries.is_empty())
    }

    pub(super) fn list(&self, handle: FileHandle, mut reply: ReplyDirectory) {
        let mut listings = self.listings();
        let listing = listings.entry(handle.0).or_default();
        while let Some(entry) = listing.entries.front() {
            let kind = kind(entry.kind.into()).unwrap_or(FileType::RegularFile);
            let name = OsStr::from_bytes(&entry.name);
            if reply.add(INodeNo(entry.inode), entry.next, kind, name) {
                break;
            }
            listing.offset = entry.next;
            listing.entries.pop_front();
        }
        reply.ok();
    }
}

fn found(outcome: Outcome) -> Result<Attributes, Errno> {
    match outcome {
        Ok((Reply::Attributes(found), _)) => Ok(found),
        Ok(_) => Err(Errno::EIO),
        Err(error) => Err(Errno::from_i32(error)),
    }
}
