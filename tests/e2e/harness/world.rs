//! The work directory of this run, and putting the host in order: after this run, and before it after
//! earlier ones that crashed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use anyhow::{Context, Result, bail, ensure};
use rustix::fs::FlockOperation;

use super::engines::in_machines;
use super::remains::Remains;
use super::wait::eventually;
use super::{host, outside};

const PARENT: &str = "/var/tmp";
/// A work directory that holds this file is kept until somebody removes it.
const KEPT: &str = "kept";
/// Holds a file for each run that goes on.
const SLOTS: &str = "dorm-e2e.slots";
const POOL_SIZE: u64 = 16 << 30;
/// Each has a disk and a memory of its own there.
const POOL_SIZE_OF_MACHINES: u64 = 48 << 30;
const MAINS_SIZE: u64 = 16 << 30;
/// FS_IOC_SHUTDOWN, with the flag by which not even the journal is written out.
const SHUT_DOWN: &str = "import fcntl, os, struct, sys; fcntl.ioctl(os.open(sys.argv[1], os.O_RDONLY), 0x8004587D, struct.pack('I', 2))";
/// Runs that may go on at the same time.
const RUNS: u32 = 31;

pub(crate) struct World {
    pub(crate) root: PathBuf,
    /// Tells apart the ports and addresses of runs that go on at the same time.
    pub(super) slot: u32,
    /// The slot and the work directory, locked for as long as this process lives.
    _held: [fs::File; 2],
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

    /// Work directories are called `prefix` and the pid of their run.
    pub(crate) fn set_up(prefix: &str) -> Result<()> {
        ensure!(
            rustix::process::geteuid().is_root(),
            "the end-to-end tests start real boxes and need root"
        );
        let slots = Path::new(PARENT).join(SLOTS);
        fs::create_dir_all(&slots)?;
        // A work directory that is not locked yet looks like that of a run which has crashed.
        let alone = fs::File::open(&slots)?;
        rustix::fs::flock(&alone, FlockOperation::LockExclusive)?;
        clean_up_after_crashes(prefix)?;
        let root = Path::new(PARENT).join(format!("{prefix}{}", std::process::id()));
        fs::create_dir(&root).with_context(|| format!("cannot make {}", root.display()))?;
        let held = lock(&root).context("the new work directory is somebody else's")?;
        drop(alone);
        let (slot, slot_held) = take_slot(&slots)?;
        let world = World {
            root,
            slot,
            _held: [slot_held, held],
            servers: AtomicU32::new(0),
            ending: AtomicBool::new(false),
        };
        let size = if in_machines() {
            POOL_SIZE_OF_MACHINES
        } else {
            POOL_SIZE
        };
        let pool = make_btrfs(&world.root, "pool", size)?;
        // As systemd has all mounts of a host.
        command("mount", &["--make-shared", path(&pool)])?;
        ensure!(WORLD.set(world).is_ok(), "the world is set up once");
        Ok(())
    }

    pub(crate) fn pool(&self) -> PathBuf {
        self.root.join("pool")
    }

    /// A small btrfs for one server.
    pub(super) fn disk(&self, server: u32, size: u64) -> Result<PathBuf> {
        make_btrfs(&self.root, &format!("disk-{server}"), size)
    }

    /// A disk for one server whose power can be cut. Unlike a btrfs, an ext4 can be told to forget what it has not written.
    pub(super) fn mains(&self, server: u32) -> Result<PathBuf> {
        let (image, at) = mains(&self.root, server);
        fs::File::create(&image)?.set_len(MAINS_SIZE)?;
        command("mkfs.ext4", &["-q", path(&image)])?;
        fs::create_dir(&at)?;
        command("mount", &["-o", "loop", path(&image), path(&at)])?;
        Ok(at)
    }

    /// From now on nothing reaches such a disk, and nothing that was on its way.
    pub(super) fn cut_power(&self, server: u32) -> Result<()> {
        let (_, at) = mains(&self.root, server);
        command("python3", &["-c", SHUT_DOWN, path(&at)]).map(drop)
    }

    /// What was on the disk when the power went.
    pub(super) fn restore_power(&self, server: u32) -> Result<()> {
        let (image, at) = mains(&self.root, server);
        // Launchers of other daemons have every mount of the host for a moment. It is the same as before until all have let it go.
        eventually("the disk is let go", || {
            Ok(command("umount", &[path(&at)]).is_ok().then_some(()))
        })?;
        eventually("the disk is off", || {
            Ok(command("losetup", &["--associated", path(&image)])?
                .is_empty()
                .then_some(()))
        })?;
        command("mount", &["-o", "loop", path(&image), path(&at)]).map(drop)
    }

    /// Refuses to start anything once the run is being ended.
    pub(super) fn goes_on(&self) -> Result<()> {
        ensure!(!self.ending.load(Ordering::SeqCst), "the run is being ended");
        Ok(())
    }

