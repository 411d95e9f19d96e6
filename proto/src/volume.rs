//! How a virtual machine reaches its volumes: what its guest asks of the file server of the box, over a serial port of its own.
//!
//! Below lies the same [escape](crate::vm::Escape) as on the port to the daemon: the server begins, the guest says the beginning again, and from
//! there on both send frames, a length before each. The server remembers nothing that matters: every request names what it is about
//! by path and inode number, so that a server that has just been started can answer it. What it holds open is a cache.
//!
//! A memory image holds the guest that it was made with. So variants are only ever added, at the end; fields never.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize, de::DeserializeOwned};

/// Name of the serial port, as the guest finds it.
pub const PORT_NAME: &str = "dorm-volumes";
/// Most bytes of a file that a request or an answer carries.
pub const MAX_DATA: usize = 1 << 20;
/// Longest frame: the data, and what names it. Paths may be long.
pub const MAX_FRAME: usize = MAX_DATA + (256 << 10);
/// The folder in the root of a volume where files are that a machine removed while it had them open.
pub const REMOVED: &[u8] = b".dorm-removed";

/// What the machine's kernel knows by a number.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Node {
    /// Which of the box's volumes, in their order.
    pub volume: u8,
    /// From the volume's root, without a slash at either end. Empty for the root itself.
    #[serde(with = "serde_bytes")]
    pub path: Vec<u8>,
    /// The inode that is expected there; 0 for the root.
    pub inode: u64,
}

/// A name in a folder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    pub folder: Node,
    #[serde(with = "serde_bytes")]
    pub name: Vec<u8>,
}

/// A node, and where the machine has it open, the number of one such handle.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct File {
    pub node: Node,
    /// 0 if it is not open.
    pub handle: u64,
    /// Those of open(2) that the handle was opened with.
    pub flags: u32,
}

/// Whom a new file is to belong to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Owner {
    pub user: u32,
    pub group: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Time {
    pub seconds: i64,
    pub nanoseconds: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum NewTime {
    Now,
    At(Time),
}

/// What is to be changed of a file.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Change {
    pub mode: Option<u32>,
    pub user: Option<u32>,
    pub group: Option<u32>,
    pub size: Option<u64>,
    pub accessed: Option<NewTime>,
    pub modified: Option<NewTime>,
}

/// What is asked. Bytes that belong to it, such as those to be written, follow it in the frame.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    Lookup(Place),
    Attributes(File),
    Change {
        file: File,
        change: Change,
    },
    /// Answered with the target as data.
    ReadLink(Node),
    /// Makes a file and opens it as `handle`.
    Create {
        place: Place,
        mode: u32,
        flags: u32,
        owner: Owner,
        handle: u64,
    },
    /// Makes anything but links, by the type in `mode`.
    Make {
        place: Place,
        mode: u32,
        device: u32,
        owner: Owner,
    },
    /// The target is the data.
    Symlink {
        place: Place,
        owner: Owner,
    },
    Link {
        node: Node,
        place: Place,
    },
    /// Removes what is no folder. With a name in `hide`, the file is moved to [`REMOVED`] under it.
    Remove {
        place: Place,
        hide: Option<String>,
    },
    RemoveFolder(Place),
    /// `inode` is what is moved. `hide` is for what is in its way.
    Rename {
        from: Place,
        to: Place,
        inode: u64,
        flags: u32,
        hide: Option<String>,
    },
    Open(File),
    Close {
        handle: u64,
    },
    Read {
        file: File,
        offset: u64,
        size: u32,
    },
    /// With `append`, at the end of the file, wherever that is by now.
    Write {
        file: File,
        offset: u64,
        append: bool,
    },
    Sync {
        file: File,
        data_only: bool,
    },
    /// The entries behind `offset`, as data: see [`put_entry`].
    List {
        file: File,
        offset: u64,
    },
    Space {
        volume: u8,
    },
    GetAttribute {
        file: File,
        name: String,
    },
    SetAttribute {
        file: File,
        name: String,
        flags: u32,
    },
    ListAttributes(File),
    RemoveAttribute {
        file: File,
        name: String,
    },
    Allocate {
        file: File,
        mode: u32,
        offset: u64,
        length: u64,
    },
    Seek {
        file: File,
        offset: u64,
        whence: u32,
    },
    /// Removes a file from [`REMOVED`], once nobody has it open any more.
    Forget {
        volume: u8,
        hidden: String,
    },
    /// Removes all of [`REMOVED`] whose names begin so: what a machine left there that ended without a word.
    Tidy {
        volume: u8,
        prefix: String,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attributes {
    pub inode: u64,
    pub size: u64,
    pub blocks: u64,
    pub block_size: u32,
    pub mode: u32,
    pub links: u32,
    pub user: u32,
    pub group: u32,
    pub device: u32,
    pub accessed: Time,
    pub modified: Time,
    pub changed: Time,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Space {
    pub block_size: u64,
    pub blocks: u64,
    pub free: u64,
    pub available: u64,
    pub files: u64,
    pub files_free: u64,
    pub longest_name: u64,
}

/// A good answer. Data may follow it in the frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    Done,
    Attributes(Attributes),
    /// What was written, or where something was found.
    Number(u64),
    Space(Space),
    Data,
}

/// The error is one of the kernel's numbers.
pub type Answer = Result<Reply, i32>;

/// What comes before a request or an answer in a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Head {
    /// Which request it is, or answers.
    pub number: u64,
    /// Said before, perhaps to a server that is gone, which may have done it.
    pub again: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Malformed;

/// A frame with its length before it.
pub fn frame<T: Serialize>(head: Head, message: &T, data: &[u8]) -> Vec<u8> {
    let bytes = vec![0; 4];
    // Writing into memory fails for want of memory alone.
    let bytes = postcard::to_extend(&head, bytes).unwrap_or_default();
    let mut bytes = postcard::to_extend(message, bytes).unwrap_or_default();
    bytes.extend_from_slice(data);
    let length = u32::try_from(bytes.len() - 4).unwrap_or(u32::MAX);
    bytes[..4].copy_from_slice(&length.to_le_bytes());
    bytes
}

/// Makes of a frame one that is said again.
pub fn mark_again(frame: &mut [u8]) {
    // Behind its length lies the number, of which each byte but the last has its highest bit set.
    let number = frame.iter().skip(4).position(|byte| byte & 0x80 == 0);
    if let Some(again) = number.and_then(|end| frame.get_mut(4 + end + 1)) {
        *again = 1;
    }
}

/// Of a frame whose message cannot be read, the head if that can.
pub type Parsed<'a, T> = Result<(Head, T, &'a [u8]), (Option<Head>, Malformed)>;

