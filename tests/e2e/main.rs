//! The end-to-end tests: a real daemon, real boxes, driven by the command line and by HTTP.
//!
//! Needs root. `cargo test -p dorm-e2e --test e2e -- FILTER` runs the tests whose name or feature holds FILTER.
//! `DORM_BIN` names another binary than `target/debug/dorm`; `DORM_E2E_KEEP` leaves the work directory in place;
//! `DORM_E2E_ISOLATION` runs part of them with agents of another isolation, `DORM_E2E_ALL` all in which an engine has a part.
//! `DORM_E2E_REQUIRE` names isolations, with commas in between, that must work here: what would be skipped for want of them fails.
//! `DORM_E2E_SLOWNESS` is how many times as long as usual anything may take, on a machine that is emulated.
//! `DORM_E2E_POOL=file` gives each server its homes in a file of its own, as on hosts without btrfs.

use std::process::ExitCode;

use libtest_mimic::Arguments;

#[allow(dead_code, reason = "the torture needs other parts of it")]
mod harness;

/// One module per feature, each with a list of its tests.
macro_rules! features {
    ($($feature:ident),* $(,)?) => {
        $(mod $feature;)*
        fn features() -> Vec<(&'static str, Vec<harness::Test>)> {
            vec![$((stringify!($feature), $feature::tests())),*]
        }
    };
}

features![
    acme, agents, api, bench, clocks, code, crash, damage, docs, e2b, examples, exec, files, full, gvisor,
    hibernate, images, isolation, limits, matrix, network, policy, ports, power, proxy, runner, scale, sleep,
    streams, survivors, templates, tls, vm, vm_volumes, volumes, workloads
];

const THREADS: usize = 3;
/// Of machines, each of which keeps a processor busy where it is emulated: more of them make each slower than clients wait.
const THREADS_IN_MACHINES: usize = 2;

fn main() -> ExitCode {
    let mut args = Arguments::from_args();
    args.test_threads
        .get_or_insert(match harness::engines::in_machines() {
            true => THREADS_IN_MACHINES,
            false => THREADS,
        });
    let trials = match harness::engines::of_this_run(features()) {
        Ok(trials) => trials,
        Err(error) => {
            eprintln!("error: {error:#}");
            return ExitCode::FAILURE;
        }
    };
    if args.list {
        return libtest_mimic::run(&args, trials).exit_code();
    }
    if let Some(code) = harness::engines::nothing_to_run() {
        return code;
    }
    let interrupted = || {
        harness::World::tear_down();
        std::process::exit(130);
    };
    if let Err(error) = ctrlc::set_handler(interrupted) {
        eprintln!("error: signals cannot be handled: {error}");
        return ExitCode::FAILURE;
    }
    if let Err(error) = harness::World::set_up("dorm-e2e-") {
        eprintln!("error: {error:#}");
        return ExitCode::FAILURE;
    }
    let conclusion = libtest_mimic::run(&args, trials);
    let mut left = harness::Server::finish_shared();
    left.extend(harness::orphans());
    left.iter().for_each(|what| eprintln!("left behind: {what}"));
    harness::World::tear_down();
    if left.is_empty() {
        conclusion.exit_code()
    } else {
        ExitCode::FAILURE
    }
}
