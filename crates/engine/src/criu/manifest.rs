//! What a memory image consists of, so that a damaged one is refused.
//!
//! Everything that CRIU interprets is compared before CRIU sees it. The memory itself, which is nearly all of an image and
//! means nothing until the box runs, can be compared while CRIU reads it, by [`Pages::verify`].

use std::collections::BTreeMap;
use std::fmt::Display;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::thread::{Scope, ScopedJoinHandle};

use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use tokio::task::JoinError;

use super::hashed::hash;
use crate::{EngineError, MemoryImage};

const NAME: &str = "manifest.json";
/// Holds the checksum of the manifest itself.
const SEAL: &str = "manifest.blake3";
/// Images of format 1 have no seal.
const FORMAT: u32 = 2;
/// First characters of the names of files that hold memory, and nothing else.
const PAGES: &str = "pages-";
/// Files that are synced, or hashed, at the same time.
const AT_ONCE: usize = 4;

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Manifest {
    format: u32,
    pub(crate) guest_hash: String,
    pub(crate) uid_base: u32,
    criu: String,
    kernel: String,
    files: BTreeMap<String, FileEntry>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct FileEntry {
    size: u64,
    blake3: String,
}

/// The files with the memory of an image, not compared yet.
#[derive(Debug, Clone)]
pub(crate) struct Pages {
    image: PathBuf,
    /// The largest last.
    files: Vec<(String, FileEntry)>,
}

/// Why an image is not brought back.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Unusable {
    /// It never will be. In words.
    #[error("{0}")]
    Damaged(String),
    /// The machine lacked something to read it with, such as descriptors or memory, and may have it the next time.
    #[error("it cannot be read now: {0}")]
    Unread(io::Error),
}

impl Unusable {
    /// What it means for the image that `what` of it cannot be read.
    pub(crate) fn without(what: impl Display) -> impl FnOnce(io::Error) -> Self {
        move |error| match is_damage(&error) {
            true => Self::Damaged(format!("{what} cannot be read: {error}")),
            false => Self::Unread(error),
        }
    }

    pub(crate) fn into_error(self) -> EngineError {
        match self {
            Self::Damaged(words) => EngineError::BadImage(words),
            Self::Unread(error) => EngineError::io("cannot read the memory image")(error),
        }
    }
}

/// Whether an error is about the file. Any other may pass, and a memory is not given up for it.
fn is_damage(error: &io::Error) -> bool {
    use io::ErrorKind::{InvalidData, UnexpectedEof};
    const MISSING: [Errno; 4] = [Errno::NOENT, Errno::NOTDIR, Errno::ISDIR, Errno::LOOP];
    // As filesystems call what has a wrong checksum.
    const DECAYED: [Errno; 3] = [Errno::IO, Errno::BADMSG, Errno::UCLEAN];
    match Errno::from_io_error(error) {
        Some(errno) => MISSING.contains(&errno) || DECAYED.contains(&errno),
        None => matches!(error.kind(), InvalidData | UnexpectedEof),
    }
}

impl From<JoinError> for Unusable {
    fn from(error: JoinError) -> Self {
        Self::Unread(error.into())
    }
}

impl Manifest {
    /// Describes and syncs the image in `directory`, and gives it its final name `image`.
    pub(crate) fn commit(
        directory: &Path,
        image: &Path,
        guest_hash: &str,
        uid_base: u32,
        criu: &str,
    ) -> io::Result<MemoryImage> {
        let mut names = Vec::new();
        for entry in fs::read_dir(directory)? {
            let entry = entry?;
            names.push((
                entry.metadata()?.len(),
                entry.file_name().to_string_lossy().into_owned(),
            ));
        }
        names.sort();
        // The disk writes while the processor hashes, and several files share one commit of the filesystem's journal.
        let (unsynced, size) = (
            Mutex::new(names.clone()),
            names.iter().map(|(size, _)| size).sum(),
        );
        let manifest = std::thread::scope(|scope| {
            let sync = || {
                while let Some((_, name)) = pop(&unsynced) {
                    File::open(directory.join(name))?.sync_all()?;
                }
                io::Result::Ok(())
            };
            let syncing = helpers(scope, AT_ONCE, sync);
            let manifest = Self::of(directory, &names, guest_hash, uid_base, criu)?;
            let text = serde_json::to_vec_pretty(&manifest)?;
            let seal = blake3::hash(&text).to_hex();
            for (name, content) in [(NAME, &text[..]), (SEAL, seal.as_bytes())] {
                let mut file = File::create_new(directory.join(name))?;
                file.write_all(content)?;
                file.sync_all()?;
            }
            sync()?;
            for synced in syncing {
                synced.join().unwrap_or_else(|_| Err(broke_off()))?;
            }
            io::Result::Ok(manifest)
        })?;
        File::open(directory)?.sync_all()?;
        fs::rename(directory, image)?;
        if let Some(parent) = image.parent() {
            File::open(parent)?.sync_all()?;
        }
        Ok(MemoryImage {
            size,
            guest_hash: manifest.guest_hash,
        })
    }

