//! Archives that templates are imported from, made by hand so that they may be wrong in any way.

use std::path::Path;

use anyhow::{Context, Result};

use super::world::command;

/// One entry of a tar archive. The name is written as it is, be it `../x`.
#[derive(Debug, Clone)]
pub(crate) struct TarFile {
    name: String,
    kind: tar::EntryType,
    mode: u32,
    link: String,
    content: Vec<u8>,
}

impl TarFile {
    fn new(name: &str, kind: tar::EntryType, mode: u32) -> Self {
        Self {
            name: name.to_owned(),
            kind,
            mode,
            link: String::new(),
            content: Vec::new(),
        }
    }

    pub(crate) fn file(name: &str, content: impl Into<Vec<u8>>) -> Self {
        Self {
            content: content.into(),
            ..Self::new(name, tar::EntryType::Regular, 0o644)
        }
    }

    pub(crate) fn program(name: &str, content: impl Into<Vec<u8>>) -> Self {
        Self {
            mode: 0o755,
            ..Self::file(name, content)
        }
    }

    pub(crate) fn folder(name: &str) -> Self {
        Self::new(name, tar::EntryType::Directory, 0o755)
    }

    pub(crate) fn symlink(name: &str, target: &str) -> Self {
        Self {
            link: target.to_owned(),
            ..Self::new(name, tar::EntryType::Symlink, 0o777)
        }
    }

    pub(crate) fn hard_link(name: &str, target: &str) -> Self {
        Self {
            link: target.to_owned(),
            ..Self::new(name, tar::EntryType::Link, 0o644)
        }
    }

    /// The host's block device 7:0, if it were up to the archive.
    pub(crate) fn block_device(name: &str) -> Self {
        Self::new(name, tar::EntryType::Block, 0o666)
    }
}

pub(crate) fn tar(files: &[TarFile]) -> Result<Vec<u8>> {
    let mut builder = tar::Builder::new(Vec::new());
    for file in files {
        let mut header = tar::Header::new_gnu();
        let raw = header.as_gnu_mut().context("a GNU header")?;
        raw.name[..file.name.len()].copy_from_slice(file.name.as_bytes());
        raw.linkname[..file.link.len()].copy_from_slice(file.link.as_bytes());
        header.set_entry_type(file.kind);
        header.set_mode(file.mode);
        header.set_size(file.content.len() as u64);
        if file.kind == tar::EntryType::Block {
            header.set_device_major(7)?;
            header.set_device_minor(0)?;
        }
        header.set_cksum();
        builder.append(&header, file.content.as_slice())?;
    }
    Ok(builder.into_inner()?)
}

/// A root filesystem that can run `sh`, `cat`, `ls` and `stat`, out of the host's own programs.
pub(crate) fn rootfs() -> Result<Vec<TarFile>> {
    rootfs_with(&[])
}

/// The same with more programs.
pub(crate) fn rootfs_with(programs: &[&str]) -> Result<Vec<TarFile>> {
    let mut files = vec![
        TarFile::folder("bin"),
        TarFile::folder("etc"),
        TarFile::file("etc/passwd", "root:x:0:0:root:/root:/bin/sh\n"),
        TarFile::file("etc/group", "root:x:0:\n"),
        TarFile::folder("root"),
    ];
    let mut libraries = std::collections::BTreeSet::new();
    for program in ["sh", "cat", "ls", "stat"].iter().chain(programs) {
        let found = std::fs::canonicalize(Path::new("/bin").join(program))?;
        let content = std::fs::read(&found)?;
        files.push(TarFile::program(&format!("bin/{program}"), content));
        let needed = command("ldd", &[&found.to_string_lossy()])?;
        libraries.extend(
            needed
                .split_whitespace()
                .filter(|w| w.starts_with('/'))
                .map(str::to_owned),
        );
    }
    for library in libraries {
        let content = std::fs::read(&library)?;
        files.push(TarFile::program(library.trim_start_matches('/'), content));
    }
    Ok(files)
}
