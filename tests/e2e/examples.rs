//! The programs in `examples/`, as they are: each must succeed, say what it did, and leave nothing.

use std::sync::Arc;

use anyhow::{Result, ensure};

use crate::harness::{self, Sdk, Server, run_script};

harness::tests![
    a_coding_agent_works_in_ten_sessions,
    two_coding_agents_work_side_by_side,
    a_coding_agent_in_typescript_works_in_ten_sessions,
    a_data_analysis_keeps_its_table_over_pauses,
    data_analyses_side_by_side_keep_their_data_over_a_pause,
    a_data_analysis_in_typescript_keeps_its_data_over_a_pause,
    a_dev_server_is_woken_by_its_preview,
    dev_servers_are_woken_all_at_once,
    a_dev_server_in_typescript_is_woken_by_its_preview,
];

fn says(server: &Arc<Server>, sdk: &Sdk, example: &str, last: &str) -> Result<()> {
    let said = run_script(server, sdk, example, &[])?;
    ensure!(said.lines().last().is_some_and(|line| line.contains(last)), "{example} said:\n{said}");
    Ok(())
}

fn a_coding_agent_works_in_ten_sessions() -> Result<()> {
    says(&Server::shared()?, &Sdk::Python, "coding_agent.py", "10 sessions, 11 commits")
}

fn two_coding_agents_work_side_by_side() -> Result<()> {
    says(&Server::shared()?, &Sdk::Python, "coding_agent_async.py", "both came to the tree")
}

fn a_coding_agent_in_typescript_works_in_ten_sessions() -> Result<()> {
    says(&Server::shared()?, &Sdk::Node, "coding_agent.ts", "10 sessions, 11 commits")
}

fn a_data_analysis_keeps_its_table_over_pauses() -> Result<()> {
    says(&Server::with_code_interpreter()?, &Sdk::Python, "data_analysis.py", "with 12 bars")
}

fn data_analyses_side_by_side_keep_their_data_over_a_pause() -> Result<()> {
    says(&Server::with_code_interpreter()?, &Sdk::Python, "data_analysis_async.py", "of the very same data")
}

fn a_data_analysis_in_typescript_keeps_its_data_over_a_pause() -> Result<()> {
    says(&Server::with_code_interpreter()?, &Sdk::Node, "data_analysis.ts", "of 3 parts")
}

fn a_dev_server_is_woken_by_its_preview() -> Result<()> {
    says(&Server::shared()?, &Sdk::Python, "dev_server.py", "third visit")
}

fn dev_servers_are_woken_all_at_once() -> Result<()> {
    says(&Server::shared()?, &Sdk::Python, "dev_server_async.py", "the shop has news")
}

fn a_dev_server_in_typescript_is_woken_by_its_preview() -> Result<()> {
    says(&Server::shared()?, &Sdk::Node, "dev_server.ts", "edited by")
}
