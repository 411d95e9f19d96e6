//! What process 1 of a box gives up before it runs anything: capabilities and system calls.

use std::io;

use rustix::thread::CapabilitySet;
use seccompiler::TargetArch;
use serde_json::{Value, json};

/// What root of a box may do inside its user namespace: the set that container runtimes give by
/// default, and what debuggers of the box's own namespaces need.
pub const BOX_CAPABILITIES: CapabilitySet = CapabilitySet::CHOWN
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::FSETID)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::MKNOD)
    .union(CapabilitySet::NET_RAW)
    .union(CapabilitySet::NET_BIND_SERVICE)
    .union(CapabilitySet::SETGID)
    .union(CapabilitySet::SETUID)
    .union(CapabilitySet::SETFCAP)
    .union(CapabilitySet::SETPCAP)
    .union(CapabilitySet::SYS_CHROOT)
    .union(CapabilitySet::SYS_PTRACE)
    .union(CapabilitySet::KILL)
    .union(CapabilitySet::AUDIT_WRITE);

/// Takes every capability outside `keep` from what any later program of this process can have.
pub fn bound_capabilities(keep: CapabilitySet) -> io::Result<()> {
    for bit in 0..64 {
        let capability = CapabilitySet::from_bits_retain(1 << bit);
        if keep.contains(capability) {
            continue;
        }
        match rustix::thread::remove_capability_from_bounding_set(capability) {
            Ok(()) => {}
            // The kernel knows no capability of this number, nor any higher one.
            Err(rustix::io::Errno::INVAL) => break,
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Leaves this thread, and all that it starts, no capability outside `keep`.
pub fn keep_capabilities(keep: CapabilitySet) -> io::Result<()> {
    bound_capabilities(keep)?;
    let mut sets = rustix::thread::capabilities(None)?;
    sets.permitted &= keep;
    sets.effective = sets.permitted;
    sets.inheritable = CapabilitySet::empty();
    Ok(rustix::thread::set_capabilities(None, sets)?)
}

/// What a server of files needs to do for the users of a box what they may do themselves.
pub const FILE_CAPABILITIES: CapabilitySet = CapabilitySet::CHOWN
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::FSETID)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::SETGID)
    .union(CapabilitySet::SETUID);

/// Makes the thread, and the programs it executes, the user `uid` with all the capabilities that it has now.
///
/// The owner of a user namespace may do everything in it, also where the host's root lacks a capability; and what
/// such a program makes there counts as the owner's.
pub fn become_user_with_capabilities(uid: u32) -> io::Result<()> {
    let uid = rustix::thread::Uid::from_raw(uid);
    rustix::thread::set_keep_capabilities(true)?;
    rustix::thread::set_thread_res_uid(uid, uid, uid)?;
    let mut sets = rustix::thread::capabilities(None)?;
    sets.effective = sets.permitted;
    sets.inheritable = sets.permitted;
    rustix::thread::set_capabilities(None, sets)?;
    for capability in sets.permitted.iter() {
        rustix::thread::configure_capability_in_ambient_set(capability, true)?;
    }
    Ok(())
}

/// Calls that are refused as not permitted, so that programs say the right thing about them.
const FORBIDDEN: &str = "acct add_key bpf clock_adjtime clock_settime create_module delete_module \
    finit_module fsconfig fsmount fsopen fspick get_mempolicy init_module ioperm iopl kcmp kexec_file_load kexec_load \
    keyctl lookup_dcookie mbind mount mount_setattr move_mount move_pages name_to_handle_at nfsservctl open_by_handle_at \
    open_tree perf_event_open pivot_root quotactl quotactl_fd reboot request_key \
    set_mempolicy setdomainname sethostname setns settimeofday swapoff swapon sysfs syslog umount umount2 unshare uselib \
    userfaultfd ustat vhangup io_uring_setup io_uring_enter io_uring_register adjtimex";

/// Everything an ordinary program calls. What is on neither list does not exist for the box.
const ALLOWED: &str = "accept accept4 access alarm arch_prctl bind brk cachestat capget capset chdir chmod chown chroot \
    clock_getres clock_gettime clock_nanosleep close close_range connect copy_file_range creat dup dup2 dup3 \
    epoll_create epoll_create1 epoll_ctl epoll_ctl_old epoll_pwait epoll_pwait2 epoll_wait epoll_wait_old eventfd eventfd2 execve \
    execveat exit exit_group faccessat faccessat2 fadvise64 fallocate fanotify_mark fchdir fchmod fchmodat fchmodat2 fchown \
    fchownat fcntl fdatasync fgetxattr flistxattr flock fork fremovexattr fsetxattr fstat fstatfs fsync ftruncate futex \
    futex_requeue futex_wait futex_waitv futex_wake futimesat getcpu getcwd getdents getdents64 getegid geteuid getgid \
    getgroups getitimer getpeername getpgid getpgrp getpid getppid getpriority getrandom getresgid getresuid getrlimit \
    get_robust_list getrusage getsid getsockname getsockopt get_thread_area gettid gettimeofday getuid getxattr \
    inotify_add_watch inotify_init inotify_init1 inotify_rm_watch io_cancel ioctl io_destroy io_getevents io_pgetevents \
    ioprio_get ioprio_set io_setup io_submit kill landlock_add_rule landlock_create_ruleset landlock_restrict_self lchown \
    lgetxattr link linkat listen listxattr llistxattr lremovexattr lseek lsetxattr lstat madvise map_shadow_stack membarrier memfd_create \
    memfd_secret mincore mkdir mkdirat mknod mknodat mlock mlock2 mlockall mmap modify_ldt mprotect mq_getsetattr mq_notify mq_open \
    mq_timedreceive mq_timedsend mq_unlink mremap mseal msgctl msgget msgrcv msgsnd msync munlock munlockall munmap nanosleep newfstatat \
    open openat openat2 pause pidfd_getfd pidfd_open pidfd_send_signal pipe pipe2 pkey_alloc pkey_free pkey_mprotect poll ppoll prctl \
    pread64 preadv preadv2 prlimit64 process_madvise process_mrelease process_vm_readv process_vm_writev pselect6 ptrace \
    pwrite64 pwritev pwritev2 read readahead readlink readlinkat readv recvfrom recvmmsg recvmsg remap_file_pages \
    removexattr rename renameat renameat2 restart_syscall rmdir rseq rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo \
    rt_sigreturn rt_sigsuspend rt_sigtimedwait rt_tgsigqueueinfo sched_getaffinity sched_getattr sched_getparam \
    sched_get_priority_max sched_get_priority_min sched_getscheduler sched_rr_get_interval sched_setaffinity sched_setattr \
    sched_setparam sched_setscheduler sched_yield seccomp select semctl semget semop semtimedop sendfile sendmmsg \
    sendmsg sendto setfsgid setfsuid setgid setgroups setitimer setpgid setpriority setregid setresgid setresuid setreuid setrlimit \
    set_robust_list setsid setsockopt set_thread_area set_tid_address setuid setxattr shmat shmctl shmdt shmget shutdown \
    sigaltstack signalfd signalfd4 socketpair splice stat statfs statx symlink symlinkat sync sync_file_range syncfs \
    sysinfo tee tgkill time timer_create timer_delete timerfd_create timerfd_gettime timerfd_settime timer_getoverrun \
    timer_gettime timer_settime times tkill truncate umask uname unlink unlinkat utime utimensat utimes vfork \
    vmsplice wait4 waitid write writev personality setxattrat getxattrat listxattrat removexattrat";

/// What a server of files calls, and nothing else.
const FOR_FILES: &str = "arch_prctl brk capget capset clock_gettime clock_nanosleep close dup dup2 dup3 exit exit_group \
    fallocate fchmod fchmodat2 fchownat fcntl fdatasync fgetxattr flistxattr fremovexattr fsetxattr fstat fstatfs fsync ftruncate futex \
    getdents64 getpid getrandom gettid linkat lseek madvise mkdirat mknodat mmap mprotect mremap munmap nanosleep newfstatat openat2 poll \
    prctl pread64 pwrite64 pwritev2 read readlinkat recvfrom renameat2 restart_syscall rseq rt_sigaction rt_sigprocmask rt_sigreturn \
    sched_getaffinity sched_yield seccomp sendto set_robust_list setresgid setresuid setsockopt shutdown sigaltstack statx symlinkat tgkill \
    unlinkat utimensat write";

/// The box's system call filter, compiled: made once, installed in every box.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SystemCallFilter {
    /// BPF instructions of eight bytes each. Of two programs that refuse with an error, the one
    /// installed last has its way, so the forbidden list comes last.
    programs: [Vec<u8>; 2],
}

