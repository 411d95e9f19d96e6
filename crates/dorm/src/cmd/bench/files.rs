//! One large file into a box and out again.

use std::time::Instant;

use anyhow::{Result, ensure};
use bytes::Bytes;
use futures_util::{StreamExt, stream};

use super::Bench;
use super::report::{Measurement, Samples};
use crate::client::guest::chunks;
use crate::client::streamed;

pub(super) const UPLOAD: &str = "upload of 256 MiB";
pub(super) const DOWNLOAD: &str = "download of 256 MiB";
pub(super) const SIZE: u64 = 256 << 20;
pub(super) const BLOCK: usize = 256 << 10;
pub(super) const ROUNDS: u32 = 3;
const PATH: &str = "/var/tmp/dorm-bench";

/// A block that does not compress, so that no filesystem takes a short cut.
pub(super) fn block() -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut block = Vec::with_capacity(BLOCK);
    while block.len() < BLOCK {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        block.extend_from_slice(&state.to_le_bytes());
    }
    block
}

pub(super) async fn measure(bench: &Bench) -> Result<Vec<Measurement>> {
    let agent = bench.agent().await?;
    let guest = bench.client.guest(&agent.name, Some("root"));
    let block = Bytes::from(block());
    let (mut up, mut down) = (Samples::new()?, Samples::new()?);
    for _ in 0..ROUNDS {
        let blocks = std::iter::repeat_n(block.clone(), SIZE as usize / BLOCK);
        let begun = Instant::now();
        guest
            .upload(PATH, Some(SIZE), streamed(stream::iter(blocks.map(Ok))))
            .await?;
        up.add(begun.elapsed())?;

        let begun = Instant::now();
        let mut body = Box::pin(chunks(guest.download(PATH).await?.into_body()));
        let mut received = 0;
        while let Some(chunk) = body.next().await {
            received += chunk?.len() as u64;
        }
        down.add(begun.elapsed())?;
        ensure!(received == SIZE, "{received} bytes came back of {SIZE}");
    }
    bench.delete(&agent.name).await?;
    Ok(vec![
        Measurement::new(UPLOAD, &up, Some(SIZE)),
        Measurement::new(DOWNLOAD, &down, Some(SIZE)),
    ])
}
