use super::*;

fn output(keep: bool) -> (tempfile::TempDir, Arc<Output>) {
    let folder = tempfile::tempdir().unwrap();
    let output = Arc::new(Output::new(keep, folder.path().join("run")));
    (folder, output)
}

async fn all(reader: &mut Reader) -> Vec<u8> {
    let mut bytes = Vec::new();
    while let Some(piece) = reader.next().await {
        bytes.extend(piece.data);
    }
    bytes
}

fn pattern(n: usize) -> Vec<u8> {
    (0..n).map(|i| (i % 251) as u8).collect()
}

#[tokio::test]
async fn streams_stay_apart_and_in_order() {
    let (_folder, output) = output(false);
    let mut reader = output.subscribe(Some(0));
    output.append(Stream::Stdout, b"a").await;
    output.append(Stream::Stdout, b"b").await;
    output.append(Stream::Stderr, b"c").await;
    output.append(Stream::Stdout, b"d").await;
    output.close();
    let expected = [
        (Stream::Stdout, 0, "ab"),
        (Stream::Stderr, 2, "c"),
        (Stream::Stdout, 3, "d"),
    ];
    for (stream, offset, data) in expected {
        let piece = reader.next().await.unwrap();
        assert_eq!(
            (piece.stream, piece.offset, piece.data.as_slice()),
            (stream, offset, data.as_bytes())
        );
    }
    assert_eq!(reader.next().await, None);
}

#[tokio::test]
async fn kept_output_is_replayed_whole_from_memory_and_file() {
    let (folder, output) = output(true);
    let data = pattern(700_000);
    for part in data.chunks(3_000) {
        output.append(Stream::Stdout, part).await;
    }
    output.close();
    assert!(folder.path().join("run").exists(), "most of it is in the file");
    assert_eq!(all(&mut output.subscribe(Some(0))).await, data);
    assert_eq!(
        all(&mut output.subscribe(Some(0))).await,
        data,
        "a second time too"
    );
    assert_eq!(all(&mut output.subscribe(Some(123_456))).await, data[123_456..]);
    assert_eq!(all(&mut output.subscribe(Some(699_000))).await, data[699_000..]);
    assert_eq!(all(&mut output.subscribe(None)).await, b"");
}

#[tokio::test]
async fn without_a_reader_output_accumulates_until_one_comes() {
    let (folder, output) = output(false);
    let data = pattern(400_000);
    output.append(Stream::Stdout, &data).await;
    output.append(Stream::Stdout, b"x").await;
    let mut reader = output.subscribe(Some(0));
    output.close();
    let got = all(&mut reader).await;
    assert_eq!(got.len(), 400_001);
    assert_eq!(got[..400_000], data);
    drop(reader);
    assert!(
        !folder.path().join("run").exists(),
        "what everybody has had is gone"
    );
}

#[tokio::test]
async fn a_slow_reader_holds_the_process_back_until_it_reads_or_leaves() {
    let (_folder, output) = output(false);
    let mut reader = output.subscribe(Some(0));
    let writer = tokio::spawn({
        let output = output.clone();
        async move {
            for _ in 0..200 {
                output.append(Stream::Stdout, &[7; 16 * 1024]).await;
            }
            output.close();
        }
    });
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    assert!(output.len() <= BEHIND_MAX + 16 * 1024, "the writer waits");
    assert!(!writer.is_finished());
    reader.next().await.unwrap();
    drop(reader);
    writer.await.unwrap();
    assert_eq!(output.len(), 200 * 16 * 1024);
}

#[tokio::test]
async fn kept_output_never_holds_the_process_back() {
    let (_folder, output) = output(true);
    let mut reader = output.subscribe(Some(0));
    let data = pattern(3 << 20);
    for part in data.chunks(64 * 1024) {
        output.append(Stream::Pty, part).await;
    }
    output.close();
    assert_eq!(all(&mut reader).await, data);
}

#[tokio::test]
async fn output_that_cannot_be_spilled_is_skipped_with_the_gap_in_the_offsets() {
    let output = Arc::new(Output::new(true, "/nonexistent/run".into()));
    let data = pattern(500_000);
    for part in data.chunks(10_000) {
        output.append(Stream::Stdout, part).await;
    }
    output.close();
    let mut reader = output.subscribe(Some(0));
    let first = reader.next().await.unwrap();
    assert!(first.offset > 0);
    let mut got = first.data;
    got.extend(all(&mut reader).await);
    assert_eq!(got, data[data.len() - got.len()..], "the newest is there");
}
