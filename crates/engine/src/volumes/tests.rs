use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;

use dorm_proto::volume::{Attributes, Change, File, Node, Owner, Place, REMOVED, entries};
use proptest::prelude::*;
use rustix::fs::{Mode, OFlags};

use super::*;

mod conversation;
mod paths;

const ROOT: Owner = Owner { user: 0, group: 0 };

fn server(folder: &Path) -> Server {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Server::new(vec![rustix::fs::open(folder, flags, Mode::empty()).unwrap()])
}

fn node(folder: &Path, path: &str) -> Node {
    let inode = match path {
        "" => 0,
        path => fs::symlink_metadata(folder.join(path)).unwrap().ino(),
    };
    Node {
        volume: 0,
        path: path.into(),
        inode,
    }
}

fn root() -> Node {
    Node {
        volume: 0,
        path: Vec::new(),
        inode: 0,
    }
}

fn place(name: &str) -> Place {
    Place {
        folder: root(),
        name: name.into(),
    }
}

fn file(node: Node, handle: u64, flags: i32) -> File {
    File {
        node,
        handle,
        flags: flags.cast_unsigned(),
    }
}

/// What a server says to a request that is said for the first time.
fn ask(server: &Server, request: Request) -> Outcome {
    server.do_it(&request, false, &[])
}

fn found(outcome: Outcome) -> Attributes {
    match outcome.unwrap() {
        (Reply::Attributes(attributes), _) => attributes,
        other => panic!("{other:?}"),
    }
}

fn create(name: &str, handle: u64) -> Request {
    Request::Create {
        place: place(name),
        mode: 0o640,
        flags: (libc::O_RDWR | libc::O_EXCL).cast_unsigned(),
        owner: ROOT,
        handle,
    }
}

#[test]
fn a_file_is_made_written_read_and_opened_again_by_a_server_that_knows_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let first = server(folder.path());
    let made = found(ask(&first, create("file", 7)));
    assert_eq!(made.mode & 0o7777, 0o640);
    let open = file(node(folder.path(), "file"), 7, libc::O_RDWR);
    let write = Request::Write {
        file: open.clone(),
        offset: 3,
        append: false,
    };
    assert_eq!(
        first.do_it(&write, false, b"content").unwrap().0,
        Reply::Number(7)
    );
    drop(first);
    let second = server(folder.path());
    let read = |server: &Server| {
        ask(
            server,
            Request::Read {
                file: open.clone(),
                offset: 2,
                size: 100,
            },
        )
    };
    assert_eq!(read(&second).unwrap().1, b"\0content");
    // Held open, it outlives its name; a third server can only say that it is gone.
    fs::remove_file(folder.path().join("file")).unwrap();
    assert_eq!(read(&second).unwrap().1, b"\0content");
    assert_eq!(read(&server(folder.path())), Err(Errno::STALE));
    fs::write(folder.path().join("file"), "another").unwrap();
    let other = node(folder.path(), "file");
    if other.inode != open.node.inode {
        assert_eq!(
            read(&server(folder.path())),
            Err(Errno::STALE),
            "another file has its name"
        );
    }
}

#[test]
fn what_is_said_again_is_done_once() {
    let folder = tempfile::tempdir().unwrap();
    let server = server(folder.path());
    let again = |request: &Request, data: &[u8]| {
        server.do_it(request, false, data).unwrap();
        server.do_it(request, true, data)
    };
    found(again(&create("file", 1), &[]));
    assert_eq!(ask(&server, create("file", 2)), Err(Errno::EXIST));
    let mkdir = Request::Make {
        place: place("folder"),
        mode: libc::S_IFDIR | 0o755,
        device: 0,
        owner: ROOT,
    };
    found(again(&mkdir, &[]));
    assert_eq!(ask(&server, mkdir), Err(Errno::EXIST));
    let link = Request::Symlink {
        place: place("link"),
        owner: ROOT,
    };
    found(again(&link, b"target"));
    assert_eq!(server.do_it(&link, true, b"elsewhere"), Err(Errno::EXIST));
    let open = file(node(folder.path(), "file"), 1, libc::O_RDWR);
    let append = Request::Write {
        file: open.clone(),
        offset: 0,
        append: true,
    };
    again(&append, b"line\n").unwrap();
    assert_eq!(fs::read(folder.path().join("file")).unwrap(), b"line\n");
    server.do_it(&append, false, b"line\n").unwrap();
    assert_eq!(fs::read(folder.path().join("file")).unwrap(), b"line\nline\n");
    let hard = Request::Link {
        node: open.node.clone(),
        place: place("hard"),
    };
    assert_eq!(found(again(&hard, &[])).links, 2);
    let rename = Request::Rename {
        from: place("hard"),
        to: place("moved"),
        inode: open.node.inode,
        flags: 0,
        hide: None,
    };
    again(&rename, &[]).unwrap();
    assert_eq!(ask(&server, rename), Err(Errno::NOENT));
    let remove = Request::Remove {
        place: place("moved"),
        hide: None,
    };
    again(&remove, &[]).unwrap();
    assert_eq!(ask(&server, remove), Err(Errno::NOENT));
    again(&Request::RemoveFolder(place("folder")), &[]).unwrap();
}