/// Flags of clone(2) that make namespaces, which are for the host to give.
const CLONE_NAMESPACE_FLAGS: i32 = libc::CLONE_NEWNS
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET
    | libc::CLONE_NEWCGROUP;

/// What ordinary programs talk through. Of the others, vsock would lead to the hypervisor, and most lead to code of the
/// kernel that few have looked at.
const SOCKET_FAMILIES: [i32; 5] = [
    libc::AF_UNIX,
    libc::AF_INET,
    libc::AF_INET6,
    libc::AF_NETLINK,
    libc::AF_PACKET,
];

const BTRFS_IOCTL_TYPE: u32 = 0x9400;
/// FICLONE, FICLONERANGE and FIDEDUPERANGE, which cp and others use on every filesystem.
const BTRFS_CLONE_IOCTLS: [u32; 3] = [0x4004_9409, 0x4020_940D, 0xC018_9436];

impl SystemCallFilter {
    pub fn compile() -> io::Result<Self> {
        let mut allowed: Vec<Value> = ALLOWED
            .split_whitespace()
            .map(|name| json!({ "syscall": name }))
            .collect();
        allowed.push(clone_without_namespaces());
        allowed.extend(SOCKET_FAMILIES.map(|family| {
            json!({ "syscall": "socket", "args": [{ "index": 0, "type": "dword", "op": "eq", "val": family }] })
        }));
        let mut forbidden: Vec<Value> = FORBIDDEN
            .split_whitespace()
            .map(|name| json!({ "syscall": name }))
            .collect();
        // Of btrfs' own ioctls only those on file contents: a subvolume made in a box would have no quota.
        let mut btrfs = vec![
            json!({ "index": 1, "type": "dword", "op": { "masked_eq": 0xFF00 }, "val": BTRFS_IOCTL_TYPE }),
        ];
        btrfs
            .extend(BTRFS_CLONE_IOCTLS.map(|c| json!({ "index": 1, "type": "dword", "op": "ne", "val": c })));
        forbidden.push(json!({ "syscall": "ioctl", "args": btrfs }));
        Ok(Self {
            programs: [
                compile(allowed, json!({ "errno": libc::ENOSYS }), json!("allow"))?,
                compile(forbidden, json!("allow"), json!({ "errno": libc::EPERM }))?,
            ],
        })
    }

