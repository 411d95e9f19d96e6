//! Reads a tar stream entry by entry. The headers are the `tar` crate's; the extension records are
//! read here, because that crate ends a PAX record at the first newline, and the value of an
//! extended attribute is binary and may hold one.

use std::io::{self, BufRead, BufReader, Read};

use tar::{EntryType, Header};

use super::{BUFFER, Result, UnpackError, lossy};

const BLOCK: u64 = 512;
/// Longest name or PAX header that is kept in memory.
const MAX_EXTENSION: u64 = 1024 * 1024;
const MAX_SEGMENTS: usize = 100_000;
const XATTR: &[u8] = b"SCHILY.xattr.";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    File,
    Directory,
    HardLink,
    Symlink,
    Fifo,
    /// Or a socket.
    Device,
    Unknown,
}

#[derive(Debug)]
pub(super) struct Entry {
    pub(super) path: Vec<u8>,
    pub(super) link: Vec<u8>,
    pub(super) kind: Kind,
    pub(super) mode: u32,
    pub(super) uid: u64,
    pub(super) gid: u64,
    /// Seconds and nanoseconds.
    pub(super) mtime: (i64, u32),
    /// Of the file, holes included.
    pub(super) size: u64,
    /// What the archive holds of the file, as (offset, length) in order.
    pub(super) segments: Vec<(u64, u64)>,
    pub(super) xattrs: Vec<(Vec<u8>, Vec<u8>)>,
}

pub(super) struct TarReader<R: Read> {
    input: Input<R>,
    /// Bytes of the present entry that were not read yet, and the padding behind them.
    left: u64,
    padding: u64,
    global: Vec<(Vec<u8>, Vec<u8>)>,
}

enum Input<R: Read> {
    Plain(BufReader<R>),
    Gzip(Box<BufReader<flate2::bufread::MultiGzDecoder<BufReader<R>>>>),
    Zstd(BufReader<zstd::stream::read::Decoder<'static, BufReader<R>>>),
}

impl<R: Read> Read for Input<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(r) => r.read(buf),
            Self::Gzip(r) => r.read(buf),
            Self::Zstd(r) => r.read(buf),
        }
    }
}

/// How a stream is compressed, told by its first bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Compression {
    None,
    Gzip,
    Zstd,
}

impl Compression {
    pub(crate) fn of(start: &[u8]) -> Self {
        match start {
            [0x1f, 0x8b, ..] => Self::Gzip,
            [0x28, 0xb5, 0x2f, 0xfd, ..] => Self::Zstd,
            _ => Self::None,
        }
    }
}

impl<R: Read> TarReader<R> {
    pub(super) fn new(reader: R) -> Result<Self> {
        let mut buffered = BufReader::with_capacity(BUFFER, reader);
        let compression = Compression::of(buffered.fill_buf().map_err(UnpackError::Read)?);
        let input = match compression {
            Compression::None => Input::Plain(buffered),
            Compression::Gzip => {
                let decoder = flate2::bufread::MultiGzDecoder::new(buffered);
                Input::Gzip(Box::new(BufReader::with_capacity(BUFFER, decoder)))
            }
            Compression::Zstd => Input::Zstd(BufReader::with_capacity(
                BUFFER,
                zstd::stream::read::Decoder::with_buffer(buffered).map_err(UnpackError::Read)?,
            )),
        };
        Ok(Self {
            input,
            left: 0,
            padding: 0,
            global: Vec::new(),
        })
    }

    pub(super) fn next_entry(&mut self) -> Result<Option<Entry>> {
        let mut long_path = None;
        let mut long_link = None;
        let mut pax = Vec::new();
        let mut extended = false;
        loop {
            self.skip_rest()?;
            let Some(header) = self.header()? else {
                return if extended {
                    Err(malformed("it ends after an extension"))
                } else {
                    Ok(None)
                };
            };
            let stored = header
                .entry_size()
                .map_err(|_| malformed("a size is not a number"))?;
            match header.entry_type() {
                EntryType::GNULongName => long_path = Some(trimmed(self.extension(stored)?)),
                EntryType::GNULongLink => long_link = Some(trimmed(self.extension(stored)?)),
                EntryType::XHeader => pax = parse_pax(&self.extension(stored)?)?,
                EntryType::XGlobalHeader => {
                    self.global = parse_pax(&self.extension(stored)?)?;
                    continue;
                }
                _ => return self.entry(header, long_path, long_link, pax).map(Some),
            }
            extended = true;
        }
    }

