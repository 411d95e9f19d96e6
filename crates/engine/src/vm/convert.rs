//! The files on a machine's disk as the files of a home, for engines that run on those.
//!
//! The disk is the box's, and so is the file system on it. So no host mounts it: the machine is started once more, without
//! anything of the box, and its guest sends what it sees, which a process that has nothing but the new home unpacks.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use dorm_proto::streams::Stream;
use dorm_proto::vm::{Answer, Order};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::unix::pipe;

use super::Vm;
use super::link::{answer, refused};
use super::reach::{in_time, too_late};
use crate::engines::Kind;
use crate::host::ended;
use crate::network::Policy;
use crate::{BoxSpec, EngineError, Homes, Isolation, Layer, Result};

/// Largest part of an archive that comes at once.
const MAX_CHUNK: usize = 1 << 20;
/// How long a guest may take to send the next part.
const GOES_ON_WITHIN: Duration = Duration::from_secs(120);
/// How long all parts may take, and how slow the slowest machine sends what its disk may hold, in bytes a second: root in the box may have
/// left a disk that has no end.
const PATIENCE: Duration = Duration::from_secs(600);
const SLOWEST: u64 = 1 << 20;

impl Vm {
    /// Puts the files themselves in the place of the machine's disk in the home of `spec.id`, on which nothing runs. A crash
    /// leaves either home, whole. Gives what had to be left out, in words.
    pub(crate) async fn make_files(&self, spec: &BoxSpec) -> Result<Vec<String>> {
        let mut alone = spec.clone();
        alone.isolation = Isolation::Vm;
        // What others have written there need not be waited for.
        alone.volumes.clear();
        alone.boot.env.clear();
        alone.boot.start_command = None;
        alone.network = Policy {
            internet: false,
            ..Policy::default()
        };
        self.start(&alone).await?;
        let staged = self.send_files(&alone).await;
        // What was on its way to the disk is of no use any more.
        let swept = self.host.sweep(&spec.id).await;
        let pool = &self.host.pool;
        let made = match (staged, swept) {
            (Ok(left_out), Ok(())) => {
                let exchanged = pool.exchange_files(&spec.id, spec.limits.disk).await;
                exchanged.map(|()| left_out)
            }
            (Err(error), _) | (_, Err(error)) => Err(error),
        };
        if made.is_err() {
            pool.unstage(&spec.id).await;
        }
        made
    }

    async fn send_files(&self, spec: &BoxSpec) -> Result<Vec<String>> {
        let failed = || EngineError::io("cannot take the files from the machine's disk");
        let live = self.host.live(&spec.id)?;
        let link = self.link(&live, GOES_ON_WITHIN).await.map_err(failed())?;
        let stream = in_time(&link, link.stream(&Order::Archive)).await;
        let mut stream = stream.map_err(failed())?;
        let (sender, receiver) = pipe::pipe().map_err(failed())?;
        let archive = Layer {
            file: receiver.into_blocking_fd().map_err(failed())?.into(),
            offset: 0,
            length: u64::MAX,
        };
        let pool = &self.host.pool;
        let disk = std::fs::metadata(pool.machine_disk(&spec.id)).map_err(failed())?;
        // Its length is for whoever has taken over QEMU to choose.
        let bytes = spec.limits.disk.max(disk.blocks() * 512);
        let within = PATIENCE + Duration::from_secs(bytes / SLOWEST);
        let sending = async {
            let sent = tokio::time::timeout(within, send(&mut stream, sender));
            tokio::select! {
                sent = sent => sent.unwrap_or_else(|_| Err(endless(within))),
                _ = ended(&live.process) => Err(io::Error::other("the machine has ended")),
            }
        };
        // What was sent in time has to be unpacked.
        let unpacking = pool.stage_files(&spec.id, spec.uid_base, archive, within + GOES_ON_WITHIN);
        let (sent, unpacked) = tokio::join!(sending, unpacking);
        // Whoever was sent half of it has less to say about it.
        match (sent, unpacked) {
            (Ok(()), unpacked) => unpacked,
            (Err(error), Err(reason)) if error.kind() == io::ErrorKind::BrokenPipe => Err(reason),
            (Err(error), _) => Err(failed()(error)),
        }
    }
}

fn endless(within: Duration) -> io::Error {
    let late = format!("the guest has not sent all of it after {} s", within.as_secs());
    io::Error::new(io::ErrorKind::TimedOut, late)
}

/// Returns when everything was sent. The archive is then whole.
async fn send(stream: &mut Stream, mut to: pipe::Sender) -> io::Result<()> {
    let mut chunk = Vec::new();
    let mut is_over = false;
    loop {
        let more = tokio::time::timeout(GOES_ON_WITHIN, receive(stream, &mut chunk)).await;
        if !more.map_err(|_| too_late())?? {
            break;
        }
        if is_over {
            continue;
        }
        match to.write_all(&chunk).await {
            // Behind the end of an archive there is padding, which nobody waits for.
            Err(e) if e.kind() == io::ErrorKind::BrokenPipe && chunk.iter().all(|byte| *byte == 0) => {
                is_over = true
            }
            written => written?,
        }
    }
    let answer = tokio::time::timeout(GOES_ON_WITHIN, answer(stream)).await;
    match answer.map_err(|_| too_late())?? {
        Answer::Done => Ok(()),
        other => Err(refused(other)),
    }
}

/// Whether there was another part.
async fn receive(stream: &mut Stream, chunk: &mut Vec<u8>) -> io::Result<bool> {
    let length = stream.read_u32().await? as usize;
    if length > MAX_CHUNK {
        return Err(io::ErrorKind::InvalidData.into());
    }
    chunk.resize(length, 0);
    stream.read_exact(chunk).await?;
    Ok(length > 0)
}