    /// The filter of a process that serves files, and executes nothing.
    pub fn for_files() -> io::Result<Self> {
        let mut allowed: Vec<Value> = FOR_FILES
            .split_whitespace()
            .map(|name| json!({ "syscall": name }))
            .collect();
        allowed.push(clone_without_namespaces());
        let forbidden = FORBIDDEN
            .split_whitespace()
            .map(|name| json!({ "syscall": name }));
        Ok(Self {
            programs: [
                compile(allowed, json!({ "errno": libc::ENOSYS }), json!("allow"))?,
                compile(
                    forbidden.collect(),
                    json!("allow"),
                    json!({ "errno": libc::EPERM }),
                )?,
            ],
        })
    }

    /// Installs the filter on this thread and on everything it becomes.
    ///
    /// Needs CAP_SYS_ADMIN in the current user namespace, because no_new_privs stays off: setuid
    /// programs such as sudo must work in a box.
    pub fn install(&self) -> io::Result<()> {
        self.programs.iter().try_for_each(|program| install(program))
    }

    pub fn to_bytes(&self) -> Vec<u8> {
        let [first, second] = &self.programs;
        [&(first.len() as u32).to_le_bytes()[..], first, second].concat()
    }

    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (length, programs) = bytes.split_at_checked(4)?;
        let length = u32::from_le_bytes(length.try_into().ok()?) as usize;
        let (first, second) = programs.split_at_checked(length)?;
        Some(Self {
            programs: [first.to_vec(), second.to_vec()],
        })
    }
}

