//! Declared faults: the points of each transition at which a test can make the daemon fail or die.
//!
//! A point lies between two steps, where a crash leaves the most to put in order. In production nothing
//! is armed, and a point is one comparison. `DORM_FAULT=start/box-up` ends the process there.

use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::Notify;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Point {
    CreateHomeMade,
    CreateRecorded,
    StartRecorded,
    StartBoxUp,
    StartFinished,
    StopRecorded,
    StopBoxGone,
    StopFinished,
    FreezeBegun,
    FreezeFrozen,
    ThawBegun,
    ThawThawed,
    ImageFrozen,
    ImageMade,
    ImageRecorded,
    HibernateRecorded,
    HibernateImageRecorded,
    HibernateBoxGone,
    HibernateFinished,
    SnapshotFrozen,
    SnapshotImageMade,
    SnapshotHomeKept,
    SnapshotRecorded,
    RollBackRecorded,
    RollBackBoxGone,
    RollBackHomeBack,
    ForkHomeMade,
    ForkImageMade,
    DeleteRecorded,
    DeleteBoxGone,
    DeleteHomeGone,
    DeleteFinished,
}

impl Point {
    pub const ALL: [Point; 32] = [
        Self::CreateHomeMade,
        Self::CreateRecorded,
        Self::StartRecorded,
        Self::StartBoxUp,
        Self::StartFinished,
        Self::StopRecorded,
        Self::StopBoxGone,
        Self::StopFinished,
        Self::FreezeBegun,
        Self::FreezeFrozen,
        Self::ThawBegun,
        Self::ThawThawed,
        Self::ImageFrozen,
        Self::ImageMade,
        Self::ImageRecorded,
        Self::HibernateRecorded,
        Self::HibernateImageRecorded,
        Self::HibernateBoxGone,
        Self::HibernateFinished,
        Self::SnapshotFrozen,
        Self::SnapshotImageMade,
        Self::SnapshotHomeKept,
        Self::SnapshotRecorded,
        Self::RollBackRecorded,
        Self::RollBackBoxGone,
        Self::RollBackHomeBack,
        Self::ForkHomeMade,
        Self::ForkImageMade,
        Self::DeleteRecorded,
        Self::DeleteBoxGone,
        Self::DeleteHomeGone,
        Self::DeleteFinished,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::CreateHomeMade => "create/home-made",
            Self::CreateRecorded => "create/recorded",
            Self::StartRecorded => "start/recorded",
            Self::StartBoxUp => "start/box-up",
            Self::StartFinished => "start/finished",
            Self::StopRecorded => "stop/recorded",
            Self::StopBoxGone => "stop/box-gone",
            Self::StopFinished => "stop/finished",
            Self::FreezeBegun => "freeze/begun",
            Self::FreezeFrozen => "freeze/frozen",
            Self::ThawBegun => "thaw/begun",
            Self::ThawThawed => "thaw/thawed",
            Self::ImageFrozen => "image/frozen",
            Self::ImageMade => "image/made",
            Self::ImageRecorded => "image/recorded",
            Self::HibernateRecorded => "hibernate/recorded",
            Self::HibernateImageRecorded => "hibernate/image-recorded",
            Self::HibernateBoxGone => "hibernate/box-gone",
            Self::HibernateFinished => "hibernate/finished",
            Self::SnapshotFrozen => "snapshot/frozen",
            Self::SnapshotImageMade => "snapshot/image-made",
            Self::SnapshotHomeKept => "snapshot/home-kept",
            Self::SnapshotRecorded => "snapshot/recorded",
            Self::RollBackRecorded => "rollback/recorded",
            Self::RollBackBoxGone => "rollback/box-gone",
            Self::RollBackHomeBack => "rollback/home-back",
            Self::ForkHomeMade => "fork/home-made",
            Self::ForkImageMade => "fork/image-made",
            Self::DeleteRecorded => "delete/recorded",
            Self::DeleteBoxGone => "delete/box-gone",
            Self::DeleteHomeGone => "delete/home-gone",
            Self::DeleteFinished => "delete/finished",
        }
    }
}

#[derive(Debug, thiserror::Error)]
#[error("there is no fault point {0:?}; known: {known}", known = Point::ALL.map(Point::name).join(", "))]
pub struct UnknownPoint(String);

impl FromStr for Point {
    type Err = UnknownPoint;

    fn from_str(s: &str) -> Result<Self, UnknownPoint> {
        Self::ALL
            .into_iter()
            .find(|point| point.name() == s)
            .ok_or_else(|| UnknownPoint(s.to_owned()))
    }
}

#[derive(Debug, thiserror::Error)]
#[error("the declared fault at {}", .0.name())]
pub struct Injected(pub Point);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// End the process as `kill -9` would.
    Abort,
    /// Fail once.
    Fail,
    /// Panic once, as a bug would.
    Panic,
    /// Go no further: what a crash at this point would leave is then there to be looked at.
    Hang,
}

#[derive(Debug, Clone, Default)]
pub struct Faults(Option<Arc<Armed>>);

#[derive(Debug, Default)]
struct Armed {
    faults: Mutex<Vec<(Point, Action)>>,
    struck: Notify,
}

impl Faults {
    pub fn none() -> Self {
        Self(None)
    }

    /// Reads `DORM_FAULT`.
    pub fn from_env() -> Result<Self, UnknownPoint> {
        match std::env::var("DORM_FAULT") {
            Ok(name) if !name.is_empty() => {
                let faults = Self::armable();
                faults.arm(name.parse()?, Action::Abort);
                Ok(faults)
            }
            _ => Ok(Self::none()),
        }
    }

    /// Nothing yet, but more can be armed at any time.
    pub fn armable() -> Self {
        Self(Some(Arc::default()))
    }

    pub fn arm(&self, point: Point, action: Action) {
        let armed = self.0.as_ref().expect("faults that were made with `armable`");
        armed
            .faults
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push((point, action));
    }

    /// Returns when an armed fault has struck.
    pub async fn struck(&self) {
        self.0
            .as_ref()
            .expect("faults that were made with `armable`")
            .struck
            .notified()
            .await;
    }

    #[inline]
    pub async fn reach(&self, point: Point) -> Result<(), Injected> {
        match &self.0 {
            None => Ok(()),
            Some(armed) => armed.strike(point).await,
        }
    }
}

impl Armed {
    async fn strike(&self, point: Point) -> Result<(), Injected> {
        let action = {
            let mut faults = self.faults.lock().unwrap_or_else(PoisonError::into_inner);
            let Some(index) = faults.iter().position(|(at, _)| *at == point) else {
                return Ok(());
            };
            faults.swap_remove(index).1
        };
        self.struck.notify_one();
        match action {
            Action::Abort => std::process::abort(),
            Action::Fail => Err(Injected(point)),
            Action::Panic => panic!("the declared panic at {}", point.name()),
            Action::Hang => std::future::pending().await,
        }
    }
}