    /// Some of the present entry's content; never zero bytes as long as there should be more.
    pub(super) fn read_data(&mut self, buf: &mut [u8]) -> Result<usize> {
        let want = self.left.min(buf.len() as u64) as usize;
        let got = self.input.read(&mut buf[..want]).map_err(UnpackError::Read)?;
        if got == 0 {
            return Err(malformed("it is cut off"));
        }
        self.left -= got as u64;
        Ok(got)
    }

    fn entry(
        &mut self,
        header: Header,
        long_path: Option<Vec<u8>>,
        long_link: Option<Vec<u8>>,
        mut pax: Vec<(Vec<u8>, Vec<u8>)>,
    ) -> Result<Entry> {
        // Of several records of one name the last counts, and the entry's own over the global ones.
        pax.splice(0..0, self.global.iter().cloned());
        let value = |key: &[u8]| {
            pax.iter()
                .rev()
                .find(|(k, _)| k == key)
                .map(|(_, v)| v.as_slice())
        };
        let number = |key: &[u8]| match value(key) {
            None | Some(b"") => Ok(None),
            Some(v) => std::str::from_utf8(v)
                .ok()
                .and_then(|v| v.parse::<u64>().ok())
                .map(Some)
                .ok_or_else(|| malformed(format!("{} is not a number", lossy(key)))),
        };

        let path = value(b"GNU.sparse.name")
            .or(value(b"path"))
            .map(<[u8]>::to_vec)
            .or(long_path)
            .unwrap_or_else(|| header.path_bytes().into_owned());
        let link = value(b"linkpath")
            .map(<[u8]>::to_vec)
            .or(long_link)
            .or_else(|| header.link_name_bytes().map(|l| l.into_owned()))
            .unwrap_or_default();
        let kind = kind_of(header.entry_type(), &path);

        let in_header = header
            .entry_size()
            .map_err(|_| malformed("a size is not a number"))?;
        // The other kinds have no content, whatever their header says.
        self.left = match kind {
            Kind::File | Kind::Unknown => number(b"size")?.unwrap_or(in_header),
            _ => 0,
        };
        self.padding = self.left.wrapping_neg() % BLOCK;

        let (size, segments) = if kind != Kind::File {
            (0, Vec::new())
        } else if header.entry_type() == EntryType::GNUSparse {
            self.gnu_sparse(&header)?
        } else if value(b"GNU.sparse.major") == Some(b"1") {
            let size =
                number(b"GNU.sparse.realsize")?.ok_or_else(|| malformed("a sparse file has no size"))?;
            (size, self.pax_sparse_map()?)
        } else if let Some(map) = value(b"GNU.sparse.map") {
            let size = number(b"GNU.sparse.size")?.ok_or_else(|| malformed("a sparse file has no size"))?;
            (size, parse_map(map.split(|b| *b == b','))?)
        } else if pax.iter().any(|(k, _)| k.starts_with(b"GNU.sparse.")) {
            return Err(malformed(
                "it holds sparse files in the format PAX 0.0; repack it with tar --sparse",
            ));
        } else {
            (self.left, vec![(0, self.left)])
        };
        if kind == Kind::File {
            check_segments(&segments, size, self.left)?;
        }

        let mtime = match value(b"mtime").and_then(parse_time) {
            Some(time) => time,
            None => (
                header
                    .mtime()
                    .ok()
                    .and_then(|t| i64::try_from(t).ok())
                    .unwrap_or(0),
                0,
            ),
        };
        let xattrs = pax
            .iter()
            .filter_map(|(k, v)| Some((k.strip_prefix(XATTR)?.to_vec(), v.clone())))
            .collect();
        Ok(Entry {
            path,
            link,
            kind,
            mode: header.mode().map_err(|_| malformed("a mode is not a number"))?,
            uid: number(b"uid")?.or(header.uid().ok()).unwrap_or(u64::MAX),
            gid: number(b"gid")?.or(header.gid().ok()).unwrap_or(u64::MAX),
            mtime,
            size,
            segments,
            xattrs,
        })
    }

