//! What the kernel counts by user, and boxes that came back from disk count together: their user namespaces belong to the host's
//! root, as CRIU makes them. With the kernel's own limits, a hundred agents that each watch a folder could not all be awake.
//!
//! What one box takes of these is bounded by its memory, to which the kernel charges every watch. So that no box can use up what
//! others need, the limits are beyond what fits into the memory of this machine.

const LIMITS: [&str; 2] = [
    "/proc/sys/fs/inotify/max_user_instances",
    "/proc/sys/fs/inotify/max_user_watches",
];
/// Less than the kernel takes for an instance or a watch.
const BYTES_FOR_EACH: u64 = 64;

/// Raises limits of this machine that are lower. Where that cannot be, boxes do with what there is.
pub(super) fn raise() {
    let memory = rustix::system::sysinfo();
    let memory = memory.totalram * u64::from(memory.mem_unit);
    let least = (memory / BYTES_FOR_EACH).min(i32::MAX as u64);
    for limit in LIMITS {
        let now = std::fs::read_to_string(limit).ok();
        if now
            .and_then(|text| text.trim().parse::<u64>().ok())
            .is_none_or(|now| now >= least)
        {
            continue;
        }
        match std::fs::write(limit, least.to_string()) {
            Ok(()) => tracing::info!(limit, to = least, "a limit of this machine is raised for boxes"),
            Err(error) => {
                tracing::warn!(limit, %error, "a limit of this machine could not be raised for boxes")
            }
        }
    }
}
