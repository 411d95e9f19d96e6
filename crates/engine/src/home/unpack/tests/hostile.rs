//! Archives that want to reach outside. Beside each root lies a directory that must stay as it is.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use tar::EntryType;

use super::super::{UnpackError, apply_layer_at};
use super::archives::Layer;

struct Place {
    dir: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("root")).unwrap();
        fs::create_dir(dir.path().join("outside")).unwrap();
        fs::write(dir.path().join("outside/secret"), "secret").unwrap();
        Self { dir }
    }

    fn root(&self) -> PathBuf {
        self.dir.path().join("root")
    }

    fn outside(&self) -> String {
        self.dir.path().join("outside").to_str().unwrap().to_owned()
    }

    fn assert_untouched(&self) {
        let names: Vec<_> = fs::read_dir(self.dir.path().join("outside"))
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        assert_eq!(names, ["secret"]);
        let secret = self.dir.path().join("outside/secret");
        assert_eq!(fs::read(&secret).unwrap(), b"secret");
        assert_eq!(fs::metadata(&secret).unwrap().nlink(), 1);
        assert_eq!(fs::read_dir(self.dir.path()).unwrap().count(), 2);
    }
}

#[test]
fn a_path_with_dots_is_refused() {
    for path in ["../outside/x", "a/../../outside/x", "..", "a/.."] {
        let place = Place::new();
        let refused = Layer::default().file(path, "x").apply(&place.root()).unwrap_err();
        assert!(matches!(refused, UnpackError::Outside(_)), "{path}: {refused}");
        place.assert_untouched();
    }
}

#[test]
fn an_absolute_path_lands_below_the_root() {
    let place = Place::new();
    let path = format!("{}/x", place.outside());
    Layer::default().file(&path, "x").apply(&place.root()).unwrap();
    place.assert_untouched();
    assert_eq!(
        fs::read(place.root().join(path.trim_start_matches('/'))).unwrap(),
        b"x"
    );
}

#[test]
fn writing_through_a_symlink_stays_below_the_root() {
    for target in [
        Place::new().outside(),
        "../outside".to_owned(),
        "../../../../../../..".to_owned(),
    ] {
        let place = Place::new();
        let layer = Layer::default()
            .symlink("door", &target)
            .file("door/secret", "overwritten");
        // Whether the target exists below the root or not, the write never leaves it.
        let _ = layer.apply(&place.root());
        place.assert_untouched();
    }
    let place = Place::new();
    let deep = Layer::default()
        .dir("deep")
        .symlink("deep/up", "../../..")
        .file("deep/up/x", "x");
    deep.apply(&place.root()).unwrap();
    place.assert_untouched();
    assert_eq!(fs::read(place.root().join("x")).unwrap(), b"x");
}

#[test]
fn the_last_component_is_never_followed() {
    let place = Place::new();
    let secret = format!("{}/secret", place.outside());
    Layer::default()
        .symlink("a", &secret)
        .file("a", "mine")
        .symlink("b", &place.outside())
        .with("b", b"", |h| {
            h.set_entry_type(EntryType::Directory);
            h.set_mode(0o777);
            h.set_uid(7);
        })
        .file("b/new", "mine")
        .symlink("c", &secret)
        .raw("c", EntryType::Fifo, "", b"")
        .apply(&place.root())
        .unwrap();
    place.assert_untouched();
    assert_eq!(fs::read(place.root().join("a")).unwrap(), b"mine");
    assert_eq!(fs::read(place.root().join("b/new")).unwrap(), b"mine");
}

#[test]
fn a_hard_link_cannot_reach_a_file_outside() {
    let place = Place::new();
    let secret = format!("{}/secret", place.outside());
    assert!(
        Layer::default()
            .hard_link("l", &secret)
            .apply(&place.root())
            .is_err()
    );
    let dots = Layer::default()
        .hard_link("l", "../outside/secret")
        .apply(&place.root());
    assert!(matches!(dots, Err(UnpackError::Outside(_))));
    let through = Layer::default()
        .symlink("door", &place.outside())
        .hard_link("l", "door/secret");
    assert!(through.apply(&place.root()).is_err());
    place.assert_untouched();

    // A link to a link is a second name of the link itself.
    Layer::default()
        .symlink("s", &secret)
        .hard_link("t", "s")
        .file("t", "x")
        .apply(&place.root())
        .unwrap();
    place.assert_untouched();
}

