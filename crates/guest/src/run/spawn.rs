//! Starts a process: session, descriptors, limits, user, folder, exec.
//!
//! The child shares the guest's memory until it executes (`CLONE_VM | CLONE_VFORK`), so that starting
//! a process does not cost a copy of the page tables, and it reports a failure by storing it. Between clone
//! and exec it may therefore only make plain system calls: no allocation, no locks, no C library function that
//! keeps state. All it needs is laid out beforehand in [`Plan`].

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::io;
use std::os::fd::RawFd;
use std::ptr;
use std::sync::atomic::{AtomicI32, AtomicU8, Ordering};
use std::sync::{LazyLock, Mutex};

use crate::{machine, sys};

/// What is to be started, checked and laid out.
pub(super) struct Launch {
    /// Paths to try in this order.
    pub(super) programs: Vec<CString>,
    pub(super) args: Vec<CString>,
    pub(super) env: Vec<CString>,
    pub(super) cwd: CString,
    /// Where to go if `cwd` cannot be entered.
    pub(super) cwd_fallback: Option<CString>,
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) groups: Vec<libc::gid_t>,
    pub(super) stdio: [RawFd; 3],
    /// Descriptor 0 becomes the controlling terminal.
    pub(super) terminal: bool,
    pub(super) limits: Vec<(libc::__rlimit_resource_t, u64)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Step {
    Clone = 0,
    Session,
    Descriptors,
    Terminal,
    Limits,
    User,
    Folder,
    Exec,
}

#[derive(Debug)]
pub(super) struct SpawnError {
    pub(super) step: Step,
    pub(super) source: io::Error,
}

struct Plan<'a> {
    launch: &'a Launch,
    argv: Vec<*const c_char>,
    envp: Vec<*const c_char>,
    switch_user: bool,
    oom_score: &'static CStr,
    /// Where it joins a control group, in a machine.
    group: Option<&'static CStr>,
    failed_step: AtomicU8,
    errno: AtomicI32,
}

const STACK_SIZE: usize = 32 * 1024;

/// The child's stack, used by one child at a time: a clone with `CLONE_VFORK` returns when the child has left it.
static STACK: Mutex<Vec<u128>> = Mutex::new(Vec::new());

fn pointers(strings: &[CString]) -> Vec<*const c_char> {
    strings.iter().map(|s| s.as_ptr()).chain([ptr::null()]).collect()
}

/// Starts the process and gives its pid. Returns when the program runs, or has failed to.
pub(super) fn spawn(launch: &Launch) -> Result<i32, SpawnError> {
    let plan = Plan {
        launch,
        argv: pointers(&launch.args),
        envp: pointers(&launch.env),
        switch_user: sys::is_root(),
        oom_score: &OOM_SCORE,
        group: machine::join_file(),
        failed_step: AtomicU8::new(0),
        errno: AtomicI32::new(0),
    };
    let mut stack = STACK.lock().expect("no holder panics");
    stack.resize(STACK_SIZE / size_of::<u128>(), 0);
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
    // SAFETY: all signals are blocked around the clone, so that no handler of ours runs in the child on shared
    // memory. The stack is exclusively ours, 16-byte aligned, and outlives the child's use of it, because
    // CLONE_VFORK suspends this thread until the child has executed or exited; the same holds for `plan`.
    let (pid, clone_error) = unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        let mut old: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut old);
        let top = stack.as_mut_ptr().add(stack.len()).cast::<c_void>();
        let pid = libc::clone(child, top, flags, ptr::from_ref(&plan).cast_mut().cast());
        let error = io::Error::last_os_error();
        libc::pthread_sigmask(libc::SIG_SETMASK, &old, ptr::null_mut());
        // A change of user in the child has marked the shared memory as not to be dumped.
        libc::prctl(libc::PR_SET_DUMPABLE, 1, 0, 0, 0);
        (pid, error)
    };
    drop(stack);
    if pid < 0 {
        return Err(SpawnError {
            step: Step::Clone,
            source: clone_error,
        });
    }
    match plan.errno.load(Ordering::Acquire) {
        0 => Ok(pid),
        errno => {
            let steps = [
                Step::Session,
                Step::Descriptors,
                Step::Terminal,
                Step::Limits,
                Step::User,
                Step::Folder,
                Step::Exec,
            ];
            let step = plan.failed_step.load(Ordering::Acquire);
            let step = steps
                .into_iter()
                .find(|s| *s as u8 == step)
                .unwrap_or(Step::Clone);
            Err(SpawnError {
                step,
                source: io::Error::from_raw_os_error(errno),
            })
        }
    }
}

