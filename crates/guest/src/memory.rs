//! Keeps the guest small: one malloc arena, large blocks straight from the kernel, and what a large
//! transfer leaves behind given back shortly after it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

static TRIM_PENDING: AtomicBool = AtomicBool::new(false);

pub(crate) fn set_up() {
    // SAFETY: mallopt takes two integers; called before any thread is started.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
        libc::mallopt(libc::M_MMAP_THRESHOLD, 128 * 1024);
        libc::mallopt(libc::M_TRIM_THRESHOLD, 256 * 1024);
    }
}

/// Called after work that may have needed much memory.
pub(crate) fn trim_soon() {
    if TRIM_PENDING.swap(true, Ordering::Relaxed) {
        return;
    }
    tokio::spawn(async {
        tokio::time::sleep(Duration::from_secs(2)).await;
        TRIM_PENDING.store(false, Ordering::Relaxed);
        // SAFETY: malloc_trim may be called at any time from any thread.
        unsafe { libc::malloc_trim(0) };
    });
}
