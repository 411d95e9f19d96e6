//! Unpacking an archive into a home, by a process that has nothing but that home.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;
use std::time::Duration;

use super::launcher::{tellable, unexpected};
use super::{Failure, Job, Report, Spec, Step, errand, report};
use crate::home::unpack::{Names, apply_at};
use crate::{EngineError, Layer, Result};

/// The confined process: applies the archive that the launcher was given as standard output.
pub(super) fn apply(offset: u64, length: u64, names: Names) -> Result<(), Failure> {
    let archive = rustix::io::dup(rustix::stdio::stdout()).step("take the layer")?;
    let mut archive = File::from(archive);
    // One that is still being written may be no file, and has nothing before it.
    if offset > 0 {
        archive.seek(SeekFrom::Start(offset)).step("find the layer")?;
    }
    report(&match apply_at(Path::new("/"), archive.take(length), names) {
        Ok(applied) => Report::Unpacked {
            entries: applied.entries,
            warnings: applied.warnings(),
        },
        Err(error) if error.is_full() => Report::Full,
        Err(error) => Report::BadLayer(crate::chain(&error)),
    });
    Ok(())
}

/// What was unpacked.
#[derive(Debug)]
pub(crate) struct Unpacked {
    pub(crate) entries: u64,
    /// What was left out or altered.
    pub(crate) warnings: Vec<String>,
}

/// The daemon's side: starts such a process and waits for its end.
pub(crate) async fn unpack(
    launcher: &Path,
    home: &Path,
    uid_base: u32,
    layer: Layer,
    names: Names,
) -> Result<Unpacked> {
    unpack_within(launcher, home, uid_base, layer, names, None).await
}

/// The same, of an archive that may never come to its end.
pub(crate) async fn unpack_within(
    launcher: &Path,
    home: &Path,
    uid_base: u32,
    layer: Layer,
    names: Names,
    within: Option<Duration>,
) -> Result<Unpacked> {
    let failed = || EngineError::io("cannot unpack the layer");
    let spec = Spec {
        volumes: Vec::new(),
        home: home.to_owned(),
        uid_base,
        job: Job::Unpack {
            offset: layer.offset,
            length: layer.length,
            names,
        },
    };
    let said = errand::run(launcher, &spec, layer.file.into(), within).await;
    match said.map_err(failed())? {
        Report::Unpacked { entries, warnings } => Ok(Unpacked { entries, warnings }),
        Report::BadLayer(reason) => Err(EngineError::BadLayer(tellable(&reason))),
        Report::Full => Err(EngineError::NoSpace { free: 0 }),
        other => Err(failed()(unexpected(&other))),
    }
}