    /// The next header; `None` at the archive's end.
    fn header(&mut self) -> Result<Option<Header>> {
        let mut header = Header::new_old();
        if !self.fill(header.as_mut_bytes())? {
            return Ok(None);
        }
        let bytes = header.as_bytes();
        if bytes.iter().all(|b| *b == 0) {
            return Ok(None);
        }
        let (sum, signed) = bytes
            .iter()
            .enumerate()
            .fold((0u32, 0i64), |(sum, signed), (at, byte)| {
                let byte = if (148..156).contains(&at) { b' ' } else { *byte };
                (sum + u32::from(byte), signed + i64::from(byte as i8))
            });
        let expected = header
            .cksum()
            .map_err(|_| malformed("a header has no checksum"))?;
        if expected != sum && i64::from(expected) != signed {
            return Err(malformed("the checksum of a header is wrong"));
        }
        Ok(Some(header))
    }

    /// Fills `block`; `false` if the stream ended before its first byte.
    fn fill(&mut self, block: &mut [u8]) -> Result<bool> {
        let mut filled = 0;
        while filled < block.len() {
            match self.input.read(&mut block[filled..]).map_err(UnpackError::Read)? {
                0 if filled == 0 => return Ok(false),
                0 => return Err(malformed("it is cut off")),
                n => filled += n,
            }
        }
        Ok(true)
    }

    fn skip_rest(&mut self) -> Result<()> {
        let rest = self
            .left
            .checked_add(self.padding)
            .ok_or_else(|| malformed("a size is absurd"))?;
        (self.left, self.padding) = (0, 0);
        let skipped =
            io::copy(&mut (&mut self.input).take(rest), &mut io::sink()).map_err(UnpackError::Read)?;
        if skipped < rest {
            Err(malformed("it is cut off"))
        } else {
            Ok(())
        }
    }

    fn extension(&mut self, size: u64) -> Result<Vec<u8>> {
        if size > MAX_EXTENSION {
            return Err(malformed("an extension header is too large"));
        }
        let mut data = vec![0; size as usize];
        if size > 0 && !self.fill(&mut data)? {
            return Err(malformed("it is cut off"));
        }
        self.padding = size.wrapping_neg() % BLOCK;
        Ok(data)
    }

    fn gnu_sparse(&mut self, header: &Header) -> Result<(u64, Vec<(u64, u64)>)> {
        let absurd = |_| malformed("a sparse file's map is not made of numbers");
        let gnu = header
            .as_gnu()
            .ok_or_else(|| malformed("a sparse file has no GNU header"))?;
        let mut segments = Vec::new();
        for block in gnu.sparse.iter().filter(|b| !b.is_empty()) {
            segments.push((block.offset().map_err(absurd)?, block.length().map_err(absurd)?));
        }
        let mut more = gnu.is_extended();
        while more {
            let mut ext = tar::GnuExtSparseHeader::new();
            if !self.fill(ext.as_mut_bytes())? {
                return Err(malformed("it is cut off"));
            }
            for block in ext.sparse().iter().filter(|b| !b.is_empty()) {
                segments.push((block.offset().map_err(absurd)?, block.length().map_err(absurd)?));
            }
            if segments.len() > MAX_SEGMENTS {
                return Err(malformed("a sparse file has too many parts"));
            }
            more = ext.is_extended();
        }
        Ok((gnu.real_size().map_err(absurd)?, segments))
    }

    /// PAX 1.0 puts the map before the content, in lines, filled up to a whole block.
    fn pax_sparse_map(&mut self) -> Result<Vec<(u64, u64)>> {
        let mut text = Vec::new();
        let mut lines_wanted = None;
        loop {
            let mut block = [0; BLOCK as usize];
            let mut filled = 0;
            while filled < block.len() {
                filled += self.read_data(&mut block[filled..])?;
            }
            text.extend_from_slice(&block);
            if text.len() as u64 > MAX_EXTENSION {
                return Err(malformed("a sparse file has too many parts"));
            }
            let mut lines = text.split(|b| *b == b'\n');
            let complete = text.iter().filter(|b| **b == b'\n').count();
            if lines_wanted.is_none() && complete > 0 {
                let parts = lines
                    .next()
                    .and_then(decimal)
                    .filter(|n| *n <= MAX_SEGMENTS as u64);
                let parts = parts.ok_or_else(|| malformed("a sparse file's map has no length"))?;
                lines_wanted = Some(1 + 2 * parts as usize);
            }
            if let Some(wanted) = lines_wanted
                && complete >= wanted
            {
                return parse_map(text.split(|b| *b == b'\n').take(wanted).skip(1));
            }
        }
    }
}

