use std::fs;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

use serde_json::json;

use crate::client::{Guest, quoted};

const OCTETS: (&str, &str) = ("Content-Type", "application/octet-stream");

fn pattern(n: usize) -> Vec<u8> {
    (0..n).map(|i| (i % 253) as u8).collect()
}

fn gzipped(data: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(data).unwrap();
    encoder.finish().unwrap()
}

#[test]
fn a_large_file_goes_up_and_comes_down_unchanged() {
    let guest = Guest::start();
    let file = guest.folder().join("new folder/ü");
    let data = pattern(9_000_001);
    let url = format!("/files?path={}", quoted(&file));
    let answer = guest.request("POST", &url, &[OCTETS], &data);
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(
        answer.json(),
        json!([{"path": file, "name": "ü", "type": "file"}])
    );
    assert!(fs::read(&file).unwrap() == data);
    let answer = guest.get(&url);
    assert_eq!(answer.headers["content-length"], data.len().to_string());
    assert!(answer.body == data);
}

#[test]
fn parts_of_a_file_can_be_asked_for() {
    let guest = Guest::start();
    let file = guest.folder().join("f");
    let data = pattern(1_000_000);
    fs::write(&file, &data).unwrap();
    let url = format!("/files?path={}", quoted(&file));
    let part = guest.request("GET", &url, &[("Range", "bytes=500000-799999")], b"");
    assert_eq!(part.status, 206);
    assert_eq!(part.headers["content-range"], "bytes 500000-799999/1000000");
    assert!(part.body == data[500_000..800_000]);
    assert_eq!(
        guest
            .request("GET", &url, &[("Range", "bytes=1000000-")], b"")
            .status,
        416
    );
    assert_eq!(
        guest
            .request("GET", &url, &[("Accept-Encoding", "gzip, identity;q=0")], b"")
            .status,
        406
    );
}

#[test]
fn several_files_come_as_one_form() {
    let guest = Guest::start();
    let folder = guest.folder();
    let (one, two) = (folder.join("one"), folder.join("sub/two"));
    let form = format!(
        "--X\r\nContent-Disposition: form-data; name=\"file\"; filename=\"{}\"\r\n\r\nfirst\r\n\
         --X\r\nContent-Disposition: form-data; name=\"other\"\r\n\r\nignored\r\n\
         --X\r\nContent-Disposition: form-data; name=\"file\"; filename=\"{}\"\r\n\r\nsecond\r\n--X--\r\n",
        one.display(),
        two.display()
    );
    let headers = [("Content-Type", "multipart/form-data; boundary=X")];
    let answer = guest.request("POST", "/files", &headers, form.as_bytes());
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(answer.json()[1]["path"], json!(two));
    assert_eq!(
        (fs::read(&one).unwrap(), fs::read(&two).unwrap()),
        (b"first".to_vec(), b"second".to_vec())
    );

    let compressed = [headers[0], ("Content-Encoding", "gzip")];
    fs::remove_file(&one).unwrap();
    assert_eq!(
        guest
            .request("POST", "/files", &compressed, &gzipped(form.as_bytes()))
            .status,
        200
    );
    assert_eq!(fs::read(&one).unwrap(), b"first");

    let url = format!("/files?path={}", quoted(&folder.join("named")));
    assert_eq!(
        guest.request("POST", &url, &headers, form.as_bytes()).status,
        400,
        "two files, one path"
    );
}

#[test]
fn a_compressed_upload_is_unpacked() {
    let guest = Guest::start();
    let file = guest.folder().join("f");
    let data = pattern(3_000_000);
    let url = format!("/files?path={}", quoted(&file));
    let headers = [OCTETS, ("Content-Encoding", "gzip")];
    assert_eq!(guest.request("POST", &url, &headers, &gzipped(&data)).status, 200);
    assert!(fs::read(&file).unwrap() == data);
    assert_eq!(guest.request("POST", &url, &headers, b"not gzip").status, 400);
    assert_eq!(
        guest
            .request("POST", &url, &[OCTETS, ("Content-Encoding", "br")], b"x")
            .status,
        400
    );
}

#[test]
fn writing_happens_in_place() {
    let guest = Guest::start();
    let folder = guest.folder();
    let file = folder.join("f");
    fs::write(&file, "a rather long first version").unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o751)).unwrap();
    fs::hard_link(&file, folder.join("hard")).unwrap();
    symlink("f", folder.join("soft")).unwrap();
    let inode = fs::metadata(&file).unwrap().ino();
    let url = format!("/files?path={}", quoted(&folder.join("soft")));
    assert_eq!(guest.request("POST", &url, &[OCTETS], b"short").status, 200);
    assert_eq!(fs::read(folder.join("hard")).unwrap(), b"short");
    let after = fs::metadata(&file).unwrap();
    assert_eq!((after.ino(), after.mode() & 0o7777), (inode, 0o751));
    assert!(fs::symlink_metadata(folder.join("soft")).unwrap().is_symlink());
}

