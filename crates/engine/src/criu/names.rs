//! Names for files that have lost the one they were opened by, and have others: CRIU finds such a file again by a name
//! that it makes beside the lost one, and takes that away again if the processes are to go on. An image needs it, so it
//! is made again before they do.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, BufReader, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Component, Path, PathBuf};

use prost::Message;
use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

/// First characters of the names that CRIU makes.
const PREFIX: &[u8] = b"link_remap.";
/// Of one image.
const MOST_GHOSTS: usize = 1 << 16;

/// Files that CRIU has named, and where. They stay reachable when the names are gone.
#[derive(Debug, Default)]
pub(super) struct Names(Vec<Named>);

#[derive(Debug)]
struct Named {
    folder: OwnedFd,
    file: OwnedFd,
    path: PathBuf,
}

impl Names {
    /// Finds the names that the image in `images` speaks of. What is not in `home` is in the image itself.
    pub(super) fn hold(home: &Path, images: &Path) -> io::Result<Self> {
        let paths = linked(images)?;
        if paths.is_empty() {
            return Ok(Self::default());
        }
        let home = File::open(home)?;
        let mut names = Vec::new();
        for path in paths {
            match named(&home, &path) {
                Err(Errno::NOENT | Errno::NOTDIR) => {}
                found => names.push(found?),
            }
        }
        Ok(Self(names))
    }

    /// Makes the names again, and gives them.
    pub(super) fn leave(self) -> io::Result<Vec<PathBuf>> {
        for Named { folder, file, path } in &self.0 {
            let name = path.file_name().unwrap_or_default();
            rustix::fs::linkat(file, "", folder, name, AtFlags::EMPTY_PATH)?;
        }
        Ok(self.0.into_iter().map(|named| named.path).collect())
    }
}

fn named(home: &File, path: &Path) -> rustix::io::Result<Named> {
    let (folder, name) = folder_of(home, path)?;
    let file = rustix::fs::openat(
        &folder,
        name,
        OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC,
        Mode::empty(),
    )?;
    Ok(Named {
        folder,
        file,
        path: path.to_owned(),
    })
}

/// No link is followed, whatever the box has put there.
fn folder_of<'a>(home: &File, path: &'a Path) -> rustix::io::Result<(OwnedFd, &'a std::ffi::OsStr)> {
    let plain = path.components().all(|part| matches!(part, Component::Normal(_)));
    let name = path.file_name().filter(|_| plain).ok_or(Errno::INVAL)?;
    let parent = match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    Ok((open_folder(home, parent)?, name))
}

fn open_folder(above: impl AsFd, path: &Path) -> rustix::io::Result<OwnedFd> {
    rustix::fs::openat2(
        above,
        path,
        OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
        ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV,
    )
}

/// Takes names away that are needed no more, once the processes go on.
pub(crate) fn forget(home: &Path, names: &[PathBuf]) {
    let Ok(home) = File::open(home) else { return };
    for path in names {
        let gone = folder_of(&home, path)
            .and_then(|(folder, name)| rustix::fs::unlinkat(folder, name, AtFlags::empty()));
        if let Err(error) = gone {
            tracing::debug!(path = %path.display(), %error, "a name made for a memory image is left");
        }
    }
}

/// Whether the image in `images` has names in its home, as far as can be told.
pub(crate) fn has_names(images: &Path) -> bool {
    linked(images).is_ok_and(|names| !names.is_empty())
}

/// Takes away the names that the image in `images` has in `home`. A name that is the only one of its file is none of those: it
/// came later, and is the box's own.
pub(crate) fn release(home: &Path, images: &Path) {
    let released = || -> io::Result<()> {
        let mut names = linked(images)?;
        if names.is_empty() {
            return Ok(());
        }
        let folder = File::open(home)?;
        let is_second = |path: &PathBuf| {
            let name = path.file_name().unwrap_or_default().as_encoded_bytes();
            let found = named(&folder, path).and_then(|named| rustix::fs::fstat(named.file));
            name.starts_with(PREFIX) && found.is_ok_and(|found| found.st_nlink > 1)
        };
        names.retain(is_second);
        forget(home, &names);
        Ok(())
    };
    if let Err(error) = released() {
        tracing::debug!(image = %images.display(), %error, "names made for a memory image may be left");
    }
}

