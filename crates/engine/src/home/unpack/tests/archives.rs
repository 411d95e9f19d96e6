//! What ordinary archives hold. `Layer` writes headers by hand, so that the other tests can lie in them.

use std::fs;
use std::io::Write;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use tar::{EntryType, Header};

use super::super::{Applied, NO_PASSWD, UnpackError, apply_layer_at};

#[derive(Default)]
pub(super) struct Layer(Vec<u8>);

impl Layer {
    pub(super) fn raw(mut self, path: &str, kind: EntryType, link: &str, content: &[u8]) -> Self {
        let mut header = header(path, kind, link);
        header.set_size(content.len() as u64);
        self.push(header, content);
        self
    }

    pub(super) fn with(mut self, path: &str, content: &[u8], change: impl FnOnce(&mut Header)) -> Self {
        let mut header = header(path, EntryType::Regular, "");
        header.set_size(content.len() as u64);
        change(&mut header);
        self.push(header, content);
        self
    }

    pub(super) fn file(self, path: &str, content: &str) -> Self {
        self.raw(path, EntryType::Regular, "", content.as_bytes())
    }

    pub(super) fn dir(self, path: &str) -> Self {
        self.raw(path, EntryType::Directory, "", b"")
    }

    pub(super) fn symlink(self, path: &str, target: &str) -> Self {
        self.raw(path, EntryType::Symlink, target, b"")
    }

    pub(super) fn hard_link(self, path: &str, target: &str) -> Self {
        self.raw(path, EntryType::Link, target, b"")
    }

    pub(super) fn pax(self, records: &[(&str, &[u8])]) -> Self {
        let mut data = Vec::new();
        for (key, value) in records {
            let rest = key.len() + value.len() + 3;
            let mut length = rest + 1;
            while length != rest + length.to_string().len() {
                length = rest + length.to_string().len();
            }
            data.extend_from_slice(format!("{length} {key}=").as_bytes());
            data.extend_from_slice(value);
            data.push(b'\n');
        }
        self.raw("pax", EntryType::XHeader, "", &data)
    }

    pub(super) fn push(&mut self, mut header: Header, content: &[u8]) {
        header.set_cksum();
        self.0.extend_from_slice(header.as_bytes());
        self.0.extend_from_slice(content);
        self.0.resize(self.0.len().next_multiple_of(512), 0);
    }

    pub(super) fn bytes(mut self) -> Vec<u8> {
        self.0.resize(self.0.len() + 1024, 0);
        self.0
    }

    pub(super) fn apply(self, root: &Path) -> Result<Applied, UnpackError> {
        apply_layer_at(root, self.bytes().as_slice())
    }
}

/// Writes the name as it is: the crate's own setter refuses the names that these tests are about.
fn header(path: &str, kind: EntryType, link: &str) -> Header {
    let mut header = Header::new_ustar();
    header.as_mut_bytes()[..path.len()].copy_from_slice(path.as_bytes());
    header.as_mut_bytes()[157..157 + link.len()].copy_from_slice(link.as_bytes());
    header.set_entry_type(kind);
    header.set_mode(if kind == EntryType::Directory {
        0o755
    } else {
        0o644
    });
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(1_000_000);
    header.set_size(0);
    header
}

fn root() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

#[test]
fn a_layer_brings_files_with_their_modes_owners_and_times() {
    let root = root();
    let applied = Layer::default()
        .dir("usr/bin/")
        .with("usr/bin/sudo", b"binary", |h| {
            h.set_mode(0o4755);
            h.set_uid(12);
            h.set_gid(34);
            h.set_mtime(1_234_567_890);
        })
        .symlink("bin", "usr/bin")
        .hard_link("usr/bin/sudoedit", "usr/bin/sudo")
        .raw("pipe", EntryType::Fifo, "", b"")
        .apply(root.path())
        .unwrap();
    assert_eq!((applied.entries, applied.bytes), (5, 6));
    assert_eq!(applied.warnings(), [NO_PASSWD]);
    let applied = Layer::default()
        .file("etc/passwd", "")
        .apply(root.path())
        .unwrap();
    assert_eq!(applied.warnings(), Vec::<String>::new());

    let sudo = fs::metadata(root.path().join("usr/bin/sudo")).unwrap();
    assert_eq!(
        (sudo.mode() & 0o7777, sudo.uid(), sudo.gid(), sudo.mtime()),
        (0o4755, 12, 34, 1_234_567_890)
    );
    assert_eq!(
        sudo.ino(),
        fs::metadata(root.path().join("usr/bin/sudoedit")).unwrap().ino()
    );
    assert_eq!(
        fs::read_link(root.path().join("bin")).unwrap(),
        Path::new("usr/bin")
    );
    assert!(
        fs::symlink_metadata(root.path().join("pipe"))
            .unwrap()
            .file_type()
            .is_fifo()
    );
    assert_eq!(
        fs::metadata(root.path().join("usr/bin")).unwrap().mtime(),
        1_000_000
    );
}

#[test]
fn layers_may_be_compressed_with_gzip_in_several_members_or_with_zstd() {
    let plain = Layer::default()
        .file("a", &"x".repeat(300_000))
        .file("b", "b")
        .bytes();
    let gzip = |data: &[u8]| {
        let mut out = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        out.write_all(data).unwrap();
        out.finish().unwrap()
    };
    let members = [gzip(&plain[..1000]), gzip(&plain[1000..])].concat();
    for packed in [members, zstd::encode_all(plain.as_slice(), 1).unwrap()] {
        let root = root();
        apply_layer_at(root.path(), packed.as_slice()).unwrap();
        assert_eq!(fs::metadata(root.path().join("a")).unwrap().len(), 300_000);
        assert_eq!(fs::read(root.path().join("b")).unwrap(), b"b");
    }
}

