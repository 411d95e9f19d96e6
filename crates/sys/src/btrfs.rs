//! Subvolumes, snapshots and quotas of btrfs by ioctl: no process is started for any of them.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;

const MAGIC: u8 = 0x94;

const fn ioc(dir: u32, number: u8, size: usize) -> libc::c_ulong {
    ((dir << 30) | ((size as u32) << 16) | ((MAGIC as u32) << 8) | number as u32) as libc::c_ulong
}
const READ: u32 = 2;
const WRITE: u32 = 1;

const SUBVOL_RDONLY: u64 = 1 << 1;
const QUOTA_ENABLE: u64 = 1;
const QUOTA_ENABLE_SIMPLE: u64 = 4;
const LIMIT_MAX_EXCLUSIVE: u64 = 2;

#[repr(C)]
struct VolArgsV2 {
    fd: i64,
    transid: u64,
    flags: u64,
    unused: [u64; 4],
    name: [u8; 4040],
}

#[repr(C)]
struct VolArgs {
    fd: i64,
    name: [u8; 4088],
}

#[repr(C)]
struct QuotaCtl {
    cmd: u64,
    status: u64,
}

#[repr(C)]
struct QgroupLimit {
    qgroupid: u64,
    flags: u64,
    max_rfer: u64,
    max_excl: u64,
    rsv_rfer: u64,
    rsv_excl: u64,
}

#[repr(C)]
struct QgroupCreate {
    create: u64,
    qgroupid: u64,
}

#[repr(C)]
struct QgroupAssign {
    assign: u64,
    source: u64,
    destination: u64,
}

#[repr(C)]
struct FsInfo {
    max_id: u64,
    num_devices: u64,
    fsid: [u8; 16],
    nodesize: u32,
    sectorsize: u32,
    clone_alignment: u32,
    csum: [u16; 2],
    flags: u64,
    generation: u64,
    metadata_uuid: [u8; 16],
    reserved: [u8; 944],
}

#[repr(C)]
struct SubvolInfo {
    treeid: u64,
    name: [u8; 256],
    parent_id: u64,
    dirid: u64,
    generation: u64,
    flags: u64,
    /// Its own, that of the subvolume it is a copy of, that of the one it was received from.
    uuids: [[u8; 16]; 3],
    /// Of its last change, its making, its sending and its receiving.
    transids: [u64; 4],
    times: [[u64; 2]; 4],
    reserved: [u64; 8],
}

#[repr(C)]
struct InoLookup {
    treeid: u64,
    objectid: u64,
    name: [u8; 4080],
}

#[repr(C)]
struct Search {
    tree_id: u64,
    min_objectid: u64,
    max_objectid: u64,
    min_offset: u64,
    max_offset: u64,
    min_transid: u64,
    max_transid: u64,
    min_type: u32,
    max_type: u32,
    nr_items: u32,
    unused: [u32; 9],
    buf_size: u64,
    buffer: [u8; SEARCH_BUFFER],
}

const SEARCH_BUFFER: usize = 64 << 10;
/// The part of [`Search`] whose size names the request.
const SEARCH_HEAD: usize = 112;
const SEARCH_ITEM_HEAD: usize = 32;
const INODE_ITEM: u32 = 1;
const EXTENT_DATA: u32 = 108;
/// A kind of extent.
const INLINE: u8 = 0;
const FIRST_INODE: u64 = 256;
const LAST_INODE: u64 = u64::MAX - 256;

/// Calls an ioctl of the btrfs family.
///
/// # Safety
/// `T` must be the structure, in layout and size, that `request` takes.
unsafe fn call<T>(fd: BorrowedFd<'_>, request: libc::c_ulong, arg: &mut T) -> io::Result<()> {
    // SAFETY: the caller vouches for the type; the reference is valid and exclusive for the call.
    match unsafe { libc::ioctl(fd.as_raw_fd(), request, arg as *mut T) } {
        0 => Ok(()),
        -1 => Err(io::Error::last_os_error()),
        // Some btrfs ioctls answer with positive codes of their own.
        code => Err(io::Error::other(format!("btrfs refused with code {code}"))),
    }
}

