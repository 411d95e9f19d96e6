//! Trying out on this host what an engine needs.

use std::fs::File;
use std::io;
use std::process::{Command, Output, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// The device of the processor's own means to run machines.
pub(crate) const KVM: &str = "/dev/kvm";

/// Whether KVM is worth a trial: the device opens, and the processor says that it can run machines. A device alone may be one that runs no
/// ordinary kernel.
pub(crate) fn kvm_is_there() -> bool {
    let opens = File::options().read(true).write(true).open(KVM).is_ok();
    opens && std::fs::read_to_string("/proc/cpuinfo").is_ok_and(|processors| runs_machines(&processors))
}

fn runs_machines(processors: &str) -> bool {
    let flags = |line: &str| {
        let (name, flags) = line.split_once(':')?;
        (name.trim() == "flags").then(|| flags.to_owned())
    };
    // Other architectures do not say.
    let mut all = processors.lines().filter_map(flags).peekable();
    let says = |flags: String| {
        flags
            .split_whitespace()
            .any(|flag| flag == "vmx" || flag == "svm")
    };
    all.peek().is_none() || all.any(says)
}

/// What a program said, and how long it took. It is killed when it takes too long, and ends with the daemon.
pub(crate) fn run_within(command: &Command, patience: Duration) -> io::Result<(Output, Duration)> {
    let began = Instant::now();
    let child = Command::new("setpriv")
        .args(["--pdeathsig", "KILL"])
        .arg(command.get_program())
        .args(command.get_args())
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let pid = Pid::from_raw(child.id().cast_signed());
    let (done, ended) = channel::<()>();
    let watchdog = std::thread::spawn(move || {
        let late = ended.recv_timeout(patience) == Err(RecvTimeoutError::Timeout);
        if let Some(pid) = pid.filter(|_| late) {
            let _ = kill_process(pid, Signal::KILL);
        }
    });
    let output = child.wait_with_output();
    let took = began.elapsed();
    drop(done);
    let _ = watchdog.join();
    Ok((output?, took))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_processor_without_means_for_machines_is_known_by_its_flags() {
        assert!(runs_machines("processor : 0\nflags\t\t: fpu svm lm\n"));
        assert!(runs_machines("flags\t\t: fpu vmx\n"));
        assert!(!runs_machines("flags\t\t: fpu hypervisor\nvmx flags\t: vmx\n"));
        assert!(runs_machines("Features\t: fp asimd\n"));
    }

    #[test]
    fn a_program_that_does_not_end_is_killed() {
        let (said, _) = run_within(Command::new("echo").arg("done"), Duration::from_secs(60)).unwrap();
        assert!(said.status.success());
        assert_eq!(said.stdout, b"done\n");
        let endless = run_within(Command::new("sleep").arg("600"), Duration::from_millis(50));
        assert!(!endless.unwrap().0.status.success());
    }
}
