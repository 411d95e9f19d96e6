//! Process 1 of every box: reaps, runs commands, serves files, and speaks the envd protocol.
//!
//! ```text
//!  boot (descriptor 3) ──▶ http::Server on an abstract socket ──▶ run::Runs, files
//!  machine (serial port) ──▶ http::Server on streams of the port ──▶ the same
//!                               reaper (SIGCHLD) ────────────────▶ run::Runs
//!                               shutdown (SIGTERM)
//! ```
//!
//! One thread runs everything that waits; what blocks on files runs on threads that come and go. Nothing
//! here may stand in the way of a memory image: no io_uring, and no descriptor that leads out of the box.

mod boot;
mod bridge;
mod chunks;
mod door;
mod files;
mod http;
mod identity;
mod log;
mod machine;
mod memory;
mod plain_file;
mod reaper;
mod request;
mod run;
mod settings;
mod shutdown;
mod sys;
mod users;

use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use dorm_proto::boot::{BootConfig, Command, PROTOCOL_VERSION};
use dorm_proto::process::{ProcessConfig, StartRequest};
use tokio::signal::unix::{SignalKind, signal};

use crate::boot::Daemon;
use crate::door::Door;
use crate::http::Server;
use crate::log::log;
use crate::run::Runs;
use crate::settings::Settings;

const LOG_FOLDER: &str = "/var/log/dorm";
const RUNS_FOLDER: &str = "/var/lib/dorm/runs";

fn main() -> ExitCode {
    memory::set_up();
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        ["--version"] => {
            #[expect(clippy::print_stdout, reason = "it was asked for")]
            {
                println!(
                    "dorm-guest {} (protocol {PROTOCOL_VERSION})",
                    env!("CARGO_PKG_VERSION")
                );
            }
            ExitCode::SUCCESS
        }
        ["--standalone", socket] => report(standalone(Path::new(socket))),
        [] if std::env::args_os()
            .next()
            .is_some_and(|name| name == dorm_proto::vm::INIT) =>
        {
            report(machine::enter())
        }
        [machine::SECOND_STAGE] => report(machine()),
        [flag, end, module] if [*flag, *end] == machine::CALLED_WITH => report(machine::load_by_name(module)),
        [dorm_proto::boot::ON_STDIO] => report(init_on_stdio()),
        [] => report(init()),
        _ => {
            eprintln!("usage: dorm-guest [--version | --standalone SOCKET]");
            ExitCode::from(2)
        }
    }
}

fn report(result: io::Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            log!("{e}");
            eprintln!("dorm-guest: {e}");
            ExitCode::FAILURE
        }
    }
}

/// As process 1 of a box, told by the daemon what the box is.
fn init() -> io::Result<()> {
    sys::close_from(dorm_proto::boot::BOOT_FD.unsigned_abs() + 1);
    boot_by(boot::BootSocket::take()?, |_| Ok(Door::Socket(boot::listen()?)))
}

/// As process 1 of a box whose kernel takes no descriptors from outside but those three.
fn init_on_stdio() -> io::Result<()> {
    sys::close_from(3);
    boot::settle_in();
    sys::note_gvisor();
    boot_by(boot::Stdio, |secret| {
        Door::with_secret(secret.unwrap_or_default())
    })
}

fn boot_by(daemon: impl Daemon, open: impl FnOnce(Option<String>) -> io::Result<Door>) -> io::Result<()> {
    log::set_up(Path::new(LOG_FOLDER));
    let prepared = daemon.receive().and_then(|(config, secret)| {
        boot::apply(&config.agent_id, &config.hostname, &config.nameservers);
        Ok((config, open(secret)?))
    });
    let (config, door) = match prepared {
        Ok(prepared) => prepared,
        Err(e) => {
            daemon.failed(&io::Error::new(e.kind(), e.to_string()));
            return Err(e);
        }
    };
    log!(
        "guest {} for agent {}",
        env!("CARGO_PKG_VERSION"),
        config.agent_id
    );
    serve(&config, door, Path::new(RUNS_FOLDER), || daemon.ready())
}

/// Outside of a box, for tests: serves anyone on a socket file, and keeps its state beside it.
fn standalone(socket: &Path) -> io::Result<()> {
    sys::close_from(3);
    let state = PathBuf::from(format!("{}.d", socket.display()));
    log::set_up(&state);
    let door = Door::Anyone(http::bind(socket)?);
    serve(&BootConfig::default(), door, &state.join("runs"), || Ok(()))
}

