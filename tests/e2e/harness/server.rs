//! A daemon of the tests' own: data directory, port, addresses and uids that nobody else uses.

use std::collections::HashMap;
use std::fs;
use std::io::Write as _;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};

use super::host::zombies_of;
use super::remains::{self, Remains};
use super::world::World;
use super::{cli, leaked, log_of_interest, outside, seed, wait};

const FIRST_PORT: u32 = 20_000;
const FIRST_UID: u32 = 700_000_000;
/// Agents of one server. Each takes 65,536 uids.
const AGENTS: u32 = 400;
const SHUTDOWN: Duration = Duration::from_secs(90);

/// A configuration in which nothing goes to sleep by itself.
pub(crate) const CALM: &str = "[standby]\nafter = 0\ndurable_after = 0\nhibernate_after = 0\n";

/// How a server differs from the ordinary.
#[derive(Debug, Clone, Default)]
pub(crate) struct Options {
    /// Leave running boxes to the next daemon.
    pub(crate) leave_boxes: bool,
    /// Put running boxes to disk when the daemon ends.
    pub(crate) hibernate_boxes: bool,
    /// Begin with no template, and with the host's resolvers.
    pub(crate) bare: bool,
    /// Keep the data directory beside the btrfs, so that the server needs a pool of its own.
    pub(crate) beside_pool: bool,
    /// Keep the data directory on a btrfs of its own, of so many bytes. It begins without a template.
    pub(crate) disk: Option<u64>,
    /// Keep the data directory on a disk of its own whose power can be cut. It begins without a template.
    pub(crate) mains: bool,
    /// Build templates as the host would: with its resolvers, and kept for the next run.
    pub(crate) builds: bool,
    /// Speak HTTPS at port 443 of an address of its own, under this domain.
    pub(crate) domain: Option<&'static str>,
    /// Further lines of its configuration, from a table on.
    pub(crate) config: &'static str,
}

impl Options {
    /// Not on the btrfs of the run, where it could begin as a copy of others.
    fn is_elsewhere(&self) -> bool {
        self.beside_pool || self.mains || self.disk.is_some()
    }
}

/// As `DORM_E2E_POOL=file` says: every server has its pool in a file, as on hosts without btrfs.
fn pools_are_files() -> bool {
    std::env::var_os("DORM_E2E_POOL").is_some_and(|kind| kind == "file")
}

pub(crate) struct Server {
    number: u32,
    pub(crate) data: PathBuf,
    pub(crate) url: String,
    pub(crate) listen: SocketAddr,
    pub(crate) remains: Remains,
    log: PathBuf,
    daemon: Mutex<Option<Child>>,
}

static SHARED: OnceLock<Result<Arc<Server>, String>> = OnceLock::new();
static WORKLOADS: OnceLock<Result<Arc<Server>, String>> = OnceLock::new();
static CODE_INTERPRETER: OnceLock<Result<Arc<Server>, String>> = OnceLock::new();
static LOGS: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

impl Server {
    /// The server for tests that need no daemon of their own.
    pub(crate) fn shared() -> Result<Arc<Server>> {
        Self::one_of(&SHARED, || Self::with("shared", &Options::default()))
    }

    /// The server whose agents may be made of the template `workloads`.
    pub(crate) fn with_workloads() -> Result<Arc<Server>> {
        Self::one_of(&WORKLOADS, seed::workloads)
    }

    /// The server whose sandboxes may be code interpreters.
    pub(crate) fn with_code_interpreter() -> Result<Arc<Server>> {
        Self::one_of(&CODE_INTERPRETER, seed::code_interpreter)
    }

    fn one_of(
        cell: &'static OnceLock<Result<Arc<Server>, String>>,
        make: impl FnOnce() -> Result<Server>,
    ) -> Result<Arc<Server>> {
        let started = cell.get_or_init(|| make().map(Arc::new).map_err(|e| format!("{e:#}")));
        let server = started
            .as_ref()
            .map_err(|e| anyhow::anyhow!("the shared server does not start: {e}"))?;
        log_of_interest(&server.log);
        Ok(Arc::clone(server))
    }

    /// A server for a test that ends or restarts its daemon.
    pub(crate) fn start() -> Result<Arc<Server>> {
        Self::start_with(&Options::default())
    }

    pub(crate) fn start_with(options: &Options) -> Result<Arc<Server>> {
        let server = Self::with("own", options)?;
        log_of_interest(&server.log);
        Ok(Arc::new(server))
    }

    pub(super) fn with(label: &str, options: &Options) -> Result<Server> {
        if !options.bare {
            seed::ready()?;
        }
        let in_file = !options.bare && !options.is_elsewhere() && pools_are_files();
        let options = &Options {
            beside_pool: options.beside_pool || in_file,
            ..options.clone()
        };
        let server = Self::prepare(label, options)?;
        if !options.bare && !options.is_elsewhere() {
            seed::copy_to(&server.data)?;
        }
        server.launch(&[])?;
        if in_file {
            server.dorm(&["template", "build", "base"])?.succeeded()?;
        }
        Ok(server)
    }

