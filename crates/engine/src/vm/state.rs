//! The state of a machine's devices on its way from QEMU to the disk.
//!
//! Who has broken out of the machine may be QEMU. So it is given the end of a pipe, and no file: what it says has a bound, and nothing of
//! it changes once it is kept.

use std::fs::File;
use std::io;
use std::pin::pin;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::unix::pipe;
use tokio::time::timeout;

use super::monitor::Monitor;

/// More than a hundred times what a machine has.
const MOST: u64 = 64 << 20;
const CHUNK: usize = 64 * 1024;
/// How long QEMU may take to close its end when it has said everything, or to notice that nobody listens.
const CLOSED_WITHIN: Duration = Duration::from_secs(10);

/// Returns when all of the state is in `file`.
pub(super) async fn keep(monitor: &mut Monitor, file: File) -> io::Result<()> {
    let (to, from) = pipe::pipe()?;
    gather(monitor.save(to.into_blocking_fd()?), from, file, MOST).await
}

/// Returns when `saving` has, and everything that it had sent is in `file`.
async fn gather(
    saving: impl Future<Output = io::Result<()>>,
    from: pipe::Receiver,
    file: File,
    most: u64,
) -> io::Result<()> {
    let mut saving = pin!(saving);
    let mut receiving = pin!(receive(from, file, most));
    tokio::select! {
        saved = &mut saving => {
            saved?;
            let received = timeout(CLOSED_WITHIN, receiving).await;
            received.unwrap_or_else(|_| Err(io::Error::new(io::ErrorKind::TimedOut, "QEMU does not end its state")))
        }
        received = &mut receiving => match received {
            Ok(()) => saving.await,
            Err(error) => {
                let _ = timeout(CLOSED_WITHIN, saving).await;
                Err(error)
            }
        },
    }
}

async fn receive(from: pipe::Receiver, file: File, most: u64) -> io::Result<()> {
    let mut from = BufReader::with_capacity(CHUNK, from.take(most + 1));
    let mut file = tokio::fs::File::from_std(file);
    let received = tokio::io::copy_buf(&mut from, &mut file).await?;
    file.flush().await?;
    match received > most {
        true => {
            let much = format!(
                "QEMU sends more than {} MiB as the state of the machine",
                most >> 20
            );
            Err(io::Error::other(much))
        }
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::OwnedFd;

    use super::*;

    struct Kept(tempfile::NamedTempFile);

    impl Kept {
        fn new() -> Self {
            Self(tempfile::NamedTempFile::new().unwrap())
        }

        fn file(&self) -> File {
            self.0.reopen().unwrap()
        }

        fn bytes(&self) -> Vec<u8> {
            std::fs::read(self.0.path()).unwrap()
        }
    }

    /// As a QEMU does that says `bytes`.
    async fn say(bytes: Vec<u8>, to: OwnedFd) -> io::Result<()> {
        let said = tokio::task::spawn_blocking(move || File::from(to).write_all(&bytes));
        said.await.unwrap()
    }

    fn pipe() -> (OwnedFd, pipe::Receiver) {
        let (to, from) = pipe::pipe().unwrap();
        (to.into_blocking_fd().unwrap(), from)
    }

    #[tokio::test]
    async fn a_state_is_kept_to_its_last_byte() {
        let (kept, (to, from)) = (Kept::new(), pipe());
        let state: Vec<u8> = (0..=255u8).cycle().take(450_000).collect();
        let most = state.len() as u64;
        gather(say(state.clone(), to), from, kept.file(), most)
            .await
            .unwrap();
        assert!(kept.bytes() == state);
    }

    #[tokio::test]
    async fn a_state_without_an_end_is_refused() {
        let (kept, (to, from)) = (Kept::new(), pipe());
        let without_end = async { say(vec![0; 64 << 20], to).await };
        let error = gather(without_end, from, kept.file(), 1 << 20).await.unwrap_err();
        assert_eq!(
            error.to_string(),
            "QEMU sends more than 1 MiB as the state of the machine"
        );
        assert_eq!(kept.bytes().len(), (1 << 20) + 1);
    }

    #[tokio::test]
    async fn nobody_waits_for_the_rest_of_a_state_that_could_not_be_saved() {
        let (kept, (to, from)) = (Kept::new(), pipe());
        let failed = async { Err(io::Error::other("it failed")) };
        let error = gather(failed, from, kept.file(), MOST).await.unwrap_err();
        assert_eq!(error.to_string(), "it failed");
        drop(to);
    }

    #[tokio::test]
    async fn a_qemu_that_ends_in_the_midst_has_not_saved_anything() {
        let (kept, (to, from)) = (Kept::new(), pipe());
        let killed = async {
            say(b"half".to_vec(), to).await?;
            tokio::task::yield_now().await;
            Err(io::ErrorKind::UnexpectedEof.into())
        };
        let error = gather(killed, from, kept.file(), MOST).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }
}
