//! Agents that become machines, or cease to be some, and those that cannot.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use anyhow::{Result, ensure};

use super::needs_machines;
use crate::harness::{self, Options, Server};

/// Makes files of all kinds that a home can hold.
const MAKE_FILES: &str = r#"
import os, struct
os.makedirs('/srv/kept/.wh.folder', mode=0o2750)
os.chdir('/srv/kept')
open('text', 'w').write('text')
os.chown('text', 1234, 4321)
os.chmod('text', 0o4751)
os.setxattr('text', 'user.note', b'a\nnote\0')
# User 1234 may read and write, the group may not, and the mode has what nobody has more than.
entries = [(1, 6, -1), (2, 6, 1234), (4, 0, -1), (16, 6, -1), (32, 4, -1)]
rights = struct.pack('<I', 2) + b''.join(struct.pack('<HHi', *entry) for entry in entries)
open('shared', 'w').write('shared')
os.setxattr('shared', 'system.posix_acl_access', rights)
os.setxattr('.wh.folder', 'system.posix_acl_default', rights)
os.utime('text', ns=(1, 1234567890000000000))
os.link('text', 'other')
os.symlink('.//text/../strange', 'link')
os.mkfifo('pipe')
with open('holes', 'wb') as f:
    f.seek(1 << 32)
    f.write(b'end')
open('/srv/kept/.wh.folder/' + 'n' * 200, 'w').write('n')
"#;

/// Tells everything about them.
const TELL_FILES: &str = r#"
import hashlib, os
for folder, folders, files in sorted(os.walk('/srv/kept')):
    for name in sorted(folders + files):
        path = os.path.join(folder, name)
        s = os.lstat(path)
        said = [path, oct(s.st_mode), s.st_uid, s.st_gid, name in folders or s.st_nlink, s.st_mtime_ns if name == 'text' else 0]
        if not os.path.islink(path):
            said += [(name, os.getxattr(path, name)) for name in sorted(os.listxattr(path))]
        if os.path.isfile(path):
            said += [s.st_size, s.st_blocks < 2048]
            with open(path, 'rb') as f:
                f.seek(max(0, s.st_size - 100))
                said.append(hashlib.sha256(f.read()).hexdigest())
        if os.path.islink(path): said.append(os.readlink(path))
        print(said)
"#;

/// A machine in emulation takes a minute for the files of a template where it is alone, of which the test removes some.
const CONVERTED_WITHIN: Duration = Duration::from_secs(600);

pub(super) fn an_agent_keeps_its_files_whatever_isolation_it_gets() -> Result<()> {
    needs_machines()?;
    let server = Server::shared()?;
    let agent = server.agent_with("moving", &["--memory", "256M", "--cpus", "1"])?;
    let set = |isolation: &str| harness::run_within(CONVERTED_WITHIN, server.command(&["set", &agent.name, "--isolation", isolation]), b"");
    agent.root("rm -r /usr/share/locale /usr/share/perl /usr/share/zoneinfo /usr/share/doc /usr/lib/git-core")?.succeeded()?;
    agent.python(MAKE_FILES)?.succeeded()?;
    let told = agent.python(TELL_FILES)?.text()?;
    ensure!(told.lines().count() == 8 && told.contains("posix_acl_access") && told.contains("posix_acl_default") && told.contains("a\\nnote"), "{told}");
    let snapshot = server.dorm(&["snapshot", &agent.name])?.text()?;
    agent.sh("echo only here > /dev/shm/memory")?.succeeded()?;

    set("vm")?.succeeded()?;
    let shown = agent.show()?;
    ensure!(shown["isolation"] == "vm" && shown["state"] == "running", "{shown}");
    ensure!(agent.sh_text("uname -v")?.trim() != rustix::system::uname().version().to_string_lossy());
    let now = agent.python(TELL_FILES)?.text()?;
    ensure!(now == told, "its files were\n{told}\nand are\n{now}");
    ensure!(agent.sh("test -e /dev/shm/memory")?.code != 0, "its memory cannot have been kept");
    // Memory of the one is nothing to the other.
    let refused = server.dorm(&["rollback", &agent.name, snapshot.trim()])?;
    ensure!(refused.code != 0 && format!("{refused}").contains("isolation container"), "{refused}");
    ensure!(agent.state()? == "running");
    agent.root("echo new > /srv/kept/new; mknod /srv/device b 7 0; sync")?.succeeded()?;

    set("container")?.succeeded()?;
    let shown = agent.show()?;
    ensure!(shown["isolation"] == "container" && shown["state"] == "running", "{shown}");
    ensure!(agent.root_text("cat /srv/kept/new && rm /srv/kept/new && test ! -e /lost+found")? == "new");
    let now = agent.python(TELL_FILES)?.text()?;
    ensure!(now == told, "its files were\n{told}\nand are\n{now}");
    let events = agent.events()?;
    let left_out = |event: &&serde_json::Value| event["reason"].as_str().is_some_and(|why| why.contains("device nodes"));
    ensure!(events.iter().any(|event| left_out(&event)), "nobody says that a device was left out: {events:?}");
    // What was taken with this isolation is as good as ever.
    server.dorm(&["rollback", &agent.name, snapshot.trim()])?.succeeded()?;
    let now = agent.python(TELL_FILES)?.text()?;
    ensure!(now == told, "its files were\n{told}\nand are\n{now}");
    Ok(())
}

