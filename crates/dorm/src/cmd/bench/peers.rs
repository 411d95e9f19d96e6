//! Others that put a container to disk and bring it back, where they are installed: the same root filesystem, and a process
//! in it that holds as much as that of the agent whose wake stands beside.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::report::{Measurement, Samples};
use super::{Bench, load};

/// What is measured of each.
pub(super) struct Names {
    pub(super) checkpoint: &'static str,
    pub(super) restore: &'static str,
}

pub(super) const PODMAN: Names = Names {
    checkpoint: "podman container checkpoint, 100 MiB",
    restore: "podman container restore, 100 MiB",
};
pub(super) const RUNSC: Names = Names {
    checkpoint: "runsc checkpoint, 100 MiB",
    restore: "runsc restore, 100 MiB",
};

/// Where `scripts/setup-gvisor` puts a private copy.
const PRIVATE_RUNSC: &str = "/usr/local/lib/dorm/gvisor/runsc";

/// Says that it runs, again and again: the file is taken away before it is brought back.
const HOLDER: &str = r#"
import os, sys, time
ballast = bytearray(os.urandom(1 << 20)) * int(sys.argv[1])
while True:
    if not os.path.exists("/tmp/runs"):
        open("/tmp/runs", "w").close()
    time.sleep(0.002)
"#;
/// Far beyond what anything takes.
const PATIENCE: Duration = Duration::from_secs(30);

struct Took {
    checkpoint: Duration,
    restore: Duration,
}

/// One container, from its start to its end, of this program, root filesystem and name.
type Round = fn(&str, &Path, &str) -> Result<Took>;

pub(super) async fn measure(bench: &Bench) -> Result<Vec<Measurement>> {
    let mut measured = Vec::new();
    let peers: [(Names, &[&str], Round); 2] = [
        (PODMAN, &["podman"], podman),
        (RUNSC, &["runsc", PRIVATE_RUNSC], runsc),
    ];
    for (names, programs, round) in peers {
        measured.extend(match rounds(bench, programs, round).await {
            Ok((checkpoint, restore)) => [
                Measurement::new(names.checkpoint, &checkpoint, None),
                Measurement::new(names.restore, &restore, None),
            ],
            Err(why) => {
                [names.checkpoint, names.restore].map(|name| Measurement::skipped(name, format!("{why:#}")))
            }
        });
    }
    Ok(measured)
}

