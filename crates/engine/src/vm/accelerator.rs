//! What a machine's instructions are run by, as seen on this host.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::host::trial::{kvm_is_there, run_within};

/// In the data directory: what was seen, and with what.
const KEPT: &str = "vm.json";
const KEPT_OF_KVM: &str = "vm-kvm.json";
const KEPT_OF_EMULATION: &str = "vm-emulation.json";
/// Where KVM runs an ordinary kernel at all, it does so in a fraction of this; elsewhere the test may hang.
const PATIENCE: Duration = Duration::from_secs(4);
/// An emulated kernel takes a few seconds, on a busy host many.
const LONG_PATIENCE: Duration = Duration::from_secs(60);
/// A machine that boots in this time is quick enough for whoever has not asked for one.
pub(super) const QUICK: Duration = Duration::from_secs(1);
/// What a kernel says that finds nothing to start.
const BOOTED: &str = "Kernel panic";
/// What the guest says whose disk, of which it has found the driver, is empty.
const FOUND_DISK: &str = "mount /root: ";

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Accelerator {
    /// The processor itself.
    Kvm,
    /// QEMU's translator: it works wherever QEMU does, and is many times slower than the processor itself.
    Tcg,
}

impl Accelerator {
    /// In words.
    pub(crate) fn describe(self) -> &'static str {
        match self {
            Self::Kvm => "hardware acceleration (kvm)",
            Self::Tcg => "emulation (tcg): slow",
        }
    }

    /// The processor that a machine sees: named feature by feature, as neither the host's nor the version of QEMU
    /// may decide it if a state is to move. It is what distributions call x86-64-v2, and more for cryptography. [`Accelerator::vendor`] is
    /// what is left.
    pub(super) fn processor(self) -> &'static str {
        match self {
            // The same, and refused on a processor that has less.
            Self::Kvm => "qemu64,+ssse3,+sse4.1,+sse4.2,+popcnt,+aes,+pclmulqdq,+rdrand,enforce",
            Self::Tcg => "qemu64,+ssse3,+sse4.1,+sse4.2,+popcnt,+aes,+pclmulqdq,+rdrand",
        }
    }

    /// Whose the machine's processor is, where that is for the host to decide. A kernel that has been told of one does not expect the other.
    pub(super) fn vendor(self) -> Option<String> {
        match self {
            Self::Kvm => vendor_in(BufReader::new(fs::File::open("/proc/cpuinfo").ok()?)),
            Self::Tcg => None,
        }
    }
}

/// As it is said of each processor.
fn vendor_in(told: impl BufRead) -> Option<String> {
    told.lines().map_while(Result::ok).find_map(|line| {
        let (name, value) = line.split_once(':')?;
        (name.trim() == "vendor_id").then(|| value.trim().to_owned())
    })
}

/// What a test was done with: another kernel or QEMU may do better.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Versions {
    pub(super) host: String,
    pub(super) qemu: String,
    pub(super) kernel: String,
}

#[derive(Serialize, Deserialize)]
struct Kept {
    by: Versions,
    boot_ms: Option<u64>,
}

/// A trial that came to no end, for which a busy host may be the reason.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Late;

/// How long the processor itself takes to boot `kernel`, if it does. It is tried once, and then known from `data`.
pub(super) fn kvm_boot(
    data: &Path,
    by: Versions,
    program: &Path,
    kernel: &Path,
) -> Result<Option<Duration>, Late> {
    known_or(data, by, kvm_is_there, || {
        boot(&trial(program, kernel, Accelerator::Kvm), BOOTED, PATIENCE)
    })
}

