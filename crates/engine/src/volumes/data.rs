//! What is in files and folders.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use dorm_proto::volume::{Attributes, Entry, File, MAX_DATA, put_entry};
use rustix::fs::{FallocateFlags, FileType, OFlags, RawDir, SeekFrom};
use rustix::io::{Errno, ReadWriteFlags};

use super::Server;
use super::walk::attributes;

/// What is read of a folder at once.
const LISTED: usize = 32 << 10;

impl Server {
    pub(super) fn open(&self, file: &File) -> Result<Attributes, Errno> {
        let opened = self.open_handle(file)?;
        Ok(attributes(&rustix::fs::fstat(&*opened)?))
    }

    pub(super) fn read(&self, file: &File, offset: u64, size: u32) -> Result<Vec<u8>, Errno> {
        let opened = self.opened_again(file)?;
        let mut data = vec![0; MAX_DATA.min(size as usize)];
        let mut length = 0;
        while length < data.len() {
            match rustix::io::pread(&*opened, &mut data[length..], offset + length as u64) {
                Ok(0) => break,
                Ok(more) => length += more,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error),
            }
        }
        data.truncate(length);
        Ok(data)
    }

    /// How much of it was written.
    pub(super) fn write(
        &self,
        file: &File,
        offset: u64,
        append: bool,
        again: bool,
        data: &[u8],
    ) -> Result<u64, Errno> {
        let opened = self.opened_again(file)?;
        if append && again && self.ends_with(file, data)? {
            return Ok(data.len() as u64);
        }
        let mut length = 0;
        while length < data.len() {
            let rest = &data[length..];
            let written = match append {
                // Whatever others have appended since the machine's kernel looked.
                true => rustix::io::pwritev2(&*opened, &[IoSlice::new(rest)], 0, ReadWriteFlags::APPEND),
                false => rustix::io::pwrite(&*opened, rest, offset + length as u64),
            };
            match written {
                Ok(0) => break,
                Ok(more) => length += more,
                Err(Errno::INTR) => {}
                Err(_) if length > 0 => break,
                Err(error) => return Err(error),
            }
        }
        Ok(length as u64)
    }

    /// Whether the end of a file is what is to be appended: by a server that did not come to say so.
    fn ends_with(&self, file: &File, data: &[u8]) -> Result<bool, Errno> {
        let opened = self.open_node(&file.node, OFlags::RDONLY)?;
        let size = rustix::fs::fstat(&opened)?.st_size.cast_unsigned();
        let Some(from) = size.checked_sub(data.len() as u64) else {
            return Ok(false);
        };
        let mut end = vec![0; data.len()];
        let mut length = 0;
        while length < end.len() {
            match rustix::io::pread(&opened, &mut end[length..], from + length as u64)? {
                0 => return Ok(false),
                more => length += more,
            }
        }
        Ok(end == data)
    }

    pub(super) fn sync(&self, file: &File, data_only: bool) -> Result<(), Errno> {
        let opened = match self.open_already(file) {
            Some(held) => held,
            None => Arc::new(self.open_node(&file.node, OFlags::RDONLY)?),
        };
        match data_only {
            true => rustix::fs::fdatasync(&*opened),
            false => rustix::fs::fsync(&*opened),
        }
    }

    pub(super) fn allocate(&self, file: &File, mode: u32, offset: u64, length: u64) -> Result<(), Errno> {
        let mode = FallocateFlags::from_bits(mode).ok_or(Errno::OPNOTSUPP)?;
        rustix::fs::fallocate(&*self.opened_again(file)?, mode, offset, length)
    }

    pub(super) fn seek(&self, file: &File, offset: u64, whence: u32) -> Result<u64, Errno> {
        let to = match whence.cast_signed() {
            libc::SEEK_DATA => SeekFrom::Data(offset),
            libc::SEEK_HOLE => SeekFrom::Hole(offset),
            _ => return Err(Errno::INVAL),
        };
        rustix::fs::seek(&*self.opened_again(file)?, to)
    }

    /// Some entries of a folder, those behind `offset`; none at its end.
    pub(super) fn list(&self, file: &File, offset: u64) -> Result<Vec<u8>, Errno> {
        let folder = self.open_node(&file.node, OFlags::RDONLY | OFlags::DIRECTORY)?;
        rustix::fs::seek(&folder, SeekFrom::Start(offset))?;
        let mut buffer = vec![MaybeUninit::uninit(); LISTED];
        let mut entries = RawDir::new(&folder, &mut buffer);
        let mut data = Vec::new();
        while let Some(entry) = entries.next() {
            let entry = entry?;
            let kind = match entry.file_type() {
                FileType::Unknown => 0,
                known => (known.as_raw_mode() >> 12) as u8,
            };
            let entry = Entry {
                inode: entry.ino(),
                next: entry.next_entry_cookie(),
                kind,
                name: entry.file_name().to_bytes().to_vec(),
            };
            put_entry(&entry, &mut data);
            if entries.is_buffer_empty() {
                break;
            }
        }
        Ok(data)
    }

    /// What the machine has open, opened again if this server does not know of it.
    fn opened_again(&self, file: &File) -> Result<Arc<OwnedFd>, Errno> {
        match self.open_already(file) {
            Some(held) => Ok(held),
            None if file.handle == 0 => Err(Errno::BADF),
            None => self.open_handle(file),
        }
    }

    fn open_handle(&self, file: &File) -> Result<Arc<OwnedFd>, Errno> {
        let opened = self.open_node(&file.node, OFlags::from_bits_retain(file.flags) & OFlags::ACCMODE)?;
        Ok(self.held().insert(file.handle, opened))
    }
}
