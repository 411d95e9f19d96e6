//! A volume as the machine's kernel sees it. Nothing waits here: a request goes to the file server, and its answer to the kernel.

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::SystemTime;

use dorm_proto::volume::{Change, MAX_DATA, Reply, Request as Ask};
use fuser::{
    BsdFileFlags, Errno, FileHandle, Filesystem, FopenFlags, Generation, INodeNo, InitFlags, KernelConfig,
    LockOwner, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory, ReplyEmpty,
    ReplyEntry, ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite, ReplyXattr, Request, TimeOrNow, WriteFlags,
};

use super::convert::{is_secret, new_time, of_users, opened_with, owner};
use super::volume::{BELIEVED, Volume};

/// Requests that the kernel may have under way by itself, reading ahead or writing back.
const UNDER_WAY: u16 = 32;

impl Filesystem for Volume {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        for wanted in [
            InitFlags::FUSE_ASYNC_READ,
            InitFlags::FUSE_BIG_WRITES,
            InitFlags::FUSE_MAX_PAGES,
            InitFlags::FUSE_AUTO_INVAL_DATA,
            InitFlags::FUSE_PARALLEL_DIROPS,
        ] {
            // What a kernel has not, it does without.
            let _ = config.add_capabilities(wanted);
        }
        let _ = config.set_max_write(MAX_DATA as u32);
        let _ = config.set_max_background(UNDER_WAY);
        Ok(())
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        if is_secret(parent, name) {
            return reply.error(Errno::ENOENT);
        }
        let ask = Ask::Lookup(self.tree().place(parent.0, name.as_bytes()));
        self.ask_entry(&ask, &[], parent, name, reply);
    }

    fn forget(&self, _: &Request, inode: INodeNo, times: u64) {
        self.tree().forget(inode.0, times);
    }

    fn getattr(&self, _: &Request, inode: INodeNo, handle: Option<FileHandle>, reply: ReplyAttr) {
        let ask = Ask::Attributes(self.tree().file(inode.0, handle.map(|handle| handle.0)));
        self.ask_attributes(&ask, inode, reply);
    }

    fn setattr(
        &self,
        _: &Request,
        inode: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        accessed: Option<TimeOrNow>,
        modified: Option<TimeOrNow>,
        _: Option<SystemTime>,
        handle: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let ask = Ask::Change {
            file: self.tree().file(inode.0, handle.map(|handle| handle.0)),
            change: Change {
                mode,
                user: uid,
                group: gid,
                size,
                accessed: accessed.map(new_time),
                modified: modified.map(new_time),
            },
        };
        self.ask_attributes(&ask, inode, reply);
    }

    fn readlink(&self, _: &Request, inode: INodeNo, reply: ReplyData) {
        let ask = Ask::ReadLink(self.tree().node(inode.0));
        self.channel.ask(&ask, &[], |outcome| match outcome {
            Ok((_, target)) => reply.data(&target),
            Err(error) => reply.error(Errno::from_i32(error)),
        });
    }

    fn mknod(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _umask: u32,
        device: u32,
        reply: ReplyEntry,
    ) {
        let ask = Ask::Make {
            place: self.tree().place(parent.0, name.as_bytes()),
            mode,
            device,
            owner: owner(request),
        };
        self.ask_entry(&ask, &[], parent, name, reply);
    }

    fn mkdir(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        reply: ReplyEntry,
    ) {
        let mode = mode & 0o7777 | libc::S_IFDIR;
        self.mknod(request, parent, name, mode, umask, 0, reply);
    }

    fn unlink(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let name = name.as_bytes().to_vec();
        let tree = self.tree();
        let hidden = tree
            .must_hide(parent.0, &name)
            .map(|inode| (inode, Volume::hidden_name(inode)));
        let ask = Ask::Remove {
            place: tree.place(parent.0, &name),
            hide: hidden.as_ref().map(|(_, hidden)| hidden.clone()),
        };
        drop(tree);
        let volume = self.clone();
        self.channel.ask(&ask, &[], move |outcome| match outcome {
            Ok(_) => {
                let mut tree = volume.tree();
                tree.gone(parent.0, &name);
                if let Some((inode, hidden)) = hidden {
                    tree.hidden(inode, hidden);
                }
                drop(tree);
                reply.ok();
            }
            Err(error) => reply.error(Errno::from_i32(error)),
        });
    }

    fn rmdir(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let (volume, name) = (self.clone(), name.as_bytes().to_vec());
        let ask = Ask::RemoveFolder(self.tree().place(parent.0, &name));
        self.channel.ask(&ask, &[], move |outcome| match outcome {
            Ok(_) => {
                volume.tree().gone(parent.0, &name);
                reply.ok();
            }
            Err(error) => reply.error(Errno::from_i32(error)),
        });
    }

    fn symlink(&self, request: &Request, parent: INodeNo, name: &OsStr, target: &Path, reply: ReplyEntry) {
        let ask = Ask::Symlink {
            place: self.tree().place(parent.0, name.as_bytes()),
            owner: owner(request),
        };
        self.ask_entry(&ask, target.as_os_str().as_bytes(), parent, name, reply);
    }

    fn rename(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        new_parent: INodeNo,
        new_name: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let (name, new_name) = (name.as_bytes().to_vec(), new_name.as_bytes().to_vec());
        let tree = self.tree();
        let inode = tree.at(parent.0, &name).unwrap_or(0);
        let replaced = match flags.is_empty() {
            true => tree
                .must_hide(new_parent.0, &new_name)
                .filter(|replaced| *replaced != inode)
                .map(|replaced| (replaced, Volume::hidden_name(replaced))),
            false => None,
        };
        let ask = Ask::Rename {
            from: tree.place(parent.0, &name),
            to: tree.place(new_parent.0, &new_name),
            inode,
            flags: flags.bits(),
            hide: replaced.as_ref().map(|(_, hidden)| hidden.clone()),
        };
        drop(tree);
        let volume = self.clone();
        self.channel.ask(&ask, &[], move |outcome| match outcome {
            Ok(_) => {
                let mut tree = volume.tree();
                let exchanged = flags.contains(RenameFlags::RENAME_EXCHANGE);
                tree.renamed((parent.0, &name), (new_parent.0, &new_name), exchanged);
                if let Some((inode, hidden)) = replaced {
                    tree.hidden(inode, hidden);
                }
                drop(tree);
                reply.ok();
            }
            Err(error) => reply.error(Errno::from_i32(error)),
        });
    }

    fn link(&self, _: &Request, inode: INodeNo, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let tree = self.tree();
        let ask = Ask::Link {
            node: tree.node(inode.0),
            place: tree.place(parent.0, name.as_bytes()),
        };
        drop(tree);
        self.ask_entry(&ask, &[], parent, name, reply);
    }

    fn open(&self, _: &Request, inode: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let mut tree = self.tree();
        let handle = tree.new_handle();
        let mut file = tree.file(inode.0, None);
        drop(tree);
        let open_flags = flags.0.cast_unsigned();
        (file.handle, file.flags) = (handle, open_flags);
        let volume = self.clone();
        self.channel
            .ask(&Ask::Open(file), &[], move |outcome| match outcome {
                Ok(_) => {
                    volume.tree().opened(inode.0, handle, open_flags);
                    reply.opened(FileHandle(handle), opened_with(flags.0));
                }
                Err(error) => reply.error(Errno::from_i32(error)),
            });
    }

    fn create(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _umask: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        let mut tree = self.tree();
        let handle = tree.new_handle();
        let open_flags = flags.cast_unsigned();
        let ask = Ask::Create {
            place: tree.place(parent.0, name.as_bytes()),
            mode,
            flags: open_flags,
            owner: owner(request),
            handle,
        };
        drop(tree);
        let (volume, name) = (self.clone(), name.to_owned());
        self.channel.ask(&ask, &[], move |outcome| {
            match volume.entry(outcome, parent, &name) {
                Ok(made) => {
                    volume.tree().opened(made.ino.0, handle, open_flags);
                    let flags = opened_with(flags);
                    reply.created(&BELIEVED, &made, Generation(0), FileHandle(handle), flags);
                }
                Err(error) => reply.error(error),
            }
        });
    }

    fn read(
        &self,
        _: &Request,
        inode: INodeNo,
        handle: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let ask = Ask::Read {
            file: self.tree().file(inode.0, Some(handle.0)),
            offset,
            size,
        };
        self.channel.ask(&ask, &[], |outcome| match outcome {
            Ok((_, data)) => reply.data(&data),
            Err(error) => reply.error(Errno::from_i32(error)),
        });
    }

    fn write(
        &self,
        _: &Request,
        inode: INodeNo,
        handle: FileHandle,
        offset: u64,
        data: &[u8],
        write_flags: WriteFlags,
        flags: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let is_page = write_flags.contains(WriteFlags::FUSE_WRITE_CACHE);
        let ask = Ask::Write {
            file: self.tree().file(inode.0, Some(handle.0)),
            offset,
            // Pages of a mapping have their place, whichever handle they are written by.
            append: flags.0 & libc::O_APPEND != 0 && !is_page,
        };
        self.channel.ask(&ask, data, |outcome| match outcome {
            Ok((Reply::Number(written), _)) => reply.written(written as u32),
            Ok(_) => reply.error(Errno::EIO),
            Err(error) => reply.error(Errno::from_i32(error)),
        });
    }

    /// Everything that was written is with the server already.
    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.ok();
    }

    fn release(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        _: OpenFlags,
        _: Option<LockOwner>,
        _: bool,
        reply: ReplyEmpty,
    ) {
        let removed = self.tree().closed(handle.0);
        // Nobody waits for either.
        self.channel.ask(&Ask::Close { handle: handle.0 }, &[], |_| ());
        if let Some(hidden) = removed {
            let volume = self.number;
            self.channel.ask(&Ask::Forget { volume, hidden }, &[], |_| ());
        }
        reply.ok();
    }

    fn fsync(&self, _: &Request, inode: INodeNo, handle: FileHandle, data_only: bool, reply: ReplyEmpty) {
        let file = self.tree().file(inode.0, Some(handle.0));
        self.ask_done(&Ask::Sync { file, data_only }, &[], reply);
    }

    fn fsyncdir(&self, _: &Request, inode: INodeNo, _: FileHandle, data_only: bool, reply: ReplyEmpty) {
        let file = self.tree().file(inode.0, None);
        self.ask_done(&Ask::Sync { file, data_only }, &[], reply);
    }

    fn opendir(&self, _: &Request, inode: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        let mut tree = self.tree();
        let handle = tree.new_handle();
        let ask = Ask::Attributes(tree.file(inode.0, None));
        drop(tree);
        // The kernel looks again for what is stale when it opens it, and not when it reads it.
        self.channel.ask(&ask, &[], move |outcome| match outcome {
            Ok(_) => reply.opened(FileHandle(handle), FopenFlags::empty()),
            Err(error) => reply.error(Errno::from_i32(error)),
        });
    }

    fn readdir(&self, _: &Request, inode: INodeNo, handle: FileHandle, offset: u64, reply: ReplyDirectory) {
        match self.has_read(handle, offset) {
            true => self.list(handle, reply),
            false => self.read_folder(inode, handle, offset, reply),
        }
    }

    fn releasedir(&self, _: &Request, _: INodeNo, handle: FileHandle, _: OpenFlags, reply: ReplyEmpty) {
        self.forget_listing(handle);
        reply.ok();
    }

    fn statfs(&self, _: &Request, _: INodeNo, reply: ReplyStatfs) {
        let ask = Ask::Space { volume: self.number };
        self.channel.ask(&ask, &[], |outcome| match outcome {
            Ok((Reply::Space(space), _)) => {
                let size = space.block_size as u32;
                reply.statfs(
                    space.blocks,
                    space.free,
                    space.available,
                    space.files,
                    space.files_free,
                    size,
                    space.longest_name as u32,
                    size,
                );
            }
            Ok(_) => reply.error(Errno::EIO),
            Err(error) => reply.error(Errno::from_i32(error)),
        });
    }

    fn setxattr(
        &self,
        _: &Request,
        inode: INodeNo,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        _position: u32,
        reply: ReplyEmpty,
    ) {
        let Some(name) = of_users(name) else {
            return reply.error(Errno::EOPNOTSUPP);
        };
        let ask = Ask::SetAttribute {
            file: self.tree().file(inode.0, None),
            name,
            flags: flags.cast_unsigned(),
        };
        self.ask_done(&ask, value, reply);
    }

    fn getxattr(&self, _: &Request, inode: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        // The kernel asks for others at every write.
        let Some(name) = of_users(name) else {
            return reply.error(Errno::EOPNOTSUPP);
        };
        let file = self.tree().file(inode.0, None);
        self.ask_attribute(&Ask::GetAttribute { file, name }, size, reply);
    }

    fn listxattr(&self, _: &Request, inode: INodeNo, size: u32, reply: ReplyXattr) {
        let ask = Ask::ListAttributes(self.tree().file(inode.0, None));
        self.ask_attribute(&ask, size, reply);
    }

    fn removexattr(&self, _: &Request, inode: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let Some(name) = of_users(name) else {
            return reply.error(Errno::EOPNOTSUPP);
        };
        let file = self.tree().file(inode.0, None);
        self.ask_done(&Ask::RemoveAttribute { file, name }, &[], reply);
    }

    fn fallocate(
        &self,
        _: &Request,
        inode: INodeNo,
        handle: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let ask = Ask::Allocate {
            file: self.tree().file(inode.0, Some(handle.0)),
            mode: mode.cast_unsigned(),
            offset,
            length,
        };
        self.ask_done(&ask, &[], reply);
    }

    fn lseek(
        &self,
        _: &Request,
        inode: INodeNo,
        handle: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        let ask = Ask::Seek {
            file: self.tree().file(inode.0, Some(handle.0)),
            offset: offset.cast_unsigned(),
            whence: whence.cast_unsigned(),
        };
        self.channel.ask(&ask, &[], |outcome| match outcome {
            Ok((Reply::Number(found), _)) => reply.offset(found.cast_signed()),
            Ok(_) => reply.error(Errno::EIO),
            Err(error) => reply.error(Errno::from_i32(error)),
        });
    }
}
