//! To disk and back, beside CRIU alone on the same image.

use std::io::Read;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use dorm_engine::criu::bare::{Bare, in_large_pages};
use dorm_server::api::types::Agent;
use rustix::fs::{Advice, fadvise};

use super::report::{Measurement, Samples};
use super::{Bench, exec, load};

pub(super) const HIBERNATE: &str = "hibernate, 100 MiB";
pub(super) const WAKE: &str = "wake from disk, 100 MiB";
const WAKE_EXEC: &str = "wake from disk + exec of true, 100 MiB";
pub(super) const WAKE_COLD: &str = "wake from disk, 100 MiB, not in page cache";
pub(super) const RESTORE: &str = "criu restore, 100 MiB";
pub(super) const RESTORE_COLD: &str = "criu restore, 100 MiB, not in page cache";
pub(super) const MEMORY: &str = "plain read of the image's memory, 100 MiB";
const ALL: [&str; 7] = [
    HIBERNATE,
    WAKE,
    WAKE_EXEC,
    WAKE_COLD,
    RESTORE,
    RESTORE_COLD,
    MEMORY,
];

const PAGE: usize = 4096;
/// Longer than the kernel keeps ready what the sleep before has needed: nobody's agents sleep for less.
const REST: Duration = Duration::from_millis(1100);

pub(super) async fn measure(bench: &Bench) -> Result<Vec<Measurement>> {
    let agent = bench.agent().await?;
    if let Some(why) = load::missing(bench, &agent.name).await? {
        bench.delete(&agent.name).await?;
        return Ok(ALL.map(|name| Measurement::skipped(name, &why)).into());
    }
    load::hold(bench, &agent.name, load::LARGE).await?;
    let guest = bench.client.guest(&agent.name, Some("root"));
    let bare = bench.bare.as_ref();
    let with_criu = bare
        .map_err(Clone::clone)
        .and_then(|bare| bare.has_criu().map(|()| bare));
    let mut samples = ALL.map(|_| Samples::new());
    let mut note = |name: &str, took| {
        let n = ALL.iter().position(|one| *one == name);
        match n.map(|n| &mut samples[n]) {
            Some(Ok(samples)) => samples.add(took),
            _ => anyhow::bail!("{name} cannot be measured"),
        }
    };
    for round in 0..=bench.slow_runs() {
        // All kinds take turns, so that whatever else the machine does concerns all.
        for in_cache in [true, false] {
            let begun = Instant::now();
            bench.ask(&agent.name, "/hibernate").await?;
            let slept = begun.elapsed();
            tokio::time::sleep(REST).await;
            let alone = match with_criu {
                Ok(bare) => Some(restored_alone(bench, bare, &agent, in_cache).await?),
                Err(_) => None,
            };
            let memory = match (bare, in_cache) {
                (Ok(bare), true) => {
                    let image = bare.image_of(&agent.id)?;
                    Some(in_large_pages(|| memory_alone(&image))?)
                }
                _ => None,
            };
            if let (Ok(bare), false) = (bare, in_cache) {
                drop_from_cache(&bare.image_of(&agent.id)?)?;
            }
            tokio::time::sleep(REST).await;
            let begun = Instant::now();
            bench.ask(&agent.name, "/wake").await?;
            let woke = begun.elapsed();
            exec::run_true(&guest).await?;
            let ran = begun.elapsed();
            // The first round fills caches.
            if round == 0 {
                continue;
            }
            note(HIBERNATE, slept)?;
            note(if in_cache { WAKE } else { WAKE_COLD }, woke)?;
            if in_cache {
                note(WAKE_EXEC, ran)?;
            }
            if let Some(memory) = memory {
                note(MEMORY, memory)?;
            }
            if let Some(alone) = alone {
                note(if in_cache { RESTORE } else { RESTORE_COLD }, alone)?;
            }
        }
    }
    load::still_held(bench, &agent.name).await?;
    bench.delete(&agent.name).await?;
    let mut measured = Vec::new();
    for (name, samples) in ALL.into_iter().zip(samples) {
        let why = match name {
            WAKE_COLD | MEMORY => bare.err(),
            RESTORE | RESTORE_COLD => with_criu.as_ref().err(),
            _ => None,
        };
        measured.push(match why {
            Some(why) => Measurement::skipped(name, why),
            None => Measurement::new(name, &samples?, None),
        });
    }
    Ok(measured)
}

/// CRIU alone, on the image and the home of the agent, both of which stay as they are.
async fn restored_alone(bench: &Bench, bare: &Bare, agent: &Agent, in_cache: bool) -> Result<Duration> {
    let image = bare.image_of(&agent.id)?;
    if !in_cache {
        drop_from_cache(&image)?;
    }
    let (bare, id) = (bare.clone(), agent.id.clone());
    bench
        .unbroken(async move { bare.restore(&id, &image).await })
        .await
}

/// What nothing gets around that gives the processes all of their memory before they run.
fn memory_alone(image: &Path) -> Result<Duration> {
    let mut took = Duration::ZERO;
    for entry in std::fs::read_dir(image).context("cannot read the image")? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with("pages-") {
            let mut file = std::fs::File::open(entry.path())?;
            let size = file.metadata()?.len() as usize;
            // Zeroes of this size are not there before somebody writes to them, and a copy from page to page is the quickest.
            let mut room = vec![0_u8; size + PAGE];
            let start = room.as_ptr().align_offset(PAGE);
            let begun = Instant::now();
            file.read_exact(&mut room[start..start + size])?;
            took += begun.elapsed();
        }
    }
    Ok(took)
}

/// What is on disk can be dropped from memory.
fn drop_from_cache(image: &Path) -> Result<()> {
    for entry in std::fs::read_dir(image).context("cannot read the image")? {
        let file = std::fs::File::open(entry?.path())?;
        fadvise(&file, 0, None, Advice::DontNeed).context("cannot drop the image from memory")?;
    }
    Ok(())
}
