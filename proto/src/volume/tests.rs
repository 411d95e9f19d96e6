use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

fn node() -> impl Strategy<Value = Node> {
    (any::<u8>(), vec(any::<u8>(), 0..300), any::<u64>()).prop_map(|(volume, path, inode)| Node {
        volume,
        path,
        inode,
    })
}

fn place() -> impl Strategy<Value = Place> {
    (node(), vec(any::<u8>(), 0..256)).prop_map(|(folder, name)| Place { folder, name })
}

fn file() -> impl Strategy<Value = File> {
    (node(), any::<u64>(), any::<u32>()).prop_map(|(node, handle, flags)| File { node, handle, flags })
}

fn request() -> impl Strategy<Value = Request> {
    prop_oneof![
        place().prop_map(Request::Lookup),
        (file(), any::<u64>(), any::<u32>()).prop_map(|(file, offset, size)| Request::Read {
            file,
            offset,
            size
        }),
        (file(), any::<u64>(), any::<bool>()).prop_map(|(file, offset, append)| Request::Write {
            file,
            offset,
            append
        }),
        (
            place(),
            place(),
            any::<u64>(),
            any::<u32>(),
            any::<Option<String>>()
        )
            .prop_map(|(from, to, inode, flags, hide)| Request::Rename {
                from,
                to,
                inode,
                flags,
                hide
            }),
        (file(), any::<Option<u32>>(), any::<Option<u64>>(), any::<i64>()).prop_map(
            |(file, mode, size, seconds)| Request::Change {
                file,
                change: Change {
                    mode,
                    size,
                    accessed: Some(NewTime::Now),
                    modified: Some(NewTime::At(Time {
                        seconds,
                        nanoseconds: 999_999_999
                    })),
                    ..Change::default()
                }
            }
        ),
    ]
}

proptest! {
    #[test]
    fn every_request_comes_through_however_its_frame_is_cut(
        requests in vec((request(), any::<u64>(), any::<bool>(), vec(any::<u8>(), 0..2000)), 1..5),
        size in 1usize..700,
    ) {
        let mut wire = Vec::new();
        for (request, number, again, data) in &requests {
            wire.extend(frame(Head { number: *number, again: *again }, request, data));
        }
        let mut frames = Frames::default();
        for part in wire.chunks(size) {
            frames.push(part).unwrap();
        }
        for (request, number, again, data) in &requests {
            let content = frames.next_frame().unwrap();
            let (head, parsed, rest) = parse::<Request>(&content).unwrap();
            prop_assert_eq!(head, Head { number: *number, again: *again });
            prop_assert_eq!(&parsed, request);
            prop_assert_eq!(rest, &data[..]);
        }
        prop_assert!(frames.next_frame().is_none());
    }

    #[test]
    fn a_frame_that_is_said_again_is_the_same_but_for_that(request in request(), number in any::<u64>()) {
        let mut bytes = frame(Head { number, again: false }, &request, b"data");
        mark_again(&mut bytes);
        prop_assert_eq!(bytes, frame(Head { number, again: true }, &request, b"data"));
    }

    #[test]
    fn what_is_no_frame_is_refused_or_waited_for_and_hurts_nobody(bytes in vec(any::<u8>(), 0..3000)) {
        let mut frames = Frames::default();
        let _ = frames.push(&bytes);
        while let Some(content) = frames.next_frame() {
            let _ = parse::<Request>(&content);
            let _ = parse::<Answer>(&content);
        }
        let _ = parse::<Request>(&bytes);
        let _ = entries(&bytes);
    }

    #[test]
    fn entries_come_through_with_any_name(
        all in vec((any::<u64>(), any::<u64>(), any::<u8>(), vec(any::<u8>(), 0..=255)), 0..40),
    ) {
        let all: Vec<Entry> =
            all.into_iter().map(|(inode, next, kind, name)| Entry { inode, next, kind, name }).collect();
        let mut data = Vec::new();
        for entry in &all {
            put_entry(entry, &mut data);
        }
        prop_assert_eq!(entries(&data), all);
    }
}

#[test]
fn a_frame_that_is_too_long_or_empty_is_refused_before_it_is_there() {
    for length in [0, MAX_FRAME as u32 + 1, u32::MAX] {
        let mut frames = Frames::default();
        let mut bytes = length.to_le_bytes().to_vec();
        bytes.push(0);
        assert_eq!(frames.push(&bytes), Err(Malformed));
    }
}

#[test]
fn an_unknown_request_is_told_from_a_head_that_cannot_be_read() {
    let whole = frame(
        Head {
            number: 7,
            again: false,
        },
        &200u32,
        &[],
    );
    let Err((head, Malformed)) = parse::<Request>(&whole[4..]) else {
        panic!("there is no such request");
    };
    assert_eq!(
        head,
        Some(Head {
            number: 7,
            again: false
        })
    );
    assert!(matches!(parse::<Request>(&[]), Err((None, Malformed))));
}

/// Old guests come back with old memory: what they say must go on to mean the same.
#[test]
fn the_numbers_of_requests_stay_what_they_are() {
    let node = || Node {
        volume: 0,
        path: Vec::new(),
        inode: 0,
    };
    let file = || File {
        node: node(),
        handle: 0,
        flags: 0,
    };
    let place = || Place {
        folder: node(),
        name: Vec::new(),
    };
    let owner = Owner { user: 0, group: 0 };
    let requests = [
        Request::Lookup(place()),
        Request::Attributes(file()),
        Request::Change {
            file: file(),
            change: Change::default(),
        },
        Request::ReadLink(node()),
        Request::Create {
            place: place(),
            mode: 0,
            flags: 0,
            owner,
            handle: 0,
        },
        Request::Make {
            place: place(),
            mode: 0,
            device: 0,
            owner,
        },
        Request::Symlink {
            place: place(),
            owner,
        },
        Request::Link {
            node: node(),
            place: place(),
        },
        Request::Remove {
            place: place(),
            hide: None,
        },
        Request::RemoveFolder(place()),
        Request::Rename {
            from: place(),
            to: place(),
            inode: 0,
            flags: 0,
            hide: None,
        },
        Request::Open(file()),
        Request::Close { handle: 0 },
        Request::Read {
            file: file(),
            offset: 0,
            size: 0,
        },
        Request::Write {
            file: file(),
            offset: 0,
            append: false,
        },
        Request::Sync {
            file: file(),
            data_only: false,
        },
        Request::List {
            file: file(),
            offset: 0,
        },
        Request::Space { volume: 0 },
        Request::GetAttribute {
            file: file(),
            name: String::new(),
        },
        Request::SetAttribute {
            file: file(),
            name: String::new(),
            flags: 0,
        },
        Request::ListAttributes(file()),
        Request::RemoveAttribute {
            file: file(),
            name: String::new(),
        },
        Request::Allocate {
            file: file(),
            mode: 0,
            offset: 0,
            length: 0,
        },
        Request::Seek {
            file: file(),
            offset: 0,
            whence: 0,
        },
        Request::Forget {
            volume: 0,
            hidden: String::new(),
        },
        Request::Tidy {
            volume: 0,
            prefix: String::new(),
        },
    ];
    for (number, request) in requests.iter().enumerate() {
        let bytes = frame(
            Head {
                number: 0,
                again: false,
            },
            request,
            &[],
        );
        assert_eq!(usize::from(bytes[6]), number, "{request:?}");
    }
}
