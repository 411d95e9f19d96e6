//! What this host has for machines: QEMU, and a kernel with an initial file system for them.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use super::accelerator::{Accelerator, QUICK, Versions, finds_disk, kvm_boot};
use super::cpio::Archive;
use crate::guest_binary::GuestBinary;
use dorm_proto::vm::{INIT, LATER_MODULES, MODULES};

/// What `scripts/setup-vm` fetched: a folder for each kernel, which never changes, and a link to the one to start machines with.
const KERNELS: &str = "/usr/local/lib/dorm/vm";
const CURRENT: &str = "current";
/// A link to the one that machines of earlier versions have booted, which do not say so.
const UNNAMED: &str = "unnamed";
const PROGRAM: &str = "qemu-system-x86_64";
const FIX: &str = "scripts/setup-vm installs it";
/// How long a trial of KVM that was late is believed: meanwhile machines are emulated, and those that KVM has run do not wake.
const DOUBTED_AFTER: Duration = Duration::from_secs(60);

#[derive(Debug, Clone)]
pub(crate) struct Qemu {
    pub(crate) program: PathBuf,
    pub(crate) version: String,
    /// QEMU's newest machine of the kind, with its version: what is made of it now, later ones can load.
    pub(crate) machine: String,
    /// How long the processor itself takes to boot the kernel, where it does.
    kvm_boot: Option<Duration>,
    /// Whether that was not seen, as the trial was late.
    kvm_late: bool,
    /// The folder of kernels.
    kernels: PathBuf,
    pub(crate) kernel_version: String,
}

impl Qemu {
    /// The error says what is missing, in words.
    pub(crate) fn find(data: &Path) -> Result<Self, String> {
        let folders = std::env::var_os("PATH").unwrap_or_default();
        let program = std::env::split_paths(&folders)
            .chain([PathBuf::from("/usr/bin")])
            .map(|folder| folder.join(PROGRAM))
            .find(|program| program.is_file())
            .ok_or_else(|| format!("{PROGRAM} is not installed; {FIX}"))?;
        let kernels = PathBuf::from(KERNELS);
        let current = fs::read_link(kernels.join(CURRENT)).ok();
        let kernel_version = current
            .and_then(|folder| folder.into_os_string().into_string().ok())
            .filter(|version| kernels.join(version).join("kernel").is_file())
            .ok_or_else(|| format!("there is no kernel for machines in {KERNELS}; {FIX}"))?;
        let version = say(&program, "--version")?;
        let machines = say(&program, "-machine=help")?;
        let version = version_in(&version).unwrap_or_else(|| "of an unknown version".to_owned());
        let mut found = Self {
            version,
            machine: newest_machine(&machines).ok_or("QEMU has no machine q35")?,
            kvm_boot: None,
            kvm_late: false,
            kernels,
            kernel_version,
            program,
        };
        let seen = kvm_boot(data, found.versions(), &found.program, &found.kernel());
        found.kvm_late = seen.is_err();
        found.kvm_boot = seen.unwrap_or_default();
        Ok(found)
    }

    /// After how long it is to be looked for again, if it is.
    pub(crate) fn doubted(&self) -> Option<Duration> {
        self.kvm_late.then_some(DOUBTED_AFTER)
    }

    fn versions(&self) -> Versions {
        Versions {
            host: rustix::system::uname().release().to_string_lossy().into_owned(),
            qemu: self.version.clone(),
            kernel: self.kernel_version.clone(),
        }
    }

    /// Of the kernel to start machines with.
    fn file(&self, name: &str) -> PathBuf {
        self.kernels.join(&self.kernel_version).join(name)
    }

    pub(crate) fn kernel(&self) -> PathBuf {
        self.file("kernel")
    }

