//! Request bodies that came compressed.

use std::io::{self, Write};

use bytes::Bytes;
use flate2::write::MultiGzDecoder;
use futures_util::{Stream, StreamExt, stream};

/// Compressed bytes taken at once, which bounds what they can become: gzip packs at most 1032 times.
const STEP: usize = 4 * 1024;

/// Unpacks a stream of gzip members.
pub(super) fn decode(
    packed: impl Stream<Item = io::Result<Bytes>> + Unpin,
) -> impl Stream<Item = io::Result<Bytes>> {
    let state = (packed, Some(MultiGzDecoder::new(Vec::new())), Bytes::new());
    stream::unfold(state, |(mut packed, mut decoder, mut rest)| async move {
        loop {
            let unpacker = decoder.as_mut()?;
            let step = if rest.is_empty() {
                match packed.next().await {
                    Some(Ok(bytes)) => {
                        rest = bytes;
                        continue;
                    }
                    Some(Err(e)) => Err(e),
                    None => decoder.take()?.finish(),
                }
            } else {
                let step = rest.split_to(rest.len().min(STEP));
                unpacker
                    .write_all(&step)
                    .map(|()| std::mem::take(unpacker.get_mut()))
            };
            match step {
                Ok(bytes) if bytes.is_empty() => {}
                Ok(bytes) => return Some((Ok(Bytes::from(bytes)), (packed, decoder, rest))),
                Err(e) => return Some((Err(e), (packed, None, rest))),
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn unpack(packed: &[u8]) -> io::Result<Vec<u8>> {
        let parts: Vec<_> = packed
            .chunks(1000)
            .map(|c| Ok(Bytes::copy_from_slice(c)))
            .collect();
        let mut unpacked = Box::pin(decode(stream::iter(parts)));
        let mut all = Vec::new();
        while let Some(bytes) = unpacked.next().await {
            all.extend_from_slice(&bytes?);
        }
        Ok(all)
    }

    fn pack(data: &[u8]) -> Vec<u8> {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(data).unwrap();
        encoder.finish().unwrap()
    }

    #[tokio::test]
    async fn what_was_packed_comes_out_again() {
        let data: Vec<u8> = (0..300_000u32).flat_map(|i| i.to_le_bytes()).collect();
        assert_eq!(unpack(&pack(&data)).await.unwrap(), data);
        assert_eq!(
            unpack(&[pack(b"one"), pack(b"two")].concat()).await.unwrap(),
            b"onetwo"
        );
    }

    #[tokio::test]
    async fn a_broken_or_cut_stream_is_an_error() {
        assert!(unpack(b"this is not gzip at all").await.is_err());
        let packed = pack(&[1; 50_000]);
        assert!(unpack(&packed[..packed.len() / 2]).await.is_err());
    }
}