    fn of(
        directory: &Path,
        names: &[(u64, String)],
        guest_hash: &str,
        uid_base: u32,
        criu: &str,
    ) -> io::Result<Self> {
        let mut files = BTreeMap::new();
        for (size, name) in names {
            let blake3 = hash(&directory.join(name))?.to_hex().to_string();
            files.insert(name.clone(), FileEntry { size: *size, blake3 });
        }
        Ok(Self {
            format: FORMAT,
            guest_hash: guest_hash.to_owned(),
            uid_base,
            criu: criu.to_owned(),
            kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
            files,
        })
    }

    /// Bytes of the image.
    pub(crate) fn size(&self) -> u64 {
        self.files.values().map(|file| file.size).sum()
    }

    /// The program that made it, and its version.
    pub(crate) fn made_by(&self) -> &str {
        &self.criu
    }

    pub(crate) fn read(image: &Path) -> Result<Self, Unusable> {
        let text = fs::read(image.join(NAME)).map_err(Unusable::without("its manifest"))?;
        let sealed = Self::is_sealed(image, &text)?;
        let manifest: Self = serde_json::from_slice(&text)
            .map_err(|e| Unusable::Damaged(format!("its manifest makes no sense: {e}")))?;
        let wrong = match (manifest.format, sealed) {
            (FORMAT, true) | (1, false) => return Ok(manifest),
            (FORMAT, false) => "the checksum of its manifest is missing".to_owned(),
            (other, _) => format!("it is of format {other}, and this dorm knows {FORMAT}"),
        };
        Err(Unusable::Damaged(wrong))
    }

    /// False if nothing tells what the manifest should be.
    fn is_sealed(image: &Path, text: &[u8]) -> Result<bool, Unusable> {
        match fs::read(image.join(SEAL)) {
            Ok(seal) if seal == blake3::hash(text).to_hex().as_bytes() => Ok(true),
            Ok(_) => Err(Unusable::Damaged(
                "the checksum of its manifest is wrong".to_owned(),
            )),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(Unusable::without("the checksum of its manifest")(error)),
        }
    }

    /// Reads the manifest and compares everything with it but the contents of the memory, which is left to the second
    /// part of the answer.
    pub(crate) fn open(image: &Path) -> Result<(Self, Pages), Unusable> {
        let manifest = Self::read(image)?;
        let mut pages = Vec::new();
        for (name, entry) in &manifest.files {
            let found = fs::metadata(image.join(name)).map_err(Unusable::without(name))?;
            let (found, wanted) = (found.len(), entry.size);
            if found != wanted {
                let wrong = format!("{name} has {found} bytes and should have {wanted}");
                return Err(Unusable::Damaged(wrong));
            }
            if name.starts_with(PAGES) {
                pages.push((name.clone(), entry.clone()));
            } else {
                entry.compare(image, name)?;
            }
        }
        pages.sort_by_key(|(_, entry)| entry.size);
        let pages = Pages {
            image: image.to_owned(),
            files: pages,
        };
        Ok((manifest, pages))
    }
}

impl Pages {
    /// Compares the contents.
    pub(crate) fn verify(self) -> Result<(), Unusable> {
        let threads = self.files.len().min(AT_ONCE);
        let unread = Mutex::new(self.files);
        let compare = || {
            while let Some((name, entry)) = pop(&unread) {
                entry.compare(&self.image, &name)?;
            }
            Ok(())
        };
        std::thread::scope(|scope| {
            let others = helpers(scope, threads.saturating_sub(1), compare);
            let mut verdict = compare();
            for other in others {
                let other = other.join();
                verdict = verdict.and(other.unwrap_or_else(|_| Err(Unusable::Unread(broke_off()))));
            }
            verdict
        })
    }
}

