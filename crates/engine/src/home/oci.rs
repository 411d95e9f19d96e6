//! Finds out what an uploaded archive is: an OCI image layout, what `docker save` writes, or a root
//! filesystem. Nothing is extracted: an image's layers are given as windows of the upload.
//!
//! - [`archive`] indexes the archive's entries, or tells early that they are a root filesystem's.
//! - [`manifest`] follows the image's own documents from its index to its layers.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

use archive::{Archive, Indexed};

use crate::Layer;

mod archive;
mod manifest;
#[cfg(test)]
mod tests;

impl Layer {
    pub fn whole(file: File) -> io::Result<Self> {
        let length = file.metadata()?.len();
        Ok(Self {
            file,
            offset: 0,
            length,
        })
    }

    /// Reads the window, independently of the file's own position, which others may share.
    pub fn reader(&self) -> impl Read + '_ {
        Window {
            file: &self.file,
            at: self.offset,
            end: self.offset + self.length,
        }
    }
}

struct Window<'a> {
    file: &'a File,
    at: u64,
    end: u64,
}

impl Read for Window<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let want = (self.end - self.at).min(buf.len() as u64) as usize;
        let got = self.file.read_at(&mut buf[..want], self.at)?;
        self.at += got as u64;
        Ok(got)
    }
}

/// What an upload turned out to be.
#[derive(Debug)]
pub enum Upload {
    Image(Image),
    Rootfs(Layer),
}

/// A container image whose documents and layers are all there and match their digests.
#[derive(Debug)]
pub struct Image {
    file: File,
    pub layers: Vec<LayerInfo>,
    pub config: ImageConfig,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerInfo {
    pub offset: u64,
    pub size: u64,
    pub media_type: String,
}

/// How the image wants to be run.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ImageConfig {
    pub env: BTreeMap<String, String>,
    pub user: Option<String>,
    pub workdir: Option<String>,
    pub entrypoint: Vec<String>,
    pub cmd: Vec<String>,
}

impl Image {
    /// The layer `n`, counted from the lowest.
    pub fn layer(&self, n: usize) -> io::Result<Layer> {
        let info = self.layers.get(n).ok_or(io::ErrorKind::NotFound)?;
        Ok(Layer {
            file: self.file.try_clone()?,
            offset: info.offset,
            length: info.size,
        })
    }
}

#[derive(Debug, thiserror::Error)]
pub enum OciError {
    #[error("the upload cannot be read")]
    Read(#[from] io::Error),
    #[error("the upload is not a tar archive: {0}")]
    NotAnArchive(String),
    #[error("the image is not sound: {0}")]
    Malformed(String),
    #[error("the image's {what} does not match its digest {digest}")]
    Digest { what: String, digest: String },
    #[error("the image has nothing for linux/{wanted}; it is for {found}")]
    Platform { wanted: &'static str, found: String },
    #[error("the archive holds {0} images; save one of them alone")]
    Several(usize),
    #[error("the upload needs more than the {room} bytes that are free")]
    NoRoom { room: u64 },
}

pub type Result<T, E = OciError> = std::result::Result<T, E>;

/// Finds out what `upload` is. A compressed image archive is first unpacked into an unnamed file in
/// `tmp`, of at most `room` bytes. Reads the whole upload to check its digests; blocks.
pub fn analyse(upload: File, tmp: &Path, room: u64) -> Result<Upload> {
    let file = match archive::compression(&upload)? {
        None => upload,
        Some(compression) => {
            if !archive::looks_like_image(archive::decompress(&upload, compression)?)? {
                return Ok(Upload::Rootfs(Layer::whole(upload)?));
            }
            plain_copy(archive::decompress(&upload, compression)?, tmp, room)?
        }
    };
    match archive::index(&file)? {
        Indexed::Rootfs => Ok(Upload::Rootfs(Layer::whole(file)?)),
        Indexed::Image(entries) => {
            let (layers, config) = manifest::resolve(&Archive { file: &file, entries })?;
            Ok(Upload::Image(Image { file, layers, config }))
        }
    }
}

/// Bytes that are free for ordinary use on the filesystem of `dir`.
pub fn room(dir: &Path) -> io::Result<u64> {
    let stat = rustix::fs::statvfs(dir)?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

fn plain_copy(mut from: impl Read, tmp: &Path, room: u64) -> Result<File> {
    let mut copy = tempfile::tempfile_in(tmp)?;
    let mut buffer = vec![0; 256 * 1024];
    let mut written = 0u64;
    loop {
        let n = from.read(&mut buffer)?;
        if n == 0 {
            break;
        }
        written += n as u64;
        if written > room {
            return Err(OciError::NoRoom { room });
        }
        copy.write_all(&buffer[..n])?;
    }
    copy.rewind()?;
    Ok(copy)
}
