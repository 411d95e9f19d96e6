//! Archives that builds copy files from. They have no names and go with the daemon: a builder that finds one missing
//! sends it again.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use futures_util::{Stream, StreamExt as _};
use serde::{Serialize, Serializer};

use super::{Result, TemplateError, Templates};
use crate::records::Workspace;

/// How many, and how much, is kept for the next build. No single one may be larger.
const MOST: usize = 256;
const MOST_BYTES: u64 = 8 << 30;

#[derive(Debug, thiserror::Error)]
#[error("it is larger than {} GiB", MOST_BYTES >> 30)]
struct TooLarge;

/// By the hash that the client gave it, which is all that tells one from another.
#[derive(Debug, Clone)]
pub struct Upload {
    hash: String,
    file: Arc<File>,
}

impl PartialEq for Upload {
    fn eq(&self, other: &Self) -> bool {
        self.hash == other.hash
    }
}

impl Serialize for Upload {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.hash.serialize(serializer)
    }
}

impl Upload {
    /// Up to `length` bytes; none at the end.
    pub(super) fn read_at(&self, offset: u64, length: usize) -> io::Result<Vec<u8>> {
        let mut piece = vec![0; length];
        let mut read = 0;
        while read < length {
            match self.file.read_at(&mut piece[read..], offset + read as u64)? {
                0 => break,
                n => read += n,
            }
        }
        piece.truncate(read);
        Ok(piece)
    }
}

/// Oldest first.
#[derive(Default)]
pub(super) struct Uploads(Mutex<Vec<Kept>>);

struct Kept {
    workspace: Workspace,
    upload: Upload,
    size: u64,
}

impl Uploads {
    fn all(&self) -> MutexGuard<'_, Vec<Kept>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, new: Kept) {
        let mut all = self.all();
        all.retain(|one| one.workspace != new.workspace || one.upload != new.upload);
        all.push(new);
        while all.len() > MOST || all.iter().map(|one| one.size).sum::<u64>() > MOST_BYTES {
            all.remove(0);
        }
    }
}

impl Templates {
    pub fn upload(&self, workspace: &Workspace, hash: &str) -> Option<Upload> {
        let all = self.uploads.all();
        let found = all
            .iter()
            .find(|one| one.workspace == *workspace && one.upload.hash == hash);
        found.map(|one| one.upload.clone())
    }

    pub async fn take_upload<E>(
        &self,
        workspace: &Workspace,
        hash: &str,
        length: Option<u64>,
        body: impl Stream<Item = Result<Bytes, E>>,
    ) -> Result<()>
    where
        E: std::error::Error + Send + Sync + 'static,
    {
        let mut received = 0;
        let limited = body.map(move |piece| {
            let piece = piece.map_err(io::Error::other)?;
            received += piece.len() as u64;
            match received > MOST_BYTES {
                true => Err(io::Error::other(TooLarge)),
                false => Ok(piece),
            }
        });
        if length.is_some_and(|length| length > MOST_BYTES) {
            return Err(TemplateError::UploadBroken(TooLarge.into()));
        }
        let file = self.receive(length, limited).await?;
        let size = file
            .metadata()
            .map_err(TemplateError::io("measure the upload"))?
            .len();
        self.uploads.add(Kept {
            workspace: workspace.clone(),
            upload: Upload {
                hash: hash.to_owned(),
                file: Arc::new(file),
            },
            size,
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(hash: &str, size: u64) -> Kept {
        let upload = Upload {
            hash: hash.to_owned(),
            file: Arc::new(tempfile::tempfile().unwrap()),
        };
        Kept {
            workspace: Workspace::default(),
            upload,
            size,
        }
    }

    #[test]
    fn the_oldest_make_room_and_the_same_is_kept_once() {
        let uploads = Uploads::default();
        let hashes = || {
            uploads
                .all()
                .iter()
                .map(|one| one.upload.hash.clone())
                .collect::<Vec<_>>()
        };
        for (hash, size) in [("a", 1), ("b", 1), ("a", 2)] {
            uploads.add(kept(hash, size));
        }
        assert_eq!(hashes(), ["b", "a"]);
        uploads.add(kept("c", MOST_BYTES - 1));
        assert_eq!(hashes(), ["c"]);
        uploads.add(kept("d", MOST_BYTES));
        assert_eq!(hashes(), ["d"]);
    }

    #[test]
    fn an_upload_is_read_in_pieces() {
        use std::io::Write as _;
        let one = kept("a", 5);
        (&*one.upload.file).write_all(b"hello").unwrap();
        assert_eq!(one.upload.read_at(0, 4).unwrap(), b"hell");
        assert_eq!(one.upload.read_at(4, 4).unwrap(), b"o");
        assert!(one.upload.read_at(5, 4).unwrap().is_empty());
    }
}