/// As large an attribute as a container's files may have, and a machine's may not.
const LARGE_ATTRIBUTE: &str = "import os; open('/srv/noted', 'w'); os.setxattr('/srv/noted', 'user.note', b'n' * 8000)";

pub(super) fn an_agent_that_cannot_become_a_machine_goes_on_as_it_was() -> Result<()> {
    needs_machines()?;
    let server = Server::start_with(&Options { leave_boxes: true, ..Options::default() })?;
    let agent = server.agent_with("steadfast", &["--isolation", "container", "--memory", "256M", "--cpus", "1"])?;
    agent.sh("echo kept > ~/file; echo kept > /dev/shm/memory")?.succeeded()?;
    let pid = agent.pid()?;
    // The next daemon finds a QEMU that does not work.
    let folder = tempfile::tempdir()?;
    let qemu = folder.path().join("qemu-system-x86_64");
    let no_machine = "echo no machine today >&2; exit 1";
    let real = "exec /usr/bin/qemu-system-x86_64 \"$@\"";
    let program = |script: &str| -> Result<()> {
        fs::write(&qemu, format!("#!/bin/sh\n{script}\n"))?;
        Ok(fs::set_permissions(&qemu, fs::Permissions::from_mode(0o755))?)
    };
    program(no_machine)?;
    server.sigterm()?;
    server.launch(&[("PATH", &format!("{}:/usr/sbin:/usr/bin:/sbin:/bin", folder.path().display()))])?;
    let become_a_machine = || server.dorm(&["set", &agent.name, "--isolation", "vm"]);

    // It is not even stopped where there is no engine, nor where there is one that says what it is and runs no machine,
    let answers = format!("case $1 in --version|-machine) {real};; esac; {no_machine}");
    for script in [no_machine, &answers] {
        program(script)?;
        become_a_machine()?.refused(1, &["vm boxes cannot be run here", "no machine today"])?;
        ensure!(agent.pid()? == pid, "it was stopped: {}", agent.show()?);
        ensure!(agent.sh_text("cat ~/file /dev/shm/memory")? == "kept\nkept");
    }

    // and started again, where there is one and its files cannot be on a disk.
    program(real)?;
    agent.python(LARGE_ATTRIBUTE)?.succeeded()?;
    become_a_machine()?.refused(1, &["another isolation", "cannot make the machine's disk", "extended attribute"])?;
    let shown = agent.show()?;
    ensure!(shown["isolation"] == "container" && shown["state"] == "running", "{shown}");
    ensure!(agent.sh_text("cat ~/file; stat -c %s /srv/noted")? == "kept\n0");
    server.in_order()
}

pub(super) fn an_agent_that_is_deleted_while_its_isolation_changes_goes_without_its_files_being_waited_for() -> Result<()> {
    needs_machines()?;
    let server = Server::start()?;
    for sends in [false, true] {
        let agent = super::machine(&server, "unwanted")?;
        let changed = std::thread::scope(|scope| -> Result<_> {
            let changed = scope.spawn(|| server.dorm(&["set", &agent.name, "--isolation", "container"]));
            agent.becomes("stopping")?;
            if sends {
                let new_home = format!("incoming-{}", agent.id);
                let begun = || Ok(server.remains.homes().contains(&new_home).then_some(()));
                harness::eventually_within(CONVERTED_WITHIN, "the machine sends its files", begun)?;
            }
            server.dorm(&["rm", "--yes", &agent.name])?.succeeded()?;
            changed.join().expect("a command does not panic")
        })?;
        changed.refused(4, &["being deleted"])?;
        ensure!(!server.names()?.contains(&agent.name), "it is still there");
        let log = server.log_text()?;
        let gave_up = |line: &str| line.contains("a transition failed") && line.contains(&agent.name);
        ensure!(log.lines().any(gave_up), "its files were waited for: {log}");
        server.in_order()?;
    }
    Ok(())
}
