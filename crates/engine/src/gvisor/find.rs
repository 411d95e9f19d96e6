//! Finding a runsc that works on this machine, by running a program in it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::host::trial::{kvm_is_there, run_within};

/// Where `scripts/setup-gvisor` puts a private copy.
const PRIVATE_COPY: &str = "/usr/local/lib/dorm/gvisor/runsc";
/// Earlier ones lack what dorm needs: port forwarding, and images that can be restored.
const OLDEST: u32 = 20_240_729;
/// Where a sandbox that breaks off leaves its last words, in the run directory.
pub(super) const PANIC: &str = "panic";
const PATIENCE: Duration = Duration::from_secs(30);
/// A device that opens proves nothing: where KVM is of no use to gVisor, the test hangs.
const KVM_PATIENCE: Duration = Duration::from_secs(3);
/// How often a program is run in the test: a runsc that breaks off now and then passes a single run.
const RUNS: usize = 4;

/// What runs the instructions of a box, and catches its system calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Platform {
    /// The processor's support for virtual machines.
    Kvm,
    /// Signals of the host's kernel: it works everywhere.
    Systrap,
}

impl Platform {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Systrap => "systrap",
        }
    }

    fn option(self) -> String {
        format!("--platform={}", self.name())
    }
}

/// A runsc that has been seen to run a program.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Runsc {
    pub(crate) program: PathBuf,
    pub(crate) version: String,
    kernel: String,
    pub(crate) platform: Platform,
    /// Whether there was a KVM to try.
    kvm_was_there: bool,
    /// Whether a box may run before all of its memory image is read.
    pub(super) reads_in_background: bool,
    /// How long the first run of the test took, from the start of runsc to its end.
    pub(crate) millis: u64,
}

impl Runsc {
    /// The beginning of every call, up to the subcommand. `state` is where runsc keeps what it knows.
    pub(super) fn command(&self, state: &Path) -> Vec<PathBuf> {
        let options = [
            "--ignore-cgroups",
            "--network=sandbox",
            // What the box writes goes to the home, and not to a layer in memory.
            "--overlay2=none",
            "--net-raw",
            // Connections to the outside end with a memory image, as they do in a container.
            "--net-disconnect-ok",
            "--log-format=json",
        ];
        let with = |option: &str, value: &Path| {
            let mut text = std::ffi::OsString::from(option);
            text.push(value);
            PathBuf::from(text)
        };
        let mut command = vec![self.program.clone()];
        command.push(with("--root=", state));
        command.push(with("--log=", &state.join("log")));
        command.push(with("--panic-log=", &state.join(PANIC)));
        command.push(self.platform.option().into());
        command.extend(options.map(PathBuf::from));
        command
    }

    /// The subcommand that brings back what is in `image`, all of which is known to be as it was written.
    pub(super) fn restore(&self, image: &Path) -> Vec<PathBuf> {
        let background = self.reads_in_background.then(|| PathBuf::from("--background"));
        let mut restore = vec!["restore".into(), "--image-path".into(), image.to_owned()];
        restore.extend(background);
        restore
    }
}

/// Finds a runsc. The error says what was tried, in words.
pub(crate) fn find(data: &Path) -> Result<Runsc, String> {
    let kept = data.join("gvisor.json");
    let kernel = rustix::system::uname().release().to_string_lossy().into_owned();
    let tried_before = fs::read(&kept)
        .ok()
        .and_then(|text| serde_json::from_slice::<Runsc>(&text).ok());
    if let Some(found) = tried_before
        && found.kernel == kernel
        && found.kvm_was_there == kvm_is_there()
        && version(&found.program).is_ok_and(|version| version == found.version)
    {
        return Ok(found);
    }
    let path = std::env::var_os("PATH").unwrap_or_else(|| "/usr/sbin:/usr/bin".into());
    let system = std::env::split_paths(&path).map(|directory| directory.join("runsc"));
    let candidates = system
        .chain([PathBuf::from(PRIVATE_COPY)])
        .filter(|file| file.is_file());
    let mut refusals = Vec::new();
    for program in candidates {
        let tested = version(&program).and_then(|version| {
            let (platform, millis) = fastest_platform(&program)?;
            Ok(Runsc {
                reads_in_background: knows_option(&program, "restore", "background"),
                program: program.clone(),
                version,
                kernel: kernel.clone(),
                platform,
                kvm_was_there: kvm_is_there(),
                millis,
            })
        });
        match tested {
            Ok(found) => {
                let _ = serde_json::to_vec(&found).map(|text| fs::write(&kept, text));
                return Ok(found);
            }
            Err(error) => refusals.push(format!("{}: {error}", program.display())),
        }
    }
    let _ = fs::remove_file(&kept);
    match refusals.is_empty() {
        true => Err("runsc is not installed".to_owned()),
        false => Err(refusals.join("; ")),
    }
}

