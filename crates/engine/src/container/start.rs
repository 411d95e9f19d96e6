//! Bringing up a box.

use std::time::Duration;

use rustix::process::Signal;

use super::Container;
use crate::host::{LiveBox, ended, failed, netns_of, record_of};
use crate::launch::{self, Job, Launcher, complaint};
use crate::packet::PacketSocket;
use crate::{BoxRecord, BoxSpec, Isolation, Result};

/// How long a guest may take to answer. A box on a busy host needs a fraction of a second.
const READY_WITHIN: Duration = Duration::from_secs(30);

impl Container {
    pub(super) async fn start_box(&self, spec: &BoxSpec) -> Result<(LiveBox, BoxRecord)> {
        let limits = self.host.group_limits(&spec.limits)?;
        let mut spare = self.spares.take().await?;
        self.spares.refill();
        let (group, join) = spare.claim(&self.host.cgroups, &spec.id, &limits)?;
        let launch = launch::Spec {
            home: self.host.pool.home_path(&spec.id),
            uid_base: spec.uid_base,
            volumes: self.host.volumes(&spec.volumes)?,
            job: Job::Guest {
                guest: self.host.guest.path.clone(),
                hostname: spec.hostname.clone(),
                boot_id: random_uuid(),
                join,
                tmpfs_bytes: spec.limits.memory / 2,
            },
        };
        let launcher = spare.launcher;
        let process = tokio::time::timeout(READY_WITHIN, launcher.launch(&launch)).await;
        let process = process.unwrap_or_else(|e| Err(e.into()));
        let process = process.map_err(|e| failed("was launched")(e.into()))?;
        let Launcher {
            process: mut launcher,
            socket,
        } = launcher;
        let reap_launcher = async {
            let _ = launcher.wait().await;
        };

        let outcome = tokio::time::timeout(READY_WITHIN, async {
            let netns = netns_of(&process).map_err(|e| failed("was set up")(e.into()))?;
            let (attached, ()) = tokio::join!(
                self.host
                    .network
                    .attach(&spec.id, spec.slot, &spec.network, &netns),
                reap_launcher
            );
            // A box whose set-up failed is gone by now, and says why better than the network can.
            if let Err(error) = attached {
                return Err(match said(&socket).await {
                    Some(reason) => failed("was set up")(reason.into()),
                    None => error,
                });
            }
            let sent = socket.send_json(&spec.boot).await;
            match socket.receive().await {
                Ok(answer) if answer == dorm_proto::boot::READY => Ok(netns),
                Ok(answer) => Err(failed("was set up")(complaint(&answer).into())),
                Err(error) => Err(failed("was booted")(sent.err().unwrap_or(error).into())),
            }
        })
        .await;
        let netns = match outcome.unwrap_or_else(|e| Err(failed("was booted")(e.into()))) {
            Ok(netns) => netns,
            Err(error) => {
                let _ = process.signal(Signal::KILL);
                ended(&process).await;
                return Err(error);
            }
        };

        let record = record_of(Isolation::Container, &process, &self.host.guest.hash)
            .map_err(|e| failed("was recorded")(e.into()))?;
        Ok((LiveBox::new(process, netns, group, spec, &record), record))
    }
}

/// What process 1 still said before it went, if it is gone.
async fn said(socket: &PacketSocket) -> Option<String> {
    let answer = tokio::time::timeout(Duration::from_millis(200), socket.receive()).await;
    answer.ok()?.ok().map(|packet| complaint(&packet))
}

fn random_uuid() -> String {
    let mut bytes = [0u8; 16];
    getrandom::fill(&mut bytes).expect("the kernel's random source answers");
    bytes[6] = bytes[6] & 0x0f | 0x40;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    dorm_sys::uuid::text(bytes)
}
