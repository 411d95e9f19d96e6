//! Memory images on disk: `DATA/images/<agent>/<image>/`, made and read by the engine alone.
//!
//! An image that could not be used is kept beside the others as `<image>.bad`, the newest of them only.

use std::collections::{HashMap, HashSet};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use dorm_engine::Id;

use super::Agent;
use super::registry::Context;
use crate::records::ImageRecord;

pub(super) fn path(agent: &Agent, image: &Id) -> PathBuf {
    path_of(&agent.ctx, &agent.profile.id, image)
}

pub(super) fn path_of(ctx: &Context, agent: &Id, image: &Id) -> PathBuf {
    folder(ctx, agent).join(image.as_str())
}

fn folder(ctx: &Context, agent: &Id) -> PathBuf {
    ctx.images.join(agent.as_str())
}

/// Where a new image can be made.
pub(super) async fn new_path(agent: &Agent, image: &Id) -> io::Result<PathBuf> {
    new_path_of(&agent.ctx, &agent.profile.id, image).await
}

pub(super) async fn new_path_of(ctx: &Context, agent: &Id, image: &Id) -> io::Result<PathBuf> {
    let folder = folder(ctx, agent);
    tokio::fs::create_dir_all(&folder).await?;
    Ok(folder.join(image.as_str()))
}

/// Makes the image `to` out of the files of `from`, which both have from then on: images are never
/// changed, so nothing is copied. It is whole and on disk when this returns, whoever removes `from` meanwhile.
pub(super) async fn share(from: &Path, to: &Path) -> io::Result<()> {
    let (from, to) = (from.to_owned(), to.to_owned());
    let shared = tokio::task::spawn_blocking(move || {
        let mut linked = link_all(&from, &to).and_then(|()| sync_parent(&to));
        // What is removed loses its name before its files.
        if !from.exists() {
            let gone = "the memory has been deleted";
            linked = Err(io::Error::new(io::ErrorKind::NotFound, gone));
        }
        if linked.is_err() {
            let _ = std::fs::remove_dir_all(&to);
        }
        linked
    });
    shared.await.map_err(io::Error::other)?
}

fn link_all(from: &Path, to: &Path) -> io::Result<()> {
    std::fs::create_dir(to)?;
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            link_all(&entry.path(), &target)?;
        } else {
            std::fs::hard_link(entry.path(), target)?;
        }
    }
    std::fs::File::open(to)?.sync_all()
}

fn sync_parent(path: &Path) -> io::Result<()> {
    match path.parent() {
        Some(parent) => std::fs::File::open(parent)?.sync_all(),
        None => Ok(()),
    }
}

/// Bytes of the files of an image, if there is one.
pub(super) async fn size(agent: &Agent, image: &Id) -> io::Result<Option<u64>> {
    let mut reading = match tokio::fs::read_dir(path(agent, image)).await {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        reading => reading?,
    };
    let mut size = 0;
    while let Some(entry) = reading.next_entry().await? {
        size += entry.metadata().await?.len();
    }
    Ok(Some(size))
}

/// Bytes of all the memory that an agent has on disk: its own image, those of its snapshots, and what was set aside. Files that several of them
/// have count once, and those that go meanwhile do not.
pub(super) async fn held(agent: &Agent) -> u64 {
    let (folder, own) = (folder(&agent.ctx, &agent.profile.id), agent.image());
    // All of it in one turn of one thread, as a list asks it of every agent there is.
    let counted = tokio::task::spawn_blocking(move || {
        let images = list(&folder);
        match (&images[..], own) {
            ([], _) => return 0,
            ([(name, _)], Some(own)) if name == own.id.as_str() => return own.size,
            _ => {}
        }
        let folders = images
            .iter()
            .filter_map(|(_, image)| std::fs::read_dir(image).ok());
        let found = folders.flatten().filter_map(|file| file.ok()?.metadata().ok());
        let sizes: HashMap<u64, u64> = found.map(|file| (file.ino(), file.len())).collect();
        sizes.values().sum()
    });
    counted.await.unwrap_or_default()
}

pub(super) async fn exists(agent: &Agent, image: &Id) -> bool {
    tokio::fs::try_exists(path(agent, image)).await.unwrap_or(false)
}

pub(super) async fn is_set_aside(agent: &Agent, image: &Id) -> bool {
    let bad = folder(&agent.ctx, &agent.profile.id).join(format!("{image}.bad"));
    tokio::fs::try_exists(bad).await.unwrap_or(false)
}

/// What cannot be removed now is removed when the next daemon starts.
pub(super) async fn discard(agent: &Agent, image: &Id) {
    release(agent, image).await;
    discard_of(&agent.ctx, &agent.profile.id, image).await;
}

/// All that is on disk of the memory of an agent that has only files from now on, which the records know. What is left of it, the next
/// start removes.
pub(super) async fn give_up(agent: &Agent) {
    if let Some(image) = agent.set_image(None) {
        discard(agent, &image.id).await;
    }
    forget_memory(agent).await;
}