    /// The disk with all the modules of `kernel`. A machine that went on with another would read nonsense where it has read its own.
    pub(crate) fn modules_of(&self, kernel: Option<&str>) -> Result<PathBuf, String> {
        let folder = kernel.unwrap_or(UNNAMED);
        let disk = self.kernels.join(folder).join("modules");
        match disk.is_file() && !folder.contains('/') {
            true => Ok(disk),
            false => Err(match kernel {
                Some(kernel) => format!("the modules of its kernel, {kernel}, are gone from {KERNELS}"),
                None => {
                    format!("it does not say which kernel it has booted, and there is no {KERNELS}/{UNNAMED}")
                }
            }),
        }
    }

    /// Whether a machine has been seen to boot. That QEMU tells its version does not mean that it can run one.
    pub(crate) fn boots(&self, data: &Path, guest: &GuestBinary) -> Result<(), String> {
        let seen = self
            .initrd(guest)
            .map_err(|error| format!("its first files cannot be made: {error}"))
            .and_then(|initrd| {
                let (by, program, kernel) = (self.versions(), &self.program, self.kernel());
                finds_disk(data, by, program, &kernel, &initrd, self.accelerator())
            });
        seen.map_err(|reason| format!("{} does not work here: {reason}; {FIX}", self.program.display()))
    }

    pub(crate) fn accelerator(&self) -> Accelerator {
        match self.kvm_boot {
            Some(_) => Accelerator::Kvm,
            None => Accelerator::Tcg,
        }
    }

    /// Whether machines are as quick as an agent's owner would expect who has not asked for one.
    pub(crate) fn is_quick(&self) -> bool {
        self.kvm_boot.is_some_and(|took| took <= QUICK)
    }

    pub(crate) fn name(&self) -> String {
        format!(
            "QEMU {}, {}, kernel {}",
            self.version, self.machine, self.kernel_version
        )
    }

    /// What there is, in words.
    pub(crate) fn describe(&self) -> String {
        let by = self.accelerator().describe();
        match self.kvm_boot {
            Some(took) => format!(
                "{}; {by}, which boots a kernel in {} ms",
                self.name(),
                took.as_millis()
            ),
            None => format!("{}; {by}", self.name()),
        }
    }

    /// The initial file system with `guest`, in the folder of guests. Made if it is not there.
    pub(crate) fn initrd(&self, guest: &GuestBinary) -> io::Result<PathBuf> {
        let name = blake3::hash(format!("{}\n{}", guest.hash, self.kernel_version).as_bytes()).to_hex();
        let path = guest.path.with_file_name(format!("initrd-{}", &name[..32]));
        if path.exists() {
            return Ok(path);
        }
        let mut archive = Archive::default();
        for folder in ["dev", "proc", "sys", "root"] {
            archive.folder(folder);
        }
        archive.file(INIT.trim_start_matches('/'), &fs::read(&guest.path)?);
        for (from, to) in [("early", MODULES), ("later", LATER_MODULES)] {
            let to = to.trim_start_matches('/');
            archive.folder(to);
            for entry in fs::read_dir(self.file(from))? {
                let entry = entry?;
                let name = entry.file_name();
                archive.file(
                    &format!("{to}/{}", name.to_string_lossy()),
                    &fs::read(entry.path())?,
                );
            }
        }
        // Under another name until it is whole. Of two that make it at once, the first wins: somebody may use that one already.
        let unfinished = tempfile::NamedTempFile::new_in(path.parent().unwrap_or(Path::new("/")))?;
        fs::write(unfinished.path(), archive.finish())?;
        unfinished.as_file().sync_all()?;
        use std::os::unix::fs::PermissionsExt;
        fs::set_permissions(unfinished.path(), fs::Permissions::from_mode(0o644))?;
        match unfinished.persist_noclobber(&path) {
            Err(e) if e.error.kind() != io::ErrorKind::AlreadyExists => Err(e.error),
            _ => Ok(path),
        }
    }
}

