//! Events as they happen.

use std::io;

use anyhow::{Context, Result};
use bytes::Bytes;
use dorm_server::api::types::Event;
use futures_util::Stream;
use http::{Method, header};
use tokio::io::{AsyncBufRead, AsyncBufReadExt as _};
use tokio_util::io::StreamReader;

use super::guest::chunks;
use super::{Client, full};

pub(crate) struct EventStream {
    lines: Lines,
}

impl Client {
    /// The newest `limit` events below `path`, and then all that follow this call.
    pub(crate) async fn follow(&self, path: &str, limit: u32) -> Result<EventStream> {
        let request = self
            .request(Method::GET, &format!("{path}?follow=true&limit={limit}"))
            .header(header::ACCEPT, "text/event-stream")
            .body(full(""))?;
        Ok(EventStream {
            lines: lines(chunks(self.send(request).await?.into_body())),
        })
    }
}

impl EventStream {
    /// None once the daemon ends, or the agent is gone.
    pub(crate) async fn next(&mut self) -> Result<Option<Event>> {
        while let Some(line) = self
            .lines
            .next_line()
            .await
            .context("the stream of events broke off")?
        {
            if let Some(text) = line.strip_prefix("data: ") {
                let event = serde_json::from_str(text);
                return event
                    .context("an event is not what this version of dorm expects")
                    .map(Some);
            }
        }
        Ok(None)
    }
}

/// Whole lines out of pieces.
pub(crate) type Lines = tokio::io::Lines<Box<dyn AsyncBufRead + Send + Unpin>>;

pub(crate) fn lines(pieces: impl Stream<Item = io::Result<Bytes>> + Send + 'static) -> Lines {
    let reader: Box<dyn AsyncBufRead + Send + Unpin> = Box::new(StreamReader::new(Box::pin(pieces)));
    reader.lines()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn lines_are_found_however_they_arrive() {
        let text = "id: 1\ndata: {}\n\n: still here\n\n";
        for step in 1..=text.len() {
            let pieces = text
                .as_bytes()
                .chunks(step)
                .map(|piece| Ok(Bytes::from_static(piece)));
            let mut lines = lines(futures_util::stream::iter(pieces.collect::<Vec<_>>()));
            let mut found = Vec::new();
            while let Some(line) = lines.next_line().await.unwrap() {
                found.push(line);
            }
            assert_eq!(
                found,
                ["id: 1", "data: {}", "", ": still here", ""],
                "in steps of {step}"
            );
        }
    }
}
