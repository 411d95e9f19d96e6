//! What the end-to-end tests stand on: one work directory per run, servers in it, agents that clean up
//! after themselves, and a look for remains after every test.
//!
//! ```text
//!  /var/tmp/dorm-e2e-PID/
//!    pool.img ──loop──▶ pool/     one btrfs for all servers of this run
//!                         seed/   a data directory in which `base` was built
//!                         shared/, own-1/, …  data directories that begin as copies of it
//!    *.log                        what each daemon said
//! ```

use std::cell::RefCell;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use anyhow::Result;
use libtest_mimic::{Completion, Failed, Trial};

mod agent;
mod archive;
mod cli;
pub(crate) mod engines;
pub(crate) mod holder;
mod host;
pub(crate) mod order;
mod outside;
mod pty;
mod remains;
mod sdk;
mod seed;
mod server;
mod wait;
mod web;
mod world;

pub(crate) use agent::Agent;
pub(crate) use archive::{TarFile, rootfs, rootfs_with, tar};
pub(crate) use cli::{Output, binary, run, run_within};
pub(crate) use host::{child_of, orphans, unless_gone};
pub(crate) use outside::{Outside, Record, answers_peer_address, resolve};
pub(crate) use pty::Terminal;
pub(crate) use sdk::{Sdk, run_script, script_command};
pub(crate) use server::{CALM, Options, Server};
pub(crate) use wait::{eventually, eventually_within, slowness};
pub(crate) use web::Reply;
pub(crate) use world::World;

pub(crate) struct Test {
    pub(crate) name: &'static str,
    pub(crate) run: fn() -> Result<()>,
}

/// Lists the tests of a file. A function that is left out is unused, which the lints refuse.
macro_rules! tests {
    ($($name:ident),* $(,)?) => {
        pub(crate) fn tests() -> Vec<crate::harness::Test> {
            vec![$(crate::harness::Test { name: stringify!($name), run: $name }),*]
        }
    };
}
pub(crate) use tests;

/// An error that says why a test could not be done here.
#[derive(Debug)]
pub(crate) struct Skip(pub(crate) String);

impl fmt::Display for Skip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Skip {}

thread_local! {
    /// What the test on this thread left behind, and where its daemons' logs are.
    static FOUND: RefCell<Found> = RefCell::default();
}

#[derive(Default)]
struct Found {
    leaks: Vec<String>,
    logs: Vec<std::path::PathBuf>,
}

fn leaked(what: impl IntoIterator<Item = String>) {
    FOUND.with_borrow_mut(|found| found.leaks.extend(what));
}

fn log_of_interest(log: &std::path::Path) {
    FOUND.with_borrow_mut(|found| {
        if !found.logs.iter().any(|known| known == log) {
            found.logs.push(log.to_owned());
        }
    });
}

/// A test as the runner sees it: the function, then the look for remains.
pub(crate) fn trial(feature: &'static str, test: Test) -> Trial {
    let run = move || {
        FOUND.take();
        let marks = server::log_marks();
        let result = catch_unwind(AssertUnwindSafe(test.run));
        let found = FOUND.take();
        let mut trouble = match result {
            Ok(Ok(())) => String::new(),
            Ok(Err(error)) => match error.downcast_ref::<Skip>() {
                Some(skip) => return Ok(Completion::ignored_with(skip)),
                None => format!("{error:#}"),
            },
            Err(panic) => said(panic.as_ref()),
        };
        for leak in found.leaks {
            trouble += &format!("\nleft behind: {leak}");
        }
        if trouble.is_empty() {
            return Ok(Completion::Completed);
        }
        for log in found.logs {
            trouble += &server::log_since(&log, &marks);
        }
        Err(Failed::from(trouble))
    };
    Trial::ignorable_test(test.name.replace('_', " "), run).with_kind(feature)
}

fn said(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| panic.downcast_ref::<&str>().copied());
    format!("panicked: {}", text.unwrap_or("without words"))
}