fn say(program: &Path, argument: &str) -> Result<String, String> {
    let mut command = Command::new(program);
    command.args(argument.split('=')).stdin(Stdio::null());
    let said = command
        .output()
        .map_err(|e| format!("{} does not run: {e}", program.display()))?;
    if !said.status.success() {
        let reason = String::from_utf8_lossy(&said.stderr);
        return Err(format!("{} does not run: {}", program.display(), reason.trim()));
    }
    Ok(String::from_utf8_lossy(&said.stdout).into_owned())
}

fn version_in(text: &str) -> Option<String> {
    let mut words = text.split_whitespace().skip_while(|word| *word != "version");
    words.nth(1).map(str::to_owned)
}

fn newest_machine(listed: &str) -> Option<String> {
    let alias = listed.lines().find(|line| line.starts_with("q35 "))?;
    let (_, name) = alias.rsplit_once("(alias of ")?;
    Some(name.trim().trim_end_matches(')').to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_machine_is_found_among_all() {
        let listed = "Supported machines are:\nmicrovm              microvm (i386)\n\
            q35                  Standard PC (Q35 + ICH9, 2009) (alias of pc-q35-7.2)\n\
            pc-q35-7.1           Standard PC (Q35 + ICH9, 2009)\n";
        assert_eq!(newest_machine(listed).as_deref(), Some("pc-q35-7.2"));
        assert_eq!(newest_machine("none             empty machine\n"), None);
    }

    fn found(version: &str, kvm_boot: Option<Duration>, kernels: &Path) -> Qemu {
        Qemu {
            program: PROGRAM.into(),
            version: version.to_owned(),
            machine: "pc-q35-7.2".to_owned(),
            kvm_boot,
            kvm_late: false,
            kernels: kernels.to_owned(),
            kernel_version: "6.1".to_owned(),
        }
    }

    #[test]
    fn a_machine_goes_on_with_the_modules_of_its_own_kernel_or_not_at_all() {
        let kernels = tempfile::tempdir().unwrap();
        let fetch = |version: &str| {
            fs::create_dir(kernels.path().join(version)).unwrap();
            let disk = kernels.path().join(version).join("modules");
            fs::write(&disk, version).unwrap();
            disk
        };
        let newest = fetch("6.1");
        std::os::unix::fs::symlink("6.1", kernels.path().join(CURRENT)).unwrap();
        let qemu = found("7.2", None, kernels.path());
        assert_eq!(qemu.modules_of(Some("6.1")), Ok(newest.clone()));
        let gone = qemu.modules_of(Some("6.0")).unwrap_err();
        assert!(gone.contains("6.0, are gone"), "{gone}");
        assert!(qemu.modules_of(Some("6.0/../6.1")).is_err());

        let older = fetch("6.0");
        assert_eq!(qemu.modules_of(Some("6.0")), Ok(older));
        assert_eq!(qemu.modules_of(Some("6.1")), Ok(newest));
        let unknown = qemu.modules_of(None).unwrap_err();
        assert!(unknown.contains("which kernel"), "{unknown}");
        std::os::unix::fs::symlink("6.0", kernels.path().join(UNNAMED)).unwrap();
        let disk = qemu.modules_of(None).unwrap();
        assert_eq!(fs::read(disk).unwrap(), b"6.0");
    }

    /// What was measured of machines is believed as long as this is told.
    #[test]
    fn what_is_told_of_machines_changes_with_their_versions_and_their_accelerator_alone() {
        let told = |version: &str, kvm_boot| found(version, kvm_boot, Path::new(KERNELS)).describe();
        let now = told("7.2.22", None);
        assert_eq!(now, "QEMU 7.2.22, pc-q35-7.2, kernel 6.1; emulation (tcg): slow");
        assert_ne!(now, told("7.2.23", None));
        assert_ne!(now, told("7.2.22", Some(QUICK)));
    }

    #[test]
    fn the_version_is_the_word_after_the_word() {
        let text = "QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18+b3)\nCopyright";
        assert_eq!(version_in(text).as_deref(), Some("7.2.22"));
        assert_eq!(version_in(""), None);
    }
}
