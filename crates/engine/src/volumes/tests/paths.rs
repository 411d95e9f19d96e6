use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixListener;

use super::*;

#[test]
fn no_path_leads_out_of_a_volume_or_through_a_link() {
    let outside = tempfile::tempdir().unwrap();
    fs::write(outside.path().join("secret"), "secret").unwrap();
    let folder = tempfile::tempdir().unwrap();
    symlink(outside.path(), folder.path().join("link")).unwrap();
    fs::create_dir(folder.path().join("real")).unwrap();
    symlink("real", folder.path().join("inner")).unwrap();
    fs::write(folder.path().join("real/file"), "").unwrap();
    let server = server(folder.path());
    let secret = fs::metadata(outside.path().join("secret")).unwrap().ino();
    for path in [
        "link/secret",
        "../secret",
        "real/../../secret",
        "/etc/passwd",
        "real/./file",
        "real//file",
        "inner/file",
        "..",
        ".",
        "real/",
    ] {
        for inode in [0, secret] {
            let node = Node {
                volume: 0,
                path: path.into(),
                inode,
            };
            let open = file(node.clone(), 1, libc::O_RDONLY);
            for request in [
                Request::Attributes(open.clone()),
                Request::Open(open.clone()),
                Request::ReadLink(node.clone()),
                Request::List {
                    file: open.clone(),
                    offset: 0,
                },
            ] {
                let refused = ask(&server, request.clone());
                let expected = [Errno::STALE, Errno::INVAL];
                assert!(
                    refused.is_err_and(|e| expected.contains(&e)),
                    "{path}: {request:?}"
                );
            }
        }
    }
    for name in ["..", ".", "", "a/b", "link/secret", "x\0y"] {
        assert_eq!(
            ask(&server, Request::Lookup(place(name))),
            Err(Errno::INVAL),
            "{name}"
        );
        assert_eq!(ask(&server, create(name, 1)), Err(Errno::INVAL), "{name}");
    }
    assert_eq!(ask(&server, Request::Space { volume: 9 }), Err(Errno::STALE));
    // A link is a name like another.
    let link = found(ask(&server, Request::Lookup(place("link"))));
    assert_eq!(link.mode & libc::S_IFMT, libc::S_IFLNK);
    let target = ask(&server, Request::ReadLink(node(folder.path(), "link")))
        .unwrap()
        .1;
    assert_eq!(target, outside.path().as_os_str().as_bytes());
    let refused = ask(
        &server,
        Request::Open(file(node(folder.path(), "link"), 1, libc::O_RDONLY)),
    );
    assert_eq!(refused, Err(Errno::LOOP));
}

#[test]
fn pipes_and_sockets_are_never_opened() {
    let folder = tempfile::tempdir().unwrap();
    let _listener = UnixListener::bind(folder.path().join("socket")).unwrap();
    let server = server(folder.path());
    let pipe = Request::Make {
        place: place("pipe"),
        mode: libc::S_IFIFO | 0o600,
        device: 0,
        owner: ROOT,
    };
    found(ask(&server, pipe));
    assert!(
        fs::metadata(folder.path().join("pipe"))
            .unwrap()
            .file_type()
            .is_fifo()
    );
    for name in ["pipe", "socket"] {
        let file = file(node(folder.path(), name), 1, libc::O_RDONLY);
        assert_eq!(ask(&server, Request::Open(file.clone())), Err(Errno::OPNOTSUPP));
        let sync = Request::Sync {
            file: file.clone(),
            data_only: false,
        };
        assert_eq!(ask(&server, sync), Err(Errno::OPNOTSUPP));
        found(ask(&server, Request::Attributes(file)));
    }
}