impl FileEntry {
    fn compare(&self, image: &Path, name: &str) -> Result<(), Unusable> {
        let found = hash(&image.join(name)).map_err(Unusable::without(name))?;
        match found.to_hex().as_str() == self.blake3 {
            true => Ok(()),
            false => Err(Unusable::Damaged(format!("the checksum of {name} is wrong"))),
        }
    }
}

/// Up to `count` threads that take part in `work`. Fewer if the machine has no more of them: whoever asks works, too.
fn helpers<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    count: usize,
    work: impl Fn() -> T + Copy + Send + 'scope,
) -> Vec<ScopedJoinHandle<'scope, T>> {
    let helper = || std::thread::Builder::new().spawn_scoped(scope, work).ok();
    (0..count).map_while(|_| helper()).collect()
}

fn broke_off() -> io::Error {
    io::Error::other("a thread broke off")
}

fn pop<T>(list: &Mutex<Vec<T>>) -> Option<T> {
    list.lock().unwrap_or_else(|p| p.into_inner()).pop()
}

#[cfg(test)]
mod tests {
    use rustix::process::{Resource, Rlimit};

    use super::*;

    fn image() -> (tempfile::TempDir, std::path::PathBuf) {
        let root = tempfile::tempdir().unwrap();
        let unfinished = root.path().join("new");
        fs::create_dir(&unfinished).unwrap();
        fs::write(unfinished.join("pages-1.img"), vec![7; 100_000]).unwrap();
        fs::write(unfinished.join("pages-2.img"), b"2").unwrap();
        fs::write(unfinished.join("core-1.img"), b"core").unwrap();
        let image = root.path().join("image");
        let made = Manifest::commit(&unfinished, &image, "guest", 5, "4.2").unwrap();
        assert_eq!(made.size, 100_005);
        (root, image)
    }

    #[test]
    fn a_whole_image_is_accepted() {
        let (_root, image) = image();
        let (manifest, pages) = Manifest::open(&image).unwrap();
        assert_eq!(manifest.guest_hash, "guest");
        assert_eq!(pages.files.len(), 2);
        pages.verify().unwrap();
    }

    #[test]
    fn an_image_tells_what_it_was_made_with() {
        let (_root, image) = image();
        let text = fs::read_to_string(image.join(NAME)).unwrap();
        let told: serde_json::Value = serde_json::from_str(&text).unwrap();
        let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
        assert_eq!(
            (&told["kernel"], &told["criu"], &told["guest_hash"]),
            (&kernel.trim().into(), &"4.2".into(), &"guest".into())
        );
    }

    fn flip(file: &Path) {
        let mut bytes = fs::read(file).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::write(file, bytes).unwrap();
    }

    #[test]
    fn a_flipped_bit_in_the_memory_is_noticed_by_the_second_look() {
        for name in ["pages-1.img", "pages-2.img"] {
            let (_root, image) = image();
            flip(&image.join(name));
            let (_, pages) = Manifest::open(&image).unwrap();
            assert_eq!(
                pages.verify().unwrap_err().to_string(),
                format!("the checksum of {name} is wrong")
            );
        }
    }

    #[test]
    fn a_flipped_bit_in_what_criu_interprets_is_noticed_by_the_first_look() {
        let (_root, image) = image();
        flip(&image.join("core-1.img"));
        assert_eq!(
            Manifest::open(&image).unwrap_err().to_string(),
            "the checksum of core-1.img is wrong"
        );
    }

    #[test]
    fn whatever_happens_to_any_file_of_an_image_is_noticed() {
        type Damage = fn(&Path);
        let damages: [(&str, Damage); 4] = [
            ("changed by a bit", flip),
            ("cut off", |file| {
                let bytes = fs::read(file).unwrap();
                fs::write(file, &bytes[..bytes.len() / 2]).unwrap();
            }),
            ("emptied", |file| fs::write(file, "").unwrap()),
            ("removed", |file| fs::remove_file(file).unwrap()),
        ];
        for name in ["pages-1.img", "pages-2.img", "core-1.img", NAME, SEAL] {
            for (what, damage) in damages {
                let (_root, image) = image();
                damage(&image.join(name));
                let verdict = Manifest::open(&image).and_then(|(_, pages)| pages.verify());
                assert!(matches!(verdict, Err(Unusable::Damaged(_))), "{name} was {what}");
            }
        }
    }