async fn rounds(bench: &Bench, programs: &[&'static str], round: Round) -> Result<(Samples, Samples)> {
    let installed = |program: &&&str| {
        let version = Command::new(program)
            .arg("--version")
            .stdout(Stdio::null())
            .status();
        version.is_ok()
    };
    let program: &'static str = programs
        .iter()
        .find(installed)
        .with_context(|| format!("{} is not installed", programs[0]))?;
    ensure!(rustix::process::getuid().is_root(), "it needs root");
    let rootfs = bench.data.join("pool/templates").join(bench.template.id.as_str());
    let rootfs = std::fs::canonicalize(rootfs).context("the template is not on this machine")?;
    ensure!(
        rootfs.join("usr/bin/python3").symlink_metadata().is_ok(),
        "the template has no python3"
    );
    let (mut checkpoint, mut restore) = (Samples::new()?, Samples::new()?);
    // The first one fills caches.
    for n in 0..=bench.slow_runs() {
        let (rootfs, name) = (rootfs.clone(), format!("dorm-bench-{}-{n}", std::process::id()));
        let round = tokio::task::spawn_blocking(move || round(program, &rootfs, &name));
        let took = bench.unbroken(async { round.await? }).await?;
        if n > 0 {
            checkpoint.add(took.checkpoint)?;
            restore.add(took.restore)?;
        }
    }
    Ok((checkpoint, restore))
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

/// A folder that is /tmp of the container, so that one sees from outside whether its process runs.
struct Seen(PathBuf);

impl Seen {
    fn file(&self) -> PathBuf {
        self.0.join("runs")
    }

    fn until_it_runs(&self) -> Result<()> {
        let until = Instant::now() + PATIENCE;
        while !self.file().exists() {
            ensure!(Instant::now() < until, "its process does not run");
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// To disk and back, once the process holds what it is to hold.
    fn measure(&self, checkpoint: &[&str], restore: &[&str]) -> Result<Took> {
        self.until_it_runs()?;
        let begun = Instant::now();
        call(checkpoint)?;
        let checkpoint = begun.elapsed();
        std::fs::remove_file(self.file())?;
        let begun = Instant::now();
        call(restore)?;
        let restore = begun.elapsed();
        self.until_it_runs()
            .context("it came back without what ran in it")?;
        Ok(Took { checkpoint, restore })
    }
}

fn holder(mib: &str) -> [&str; 4] {
    ["python3", "-c", HOLDER, mib]
}

fn podman(program: &str, rootfs: &Path, name: &str) -> Result<Took> {
    let seen = tempfile::tempdir()?;
    let (rootfs, tmp) = (
        format!("{}:O", rootfs.display()),
        format!("{}:/tmp", seen.path().display()),
    );
    let _container = Container {
        remove: vec![program, "rm", "--force", "--time", "0", name],
    };
    let run = [
        program,
        "run",
        "--detach",
        "--network=none",
        // Its own are above what some machines permit, to root too.
        "--ulimit=nofile=1024:1024",
        "--ulimit=nproc=1024:1024",
        "--volume",
        &tmp,
        "--name",
        name,
        "--rootfs",
        &rootfs,
    ];
    call(&[&run[..], &holder(&load::LARGE.to_string())].concat())?;
    Seen(seen.path().to_owned()).measure(
        &[program, "container", "checkpoint", name],
        &[program, "container", "restore", name],
    )
}

fn runsc(program: &str, rootfs: &Path, name: &str) -> Result<Took> {
    let work = tempfile::tempdir()?;
    let path = |part: &str| -> Result<String> {
        let path: PathBuf = work.path().join(part);
        std::fs::create_dir_all(&path)?;
        Ok(path.to_string_lossy().into_owned())
    };
    let (bundle, image, state, tmp) = (path("bundle")?, path("image")?, path("state")?, path("tmp")?);
    let spec = Command::new(program).arg("spec").current_dir(&bundle).output()?;
    ensure!(
        spec.status.success(),
        "runsc spec: {}",
        String::from_utf8_lossy(&spec.stderr).trim()
    );
    let file = Path::new(&bundle).join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&file)?)?;
    config["process"]["terminal"] = json!(false);
    config["process"]["args"] = json!(holder(&load::LARGE.to_string()));
    config["root"] = json!({"path": rootfs, "readonly": true});
    let mounts = config["mounts"]
        .as_array_mut()
        .context("runsc spec has no mounts")?;
    mounts.push(json!({"destination": "/tmp", "type": "bind", "source": tmp, "options": ["rbind", "rw"]}));
    std::fs::write(&file, serde_json::to_vec(&config)?)?;

    let base = [
        program,
        "--platform=systrap",
        "--network=none",
        // It would leave groups behind.
        "--ignore-cgroups",
        "--root",
        &state,
    ];
    let restored = format!("{name}-restored");
    let _containers = [name, &restored].map(|name| Container {
        remove: [&base[..], &["delete", "-force", name]].concat(),
    });
    call(&[&base[..], &["run", "-detach", "-bundle", &bundle, name]].concat())?;
    let checkpoint = ["checkpoint", "-image-path", &image, name];
    let restore = [
        "restore",
        "-detach",
        "-bundle",
        &bundle,
        "-image-path",
        &image,
        &restored,
    ];
    Seen(tmp.into()).measure(
        &[&base[..], &checkpoint].concat(),
        &[&base[..], &restore].concat(),
    )
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
