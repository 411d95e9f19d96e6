//! Others that put a container to disk and bring it back, where they are installed: the same root filesystem with a shell
//! that sleeps.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use dorm_server::api::types::Template;
use serde_json::{Value, json};

use super::report::{Measurement, Samples};

const PODMAN: &str = "podman container restore";
const RUNSC: &str = "runsc restore";
const ASLEEP: [&str; 3] = ["/bin/sh", "-c", "while :; do sleep 1; done"];

pub(super) fn measure(data: &Path, template: &Template, runs: u32) -> Vec<Measurement> {
    let rootfs = data.join("pool/templates").join(template.id.as_str());
    let one = |name, program: &str, round: fn(&Path, &str) -> Result<Duration>| {
        let tried = Command::new(program)
            .arg("--version")
            .stdout(Stdio::null())
            .status();
        if tried.is_err() {
            return Measurement::skipped(name, format!("{program} is not installed"));
        }
        if !rustix::process::getuid().is_root() {
            return Measurement::skipped(name, "it needs root");
        }
        let all = || -> Result<Samples> {
            let rootfs = std::fs::canonicalize(&rootfs).context("the template is not on this machine")?;
            let mut samples = Samples::new()?;
            // The first one fills caches.
            for n in 0..=runs {
                let took = round(&rootfs, &format!("dorm-bench-{}-{n}", std::process::id()))?;
                if n > 0 {
                    samples.add(took)?;
                }
            }
            Ok(samples)
        };
        match all() {
            Ok(samples) => Measurement::new(name, &samples, None),
            Err(error) => Measurement::skipped(name, format!("{error:#}")),
        }
    };
    vec![one(PODMAN, "podman", podman), one(RUNSC, "runsc", runsc)]
}

/// Ended and removed when it goes out of scope, whatever it has come to.
struct Container<'a> {
    remove: Vec<&'a str>,
}

impl Drop for Container<'_> {
    fn drop(&mut self) {
        let _ = call(&self.remove);
    }
}

fn podman(rootfs: &Path, name: &str) -> Result<Duration> {
    let rootfs = format!("{}:O", rootfs.display());
    let container = Container {
        remove: vec!["podman", "rm", "--force", "--time", "0", name],
    };
    let run = [
        "podman",
        "run",
        "--detach",
        "--network",
        "none",
        "--name",
        name,
        "--rootfs",
        &rootfs,
    ];
    call(&[&run[..], &ASLEEP].concat())?;
    call(&["podman", "container", "checkpoint", name])?;
    let begun = Instant::now();
    call(&["podman", "container", "restore", name])?;
    let took = begun.elapsed();
    drop(container);
    Ok(took)
}

fn runsc(rootfs: &Path, name: &str) -> Result<Duration> {
    let work = tempfile::tempdir()?;
    let path = |part: &str| -> Result<String> {
        let path: PathBuf = work.path().join(part);
        std::fs::create_dir_all(&path)?;
        Ok(path.to_string_lossy().into_owned())
    };
    let (bundle, image, state) = (path("bundle")?, path("image")?, path("state")?);
    let spec = Command::new("runsc").arg("spec").current_dir(&bundle).output()?;
    ensure!(
        spec.status.success(),
        "runsc spec: {}",
        String::from_utf8_lossy(&spec.stderr).trim()
    );
    let file = Path::new(&bundle).join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&file)?)?;
    config["process"]["terminal"] = json!(false);
    config["process"]["args"] = json!(ASLEEP);
    config["root"] = json!({"path": rootfs, "readonly": true});
    std::fs::write(&file, serde_json::to_vec(&config)?)?;

    let base = [
        "runsc",
        "--platform=systrap",
        "--network=none",
        // It would leave groups behind.
        "--ignore-cgroups",
        "--root",
        &state,
    ];
    let with = |more: &[&str]| call(&[&base[..], more].concat());
    let restored = format!("{name}-restored");
    let containers = [name, &restored].map(|name| Container {
        remove: [&base[..], &["delete", "-force", name]].concat(),
    });
    with(&["run", "-detach", "-bundle", &bundle, name])?;
    with(&["checkpoint", "-image-path", &image, name])?;
    let begun = Instant::now();
    with(&[
        "restore",
        "-detach",
        "-bundle",
        &bundle,
        "-image-path",
        &image,
        &restored,
    ])?;
    let took = begun.elapsed();
    drop(containers);
    Ok(took)
}

fn call(command: &[&str]) -> Result<()> {
    // What a container leaves open of its output would be waited for.
    let mut errors = tempfile::tempfile()?;
    let status = Command::new(command[0])
        .args(&command[1..])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(errors.try_clone()?)
        .status()
        .with_context(|| format!("cannot start {}", command[0]))?;
    if !status.success() {
        let mut text = String::new();
        std::io::Seek::rewind(&mut errors)?;
        std::io::Read::read_to_string(&mut errors, &mut text)?;
        anyhow::bail!(
            "{} failed: {}",
            command[0],
            text.lines().last().unwrap_or_default()
        );
    }
    Ok(())
}