fn kind_of(entry_type: EntryType, path: &[u8]) -> Kind {
    match entry_type {
        EntryType::Directory => Kind::Directory,
        // Before ustar a directory was a file whose name ends in a slash.
        EntryType::Regular if path.ends_with(b"/") => Kind::Directory,
        EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => Kind::File,
        EntryType::Link => Kind::HardLink,
        EntryType::Symlink => Kind::Symlink,
        EntryType::Fifo => Kind::Fifo,
        EntryType::Char | EntryType::Block => Kind::Device,
        _ => Kind::Unknown,
    }
}

/// Records are `LENGTH KEY=VALUE\n`, where LENGTH counts all of it.
fn parse_pax(mut data: &[u8]) -> Result<Vec<(Vec<u8>, Vec<u8>)>> {
    let broken = || malformed("a PAX record is broken");
    let mut records = Vec::new();
    while !data.is_empty() {
        let space = data.iter().position(|b| *b == b' ').ok_or_else(broken)?;
        let length = decimal(&data[..space]).ok_or_else(broken)? as usize;
        if length > data.len() || length < space + 3 || data[length - 1] != b'\n' {
            return Err(broken());
        }
        let record = &data[space + 1..length - 1];
        let equals = record.iter().position(|b| *b == b'=').ok_or_else(broken)?;
        records.push((record[..equals].to_vec(), record[equals + 1..].to_vec()));
        data = &data[length..];
    }
    Ok(records)
}

fn parse_map<'a>(mut numbers: impl Iterator<Item = &'a [u8]>) -> Result<Vec<(u64, u64)>> {
    let broken = || malformed("a sparse file's map is not made of numbers");
    let mut segments = Vec::new();
    while let Some(offset) = numbers.next() {
        let length = numbers.next().and_then(decimal).ok_or_else(broken)?;
        segments.push((decimal(offset).ok_or_else(broken)?, length));
        if segments.len() > MAX_SEGMENTS {
            return Err(malformed("a sparse file has too many parts"));
        }
    }
    Ok(segments)
}

fn check_segments(segments: &[(u64, u64)], size: u64, stored: u64) -> Result<()> {
    let mut end = 0u64;
    let mut sum = 0u64;
    for &(offset, length) in segments {
        let next = offset
            .checked_add(length)
            .filter(|next| offset >= end && *next <= size);
        end = next.ok_or_else(|| malformed("the parts of a sparse file do not fit into it"))?;
        sum += length;
    }
    if sum == stored {
        Ok(())
    } else {
        Err(malformed("the parts of a sparse file are not what is stored"))
    }
}

/// Seconds with an optional fraction.
fn parse_time(value: &[u8]) -> Option<(i64, u32)> {
    let value = std::str::from_utf8(value).ok()?;
    let (seconds, fraction) = value.split_once('.').unwrap_or((value, ""));
    let digits: String = fraction.chars().chain("000000000".chars()).take(9).collect();
    let (seconds, nanos) = (seconds.parse::<i64>().ok()?, digits.parse::<u32>().ok()?);
    if value.starts_with('-') && nanos > 0 {
        return Some((seconds - 1, 1_000_000_000 - nanos));
    }
    Some((seconds, nanos))
}

fn decimal(digits: &[u8]) -> Option<u64> {
    std::str::from_utf8(digits).ok()?.parse().ok()
}

fn trimmed(mut name: Vec<u8>) -> Vec<u8> {
    if let Some(end) = name.iter().position(|b| *b == 0) {
        name.truncate(end);
    }
    name
}

fn malformed(what: impl Into<String>) -> UnpackError {
    UnpackError::Malformed(what.into())
}
