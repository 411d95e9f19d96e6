//! Bringing up a machine, from its disk or from a state that was saved.

use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use dorm_proto::vm::Order;
use dorm_sys::cgroup::{Group, GroupLimits};
use rustix::process::Signal;

use super::Vm;
use super::accelerator::Accelerator;
use super::command::Hardware;
use super::qemu::Qemu;
use super::reach::{now_ms, too_late};
use crate::host::{LiveBox, ended, failed, netns_of, random_hex, record_of};
use crate::launch::machine::{MEMORY, Machine};
use crate::launch::{self, Job, Launcher, Volume, complaint, tellable};
use crate::packet::PacketSocket;
use crate::{BoxRecord, BoxSpec, EngineError, Isolation, Result};

/// How long QEMU may take to be there.
const LAUNCHED_WITHIN: Duration = Duration::from_secs(30);
/// How long a guest may take to answer. In emulation, on a host with many other machines, a kernel takes its time; that it fails is noticed at once.
const READY_WITHIN: Duration = Duration::from_secs(300);
/// How long it holds its turn meanwhile. It mounts its disk before it answers, and what root in the box left there may hold it up.
const TURN: Duration = Duration::from_secs(60);
/// How long one that answers may take to settle in.
const SETTLED_WITHIN: Duration = Duration::from_secs(120);
const PAUSE: Duration = Duration::from_millis(2);
/// What QEMU takes beside the machine's memory: code translated at run time, mostly.
const OWN_MEMORY: u64 = 320 << 20;
/// QEMU's threads, those that wait for the disk included, and those of the file server. Each of the machine's processors is one more.
const OWN_THREADS: u32 = 256 + 16;
const LEAST_MEMORY: u64 = 128 << 20;
/// With more, QEMU's machine needs what it has not by emulation.
const MOST_PROCESSORS: u32 = 255;

impl Vm {
    pub(super) async fn start_machine(&self, spec: &BoxSpec) -> Result<(LiveBox, BoxRecord)> {
        let qemu = self.usable_qemu()?;
        let accelerator = qemu.accelerator();
        let hardware = Hardware {
            machine: qemu.machine.clone(),
            accelerator,
            vendor: accelerator.vendor(),
            processors: spec.limits.cpu_millis.div_ceil(1000).clamp(1, MOST_PROCESSORS),
            memory: spec.limits.memory.max(LEAST_MEMORY) >> 20 << 20,
            modules: qemu.modules_of(Some(&qemu.kernel_version)).is_ok(),
            kernel: Some(qemu.kernel_version.clone()),
            volumes: !spec.volumes.is_empty(),
        };
        let turn = self.booting.acquire().await;
        let pool = &self.host.pool;
        pool.renew_machine_memory(&spec.id, hardware.memory).await?;
        let guest = &self.host.guest.hash;
        let launched = self.launch(spec, &qemu, &hardware, guest, false).await?;
        let order = Order::Boot {
            config: Box::new(spec.boot.clone()),
            network: self.host.network.of_machine(spec.slot)?,
            now_ms: now_ms(),
            entropy: entropy(),
            volumes: spec.volumes.iter().map(|volume| volume.path.clone()).collect(),
            pids: Some(spec.limits.pids),
        };
        self.serve_volumes(&launched.live);
        let booted = async {
            let mut linked = pin!(self.link(&launched.live, READY_WITHIN));
            let soon = tokio::time::timeout(TURN, &mut linked).await;
            // What is waited for from now on is this box's affair alone.
            drop(turn);
            let link = match soon {
                Ok(link) => link?,
                Err(_) => linked.await?,
            };
            let done = tokio::time::timeout(SETTLED_WITHIN, link.have_done(&order)).await;
            done.map_err(|_| too_late())?
        };
        let outcome = tokio::select! {
            booted = booted => booted,
            _ = ended(&launched.live.process) => Err(io::Error::other("the machine has ended")),
        };
        match outcome {
            Ok(()) => {
                self.keep_hardware(&launched.live, &hardware)?;
                Ok(launched.settle())
            }
            Err(error) => Err(failed("was booted")(self.explain(&launched, error).await.into())),
        }
    }

    pub(super) fn usable_qemu(&self) -> Result<Arc<Qemu>> {
        self.qemu.get().map_err(no_engine)
    }

