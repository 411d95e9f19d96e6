//! Finding a CRIU that works on this host, by a real test: a process with a listening TCP socket is dumped and brought back.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde::{Deserialize, Serialize};

use super::Criu;

/// Where `scripts/setup-criu` unpacks a private copy: a tree with its own libraries.
const PRIVATE_COPY: &str = "/usr/local/lib/dorm/criu";
/// Names another place for it.
const VARIABLE: &str = "DORM_CRIU";

/// The argument with which the launcher becomes the process that is dumped in the test.
const TARGET: &str = "listen";

/// What was found, kept so that the test need not be run at every start.
#[derive(Debug, Serialize, Deserialize)]
struct Found {
    command: Vec<PathBuf>,
    version: String,
    kernel: String,
}

/// Finds a CRIU. The error says what was tried, in words.
pub fn find(data: &Path, launcher: &Path) -> Result<Criu, String> {
    let kept = data.join("criu.json");
    let knowledge = data.join("criu.kdat");
    let kernel = rustix::system::uname().release().to_string_lossy().into_owned();
    let with = |found: Found| Criu {
        command: found.command,
        version: found.version,
        knowledge: knowledge.exists().then(|| knowledge.clone()),
    };
    let tried_before = fs::read(&kept)
        .ok()
        .and_then(|text| serde_json::from_slice::<Found>(&text).ok());
    let candidates = candidates();
    if let Some(found) = tried_before
        && found.kernel == kernel
        && candidates.contains(&found.command)
        && version(&found.command).is_ok_and(|v| v == found.version)
    {
        return Ok(with(found));
    }
    let mut refusals = Vec::new();
    for command in candidates {
        let tested = version(&command).and_then(|version| {
            self_test(&command, launcher, &knowledge)?;
            Ok(Found {
                command: command.clone(),
                version,
                kernel: kernel.clone(),
            })
        });
        match tested {
            Ok(found) => {
                let _ = serde_json::to_vec(&found).map(|text| fs::write(&kept, text));
                return Ok(with(found));
            }
            Err(error) => refusals.push(format!("{}: {error}", command[command.len() - 1].display())),
        }
    }
    let _ = fs::remove_file(&kept);
    match refusals.is_empty() {
        true => Err("criu is not installed".to_owned()),
        false => Err(refusals.join("; ")),
    }
}

fn candidates() -> Vec<Vec<PathBuf>> {
    let path = std::env::var_os("PATH").unwrap_or_else(|| "/usr/sbin:/usr/bin".into());
    let system = std::env::split_paths(&path)
        .map(|d| d.join("criu"))
        .find(|f| f.is_file())
        .map(|f| vec![f]);
    let named = std::env::var_os(VARIABLE).filter(|folder| !folder.is_empty());
    let copy = named.map_or_else(|| PathBuf::from(PRIVATE_COPY), PathBuf::from);
    let libraries = copy.join(format!("usr/lib/{}-linux-gnu", std::env::consts::ARCH));
    let linker = match std::env::consts::ARCH {
        "aarch64" => libraries.join("ld-linux-aarch64.so.1"),
        _ => libraries.join("ld-linux-x86-64.so.2"),
    };
    let criu = copy.join("usr/sbin/criu");
    let private = linker
        .is_file()
        .then(|| vec![linker, "--library-path".into(), libraries, criu]);
    system.into_iter().chain(private).collect()
}

fn version(command: &[PathBuf]) -> io::Result<String> {
    let output = Command::new(&command[0])
        .args(&command[1..])
        .arg("--version")
        .stdin(Stdio::null())
        .output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let version = text.lines().find_map(|line| line.strip_prefix("Version: "));
    version
        .map(str::to_owned)
        .ok_or_else(|| io::Error::other("it does not start"))
}

/// The process of the test: does nothing but hold a listening socket.
pub(crate) fn self_test_process() -> ! {
    let _ = dorm_sys::process::close_inherited_from(3);
    let _ = rustix::process::setsid();
    let listener = std::net::TcpListener::bind(("127.0.0.1", 0));
    loop {
        std::thread::park();
        let _ = &listener;
    }
}

/// Whether the launcher was started as the process of the test.
pub(crate) fn is_self_test() -> bool {
    std::env::args().nth(2).as_deref() == Some(TARGET)
}

/// All in one mount namespace, since a process that is in another than CRIU's has its mounts dumped as well. /run
/// is a tmpfs there, where CRIU keeps what it learns of the kernel; a copy of that is taken.
const SCRIPT: &str = r#"
mount -t tmpfs tmpfs /run || exit 1
launcher=$1 verb=$2 target=$3 images=$4 knowledge=$5
shift 5
env -i "$launcher" "$verb" "$target" </dev/null >/dev/null 2>&1 &
pid=$!
for _ in $(seq 500); do
  [ "$(ls /proc/$pid/fd 2>/dev/null | wc -l)" -gt 3 ] && break
  sleep 0.01
done
common="--network-lock skip --manage-cgroups=ignore --log-file criu.log --images-dir $images"
if ! "$@" dump --tree $pid $common; then
  kill -9 $pid
  exit 2
fi
wait $pid
"$@" restore --restore-detached --pidfile "$images/pid" $common || exit 3
kill -9 "$(cat "$images/pid")"
cp /run/criu.kdat "$knowledge" 2>/dev/null
exit 0
"#;

fn self_test(command: &[PathBuf], launcher: &Path, knowledge: &Path) -> io::Result<()> {
    let images = tempfile::Builder::new()
        .prefix("dorm-criu-test")
        .tempdir_in("/var/tmp")?;
    let launcher = fs::read_link(launcher).unwrap_or_else(|_| launcher.to_owned());
    let output = Command::new("unshare")
        .args(["--mount", "sh", "-c", SCRIPT, "sh"])
        .arg(launcher)
        .args([crate::launch::SUBCOMMAND, TARGET])
        .args([images.path(), knowledge])
        .args(command)
        .current_dir("/")
        .stdin(Stdio::null())
        .output()?;
    if output.status.success() {
        return Ok(());
    }
    let log = fs::read_to_string(images.path().join(super::LOG)).unwrap_or_default();
    let reason = super::rpc::errors(&log);
    let said = || String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(io::Error::other(format!(
        "it failed in a test: {}",
        reason.unwrap_or_else(said)
    )))
}