    #[test]
    fn any_flipped_bit_of_a_manifest_is_noticed() {
        let (_root, image) = image();
        let whole = fs::read(image.join(NAME)).unwrap();
        for bit in 0..whole.len() * 8 {
            let mut bytes = whole.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            fs::write(image.join(NAME), bytes).unwrap();
            let verdict = Manifest::open(&image);
            assert!(matches!(verdict, Err(Unusable::Damaged(_))), "bit {bit}");
        }
    }

    #[test]
    fn an_image_of_the_first_format_has_no_seal_and_is_accepted() {
        let (_root, image) = image();
        let text = fs::read_to_string(image.join(NAME)).unwrap();
        let first = text.replace("\"format\": 2", "\"format\": 1");
        fs::write(image.join(NAME), first).unwrap();
        assert!(Manifest::open(&image).is_err(), "its seal is another's");
        fs::remove_file(image.join(SEAL)).unwrap();
        Manifest::open(&image).unwrap();
    }

    #[test]
    fn what_the_machine_lacks_is_not_held_against_an_image() {
        let of = |error: io::Error| Unusable::without("core-1.img")(error).into_error();
        for errno in [
            Errno::MFILE,
            Errno::NFILE,
            Errno::NOMEM,
            Errno::AGAIN,
            Errno::INTR,
            Errno::ACCESS,
        ] {
            let error = of(errno.into());
            assert!(matches!(error, EngineError::Io { .. }), "{error:?}");
        }
        let error = of(io::ErrorKind::OutOfMemory.into());
        assert!(matches!(error, EngineError::Io { .. }), "{error:?}");
        for errno in [Errno::NOENT, Errno::ISDIR, Errno::IO, Errno::UCLEAN] {
            let error = of(errno.into());
            assert!(matches!(error, EngineError::BadImage(_)), "{error:?}");
        }
        for kind in [io::ErrorKind::UnexpectedEof, io::ErrorKind::InvalidData] {
            let error = of(kind.into());
            assert!(matches!(error, EngineError::BadImage(_)), "{error:?}");
        }
    }

    #[tokio::test]
    async fn a_thread_that_breaks_off_is_not_held_against_an_image() {
        let thread = tokio::task::spawn_blocking(|| std::panic::resume_unwind(Box::new(())));
        let error = Unusable::from(thread.await.unwrap_err()).into_error();
        assert!(matches!(error, EngineError::Io { .. }), "{error:?}");
    }

    /// Tells the process below, which can have no more of something, what to look at.
    const IMAGE: &str = "DORM_TEST_IMAGE";

    #[test]
    fn a_whole_image_is_not_damaged_where_threads_and_descriptors_are_short() {
        let (_root, image) = image();
        let test = "criu::manifest::tests::in_a_process_that_is_short_of_threads_and_descriptors";
        let child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "--ignored", test])
            .env(IMAGE, image)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&child.stdout);
        assert!(child.status.success() && said.contains("1 passed"), "{said}");
    }

    #[test]
    #[ignore = "runs in a process of its own, which the test above starts"]
    fn in_a_process_that_is_short_of_threads_and_descriptors() {
        let Some(image) = std::env::var_os(IMAGE).map(PathBuf::from) else {
            return;
        };
        let limit = |resource, current| {
            let maximum = rustix::process::getrlimit(resource).maximum;
            rustix::process::setrlimit(resource, Rlimit { current, maximum }).unwrap();
        };
        let (_, pages) = Manifest::open(&image).unwrap();
        let status = fs::read_to_string("/proc/self/status").unwrap();
        let taken = status.lines().find_map(|line| line.strip_prefix("VmSize:"));
        let taken = taken.and_then(|text| text.trim().strip_suffix(" kB")?.parse::<u64>().ok());
        // One MiB more, which is no room for the stack of a thread.
        limit(Resource::As, Some((taken.unwrap() + 1024) << 10));
        let thread = std::thread::Builder::new().spawn(|| ());
        let verdict = pages.verify();
        limit(Resource::As, None);
        assert!(thread.is_err(), "there is room for threads");
        verdict.unwrap();

        limit(Resource::Nofile, Some(0));
        let verdict = Manifest::open(&image);
        assert!(matches!(verdict, Err(Unusable::Unread(_))), "{verdict:?}");
    }
}