/// Takes away the files that a CRIU which was killed in a restore has made in `home`, for those of the image that are open and have no name.
/// CRIU makes them beside the lost name, has them opened, and removes them; the next would find them in its way.
pub(crate) fn lay_ghosts(home: &Path, images: &Path) {
    let laid = || -> io::Result<()> {
        let of_files = remaps(images, GHOST)?.take(MOST_GHOSTS);
        let numbers = of_files
            .map(|remap| remap.map(|remap| (remap.opened, remap.file)))
            .collect::<io::Result<BTreeMap<u32, u32>>>()?;
        if numbers.is_empty() {
            return Ok(());
        }
        let home = File::open(home)?;
        for file in files(images)? {
            let (id, lost) = file?;
            if let Some(number) = numbers.get(&id)
                && let Err(error) = lay(&home, &lost, *number)
            {
                tracing::debug!(lost = %lost.display(), %error, "a file of a restore that was broken off is left");
            }
        }
        Ok(())
    };
    if let Err(error) = laid() {
        tracing::debug!(image = %images.display(), %error, "files of a restore that was broken off may be left");
    }
}

/// The ghost is in the folder of the lost name. Where that has gone, it is in the next one above that was there then: CRIU itself makes
/// folders for those that are ghosts.
fn lay(home: &File, lost: &Path, number: u32) -> rustix::io::Result<()> {
    let mut name = lost.file_name().ok_or(Errno::INVAL)?.to_owned();
    name.push(format!(".cr.{number:x}.ghost"));
    let mut folder = open_folder(home, Path::new("."))?;
    let mut below = lost.parent().into_iter().flatten();
    loop {
        match rustix::fs::unlinkat(&folder, &name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(Errno::ISDIR) => rustix::fs::unlinkat(&folder, &name, AtFlags::REMOVEDIR)?,
            Err(error) => return Err(error),
        }
        let Some(part) = below.next() else { return Ok(()) };
        folder = match open_folder(&folder, Path::new(part)) {
            Err(Errno::NOENT) => return Ok(()),
            opened => opened?,
        };
    }
}

const NAMED: i32 = 0;
const GHOST: i32 = 1;

#[derive(Clone, PartialEq, Message)]
struct Remap {
    /// The file that was opened.
    #[prost(uint32, required, tag = "1")]
    opened: u32,
    /// What it is now: another file, or the number of a ghost.
    #[prost(uint32, required, tag = "2")]
    file: u32,
    #[prost(int32, optional, tag = "3")]
    kind: Option<i32>,
}

#[derive(Clone, PartialEq, Message)]
struct FileEntry {
    #[prost(uint32, required, tag = "2")]
    id: u32,
    #[prost(message, optional, tag = "3")]
    regular: Option<RegularFile>,
}

#[derive(Clone, PartialEq, Message)]
struct RegularFile {
    /// CRIU's own type for it is a string, and a path of Linux need not be one.
    #[prost(bytes = "vec", required, tag = "6")]
    name: Vec<u8>,
}

/// Where the files with such names are, below the box's root.
fn linked(images: &Path) -> io::Result<Vec<PathBuf>> {
    let numbers = remaps(images, NAMED)?
        .map(|remap| remap.map(|remap| remap.file))
        .collect::<io::Result<BTreeSet<u32>>>()?;
    if numbers.is_empty() {
        return Ok(Vec::new());
    }
    let mut paths = Vec::new();
    for file in files(images)? {
        let (id, path) = file?;
        if numbers.contains(&id) {
            paths.push(path);
        }
    }
    Ok(paths)
}