#[test]
fn long_names_come_through_in_both_formats() {
    let long = format!("{}/{}", "d".repeat(200), "f".repeat(200));
    for gnu in [true, false] {
        let root = root();
        let layer = Layer::default();
        let layer = if gnu {
            layer.raw(
                "././@LongLink",
                EntryType::GNULongName,
                "",
                format!("{long}\0").as_bytes(),
            )
        } else {
            layer.pax(&[("path", long.as_bytes()), ("mtime", b"12.5")])
        };
        layer.file("short", "content").apply(root.path()).unwrap();
        assert_eq!(fs::read(root.path().join(&long)).unwrap(), b"content");
        assert!(!root.path().join("short").exists());
        if !gnu {
            let file = fs::metadata(root.path().join(&long)).unwrap();
            assert_eq!((file.mtime(), file.mtime_nsec()), (12, 500_000_000));
        }
    }
}

#[test]
fn a_capability_may_hold_newlines_and_strange_attributes_are_counted() {
    let root = root();
    let capability = b"\x01\0\0\x02\x0a\n\n\0\0\0\0\0\0\0\0\0\0\0\0\0";
    let applied = Layer::default()
        .pax(&[
            ("SCHILY.xattr.security.capability", capability),
            ("SCHILY.xattr.trusted.overlay.opaque", b"y"),
            ("path", b"ping"),
        ])
        .file("wrong-name", "x")
        .apply(root.path())
        .unwrap();
    assert_eq!(applied.xattrs_skipped, 1);
    let mut value = [0u8; 64];
    let n = rustix::fs::getxattr(root.path().join("ping"), c"security.capability", &mut value).unwrap();
    assert_eq!(&value[..n], capability);
}

#[test]
fn sparse_files_keep_their_holes() {
    let root = root();
    let mut layer = Layer::default();
    let mut gnu = Header::new_gnu();
    gnu.set_path("old").unwrap();
    gnu.set_entry_type(EntryType::GNUSparse);
    gnu.set_mode(0o644);
    gnu.set_uid(0);
    gnu.set_gid(0);
    gnu.set_mtime(0);
    gnu.set_size(512);
    {
        let fields = gnu.as_gnu_mut().unwrap();
        fields.sparse[0].offset = *b"00004000000\0";
        fields.sparse[0].numbytes = *b"00000001000\0";
        fields.realsize = *b"00010000000\0";
    }
    layer.push(gnu, &[7; 512]);
    let mut map = b"2\n1048576\n512\n2097152\n0\n".to_vec();
    map.resize(512, 0);
    map.extend_from_slice(&[7; 512]);
    layer
        .pax(&[
            ("GNU.sparse.major", b"1"),
            ("GNU.sparse.minor", b"0"),
            ("GNU.sparse.name", b"new"),
            ("GNU.sparse.realsize", b"2097152"),
        ])
        .raw("GNUSparseFile.0/new", EntryType::Regular, "", &map)
        .apply(root.path())
        .unwrap();
    for name in ["old", "new"] {
        let content = fs::read(root.path().join(name)).unwrap();
        assert_eq!(content.len(), 2_097_152, "{name}");
        assert!(
            content
                .iter()
                .enumerate()
                .all(|(at, b)| *b == if at >> 9 == 2048 { 7 } else { 0 }),
            "{name}"
        );
        assert!(
            fs::metadata(root.path().join(name)).unwrap().blocks() < 100,
            "{name}"
        );
    }
}

#[test]
fn entries_replace_what_is_there_whatever_it_was() {
    let root = root();
    Layer::default()
        .file("file", "1")
        .dir("dir")
        .file("dir/below", "1")
        .symlink("link", "dir")
        .file("self", "kept")
        .apply(root.path())
        .unwrap();
    Layer::default()
        .dir("file")
        .file("dir", "2")
        .dir("link")
        .file("link/new", "2")
        .hard_link("self", "self")
        .apply(root.path())
        .unwrap();
    assert!(root.path().join("file").is_dir());
    assert_eq!(fs::read(root.path().join("dir")).unwrap(), b"2");
    assert!(!root.path().join("link").is_symlink());
    assert_eq!(fs::read(root.path().join("link/new")).unwrap(), b"2");
    assert_eq!(fs::read(root.path().join("self")).unwrap(), b"kept");
}

#[test]
fn a_directory_reached_through_a_link_of_a_lower_layer_is_the_one_it_points_to() {
    let root = root();
    Layer::default()
        .dir("usr/lib")
        .symlink("lib", "/usr/lib")
        .apply(root.path())
        .unwrap();
    Layer::default()
        .file("lib/libc.so", "c")
        .apply(root.path())
        .unwrap();
    assert_eq!(fs::read(root.path().join("usr/lib/libc.so")).unwrap(), b"c");
    assert!(root.path().join("lib").is_symlink());
}

#[test]
fn an_archive_that_is_cut_off_or_damaged_is_refused() {
    let whole = Layer::default().file("a", &"a".repeat(2000)).bytes();
    for end in [300, 700, 2000] {
        let refused = apply_layer_at(root().path(), &whole[..end]).unwrap_err();
        assert!(matches!(refused, UnpackError::Malformed(_)), "{end}: {refused}");
    }
    let mut damaged = whole.clone();
    damaged[1] ^= 1;
    assert!(matches!(
        apply_layer_at(root().path(), damaged.as_slice()),
        Err(UnpackError::Malformed(_))
    ));
    assert!(apply_layer_at(root().path(), &b"\x1f\x8b garbage"[..]).is_err());
}
