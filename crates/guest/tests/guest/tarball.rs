use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;

use tar::{Archive, Builder, EntryType, Header};

use crate::client::{Guest, quoted};

const PATH_MAX: usize = 4096;

fn url(path: &Path) -> String {
    format!("/dorm/tar?path={}", quoted(path))
}

fn entry(archive: &mut Builder<Vec<u8>>, kind: EntryType, name: &str, link: Option<&str>, data: &[u8]) {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(0o644);
    header.set_size(data.len() as u64);
    // Written as it is: the library would refuse the names that matter here.
    header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
    if let Some(link) = link {
        header.set_link_name_literal(link).unwrap();
    }
    header.set_cksum();
    archive.append(&header, data).unwrap();
}

#[test]
fn a_folder_goes_out_and_in_again_unchanged() {
    let guest = Guest::start();
    let folder = guest.folder();
    let from = folder.join("from");
    fs::create_dir_all(from.join("sub/empty")).unwrap();
    fs::write(from.join("big"), vec![42; 3_000_000]).unwrap();
    fs::write(from.join("sub/run.sh"), "#!/bin/sh\n").unwrap();
    fs::set_permissions(from.join("sub/run.sh"), fs::Permissions::from_mode(0o755)).unwrap();
    fs::set_permissions(from.join("sub/empty"), fs::Permissions::from_mode(0o700)).unwrap();
    symlink("sub/run.sh", from.join("link")).unwrap();
    symlink("/outside", from.join("far")).unwrap();
    let long = "n".repeat(200);
    fs::write(from.join(&long), "long").unwrap();
    let old = std::time::SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1_000_000_000);
    fs::File::open(from.join("sub/run.sh"))
        .unwrap()
        .set_modified(old)
        .unwrap();
    fs::File::open(from.join("sub"))
        .unwrap()
        .set_modified(old)
        .unwrap();

    let packed = guest.get(&url(&from));
    assert_eq!(
        (packed.status, packed.headers["content-type"].as_str()),
        (200, "application/x-tar")
    );
    let to = folder.join("to");
    let answer = guest.request("POST", &url(&to), &[], &packed.body);
    assert_eq!(answer.status, 204, "{}", answer.text());
    assert!(fs::read(to.join("big")).unwrap() == vec![42; 3_000_000]);
    assert_eq!(fs::read(to.join(&long)).unwrap(), b"long");
    assert_eq!(fs::read_link(to.join("link")).unwrap(), Path::new("sub/run.sh"));
    assert_eq!(fs::read_link(to.join("far")).unwrap(), Path::new("/outside"));
    for name in ["big", "sub", "sub/run.sh", "sub/empty"] {
        let (a, b) = (
            fs::metadata(from.join(name)).unwrap(),
            fs::metadata(to.join(name)).unwrap(),
        );
        assert_eq!((a.mode(), a.mtime()), (b.mode(), b.mtime()), "{name}");
    }
}

#[test]
fn folders_as_deep_as_a_path_is_long_are_packed() {
    let guest = Guest::start();
    let from = guest.folder().join("from");
    let room = (PATH_MAX - from.as_os_str().len() - 1) / 2;
    fs::create_dir_all(from.join("d/".repeat(room - 1))).unwrap();
    assert_eq!(guest.get(&url(&from)).status, 200);
    assert_eq!(guest.get("/health").status, 204);
}

#[test]
fn one_file_is_packed_under_its_name() {
    let guest = Guest::start();
    let file = guest.folder().join("f");
    fs::write(&file, "text").unwrap();
    let packed = guest.get(&url(&file)).body;
    let mut archive = Archive::new(packed.as_slice());
    let names: Vec<_> = archive
        .entries()
        .unwrap()
        .map(|e| e.unwrap().path().unwrap().into_owned())
        .collect();
    assert_eq!(names, [Path::new("f")]);
    assert_eq!(guest.get(&url(Path::new("/no/such"))).status, 404);
}

#[test]
fn sockets_and_pipes_are_left_out() {
    let guest = Guest::start();
    let folder = guest.folder();
    let _socket = std::os::unix::net::UnixListener::bind(folder.join("socket")).unwrap();
    fs::write(folder.join("f"), "").unwrap();
    let packed = guest.get(&url(&folder)).body;
    let mut archive = Archive::new(packed.as_slice());
    let names: Vec<_> = archive
        .entries()
        .unwrap()
        .map(|e| e.unwrap().path().unwrap().into_owned())
        .collect();
    assert_eq!(names, [Path::new("f")]);
}

