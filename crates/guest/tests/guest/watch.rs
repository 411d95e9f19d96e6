use std::fs;

use serde_json::{Value, json};

use crate::client::{Events, Guest, eventually};

fn wait_for(events: &mut Events, name: &str, kind: &str) -> Value {
    loop {
        let event = events.next().expect("the stream goes on")["filesystem"].clone();
        if event["name"] == name && event["type"] == kind {
            return event;
        }
    }
}

#[test]
fn changes_in_a_folder_are_told() {
    let guest = Guest::start();
    let folder = guest.folder();
    let mut events = guest.stream("filesystem.Filesystem/WatchDir", &json!({"path": folder}), &[]);
    assert!(events.next().unwrap().get("start").is_some());
    fs::write(folder.join("f"), "x").unwrap();
    wait_for(&mut events, "f", "EVENT_TYPE_CREATE");
    wait_for(&mut events, "f", "EVENT_TYPE_WRITE");
    fs::set_permissions(
        folder.join("f"),
        std::os::unix::fs::PermissionsExt::from_mode(0o600),
    )
    .unwrap();
    wait_for(&mut events, "f", "EVENT_TYPE_CHMOD");
    fs::rename(folder.join("f"), folder.join("g")).unwrap();
    wait_for(&mut events, "f", "EVENT_TYPE_RENAME");
    wait_for(&mut events, "g", "EVENT_TYPE_CREATE");
    fs::remove_file(folder.join("g")).unwrap();
    wait_for(&mut events, "g", "EVENT_TYPE_REMOVE");
}

#[test]
fn a_recursive_watch_follows_folders_that_come_later() {
    let guest = Guest::start();
    let folder = guest.folder();
    fs::create_dir(folder.join("old")).unwrap();
    let request = json!({"path": folder, "recursive": true, "includeEntry": true});
    let mut events = guest.stream("filesystem.Filesystem/WatchDir", &request, &[]);
    events.next().unwrap();
    fs::write(folder.join("old/f"), "abc").unwrap();
    let event = wait_for(&mut events, "old/f", "EVENT_TYPE_WRITE");
    assert_eq!(event["entry"]["size"], "3");
    fs::create_dir_all(folder.join("new/deep")).unwrap();
    wait_for(&mut events, "new/deep", "EVENT_TYPE_CREATE");
    fs::write(folder.join("new/deep/f"), "").unwrap();
    wait_for(&mut events, "new/deep/f", "EVENT_TYPE_CREATE");
}

#[test]
fn a_watcher_collects_until_it_is_asked() {
    let guest = Guest::start();
    let folder = guest.folder();
    let id = guest.call("filesystem.Filesystem/CreateWatcher", &json!({"path": folder}))["watcherId"].clone();
    fs::write(folder.join("f"), "").unwrap();
    let mut seen = Vec::new();
    eventually("the change is collected", || {
        let got = guest.call(
            "filesystem.Filesystem/GetWatcherEvents",
            &json!({"watcherId": id}),
        );
        seen.extend(got["events"].as_array().cloned().unwrap_or_default());
        seen.iter()
            .any(|e| e["name"] == "f" && e["type"] == "EVENT_TYPE_CREATE")
    });
    guest.call("filesystem.Filesystem/RemoveWatcher", &json!({"watcherId": id}));
    for method in ["GetWatcherEvents", "RemoveWatcher"] {
        let (code, _) = guest.refused(
            &format!("filesystem.Filesystem/{method}"),
            &json!({"watcherId": id}),
        );
        assert_eq!(code, "not_found");
    }
}

#[test]
fn only_folders_can_be_watched() {
    let guest = Guest::start();
    let file = guest.folder().join("f");
    fs::write(&file, "").unwrap();
    let missing = json!({"path": "/no/such"});
    assert_eq!(
        guest.refused("filesystem.Filesystem/CreateWatcher", &missing).0,
        "not_found"
    );
    let (code, _) = guest.refused("filesystem.Filesystem/CreateWatcher", &json!({"path": file}));
    assert_eq!(code, "invalid_argument");
}