#[test]
fn whiteouts_do_not_remove_anything_outside() {
    for path in [".wh...", ".wh..", ".wh.", "a/.wh..."] {
        let place = Place::new();
        let refused = Layer::default()
            .dir("a")
            .file(path, "")
            .apply(&place.root())
            .unwrap_err();
        assert!(matches!(refused, UnpackError::Outside(_)), "{path}: {refused}");
        place.assert_untouched();
    }
    let place = Place::new();
    Layer::default()
        .symlink("door", &place.outside())
        .file("door/.wh.secret", "")
        .file("door/.wh..wh..opq", "")
        .file(".wh.door", "")
        .apply(&place.root())
        .unwrap();
    place.assert_untouched();

    Layer::default()
        .symlink("lower", &place.outside())
        .apply(&place.root())
        .unwrap();
    Layer::default()
        .file(".wh.lower", "")
        .apply(&place.root())
        .unwrap();
    assert!(!place.root().join("lower").is_symlink());
    place.assert_untouched();
}

#[test]
fn device_nodes_and_unknown_entries_are_left_out_and_counted() {
    let place = Place::new();
    let applied = Layer::default()
        .raw("sda", EntryType::Block, "", b"")
        .raw("dev/mem", EntryType::Char, "", b"")
        .raw("odd", EntryType::new(b'Z'), "", b"some content")
        .file("after", "x")
        .apply(&place.root())
        .unwrap();
    assert_eq!((applied.devices_skipped, applied.unknown_skipped), (2, 1));
    assert_eq!(applied.warnings().len(), 3);
    let names: Vec<_> = fs::read_dir(place.root())
        .unwrap()
        .map(|e| e.unwrap().file_name())
        .collect();
    assert_eq!(names, ["after"]);
}

#[test]
fn ids_that_no_box_has_become_nobody() {
    let place = Place::new();
    let applied = Layer::default()
        .with("a", b"", |h| h.set_uid(65_536))
        .with("b", b"", |h| h.set_gid(3_000_000_000))
        .with("c", b"", |h| h.set_uid(65_535))
        .apply(&place.root())
        .unwrap();
    assert_eq!(applied.ids_clamped, 2);
    let ids = |name: &str| {
        let meta = fs::metadata(place.root().join(name)).unwrap();
        (meta.uid(), meta.gid())
    };
    assert_eq!(
        (ids("a"), ids("b"), ids("c")),
        ((65_534, 0), (0, 65_534), (65_535, 0))
    );
}

#[test]
fn sizes_that_cannot_be_are_refused_without_taking_memory() {
    let place = Place::new();
    let huge_extension = Layer::default().with("x", b"", |h| {
        h.set_entry_type(EntryType::XHeader);
        h.set_size(1 << 40);
    });
    assert!(matches!(
        huge_extension.apply(&place.root()),
        Err(UnpackError::Malformed(_))
    ));
    let huge_file = Layer::default()
        .pax(&[("size", b"18446744073709551615")])
        .file("x", "x");
    assert!(matches!(
        huge_file.apply(&place.root()),
        Err(UnpackError::Malformed(_))
    ));
    let huge_map = Layer::default()
        .pax(&[("GNU.sparse.major", b"1"), ("GNU.sparse.realsize", b"1")])
        .file("x", &format!("{}\n", u64::MAX));
    assert!(huge_map.apply(&place.root()).is_err());
    let overlapping = Layer::default()
        .pax(&[("GNU.sparse.map", b"0,4,2,4"), ("GNU.sparse.size", b"8")])
        .file("x", "12345678");
    assert!(matches!(
        overlapping.apply(&place.root()),
        Err(UnpackError::Malformed(_))
    ));
}

#[test]
fn a_root_that_is_not_there_is_an_error() {
    assert!(apply_layer_at(Path::new("/nonexistent/root"), &[][..]).is_err());
}
