//! The same root filesystem and the same command under runc, the common container runtime.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use dorm_server::api::types::Template;
use serde_json::{Value, json};

use super::report::{Measurement, Samples};

pub(super) const NAME: &str = "runc run of true";

pub(super) fn measure(data: &Path, template: &Template, runs: u32) -> Result<Measurement> {
    let rootfs = data.join("pool/templates").join(template.id.as_str());
    if Command::new("runc")
        .arg("--version")
        .stdout(Stdio::null())
        .status()
        .is_err()
    {
        return Ok(Measurement::skipped(NAME, "runc is not installed"));
    }
    if !rustix::process::getuid().is_root() {
        return Ok(Measurement::skipped(NAME, "it needs root"));
    }
    if !rootfs.join("bin").exists() {
        return Ok(Measurement::skipped(
            NAME,
            format!("{} is not on this machine", rootfs.display()),
        ));
    }
    match with_bundle(&rootfs, runs) {
        Ok(samples) => Ok(Measurement::new(NAME, &samples, None)),
        Err(e) => Ok(Measurement::skipped(NAME, format!("{e:#}"))),
    }
}

fn with_bundle(rootfs: &Path, runs: u32) -> Result<Samples> {
    let bundle = tempfile::tempdir()?;
    let spec = Command::new("runc")
        .arg("spec")
        .current_dir(bundle.path())
        .output()?;
    ensure!(
        spec.status.success(),
        "runc spec: {}",
        String::from_utf8_lossy(&spec.stderr).trim()
    );
    let path = bundle.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path)?)?;
    config["process"]["terminal"] = json!(false);
    config["process"]["args"] = json!(["/bin/true"]);
    config["root"] = json!({"path": std::fs::canonicalize(rootfs)?, "readonly": true});
    std::fs::write(&path, serde_json::to_vec(&config)?)?;

    let state = tempfile::tempdir()?;
    let mut samples = Samples::new()?;
    for round in 0..=runs {
        let name = format!("dorm-bench-{}-{round}", std::process::id());
        let begun = Instant::now();
        let output = Command::new("runc")
            .arg("--root")
            .arg(state.path())
            .args(["run", "--bundle"])
            .arg(bundle.path())
            .arg(&name)
            .stdin(Stdio::null())
            .output()
            .context("cannot start runc")?;
        // The first one fills caches.
        if round > 0 {
            samples.add(begun.elapsed())?;
        }
        ensure!(
            output.status.success(),
            "runc run: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(samples)
}
