//! Looking for the program behind an engine, for as long as it takes.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// What was not found is looked for again after as many times the time that the look took: at once where nothing is installed, and later where a
/// trial hangs.
const REST: u32 = 10;
/// How long a thread of the runtime may wait for a trial.
const AT_ONCE: Duration = Duration::from_secs(1);

/// What an engine needs of this host: looked for whenever it is needed, until it is found for good.
#[derive(Debug)]
pub(crate) struct Sought<T> {
    data: PathBuf,
    find: fn(&Path) -> Result<T, String>,
    /// After how long what was found is to be looked for again, if it is.
    doubted: fn(&T) -> Option<Duration>,
    seen: Mutex<Seen<T>>,
}

#[derive(Debug)]
struct Seen<T> {
    /// Or why there is none, in words.
    found: Result<Arc<T>, String>,
    /// When to look again. Not while somebody does.
    again: Option<Instant>,
}

impl<T: std::fmt::Debug + Send + Sync + 'static> Sought<T> {
    /// Returns when it has been looked for once.
    pub(crate) async fn open(
        data: &Path,
        find: fn(&Path) -> Result<T, String>,
        doubted: fn(&T) -> Option<Duration>,
    ) -> Arc<Self> {
        let sought = Arc::new(Self {
            data: data.to_owned(),
            find,
            doubted,
            seen: Mutex::new(Seen {
                found: Err("it could not be looked for".to_owned()),
                again: Some(Instant::now()),
            }),
        });
        let first = Arc::clone(&sought);
        // It may have to be tried, which takes its time.
        let _ = tokio::task::spawn_blocking(move || first.look()).await;
        sought
    }

    /// What was found, or why there is none. What comes of a long trial is for whoever asks next.
    pub(crate) fn get(self: &Arc<Self>) -> Result<Arc<T>, String> {
        let due = self.seen().again.take_if(|again| *again <= Instant::now());
        if due.is_some() {
            self.look_aside();
        }
        self.seen().found.clone()
    }

    /// On a thread that neither the runtime nor its end has to wait for.
    fn look_aside(self: &Arc<Self>) {
        let sought = Arc::clone(self);
        let (done, looked) = std::sync::mpsc::channel::<()>();
        let look = move || {
            sought.look();
            drop(done);
        };
        match std::thread::Builder::new().name("trial".to_owned()).spawn(look) {
            Ok(_) => {
                let _ = looked.recv_timeout(AT_ONCE);
            }
            Err(_) => self.seen().again = Some(Instant::now()),
        }
    }

    fn look(&self) {
        let began = Instant::now();
        let found = (self.find)(&self.data).map(Arc::new);
        tracing::debug!(?found, "looked for what an engine needs");
        let after = match &found {
            Ok(found) => (self.doubted)(found),
            Err(_) => Some(began.elapsed() * REST),
        };
        let mut seen = self.seen();
        seen.again = after.map(|after| Instant::now() + after);
        // Whoever failed to look again has not seen that it is gone.
        if found.is_ok() || seen.found.is_err() {
            seen.found = found;
        }
    }

    fn seen(&self) -> std::sync::MutexGuard<'_, Seen<T>> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(data: &Path) -> Result<String, String> {
        std::fs::read_to_string(data.join("engine")).map_err(|error| error.to_string())
    }

    #[tokio::test]
    async fn what_is_missing_is_looked_for_again_but_not_at_once_until_it_is_there() {
        let data = tempfile::tempdir().unwrap();
        let sought = Sought::open(data.path(), find, |_| None).await;
        std::fs::write(data.path().join("engine"), "first").unwrap();
        sought.seen().again = Some(Instant::now() + Duration::from_secs(600));
        assert!(sought.get().is_err());
        sought.seen().again = Some(Instant::now());
        // On a busy host the look takes longer than it is waited for.
        while sought.get().is_err() {
            tokio::task::yield_now().await;
        }
        assert_eq!(*sought.get().unwrap(), "first");
        assert_eq!(sought.seen().again, None, "it is found for good");
    }

    #[tokio::test]
    async fn what_is_doubted_is_looked_for_again_and_kept_where_that_fails() {
        let data = tempfile::tempdir().unwrap();
        let engine = data.path().join("engine");
        std::fs::write(&engine, "first").unwrap();
        let sought = Sought::open(data.path(), find, |_| Some(Duration::from_secs(600))).await;
        assert!(sought.seen().again.is_some());
        std::fs::remove_file(&engine).unwrap();
        sought.look();
        assert_eq!(*sought.get().unwrap(), "first");
        std::fs::write(&engine, "second").unwrap();
        sought.look();
        assert_eq!(*sought.get().unwrap(), "second");
    }
}