fn name_into(buffer: &mut [u8], name: &OsStr) -> io::Result<()> {
    let bytes = name.as_bytes();
    if bytes.is_empty() || bytes.len() > 255 || bytes.contains(&b'/') || bytes == b"." || bytes == b".." {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    buffer[..bytes.len()].copy_from_slice(bytes);
    Ok(())
}

fn vol_args(fd: i64, flags: u64, name: &OsStr) -> io::Result<Box<VolArgsV2>> {
    let mut args = Box::new(VolArgsV2 {
        fd,
        transid: 0,
        flags,
        unused: [0; 4],
        name: [0; 4040],
    });
    name_into(&mut args.name, name)?;
    Ok(args)
}

/// Makes an empty subvolume `name` in directory `parent`.
pub fn create_subvolume(parent: BorrowedFd<'_>, name: &OsStr) -> io::Result<()> {
    let mut args = vol_args(0, 0, name)?;
    // SAFETY: BTRFS_IOC_SUBVOL_CREATE_V2 takes btrfs_ioctl_vol_args_v2.
    unsafe { call(parent, ioc(WRITE, 24, size_of::<VolArgsV2>()), &mut *args) }
}

/// Makes a snapshot of the subvolume `source` as `name` in directory `parent`, durably.
pub fn snapshot(
    source: BorrowedFd<'_>,
    parent: BorrowedFd<'_>,
    name: &OsStr,
    read_only: bool,
) -> io::Result<()> {
    let flags = if read_only { SUBVOL_RDONLY } else { 0 };
    let mut args = vol_args(i64::from(source.as_raw_fd()), flags, name)?;
    // SAFETY: BTRFS_IOC_SNAP_CREATE_V2 takes btrfs_ioctl_vol_args_v2.
    unsafe { call(parent, ioc(WRITE, 23, size_of::<VolArgsV2>()), &mut *args) }
}

/// Removes the subvolume `name` from directory `parent`. Its space comes back in the background.
pub fn delete_subvolume(parent: BorrowedFd<'_>, name: &OsStr) -> io::Result<()> {
    let mut args = vol_args(0, 0, name)?;
    // SAFETY: BTRFS_IOC_SNAP_DESTROY_V2 takes btrfs_ioctl_vol_args_v2.
    unsafe { call(parent, ioc(WRITE, 63, size_of::<VolArgsV2>()), &mut *args) }
}

pub fn set_read_only(subvolume: BorrowedFd<'_>, read_only: bool) -> io::Result<()> {
    let mut flags: u64 = 0;
    // SAFETY: BTRFS_IOC_SUBVOL_GETFLAGS writes one u64.
    unsafe { call(subvolume, ioc(READ, 25, 8), &mut flags) }?;
    flags = if read_only {
        flags | SUBVOL_RDONLY
    } else {
        flags & !SUBVOL_RDONLY
    };
    // SAFETY: BTRFS_IOC_SUBVOL_SETFLAGS reads one u64.
    unsafe { call(subvolume, ioc(WRITE, 26, 8), &mut flags) }
}

/// The number of the subvolume that an open file lies in.
pub fn subvolume_id(file: BorrowedFd<'_>) -> io::Result<u64> {
    let mut args = Box::new(InoLookup {
        treeid: 0,
        objectid: 256,
        name: [0; 4080],
    });
    // SAFETY: BTRFS_IOC_INO_LOOKUP takes btrfs_ioctl_ino_lookup_args.
    unsafe { call(file, ioc(READ | WRITE, 18, size_of::<InoLookup>()), &mut *args) }?;
    Ok(args.treeid)
}

/// A number that the filesystem raises with every commit that changed the subvolume.
pub fn generation(subvolume: BorrowedFd<'_>) -> io::Result<u64> {
    Ok(info(subvolume)?.generation)
}

/// The generation of the last change of a file in the subvolume. Unlike [`generation`], copies that are made of it do not raise it.
pub fn changed(subvolume: BorrowedFd<'_>) -> io::Result<u64> {
    Ok(info(subvolume)?.transids[0])
}

/// Where a subvolume comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Origin {
    pub uuid: [u8; 16],
    /// Of the subvolume that it was made as a copy of; zeroes if of none.
    pub parent: [u8; 16],
    /// The generation at which it was made.
    pub made: u64,
}

pub fn origin(subvolume: BorrowedFd<'_>) -> io::Result<Origin> {
    let info = info(subvolume)?;
    Ok(Origin {
        uuid: info.uuids[0],
        parent: info.uuids[1],
        made: info.transids[1],
    })
}

fn info(subvolume: BorrowedFd<'_>) -> io::Result<Box<SubvolInfo>> {
    // SAFETY: all-zero is a valid value of this plain C structure.
    let mut info: Box<SubvolInfo> = Box::new(unsafe { std::mem::zeroed() });
    // SAFETY: BTRFS_IOC_GET_SUBVOL_INFO writes one btrfs_ioctl_get_subvol_info_args.
    let answered = unsafe { call(subvolume, ioc(READ, 60, size_of::<SubvolInfo>()), &mut *info) };
    match answered {
        // This one answers 1 in place of 0 where its search ended beside the key; the structure is filled all the same.
        Err(e) if e.raw_os_error().is_some() => Err(e),
        _ => Ok(info),
    }
}

