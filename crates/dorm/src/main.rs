//! The `dorm` binary: `dorm serve` is the daemon, every other verb a client of it.
//!
//! ```text
//!   main ──▶ cli (verbs, flags) ──▶ cmd/<verb> ──▶ client ──HTTP──▶ the daemon ──▶ guest
//!                                   cmd/serve  ──▶ config ──▶ dorm_server on dorm_engine
//! ```
//!
//! The daemon starts this program again as `dorm __launch` to make a box. That path comes before
//! everything else, because it must stay single-threaded.

mod attach;
mod cli;
mod client;
mod cmd;
mod config;
mod daemon;
mod env;
mod exit;
mod notify;
mod output;
mod progress;
mod recipe;
mod size;
mod terminal;
mod transfer;

use clap::Parser;
use tokio::signal::unix::{SignalKind, signal};

fn main() {
    // Before any thread: see the module's documentation.
    if std::env::args_os()
        .nth(1)
        .is_some_and(|arg| arg == dorm_engine::launch::SUBCOMMAND)
    {
        dorm_engine::launch::main();
    }
    let cli = cli::Cli::parse();
    let json = cli.global.json;
    terminal::restore_on_panic();
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(e) => std::process::exit(exit::report(
            &anyhow::Error::new(e).context("cannot start threads"),
            json,
        )),
    };
    let code = runtime.block_on(async {
        let own_interrupts = cli.verb.handles_interrupts();
        let result = tokio::select! {
            result = cli.verb.run(&cli.global) => result,
            code = interrupted(), if !own_interrupts => Err(exit::Quiet(code).into()),
        };
        result.map_or_else(|e| exit::report(&e, json), |()| 0)
    });
    terminal::restore();
    // Not by dropping the runtime: that would wait for a thread that reads from stdin.
    std::process::exit(code)
}

/// Dropping the verb's work on Ctrl-C or SIGTERM, instead of dying of it, removes its temporary files.
async fn interrupted() -> i32 {
    let Ok(mut terminate) = signal(SignalKind::terminate()) else {
        return std::future::pending().await;
    };
    let Ok(mut interrupt) = signal(SignalKind::interrupt()) else {
        return std::future::pending().await;
    };
    tokio::select! {
        _ = interrupt.recv() => exit::INTERRUPTED,
        _ = terminate.recv() => exit::TERMINATED,
    }
}
