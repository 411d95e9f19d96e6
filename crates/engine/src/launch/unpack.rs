//! Unpacking a layer into a home, by a process that has nothing but that home.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

use super::launcher::unexpected;
use super::{Failure, Job, Launcher, Report, Spec, Step, report};
use crate::home::unpack::apply_layer;
use crate::{EngineError, Layer, LogSink, Result};

/// The confined process: applies the layer that the launcher was given as standard output.
pub(super) fn apply(offset: u64, length: u64) -> Result<(), Failure> {
    let layer = rustix::io::dup(rustix::stdio::stdout()).step("take the layer")?;
    let mut layer = File::from(layer);
    layer.seek(SeekFrom::Start(offset)).step("find the layer")?;
    report(&match apply_layer(layer.take(length)) {
        Ok(applied) => Report::Unpacked {
            entries: applied.entries,
            warnings: applied.warnings(),
        },
        Err(error) if error.is_full() => Report::Full,
        Err(error) => Report::BadLayer(crate::chain(&error)),
    });
    Ok(())
}

/// The daemon's side: starts such a process and waits for its end.
pub(crate) async fn unpack(
    launcher: &Path,
    home: &Path,
    uid_base: u32,
    layer: Layer,
    log: LogSink,
) -> Result<()> {
    let failed = || EngineError::io("cannot unpack the layer");
    let spec = Spec {
        volumes: Vec::new(),
        home: home.to_owned(),
        uid_base,
        job: Job::Unpack {
            offset: layer.offset,
            length: layer.length,
        },
    };
    let launcher = Launcher::start_with(launcher, Vec::new(), None, layer.file.into())
        .await
        .map_err(failed())?;
    launcher.socket.send_json(&spec).await.map_err(failed())?;

    let mut process = None;
    let outcome = loop {
        match launcher.socket.report().await {
            Ok(Report::Pid(pid)) => process = dorm_sys::process::Process::open(pid).ok(),
            Ok(Report::Unpacked { entries, warnings }) => break Ok((entries, warnings)),
            Ok(Report::BadLayer(reason)) => break Err(EngineError::BadLayer(reason)),
            Ok(Report::Full) => break Err(EngineError::NoSpace { free: 0 }),
            Ok(other) => break Err(failed()(unexpected(&other))),
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => {
                let silent = std::io::Error::other("the unpacking process ended without a word");
                break Err(failed()(silent));
            }
            Err(error) => break Err(failed()(error)),
        }
    };
    // Process 1 is a child of this process, not of the launcher.
    if let Some(process) = process {
        let _ = process.signal(rustix::process::Signal::KILL);
        crate::host::ended(&process).await;
    }
    launcher.end().await;
    let (entries, warnings) = outcome?;
    for warning in warnings {
        let _ = log.send(format!("warning: {warning}"));
    }
    let _ = log.send(format!("{entries} entries"));
    Ok(())
}
