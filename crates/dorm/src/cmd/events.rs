//! `dorm events`: what happened to agents, and what happens.

use anyhow::{Context, Result};
use dorm_server::api::types::Event;
use http::{Method, header};
use http_body_util::BodyExt;

use crate::cli::Global;
use crate::client::{Client, agent_path, full};
use crate::output::{self, Table, printable, time};

/// Show what happened to an agent, or to all, with reasons
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: dorm events demo --follow")]
pub(crate) struct Args {
    /// Name or id; all agents if absent
    name: Option<String>,
    /// Go on with what happens from now on
    #[arg(long, short)]
    follow: bool,
    /// At most so many of those that are past [default: 100, with --follow 10]
    #[arg(long, short = 'n', value_name = "N")]
    limit: Option<u32>,
}

pub(crate) async fn run(global: &Global, args: Args) -> Result<()> {
    let client = global.client()?;
    let path = match &args.name {
        Some(name) => agent_path(name, "/events"),
        None => "/v1/events".to_owned(),
    };
    if args.follow {
        let limit = args.limit.unwrap_or(10);
        return follow(&client, &format!("{path}?follow=true&limit={limit}"), global.json).await;
    }
    let limit = args.limit.unwrap_or(100);
    let events: Vec<Event> = client.get(&format!("{path}?limit={limit}")).await?;
    if global.json {
        return output::json(&events);
    }
    let mut table = Table::new(["TIME", "AGENT", "FROM", "TO", ">TOOK", "REASON"]);
    for event in events {
        table.row([
            time(event.time),
            event.name,
            event.from.unwrap_or_default(),
            event.to,
            event.millis.map(|ms| format!("{ms} ms")).unwrap_or_default(),
            event.reason,
        ]);
    }
    table.print()
}

async fn follow(client: &Client, path: &str, json: bool) -> Result<()> {
    let request = client
        .request(Method::GET, path)
        .header(header::ACCEPT, "text/event-stream")
        .body(full(""))?;
    let mut body = client.send(request).await?.into_body();
    let mut lines = Lines::default();
    while let Some(frame) = body.frame().await {
        let frame = frame.context("the stream of events broke off")?;
        let Ok(data) = frame.into_data() else { continue };
        for line in lines.push(&data) {
            let Some(text) = line.strip_prefix("data: ") else {
                continue;
            };
            let event: Event =
                serde_json::from_str(text).context("an event is not what this version of dorm expects")?;
            if json {
                output::json_line(&event)?;
            } else {
                output::line(in_words(&event))?;
            }
        }
    }
    Ok(())
}

fn in_words(event: &Event) -> String {
    let from = event.from.as_deref().unwrap_or("nothing");
    let took = event.millis.map(|ms| format!(" in {ms} ms")).unwrap_or_default();
    let reason = printable(&event.reason);
    format!(
        "{}  {}  {from} -> {}{took}: {reason}",
        time(event.time),
        event.name,
        event.to
    )
}

/// Whole lines out of pieces.
#[derive(Default)]
struct Lines(Vec<u8>);

impl Lines {
    fn push(&mut self, data: &[u8]) -> Vec<String> {
        self.0.extend_from_slice(data);
        let Some(end) = self.0.iter().rposition(|byte| *byte == b'\n') else {
            return Vec::new();
        };
        let whole: Vec<u8> = self.0.drain(..=end).collect();
        String::from_utf8_lossy(&whole)
            .lines()
            .map(str::to_owned)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_found_however_they_arrive() {
        let text = "id: 1\ndata: {}\n\n: still here\n\n";
        for step in 1..=text.len() {
            let mut lines = Lines::default();
            let found: Vec<_> = text
                .as_bytes()
                .chunks(step)
                .flat_map(|piece| lines.push(piece))
                .collect();
            assert_eq!(
                found,
                ["id: 1", "data: {}", "", ": still here", ""],
                "in steps of {step}"
            );
        }
    }
}
