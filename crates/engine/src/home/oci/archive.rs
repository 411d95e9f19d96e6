//! The entries of an image archive by name, without their content.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufReader, Read, Seek};
use std::os::unix::fs::FileExt;

use sha2::{Digest, Sha256};
use tar::EntryType;

use super::{OciError, Result, Window};
use crate::home::unpack::Compression;

/// Image archives hold some dozens of entries; more than this is none.
const MAX_ENTRIES: usize = 100_000;
/// Longest manifest, index or configuration that is read.
const MAX_DOCUMENT: u64 = 8 * 1024 * 1024;
const MAX_LINKS: usize = 8;

#[derive(Debug, Clone)]
pub(super) enum Item {
    File { offset: u64, size: u64 },
    Link(String),
}

pub(super) enum Indexed {
    Image(HashMap<String, Item>),
    Rootfs,
}

pub(super) struct Archive<'a> {
    pub(super) file: &'a File,
    pub(super) entries: HashMap<String, Item>,
}

impl Archive<'_> {
    /// Where the content of `name` lies. Old archives of `docker save` hold links in place of layers
    /// that another image of the archive has, too.
    pub(super) fn locate(&self, name: &str) -> Result<(u64, u64)> {
        let mut name = clean(name).ok_or_else(|| OciError::Malformed(format!("{name} is not a name")))?;
        for _ in 0..MAX_LINKS {
            match self.entries.get(&name) {
                Some(Item::File { offset, size }) => return Ok((*offset, *size)),
                Some(Item::Link(target)) => name = target.clone(),
                None => return Err(OciError::Malformed(format!("{name} is missing"))),
            }
        }
        Err(OciError::Malformed(format!(
            "{name} is a link that leads nowhere"
        )))
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.entries.contains_key(name)
    }

    pub(super) fn document(&self, name: &str) -> Result<Vec<u8>> {
        let (offset, size) = self.locate(name)?;
        if size > MAX_DOCUMENT {
            return Err(OciError::Malformed(format!("{name} is too large for what it is")));
        }
        let mut data = vec![0; size as usize];
        self.file.read_exact_at(&mut data, offset)?;
        Ok(data)
    }

    /// Where the blob of `digest` lies, after reading all of it to compare.
    pub(super) fn blob(&self, digest: &str, what: &str) -> Result<(u64, u64)> {
        let name = blob_name(digest)?;
        let (offset, size) = self.locate(&name)?;
        let mut hash = Sha256::new();
        let mut window = Window {
            file: self.file,
            at: offset,
            end: offset + size,
        };
        let mut buffer = vec![0; 256 * 1024];
        loop {
            match window.read(&mut buffer)? {
                0 => break,
                n => hash.update(&buffer[..n]),
            }
        }
        let found: String = hash.finalize().iter().map(|b| format!("{b:02x}")).collect();
        if digest.strip_prefix("sha256:") != Some(&found) {
            return Err(OciError::Digest {
                what: what.into(),
                digest: digest.into(),
            });
        }
        Ok((offset, size))
    }
}

pub(super) fn blob_name(digest: &str) -> Result<String> {
    let hex = digest.strip_prefix("sha256:").filter(|hex| is_sha256(hex));
    let hex = hex.ok_or_else(|| OciError::Malformed(format!("{digest} is not a sha256 digest")))?;
    Ok(format!("blobs/sha256/{hex}"))
}

pub(super) fn is_sha256(hex: &str) -> bool {
    hex.len() == 64
        && hex
            .bytes()
            .all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}

pub(super) fn compression(file: &File) -> Result<Option<Compression>> {
    let mut start = [0; 4];
    let got = file.read_at(&mut start, 0)?;
    Ok(match Compression::of(&start[..got]) {
        Compression::None => None,
        packed => Some(packed),
    })
}