    fn prepare(label: &str, options: &Options) -> Result<Server> {
        let world = World::get();
        let number = world.next_server()?;
        let place = match options.disk {
            Some(size) => world.disk(number, size)?,
            None if options.mains => world.mains(number)?,
            None if options.beside_pool => world.root.clone(),
            None => world.pool(),
        };
        let data = place.join(format!("{label}-{number}"));
        fs::create_dir(&data)?;
        let listen = match options.domain {
            // Every 127.x.y.z is this machine.
            Some(_) => SocketAddr::from(([127, 77, world.slot as u8, number as u8 + 1], 443)),
            None => SocketAddr::from((
                [127, 0, 0, 1],
                free_port(FIRST_PORT + world.slot * 300 + number * 3)?,
            )),
        };
        let domain = options
            .domain
            .map_or_else(String::new, |domain| format!("domain = \"{domain}\"\n"));
        let on_shutdown = match options {
            Options {
                leave_boxes: true, ..
            } => "leave",
            Options {
                hibernate_boxes: true,
                ..
            } => "hibernate",
            _ => "stop",
        };
        let resolvers = if options.bare || options.builds {
            String::new()
        } else {
            format!("\"{}\"", outside::resolver_address())
        };
        // What tests build is kept nowhere: few templates are worth it.
        let templates = if options.bare || options.builds || options.is_elsewhere() {
            ""
        } else {
            "[templates]\ncache = \"\"\n"
        };
        let config = format!(
            "listen = \"{listen}\"\n{domain}on_shutdown = \"{on_shutdown}\"\nstop_grace = 2\nmax_agents = {AGENTS}\n\
             first_uid = {}\n[network]\nrange = \"10.{}.{}.0/23\"\nnameservers = [{resolvers}]\n{templates}{}",
            FIRST_UID + number * (AGENTS + 8) * 65_536,
            160 + world.slot,
            number * 2,
            options.config,
        );
        fs::write(data.join("config.toml"), config)?;
        rustix::fs::syncfs(fs::File::open(&data)?)?;
        let log = world.root.join(format!("{label}-{number}.log"));
        logs().push(log.clone());
        let scheme = if options.domain.is_some() { "https" } else { "http" };
        let server = Server {
            number,
            remains: Remains::of(&data),
            data,
            url: format!("{scheme}://{listen}"),
            listen,
            log,
            daemon: Mutex::new(None),
        };
        if let Some(domain) = options.domain {
            server.make_certificate(domain)?;
        }
        Ok(server)
    }

    /// Starts the daemon, with `env` in its environment, and waits until it answers.
    pub(crate) fn launch(&self, env: &[(&str, &str)]) -> Result<()> {
        let mut daemon = self.lock();
        ensure!(daemon.is_none(), "the daemon runs already");
        let child = daemon.insert(self.spawn(env)?);
        let answered = wait::eventually("the daemon answers", || {
            if let Some(status) = child.try_wait()? {
                bail!("the daemon ended: {status}");
            }
            Ok(self.answers().then_some(()))
        });
        if answered.is_err() {
            let _ = child.kill();
            let _ = child.wait();
            *daemon = None;
        }
        answered.with_context(|| format!("the daemon's log:\n{}", tail(&self.log, 0)))
    }

    fn answers(&self) -> bool {
        if self.url.starts_with("https:") {
            return self.dorm(&["ls"]).is_ok_and(|listed| listed.code == 0);
        }
        self.get("/healthz").is_ok_and(|reply| reply.status == 200)
    }

    /// As its user would: by a CA of its own, in the configuration.
    fn make_certificate(&self, domain: &str) -> Result<()> {
        let made = self.json(&["tls", "init", domain])?;
        let tls = format!(
            "[tls]\ncertificate = {}\nkey = {}\n",
            made["certificate"], made["key"]
        );
        let mut config = fs::File::options()
            .append(true)
            .open(self.data.join("config.toml"))?;
        Ok(config.write_all(tls.as_bytes())?)
    }

