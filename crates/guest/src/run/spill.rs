//! The part of a run's output that no longer fits into memory: a file of records, oldest first.
//!
//! A record is the stream (1 byte), the offset of its first byte in the run's output (8), its length (4),
//! and the bytes. The file goes away with the last handle to it.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::PathBuf;
use std::sync::Mutex;

use super::output::{Chunk, Piece, Stream};

const HEADER: usize = 13;
/// Records longer than this are cut, so that one read gives one event of moderate size.
const MAX_RECORD: usize = 64 * 1024;
/// Distance of the positions that are remembered for seeking.
const INDEX_STEP: u64 = 256 * 1024;

pub(super) struct Spill {
    file: File,
    path: PathBuf,
    index: Mutex<Index>,
}

#[derive(Default)]
struct Index {
    /// Where in the file the output from an offset on lies, ascending.
    marks: Vec<Mark>,
    end: u64,
}

/// A record's offset in the output, and its position in the file.
#[derive(Debug, Clone, Copy)]
pub(super) struct Mark {
    offset: u64,
    position: u64,
}

impl Spill {
    pub(super) fn create(path: PathBuf) -> io::Result<Self> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW)
            .open(&path)?;
        Ok(Self {
            file,
            path,
            index: Mutex::default(),
        })
    }

    /// Appends the chunks, all or none.
    pub(super) fn append(&self, chunks: &[Chunk]) -> io::Result<()> {
        let start = self.index.lock().expect("no holder panics").end;
        let mut records = Vec::with_capacity(chunks.iter().map(|c| c.data.len() + HEADER).sum());
        let mut marks = Vec::new();
        for chunk in chunks {
            for (i, data) in chunk.data.chunks(MAX_RECORD).enumerate() {
                let offset = chunk.offset + (i * MAX_RECORD) as u64;
                marks.push(Mark {
                    offset,
                    position: start + records.len() as u64,
                });
                records.push(chunk.stream as u8);
                records.extend_from_slice(&offset.to_le_bytes());
                records.extend_from_slice(&(data.len() as u32).to_le_bytes());
                records.extend_from_slice(data);
            }
        }
        if let Err(e) = self.file.write_all_at(&records, start) {
            // What was written of it would be taken for records by nobody, but holds space that is short.
            let _ = self.file.set_len(start);
            return Err(e);
        }
        let mut index = self.index.lock().expect("no holder panics");
        index.end = start + records.len() as u64;
        for mark in marks {
            if index
                .marks
                .last()
                .is_none_or(|last| mark.position - last.position >= INDEX_STEP)
            {
                index.marks.push(mark);
            }
        }
        Ok(())
    }

    /// Offset of the oldest byte.
    pub(super) fn start(&self) -> u64 {
        self.index
            .lock()
            .expect("no holder panics")
            .marks
            .first()
            .map_or(0, |m| m.offset)
    }

    /// The record that holds `offset`, from there on, or the first one after it; `None` past the last. `hint`
    /// is where an earlier read ended.
    pub(super) fn read(&self, offset: u64, hint: Option<Mark>) -> io::Result<Option<(Piece, Mark)>> {
        let (mut at, end) = {
            let index = self.index.lock().expect("no holder panics");
            let i = index
                .marks
                .partition_point(|m| m.offset <= offset)
                .saturating_sub(1);
            let Some(mark) = index.marks.get(i).copied() else {
                return Ok(None);
            };
            let best = hint
                .filter(|h| h.offset <= offset && h.position > mark.position)
                .unwrap_or(mark);
            (best.position, index.end)
        };
        while at < end {
            let mut header = [0; HEADER];
            self.file.read_exact_at(&mut header, at)?;
            let [stream, rest @ ..] = header;
            let start = u64::from_le_bytes(rest[..8].try_into().expect("eight bytes"));
            let len = u64::from(u32::from_le_bytes(rest[8..].try_into().expect("four bytes")));
            let data = at + HEADER as u64;
            at = data + len;
            if start + len <= offset {
                continue;
            }
            let skip = offset.saturating_sub(start);
            let mut bytes = vec![0; usize::try_from(len - skip).map_err(io::Error::other)?];
            self.file.read_exact_at(&mut bytes, data + skip)?;
            let stream = Stream::from_byte(stream).ok_or_else(|| {
                io::Error::new(io::ErrorKind::InvalidData, "spill record of no known stream")
            })?;
            let piece = Piece {
                stream,
                offset: start + skip,
                data: bytes,
            };
            return Ok(Some((
                piece,
                Mark {
                    offset: start + len,
                    position: at,
                },
            )));
        }
        Ok(None)
    }
}

impl Drop for Spill {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunk(stream: Stream, offset: u64, data: &[u8]) -> Chunk {
        Chunk {
            stream,
            offset,
            data: data.to_vec(),
        }
    }

    #[test]
    fn records_are_found_by_offset_across_gaps() {
        let folder = tempfile::tempdir().unwrap();
        let spill = Spill::create(folder.path().join("r")).unwrap();
        spill
            .append(&[
                chunk(Stream::Stdout, 10, b"hello"),
                chunk(Stream::Stderr, 15, b"err"),
            ])
            .unwrap();
        spill
            .append(&[chunk(Stream::Stdout, 30, b"after a gap")])
            .unwrap();
        assert_eq!(spill.start(), 10);

        let (piece, mark) = spill.read(12, None).unwrap().unwrap();
        assert_eq!(
            (piece.stream, piece.offset, piece.data.as_slice()),
            (Stream::Stdout, 12, &b"llo"[..])
        );
        let (piece, mark) = spill.read(15, Some(mark)).unwrap().unwrap();
        assert_eq!(
            (piece.stream, piece.data.as_slice()),
            (Stream::Stderr, &b"err"[..])
        );
        let (piece, mark) = spill.read(18, Some(mark)).unwrap().unwrap();
        assert_eq!((piece.offset, piece.data.as_slice()), (30, &b"after a gap"[..]));
        assert!(spill.read(41, Some(mark)).unwrap().is_none());
    }

    #[test]
    fn the_file_goes_away_with_the_spill() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("r");
        let spill = Spill::create(path.clone()).unwrap();
        assert!(path.exists());
        drop(spill);
        assert!(!path.exists());
    }

    #[test]
    fn seeking_works_far_into_a_large_file() {
        let folder = tempfile::tempdir().unwrap();
        let spill = Spill::create(folder.path().join("r")).unwrap();
        for i in 0..200u64 {
            spill
                .append(&[chunk(Stream::Pty, i * 10_000, &[i as u8; 10_000])])
                .unwrap();
        }
        for i in [0u64, 1, 57, 199] {
            let (piece, _) = spill.read(i * 10_000 + 1, None).unwrap().unwrap();
            assert_eq!(
                (piece.offset, piece.data[0], piece.data.len()),
                (i * 10_000 + 1, i as u8, 9_999)
            );
        }
    }
}