/// Whether an inode of the subvolume, of those that still exist, has changed since the commit `generation`. Every
/// change that anybody could see leaves such a mark: of a file in itself, of a name in its directory. A deleted file that
/// goes with its last descriptor leaves none.
pub fn changed_since(subvolume: BorrowedFd<'_>, generation: u64) -> io::Result<bool> {
    // An inode begins with the commit that made it, and the one that changed it last.
    let mut changed = false;
    items_since(subvolume, generation, |kind, item| {
        changed |= kind == INODE_ITEM && field(item, 8) > generation;
        !changed
    })?;
    Ok(changed)
}

/// Bytes of the subvolume's files that were written since the commit `generation` and are still there.
pub fn written_since(subvolume: BorrowedFd<'_>, generation: u64) -> io::Result<u64> {
    let mut written = 0;
    items_since(subvolume, generation, |kind, item| {
        // The commit that wrote it, and its kind; small content follows in the item itself, other is somewhere, or a hole.
        if kind == EXTENT_DATA && field(item, 0) > generation {
            written += match item.get(20) {
                Some(&INLINE) => item.len().saturating_sub(21) as u64,
                _ if field(item, 21) == 0 => 0,
                _ => field(item, 45),
            };
        }
        true
    })?;
    Ok(written)
}

fn field(bytes: &[u8], at: usize) -> u64 {
    let eight = bytes.get(at..at + 8).and_then(|b| b.try_into().ok());
    eight.map(u64::from_le_bytes).unwrap_or_default()
}

/// Shows `visit` the kind and the content of items of the subvolume, until it says false: of all that the blocks hold which were
/// written since the commit `generation`, so that some may be older.
fn items_since(
    subvolume: BorrowedFd<'_>,
    generation: u64,
    mut visit: impl FnMut(u32, &[u8]) -> bool,
) -> io::Result<()> {
    let mut search = Box::new(Search {
        tree_id: 0,
        min_objectid: FIRST_INODE,
        max_objectid: LAST_INODE,
        min_offset: 0,
        max_offset: u64::MAX,
        min_transid: generation + 1,
        max_transid: u64::MAX,
        min_type: 0,
        max_type: u32::MAX,
        nr_items: 0,
        unused: [0; 9],
        buf_size: SEARCH_BUFFER as u64,
        buffer: [0; SEARCH_BUFFER],
    });
    loop {
        search.nr_items = u32::MAX;
        // SAFETY: BTRFS_IOC_TREE_SEARCH_V2 takes btrfs_ioctl_search_args_v2, which ends in a buffer of `buf_size` bytes.
        unsafe { call(subvolume, ioc(READ | WRITE, 17, SEARCH_HEAD), &mut *search) }?;
        let mut items = &search.buffer[..];
        let mut last = None;
        for _ in 0..search.nr_items {
            let (head, rest) = items.split_at(SEARCH_ITEM_HEAD);
            let (objectid, offset, kind_and_length) = (field(head, 8), field(head, 16), field(head, 24));
            let (kind, length) = (kind_and_length as u32, (kind_and_length >> 32) as usize);
            let (item, following) = rest.split_at(length);
            if !visit(kind, item) {
                return Ok(());
            }
            last = Some((objectid, kind, offset));
            items = following;
        }
        // The search goes on behind the last item.
        match last {
            None => return Ok(()),
            Some((objectid, kind, u64::MAX)) => {
                (search.min_objectid, search.min_type, search.min_offset) = (objectid, kind + 1, 0);
            }
            Some((objectid, kind, offset)) => {
                (search.min_objectid, search.min_type, search.min_offset) = (objectid, kind, offset + 1);
            }
        }
    }
}

/// Turns quotas on: the simple kind, whose cost does not grow with the number of snapshots, where the
/// kernel has it, and the full kind elsewhere. `false` if they were on already.
pub fn enable_quota(filesystem: BorrowedFd<'_>) -> io::Result<bool> {
    let request = ioc(READ | WRITE, 40, size_of::<QuotaCtl>());
    for cmd in [QUOTA_ENABLE_SIMPLE, QUOTA_ENABLE] {
        let mut args = QuotaCtl { cmd, status: 0 };
        // SAFETY: BTRFS_IOC_QUOTA_CTL takes btrfs_ioctl_quota_ctl_args.
        match unsafe { call(filesystem, request, &mut args) } {
            Ok(()) => return Ok(true),
            Err(e) if e.raw_os_error() == Some(libc::EEXIST) => return Ok(false),
            Err(e) if cmd == QUOTA_ENABLE_SIMPLE && e.raw_os_error() == Some(libc::EINVAL) => continue,
            Err(e) => return Err(e),
        }
    }
    Err(io::ErrorKind::Unsupported.into())
}

/// What quotas are counted for: a subvolume, or a group of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Counted {
    Subvolume(u64),
    /// By a number of 48 bits that the caller chooses.
    Group(u64),
}

impl Counted {
    fn number(self) -> u64 {
        match self {
            Self::Subvolume(id) => id,
            Self::Group(number) => 1 << 48 | number & ((1 << 48) - 1),
        }
    }