#[test]
fn an_archive_cannot_reach_out_of_its_target() {
    let guest = Guest::start();
    let folder = guest.folder();
    let outside = folder.join("outside");
    fs::create_dir(&outside).unwrap();
    let outside_name = outside.to_str().unwrap();
    type Make<'a> = &'a dyn Fn(&mut Builder<Vec<u8>>);
    let through_link = |a: &mut Builder<Vec<u8>>| {
        entry(a, EntryType::Symlink, "link", Some(outside_name), b"");
        entry(a, EntryType::Regular, "link/evil", None, b"x");
    };
    let folder_through_link = |a: &mut Builder<Vec<u8>>| {
        entry(a, EntryType::Symlink, "link", Some(outside_name), b"");
        entry(a, EntryType::Directory, "link/evil", None, b"");
    };
    let dots = |a: &mut Builder<Vec<u8>>| entry(a, EntryType::Regular, "../outside/evil", None, b"x");
    let hidden_dots =
        |a: &mut Builder<Vec<u8>>| entry(a, EntryType::Regular, "a/../../outside/evil", None, b"x");
    let hard_link = |a: &mut Builder<Vec<u8>>| {
        entry(a, EntryType::Link, "passwd", Some("/etc/passwd"), b"");
        entry(a, EntryType::Regular, "passwd", None, b"x");
    };
    let device = |a: &mut Builder<Vec<u8>>| entry(a, EntryType::Char, "device", None, b"");
    let cases: [(&str, Make<'_>); 6] = [
        ("through a link", &through_link),
        ("a folder through a link", &folder_through_link),
        ("dots", &dots),
        ("hidden dots", &hidden_dots),
        ("a hard link", &hard_link),
        ("a device", &device),
    ];
    for (i, (what, make)) in cases.into_iter().enumerate() {
        let mut archive = Builder::new(Vec::new());
        make(&mut archive);
        let target = folder.join(format!("target{i}"));
        let answer = guest.request("POST", &url(&target), &[], &archive.into_inner().unwrap());
        assert_ne!(answer.status / 100, 2, "{what} was taken");
        assert!(!answer.json()["message"].as_str().unwrap().is_empty());
    }
    assert_eq!(fs::read_dir(&outside).unwrap().count(), 0, "nothing came out");
    assert!(fs::read_to_string("/etc/passwd").unwrap().starts_with("root:"));
}

#[test]
fn an_absolute_name_lands_inside_the_target() {
    let guest = Guest::start();
    let target = guest.folder().join("target");
    let mut archive = Builder::new(Vec::new());
    entry(
        &mut archive,
        EntryType::Regular,
        "/dorm-test-absolute",
        None,
        b"x",
    );
    assert_eq!(
        guest
            .request("POST", &url(&target), &[], &archive.into_inner().unwrap())
            .status,
        204
    );
    assert!(target.join("dorm-test-absolute").exists() && !Path::new("/dorm-test-absolute").exists());
}

#[test]
fn a_broken_archive_is_refused() {
    let guest = Guest::start();
    let target = guest.folder().join("t");
    assert_eq!(
        guest.request("POST", &url(&target), &[], &[b'x'; 2000]).status,
        400
    );
    let mut archive = Builder::new(Vec::new());
    entry(&mut archive, EntryType::Regular, "f", None, &[1; 5000]);
    let whole = archive.into_inner().unwrap();
    assert_eq!(
        guest.request("POST", &url(&target), &[], &whole[..3000]).status,
        400,
        "cut off"
    );
}

#[test]
fn packing_and_unpacking_have_the_rights_of_their_user() {
    let guest = Guest::start();
    let folder = guest.folder();
    let secret = folder.join("secret");
    fs::create_dir(&secret).unwrap();
    fs::set_permissions(&secret, fs::Permissions::from_mode(0o700)).unwrap();
    assert_eq!(
        guest.get(&format!("{}&username=nobody", url(&secret))).status,
        403
    );
    let own = folder.join("own");
    fs::create_dir(&own).unwrap();
    std::os::unix::fs::chown(&own, Some(65534), Some(65534)).unwrap();
    let mut archive = Builder::new(Vec::new());
    entry(&mut archive, EntryType::Regular, "f", None, b"x");
    let archive = archive.into_inner().unwrap();
    assert_eq!(
        guest
            .request("POST", &format!("{}&username=nobody", url(&own)), &[], &archive)
            .status,
        204
    );
    assert_eq!(fs::metadata(own.join("f")).unwrap().uid(), 65534);
    assert_eq!(
        guest
            .request(
                "POST",
                &format!("{}&username=nobody", url(&secret)),
                &[],
                &archive
            )
            .status,
        403
    );
}
