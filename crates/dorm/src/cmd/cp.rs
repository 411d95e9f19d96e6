//! `dorm cp`: files and folders between here and a box.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use indicatif::ProgressBar;
use serde_json::json;

use crate::cli::Global;
use crate::client::guest::{Entry, Guest, Look};
use crate::exit::{Exit, Failure};
use crate::size::Size;
use crate::{output, progress, transfer};

/// Copy files and folders into and out of an agent
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: dorm cp ./src demo:/srv/src        a folder in
         dorm cp demo:notes.txt .            a file out, relative to the user's home
         dorm cp demo:/var/log/dpkg.log - | tail
An existing folder as DST gets the copy inside it. A local name with a colon is written ./a:b.
A snapshot or a fork of the agent breaks off what is on its way: a file is then copied anew, and a folder or a pipe fails.")]
pub(crate) struct Args {
    /// NAME:PATH, a local path, or - for stdin
    src: Place,
    /// NAME:PATH, a local path, or - for stdout
    dst: Place,
    /// As whom to read and write in the box [default: the template's user]
    #[arg(long, short, value_name = "USER")]
    user: Option<String>,
}

/// How often a file is copied until it is there as a whole.
const TRIES: u32 = 5;
const AGAIN: Duration = Duration::from_millis(200);

#[derive(Debug, Clone, PartialEq, Eq)]
enum Place {
    Stdio,
    Local(PathBuf),
    Box { name: String, path: String },
}

impl std::str::FromStr for Place {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let is_name =
            |name: &str| !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
        Ok(match text.split_once(':') {
            _ if text == "-" => Self::Stdio,
            Some((name, path)) if is_name(name) => {
                // The user's home, as with scp.
                let path = if path.is_empty() { "." } else { path };
                Self::Box {
                    name: name.to_owned(),
                    path: path.to_owned(),
                }
            }
            _ => Self::Local(text.into()),
        })
    }
}

/// What was copied, for the last line.
struct Copied {
    bytes: u64,
    to: String,
}

pub(crate) async fn run(global: &Global, args: Args) -> Result<()> {
    let client = global.client()?;
    let user = args.user.as_deref();
    let begun = Instant::now();
    let quiet = args.src == Place::Stdio || args.dst == Place::Stdio;
    let copied = match (args.src, args.dst) {
        (Place::Box { name, path }, Place::Stdio) => out_to_stdout(&client.guest(&name, user), &path).await,
        (Place::Box { name, path }, Place::Local(to)) => {
            out(&client.guest(&name, user), &name, &path, &to).await
        }
        (Place::Stdio, Place::Box { name, path }) => in_from_stdin(&client.guest(&name, user), &path).await,
        (Place::Local(from), Place::Box { name, path }) => {
            into(&client.guest(&name, user), &from, &path).await
        }
        (Place::Box { .. }, Place::Box { .. }) => Err(Failure::new(Exit::Usage, "one side must be local")
            .hint("copy it here first, or pipe it: dorm cp A:file - | dorm cp - B:file")
            .into()),
        _ => Err(Failure::new(Exit::Usage, "neither side is in a box")
            .hint("write NAME:PATH for one of them")
            .into()),
    }?;
    let seconds = begun.elapsed().as_secs_f64();
    if global.json && !quiet {
        return output::json(&json!({"to": copied.to, "bytes": copied.bytes, "seconds": seconds}));
    }
    if !quiet {
        eprintln!("{}: {} in {seconds:.2} s", copied.to, Size(copied.bytes));
    }
    Ok(())
}

async fn out_to_stdout(guest: &Guest<'_>, path: &str) -> Result<Copied> {
    let body = guest.download(path).await?.into_body();
    let bar = ProgressBar::hidden();
    let bytes = transfer::write_to(body, &mut tokio::io::stdout(), &bar)
        .await
        .map_err(output::stdout_error)?;
    Ok(Copied {
        bytes,
        to: "-".to_owned(),
    })
}

async fn in_from_stdin(guest: &Guest<'_>, path: &str) -> Result<Copied> {
    let bar = ProgressBar::hidden();
    guest
        .upload(path, None, transfer::reader_body(tokio::io::stdin(), bar.clone()))
        .await?;
    Ok(Copied {
        bytes: bar.position(),
        to: path.to_owned(),
    })
}

async fn out(guest: &Guest<'_>, agent: &str, path: &str, to: &Path) -> Result<Copied> {
    let entry = guest.stat(path).await?;
    let target = if to.is_dir() {
        to.join(Path::new(path).file_name().unwrap_or(std::ffi::OsStr::new(agent)))
    } else {
        to.to_owned()
    };
    let shown = target.display().to_string();
    if entry.is_directory() {
        let bar = progress::transfer(&shown, None);
        let body = guest.download_tar(path).await?.into_body();
        transfer::unpack(body, target, &bar).await?;
        bar.finish_and_clear();
        return Ok(Copied {
            bytes: bar.position(),
            to: shown,
        });
    }
    let copy = async || {
        let response = guest.download(path).await?;
        let length = hyper::body::Body::size_hint(response.body()).exact();
        let bar = progress::transfer(&shown, length);
        let bytes = write_file(response.into_body(), &target, &entry, &bar)
            .await
            .with_context(|| format!("cannot write {shown}"))?;
        bar.finish_and_clear();
        anyhow::Ok(bytes)
    };
    let bytes = match is_special(&target) {
        true => copy().await?,
        false => until_whole(guest, copy).await?,
    };
    Ok(Copied { bytes, to: shown })
}