    /// Starts QEMU on the disk and the memory of the home. `guest` is the hash of the guest that runs there, or will.
    pub(super) async fn launch(
        &self,
        spec: &BoxSpec,
        qemu: &Qemu,
        hardware: &Hardware,
        guest: &str,
        waiting: bool,
    ) -> Result<Launched> {
        let pool = &self.host.pool;
        let group = self.group(spec, hardware)?;
        hardware.runs_by(qemu.accelerator()).map_err(no_engine)?;
        let modules = match hardware.modules {
            true => Some(qemu.modules_of(hardware.kernel.as_deref()).map_err(no_engine)?),
            false => None,
        };
        let machine = Machine {
            program: qemu.program.clone(),
            arguments: hardware.arguments(waiting),
            kernel: qemu.kernel(),
            initrd: qemu
                .initrd(&self.host.guest)
                .map_err(|e| failed("was given its first files")(e.into()))?,
            modules,
            kvm: hardware.accelerator == Accelerator::Kvm,
            interface: self.host.network.machine_interface(&spec.id),
        };
        let orders = launch::Spec {
            home: pool.machine_disk(&spec.id),
            uid_base: spec.uid_base,
            volumes: vec![Volume {
                source: pool.machine_memory(&spec.id),
                at: MEMORY.to_owned(),
            }],
            job: Job::Machine(machine),
        };
        let launched = tokio::time::timeout(LAUNCHED_WITHIN, self.spawn(spec, group, &orders, guest)).await;
        launched.map_err(|e| failed("was launched")(e.into()))?
    }

    fn group(&self, spec: &BoxSpec, hardware: &Hardware) -> Result<Group> {
        let limits = self.host.group_limits(&spec.limits)?;
        let limits = GroupLimits {
            memory: hardware.memory + OWN_MEMORY,
            pids: OWN_THREADS + hardware.processors,
            ..limits
        };
        self.host
            .cgroups
            .create(spec.id.as_str(), &limits)
            .map_err(|e| failed("was given its limits")(e.into()))
    }

    async fn spawn(
        &self,
        spec: &BoxSpec,
        group: Group,
        orders: &launch::Spec,
        guest: &str,
    ) -> Result<Launched> {
        let cannot = |e: io::Error| failed("was launched")(e.into());
        let launcher = Launcher::start(&self.host.launcher, group.join_files(), Some(&self.filter));
        let launcher = launcher.await.map_err(cannot)?;
        let process = launcher.launch(orders).await.map_err(cannot)?;
        let Launcher {
            process: mut launcher,
            socket,
        } = launcher;
        let _ = launcher.wait().await;
        let found = netns_of(&process).and_then(|netns| {
            let record = record_of(Isolation::Vm, &process, guest)?;
            Ok((netns, record))
        });
        let (netns, record) = match found {
            Ok(found) => found,
            Err(error) => {
                let _ = process.signal(Signal::KILL);
                ended(&process).await;
                return Err(cannot(error));
            }
        };
        let live = LiveBox::new(process, netns, group, spec, &record);
        let launched = Launched { live, record, socket };
        self.host
            .network
            .attach_machine(&spec.id, spec.slot, &spec.network)
            .await?;
        match self.until_monitored(&launched.live).await {
            Ok(()) => Ok(launched),
            Err(error) => Err(failed("was launched")(
                self.explain(&launched, error).await.into(),
            )),
        }
    }

    /// Returns when QEMU has made its sockets, the last of which is the monitor's.
    async fn until_monitored(&self, live: &LiveBox) -> io::Result<()> {
        loop {
            match self.socket(live, super::command::MONITOR_SOCKET).await {
                Ok(_) => return Ok(()),
                Err(_) if live.process.has_ended() => return Err(io::Error::other("QEMU has ended")),
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {}
                Err(error) => return Err(error),
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// What went wrong with a machine, as QEMU or its kernel says it.
    pub(super) async fn explain(&self, launched: &Launched, error: io::Error) -> String {
        let complaints = tokio::time::timeout(Duration::from_millis(200), launched.socket.receive());
        if let Ok(Ok(packet)) = complaints.await {
            return format!("{error}: {}", complaint(&packet));
        }
        let console = async { self.monitor(&launched.live).await.ok()?.console().await.ok() };
        let console = tokio::time::timeout(Duration::from_secs(2), console).await;
        let last = console.ok().flatten().unwrap_or_default();
        match last.lines().next_back() {
            // The box may have written it.
            Some(line) => format!("{error}; its console says last: {}", tellable(line)),
            None => error.to_string(),
        }
    }
}

pub(super) fn no_engine(reason: String) -> EngineError {
    EngineError::NoEngine {
        isolation: Isolation::Vm,
        reason,
    }
}

/// A machine whose process is there.
pub(super) struct Launched {
    pub(super) live: LiveBox,
    pub(super) record: BoxRecord,
    /// QEMU's standard error.
    socket: PacketSocket,
}

impl Launched {
    pub(super) fn settle(self) -> (LiveBox, BoxRecord) {
        (self.live, self.record)
    }
}

/// Hexadecimal digits for the machine's random source.
pub(super) fn entropy() -> String {
    random_hex::<64>()
}
