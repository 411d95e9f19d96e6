use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};

use serde_json::json;

use crate::client::Guest;

const NOBODY: (&str, &str) = ("Authorization", "Basic bm9ib2R5Og==");

#[test]
fn a_file_is_described() {
    let guest = Guest::start();
    let file = guest.folder().join("f");
    fs::write(&file, "12345").unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).unwrap();
    let entry = &guest.call("filesystem.Filesystem/Stat", &json!({"path": file}))["entry"];
    assert_eq!(
        (entry["name"].as_str(), entry["type"].as_str()),
        (Some("f"), Some("FILE_TYPE_FILE"))
    );
    assert_eq!(
        (entry["size"].as_str(), entry["mode"].as_u64()),
        (Some("5"), Some(0o640))
    );
    assert_eq!(
        (entry["owner"].as_str(), entry["permissions"].as_str()),
        (Some("root"), Some("-rw-r-----"))
    );
    assert!(entry["modifiedTime"].as_str().unwrap().ends_with('Z'));
    assert_eq!(
        guest
            .refused("filesystem.Filesystem/Stat", &json!({"path": "/no/such"}))
            .0,
        "not_found"
    );
}

#[test]
fn folders_are_made_with_their_parents_once() {
    let guest = Guest::start();
    let folder = guest.folder().join("a/b/c");
    let entry = guest.call("filesystem.Filesystem/MakeDir", &json!({"path": folder}));
    assert_eq!(entry["entry"]["type"], "FILE_TYPE_DIRECTORY");
    assert!(folder.is_dir());
    assert_eq!(
        guest
            .refused("filesystem.Filesystem/MakeDir", &json!({"path": folder}))
            .0,
        "already_exists"
    );
    fs::write(folder.join("f"), "").unwrap();
    let onto = json!({"path": folder.join("f")});
    assert_eq!(
        guest.refused("filesystem.Filesystem/MakeDir", &onto).0,
        "invalid_argument"
    );
}

#[test]
fn a_folder_is_listed_as_deep_as_asked() {
    let guest = Guest::start();
    let folder = guest.folder();
    fs::create_dir_all(folder.join("d/e")).unwrap();
    fs::write(folder.join("d/f"), "").unwrap();
    symlink("d", folder.join("l")).unwrap();
    let names = |depth: u32| {
        let list = guest.call(
            "filesystem.Filesystem/ListDir",
            &json!({"path": folder, "depth": depth}),
        );
        let entries = list["entries"].as_array().unwrap().clone();
        entries
            .iter()
            .map(|e| e["name"].as_str().unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    assert_eq!(names(0), ["d", "l"]);
    assert_eq!(names(2), ["d", "e", "f", "l"], "links are not followed");
    let file = json!({"path": folder.join("d/f")});
    assert_eq!(
        guest.refused("filesystem.Filesystem/ListDir", &file).0,
        "invalid_argument"
    );
}

#[test]
fn files_and_folders_are_moved_even_between_file_systems() {
    let guest = Guest::start();
    let folder = guest.folder();
    fs::create_dir(folder.join("d")).unwrap();
    fs::write(folder.join("d/f"), "text").unwrap();
    let request = json!({"source": folder.join("d"), "destination": folder.join("new/place")});
    let entry = guest.call("filesystem.Filesystem/Move", &request);
    assert_eq!(entry["entry"]["name"], "place");
    assert_eq!(fs::read(folder.join("new/place/f")).unwrap(), b"text");
    assert_eq!(
        guest.refused("filesystem.Filesystem/Move", &request).0,
        "not_found"
    );

    let other = tempfile::tempdir_in("/dev/shm").unwrap();
    assert_ne!(
        fs::metadata(other.path()).unwrap().dev(),
        fs::metadata(&folder).unwrap().dev()
    );
    let request = json!({"source": folder.join("new/place"), "destination": other.path().join("here")});
    guest.call("filesystem.Filesystem/Move", &request);
    assert_eq!(fs::read(other.path().join("here/f")).unwrap(), b"text");
    assert!(!folder.join("new/place").exists());
}

#[test]
fn removal_takes_all_below_and_follows_no_link() {
    let guest = Guest::start();
    let folder = guest.folder();
    fs::create_dir_all(folder.join("d/e")).unwrap();
    fs::write(folder.join("kept"), "").unwrap();
    symlink("../kept", folder.join("d/l")).unwrap();
    symlink("/etc", folder.join("d/etc")).unwrap();
    guest.call("filesystem.Filesystem/Remove", &json!({"path": folder.join("d")}));
    assert!(!folder.join("d").exists() && folder.join("kept").exists());
    guest.call("filesystem.Filesystem/Remove", &json!({"path": folder.join("d")}));
    assert_eq!(
        guest
            .refused("filesystem.Filesystem/Remove", &json!({"path": "/"}))
            .0,
        "invalid_argument"
    );
}

#[test]
fn file_operations_have_the_rights_of_their_user() {
    let guest = Guest::start();
    let folder = guest.folder();
    let own = folder.join("own");
    fs::create_dir(&own).unwrap();
    chown(&own, Some(65534), Some(65534)).unwrap();
    let secret = folder.join("secret");
    fs::create_dir(&secret).unwrap();
    fs::write(secret.join("f"), "").unwrap();
    fs::set_permissions(&secret, fs::Permissions::from_mode(0o700)).unwrap();

    let code = |method: &str, request| {
        let answer = guest.unary(method, &request, &[NOBODY]);
        answer.json()["code"].as_str().unwrap_or("ok").to_owned()
    };
    assert_eq!(
        code("filesystem.Filesystem/Stat", json!({"path": secret.join("f")})),
        "permission_denied"
    );
    assert_eq!(
        code("filesystem.Filesystem/ListDir", json!({"path": secret})),
        "permission_denied"
    );
    assert_eq!(
        code("filesystem.Filesystem/MakeDir", json!({"path": folder.join("x")})),
        "permission_denied"
    );
    assert_eq!(
        code("filesystem.Filesystem/Remove", json!({"path": secret})),
        "permission_denied"
    );
    assert_eq!(
        code("filesystem.Filesystem/CreateWatcher", json!({"path": secret})),
        "permission_denied"
    );
    assert_eq!(
        code("filesystem.Filesystem/MakeDir", json!({"path": own.join("mine")})),
        "ok"
    );
    let made = fs::metadata(own.join("mine")).unwrap();
    assert_eq!((made.uid(), made.gid()), (65534, 65534));

    // The same thread serves root again.
    for _ in 0..5 {
        guest.call("filesystem.Filesystem/ListDir", &json!({"path": secret}));
        assert_eq!(
            code("filesystem.Filesystem/ListDir", json!({"path": secret})),
            "permission_denied"
        );
    }
}
