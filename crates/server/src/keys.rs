//! API keys: `e2b_` and 40 hexadecimal digits, so that E2B clients take them too.
//!
//! A key that was checked once is kept in memory, and the hot path touches no database. When keys were last
//! used is written now and then, by [`KeyRing::flush`].

use std::collections::HashMap;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use dorm_engine::Id;
use subtle::ConstantTimeEq as _;
use tokio::sync::Mutex;

use crate::records::{KeyRecord, Workspace, now};
use crate::store::{Result, Store};

const PREFIX_LEN: usize = "e2b_".len() + 8;

/// Whether this has the form of a key.
pub(crate) fn is_key(text: &str) -> bool {
    let digits = text.strip_prefix("e2b_");
    digits.is_some_and(|digits| digits.len() == 40 && digits.bytes().all(|b| b.is_ascii_hexdigit()))
}

pub struct KeyRing {
    store: Arc<dyn Store>,
    /// By the secret's first characters, which are no secret.
    known: RwLock<HashMap<Box<str>, Vec<Arc<Known>>>>,
    /// Held while keys go into or out of `known`, so that a deleted key cannot slip back in.
    changing: Mutex<()>,
}

struct Known {
    id: Id,
    workspace: Workspace,
    hash: [u8; 32],
    /// 0 is never.
    last_used: AtomicI64,
    /// What of it the store has.
    written: AtomicI64,
}

impl KeyRing {
    pub fn new(store: Arc<dyn Store>) -> Arc<Self> {
        Arc::new(Self {
            store,
            known: RwLock::default(),
            changing: Mutex::new(()),
        })
    }

    /// The workspace that `secret` opens, if any.
    pub async fn check(&self, secret: &str) -> Result<Option<Workspace>> {
        let Some(prefix) = secret.get(..PREFIX_LEN) else {
            return Ok(None);
        };
        let hash = *blake3::hash(secret.as_bytes()).as_bytes();
        if let Some(known) = self.find(prefix, &hash) {
            return Ok(Some(known));
        }
        let _changing = self.changing.lock().await;
        let stored = self.store.keys_by_prefix(prefix).await?;
        // Guesses leave nothing behind.
        let Some(key) = stored.into_iter().find(|key| bool::from(key.hash.ct_eq(&hash))) else {
            return Ok(None);
        };
        let mut known = self.known.write().unwrap_or_else(PoisonError::into_inner);
        let bucket = known.entry(prefix.into()).or_default();
        if !bucket.iter().any(|known| known.id == key.id) {
            bucket.push(Known::new(key));
        }
        drop(known);
        Ok(self.find(prefix, &hash))
    }

    fn find(&self, prefix: &str, hash: &[u8; 32]) -> Option<Workspace> {
        let known = self.known.read().unwrap_or_else(PoisonError::into_inner);
        let key = known
            .get(prefix)?
            .iter()
            .find(|key| bool::from(key.hash.ct_eq(hash)))?;
        key.last_used.store(now(), Ordering::Relaxed);
        Some(key.workspace.clone())
    }

    /// Makes a key. The secret is known to the caller alone.
    pub async fn create(&self, workspace: &Workspace, name: &str) -> Result<(KeyRecord, String)> {
        let secret = new_secret();
        let key = new_key(workspace, name, &secret);
        self.store.insert_key(&key).await?;
        Ok((key, secret))
    }

    /// Makes the first key and puts it into a file. The file comes first: a key that is in the store
    /// alone would be known to nobody.
    pub(crate) async fn create_first(
        &self,
        workspace: &Workspace,
        file: &Path,
    ) -> Result<std::io::Result<()>> {
        let secret = new_secret();
        if let Err(error) = write_key_file(file, &secret) {
            return Ok(Err(error));
        }
        self.store
            .insert_key(&new_key(workspace, "first", &secret))
            .await?;
        Ok(Ok(()))
    }

    pub async fn list(&self, workspace: &Workspace) -> Result<Vec<KeyRecord>> {
        let mut keys = self.store.list_keys(workspace).await?;
        let known = self.known.read().unwrap_or_else(PoisonError::into_inner);
        for key in &mut keys {
            let used = known
                .get(key.prefix.as_str())
                .into_iter()
                .flatten()
                .find(|known| known.id == key.id);
            let used = used
                .map(|known| known.last_used.load(Ordering::Relaxed))
                .filter(|&time| time != 0);
            key.last_used = key.last_used.max(used);
        }
        Ok(keys)
    }

    pub async fn delete(&self, workspace: &Workspace, id: &Id) -> Result<()> {
        let _changing = self.changing.lock().await;
        self.store.delete_key(workspace, id).await?;
        let mut known = self.known.write().unwrap_or_else(PoisonError::into_inner);
        known.retain(|_, keys| {
            keys.retain(|key| key.id != *id);
            !keys.is_empty()
        });
        Ok(())
    }

    /// Writes when keys were last used, if that changed.
    pub async fn flush(&self) -> Result<()> {
        let used: Vec<(Arc<Known>, i64)> = {
            let known = self.known.read().unwrap_or_else(PoisonError::into_inner);
            let times = known
                .values()
                .flatten()
                .map(|key| (key.clone(), key.last_used.load(Ordering::Relaxed)));
            times
                .filter(|(key, time)| key.written.load(Ordering::Relaxed) != *time)
                .collect()
        };
        if used.is_empty() {
            return Ok(());
        }
        let rows: Vec<(Id, i64)> = used.iter().map(|(key, time)| (key.id.clone(), *time)).collect();
        self.store.touch_keys(&rows).await?;
        for (key, time) in used {
            key.written.store(time, Ordering::Relaxed);
        }
        Ok(())
    }
}

impl Known {
    fn new(key: KeyRecord) -> Arc<Self> {
        let last_used = key.last_used.unwrap_or(0);
        Arc::new(Self {
            id: key.id,
            workspace: key.workspace,
            hash: key.hash,
            last_used: AtomicI64::new(last_used),
            written: AtomicI64::new(last_used),
        })
    }
}

fn new_secret() -> String {
    let mut bytes = [0u8; 20];
    getrandom::fill(&mut bytes).expect("the kernel's random source answers");
    bytes
        .iter()
        .fold("e2b_".to_owned(), |secret, byte| secret + &format!("{byte:02x}"))
}

fn new_key(workspace: &Workspace, name: &str, secret: &str) -> KeyRecord {
    KeyRecord {
        id: Id::random(),
        workspace: workspace.clone(),
        name: name.to_owned(),
        prefix: secret[..PREFIX_LEN].to_owned(),
        hash: *blake3::hash(secret.as_bytes()).as_bytes(),
        created: now(),
        last_used: None,
    }
}

/// The file is whole or absent, and only its owner's.
fn write_key_file(path: &Path, secret: &str) -> std::io::Result<()> {
    let new = path.with_extension("new");
    let _ = std::fs::remove_file(&new);
    let mut file = std::fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&new)?;
    writeln!(file, "{secret}")?;
    file.sync_all()?;
    std::fs::rename(&new, path)
}
