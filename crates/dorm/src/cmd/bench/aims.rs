//! What is compared with what.

use super::report::{Aim, Report, Wish};
use super::{
    create, crowd, engines, exec, files, host_files, peers, proxy, runc, snapshot, spawn, standby, wake,
};

const NONE: f64 = f64::INFINITY;
/// The time that anything takes at seven tenths of another's throughput.
const SEVEN_TENTHS: f64 = 1.42;

/// Name, what, against what, and what the ratio should be at most.
const AIMS: [(&str, &str, &str, f64); 28] = [
    ("exec within 3 times of fork+exec", exec::NAME, spawn::FORK, 3.0),
    (
        "create + first exec below runc run",
        create::NAME,
        runc::NAME,
        1.0,
    ),
    (
        "wake from standby + exec against exec",
        standby::WAKE,
        standby::EXEC,
        2.0,
    ),
    (
        "wake from standby + exec against the bare thaw",
        standby::WAKE,
        standby::THAW,
        NONE,
    ),
    (
        "pause against a bare freeze",
        standby::PAUSE,
        standby::FREEZE,
        10.0,
    ),
    (
        "wake from disk against criu restore",
        wake::WAKE,
        wake::RESTORE,
        1.2,
    ),
    (
        "the same, not in page cache",
        wake::WAKE_COLD,
        wake::RESTORE_COLD,
        1.2,
    ),
    (
        "wake from disk against podman container restore",
        wake::WAKE,
        peers::PODMAN.restore,
        NONE,
    ),
    (
        "wake from disk against runsc restore",
        wake::WAKE,
        peers::RUNSC.restore,
        NONE,
    ),
    (
        "held still by a live snapshot against criu dump",
        snapshot::HELD,
        snapshot::DUMP,
        1.2,
    ),
    (
        "files-only snapshot of a large home against a small",
        snapshot::FILES_LARGE,
        snapshot::FILES_SMALL,
        1.5,
    ),
    (
        "files-only fork of a large home against a small",
        snapshot::FORK_LARGE,
        snapshot::FORK_SMALL,
        1.5,
    ),
    (
        "wake from disk among many against one alone",
        crowd::WAKE_CROWDED,
        crowd::WAKE_ALONE,
        1.3,
    ),
    (
        "first wake of a fork among many against few",
        crowd::FIRST_CROWDED,
        crowd::FIRST_ALONE,
        1.3,
    ),
    (
        "vm: wake from disk against QEMU alone, 256 MiB",
        engines::VM.wake[0],
        engines::VM.alone[0],
        1.3,
    ),
    (
        "vm: wake from disk against QEMU alone, 4 GiB",
        engines::VM.wake[1],
        engines::VM.alone[1],
        1.3,
    ),
    (
        "vm: wake from disk of 4 GiB against 256 MiB",
        engines::VM.wake[1],
        engines::VM.wake[0],
        1.3,
    ),
    (
        "hibernate against criu dump",
        wake::HIBERNATE,
        snapshot::DUMP,
        NONE,
    ),
    (
        "hibernate against podman container checkpoint",
        wake::HIBERNATE,
        peers::PODMAN.checkpoint,
        NONE,
    ),
    (
        "hibernate against runsc checkpoint",
        wake::HIBERNATE,
        peers::RUNSC.checkpoint,
        NONE,
    ),
    (
        "small request against a bare reverse proxy",
        proxy::THROUGH,
        proxy::BARE,
        2.0,
    ),
    (
        "upload against a plain file server",
        proxy::UPLOAD,
        proxy::PLAIN_UPLOAD,
        SEVEN_TENTHS,
    ),
    (
        "download against a plain file server",
        proxy::DOWNLOAD,
        proxy::PLAIN_DOWNLOAD,
        SEVEN_TENTHS,
    ),
    (
        "upload against nginx",
        proxy::UPLOAD,
        proxy::NGINX_UPLOAD,
        SEVEN_TENTHS,
    ),
    (
        "download against nginx",
        proxy::DOWNLOAD,
        proxy::NGINX_DOWNLOAD,
        SEVEN_TENTHS,
    ),
    (
        "upload against a plain write",
        files::UPLOAD,
        host_files::WRITE,
        NONE,
    ),
    (
        "download against a plain read",
        files::DOWNLOAD,
        host_files::READ,
        NONE,
    ),
    (
        "exec between pauses against fork+exec",
        standby::EXEC,
        spawn::FORK,
        NONE,
    ),
];

/// No aim, since CRIU alone takes longer: docs/performance.md says where the time goes.
const WAKE_MS: f64 = 25.0;

pub(super) fn add_to(report: &mut Report) {
    for (name, of, against, at_most) in AIMS {
        report.aim(Aim {
            name,
            of,
            against,
            at_most,
        });
    }
    report.wish(Wish {
        of: wake::WAKE,
        ms: WAKE_MS,
        parts: &[wake::RESTORE, wake::MEMORY],
    });
}
