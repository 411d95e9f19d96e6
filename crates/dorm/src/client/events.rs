//! Events as they happen.

use std::collections::VecDeque;

use anyhow::{Context, Result};
use dorm_server::api::types::Event;
use http::{Method, header};
use http_body_util::BodyExt;
use hyper::body::Incoming;

use super::{Client, full};

pub(crate) struct EventStream {
    body: Incoming,
    lines: Lines,
    arrived: VecDeque<String>,
}

impl Client {
    /// The newest `limit` events below `path`, and then all that follow this call.
    pub(crate) async fn follow(&self, path: &str, limit: u32) -> Result<EventStream> {
        let request = self
            .request(Method::GET, &format!("{path}?follow=true&limit={limit}"))
            .header(header::ACCEPT, "text/event-stream")
            .body(full(""))?;
        Ok(EventStream {
            body: self.send(request).await?.into_body(),
            lines: Lines::default(),
            arrived: VecDeque::new(),
        })
    }
}

impl EventStream {
    /// None once the daemon ends, or the agent is gone.
    pub(crate) async fn next(&mut self) -> Result<Option<Event>> {
        loop {
            while let Some(line) = self.arrived.pop_front() {
                if let Some(text) = line.strip_prefix("data: ") {
                    let event = serde_json::from_str(text);
                    return event
                        .context("an event is not what this version of dorm expects")
                        .map(Some);
                }
            }
            let Some(frame) = self.body.frame().await else {
                return Ok(None);
            };
            if let Ok(data) = frame.context("the stream of events broke off")?.into_data() {
                self.arrived.extend(self.lines.push(&data));
            }
        }
    }
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
