//! The command line: what is common to all verbs, and which verbs there are. A verb's own flags are
//! in its file under `cmd`.

use std::path::PathBuf;

use anyhow::Result;
use clap::{Args, Parser, Subcommand};

use crate::client::Client;
use crate::{cmd, env, exit};

pub(crate) const DEFAULT_DATA: &str = "/var/lib/dorm";

/// Persistent computers for AI agents, on your own machine.
#[derive(Debug, Parser)]
#[command(
    name = "dorm",
    version,
    max_term_width = 110,
    subcommand_required = true,
    arg_required_else_help = true
)]
#[command(
    after_help = "`dorm help VERB` explains a verb. `dorm --help` lists exit codes and environment variables."
)]
#[command(after_long_help = format!("{}\n\n{}", exit::REFERENCE, env::reference()))]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) verb: Verb,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct Global {
    /// Address of the daemon
    #[arg(long, global = true, env = env::URL, value_name = "URL", help_heading = "Global options")]
    pub(crate) url: Option<String>,
    /// Data directory, which names its daemon and key [default: /var/lib/dorm]
    #[arg(long, global = true, env = env::DATA, value_name = "DIR", help_heading = "Global options")]
    pub(crate) data: Option<PathBuf>,
    /// Print JSON; errors too
    #[arg(long, global = true, help_heading = "Global options")]
    pub(crate) json: bool,
}

impl Global {
    pub(crate) fn data(&self) -> PathBuf {
        match &self.data {
            Some(data) if !data.as_os_str().is_empty() => data.clone(),
            _ => DEFAULT_DATA.into(),
        }
    }

    pub(crate) fn client(&self) -> Result<Client> {
        Client::new(self)
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    Serve(cmd::serve::Args),
    Doctor(cmd::doctor::Args),
    New(cmd::new::Args),
    Ls(cmd::ls::Args),
    Show(cmd::show::Args),
    Exec(cmd::exec::Args),
    Shell(cmd::shell::Args),
    Ps(cmd::ps::Args),
    Cp(cmd::cp::Args),
    Ports(cmd::ports::ListArgs),
    Url(cmd::ports::UrlArgs),
    Start(cmd::start::Args),
    Pause(cmd::pause::Args),
    Hibernate(cmd::hibernate::Args),
    Wake(cmd::wake::Args),
    Snapshot(cmd::snapshot::TakeArgs),
    Snapshots(cmd::snapshot::ListArgs),
    Rollback(cmd::snapshot::RollbackArgs),
    Fork(cmd::fork::Args),
    Hold(cmd::hold::HoldArgs),
    Holds(cmd::hold::HoldsArgs),
    Unhold(cmd::hold::UnholdArgs),
    Net(cmd::net::Args),
    Set(cmd::set::Args),
    Why(cmd::why::Args),
    Stop(cmd::stop::Args),
    Rm(cmd::rm::Args),
    Logs(cmd::logs::Args),
    Stats(cmd::stats::Args),
    Events(cmd::events::Args),
    Template(cmd::template::Args),
    Volume(cmd::volume::Args),
    Key(cmd::key::Args),
    Tls(cmd::tls::Args),
    Bench(cmd::bench::Args),
    Completions(cmd::completions::Args),
    Environment(cmd::environment::Args),
}

impl Verb {
    /// Whether Ctrl-C is the verb's own affair.
    pub(crate) fn handles_interrupts(&self) -> bool {
        matches!(
            self,
            Self::Serve(_) | Self::Exec(_) | Self::Shell(_) | Self::Logs(_) | Self::Bench(_)
        )
    }

    pub(crate) async fn run(self, global: &Global) -> Result<()> {
        match self {
            Self::Serve(args) => cmd::serve::run(global, args).await,
            Self::Doctor(args) => cmd::doctor::run(global, args).await,
            Self::New(args) => cmd::new::run(global, args).await,
            Self::Ls(args) => cmd::ls::run(global, args).await,
            Self::Show(args) => cmd::show::run(global, args).await,
            Self::Exec(args) => cmd::exec::run(global, args).await,
            Self::Shell(args) => cmd::shell::run(global, args).await,
            Self::Ps(args) => cmd::ps::run(global, args).await,
            Self::Cp(args) => cmd::cp::run(global, args).await,
            Self::Ports(args) => cmd::ports::list(global, args).await,
            Self::Url(args) => cmd::ports::url(global, args).await,
            Self::Start(args) => cmd::start::run(global, args).await,
            Self::Pause(args) => cmd::pause::run(global, args).await,
            Self::Hibernate(args) => cmd::hibernate::run(global, args).await,
            Self::Wake(args) => cmd::wake::run(global, args).await,
            Self::Snapshot(args) => cmd::snapshot::take(global, args).await,
            Self::Snapshots(args) => cmd::snapshot::list(global, args).await,
            Self::Rollback(args) => cmd::snapshot::rollback(global, args).await,
            Self::Fork(args) => cmd::fork::run(global, args).await,
            Self::Hold(args) => cmd::hold::hold(global, args).await,
            Self::Holds(args) => cmd::hold::holds(global, args).await,
            Self::Unhold(args) => cmd::hold::unhold(global, args).await,
            Self::Net(args) => cmd::net::run(global, args).await,
            Self::Set(args) => cmd::set::run(global, args).await,
            Self::Why(args) => cmd::why::run(global, args).await,
            Self::Stop(args) => cmd::stop::run(global, args).await,
            Self::Rm(args) => cmd::rm::run(global, args).await,
            Self::Logs(args) => cmd::logs::run(global, args).await,
            Self::Stats(args) => cmd::stats::run(global, args).await,
            Self::Events(args) => cmd::events::run(global, args).await,
            Self::Template(args) => cmd::template::run(global, args).await,
            Self::Volume(args) => cmd::volume::run(global, args).await,
            Self::Key(args) => cmd::key::run(global, args).await,
            Self::Tls(args) => cmd::tls::run(global, args),
            Self::Bench(args) => cmd::bench::run(global, args).await,
            Self::Completions(args) => cmd::completions::run(args),
            Self::Environment(args) => cmd::environment::run(global, args),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent_and_every_verb_has_an_example() {
        let mut command = Cli::command();
        command.build();
        command.clone().debug_assert();
        for verb in command.get_subcommands().filter(|c| c.get_name() != "help") {
            let help = verb.get_after_help().map(ToString::to_string).unwrap_or_default();
            assert!(
                help.contains("dorm "),
                "`dorm help {}` has no example",
                verb.get_name()
            );
        }
    }
}
