//! Brings the daemon up from its settings and down again: the lock on the data directory, logging,
//! the engine, the server, signals.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use dorm_engine::engines::Engines;
use dorm_engine::home::Pool;
use dorm_engine::reserve::Reserve;
use dorm_engine::{host, is_no_space};
use dorm_server::ServeError;
use dorm_server::config::NetworkRange;
use rustix::fs::{FlockOperation, flock};
use rustix::process::{Pid, Resource, getrlimit, setrlimit, test_kill_process};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing_subscriber::EnvFilter;

use crate::config::{LogFormat, Settings};
use crate::exit::{Exit, Failure};
use crate::notify;

/// How long a lock whose holder is gone is waited for.
const HANDOVER: Duration = Duration::from_secs(10);

/// Descriptors that the daemon has at most, as in the service's file. Programs that it starts have as many, and some of them close
/// each that there could be. Launchers give boxes limits of their own.
const OPEN_FILES: u64 = 1 << 20;

/// Below what is asked for: a machine's guest decides what this library has to say of it.
const QUIET: &str = "yamux=off";

/// Held for as long as the daemon lives; the kernel gives it up with the process.
pub(crate) struct Lock(#[expect(dead_code, reason = "it is held, not used")] File);

pub(crate) fn lock(data: &Path) -> Result<Lock> {
    let path = data.join("lock");
    let mut file = OpenOptions::new()
        .create(true)
        .truncate(false)
        .read(true)
        .write(true)
        .mode(0o600)
        .open(&path)
        .with_context(|| format!("cannot open {}", path.display()))?;
    let patience = Instant::now() + HANDOVER;
    while let Err(error) = flock(&file, FlockOperation::NonBlockingLockExclusive) {
        if error != rustix::io::Errno::WOULDBLOCK {
            return Err(anyhow::Error::new(error).context(format!("cannot lock {}", path.display())));
        }
        let holder = holder(&mut file);
        // A daemon that has died leaves the lock for a moment to a process that it was just starting.
        if holder.is_some_and(is_gone) && Instant::now() < patience {
            std::thread::sleep(Duration::from_millis(5));
            continue;
        }
        let holder = match holder {
            Some(pid) => format!("the daemon with pid {}", pid.as_raw_nonzero()),
            None => "another daemon".to_owned(),
        };
        return Err(Failure::new(
            Exit::Conflict,
            format!("{} is in use by {holder}", data.display()),
        )
        .hint("stop that one first, or choose another directory with --data")
        .into());
    }
    let mut signed = sign(&mut file);
    // Where there is no room for a number, the daemon starts in the room that is kept for deletions.
    if signed.as_ref().is_err_and(|error| is_no_space(error)) && Reserve::of(data).give_up().unwrap_or(false)
    {
        signed = sign(&mut file);
    }
    // It holds without.
    if let Err(error) = signed {
        tracing::warn!(%error, "the pid of the daemon cannot be written to {}", path.display());
    }
    Ok(Lock(file))
}

fn sign(lock: &mut File) -> std::io::Result<()> {
    lock.rewind()?;
    lock.set_len(0)?;
    writeln!(lock, "{}", std::process::id())
}

fn holder(lock: &mut File) -> Option<Pid> {
    let mut pid = String::new();
    lock.rewind()
        .and_then(|()| lock.read_to_string(&mut pid).map(drop))
        .ok()?;
    Pid::from_raw(pid.trim().parse().ok()?)
}

fn is_gone(pid: Pid) -> bool {
    test_kill_process(pid) == Err(rustix::io::Errno::SRCH)
}

fn need_root() -> Result<()> {
    if rustix::process::geteuid().is_root() {
        return Ok(());
    }
    let refused = Failure::new(Exit::Error, "the daemon must run as root");
    Err(refused
        .cause(anyhow::anyhow!(
            "it mounts homes, makes namespaces, cgroups and network interfaces, and maps boxes' users to uids of their own"
        ))
        .hint("run `sudo dorm serve`; boxes themselves run without any of root's rights on the host")
        .into())
}

fn logging(settings: &Settings) -> Result<()> {
    let filter = EnvFilter::try_new(format!("{QUIET},{}", settings.log)).map_err(|e| {
        Failure::new(Exit::Usage, format!("`{}` is no log filter", settings.log))
            .cause(e)
            .hint("write a level such as info, or info,dorm_server=debug")
    })?;
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr);
    match settings.log_format {
        LogFormat::Text => {
            let colours = std::io::IsTerminal::is_terminal(&std::io::stderr());
            builder.with_ansi(colours).with_target(false).init();
        }
        LogFormat::Json => builder.json().flatten_event(true).init(),
    }
    Ok(())
}