    /// Counts servers, so that each has a port, addresses and uids of its own.
    pub(super) fn next_server(&self) -> Result<u32> {
        self.goes_on()?;
        Ok(self.servers.fetch_add(1, Ordering::SeqCst))
    }

    /// Ends every process of this run and keeps its files, to be looked at.
    pub(crate) fn keep() {
        let Some(world) = WORLD.get() else { return };
        world.ending.store(true, Ordering::SeqCst);
        let kept = fs::write(world.root.join(KEPT), "").map_err(anyhow::Error::from);
        match kept.and_then(|()| end(&world.root)) {
            Ok(()) => eprintln!("kept: {}", world.root.display()),
            Err(error) => eprintln!("kept: {}, not in order: {error:#}", world.root.display()),
        }
    }

    /// Ends everything that this run started, whatever state it is in.
    pub(crate) fn tear_down() {
        let Some(world) = WORLD.get() else { return };
        world.ending.store(true, Ordering::SeqCst);
        if std::env::var_os("DORM_E2E_KEEP").is_some() {
            eprintln!("kept: {}", world.root.display());
            return;
        }
        // Tests that are still under way after an interrupt clean up too, and may be quicker at this or that.
        let mut tries = 0;
        while let Err(error) = destroy(&world.root) {
            tries += 1;
            if tries == 20 {
                eprintln!("{} is not cleaned up: {error:#}", world.root.display());
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(250));
        }
        outside::destroy(&world.root);
    }
}

fn mains(root: &Path, server: u32) -> (PathBuf, PathBuf) {
    (
        root.join(format!("mains-{server}.img")),
        root.join(format!("mains-{server}")),
    )
}

/// Makes the file `name.img`, and mounts the btrfs in it at `name`.
fn make_btrfs(root: &Path, name: &str, size: u64) -> Result<PathBuf> {
    let (image, at) = (root.join(format!("{name}.img")), root.join(name));
    fs::File::create(&image)?.set_len(size)?;
    command("mkfs.btrfs", &["--quiet", path(&image)])?;
    fs::create_dir(&at)?;
    command("mount", &["-o", "loop", path(&image), path(&at)])?;
    Ok(at)
}

fn take_slot(slots: &Path) -> Result<(u32, fs::File)> {
    for slot in 0..RUNS {
        let path = slots.join(slot.to_string());
        fs::File::create(&path)?;
        if let Some(held) = lock(&path) {
            return Ok((slot, held));
        }
    }
    bail!("{RUNS} runs of these tests go on already")
}

/// `None` if another process has it.
fn lock(path: &Path) -> Option<fs::File> {
    let file = fs::File::open(path).ok()?;
    rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive)
        .is_ok()
        .then_some(file)
}

fn clean_up_after_crashes(prefix: &str) -> Result<()> {
    let of_crashed = |entry: &fs::DirEntry| {
        let name = entry.file_name();
        let pid = name.to_str().and_then(|n| n.strip_prefix(prefix));
        let root = Path::new(PARENT).join(&name);
        pid.is_some_and(|pid| pid.parse::<u32>().is_ok() && !Path::new("/proc").join(pid).exists())
            && !root.join(KEPT).exists()
            && (lock(&root).is_some() || !root.exists())
    };
    for entry in fs::read_dir(PARENT)?.flatten().filter(of_crashed) {
        eprintln!("cleaning up after an earlier run: {}", entry.path().display());
        destroy(&entry.path())?;
    }
    // A namespace has the name of its run's work directory, which may be gone already.
    for entry in fs::read_dir("/run/netns")
        .into_iter()
        .flatten()
        .flatten()
        .filter(of_crashed)
    {
        outside::destroy(&entry.path());
    }
    Ok(())
}

/// Takes away all of a run but its work directory.
fn end(root: &Path) -> Result<()> {
    for pid in host::processes_naming(root)? {
        host::kill(pid);
    }
    for data in data_directories(root) {
        Remains::of(&data).destroy()?;
    }
    outside::destroy(root);
    Ok(())
}

fn destroy(root: &Path) -> Result<()> {
    end(root)?;
    for at in host::mounts_below(root)?.into_iter().rev() {
        command("umount", &["--lazy", &at])?;
    }
    fs::remove_dir_all(root).with_context(|| format!("cannot remove {}", root.display()))
}

/// Where servers of a run may have had their data: in its pool, on a disk of their own, or beside both.
fn data_directories(root: &Path) -> Vec<PathBuf> {
    let of = |at: &Path| {
        fs::read_dir(at)
            .into_iter()
            .flatten()
            .flatten()
            .map(|e| e.path())
            .collect::<Vec<_>>()
    };
    let places = of(root);
    let inside = places.iter().flat_map(|place| of(place));
    places
        .iter()
        .cloned()
        .chain(inside)
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