fn remaps(images: &Path, kind: i32) -> io::Result<impl Iterator<Item = io::Result<Remap>> + use<>> {
    let remaps = entries(images.join("remap-fpath.img"))?;
    let is_of_kind =
        move |remap: &io::Result<Remap>| remap.as_ref().map_or(true, |remap| remap.kind() == kind);
    Ok(remaps.filter(is_of_kind))
}

/// Numbers and names of the regular files of an image. A box chooses how many they are.
fn files(images: &Path) -> io::Result<impl Iterator<Item = io::Result<(u32, PathBuf)>> + use<>> {
    let named = |file: FileEntry| {
        let path = PathBuf::from(OsString::from_vec(file.regular?.name));
        let inside = path.strip_prefix("/").map(Path::to_owned).unwrap_or(path);
        Some((file.id, inside))
    };
    let files = entries(images.join("files.img"))?;
    Ok(files.filter_map(move |file| file.map(named).transpose()))
}

/// The messages of an image file, each behind its length, after two magic numbers. One that is not there has none.
fn entries<T: Message + Default>(path: PathBuf) -> io::Result<impl Iterator<Item = io::Result<T>>> {
    let mut file = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        opened => Some(BufReader::new(opened?)),
    };
    if let Some(file) = &mut file {
        file.read_exact(&mut [0; 8])?;
    }
    Ok(std::iter::from_fn(move || {
        let entry = entry(file.as_mut()?).transpose();
        if !matches!(entry, Some(Ok(_))) {
            file = None;
        }
        entry
    }))
}

