//! Records that follow what they tell of. A thaw, a freeze and the end of a box are acknowledged first
//! and recorded then, in their order, and before anything else of the agent is recorded.
//!
//! A crash in between is harmless: the next daemon finds a box that is frozen or is not, or none, whatever
//! was recorded, and puts it into the state that it adopts it in.
//!
//! What cannot be recorded, as on a disk that is full, is tried again until it can, and nothing else of the agent is
//! recorded before.

use std::collections::VecDeque;
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dorm_engine::{BoxRecord, Id};

use super::{Agent, images};
use crate::faults::Point;
use crate::records::{BoxChange, Change, ImageChange, State, Status};
use crate::store::StoreError;

/// How long a store that refuses is left alone.
pub(super) const AGAIN: Duration = Duration::from_secs(1);

#[derive(Default)]
pub(super) struct Lag {
    pending: Mutex<Pending>,
    /// Held by the one who writes, so that the order is kept.
    writing: tokio::sync::Mutex<()>,
}

#[derive(Default)]
struct Pending {
    late: VecDeque<Late>,
    /// Whether a task records them, and tries again until it could.
    followed: bool,
}

pub(super) struct Late {
    pub(super) from: State,
    pub(super) to: Status,
    pub(super) at: i64,
    pub(super) millis: i64,
    pub(super) box_record: LateBox,
    pub(super) image: LateImage,
}

/// What has become of the box.
pub(super) enum LateBox {
    Kept,
    /// The store does not know it yet.
    Made(BoxRecord),
    Gone,
}

/// What has become of the memory image.
pub(super) enum LateImage {
    Kept,
    /// The memory has gone on, and it is of no use to anyone.
    Useless(Id),
}

impl Late {
    fn change<'a>(&'a self, agent: &'a Id) -> Change<'a> {
        Change {
            agent,
            from: self.from,
            to: &self.to,
            at: self.at,
            millis: Some(self.millis),
            box_record: match &self.box_record {
                LateBox::Kept => BoxChange::Keep,
                LateBox::Made(record) => BoxChange::Set(record),
                LateBox::Gone => BoxChange::Clear,
            },
            image: match self.image {
                LateImage::Kept => ImageChange::Keep,
                LateImage::Useless(_) => ImageChange::Clear,
            },
        }
    }

    /// Both in one, which tells where the second led.
    fn and(self, next: Self) -> Self {
        Self {
            from: self.from,
            box_record: match (self.box_record, next.box_record) {
                (earlier, LateBox::Kept) => earlier,
                (_, later @ (LateBox::Made(_) | LateBox::Gone)) => later,
            },
            image: match (self.image, next.image) {
                (LateImage::Kept, image) => image,
                (useless @ LateImage::Useless(_), _) => useless,
            },
            ..next
        }
    }
}

impl Lag {
    fn pending(&self) -> MutexGuard<'_, Pending> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Nothing is recorded late while this is held.
    pub(super) async fn hold_back(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.writing.lock().await
    }

    /// Nothing of what has come so far is recorded any more.
    pub(super) fn forget(&self) {
        self.pending().late.clear();
    }

    /// With all that came meanwhile, so that there is never more than one to try again.
    fn put_back(&self, late: Late) {
        let pending = &mut self.pending().late;
        let all = pending.drain(..).fold(late, Late::and);
        pending.push_back(all);
    }
}

/// Records this soon.
pub(super) fn record_later(agent: &Arc<Agent>, late: Late) {
    let mut pending = agent.lag.pending();
    pending.late.push_back(late);
    if !mem::replace(&mut pending.followed, true) {
        agent.ctx.tasks.spawn(follow(agent.clone()));
    }
}

async fn follow(agent: Arc<Agent>) {
    // The daemon that was ended in order catches up itself; one that dies does not get here.
    while !agent.ctx.is_closed() {
        if catch_up(&agent).await.is_err() {
            let _ = tokio::time::timeout(AGAIN, agent.ctx.closed.cancelled()).await;
            continue;
        }
        let mut pending = agent.lag.pending();
        if pending.late.is_empty() {
            pending.followed = false;
            return;
        }
    }
}

/// A box that came back from disk goes on although that could not be recorded: its memory is nowhere else.
pub(super) fn record_awake_later(
    agent: &Arc<Agent>,
    from: State,
    to: &Status,
    millis: i64,
    record: &BoxRecord,
) {
    let image = agent.set_image(None);
    let late = Late {
        from,
        to: to.clone(),
        at: to.since,
        millis,
        box_record: LateBox::Made(record.clone()),
        image: image.map_or(LateImage::Kept, |image| LateImage::Useless(image.id)),
    };
    record_later(agent, late);
}

/// Returns when everything so far is recorded.
pub(super) async fn catch_up(agent: &Arc<Agent>) -> Result<(), StoreError> {
    let _turn = agent.lag.writing.lock().await;
    loop {
        let next = agent.lag.pending().late.pop_front();
        let Some(late) = next else { return Ok(()) };
        let recorded = agent.ctx.record(&late.change(&agent.profile.id)).await;
        let point = match late.to.state {
            State::Standby => Point::FreezeRecorded,
            State::Running => Point::ThawRecorded,
            _ => Point::SettleRecorded,
        };
        if let Err(fault) = agent.ctx.faults.reach(point).await {
            tracing::warn!(agent = %agent.profile.name, %fault, "a change of state is recorded");
        }
        // Recorded or not: whoever finds the old record must not find the old memory. By it alone is a box known that has no record.
        if let LateImage::Useless(image) = &late.image
            && (recorded.is_ok() || !matches!(late.box_record, LateBox::Made(_)))
        {
            images::discard(agent, image).await;
        }
        match recorded {
            // An agent that is gone needs no record.
            Ok(()) | Err(StoreError::NotFound { .. }) => {}
            Err(error) => {
                tracing::error!(agent = %agent.profile.name, %error, "a change of state could not be recorded yet");
                agent.lag.put_back(late);
                return Err(error);
            }
        }
    }
}
