//! `dorm why`: what keeps an agent awake, or why it sleeps, and what comes next.

use anyhow::Result;
use dorm_server::api::types::{SleepTimes, Why};

use crate::cli::Global;
use crate::client::agent_path;
use crate::output::{self, age, time, wait};

/// Say why an agent is as it is, and what will become of it
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: dorm why demo")]
pub(crate) struct Args {
    /// Name or id
    name: String,
}

pub(crate) async fn run(global: &Global, args: Args) -> Result<()> {
    let why: Why = global.client()?.get(&agent_path(&args.name, "/why")).await?;
    if global.json {
        return output::json(&why);
    }
    let state = format!("{} for {}: {}", why.state, age(why.since), why.reason);
    let mut fields = vec![("state", state)];
    let label = match why.state.as_str() {
        "running" => "awake, as",
        _ => "not deeper, as",
    };
    fields.extend(why.because.into_iter().map(|because| (label, because)));
    let next = match why.next {
        Some(next) => format!("{} at {}, if it is idle until then", next.state, time(next.at)),
        None => "nothing, until something changes".to_owned(),
    };
    fields.push(("next", next));
    fields.push(("sleep", in_words(&why.sleep)));
    fields.push(("files", why.files));
    fields.push(("memory", why.memory));
    fields.extend(
        why.setback
            .map(|setback| ("trouble", format!("{} ({} ago)", setback.what, age(setback.time)))),
    );
    output::fields(&fields)
}

/// When it goes to sleep by itself.
fn in_words(sleep: &SleepTimes) -> String {
    let times = [sleep.standby_after, sleep.durable_after, sleep.hibernate_after];
    if times == [None; 3] {
        return "never by itself".to_owned();
    }
    let [standby, durable, hibernated] = times.map(|time| match time {
        Some(seconds) => format!("after {}", wait(seconds)),
        None => "never".to_owned(),
    });
    format!("standby {standby}; from then on durable {durable}, hibernated {hibernated}")
}