extern "C" fn child(arg: *mut c_void) -> c_int {
    // SAFETY: `arg` is the parent's `plan`, alive until this process executes or exits.
    let plan = unsafe { &*arg.cast::<Plan<'_>>() };
    let (step, errno) = prepare_and_exec(plan);
    plan.failed_step.store(step as u8, Ordering::Release);
    plan.errno.store(errno, Ordering::Release);
    // SAFETY: ends this process without running anything of the parent's.
    unsafe { libc::_exit(127) }
}

fn errno() -> i32 {
    // SAFETY: the location is valid for the calling thread.
    unsafe { *libc::__errno_location() }
}

/// Turns a raw system call's result into the step that failed.
fn at(step: Step, result: libc::c_long) -> Result<(), (Step, i32)> {
    if result < 0 { Err((step, errno())) } else { Ok(()) }
}

fn prepare_and_exec(plan: &Plan<'_>) -> (Step, i32) {
    match prepare(plan) {
        Err(failure) => failure,
        Ok(()) => (Step::Exec, exec(plan)),
    }
}

fn prepare(plan: &Plan<'_>) -> Result<(), (Step, i32)> {
    let launch = plan.launch;
    // SAFETY: plain system calls, by number where the C library would do more than the call. Pointers
    // lead into `plan`, which outlives this process's use of it; descriptors 0 to 2 are this process's own copies.
    unsafe {
        at(Step::Session, libc::syscall(libc::SYS_setsid))?;
        // What the box has done to its groups is its own affair.
        if let Some(group) = plan.group {
            write_to(group, c"0");
        }
        for (i, fd) in launch.stdio.iter().enumerate() {
            at(Step::Descriptors, libc::syscall(libc::SYS_dup3, *fd, i, 0))?;
        }
        if launch.terminal {
            at(
                Step::Terminal,
                libc::syscall(libc::SYS_ioctl, 0, libc::TIOCSCTTY, 0),
            )?;
        }
        write_to(OOM_SCORE_FILE, plan.oom_score);
        for (resource, value) in &launch.limits {
            limit(*resource, *value)?;
        }
        if plan.switch_user {
            let groups = &launch.groups;
            at(
                Step::User,
                libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()),
            )?;
            at(
                Step::User,
                libc::syscall(libc::SYS_setresgid, launch.gid, launch.gid, launch.gid),
            )?;
            at(
                Step::User,
                libc::syscall(libc::SYS_setresuid, launch.uid, launch.uid, launch.uid),
            )?;
        }
        if let Err(failure) = at(Step::Folder, libc::syscall(libc::SYS_chdir, launch.cwd.as_ptr())) {
            let fallback = launch.cwd_fallback.as_ref().ok_or(failure)?;
            at(Step::Folder, libc::syscall(libc::SYS_chdir, fallback.as_ptr()))?;
        }
        // Handlers go away with exec; only what is ignored would stay. Rust ignores SIGPIPE.
        let mut default: libc::sigaction = std::mem::zeroed();
        default.sa_sigaction = libc::SIG_DFL;
        libc::sigaction(libc::SIGPIPE, &default, ptr::null_mut());
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &none, ptr::null_mut());
    }
    Ok(())
}

const OOM_SCORE_FILE: &CStr = c"/proc/self/oom_score_adj";

/// When memory runs out, a run should go before process 1 does, whatever score that was given: a fifth of
/// the box's memory lies between them.
static OOM_SCORE: LazyLock<CString> = LazyLock::new(|| {
    let own = OOM_SCORE_FILE
        .to_str()
        .ok()
        .and_then(|file| std::fs::read_to_string(file).ok());
    let own: i32 = own.and_then(|text| text.trim().parse().ok()).unwrap_or(0);
    CString::new((own + 200).min(1000).to_string()).unwrap_or_default()
});

/// Writes to a file of the kernel's, if it takes it.
fn write_to(file: &CStr, text: &CStr) {
    // SAFETY: plain system calls on strings that live on and a descriptor of this process.
    unsafe {
        let flags = libc::O_WRONLY | libc::O_CLOEXEC;
        let fd = libc::syscall(libc::SYS_openat, libc::AT_FDCWD, file.as_ptr(), flags, 0);
        if fd >= 0 {
            libc::syscall(libc::SYS_write, fd, text.as_ptr(), text.to_bytes().len());
            libc::syscall(libc::SYS_close, fd);
        }
    }
}

fn limit(resource: libc::__rlimit_resource_t, value: u64) -> Result<(), (Step, i32)> {
    // SAFETY: prlimit64 reads and writes the given rlimit64 structures, which live on this stack.
    unsafe {
        let mut now: libc::rlimit64 = std::mem::zeroed();
        let none = ptr::null::<libc::rlimit64>();
        at(
            Step::Limits,
            libc::syscall(libc::SYS_prlimit64, 0, resource, none, &mut now),
        )?;
        let value = if value > now.rlim_max { now.rlim_max } else { value };
        let new = libc::rlimit64 {
            rlim_cur: value,
            rlim_max: value,
        };
        at(
            Step::Limits,
            libc::syscall(
                libc::SYS_prlimit64,
                0,
                resource,
                &new,
                ptr::null_mut::<libc::rlimit64>(),
            ),
        )
    }
}

/// Tries the programs in order, as execvp does. Returns only if none could be executed.
fn exec(plan: &Plan<'_>) -> i32 {
    let mut denied = false;
    let mut last = libc::ENOENT;
    for program in &plan.launch.programs {
        // SAFETY: path, arguments and environment are NUL-terminated strings in NULL-terminated arrays.
        unsafe {
            libc::syscall(
                libc::SYS_execve,
                program.as_ptr(),
                plan.argv.as_ptr(),
                plan.envp.as_ptr(),
            )
        };
        last = errno();
        match last {
            libc::EACCES => denied = true,
            libc::ENOENT | libc::ENOTDIR | libc::ENAMETOOLONG | libc::ELOOP => {}
            _ => return last,
        }
    }
    if denied { libc::EACCES } else { last }
}
