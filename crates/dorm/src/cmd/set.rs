//! `dorm set`: changes an agent that there is.

use anyhow::Result;
use dorm_server::api::types::AgentChange;
use dorm_server::isolation::Choice;
use serde_json::Value;

use super::{each, parse_time};
use crate::cli::Global;
use crate::client::agent_path;
use crate::exit::{Exit, Failure};
use crate::progress;

/// Change agents; their files stay
///
/// When an agent goes to sleep changes at once, whatever state it is in, and it is not woken for it. For another isolation it is
/// stopped, so that what is in its memory is lost, and started again if it ran or slept.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples: dorm set demo --standby-after 30s --hibernate-after default
          dorm set demo --keep-awake
          dorm set demo --isolation vm"
)]
pub(crate) struct Args {
    /// Names or ids
    #[arg(required = true)]
    names: Vec<String>,
    /// What stands between the agent and this machine: container, gvisor, vm, or auto
    #[arg(long, value_name = "KIND")]
    isolation: Option<Choice>,
    /// Goes to standby after so long without use, as 15s or 5m; 0 is never, `default` what the daemon has for all
    #[arg(long, value_name = "TIME", value_parser = parse_setting)]
    standby_after: Option<Setting>,
    /// Has its memory on disk too after so long in standby; 0 is never
    #[arg(long, value_name = "TIME", value_parser = parse_setting)]
    durable_after: Option<Setting>,
    /// Goes to disk after so long in standby; 0 is never
    #[arg(long, value_name = "TIME", value_parser = parse_setting)]
    hibernate_after: Option<Setting>,
    /// Never goes to sleep by itself; `--keep-awake=false` lets it
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    keep_awake: Option<bool>,
}

/// Seconds, or the daemon's default.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Setting(Option<f64>);

fn parse_setting(text: &str) -> Result<Setting, String> {
    match text {
        "default" => Ok(Setting(None)),
        _ => match parse_time(text) {
            Ok(seconds) => Ok(Setting(Some(seconds))),
            Err(wrong) => Err(format!("{wrong}, or `default`")),
        },
    }
}

pub(crate) async fn run(global: &Global, args: Args) -> Result<()> {
    let change = AgentChange {
        isolation: args.isolation,
        standby_after: args.standby_after.map(|setting| setting.0),
        durable_after: args.durable_after.map(|setting| setting.0),
        hibernate_after: args.hibernate_after.map(|setting| setting.0),
        keep_awake: args.keep_awake,
    };
    if change == AgentChange::default() {
        let hint = "give one or more of --standby-after, --durable-after, --hibernate-after, --keep-awake and --isolation";
        return Err(Failure::new(Exit::Usage, "there is nothing to change")
            .hint(hint)
            .into());
    }
    let client = global.client()?;
    each(&args.names, global.json, async |name| {
        let bar = progress::spinner(format!("changing {name}"));
        let agent = client.patch::<Value>(&agent_path(name, ""), &change).await;
        bar.finish_and_clear();
        agent
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_setting_is_a_time_or_the_default() {
        assert_eq!(parse_setting("5m"), Ok(Setting(Some(300.0))));
        assert_eq!(parse_setting("0"), Ok(Setting(Some(0.0))));
        assert_eq!(parse_setting("default"), Ok(Setting(None)));
        assert!(parse_setting("soon").is_err_and(|wrong| wrong.contains("or `default`")));
    }
}