/// Whether QEMU runs a machine by `accelerator` in which `kernel` boots and the guest of `initrd` finds its disk; otherwise what was said. Once
/// seen, it is known from `data`.
pub(super) fn finds_disk(
    data: &Path,
    by: Versions,
    program: &Path,
    kernel: &Path,
    initrd: &Path,
    accelerator: Accelerator,
) -> Result<(), String> {
    let file = data.join(match accelerator {
        Accelerator::Kvm => KEPT_OF_KVM,
        Accelerator::Tcg => KEPT_OF_EMULATION,
    });
    if known(&file, &by).is_some() {
        return Ok(());
    }
    let mut qemu = trial(program, kernel, accelerator);
    qemu.arg("-initrd").arg(initrd).args([
        "-blockdev",
        "driver=null-co,node-name=disk,read-zeroes=on,size=1048576",
        "-device",
        "virtio-blk-pci,drive=disk",
    ]);
    match boot(&qemu, FOUND_DISK, LONG_PATIENCE) {
        Boot::Took(took) => {
            keep(&file, by, Some(took));
            Ok(())
        }
        Boot::Late(said) | Boot::Refused(said) => Err(format!("no machine boots: {said}")),
    }
}

/// What became of a boot.
enum Boot {
    Took(Duration),
    /// It was given up, or could not be tried, for which a busy host may be the reason.
    Late(String),
    /// And what was said.
    Refused(String),
}

fn known(file: &Path, by: &Versions) -> Option<Kept> {
    let kept: Kept = serde_json::from_slice(&fs::read(file).ok()?).ok()?;
    (kept.by == *by).then_some(kept)
}

fn keep(file: &Path, by: Versions, took: Option<Duration>) {
    let boot_ms = took.map(|took| u64::try_from(took.as_millis()).unwrap_or(u64::MAX));
    if let Ok(text) = serde_json::to_vec(&Kept { by, boot_ms }) {
        let _ = fs::write(file, text);
    }
}

fn known_or(
    data: &Path,
    by: Versions,
    is_there: impl Fn() -> bool,
    boot: impl Fn() -> Boot,
) -> Result<Option<Duration>, Late> {
    if !is_there() {
        return Ok(None);
    }
    let file = data.join(KEPT);
    if let Some(kept) = known(&file, &by) {
        return Ok(kept.boot_ms.map(Duration::from_millis));
    }
    // The first time, all of it may have to come from the disk.
    let seen = match (boot(), &boot) {
        (Boot::Took(took), again) if took > QUICK => match again() {
            Boot::Took(better) => Boot::Took(better),
            Boot::Late(_) | Boot::Refused(_) => Boot::Took(took),
        },
        (Boot::Late(_), again) => again(),
        (seen, _) => seen,
    };
    let took = match seen {
        Boot::Took(took) => Some(took),
        Boot::Refused(_) => None,
        Boot::Late(_) => return Err(Late),
    };
    keep(&file, by, took);
    Ok(took)
}

/// A machine that has nothing to start, so that its kernel soon panics and it ends.
fn trial(program: &Path, kernel: &Path, accelerator: Accelerator) -> Command {
    let by = match accelerator {
        Accelerator::Kvm => "kvm",
        Accelerator::Tcg => "tcg",
    };
    let mut qemu = Command::new(program);
    qemu.args(["-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"])
        .args(["-machine", "q35", "-accel", by, "-cpu", accelerator.processor()])
        .args(["-m", "128M", "-serial", "stdio"])
        .args(["-append", "console=ttyS0 quiet panic=-1", "-kernel"])
        .arg(kernel);
    qemu
}