#[test]
fn a_file_that_is_removed_while_it_is_open_is_hidden_until_it_is_forgotten() {
    let folder = tempfile::tempdir().unwrap();
    let server = server(folder.path());
    for name in ["file", "target"] {
        fs::write(folder.path().join(name), name).unwrap();
    }
    let hide = |name: &str, hidden: &str| Request::Remove {
        place: place(name),
        hide: Some(hidden.into()),
    };
    ask(&server, hide("file", "agent-1")).unwrap();
    let removed = folder.path().join(std::ffi::OsStr::from_bytes(REMOVED));
    assert_eq!(fs::metadata(&removed).unwrap().mode() & 0o777, 0o700);
    assert_eq!(fs::read(removed.join("agent-1")).unwrap(), b"file");
    // What a rename replaces, too; and the name is never without a file.
    fs::write(folder.path().join("source"), "source").unwrap();
    let inode = node(folder.path(), "source").inode;
    let rename = Request::Rename {
        from: place("source"),
        to: place("target"),
        inode,
        flags: 0,
        hide: Some("agent-2".into()),
    };
    server.do_it(&rename, false, &[]).unwrap();
    server.do_it(&rename, true, &[]).unwrap();
    assert_eq!(fs::read(folder.path().join("target")).unwrap(), b"source");
    assert!(!folder.path().join("source").exists());
    assert_eq!(fs::read(removed.join("agent-2")).unwrap(), b"target");
    fs::write(removed.join("other-3"), "").unwrap();
    ask(
        &server,
        Request::Forget {
            volume: 0,
            hidden: "agent-1".into(),
        },
    )
    .unwrap();
    assert!(!removed.join("agent-1").exists());
    let tidy = |prefix: &str| Request::Tidy {
        volume: 0,
        prefix: prefix.into(),
    };
    ask(&server, tidy("agent-")).unwrap();
    assert!(!removed.join("agent-2").exists() && removed.join("other-3").exists());
    ask(&server, tidy("other-")).unwrap();
    assert!(!removed.exists(), "an empty folder is left");
    // A link in its place leads nowhere: the file is removed as any other.
    let outside = tempfile::tempdir().unwrap();
    symlink(outside.path(), &removed).unwrap();
    ask(&server, hide("target", "agent-4")).unwrap();
    assert!(!folder.path().join("target").exists());
    assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 0);
}

#[test]
fn new_files_belong_to_whom_they_are_for_and_the_server_stays_who_it_is() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let server = server(folder.path());
    let owner = Owner {
        user: 1000,
        group: 1001,
    };
    let made = ask(
        &server,
        Request::Make {
            place: place("own"),
            mode: libc::S_IFDIR | 0o2775,
            device: 0,
            owner,
        },
    );
    let made = found(made);
    assert_eq!((made.user, made.group), (1000, 1001));
    let shared = Change {
        mode: Some(0o2775),
        ..Change::default()
    };
    let own = file(node(folder.path(), "own"), 0, 0);
    found(ask(
        &server,
        Request::Change {
            file: own,
            change: shared,
        },
    ));
    let inside = Request::Create {
        place: Place {
            folder: node(folder.path(), "own"),
            name: b"file".to_vec(),
        },
        mode: 0o600,
        flags: libc::O_RDWR.cast_unsigned(),
        owner: Owner {
            user: 1002,
            group: 1002,
        },
        handle: 1,
    };
    let made = found(ask(&server, inside));
    assert_eq!(
        (made.user, made.group),
        (1002, 1001),
        "a folder gives its group to what is made in it"
    );
    let nobody = Owner {
        user: u32::MAX,
        group: 0,
    };
    let refused = ask(
        &server,
        Request::Symlink {
            place: place("link"),
            owner: nobody,
        },
    );
    assert_eq!(refused, Err(Errno::INVAL));
    let made = found(ask(&server, create("plain", 2)));
    assert_eq!((made.user, made.group), (0, 0));
}

