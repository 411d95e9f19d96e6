use super::*;

/// A guest's end of the channel, at its beginning.
fn begin(channel: &mut UnixStream, escape: &mut Escape) {
    let mut buffer = [0; 1000];
    loop {
        let n = channel.read(&mut buffer).unwrap();
        escape.push(&buffer[..n]);
        if let Some(Piece::Begin(epoch)) = escape.next_piece() {
            channel.write_all(&vm::beginning(epoch)).unwrap();
            return;
        }
    }
}

fn answers(channel: &mut UnixStream, escape: &mut Escape, count: usize) -> Vec<(u64, Answer)> {
    let (mut frames, mut found) = (Frames::default(), Vec::new());
    let mut buffer = [0; 1000];
    while found.len() < count {
        while let Some(piece) = escape.next_piece() {
            if let Piece::Data(data) = piece {
                frames.push(&data).unwrap();
            }
        }
        while let Some(content) = frames.next_frame() {
            let (head, answer, _) = parse::<Answer>(&content).unwrap();
            found.push((head.number, answer));
        }
        if found.len() < count {
            let n = channel.read(&mut buffer).unwrap();
            assert!(n > 0, "the server has ended");
            escape.push(&buffer[..n]);
        }
    }
    found.sort_by_key(|(number, _)| *number);
    found
}

#[test]
fn a_conversation_begins_behind_what_was_for_another_server_and_answers_everything() {
    let folder = tempfile::tempdir().unwrap();
    let server = server(folder.path());
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    std::thread::scope(|scope| {
        let serving = scope.spawn(|| serve(theirs, &server));
        let mut old = vm::beginning([9; 8]);
        vm::escape(
            &frame(
                Head {
                    number: 1,
                    again: false,
                },
                &Request::RemoveFolder(place("x")),
                &[],
            )[..9],
            &mut old,
        );
        ours.write_all(&old).unwrap();
        let mut escape = Escape::default();
        begin(&mut ours, &mut escape);
        let mut wire = Vec::new();
        for number in 0..100 {
            let head = Head { number, again: false };
            match number {
                50 => wire.extend(frame(head, &200u32, b"of a newer guest")),
                _ => wire.extend(frame(head, &create(&format!("f{number}"), number + 1), &[])),
            }
        }
        let mut escaped = Vec::new();
        vm::escape(&wire, &mut escaped);
        for part in escaped.chunks(777) {
            ours.write_all(part).unwrap();
        }
        for (number, answer) in answers(&mut ours, &mut escape, 100) {
            match number {
                50 => assert_eq!(answer, Err(libc::ENOSYS)),
                _ => assert!(matches!(answer, Ok(Reply::Attributes(_))), "{number}: {answer:?}"),
            }
        }
        drop(ours);
        serving.join().unwrap().unwrap();
    });
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 99);
}

#[test]
fn a_frame_without_end_ends_the_conversation() {
    let folder = tempfile::tempdir().unwrap();
    let server = server(folder.path());
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    std::thread::scope(|scope| {
        let serving = scope.spawn(|| serve(theirs, &server));
        begin(&mut ours, &mut Escape::default());
        let mut bytes = Vec::new();
        vm::escape(&[0xff; 64], &mut bytes);
        ours.write_all(&bytes).unwrap();
        assert!(serving.join().unwrap().is_err());
    });
}