fn entry<T: Message + Default>(file: &mut BufReader<File>) -> io::Result<Option<T>> {
    let (mut length, mut message) = (Vec::new(), Vec::new());
    file.by_ref().take(4).read_to_end(&mut length)?;
    let Ok(length) = length.try_into() else {
        return Ok(None);
    };
    let length = u64::from(u32::from_le_bytes(length));
    file.take(length).read_to_end(&mut message)?;
    if (message.len() as u64) < length {
        let cut = "a file of the memory image is cut off";
        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, cut));
    }
    T::decode(&message[..]).map(Some).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;

    use super::*;

    fn write<T: Message>(path: &Path, messages: &[T]) {
        let mut bytes = vec![0; 8];
        for message in messages {
            let message = message.encode_to_vec();
            bytes.extend((message.len() as u32).to_le_bytes());
            bytes.extend(message);
        }
        std::fs::write(path, bytes).unwrap();
    }

    fn image<N: AsRef<[u8]>>(folder: &Path, names: &[N]) {
        let numbered = || names.iter().enumerate().map(|(id, name)| (id as u32, name));
        let remap = |(file, _): (u32, &N)| Remap {
            opened: 1000 + file,
            file,
            kind: None,
        };
        write(
            &folder.join("remap-fpath.img"),
            &numbered().map(remap).collect::<Vec<_>>(),
        );
        let file = |(id, name): (u32, &N)| FileEntry {
            id,
            regular: Some(RegularFile {
                name: name.as_ref().to_owned(),
            }),
        };
        write(
            &folder.join("files.img"),
            &numbered().map(file).collect::<Vec<_>>(),
        );
    }

    #[test]
    fn a_name_that_was_taken_away_is_made_again_and_can_be_forgotten() {
        let (home, images) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        image(images.path(), &["/a/link_remap.1", "not/in/the/home"]);
        let name = home.path().join("a/link_remap.1");
        std::fs::create_dir(home.path().join("a")).unwrap();
        std::fs::write(&name, "content").unwrap();
        std::fs::hard_link(&name, home.path().join("other")).unwrap();
        let held = Names::hold(home.path(), images.path()).unwrap();
        std::fs::remove_file(&name).unwrap();
        let left = held.leave().unwrap();
        assert_eq!(left, [Path::new("a/link_remap.1")]);
        assert_eq!(std::fs::read_to_string(&name).unwrap(), "content");
        forget(home.path(), &left);
        assert!(!name.exists() && home.path().join("other").exists());
    }

    #[test]
    fn an_image_that_is_given_up_takes_its_names_along_but_not_those_of_the_box() {
        let (home, images) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let names = ["link_remap.1", "link_remap.2", "file"];
        image(images.path(), &names);
        for name in names {
            std::fs::write(home.path().join(name), "content").unwrap();
        }
        for name in ["link_remap.1", "file"] {
            let other = home.path().join(format!("other-{name}"));
            std::fs::hard_link(home.path().join(name), other).unwrap();
        }
        release(home.path(), images.path());
        assert_eq!(
            names.map(|name| home.path().join(name).exists()),
            [false, true, true]
        );
    }

    #[test]
    fn names_need_not_be_utf_8() {
        let (home, images) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let folder = home.path().join(OsStr::from_bytes(b"gr\xfc\xdfe"));
        std::fs::create_dir(&folder).unwrap();
        std::fs::write(folder.join("link_remap.1"), "content").unwrap();
        std::fs::hard_link(folder.join("link_remap.1"), home.path().join("other")).unwrap();
        image(
            images.path(),
            &[&b"/gr\xfc\xdfe/link_remap.1"[..], b"/elsewhere/\xff"],
        );
        assert!(has_names(images.path()));
        let held = Names::hold(home.path(), images.path()).unwrap();
        assert_eq!(held.0.len(), 1);
        release(home.path(), images.path());
        assert!(!folder.join("link_remap.1").exists() && home.path().join("other").exists());
    }

    #[test]
    fn what_a_killed_restore_has_made_goes_and_nothing_else() {
        let (home, images) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let opened = |id, name: &[u8]| FileEntry {
            id,
            regular: Some(RegularFile { name: name.to_vec() }),
        };
        let ghost = |opened, file| Remap {
            opened,
            file,
            kind: Some(GHOST),
        };
        let files = [
            opened(7, b"/log"),
            opened(8, b"/work/tree/that/is/gone/data"),
            opened(9, b"/work/left"),
        ];
        write(&images.path().join("files.img"), &files);
        let remaps = [ghost(7, 0x1a), ghost(8, 0x1c), ghost(9, 0x1d)];
        write(&images.path().join("remap-fpath.img"), &remaps);
        std::fs::create_dir_all(home.path().join("work/tree")).unwrap();
        let kept = ["log", "log.cr.1b.ghost", "work/data"];
        let made = [
            "log.cr.1a.ghost",
            "work/tree/data.cr.1c.ghost",
            "work/left.cr.1d.ghost",
        ];
        let (folder, files) = (made[2], [made[0], made[1]]);
        std::fs::create_dir(home.path().join(folder)).unwrap();
        for name in kept.iter().chain(&files) {
            std::fs::write(home.path().join(name), "content").unwrap();
        }
        assert!(!has_names(images.path()));
        lay_ghosts(home.path(), images.path());
        let left = |name: &&str| home.path().join(name).exists();
        assert!(kept.iter().all(left) && !made.iter().any(left));
    }

    #[test]
    fn no_name_leads_out_of_the_home() {
        let (home, images) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        std::fs::write(images.path().join("link_remap.1"), "").unwrap();
        std::fs::hard_link(images.path().join("link_remap.1"), images.path().join("other")).unwrap();
        std::os::unix::fs::symlink(images.path(), home.path().join("way")).unwrap();
        for path in ["way/link_remap.1", "../link_remap.1"] {
            image(images.path(), &[path]);
            Names::hold(home.path(), images.path()).unwrap_err();
            forget(home.path(), &[path.into()]);
            release(home.path(), images.path());
        }
        assert!(images.path().join("link_remap.1").exists());
    }

    #[test]
    fn an_image_without_such_files_needs_nothing() {
        let images = tempfile::tempdir().unwrap();
        assert!(!has_names(images.path()));
        std::fs::write(images.path().join("remap-fpath.img"), [0; 10]).unwrap();
        assert!(linked(images.path()).unwrap().is_empty());
        std::fs::write(images.path().join("remap-fpath.img"), [1; 16]).unwrap();
        linked(images.path()).unwrap_err();
    }
}