/// Takes the content of a frame apart: its head, its message, and the data behind it.
pub fn parse<T: DeserializeOwned>(content: &[u8]) -> Parsed<'_, T> {
    let (head, rest) = postcard::take_from_bytes(content).map_err(|_| (None, Malformed))?;
    let (message, data) = postcard::take_from_bytes(rest).map_err(|_| (Some(head), Malformed))?;
    Ok((head, message, data))
}

/// Puts frames together from what comes in pieces.
#[derive(Debug, Default)]
pub struct Frames {
    length: [u8; 4],
    /// How much of the length is there.
    have: usize,
    content: Vec<u8>,
    ready: VecDeque<Vec<u8>>,
}

impl Frames {
    pub fn push(&mut self, mut bytes: &[u8]) -> Result<(), Malformed> {
        while !bytes.is_empty() {
            if self.have < self.length.len() {
                self.length[self.have] = bytes[0];
                self.have += 1;
                bytes = &bytes[1..];
                continue;
            }
            let length = u32::from_le_bytes(self.length) as usize;
            if !(1..=MAX_FRAME).contains(&length) {
                return Err(Malformed);
            }
            self.content.reserve_exact(length - self.content.len());
            let (taken, rest) = bytes.split_at(bytes.len().min(length - self.content.len()));
            self.content.extend_from_slice(taken);
            bytes = rest;
            if self.content.len() == length {
                self.have = 0;
                self.ready.push_back(std::mem::take(&mut self.content));
            }
        }
        Ok(())
    }

    /// The content of the next frame that is whole.
    pub fn next_frame(&mut self) -> Option<Vec<u8>> {
        self.ready.pop_front()
    }
}

/// An entry of a folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    pub inode: u64,
    /// Where the entries behind this one begin.
    pub next: u64,
    /// As in `d_type` of getdents(2).
    pub kind: u8,
    pub name: Vec<u8>,
}

/// Appends an entry to the data of an answer.
pub fn put_entry(entry: &Entry, data: &mut Vec<u8>) {
    data.extend(entry.inode.to_le_bytes());
    data.extend(entry.next.to_le_bytes());
    data.push(entry.kind);
    let name = &entry.name[..entry.name.len().min(255)];
    data.push(name.len() as u8);
    data.extend(name);
}

/// Takes such data apart again. What is no entry ends it.
pub fn entries(mut data: &[u8]) -> VecDeque<Entry> {
    let mut found = VecDeque::new();
    while let Some((fixed, rest)) = data.split_first_chunk::<18>() {
        let number = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| fixed[at + i]));
        let Some((name, rest)) = rest.split_at_checked(usize::from(fixed[17])) else {
            break;
        };
        found.push_back(Entry {
            inode: number(0),
            next: number(8),
            kind: fixed[16],
            name: name.to_vec(),
        });
        data = rest;
    }
    found
}

#[cfg(test)]
mod tests;
