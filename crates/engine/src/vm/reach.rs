//! What is asked of a machine that runs, through its guest and through QEMU.

use std::io;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use dorm_proto::vm::{Answer, Order};

use super::link::{self, Link};
use super::{Vm, command};
use crate::host::LiveBox;
use crate::network::listening_in;
use crate::{EngineError, GuestStream, Listening, Result};

/// How long a guest may take to begin a conversation, or to do what it is told, before it is given up.
const WITHIN: Duration = Duration::from_secs(30);
/// How long a machine that is about to be stopped may take to hold its processes. Its guest gives up after forty seconds, and gives its disk thirty of
/// them.
const HELD_WITHIN: Duration = Duration::from_secs(45);

/// How long to wait for a machine that had perhaps nothing to be told.
const AT_ONCE: Duration = Duration::from_secs(2);

/// Milliseconds since the epoch.
pub(super) fn now_ms() -> i64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(now.as_millis()).unwrap_or(i64::MAX)
}

pub(super) fn too_late() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "the guest does not answer")
}

/// What comes of `doing`. A conversation in which nothing comes of it is ended, so that the next call begins anew.
pub(super) async fn in_time<T>(link: &Link, doing: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    done_within(WITHIN, link, doing).await
}

async fn done_within<T>(
    within: Duration,
    link: &Link,
    doing: impl Future<Output = io::Result<T>>,
) -> io::Result<T> {
    match tokio::time::timeout(within, doing).await {
        Ok(done) => done,
        Err(_) => {
            link.end();
            Err(too_late())
        }
    }
}

impl Vm {
    /// The conversation with the guest; a new one where the last is over.
    pub(super) async fn link(&self, live: &LiveBox, within: Duration) -> io::Result<Arc<Link>> {
        let linked = tokio::time::timeout(within, self.link_whenever(live)).await;
        linked.unwrap_or_else(|_| Err(too_late()))
    }

    async fn link_whenever(&self, live: &LiveBox) -> io::Result<Arc<Link>> {
        let talk = self.talk(live);
        let mut link = talk.link.lock().await;
        if let Some(link) = link.as_ref().filter(|link| !link.is_over()) {
            return Ok(Arc::clone(link));
        }
        // The port has room for one daemon at a time.
        *link = None;
        let stream = self.socket(live, command::GUEST_SOCKET).await?;
        let begun = Arc::new(Link::begin(stream).await?);
        *link = Some(Arc::clone(&begun));
        Ok(begun)
    }

    async fn have_done(&self, live: &LiveBox, order: &Order) -> io::Result<()> {
        let link = self.link(live, WITHIN).await?;
        in_time(&link, link.have_done(order)).await
    }

    pub(super) async fn connect_guest(&self, live: &LiveBox) -> Result<Box<dyn GuestStream>> {
        let failed = || EngineError::io("cannot reach the guest");
        let link = self.link(live, WITHIN).await.map_err(failed())?;
        let stream = in_time(&link, link.stream(&Order::Guest))
            .await
            .map_err(failed())?;
        Ok(Box::new(stream))
    }

    pub(super) async fn connect_to(&self, live: &LiveBox, port: u16) -> Result<Box<dyn GuestStream>> {
        let failed = || EngineError::io("cannot reach a port of the box");
        let talk = self.talk(live);
        let turn = tokio::time::timeout(WITHIN, talk.connecting.acquire()).await;
        let _turn = turn.map_err(|_| failed()(too_late()))?;
        let link = self.link(live, WITHIN).await.map_err(failed())?;
        let mut stream = in_time(&link, link.stream(&Order::Port { port }))
            .await
            .map_err(failed())?;
        // What is slow here may be the program behind the port alone.
        let answered = tokio::time::timeout(WITHIN, link::answer(&mut stream)).await;
        match answered.map_err(|_| failed()(too_late()))?.map_err(failed())? {
            Answer::Done => Ok(Box::new(stream)),
            Answer::Refused => Err(EngineError::PortClosed {
                id: live.id.clone(),
                port,
            }),
            other => Err(failed()(link::refused(other))),
        }
    }

    pub(super) async fn ports(&self, live: &LiveBox) -> Result<Vec<Listening>> {
        let failed = || EngineError::io("cannot read the ports of the box");
        if live.group.frozen().map_err(failed())? {
            let talk = self.talk(live);
            return Ok(talk
                .listening
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .clone());
        }
        let link = self.link(live, WITHIN).await.map_err(failed())?;
        let answer = in_time(&link, link.order(&Order::Listening)).await;
        match answer.map_err(failed())? {
            Answer::Listening(tables) => Ok(listening_in(&tables)),
            other => Err(failed()(link::refused(other))),
        }
    }

    /// Has the guest hold all processes of the box, so that none runs again before the machine knows the time and who it is.
    async fn hold(&self, live: &LiveBox) -> io::Result<()> {
        let link = self.link(live, WITHIN).await?;
        let unwritten = match done_within(HELD_WITHIN, &link, link.order(&Order::Sync)).await? {
            Answer::Done => false,
            // Its memory has what its disk has not, and is as safe. But whoever loses the one has the other.
            Answer::Held => {
                tracing::warn!(id = %live.id, "the machine stands by with writes that are not on its disk");
                true
            }
            other => return Err(link::refused(other)),
        };
        self.host.pool.note_unwritten(&live.id, unwritten)?;
        if let Ok(ports) = self.ports(live).await {
            let talk = self.talk(live);
            *talk.listening.lock().unwrap_or_else(PoisonError::into_inner) = ports;
        }
        Ok(())
    }

    /// Stops the machine, and then the process that runs it. What was written in it is on its disk before. One whose processes cannot be
    /// held is not stopped.
    pub(super) async fn freeze_machine(&self, live: &LiveBox) -> Result<()> {
        let failed = || EngineError::io("cannot stop the machine");
        if live.group.frozen().map_err(failed())? {
            return Ok(());
        }
        let mut monitor = self.monitor(live).await?;
        if monitor.is_running().await.map_err(failed())? {
            let goes_on =
                "the processes of the machine cannot be held, so it goes on; try again, or stop the agent";
            self.hold(live).await.map_err(EngineError::io(goes_on))?;
            monitor.stop().await.map_err(failed())?;
        }
        live.freeze().await
    }

    pub(super) async fn thaw_machine(&self, live: &LiveBox) -> Result<()> {
        let failed = || EngineError::io("cannot let the machine go on");
        live.thaw()?;
        self.serve_volumes(live);
        let mut monitor = self.monitor(live).await?;
        let patience = if monitor.is_running().await.map_err(failed())? {
            AT_ONCE
        } else {
            monitor.go_on().await.map_err(failed())?;
            2 * WITHIN
        };
        // Its clock stood still with it, and its processes wait for the time. One that runs may have been about to stand still.
        let clock = Order::Clock { now_ms: now_ms() };
        let told = tokio::time::timeout(patience, self.have_done(live, &clock)).await;
        if let Err(error) = told.unwrap_or_else(|_| Err(too_late())) {
            tracing::warn!(id = %live.id, %error, "the machine's clock could not be set");
        }
        Ok(())
    }

    pub(super) async fn turn_off(&self, live: &LiveBox) -> Result<()> {
        self.thaw_machine(live).await?;
        self.have_done(live, &Order::Stop)
            .await
            .map_err(EngineError::io("cannot tell the guest to end"))?;
        // Nobody will go on with it, and what was in it is nobody's business. The machine has it until it ends.
        self.host
            .pool
            .forget_memory(&live.id)
            .map_err(EngineError::io("cannot remove the machine's memory"))
    }
}
