//! To disk and back, beside CRIU alone on the same image.

use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result};
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
const ALL: [&str; 6] = [HIBERNATE, WAKE, WAKE_EXEC, WAKE_COLD, RESTORE, RESTORE_COLD];

pub(super) async fn measure(bench: &Bench) -> Result<Vec<Measurement>> {
    let agent = bench.agent().await?;
    if let Some(why) = load::missing(bench, &agent.name).await? {
        bench.delete(&agent.name).await?;
        return Ok(ALL.map(|name| Measurement::skipped(name, &why)).into());
    }
    load::hold(bench, &agent.name, load::LARGE).await?;
    let guest = bench.client.guest(&agent.name, Some("root"));
    let (mut hibernate, mut wake, mut wake_exec, mut cold) =
        (Samples::new()?, Samples::new()?, Samples::new()?, Samples::new()?);
    let local = bench.bare.as_ref().ok();
    for round in 0..=bench.slow_runs() {
        // The two kinds take turns, so that whatever else the machine does concerns both.
        for in_cache in [true, false] {
            let begun = Instant::now();
            bench.ask(&agent.name, "/hibernate").await?;
            let slept = begun.elapsed();
            match local {
                Some(bare) if !in_cache => drop_from_cache(&bare.image_of(&agent.id)?)?,
                None if !in_cache => continue,
                _ => {}
            }
            let begun = Instant::now();
            bench.ask(&agent.name, "/wake").await?;
            let woke = begun.elapsed();
            exec::run_true(&guest).await?;
            // The first round fills caches.
            if round == 0 {
                continue;
            }
            hibernate.add(slept)?;
            if in_cache {
                wake.add(woke)?;
                wake_exec.add(begun.elapsed())?;
            } else {
                cold.add(woke)?;
            }
        }
    }
    load::still_held(bench, &agent.name).await?;
    let mut measured = vec![
        Measurement::new(HIBERNATE, &hibernate, None),
        Measurement::new(WAKE, &wake, None),
        Measurement::new(WAKE_EXEC, &wake_exec, None),
    ];
    measured.push(match local {
        Some(_) => Measurement::new(WAKE_COLD, &cold, None),
        None => Measurement::skipped(
            WAKE_COLD,
            "the images are on another machine, or not for this user",
        ),
    });
    measured.extend(alone(bench, &agent).await?);
    bench.delete(&agent.name).await?;
    Ok(measured)
}

/// CRIU alone, on the image and the home of the agent, which is not to be woken afterwards.
async fn alone(bench: &Bench, agent: &Agent) -> Result<Vec<Measurement>> {
    let skipped = |why: &String| {
        Ok([RESTORE, RESTORE_COLD]
            .map(|name| Measurement::skipped(name, why))
            .into())
    };
    let bare = match &bench.bare {
        Ok(bare) => bare,
        Err(why) => return skipped(why),
    };
    if let Err(why) = bare.has_criu() {
        return skipped(&why);
    }
    bench.ask(&agent.name, "/hibernate").await?;
    let image = bare.image_of(&agent.id)?;
    let (mut warm, mut cold) = (Samples::new()?, Samples::new()?);
    for round in 0..=bench.slow_runs() {
        for in_cache in [true, false] {
            if !in_cache {
                drop_from_cache(&image)?;
            }
            let (bare, id, image) = (bare.clone(), agent.id.clone(), image.clone());
            let took = bench
                .unbroken(async move { bare.restore(&id, &image).await })
                .await?;
            let samples = if in_cache { &mut warm } else { &mut cold };
            if round > 0 {
                samples.add(took)?;
            }
        }
    }
    Ok(vec![
        Measurement::new(RESTORE, &warm, None),
        Measurement::new(RESTORE_COLD, &cold, None),
    ])
}

/// What is on disk can be dropped from memory.
fn drop_from_cache(image: &Path) -> Result<()> {
    for entry in std::fs::read_dir(image).context("cannot read the image")? {
        let file = std::fs::File::open(entry?.path())?;
        fadvise(&file, 0, None, Advice::DontNeed).context("cannot drop the image from memory")?;
    }
    Ok(())
}