fn is_special(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|m| !m.is_file())
}

/// Does again what the connection broke off in the midst of, as long as the agent is up: one that was stopped meanwhile is not started.
async fn until_whole<T>(guest: &Guest<'_>, copy: impl AsyncFn() -> Result<T>) -> Result<T> {
    for _ in 1..TRIES {
        match copy().await {
            Err(error) if was_cut(&error) => {
                tokio::time::sleep(AGAIN).await;
                if !matches!(guest.look().await, Ok(Look::Up)) {
                    return Err(error);
                }
            }
            done => return done,
        }
    }
    copy().await
}

fn was_cut(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        let failed = cause.downcast_ref::<Failure>();
        let read = cause.downcast_ref::<std::io::Error>();
        failed.is_some_and(|failure| matches!(failure.exit(), Exit::Unavailable | Exit::Unreachable))
            || read.is_some_and(|error| error.get_ref().is_some_and(|inner| inner.is::<hyper::Error>()))
    })
}

/// Puts the file there as a whole, unless something that is no file (a device, a pipe) is there.
async fn write_file(
    body: hyper::body::Incoming,
    target: &Path,
    entry: &Entry,
    bar: &ProgressBar,
) -> Result<u64> {
    if is_special(target) {
        let mut file = tokio::fs::OpenOptions::new().write(true).open(target).await?;
        return Ok(transfer::write_to(body, &mut file, bar).await?);
    }
    let folder = target
        .parent()
        .filter(|p| !p.as_os_str().is_empty())
        .unwrap_or(Path::new("."));
    let temporary = tempfile::NamedTempFile::new_in(folder)?;
    let mut file = tokio::fs::File::from_std(temporary.reopen()?);
    let bytes = transfer::write_to(body, &mut file, bar).await?;
    let mode = std::fs::metadata(target).map_or(entry.mode & 0o777, |m| m.permissions().mode() & 0o7777);
    file.set_permissions(PermissionsExt::from_mode(mode)).await?;
    temporary.persist(target).map_err(|e| e.error)?;
    Ok(bytes)
}

async fn into(guest: &Guest<'_>, from: &Path, path: &str) -> Result<Copied> {
    let metadata = std::fs::metadata(from).map_err(|e| {
        let exit = if e.kind() == std::io::ErrorKind::NotFound {
            Exit::NotFound
        } else {
            Exit::Error
        };
        Failure::new(exit, format!("cannot read {}", from.display())).cause(e)
    })?;
    let there = guest.find(path).await?;
    let inside = there.as_ref().is_some_and(Entry::is_directory) || path.ends_with('/');
    let name = std::fs::canonicalize(from)?
        .file_name()
        .map(|n| n.to_string_lossy().into_owned());
    let target = match name {
        Some(name) if inside => format!("{}/{name}", path.trim_end_matches('/')),
        _ => path.to_owned(),
    };
    if metadata.is_dir() {
        let bar = progress::transfer(&target, None);
        guest
            .upload_tar(&target, transfer::pack(from.to_owned(), bar.clone()))
            .await?;
        bar.finish_and_clear();
        return Ok(Copied {
            bytes: bar.position(),
            to: target,
        });
    }
    let old = if inside { guest.find(&target).await? } else { there };
    let length = metadata.is_file().then_some(metadata.len());
    let copy = async || {
        let file = tokio::fs::File::open(from)
            .await
            .with_context(|| format!("cannot read {}", from.display()))?;
        let bar = progress::transfer(&target, length);
        let written = guest
            .upload(&target, length, transfer::reader_body(file, bar.clone()))
            .await?;
        bar.finish_and_clear();
        anyhow::Ok((written, bar.position()))
    };
    let (written, bytes) = match metadata.is_file() && old.as_ref().is_none_or(Entry::is_file) {
        true => until_whole(guest, copy).await?,
        false => copy().await?,
    };
    let mode = metadata.permissions().mode() & 0o777;
    if old.is_none() && mode & 0o111 != 0 {
        guest.set_mode(&written, mode).await?;
    }
    Ok(Copied { bytes, to: target })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Place {
        text.parse().unwrap()
    }

    #[test]
    fn a_name_before_a_colon_is_an_agent() {
        let in_box = |name: &str, path: &str| Place::Box {
            name: name.into(),
            path: path.into(),
        };
        assert_eq!(read("demo:/srv/a b"), in_box("demo", "/srv/a b"));
        assert_eq!(read("demo:notes:1.txt"), in_box("demo", "notes:1.txt"));
        assert_eq!(read("demo:"), in_box("demo", "."));
        assert_eq!(
            read("k3x5q2m7w4a6b2c3d4e5:/x"),
            in_box("k3x5q2m7w4a6b2c3d4e5", "/x")
        );
    }

    #[test]
    fn everything_else_is_local() {
        for text in ["notes.txt", "./a:b", "/srv/x:y", "a/b:c", ":x", "", "a_b:c"] {
            assert_eq!(read(text), Place::Local(text.into()));
        }
        assert_eq!(read("-"), Place::Stdio);
        assert_eq!(read("./-"), Place::Local("./-".into()));
    }
}