    /// The name of its directory under /sys/fs/btrfs/UUID/qgroups.
    pub fn directory(self) -> String {
        format!("{}_{}", self.number() >> 48, self.number() & ((1 << 48) - 1))
    }
}

/// Makes the group `number` if it is not there, and counts the subvolume `id` in it.
pub fn join_group(filesystem: BorrowedFd<'_>, id: u64, number: u64) -> io::Result<()> {
    let there = |done: io::Result<()>| match done {
        Err(e) if e.raw_os_error() == Some(libc::EEXIST) => Ok(()),
        done => done,
    };
    let group = Counted::Group(number).number();
    let mut create = QgroupCreate {
        create: 1,
        qgroupid: group,
    };
    // SAFETY: BTRFS_IOC_QGROUP_CREATE takes btrfs_ioctl_qgroup_create_args.
    there(unsafe { call(filesystem, ioc(WRITE, 42, size_of::<QgroupCreate>()), &mut create) })?;
    let mut assign = QgroupAssign {
        assign: 1,
        source: id,
        destination: group,
    };
    // SAFETY: BTRFS_IOC_QGROUP_ASSIGN takes btrfs_ioctl_qgroup_assign_args.
    there(unsafe { call(filesystem, ioc(WRITE, 41, size_of::<QgroupAssign>()), &mut assign) })
}

/// Removes the group `number`. One that still counts something stays, with an error.
pub fn remove_group(filesystem: BorrowedFd<'_>, number: u64) -> io::Result<()> {
    let mut args = QgroupCreate {
        create: 0,
        qgroupid: Counted::Group(number).number(),
    };
    // SAFETY: BTRFS_IOC_QGROUP_CREATE takes btrfs_ioctl_qgroup_create_args.
    unsafe { call(filesystem, ioc(WRITE, 42, size_of::<QgroupCreate>()), &mut args) }
}

/// Limits what a subvolume or a group may hold for itself alone.
pub fn limit(filesystem: BorrowedFd<'_>, counted: Counted, bytes: u64) -> io::Result<()> {
    let mut args = QgroupLimit {
        qgroupid: counted.number(),
        flags: LIMIT_MAX_EXCLUSIVE,
        max_rfer: 0,
        max_excl: bytes,
        rsv_rfer: 0,
        rsv_excl: 0,
    };
    // SAFETY: BTRFS_IOC_QGROUP_LIMIT takes btrfs_ioctl_qgroup_limit_args.
    unsafe { call(filesystem, ioc(READ, 43, size_of::<QgroupLimit>()), &mut args) }
}

/// Identifies a filesystem; names its directory under /sys/fs/btrfs.
pub fn uuid(filesystem: BorrowedFd<'_>) -> io::Result<String> {
    // SAFETY: all-zero is a valid value of this plain C structure.
    let mut info: Box<FsInfo> = Box::new(unsafe { std::mem::zeroed() });
    // SAFETY: BTRFS_IOC_FS_INFO writes one btrfs_ioctl_fs_info_args of 1024 bytes.
    unsafe { call(filesystem, ioc(READ, 31, size_of::<FsInfo>()), &mut *info) }?;
    Ok(crate::uuid::text(info.fsid))
}

/// Grows the filesystem to the size of its device.
pub fn grow_to_device(filesystem: BorrowedFd<'_>) -> io::Result<()> {
    let mut args = Box::new(VolArgs {
        fd: 0,
        name: [0; 4088],
    });
    args.name[..3].copy_from_slice(b"max");
    // SAFETY: BTRFS_IOC_RESIZE takes btrfs_ioctl_vol_args.
    unsafe { call(filesystem, ioc(WRITE, 3, size_of::<VolArgs>()), &mut *args) }
}

/// Waits until everything written so far is on disk.
pub fn sync(filesystem: &File) -> io::Result<()> {
    Ok(rustix::fs::syncfs(filesystem)?)
}

/// Whether a file lies on btrfs.
pub fn is_btrfs(file: BorrowedFd<'_>) -> io::Result<bool> {
    const BTRFS_SUPER_MAGIC: i64 = 0x9123_683E;
    Ok(rustix::fs::fstatfs(file)?.f_type as i64 == BTRFS_SUPER_MAGIC)
}

const _: () = assert!(size_of::<VolArgsV2>() == 4096);
const _: () = assert!(size_of::<VolArgs>() == 4096);
const _: () = assert!(size_of::<FsInfo>() == 1024);
const _: () = assert!(size_of::<InoLookup>() == 4096);
const _: () = assert!(size_of::<SubvolInfo>() == 504);
const _: () = assert!(std::mem::offset_of!(Search, buf_size) == 104);
const _: () = assert!(std::mem::offset_of!(Search, buffer) == SEARCH_HEAD);