/// What was in the memory of a box that is gone, and is in no image.
pub(super) async fn forget_memory(agent: &Agent) {
    if let Err(error) = agent.ctx.engine.forget_memory(&agent.profile.id).await {
        tracing::warn!(agent = %agent.profile.name, %error, "what was in its memory is left on disk");
    }
}

pub(super) async fn discard_of(ctx: &Context, agent: &Id, image: &Id) {
    remove(&path_of(ctx, agent, image)).await;
}

/// See [`share`].
async fn remove(path: &Path) {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".gone");
    let nameless = path.with_file_name(name);
    let removed = match tokio::fs::rename(path, &nameless).await {
        Ok(()) => tokio::fs::remove_dir_all(&nameless).await,
        // A disk that is full need not have room for another name, and there is to be some.
        Err(error) if error.kind() != io::ErrorKind::NotFound => tokio::fs::remove_dir_all(path).await,
        gone => gone,
    };
    match removed {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::warn!(path = %path.display(), %error, "a memory image could not be removed");
        }
        _ => {}
    }
}

/// Nothing will come back from this image, so that the home need hold nothing for it. A home that belongs to another image
/// stays as it is.
pub(super) async fn release(agent: &Agent, image: &Id) {
    if agent.current_image().is_none_or(|current| current.id == *image) {
        let engine = &agent.ctx.engine;
        engine.release(&agent.profile.id, &path(agent, image)).await;
    }
}

/// Keeps an image that could not be used, for people to look at.
pub(super) async fn set_aside(agent: &Agent, image: &Id) {
    release(agent, image).await;
    let (from, folder) = (path(agent, image), folder(&agent.ctx, &agent.profile.id));
    let aside = format!("{image}.bad");
    for (name, old) in entries(&folder).await {
        if name == aside {
            return;
        }
        if name.ends_with(".bad") {
            remove(&old).await;
        }
    }
    let to = folder.join(aside);
    if let Err(error) = tokio::fs::rename(&from, &to).await {
        tracing::warn!(path = %from.display(), %error, "a memory image that cannot be used could not be set aside");
    }
}

/// All images of an agent but these.
pub(super) async fn remove_all_but(agent: &Agent, kept: &HashSet<Id>) {
    let folder = folder(&agent.ctx, &agent.profile.id);
    if kept.is_empty() {
        return remove(&folder).await;
    }
    for (name, image) in entries(&folder).await {
        if !name.parse::<Id>().is_ok_and(|id| kept.contains(&id)) {
            remove(&image).await;
        }
    }
}

pub(super) async fn remove_of(ctx: &Context, agent: &Id) {
    remove(&folder(ctx, agent)).await;
}

/// Removes what no record speaks of. `agents` are those whose bad images are kept, each with its own image; the others are
/// of `snapshots`.
pub(super) async fn sweep(
    ctx: &Arc<Context>,
    agents: &HashMap<&Id, Option<&ImageRecord>>,
    snapshots: &HashSet<Id>,
) {
    for (owner, folder) in entries(&ctx.images).await {
        let owner = owner.parse::<Id>().ok();
        let known = owner.and_then(|id| agents.get_key_value(&id));
        let Some((owner, own)) = known else {
            tracing::info!(folder = %folder.display(), "removing memory images that belong to no agent");
            remove(&folder).await;
            continue;
        };
        for (name, image) in entries(&folder).await {
            let has_record = |id: Id| own.is_some_and(|own| own.id == id) || snapshots.contains(&id);
            let keep = name.ends_with(".bad") || name.parse::<Id>().is_ok_and(has_record);
            if !keep {
                tracing::info!(image = %image.display(), "removing a memory image that has no record");
                if own.is_none_or(|own| !own.current) {
                    ctx.engine.release(owner, &image).await;
                }
                remove(&image).await;
            }
        }
    }
}

async fn entries(folder: &Path) -> Vec<(String, PathBuf)> {
    let folder = folder.to_owned();
    let found = tokio::task::spawn_blocking(move || list(&folder));
    found.await.unwrap_or_default()
}

fn list(folder: &Path) -> Vec<(String, PathBuf)> {
    let found = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let named = found.map(|entry| (entry.file_name().to_string_lossy().into_owned(), entry.path()));
    named.collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(flavor = "multi_thread")]
    async fn what_is_made_of_an_image_that_is_removed_meanwhile_is_whole_or_is_not_made() {
        const FILES: usize = 400;
        let root = tempfile::tempdir().unwrap();
        for round in 0..100 {
            let (from, to) = (
                root.path().join(format!("from-{round}")),
                root.path().join(format!("to-{round}")),
            );
            std::fs::create_dir(&from).unwrap();
            for file in 0..FILES {
                std::fs::write(from.join(format!("a-file-with-a-long-name-{file}")), "").unwrap();
            }
            let removed = from.clone();
            let removing = tokio::spawn(async move { remove(&removed).await });
            std::thread::sleep(Duration::from_micros(round * 40));
            let shared = share(&from, &to).await;
            removing.await.unwrap();
            match shared {
                Ok(()) => assert_eq!(list(&to).len(), FILES, "in round {round}"),
                Err(_) => assert!(!to.exists()),
            }
            assert!(list(root.path()).iter().all(|(name, _)| name.starts_with("to-")));
        }
    }
}
