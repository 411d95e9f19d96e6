//! Whiteouts hide what lower layers brought, wherever they stand in the archive.

use std::fs;
use std::path::Path;

use super::archives::Layer;

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(dir)
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

fn lower(root: &Path) {
    Layer::default()
        .dir("d")
        .file("d/old", "old")
        .dir("d/sub")
        .file("d/sub/old", "old")
        .file("f", "old")
        .apply(root)
        .unwrap();
}

#[test]
fn a_whiteout_removes_files_and_whole_directories() {
    let root = tempfile::tempdir().unwrap();
    lower(root.path());
    let applied = Layer::default()
        .file(".wh.f", "")
        .file("d/.wh.sub", "")
        .file("gone/.wh.x", "")
        .apply(root.path())
        .unwrap();
    assert_eq!(applied.whiteouts, 3);
    assert_eq!(names(root.path()), ["d"]);
    assert_eq!(names(&root.path().join("d")), ["old"]);
}

#[test]
fn an_opaque_directory_loses_what_was_below_but_keeps_what_the_layer_brings() {
    for opaque_first in [true, false] {
        let root = tempfile::tempdir().unwrap();
        lower(root.path());
        let mut layer = Layer::default().dir("d");
        if opaque_first {
            layer = layer.file("d/.wh..wh..opq", "");
        }
        layer = layer.file("d/new", "new").file("d/sub/new", "new");
        if !opaque_first {
            layer = layer.file("d/.wh..wh..opq", "");
        }
        layer.apply(root.path()).unwrap();
        assert_eq!(names(&root.path().join("d")), ["new", "sub"], "{opaque_first}");
        assert_eq!(names(&root.path().join("d/sub")), ["new"], "{opaque_first}");
        assert_eq!(names(root.path()), ["d", "f"], "{opaque_first}");
    }
}

#[test]
fn a_whiteout_does_not_hide_what_its_own_layer_brings() {
    let root = tempfile::tempdir().unwrap();
    lower(root.path());
    Layer::default()
        .file("f", "new")
        .file(".wh.f", "")
        .file("d/new", "new")
        .file(".wh.d", "")
        .apply(root.path())
        .unwrap();
    assert_eq!(fs::read(root.path().join("f")).unwrap(), b"new");
    assert_eq!(names(&root.path().join("d")), ["new"]);
}

/// Filesystems give the number of a removed directory to the next one that is made.
#[test]
fn a_directory_made_anew_has_nothing_of_the_one_that_was_replaced() {
    let root = tempfile::tempdir().unwrap();
    Layer::default()
        .file("d/f", "old")
        .symlink("d", "nowhere")
        .dir("d")
        .file("d/.wh.f", "")
        .file("d/f/x", "new")
        .file("d/.wh.f", "")
        .apply(root.path())
        .unwrap();
    assert_eq!(names(&root.path().join("d")), ["f"]);
    assert_eq!(names(&root.path().join("d/f")), ["x"]);
}

#[test]
fn an_opaque_mark_reached_by_two_names_is_about_one_directory() {
    let root = tempfile::tempdir().unwrap();
    lower(root.path());
    Layer::default().symlink("alias", "d").apply(root.path()).unwrap();
    Layer::default()
        .file("alias/new", "new")
        .file("d/.wh..wh..opq", "")
        .apply(root.path())
        .unwrap();
    assert_eq!(names(&root.path().join("d")), ["new"]);
}

#[test]
fn bookkeeping_of_old_builders_is_left_out() {
    let root = tempfile::tempdir().unwrap();
    Layer::default()
        .dir(".wh..wh.plnk")
        .file(".wh..wh.plnk/1.2", "x")
        .file(".wh..wh.aufs", "")
        .apply(root.path())
        .unwrap();
    assert_eq!(names(root.path()), Vec::<String>::new());
}