#[test]
fn transfers_have_the_rights_of_their_user() {
    let guest = Guest::start();
    let folder = guest.folder();
    let secret = folder.join("secret");
    fs::write(&secret, "x").unwrap();
    fs::set_permissions(&secret, fs::Permissions::from_mode(0o600)).unwrap();
    let url = |path: &std::path::Path| format!("/files?path={}&username=nobody", quoted(path));
    assert_eq!(guest.get(&url(&secret)).status, 403);
    assert_eq!(guest.request("POST", &url(&secret), &[OCTETS], b"y").status, 403);
    assert_eq!(fs::read(&secret).unwrap(), b"x");
    let own = folder.join("own");
    fs::create_dir(&own).unwrap();
    std::os::unix::fs::chown(&own, Some(65534), Some(65534)).unwrap();
    assert_eq!(
        guest
            .request("POST", &url(&own.join("a/f")), &[OCTETS], b"y")
            .status,
        200
    );
    let (made, parent) = (
        fs::metadata(own.join("a/f")).unwrap(),
        fs::metadata(own.join("a")).unwrap(),
    );
    assert_eq!((made.uid(), made.gid(), parent.uid()), (65534, 65534, 65534));
    assert_eq!(
        guest
            .get(&format!("/files?path={}&username=ghost", quoted(&secret)))
            .status,
        401
    );
}

#[test]
fn wrong_transfers_are_told_what_is_wrong() {
    let guest = Guest::start();
    let folder = guest.folder();
    let status = |path: &str| {
        let answer = guest.get(&format!("/files?path={path}"));
        assert_eq!(answer.json()["code"], answer.status, "{}", answer.text());
        answer.status
    };
    assert_eq!(status("/no/such"), 404);
    assert_eq!(status(&quoted(&folder)), 400);
    assert_eq!(status(""), 400);
    assert_eq!(status("%00"), 400);
    assert_eq!(status("/dev/zero"), 400, "a device is not a file");
    let fifo = folder.join("fifo");
    assert!(
        std::process::Command::new("mkfifo")
            .arg(&fifo)
            .status()
            .unwrap()
            .success()
    );
    assert_eq!(status(&quoted(&fifo)), 400, "nobody waits for a pipe");
    let post = |path: &std::path::Path, headers: &[(&str, &str)]| {
        guest
            .request("POST", &format!("/files?path={}", quoted(path)), headers, b"x")
            .status
    };
    assert_eq!(post(&fifo, &[OCTETS]), 400);
    assert_eq!(post(&folder, &[OCTETS]), 400);
    assert_eq!(post(std::path::Path::new("/etc/passwd/x"), &[OCTETS]), 400);
    assert_eq!(post(&folder.join("f"), &[("Content-Type", "text/plain")]), 400);
    assert_eq!(guest.request("POST", "/files", &[OCTETS], b"x").status, 400);
}

#[test]
fn a_full_file_system_is_told_as_such() {
    let guest = Guest::start();
    // The kernel's own stand-in for a full disk is a device, so a small tmpfs does it.
    let folder = guest.folder().join("small");
    fs::create_dir(&folder).unwrap();
    let mounted = std::process::Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=256k", "none"])
        .arg(&folder)
        .status();
    assert!(mounted.unwrap().success());
    let url = format!("/files?path={}", quoted(&folder.join("f")));
    let answer = guest.request("POST", &url, &[OCTETS], &pattern(2_000_000));
    assert!(
        std::process::Command::new("umount")
            .arg(&folder)
            .status()
            .unwrap()
            .success()
    );
    assert_eq!((answer.status, answer.json()["code"].as_u64()), (507, Some(507)));
}

#[test]
fn metadata_is_kept_with_the_file() {
    let guest = Guest::start();
    let file = guest.folder().join("f");
    let url = format!("/files?path={}", quoted(&file));
    let headers = [OCTETS, ("X-Metadata-Origin", "test"), ("X-Metadata-Two", "2")];
    assert_eq!(guest.request("POST", &url, &headers, b"x").status, 200);
    let entry = &guest.call("filesystem.Filesystem/Stat", &json!({"path": file}))["entry"];
    assert_eq!(entry["metadata"], json!({"origin": "test", "two": "2"}));
}

#[test]
fn files_without_a_size_are_read_to_their_end() {
    let guest = Guest::start();
    let answer = guest.get("/files?path=/proc/self/status");
    assert!(answer.text().starts_with("Name:"));
    let empty = guest.folder().join("empty");
    fs::write(&empty, "").unwrap();
    assert_eq!(guest.get(&format!("/files?path={}", quoted(&empty))).body, b"");
}

#[test]
fn a_file_that_is_written_anew_all_the_time_can_be_read() {
    let guest = Guest::start();
    let file = guest.folder().join("progress");
    fs::write(&file, "1234567").unwrap();
    let url = format!("/files?path={}", quoted(&file));
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            for _ in 0..500 {
                let answer = guest.get(&url);
                assert_eq!(answer.status, 200);
                assert!(matches!(answer.body[..], [] | [b'1', .., b'7']));
            }
        });
        while !reader.is_finished() {
            fs::write(&file, "1234567").unwrap();
        }
    });
}

#[test]
fn the_guest_tells_about_itself_and_its_box() {
    let guest = Guest::start();
    assert_eq!(guest.get("/health").status, 204);
    let version = guest.get("/dorm/version").json();
    assert_eq!(
        version,
        json!({"version": env!("CARGO_PKG_VERSION"), "protocol": 3})
    );
    let metrics = guest.get("/metrics").json();
    for key in [
        "ts",
        "cpu_count",
        "cpu_used_pct",
        "mem_total",
        "mem_used",
        "disk_used",
        "disk_total",
    ] {
        assert!(metrics[key].is_number(), "{key} in {metrics}");
    }
    let processes = guest.get("/dorm/processes").json();
    let own = processes
        .as_array()
        .unwrap()
        .iter()
        .find(|p| p["pid"] == guest.pid())
        .unwrap()
        .clone();
    assert_eq!(
        (own["user"].as_str(), own["args"][1].as_str()),
        (Some("root"), Some("--standalone"))
    );
}
