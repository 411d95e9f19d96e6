//! The work directory of this run, and putting the host in order: after this run, and before it after
//! earlier ones that crashed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use anyhow::{Context, Result, bail, ensure};

use super::outside;
use super::remains::{self, Remains};

const PARENT: &str = "/var/tmp";
const PREFIX: &str = "dorm-e2e-";
const POOL_SIZE: u64 = 16 << 30;

pub(crate) struct World {
    pub(crate) root: PathBuf,
    servers: AtomicU32,
    ending: AtomicBool,
}

static WORLD: OnceLock<World> = OnceLock::new();

impl World {
    pub(crate) fn get() -> &'static World {
        WORLD
            .get()
            .expect("the runner sets the world up before the first test")
    }

    pub(crate) fn set_up() -> Result<()> {
        ensure!(
            rustix::process::geteuid().is_root(),
            "the end-to-end tests start real boxes and need root"
        );
        clean_up_after_crashes()?;
        let root = Path::new(PARENT).join(format!("{PREFIX}{}", std::process::id()));
        fs::create_dir(&root).with_context(|| format!("cannot make {}", root.display()))?;
        let world = World {
            root,
            servers: AtomicU32::new(0),
            ending: AtomicBool::new(false),
        };
        let image = world.root.join("pool.img");
        fs::File::create(&image)?.set_len(POOL_SIZE)?;
        command("mkfs.btrfs", &["--quiet", path(&image)])?;
        let pool = world.pool();
        fs::create_dir(&pool)?;
        command("mount", &["-o", "loop,noatime", path(&image), path(&pool)])?;
        ensure!(WORLD.set(world).is_ok(), "the world is set up once");
        Ok(())
    }

    pub(crate) fn pool(&self) -> PathBuf {
        self.root.join("pool")
    }

    /// Counts servers, so that each has a port, addresses and uids of its own.
    pub(super) fn next_server(&self) -> Result<u32> {
        ensure!(!self.ending.load(Ordering::SeqCst), "the run is being ended");
        Ok(self.servers.fetch_add(1, Ordering::SeqCst))
    }

    /// Ends everything that this run started, whatever state it is in.
    pub(crate) fn tear_down() {
        let Some(world) = WORLD.get() else { return };
        world.ending.store(true, Ordering::SeqCst);
        if std::env::var_os("DORM_E2E_KEEP").is_some() {
            eprintln!("kept: {}", world.root.display());
            return;
        }
        if let Err(error) = destroy(&world.root) {
            eprintln!("{} is not cleaned up: {error:#}", world.root.display());
        }
    }
}

fn clean_up_after_crashes() -> Result<()> {
    for entry in fs::read_dir(PARENT)? {
        let entry = entry?;
        let name = entry.file_name();
        let pid = name
            .to_str()
            .and_then(|n| n.strip_prefix(PREFIX))
            .and_then(|n| n.parse::<u32>().ok());
        if pid.is_some_and(|pid| !runs_tests(pid)) {
            eprintln!("cleaning up after an earlier run: {}", entry.path().display());
            destroy(&entry.path())?;
        }
    }
    Ok(())
}

/// Whether `pid` is a runner of these tests: a pid may have been given to somebody else.
fn runs_tests(pid: u32) -> bool {
    let own = fs::read_link("/proc/self/exe").ok();
    let theirs = fs::read_link(format!("/proc/{pid}/exe")).ok();
    let stem = |path: Option<PathBuf>| {
        let name = path?.file_name()?.to_str()?.split(['-', ' ']).next()?.to_owned();
        Some(name)
    };
    theirs.is_some() && stem(own) == stem(theirs)
}

fn destroy(root: &Path) -> Result<()> {
    for pid in remains::processes_naming(root)? {
        remains::kill(pid);
    }
    for data in data_directories(root) {
        Remains::of(&data).destroy()?;
    }
    outside::destroy(root);
    for at in remains::mounts_below(root)?.into_iter().rev() {
        command("umount", &["--lazy", &at])?;
    }
    fs::remove_dir_all(root).with_context(|| format!("cannot remove {}", root.display()))
}

/// Where servers of a run may have had their data: in its pool, or beside it.
fn data_directories(root: &Path) -> Vec<PathBuf> {
    let of = |at: &Path| {
        fs::read_dir(at)
            .into_iter()
            .flatten()
            .flatten()
            .map(|e| e.path())
            .collect::<Vec<_>>()
    };
    [of(root), of(&root.join("pool"))]
        .concat()
        .into_iter()
        .filter(|p| p.join("config.toml").exists())
        .collect()
}

pub(crate) fn path(path: &Path) -> &str {
    path.to_str()
        .expect("the harness chooses its own paths, all of them UTF-8")
}

/// Runs a program of the host and returns what it printed.
pub(crate) fn command(program: &str, args: &[&str]) -> Result<String> {
    let output = Command::new(program)
        .args(args)
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot run {program}"))?;
    if !output.status.success() {
        bail!(
            "{program} {}: {}",
            args.join(" "),
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