#[test]
fn sizes_times_modes_attributes_and_listings_are_those_of_the_files() {
    let folder = tempfile::tempdir().unwrap();
    let server = server(folder.path());
    found(ask(&server, create("file", 1)));
    let open = || file(node(folder.path(), "file"), 1, libc::O_RDWR);
    let change = Change {
        mode: Some(0o4711),
        size: Some(1 << 40),
        modified: Some(dorm_proto::volume::NewTime::At(dorm_proto::volume::Time {
            seconds: 1234,
            nanoseconds: 5678,
        })),
        ..Change::default()
    };
    let changed = found(ask(&server, Request::Change { file: open(), change }));
    assert_eq!((changed.size, changed.mode & 0o7777), (1 << 40, 0o4711));
    assert_eq!(
        (changed.modified.seconds, changed.modified.nanoseconds),
        (1234, 5678)
    );
    assert!(changed.blocks < 100, "it has a hole");
    let name = || "user.note".to_owned();
    let set = Request::SetAttribute {
        file: open(),
        name: name(),
        flags: 0,
    };
    match server.do_it(&set, false, b"value") {
        // Where this filesystem has none of them.
        Err(Errno::OPNOTSUPP) => {}
        set => {
            set.unwrap();
            let get = Request::GetAttribute {
                file: open(),
                name: name(),
            };
            assert_eq!(ask(&server, get).unwrap().1, b"value");
            assert_eq!(
                ask(&server, Request::ListAttributes(open())).unwrap().1,
                b"user.note\0"
            );
        }
    }
    let trusted = Request::SetAttribute {
        file: open(),
        name: "trusted.x".into(),
        flags: 0,
    };
    assert_eq!(server.do_it(&trusted, false, b"1"), Err(Errno::OPNOTSUPP));

    fs::create_dir(folder.path().join("many")).unwrap();
    for number in 0..3000 {
        fs::write(folder.path().join(format!("many/{number}")), "").unwrap();
    }
    let odd = std::ffi::OsStr::from_bytes(b"\xff\xfe");
    fs::write(folder.path().join("many").join(odd), "").unwrap();
    let (mut names, mut offset) = (std::collections::HashSet::new(), 0);
    loop {
        let many = file(node(folder.path(), "many"), 0, 0);
        let data = ask(&server, Request::List { file: many, offset }).unwrap().1;
        let Some(last) = entries(&data).back().map(|entry| entry.next) else {
            break;
        };
        names.extend(entries(&data).into_iter().map(|entry| entry.name));
        offset = last;
    }
    assert_eq!(names.len(), 3003, "with the folder itself and the one above");
    assert!(names.contains(odd.as_bytes()));
}

#[test]
fn a_path_longer_than_the_kernel_takes_is_followed_in_parts() {
    let folder = tempfile::tempdir().unwrap();
    let server = server(folder.path());
    let mut at = root();
    for _ in 0..40 {
        let place = Place {
            folder: at.clone(),
            name: vec![b'd'; 200],
        };
        let make = Request::Make {
            place,
            mode: libc::S_IFDIR | 0o755,
            device: 0,
            owner: ROOT,
        };
        let made = found(ask(&server, make));
        if !at.path.is_empty() {
            at.path.push(b'/');
        }
        at.path.extend([b'd'; 200]);
        at.inode = made.inode;
    }
    assert!(at.path.len() > 8000);
    let made = found(ask(&server, Request::Attributes(file(at.clone(), 0, 0))));
    assert_eq!(made.inode, at.inode);
}

#[test]
fn whoever_holds_too_many_files_open_loses_none() {
    let folder = tempfile::tempdir().unwrap();
    let server = server(folder.path());
    fs::write(folder.path().join("file"), "text").unwrap();
    let node = node(folder.path(), "file");
    server.held().most = 10;
    for handle in 1..=100 {
        found(ask(
            &server,
            Request::Open(file(node.clone(), handle, libc::O_RDONLY)),
        ));
    }
    assert_eq!(server.held().files.len(), 10);
    let read = Request::Read {
        file: file(node, 1, libc::O_RDONLY),
        offset: 0,
        size: 4,
    };
    assert_eq!(ask(&server, read).unwrap().1, b"text");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn whatever_comes_in_a_frame_is_answered_or_passed_over(
        contents in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..200), 1..40),
    ) {
        let folder = tempfile::tempdir().unwrap();
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let server = server(folder.path());
        for content in &contents {
            let _ = server.answer(content);
            // With a head that can be read, so that requests are reached.
            let _ = server.answer(&[&[1, 0], &content[..]].concat());
        }
    }
}