    /// Starts a daemon on this data directory and returns at once.
    pub(crate) fn spawn(&self, env: &[(&str, &str)]) -> Result<Child> {
        use std::os::unix::process::CommandExt;
        World::get().goes_on()?;
        let log = fs::File::options().create(true).append(true).open(&self.log)?;
        Command::new(cli::binary())
            .args(["serve", "--data"])
            .arg(&self.data)
            .env_clear()
            .env(
                "PATH",
                "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            )
            .envs(super::engines::isolation().map(|isolation| ("DORM_ISOLATION", isolation)))
            .envs(env.iter().copied())
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .process_group(0)
            .spawn()
            .context("cannot start the daemon")
    }

    pub(crate) fn pid(&self) -> Result<i32> {
        self.lock()
            .as_ref()
            .map(|child| child.id() as i32)
            .context("no daemon runs")
    }

    /// Ends the daemon as a crash would.
    pub(crate) fn kill9(&self) -> Result<()> {
        let mut child = self.lock().take().context("no daemon runs")?;
        child.kill()?;
        child.wait()?;
        Ok(())
    }

    /// Ends the daemon in order and returns its exit code.
    pub(crate) fn sigterm(&self) -> Result<i32> {
        let mut child = self.lock().take().context("no daemon runs")?;
        let pid = Pid::from_raw(child.id() as i32).context("a process has a pid")?;
        kill_process(pid, Signal::TERM)?;
        cli::wait(&mut child, SHUTDOWN).context("the daemon does not shut down")
    }

    /// Waits for the daemon's own end.
    pub(crate) fn wait_for_end(&self) -> Result<i32> {
        self.wait_for_end_within(SHUTDOWN)
    }

    /// The same, where something that takes long comes before it.
    pub(crate) fn wait_for_end_within(&self, longest: Duration) -> Result<i32> {
        let mut child = self.lock().take().context("no daemon runs")?;
        cli::wait(&mut child, longest).context("the daemon goes on")
    }

    /// Whether the daemon has ended by itself.
    pub(crate) fn has_ended(&self) -> bool {
        let mut daemon = self.lock();
        daemon
            .as_mut()
            .is_some_and(|child| child.try_wait().is_ok_and(|ended| ended.is_some()))
    }

    pub(crate) fn runs(&self) -> bool {
        self.lock().is_some()
    }

    /// Kills the daemon and takes away all that a reboot takes away.
    pub(crate) fn simulate_reboot(&self) -> Result<()> {
        self.kill9()?;
        self.remains.destroy()
    }

    /// The power fails: all is gone that a reboot takes away, and that was not on the disk by then.
    pub(crate) fn cut_power(&self) -> Result<()> {
        let world = World::get();
        // Where it is known by a file that cannot be read any more then.
        let ears = self.remains.ears()?;
        world.cut_power(self.number)?;
        self.simulate_reboot()?;
        if let Some(address) = ears {
            remains::deafen(&address)?;
        }
        world.restore_power(self.number)
    }

    /// What the daemon has written to its log so far.
    pub(crate) fn log_text(&self) -> Result<String> {
        Ok(fs::read_to_string(&self.log)?)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Child>> {
        self.daemon.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Shuts the daemon down and says what it left on the host.
    fn finish(&self) -> Result<Vec<String>> {
        if self.lock().is_none() {
            self.remains.destroy()?;
            return Ok(Vec::new());
        }
        let pid = self.pid()?;
        let reaped = wait::eventually("the daemon has reaped its children", || {
            Ok(zombies_of(pid).is_empty().then_some(()))
        });
        let code = self.sigterm()?;
        let mut found = self.remains.of_daemon()?;
        found.extend(reaped.err().map(|error| format!("{error:#}")));
        match self.remains.homes_left() {
            Ok(homes) => found.extend(homes.iter().map(|id| format!("home {id}"))),
            Err(error) => found.push(format!("a pool that cannot be looked at: {error:#}")),
        }
        if code != 0 {
            found.push(format!("exit code {code} of the daemon"));
        }
        self.remains.destroy()?;
        Ok(found)
    }

    /// Ends the shared servers, as far as they were ever needed.
    pub(crate) fn finish_shared() -> Vec<String> {
        let started = [&SHARED, &WORKLOADS, &CODE_INTERPRETER]
            .into_iter()
            .filter_map(OnceLock::get);
        started
            .flatten()
            .flat_map(|server| server.finish().unwrap_or_else(|e| vec![format!("{e:#}")]))
            .collect()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        match self.finish() {
            Ok(found) => leaked(
                found
                    .into_iter()
                    .map(|what| format!("{what}, after {} ended", self.data.display())),
            ),
            Err(error) => leaked([format!("{error:#}")]),
        }
    }
}

fn free_port(from: u32) -> Result<u16> {
    let free = |port: &u16| TcpListener::bind(("127.0.0.1", *port)).is_ok();
    (from as u16..=u16::MAX).find(free).context("no port is free")
}

fn logs() -> std::sync::MutexGuard<'static, Vec<PathBuf>> {
    LOGS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How long each log is now.
pub(super) fn log_marks() -> HashMap<PathBuf, u64> {
    logs()
        .iter()
        .map(|log| (log.clone(), fs::metadata(log).map_or(0, |m| m.len())))
        .collect()
}

/// The end of a log, as far as it was written after `marks`.
pub(super) fn log_since(log: &Path, marks: &HashMap<PathBuf, u64>) -> String {
    format!(
        "\n{}:\n{}",
        log.display(),
        tail(log, marks.get(log).copied().unwrap_or(0))
    )
}

fn tail(log: &Path, from: u64) -> String {
    let bytes = fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(bytes.get(from as usize..).unwrap_or_default()).into_owned();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(30)..].join("\n")
}