/// What of it works here, and how many milliseconds a program took to run.
fn fastest_platform(program: &Path) -> io::Result<(Platform, u64)> {
    if kvm_is_there() {
        match self_test(program, Platform::Kvm, KVM_PATIENCE) {
            Ok(millis) => return Ok((Platform::Kvm, millis)),
            Err(error) => tracing::debug!(%error, "gVisor does not run by KVM here"),
        }
    }
    self_test(program, Platform::Systrap, PATIENCE).map(|millis| (Platform::Systrap, millis))
}

/// Whether a subcommand's help speaks of an option.
fn knows_option(program: &Path, subcommand: &str, option: &str) -> bool {
    let mut help = Command::new(program);
    help.args([subcommand, "--help"]).stdin(Stdio::null());
    help.output().is_ok_and(|said| {
        let texts = [said.stdout, said.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
        texts.iter().any(|text| speaks_of(text, option))
    })
}

fn speaks_of(help: &str, option: &str) -> bool {
    let words = help.lines().filter_map(|line| line.split_whitespace().next());
    words
        .into_iter()
        .any(|word| word.trim_start_matches('-') == option && word.starts_with('-'))
}

fn version(program: &Path) -> io::Result<String> {
    let output = Command::new(program)
        .arg("--version")
        .stdin(Stdio::null())
        .output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let version = text
        .lines()
        .next()
        .and_then(|line| line.strip_prefix("runsc version "));
    let version = version.ok_or_else(|| io::Error::other("it does not say its version"))?;
    match day(version) {
        Some(day) if day < OLDEST => Err(io::Error::other(format!(
            "version {version} is too old, {OLDEST} or newer is needed"
        ))),
        _ => Ok(version.to_owned()),
    }
}

/// The day in a version such as `release-20240729.0` or `0.0~20240729.0`.
fn day(version: &str) -> Option<u32> {
    let mut numbers = version.split(|c: char| !c.is_ascii_digit());
    numbers.find(|number| number.len() == 8)?.parse().ok()
}

/// Runs a program time and again. Returns how many milliseconds the first run took.
fn self_test(program: &Path, platform: Platform, patience: Duration) -> io::Result<u64> {
    let first = run(program, platform, patience)?;
    let failures: Vec<io::Error> = (1..RUNS)
        .filter_map(|_| run(program, platform, patience).err())
        .collect();
    match failures.last() {
        None => Ok(first),
        Some(last) => Err(io::Error::other(format!(
            "{} of {RUNS} times {last}",
            failures.len()
        ))),
    }
}

/// Runs a program of this machine in a sandbox without a network. Returns how many milliseconds that took.
fn run(program: &Path, platform: Platform, patience: Duration) -> io::Result<u64> {
    let state = tempfile::Builder::new().prefix("dorm-gvisor-test").tempdir()?;
    let mut runsc = Command::new(program);
    runsc
        .arg("--root")
        .arg(state.path())
        .arg(platform.option())
        .args([
            "--ignore-cgroups",
            "--network=none",
            "do",
            "--quiet",
            "/bin/echo",
            "works",
        ]);
    let (output, took) = run_within(&runsc, patience)?;
    if output.status.success() && output.stdout == b"works\n" {
        return Ok(u64::try_from(took.as_millis()).unwrap_or(u64::MAX));
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let last = said
        .lines()
        .rfind(|line| !line.trim().is_empty())
        .unwrap_or("it said nothing");
    Err(io::Error::other(format!("it cannot run a program: {last}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_runsc_that_breaks_off_now_and_then_is_refused() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let (program, runs) = (folder.path().join("runsc"), folder.path().join("runs"));
        let fails_at = |number: usize| {
            let _ = fs::remove_file(&runs);
            let script = format!(
                "#!/bin/sh\necho >> {0}\nif [ $(wc -l < {0}) = {number} ]; then echo 'panic: no' >&2; exit 2; fi\necho works\n",
                runs.display()
            );
            fs::write(&program, script).unwrap();
            fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
            let tested = self_test(&program, Platform::Systrap, PATIENCE);
            tested.map(drop).map_err(|error| error.to_string())
        };
        assert_eq!(fails_at(1).unwrap_err(), "it cannot run a program: panic: no");
        let refusal = "1 of 4 times it cannot run a program: panic: no";
        assert_eq!(fails_at(3).unwrap_err(), refusal);
        assert_eq!(fails_at(RUNS + 1), Ok(()));
    }

    #[test]
    fn an_option_is_known_where_the_help_lists_it() {
        let help = "restore [flags] <id>\n  -bundle string\n    \tnot in the background\n  -detach\n";
        assert!(speaks_of(help, "detach") && speaks_of(help, "bundle"));
        assert!(!speaks_of(help, "background") && !speaks_of(help, "restore"));
        assert!(speaks_of("  --background\n    \tload later", "background"));
    }

    #[test]
    fn the_day_of_a_version_is_found_however_it_is_written() {
        assert_eq!(day("release-20240729.0"), Some(20_240_729));
        assert_eq!(day("0.0~20221219.0"), Some(20_221_219));
        assert_eq!(day("VERSION_MISSING"), None);
    }
}
