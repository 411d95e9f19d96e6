//! What a machine's instructions are run by, as seen on this host.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::host::trial::{kvm_is_there, run_within};

/// In the data directory: what was seen, and with what.
const KEPT: &str = "vm.json";
/// Where KVM runs an ordinary kernel at all, it does so in a fraction of this; elsewhere the test may hang.
const PATIENCE: Duration = Duration::from_secs(4);
/// A machine that boots in this time is quick enough for whoever has not asked for one.
pub(super) const QUICK: Duration = Duration::from_secs(1);
/// What a kernel says that finds nothing to start.
const BOOTED: &str = "Kernel panic";

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
    /// may decide it if a state is to move. It is what distributions call x86-64-v2, and more for cryptography.
    pub(super) fn processor(self) -> &'static str {
        match self {
            // The same, and refused on a processor that has less.
            Self::Kvm => "qemu64,+ssse3,+sse4.1,+sse4.2,+popcnt,+aes,+pclmulqdq,+rdrand,enforce",
            Self::Tcg => "qemu64,+ssse3,+sse4.1,+sse4.2,+popcnt,+aes,+pclmulqdq,+rdrand",
        }
    }
}

/// What a test of KVM was done with: another kernel or QEMU may do better.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
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

/// How long the processor itself takes to boot `kernel`, if it does. It is tried once, and then known from `data`.
pub(super) fn kvm_boot(data: &Path, by: Versions, program: &Path, kernel: &Path) -> Option<Duration> {
    known_or(data, by, kvm_is_there, || boot(program, kernel))
}

/// What became of a boot.
enum Boot {
    Took(Duration),
    /// It was given up, for which a busy host may be the reason.
    Late,
    Refused,
}

fn known_or(
    data: &Path,
    by: Versions,
    is_there: impl Fn() -> bool,
    boot: impl Fn() -> Boot,
) -> Option<Duration> {
    if !is_there() {
        return None;
    }
    let file = data.join(KEPT);
    let kept: Option<Kept> = fs::read(&file)
        .ok()
        .and_then(|text| serde_json::from_slice(&text).ok());
    if let Some(kept) = kept.filter(|kept| kept.by == by) {
        return kept.boot_ms.map(Duration::from_millis);
    }
    // The first time, all of it may have to come from the disk.
    let seen = match (boot(), &boot) {
        (Boot::Took(took), again) if took > QUICK => match again() {
            Boot::Took(better) => Boot::Took(better),
            Boot::Late | Boot::Refused => Boot::Took(took),
        },
        (Boot::Late, again) => again(),
        (seen, _) => seen,
    };
    let took = match seen {
        Boot::Took(took) => Some(took),
        Boot::Refused => None,
        // To be tried again when it is needed next.
        Boot::Late => return None,
    };
    let boot_ms = took.map(|took| u64::try_from(took.as_millis()).unwrap_or(u64::MAX));
    if let Ok(text) = serde_json::to_vec(&Kept { by, boot_ms }) {
        let _ = fs::write(file, text);
    }
    took
}

/// A machine without a disk is enough: it ends by itself, for want of anything to start.
fn boot(program: &Path, kernel: &Path) -> Boot {
    let mut qemu = Command::new(program);
    qemu.args(["-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"])
        .args([
            "-machine",
            "q35",
            "-accel",
            "kvm",
            "-cpu",
            Accelerator::Kvm.processor(),
        ])
        .args(["-m", "128M", "-serial", "stdio"])
        .args(["-append", "console=ttyS0 quiet panic=-1", "-kernel"])
        .arg(kernel);
    match run_within(&qemu, PATIENCE) {
        Ok((said, took)) if String::from_utf8_lossy(&said.stdout).contains(BOOTED) => Boot::Took(took),
        Ok((said, _)) => {
            let words = String::from_utf8_lossy(&said.stderr).trim().to_owned();
            tracing::debug!(words, "KVM does not boot a kernel here");
            match said.status.code() {
                Some(_) => Boot::Refused,
                None => Boot::Late,
            }
        }
        Err(error) => {
            tracing::debug!(%error, "KVM cannot be tried");
            Boot::Late
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
        let times = RefCell::new(vec![Boot::Refused, Boot::Took(Duration::from_millis(400))]);
        let look = |by| known_or(data.path(), by, || true, || times.borrow_mut().pop().unwrap());
        assert_eq!(look(versions("7.2")), Some(Duration::from_millis(400)));
        assert_eq!(look(versions("7.2")), Some(Duration::from_millis(400)));
        assert_eq!(look(versions("10.0")), None);
        assert_eq!(look(versions("10.0")), None);
        assert!(times.borrow().is_empty());
    }

    #[test]
    fn a_slow_first_boot_is_tried_again() {
        let data = tempfile::tempdir().unwrap();
        for first in [Boot::Took(Duration::from_millis(1300)), Boot::Late] {
            let times = RefCell::new(vec![Boot::Took(Duration::from_millis(300)), first]);
            let boot = || times.borrow_mut().pop().unwrap();
            let seen = known_or(data.path(), versions("7.2"), || true, boot);
            assert_eq!(seen, Some(Duration::from_millis(300)));
            fs::remove_file(data.path().join(KEPT)).unwrap();
        }
    }

    #[test]
    fn without_the_device_nothing_is_tried_and_nothing_remembered_is_believed() {
        let data = tempfile::tempdir().unwrap();
        let quick = || Boot::Took(Duration::from_millis(300));
        assert!(known_or(data.path(), versions("7.2"), || true, quick).is_some());
        let asked = || -> Boot { panic!("there is nothing to try") };
        assert_eq!(known_or(data.path(), versions("7.2"), || false, asked), None);
    }

    #[test]
    fn a_host_that_was_too_busy_is_asked_again() {
        let data = tempfile::tempdir().unwrap();
        assert_eq!(
            known_or(data.path(), versions("7.2"), || true, || Boot::Late),
            None
        );
        let quick = || Boot::Took(Duration::from_millis(300));
        assert!(known_or(data.path(), versions("7.2"), || true, quick).is_some());
    }
}
