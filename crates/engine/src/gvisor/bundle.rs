//! The description of a sandbox, in the form that OCI runtimes read.

use dorm_sys::confine::BOX_CAPABILITIES;
use serde_json::{Value, json};

use crate::BoxSpec;
use crate::launch::Staged;

/// The same box as a container has, as far as the sandbox knows such things.
pub(super) fn describe(spec: &BoxSpec, staged: &Staged) -> Value {
    // The guest gives itself its name. What root mounts, it mounts in the sandbox's own kernel.
    let capabilities: Vec<String> = BOX_CAPABILITIES
        .iter_names()
        .map(|(name, _)| format!("CAP_{name}"))
        .chain(["CAP_SYS_ADMIN".to_owned()])
        .collect();
    let ids = json!([{ "containerID": 0, "hostID": spec.uid_base, "size": 65_536 }]);
    let half = spec.limits.memory / 2;
    let mut mounts = vec![
        json!({ "destination": "/proc", "type": "proc", "source": "proc" }),
        json!({ "destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["ro"] }),
        json!({ "destination": "/dev/shm", "type": "tmpfs", "source": "tmpfs",
                "options": ["mode=1777", format!("size={half}")] }),
        json!({ "destination": "/run", "type": "tmpfs", "source": "tmpfs",
                "options": ["mode=755", format!("size={half}")] }),
        json!({ "destination": dorm_proto::boot::GUEST_PATH, "type": "bind", "source": staged.guest(),
                "options": ["ro", "bind"] }),
    ];
    mounts.extend(spec.volumes.iter().enumerate().map(|(number, volume)| {
        json!({ "destination": volume.path, "type": "bind", "source": staged.volume(number), "options": ["rw", "bind"] })
    }));
    json!({
        "ociVersion": "1.0.2",
        "process": {
            "user": { "uid": 0, "gid": 0 },
            "args": [dorm_proto::boot::GUEST_PATH, dorm_proto::boot::ON_STDIO],
            "env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
            "cwd": "/",
            "capabilities": {
                "bounding": capabilities,
                "effective": capabilities,
                "permitted": capabilities,
                "inheritable": [],
            },
            "rlimits": [{ "type": "RLIMIT_NOFILE", "soft": 65_536, "hard": 1_048_576 }],
        },
        "root": { "path": staged.root(), "readonly": false },
        "hostname": spec.hostname,
        "mounts": mounts,
        "linux": {
            "uidMappings": ids,
            "gidMappings": ids,
            "namespaces": [
                // That of its launcher, with the interface in it.
                { "type": "network", "path": "/proc/self/ns/net" },
                { "type": "pid" }, { "type": "mount" }, { "type": "ipc" }, { "type": "uts" }, { "type": "user" },
            ],
        },
    })
}