/// A shell gives the daemon fewer descriptors than it may have, and every connection takes some.
fn raise_open_files() {
    let mut limit = getrlimit(Resource::Nofile);
    let most = limit.maximum.map_or(OPEN_FILES, |hard| hard.min(OPEN_FILES));
    if limit.current.is_some_and(|soft| soft < most) {
        limit.current = Some(most);
        if let Err(error) = setrlimit(Resource::Nofile, limit) {
            tracing::warn!(%error, "the limit of open files stays as it was");
        }
    }
}

fn make_data_directory(data: &Path) -> Result<()> {
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(data)
        .with_context(|| format!("cannot make the data directory {}", data.display()))
}

/// Cancelled by the first SIGTERM or SIGINT. A second one ends the process at once.
fn shutdown() -> Result<CancellationToken> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let shutdown = CancellationToken::new();
    let cancelled = shutdown.clone();
    tokio::spawn(async move {
        loop {
            let name = tokio::select! {
                _ = terminate.recv() => "SIGTERM",
                _ = interrupt.recv() => "SIGINT",
            };
            if cancelled.is_cancelled() {
                tracing::warn!("{name} again: ending at once; boxes go on");
                std::process::exit(crate::exit::INTERRUPTED);
            }
            tracing::info!("{name}: shutting down; once more to end at once");
            cancelled.cancel();
        }
    });
    Ok(shutdown)
}

pub(crate) async fn run(mut settings: Settings) -> Result<()> {
    need_root()?;
    logging(&settings)?;
    raise_open_files();
    make_data_directory(&settings.server.data)?;
    let _lock = lock(&settings.server.data)?;
    let shutdown = shutdown()?;
    if let Some(missing) = settings.server.host_ca.take_if(|file| !file.exists()) {
        tracing::warn!(
            "templates get no CA certificates of the host: there is no {}",
            missing.display()
        );
    }
    // Names the file that runs now, even after an upgrade put another one in its place.
    let launcher = std::path::PathBuf::from("/proc/self/exe");
    let pool = Pool::open(&settings.pool, &launcher).context("cannot open the pool of homes")?;
    let engine = host::Config {
        data: settings.server.data.clone(),
        launcher,
        network: settings.network,
    };
    let engine = Arc::new(
        Engines::open(&engine, pool.clone())
            .await
            .context("cannot open the engines")?,
    );
    let range = engine.addresses();
    settings.server.network_range = NetworkRange {
        base: range.base,
        prefix: range.prefix,
    };
    let (ready, answers) = tokio::sync::oneshot::channel();
    let ending = shutdown.clone();
    tokio::spawn(async move {
        if answers.await.is_ok() {
            notify::tell(notify::READY);
        }
        ending.cancelled().await;
        notify::tell(notify::STOPPING);
    });
    let served = dorm_server::serve(
        settings.server,
        engine.clone(),
        Arc::new(pool.clone()),
        ready,
        shutdown,
    )
    .await;
    engine.close().await;
    drop(engine);
    let anybody_sleeps = served.as_ref().is_ok_and(|left| left.anybody_sleeps);
    tokio::task::spawn_blocking(move || pool.close(anybody_sleeps)).await?;
    served.map_err(explained)?;
    tracing::info!("ended");
    Ok(())
}

/// Adds the next step to what has an obvious one.
fn explained(error: ServeError) -> anyhow::Error {
    match error {
        ServeError::Listen { address, source } if source.kind() == std::io::ErrorKind::AddrInUse => {
            Failure::new(Exit::Conflict, format!("something else listens on {address}"))
                .cause(source)
                .hint("choose another port with --listen, or stop what is there")
                .into()
        }
        error => error.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_data_directory_has_one_daemon_and_the_refusal_names_it() {
        let data = tempfile::tempdir().unwrap();
        let held = lock(data.path()).unwrap();
        let refused = lock(data.path()).map(|_| ()).unwrap_err();
        assert!(
            refused
                .to_string()
                .contains(&format!("pid {}", std::process::id())),
            "{refused}"
        );
        drop(held);
        assert!(lock(data.path()).is_ok());
    }

    #[test]
    fn the_daemon_takes_the_descriptors_that_it_may_have() {
        let mut limit = getrlimit(Resource::Nofile);
        let most = limit.maximum.unwrap_or(OPEN_FILES).min(OPEN_FILES);
        // Other tests need theirs.
        limit.current = Some(most - 1);
        setrlimit(Resource::Nofile, limit).unwrap();
        raise_open_files();
        assert_eq!(getrlimit(Resource::Nofile).current, Some(most));
    }
}
