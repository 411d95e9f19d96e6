//! Declared faults: the points of each transition at which a test can make the daemon fail or die.
//!
//! A point lies between two steps, where a crash leaves the most to put in order. In production nothing
//! is armed, and a point is one comparison. `DORM_FAULT=start/box-up` ends the process there.

use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::Notify;

/// Declares the points once: variant, name, list.
macro_rules! points {
    ($($point:ident => $name:literal,)*) => {
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum Point {
            $($point),*
        }

        impl Point {
            pub const ALL: [Point; [$($name),*].len()] = [$(Self::$point),*];

            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$point => $name),*
                }
            }
        }
    };
}

points! {
    CreateHomeMade => "create/home-made",
    CreateRecorded => "create/recorded",

    StartRecorded => "start/recorded",
    StartBoxUp => "start/box-up",
    StartFinished => "start/finished",

    WakeBegun => "wake/begun",
    WakeRestored => "wake/restored",
    WakeRefused => "wake/refused",
    WakeSetAside => "wake/set-aside",

    StopRecorded => "stop/recorded",
    StopThawed => "stop/thawed",
    StopBoxGone => "stop/box-gone",
    StopFinished => "stop/finished",

    SettleBegun => "settle/begun",
    SettleBoxGone => "settle/box-gone",
    SettleRecorded => "settle/recorded",

    FreezeBegun => "freeze/begun",
    FreezeFrozen => "freeze/frozen",
    FreezeRecorded => "freeze/recorded",

    ThawBegun => "thaw/begun",
    ThawThawed => "thaw/thawed",
    ThawRecorded => "thaw/recorded",

    ImageFrozen => "image/frozen",
    ImageRead => "image/read",
    ImageMade => "image/made",
    ImageRecorded => "image/recorded",

    HibernateRecorded => "hibernate/recorded",
    HibernateImageRecorded => "hibernate/image-recorded",
    HibernateBoxGone => "hibernate/box-gone",
    HibernateFinished => "hibernate/finished",

    SnapshotFrozen => "snapshot/frozen",
    SnapshotImageMade => "snapshot/image-made",
    SnapshotHomeKept => "snapshot/home-kept",
    SnapshotThawed => "snapshot/thawed",
    SnapshotSealed => "snapshot/sealed",
    SnapshotRecorded => "snapshot/recorded",

    SnapshotForgotten => "snapshot-delete/recorded",
    SnapshotImageGone => "snapshot-delete/image-gone",

    RollBackRecorded => "rollback/recorded",
    RollBackStaged => "rollback/staged",
    RollBackBoxGone => "rollback/box-gone",
    RollBackHomeBack => "rollback/home-back",
    RollBackMoved => "rollback/moved",
    RollBackFinished => "rollback/finished",

    ConvertRecorded => "convert/recorded",
    ConvertBoxGone => "convert/box-gone",
    ConvertHomeMade => "convert/home-made",
    ConvertMoved => "convert/moved",
    ConvertFinished => "convert/finished",

    ForkHomeMade => "fork/home-made",
    ForkImageMade => "fork/image-made",
    ForkRecorded => "fork/recorded",
    ForkMade => "fork/made",

    DeleteRecorded => "delete/recorded",
    DeleteBoxGone => "delete/box-gone",
    DeleteHomeGone => "delete/home-gone",
    DeleteSnapshotsGone => "delete/snapshots-gone",
    DeleteImagesGone => "delete/images-gone",
    DeleteFinished => "delete/finished",
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
            Action::Abort => {
                tracing::error!("the daemon dies at the declared fault {}", point.name());
                std::process::abort()
            }
            Action::Fail => Err(Injected(point)),
            Action::Panic => panic!("the declared panic at {}", point.name()),
            Action::Hang => std::future::pending().await,
        }
    }
}