pub(super) fn decompress(mut file: &File, compression: Compression) -> Result<Box<dyn Read + '_>> {
    file.rewind()?;
    let file = BufReader::with_capacity(256 * 1024, file);
    Ok(match compression {
        Compression::None => Box::new(file),
        Compression::Gzip => Box::new(flate2::bufread::MultiGzDecoder::new(file)),
        Compression::Zstd => Box::new(zstd::stream::read::Decoder::with_buffer(file)?),
    })
}

/// Whether all entries have names that an image archive has. A root filesystem is told by one of
/// its first, so that it is not read to its end.
pub(super) fn looks_like_image(plain: impl Read) -> Result<bool> {
    let mut archive = tar::Archive::new(plain);
    let mut found = false;
    for entry in archive.entries().map_err(not_an_archive)? {
        let entry = entry.map_err(not_an_archive)?;
        let Some(name) = clean(&String::from_utf8_lossy(&entry.path_bytes())) else {
            return Ok(false);
        };
        if !belongs_to_image(&name) {
            return Ok(false);
        }
        found |= name == "manifest.json" || name == "index.json";
    }
    Ok(found)
}

pub(super) fn index(mut file: &File) -> Result<Indexed> {
    if file.metadata()?.len() == 0 {
        return Err(OciError::NotAnArchive("it is empty".into()));
    }
    file.rewind()?;
    let mut archive = tar::Archive::new(file);
    let mut entries = HashMap::new();
    for entry in archive.entries_with_seek().map_err(not_an_archive)? {
        let mut entry = entry.map_err(not_an_archive)?;
        let Ok(path) = String::from_utf8(entry.path_bytes().into_owned()) else {
            return Ok(Indexed::Rootfs);
        };
        let Some(name) = clean(&path) else {
            return Ok(Indexed::Rootfs);
        };
        if !belongs_to_image(&name) || entries.len() >= MAX_ENTRIES {
            return Ok(Indexed::Rootfs);
        }
        let link = || {
            entry
                .link_name_bytes()
                .map(|l| String::from_utf8_lossy(&l).into_owned())
        };
        let item = match entry.header().entry_type() {
            EntryType::Regular | EntryType::Continuous => Item::File {
                offset: entry.raw_file_position(),
                size: entry.size(),
            },
            EntryType::Link => Item::Link(link().and_then(|l| clean(&l)).unwrap_or_default()),
            EntryType::Symlink => Item::Link(link().and_then(|l| beside(&name, &l)).unwrap_or_default()),
            EntryType::XGlobalHeader => {
                io::copy(&mut entry, &mut io::sink())?;
                continue;
            }
            _ => continue,
        };
        entries.insert(name, item);
    }
    let image = entries.contains_key("manifest.json") || entries.contains_key("index.json");
    Ok(if image {
        Indexed::Image(entries)
    } else {
        Indexed::Rootfs
    })
}

/// `blobs/…`, the documents, and the directories and files of old `docker save` archives, which are named by digests.
fn belongs_to_image(name: &str) -> bool {
    let top = name.split('/').next().unwrap_or_default();
    matches!(
        top,
        "" | "blobs" | "oci-layout" | "index.json" | "manifest.json" | "repositories" | "pax_global_header"
    ) || is_sha256(top)
        || top
            .split_once('.')
            .is_some_and(|(digest, rest)| is_sha256(digest) && matches!(rest, "json" | "tar"))
}

/// The name without `.` and empty components; `None` if it has a `..`.
fn clean(name: &str) -> Option<String> {
    let mut parts = Vec::new();
    for part in name.split('/') {
        match part {
            "" | "." => {}
            ".." => return None,
            part => parts.push(part),
        }
    }
    Some(parts.join("/"))
}

/// The name that a symbolic link at `name` to `target` stands for, if it is within the archive.
fn beside(name: &str, target: &str) -> Option<String> {
    let mut parts: Vec<&str> = name.split('/').collect();
    parts.pop();
    for part in target.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()?),
            part => parts.push(part),
        }
    }
    Some(parts.join("/"))
}

fn not_an_archive(e: io::Error) -> OciError {
    OciError::NotAnArchive(e.to_string())
}