/// As process 1 of a virtual machine, told by the daemon over a serial port what the box is.
fn machine() -> io::Result<()> {
    sys::close_from(3);
    log::set_up(Path::new(LOG_FOLDER));
    run(async {
        let mut machine = machine::Machine::start()?;
        let boot = machine.boot().await?;
        let config = boot.config.clone();
        boot::apply(&config.agent_id, &config.hostname, &config.nameservers);
        let guest = match Guest::new(&config, Path::new(RUNS_FOLDER)) {
            Ok(guest) => guest,
            Err(e) => {
                boot.failed(&e);
                return Err(e);
            }
        };
        log!(
            "guest {} for agent {} in a machine",
            env!("CARGO_PKG_VERSION"),
            config.agent_id
        );
        machine.serve(guest.server.clone());
        boot.ready();
        machine::load_later_modules();
        guest.until_stopped(&config).await;
        machine::power_off()
    })
}

fn serve(
    config: &BootConfig,
    door: Door,
    runs_folder: &Path,
    ready: impl FnOnce() -> io::Result<()>,
) -> io::Result<()> {
    run(async {
        let guest = Guest::new(config, runs_folder)?;
        let serving = door.serve(guest.server.clone())?;
        ready()?;
        tokio::spawn(serving);
        guest.until_stopped(config).await;
        Ok(())
    })
}

fn run(work: impl Future<Output = io::Result<()>>) -> io::Result<()> {
    set_up_process();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .thread_keep_alive(Duration::from_secs(5))
        // Address space, not memory: a path has room for 2,000 folders below each other, and whoever walks
        // through them on a small stack takes the whole box down.
        .thread_stack_size(64 << 20)
        .max_blocking_threads(256)
        .build()?;
    runtime.block_on(work).inspect(|()| {
        // Threads that wait for a file system must not keep the box from ending.
        runtime.shutdown_background();
    })
}

/// What serves a box, whichever way the daemon reaches it.
struct Guest {
    settings: Arc<Settings>,
    runs: Arc<Runs>,
    server: Server,
    children: reaper::Reaped,
    terminate: tokio::signal::unix::Signal,
}

impl Guest {
    /// Needs a runtime.
    fn new(config: &BootConfig, runs_folder: &Path) -> io::Result<Self> {
        let settings = Arc::new(Settings::new(config));
        let runs = Arc::new(Runs::new(settings.clone(), runs_folder.to_owned()));
        Ok(Self {
            children: reaper::start(runs.clone())?,
            terminate: signal(SignalKind::terminate())?,
            server: Server::new(settings.clone(), runs.clone()),
            settings,
            runs,
        })
    }

    /// Runs the start command, and all that is asked, until the box is to end.
    async fn until_stopped(mut self, config: &BootConfig) {
        if let Some(command) = &config.start_command {
            start(&self.settings, &self.runs, command);
        }
        self.terminate.recv().await;
        shutdown::stop(&self.runs, self.children, self.terminate).await;
    }
}

/// What every run inherits: no ignored signals but Rust's SIGPIPE, which `spawn` undoes, and an ordinary umask.
fn set_up_process() {
    // The kernel's own structure and call: the C library keeps two of the signals to itself.
    let default = [0u64; 4];
    for number in (1..=64).filter(|n| *n != libc::SIGPIPE) {
        // SAFETY: an all-zero kernel sigaction means the default; it is 32 bytes long, and 8 is the size of its mask.
        unsafe {
            libc::syscall(
                libc::SYS_rt_sigaction,
                number,
                default.as_ptr(),
                std::ptr::null_mut::<u64>(),
                8,
            )
        };
    }
    // SAFETY: umask takes and gives an integer.
    unsafe { libc::umask(0o022) };
}

/// Runs the box's start command as a kept run, so that its output can be asked for.
fn start(settings: &Settings, runs: &Arc<Runs>, command: &Command) {
    let request = StartRequest {
        process: ProcessConfig {
            cmd: "/bin/bash".into(),
            args: vec!["-l".into(), "-c".into(), command.command.clone()],
            ..Default::default()
        }
        .into(),
        tag: Some("start".into()),
        stdin: Some(false),
        keep: true,
        keeps_awake: Some(command.keeps_awake),
        ..Default::default()
    };
    let name = command.user.clone().unwrap_or_else(|| settings.default_user());
    let Some(user) = users::find(&name) else {
        log!("the start command is not run: there is no user '{name}'");
        return;
    };
    match runs.start(&request, &user, None) {
        Ok((run, _)) => log!("the start command is run {}", run.id),
        Err(e) => log!("the start command is not run: {e}"),
    }
}