fn boot(qemu: &Command, expected: &str, patience: Duration) -> Boot {
    match run_within(qemu, patience) {
        Ok((said, took)) => {
            let console = String::from_utf8_lossy(&said.stdout);
            if console.contains(expected) {
                return Boot::Took(took);
            }
            let words = String::from_utf8_lossy(&said.stderr).trim().to_owned();
            let last = console.trim().lines().next_back().unwrap_or_default();
            tracing::debug!(words, last, "no kernel boots here");
            match said.status.code() {
                Some(_) if words.is_empty() => Boot::Refused(last.to_owned()),
                Some(_) => Boot::Refused(words),
                None => Boot::Late(format!("QEMU was killed after {} s; {last}", took.as_secs())),
            }
        }
        Err(error) => {
            tracing::debug!(%error, "QEMU cannot be tried");
            Boot::Late(error.to_string())
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    fn versions(qemu: &str) -> Versions {
        Versions {
            host: "6.1".to_owned(),
            qemu: qemu.to_owned(),
            kernel: "6.1-cloud".to_owned(),
        }
    }

    #[test]
    fn what_was_seen_once_is_known_until_something_else_is_there() {
        let data = tempfile::tempdir().unwrap();
        let times = RefCell::new(vec![
            Boot::Refused(String::new()),
            Boot::Took(Duration::from_millis(400)),
        ]);
        let look = |by| known_or(data.path(), by, || true, || times.borrow_mut().pop().unwrap());
        assert_eq!(look(versions("7.2")), Ok(Some(Duration::from_millis(400))));
        assert_eq!(look(versions("7.2")), Ok(Some(Duration::from_millis(400))));
        assert_eq!(look(versions("10.0")), Ok(None));
        assert_eq!(look(versions("10.0")), Ok(None));
        assert!(times.borrow().is_empty());
    }

    #[test]
    fn a_qemu_that_boots_nothing_is_asked_each_time_what_it_says_and_one_that_does_once() {
        use std::os::unix::fs::PermissionsExt;
        let data = tempfile::tempdir().unwrap();
        let program = data.path().join("qemu");
        let look_at = |version, by| {
            let (kernel, initrd) = (Path::new("kernel"), Path::new("initrd"));
            finds_disk(data.path(), versions(version), &program, kernel, initrd, by)
        };
        let look = || look_at("7.2", Accelerator::Tcg);
        let answer = |script: &str| {
            fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
            fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        };
        answer("echo 'no such machine' >&2; exit 1");
        assert_eq!(look().unwrap_err(), "no machine boots: no such machine");
        // Without drivers there is no disk.
        answer("echo 'the machine has no /dev/vda'; echo 'Kernel panic - not syncing'");
        assert!(look().is_err());
        answer("echo 'mount /root: Invalid argument'; echo 'Kernel panic - not syncing'");
        assert_eq!(look(), Ok(()));
        fs::remove_file(&program).unwrap();
        assert_eq!(look(), Ok(()), "it is known");
        let other = look_at("10.0", Accelerator::Tcg);
        assert!(other.is_err(), "of another version it is not");
        assert!(look_at("7.2", Accelerator::Kvm).is_err(), "nor by KVM");
    }

    #[test]
    fn a_slow_first_boot_is_tried_again() {
        let data = tempfile::tempdir().unwrap();
        for first in [Boot::Took(Duration::from_millis(1300)), Boot::Late(String::new())] {
            let times = RefCell::new(vec![Boot::Took(Duration::from_millis(300)), first]);
            let boot = || times.borrow_mut().pop().unwrap();
            let seen = known_or(data.path(), versions("7.2"), || true, boot);
            assert_eq!(seen, Ok(Some(Duration::from_millis(300))));
            fs::remove_file(data.path().join(KEPT)).unwrap();
        }
    }

    #[test]
    fn without_the_device_nothing_is_tried_and_nothing_remembered_is_believed() {
        let data = tempfile::tempdir().unwrap();
        let quick = || Boot::Took(Duration::from_millis(300));
        assert!(known_or(data.path(), versions("7.2"), || true, quick).is_ok_and(|took| took.is_some()));
        let asked = || -> Boot { panic!("there is nothing to try") };
        assert_eq!(known_or(data.path(), versions("7.2"), || false, asked), Ok(None));
    }

    #[test]
    fn a_host_that_was_too_busy_is_asked_again() {
        let data = tempfile::tempdir().unwrap();
        assert_eq!(
            known_or(
                data.path(),
                versions("7.2"),
                || true,
                || Boot::Late(String::new())
            ),
            Err(Late)
        );
        let quick = || Boot::Took(Duration::from_millis(300));
        assert!(known_or(data.path(), versions("7.2"), || true, quick).is_ok_and(|took| took.is_some()));
    }
}
