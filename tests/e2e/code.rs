//! The unmodified SDKs of E2B's code interpreter against a real server. What they are to do is in `sdk/`, in their own languages.

use anyhow::{Result, ensure};

use crate::harness::{self, Sdk, Server, run_script};

harness::tests![
    the_python_sdk_runs_code_and_gets_results_of_every_kind,
    the_python_sdk_keeps_contexts_apart,
    the_asynchronous_python_sdk_runs_code_side_by_side,
    the_javascript_sdk_runs_code_in_every_language,
    what_runs_too_long_is_interrupted_and_keeps_what_it_had,
    kernels_of_every_language_go_on_after_a_sleep_on_disk,
    a_code_server_that_ends_is_started_again,
    code_goes_on_over_snapshots_forks_and_sleeps,
    code_that_prints_more_than_is_read_waits,
];

fn passes(sdk: &Sdk, script: &str) -> Result<()> {
    let server = Server::with_code_interpreter()?;
    run_script(&server, sdk, script, &[]).map(drop)
}

fn the_python_sdk_runs_code_and_gets_results_of_every_kind() -> Result<()> {
    passes(&Sdk::Python, "code_results.py")
}

fn the_python_sdk_keeps_contexts_apart() -> Result<()> {
    passes(&Sdk::Python, "code_contexts.py")
}

fn the_asynchronous_python_sdk_runs_code_side_by_side() -> Result<()> {
    passes(&Sdk::Python, "code_async.py")
}

fn the_javascript_sdk_runs_code_in_every_language() -> Result<()> {
    passes(&Sdk::Node, "code.mjs")
}

fn what_runs_too_long_is_interrupted_and_keeps_what_it_had() -> Result<()> {
    passes(&Sdk::Python, "code_interrupts.py")
}

fn a_code_server_that_ends_is_started_again() -> Result<()> {
    passes(&Sdk::Python, "code_restarts.py")
}

fn code_goes_on_over_snapshots_forks_and_sleeps() -> Result<()> {
    passes(&Sdk::Python, "code_goes_on.py")
}

fn code_that_prints_more_than_is_read_waits() -> Result<()> {
    passes(&Sdk::Python, "code_floods.py")
}

fn kernels_of_every_language_go_on_after_a_sleep_on_disk() -> Result<()> {
    let server = Server::with_code_interpreter()?;
    let id = run_script(&server, &Sdk::Python, "code_sleeps.py", &["begin"])?;
    for _ in 0..2 {
        server.dorm(&["hibernate", &id])?.succeeded()?;
        run_script(&server, &Sdk::Python, "code_sleeps.py", &["go-on", &id])?;
    }
    run_script(&server, &Sdk::Python, "code_sleeps.py", &["pause", &id])?;
    run_script(&server, &Sdk::Python, "code_sleeps.py", &["end", &id])?;
    ensure!(!server.names()?.contains(&id), "the sandbox is still there");
    Ok(())
}