/// clone3 hides its flags behind a pointer, so it is said not to exist, and the C library falls back to clone, whose flags can
/// be looked at.
fn clone_without_namespaces() -> Value {
    json!({ "syscall": "clone", "args": [
        { "index": 0, "type": "qword", "op": { "masked_eq": CLONE_NAMESPACE_FLAGS }, "val": 0 }
    ]})
}

/// Compiles rules by name, leaving out the names that this architecture does not have.
fn compile(rules: Vec<Value>, otherwise: Value, matched: Value) -> io::Result<Vec<u8>> {
    let arch = TargetArch::try_from(std::env::consts::ARCH).map_err(io::Error::other)?;
    let program = |rules: &[Value]| {
        let filter =
            json!({ "box": { "mismatch_action": otherwise, "match_action": matched, "filter": rules } });
        seccompiler::compile_from_json(filter.to_string().as_bytes(), arch)
    };
    let known: Vec<Value> = rules
        .into_iter()
        .filter(|rule| program(std::slice::from_ref(rule)).is_ok())
        .collect();
    let program = program(&known)
        .map_err(io::Error::other)?
        .remove("box")
        .unwrap_or_default();
    let bytes = |i: &seccompiler::sock_filter| {
        let [c0, c1] = i.code.to_ne_bytes();
        let [k0, k1, k2, k3] = i.k.to_ne_bytes();
        [c0, c1, i.jt, i.jf, k0, k1, k2, k3]
    };
    Ok(program.iter().flat_map(bytes).collect())
}

fn install(program: &[u8]) -> io::Result<()> {
    let mut instructions: Vec<libc::sock_filter> = program
        .chunks_exact(8)
        .map(|c| libc::sock_filter {
            code: u16::from_ne_bytes([c[0], c[1]]),
            jt: c[2],
            jf: c[3],
            k: u32::from_ne_bytes([c[4], c[5], c[6], c[7]]),
        })
        .collect();
    let fprog = libc::sock_fprog {
        len: instructions.len() as u16,
        filter: instructions.as_mut_ptr(),
    };
    // SAFETY: `fprog` points to `len` instructions that outlive the call; the kernel copies and checks them.
    match unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            0,
            &raw const fprog,
        )
    } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_filter_survives_its_way_to_the_launcher() {
        let filter = SystemCallFilter::compile().unwrap();
        assert_eq!(SystemCallFilter::from_bytes(&filter.to_bytes()), Some(filter));
    }

    #[test]
    fn no_call_is_both_allowed_and_forbidden() {
        let allowed: Vec<_> = ALLOWED.split_whitespace().collect();
        let both: Vec<_> = FORBIDDEN
            .split_whitespace()
            .filter(|name| allowed.contains(name))
            .collect();
        assert!(both.is_empty(), "{both:?}");
    }

    #[test]
    fn both_programs_fit_into_what_the_kernel_takes() {
        let filter = SystemCallFilter::compile().unwrap();
        assert!(
            filter
                .programs
                .iter()
                .all(|p| p.len() / 8 <= 4096 && p.len() > 8 * 40)
        );
    }
}
