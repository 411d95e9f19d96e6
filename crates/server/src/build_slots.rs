//! Slots for boxes that belong to no agent. They lie beyond those of agents, so that a build never
//! takes an agent's address or uids.

use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::config::BUILD_SLOTS;
use crate::records::Slots;

pub struct BuildSlots {
    slots: Slots,
    taken: Mutex<[bool; BUILD_SLOTS as usize]>,
    free: Arc<Semaphore>,
}

/// A slot that is given back when this is dropped.
pub struct BuildSlot {
    pub slot: u32,
    pub uid_base: u32,
    index: usize,
    owner: Arc<BuildSlots>,
    _permit: OwnedSemaphorePermit,
}

impl BuildSlots {
    pub fn new(slots: Slots) -> Arc<Self> {
        let free = Arc::new(Semaphore::new(BUILD_SLOTS as usize));
        Arc::new(Self {
            slots,
            taken: Mutex::default(),
            free,
        })
    }

    /// Waits until a slot is free.
    pub async fn take(self: &Arc<Self>) -> BuildSlot {
        let permit = self
            .free
            .clone()
            .acquire_owned()
            .await
            .expect("the semaphore is never closed");
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let index = taken
            .iter()
            .position(|taken| !taken)
            .expect("a permit stands for a free slot");
        taken[index] = true;
        drop(taken);
        let slot = self.slots.max + u32::try_from(index).expect("there are few build slots");
        let uid_base = self.slots.uid_base(slot);
        BuildSlot {
            slot,
            uid_base,
            index,
            owner: self.clone(),
            _permit: permit,
        }
    }
}

impl Drop for BuildSlot {
    fn drop(&mut self) {
        self.owner.taken.lock().unwrap_or_else(PoisonError::into_inner)[self.index] = false;
    }
}
