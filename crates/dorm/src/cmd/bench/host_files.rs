//! What the host's own filesystem does with the same file.

use std::io::{Read, Seek, Write};
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result};

use super::files::{BLOCK, ROUNDS, SIZE, block};
use super::report::{Measurement, Samples};

pub(super) const WRITE: &str = "host: write of 256 MiB";
pub(super) const READ: &str = "host: read of 256 MiB";

/// In the pool if it is on this machine and open to this user, otherwise among temporary files.
pub(super) fn measure(data: &Path) -> Result<Vec<Measurement>> {
    let file = || tempfile::tempfile_in(data.join("pool")).or_else(|_| tempfile::tempfile());
    let block = block();
    let mut buffer = vec![0; BLOCK];
    let (mut write, mut read) = (Samples::new()?, Samples::new()?);
    for _ in 0..ROUNDS {
        let mut file = file().context("cannot make a temporary file")?;
        let begun = Instant::now();
        for _ in 0..SIZE as usize / BLOCK {
            file.write_all(&block)?;
        }
        write.add(begun.elapsed())?;
        file.rewind()?;
        let begun = Instant::now();
        while file.read(&mut buffer)? > 0 {}
        read.add(begun.elapsed())?;
    }
    Ok(vec![
        Measurement::new(WRITE, &write, Some(SIZE)),
        Measurement::new(READ, &read, Some(SIZE)),
    ])
}
