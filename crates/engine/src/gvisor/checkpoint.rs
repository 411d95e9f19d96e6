//! Memory images of sandboxes.

use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use super::find::PANIC;
use super::start::{Plan, SECRET, words};
use super::{Gvisor, time_for};
use crate::criu::manifest::{Manifest, Unusable};
use crate::criu::room;
use crate::host::image::Unfinished;
use crate::host::{LiveBox, failed};
use crate::launch::tellable;
use crate::{BoxRecord, BoxSpec, Dumped, EngineError, Result};

const PAUSE: Duration = Duration::from_millis(10);

impl Gvisor {
    /// The sandbox's kernel must run to write its image; the tasks of the box are held in it, and stay so.
    pub(super) async fn dump_box(&self, live: &LiveBox, image: &Path) -> Result<Dumped> {
        let failed = || EngineError::io("cannot write the memory image");
        if !self.is_held(&live.id)? {
            return Err(EngineError::CannotCheckpoint("the box is not frozen".to_owned()));
        }
        let unfinished = Unfinished::make(image).map_err(failed())?;
        let began = Instant::now();
        live.thaw()?;
        let written = self.write(live, &unfinished.0).await;
        live.freeze().await?;
        written?;
        let secret = self.host.run_directory(&live.id).join(SECRET);
        fs::copy(secret, unfinished.0.join(SECRET)).map_err(failed())?;
        tracing::debug!(id = %live.id, took = ?began.elapsed(), "memory read");
        let (image, version) = (image.to_owned(), self.version()?);
        let (guest_hash, uid_base) = (live.guest_hash.clone(), live.uid_base);
        Ok(Dumped::new(async move {
            let committed = tokio::task::spawn_blocking(move || {
                Manifest::commit(&unfinished.0, &image, &guest_hash, uid_base, &version)
            });
            committed
                .await
                .unwrap_or_else(|e| Err(std::io::Error::other(e)))
                .map_err(failed())
        }))
    }

    async fn write(&self, live: &LiveBox, directory: &Path) -> Result<()> {
        let command = self.runsc()?.command(&self.host.run_directory(&live.id));
        let within = time_for(live.stats()?.memory_bytes);
        // It ends with the daemon, so that none writes into an image that the next one makes.
        let output = tokio::process::Command::new("setpriv")
            .args(["--pdeathsig", "KILL"])
            .args(&command)
            .args(["checkpoint", "--leave-running", "--compression=none"])
            .args(["--exclude-committed-zero-pages", "--image-path"])
            .args([directory, Path::new(live.id.as_str())])
            .current_dir("/")
            .stdin(Stdio::null())
            .kill_on_drop(true)
            .output();
        let output = match tokio::time::timeout(within, output).await {
            Ok(output) => output.map_err(EngineError::io("cannot run runsc"))?,
            Err(_) => {
                let seconds = within.as_secs();
                let late = format!("gVisor did not write it within {seconds} s");
                return Err(EngineError::CannotCheckpoint(late));
            }
        };
        if output.status.success() {
            return Ok(());
        }
        let said = String::from_utf8_lossy(&output.stderr);
        tracing::debug!(id = %live.id, %said, "no memory image");
        let first = said.lines().find(|line| !line.trim().is_empty());
        let first = first.unwrap_or("runsc does not say why");
        Err(room::unsaved(directory, tellable(first)))
    }

    /// What is damaged is found before anything of it runs.
    pub(super) async fn restore_box(&self, spec: &BoxSpec, image: &Path) -> Result<BoxRecord> {
        let manifest = open(image).await?;
        let guest = self.host.guest_in(&manifest, spec)?;
        let version = self.version()?;
        if manifest.made_by() != version {
            let made_by = manifest.made_by();
            let why = format!(
                "its memory was saved by {made_by} and cannot be read by {version}; with that version it can be woken, and after \
                 `dorm stop` it can be started from its files"
            );
            return Err(failed("was brought back")(why.into()));
        }
        let within = time_for(manifest.size());
        let secret = fs::read_to_string(image.join(SECRET));
        let plan = Plan {
            guest,
            guest_hash: &manifest.guest_hash,
            secret: secret.map_err(|e| Unusable::without("its secret")(e).into_error())?,
            subcommand: self.runsc()?.restore(image),
            boots: false,
            within,
        };
        let come = async {
            let (live, record) = self.bring_up(spec, &plan).await?;
            self.answers(&live, within).await?;
            Ok((live, record))
        };
        self.host.occupy(spec, come).await
    }

    fn version(&self) -> Result<String> {
        Ok(format!("runsc {}", self.runsc()?.version))
    }

    async fn answers(&self, live: &LiveBox, within: Duration) -> Result<()> {
        let until = Instant::now() + within;
        loop {
            match self.ask_for_ports(&live.id).await {
                Ok(_) => return Ok(()),
                Err(_) if live.process.has_ended() => {
                    let said = words(&self.host.run_directory(&live.id).join(PANIC));
                    let why = said.lines().find(|line| !line.trim().is_empty());
                    let why = tellable(why.unwrap_or("it did not say why"));
                    let why = format!("the sandbox ended: {why}");
                    tracing::debug!(id = %live.id, said, "the sandbox ended");
                    return Err(failed("was brought back")(why.into()));
                }
                Err(error) if Instant::now() > until => {
                    return Err(failed("was brought back")(error.into()));
                }
                Err(_) => tokio::time::sleep(PAUSE).await,
            }
        }
    }

    /// runsc finishes what it was told without the daemon, too.
    pub(super) async fn recover_box(&self, spec: &BoxSpec, image: &Path) -> Result<Option<BoxRecord>> {
        let group = self.host.cgroups.group(spec.id.as_str());
        let is_there = || group.exists() && group.processes().is_ok_and(|members| !members.is_empty());
        if !is_there() {
            return Ok(None);
        }
        let manifest = Manifest::read(image).map_err(Unusable::into_error)?;
        let until = Instant::now() + time_for(manifest.size());
        while is_there() {
            if let Ok((live, record)) = self.find_sandbox(spec, group.clone(), &manifest.guest_hash)
                && self.ask_for_ports(&spec.id).await.is_ok()
            {
                let (slot, policy) = (spec.slot, &spec.network);
                self.host.network.apply(&spec.id, slot, policy).await?;
                self.host.remember(live);
                return Ok(Some(record));
            }
            if Instant::now() > until {
                break;
            }
            tokio::time::sleep(PAUSE).await;
        }
        Ok(None)
    }
}

async fn open(image: &Path) -> Result<Manifest> {
    let image = image.to_owned();
    let opened = tokio::task::spawn_blocking(move || {
        let (manifest, pages) = Manifest::open(&image)?;
        pages.verify().map(|()| manifest)
    });
    opened
        .await
        .unwrap_or_else(|e| Err(e.into()))
        .map_err(Unusable::into_error)
}
