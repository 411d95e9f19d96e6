//! Watchers of folders: as a stream of changes, or collected until somebody asks.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};

use connectrpc::ConnectError;
use dorm_proto::filesystem::FilesystemEvent;
use tokio::task::JoinHandle;

use super::inotify::{Change, Inotify};
use crate::users::{Names, User};
use crate::{identity, sys};

/// Changes that a watcher collects before the oldest are dropped.
const MAX_COLLECTED: usize = 10_000;
const MAX_WATCHERS: usize = 256;

/// One watched folder.
pub(super) struct Watch {
    inotify: Inotify,
    root: PathBuf,
    user: User,
    with_entry: bool,
}

impl Watch {
    pub(super) async fn start(
        user: User,
        root: PathBuf,
        recursive: bool,
        with_entry: bool,
    ) -> io::Result<Self> {
        let path = root.clone();
        let prepared = identity::run(user.clone(), move || Inotify::prepare(path, recursive)).await?;
        Ok(Self {
            inotify: prepared.watch(user.clone())?,
            root,
            user,
            with_entry,
        })
    }

    pub(super) async fn next(&mut self) -> io::Result<Vec<FilesystemEvent>> {
        let changes = self.inotify.next().await?;
        if !self.with_entry {
            return Ok(changes.into_iter().map(|c| event(c, None)).collect());
        }
        let root = self.root.clone();
        identity::run(self.user.clone(), move || {
            let names = Names::read();
            let described = |c: Change| {
                let entry = super::entry::describe(&root.join(&c.name), &names).ok();
                event(c, entry)
            };
            Ok(changes.into_iter().map(described).collect())
        })
        .await
    }
}

fn event(change: Change, entry: Option<dorm_proto::filesystem::EntryInfo>) -> FilesystemEvent {
    FilesystemEvent {
        name: change.name.to_string_lossy().into_owned(),
        r#type: change.kind.into(),
        entry: entry.into(),
        ..Default::default()
    }
}

/// The watchers that collect.
#[derive(Default)]
pub(crate) struct Watchers {
    all: Mutex<HashMap<String, Watcher>>,
}

struct Watcher {
    events: Arc<Mutex<VecDeque<FilesystemEvent>>>,
    task: JoinHandle<()>,
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Watchers {
    fn all(&self) -> MutexGuard<'_, HashMap<String, Watcher>> {
        self.all.lock().expect("no holder panics")
    }

    pub(super) fn add(&self, mut watch: Watch) -> Result<String, ConnectError> {
        let mut all = self.all();
        if all.len() >= MAX_WATCHERS {
            return Err(ConnectError::resource_exhausted(format!(
                "there are {MAX_WATCHERS} watchers already"
            )));
        }
        let events = Arc::<Mutex<VecDeque<FilesystemEvent>>>::default();
        let collected = events.clone();
        let task = tokio::spawn(async move {
            while let Ok(new) = watch.next().await {
                let mut events = collected.lock().expect("no holder panics");
                events.extend(new);
                let excess = events.len().saturating_sub(MAX_COLLECTED);
                events.drain(..excess);
            }
        });
        let id = format!("w{}", sys::random_id());
        all.insert(id.clone(), Watcher { events, task });
        Ok(id)
    }

    pub(super) fn take_events(&self, id: &str) -> Result<Vec<FilesystemEvent>, ConnectError> {
        let all = self.all();
        let watcher = all
            .get(id)
            .ok_or_else(|| ConnectError::not_found(format!("there is no watcher '{id}'")))?;
        Ok(watcher
            .events
            .lock()
            .expect("no holder panics")
            .drain(..)
            .collect())
    }

    pub(super) fn remove(&self, id: &str) -> Result<(), ConnectError> {
        match self.all().remove(id) {
            Some(_) => Ok(()),
            None => Err(ConnectError::not_found(format!("there is no watcher '{id}'"))),
        }
    }
}
