//! One agent's guest, reached through the daemon: calls, files and folders. Reaching for it starts a
//! stopped agent.

use std::time::Duration;

use anyhow::{Context, Result};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use http::{Method, Response, header};
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::events::EventStream;
use super::wire::StartRequest;
use super::{Body, Client, MAX_ANSWER, agent_path, connect, encode, full};
use crate::exit::{Exit, Failure};

const LOOK_AGAIN: Duration = Duration::from_secs(60);
/// How long to wait before the next look where the daemon does not tell.
const UNTOLD: Duration = Duration::from_secs(1);

pub(crate) struct Guest<'a> {
    client: &'a Client,
    prefix: String,
    authorization: Option<String>,
}

/// How it is with the agent of a run that somebody waits for.
pub(crate) enum Look {
    /// The run may be reached for.
    Up,
    /// Until something happens to the agent, nothing is to be done.
    Waiting(Waiting),
    /// The box is gone, and all runs with it; how it is with the agent now, in words.
    Lost(String),
}

pub(crate) struct Waiting {
    pub(crate) state: String,
    /// It was put to sleep although somebody waits for it: paused by a user, or put to disk, by a user or since it was paused.
    pub(crate) asleep: bool,
    events: EventStream,
}

impl Waiting {
    /// Until something happens to the agent, or it should be looked at again: the connection may be gone without a word, and of one
    /// that comes to its end the last word may have been said.
    pub(crate) async fn changes(mut self) {
        let patience = if self.asleep { LOOK_AGAIN } else { UNTOLD };
        let next = tokio::time::timeout(patience, self.events.next()).await;
        if let Ok(Ok(None) | Err(_)) = next {
            tokio::time::sleep(UNTOLD).await;
        }
    }
}

/// What is at a path in the box; of a symlink, what it leads to.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Entry {
    #[serde(rename = "type")]
    kind: String,
    pub(crate) mode: u32,
}

impl Entry {
    pub(crate) fn is_directory(&self) -> bool {
        self.kind == "FILE_TYPE_DIRECTORY"
    }

    pub(crate) fn is_file(&self) -> bool {
        self.kind == "FILE_TYPE_FILE"
    }
}

impl<'a> Guest<'a> {
    /// `user` is who acts in the box; without one, the template's default user.
    pub(crate) fn new(client: &'a Client, agent: &str, user: Option<&str>) -> Self {
        Self {
            client,
            prefix: agent_path(agent, "/guest"),
            authorization: user.map(|user| format!("Basic {}", BASE64_STANDARD.encode(format!("{user}:")))),
        }
    }

    /// Neither starts nor wakes the agent.
    pub(crate) async fn look(&self) -> Result<Look> {
        let path = self.prefix.trim_end_matches("/guest");
        // Before the look at its state, so that no change after it is missed.
        let events = self.client.follow(&format!("{path}/events"), 0).await?;
        let agent: dorm_server::api::types::Agent = self.client.get(path).await?;
        let standing = Standing::of(&agent.state, &agent.reason, agent.durable);
        Ok(match standing {
            Standing::Up => Look::Up,
            Standing::Asleep | Standing::Ending => Look::Waiting(Waiting {
                state: agent.state,
                asleep: standing == Standing::Asleep,
                events,
            }),
            Standing::Lost => Look::Lost(format!("{}: {}", agent.state, agent.reason)),
        })
    }

    /// Whether a run of the agent could be told something without its box being started for that.
    pub(crate) async fn may_hear(&self) -> bool {
        match self.look().await {
            Ok(Look::Up) | Err(_) => true,
            Ok(Look::Waiting(agent)) => agent.asleep,
            Ok(Look::Lost(_)) => false,
        }
    }

    fn request(&self, method: Method, path: &str) -> http::request::Builder {
        let builder = self.client.request(method, &format!("{}/{path}", self.prefix));
        match &self.authorization {
            Some(authorization) => builder.header(header::AUTHORIZATION, authorization),
            None => builder,
        }
    }

    /// A unary call, as in `process.Process/List`.
    pub(crate) async fn call<T: DeserializeOwned>(
        &self,
        method: &str,
        message: &impl Serialize,
    ) -> Result<T> {
        let request = self
            .request(Method::POST, method)
            .header(header::CONTENT_TYPE, "application/json")
            .header("connect-protocol-version", "1")
            .body(full(serde_json::to_vec(message)?))?;
        let body = self.client.send(request).await?.into_body();
        let body = Limited::new(body, MAX_ANSWER)
            .collect()
            .await
            .map_err(|e| anyhow::anyhow!("{e}"))?
            .to_bytes();
        serde_json::from_slice(&body)
            .with_context(|| format!("the guest's answer to {method} is not understood"))
    }

    /// A call that answers with a stream.
    pub(crate) async fn stream(&self, method: &str, message: &impl Serialize) -> Result<connect::Stream> {
        let request = self
            .request(Method::POST, method)
            .header(header::CONTENT_TYPE, "application/connect+json")
            .header("connect-protocol-version", "1")
            .header("keepalive-ping-interval", "30")
            .body(full(connect::envelope(message)?))?;
        let response = self.client.send(request).await?;
        Ok(connect::Stream::new(response.into_body()))
    }

    pub(crate) async fn download(&self, path: impl AsRef<[u8]>) -> Result<Response<Incoming>> {
        self.client
            .send(self.request(Method::GET, &query("files", path)).body(full(""))?)
            .await
    }

    /// Writes the file and returns its absolute path.
    pub(crate) async fn upload(
        &self,
        path: impl AsRef<[u8]>,
        length: Option<u64>,
        body: Body,
    ) -> Result<String> {
        #[derive(Deserialize)]
        struct Written {
            path: String,
        }
        let mut request = self
            .request(Method::POST, &query("files", path))
            .header(header::CONTENT_TYPE, "application/octet-stream");
        if let Some(length) = length {
            request = request.header(header::CONTENT_LENGTH, length);
        }
        let answer = self.client.send(request.body(body)?).await?.into_body();
        let answer = answer
            .collect()
            .await
            .context("the guest's answer broke off")?
            .to_bytes();
        let written: Vec<Written> =
            serde_json::from_slice(&answer).context("the guest's answer is not understood")?;
        written
            .into_iter()
            .next()
            .map(|w| w.path)
            .context("the guest did not say what it wrote")
    }

    /// The folder as a tar stream, with paths relative to it.
    pub(crate) async fn download_tar(&self, path: impl AsRef<[u8]>) -> Result<Response<Incoming>> {
        self.client
            .send(
                self.request(Method::GET, &query("dorm/tar", path))
                    .body(full(""))?,
            )
            .await
    }

    /// Unpacks a tar stream in the folder, which is made if it is not there.
    pub(crate) async fn upload_tar(&self, path: impl AsRef<[u8]>, body: Body) -> Result<()> {
        let request = self
            .request(Method::POST, &query("dorm/tar", path))
            .header(header::CONTENT_TYPE, "application/x-tar");
        finish(self.client.send(request.body(body)?).await?).await
    }

    pub(crate) async fn stat(&self, path: &str) -> Result<Entry> {
        #[derive(Deserialize)]
        struct Answer {
            entry: Entry,
        }
        let request = serde_json::json!({ "path": path });
        Ok(self
            .call::<Answer>("filesystem.Filesystem/Stat", &request)
            .await?
            .entry)
    }

    /// `None` where there is nothing at the path. Where there is no such agent, what follows says so.
    pub(crate) async fn find(&self, path: &str) -> Result<Option<Entry>> {
        match self.stat(path).await {
            Ok(entry) => Ok(Some(entry)),
            Err(e)
                if e.downcast_ref::<Failure>()
                    .is_some_and(|f| f.exit() == Exit::NotFound) =>
            {
                Ok(None)
            }
            Err(e) => Err(e),
        }
    }

    /// The protocol has no call for it, but every box has chmod.
    pub(crate) async fn set_mode(&self, path: &str, mode: u32) -> Result<()> {
        let request = StartRequest::command("chmod", [format!("{mode:o}"), "--".to_owned(), path.to_owned()]);
        let (_, stderr, end) = self.run(&request).await?;
        anyhow::ensure!(
            end.code() == 0,
            "cannot set the mode of {path}: {}",
            String::from_utf8_lossy(&stderr).trim()
        );
        Ok(())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Standing {
    Up,
    Asleep,
    Ending,
    Lost,
}

impl Standing {
    fn of(state: &str, reason: &str, durable: bool) -> Self {
        match state {
            "freezing" | "standby" if reason.starts_with("asked to ") => Self::Asleep,
            // What the daemon puts to disk at its end goes on with the next.
            "hibernating" | "hibernated" if reason != dorm_server::lifecycle::GOES_ON_WITH_THE_NEXT => {
                Self::Asleep
            }
            // The next start brings its memory back.
            "failed" if durable => Self::Asleep,
            "failed" if reason.ends_with(dorm_server::lifecycle::BOX_LEFT) => Self::Up,
            // So it is during a rollback too, which may have the run come back.
            "stopping" => Self::Ending,
            "stopped" | "failed" | "deleting" => Self::Lost,
            _ => Self::Up,
        }
    }
}

fn query(route: &str, path: impl AsRef<[u8]>) -> String {
    format!("{route}?path={}", encode(path))
}

async fn finish(response: Response<Incoming>) -> Result<()> {
    response
        .into_body()
        .collect()
        .await
        .context("the guest's answer broke off")?;
    Ok(())
}

/// The data of an answer, piece by piece.
pub(crate) fn chunks(body: Incoming) -> impl futures_util::Stream<Item = std::io::Result<Bytes>> {
    use futures_util::TryStreamExt;
    body.into_data_stream().map_err(std::io::Error::other)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_was_stopped_is_not_reached_for_and_who_comes_back_by_itself_is() {
        let of = |state, reason| Standing::of(state, reason, false);
        for state in ["stopped", "failed", "deleting"] {
            assert_eq!(of(state, "stopped on request"), Standing::Lost, "{state}");
        }
        for state in ["freezing", "standby", "hibernating", "hibernated"] {
            assert_eq!(of(state, "asked to hibernate"), Standing::Asleep, "{state}");
        }
        for state in ["starting", "running", "waking", "freezing", "standby"] {
            assert_eq!(of(state, "idle for 15 s"), Standing::Up, "{state}");
        }
        let goes_on = dorm_server::lifecycle::GOES_ON_WITH_THE_NEXT;
        assert_eq!(of("hibernated", goes_on), Standing::Up);
        assert_eq!(of("stopping", "rolled back to it"), Standing::Ending);
        assert_eq!(Standing::of("failed", "no room", true), Standing::Asleep);
        let left = format!("no descriptors{}", dorm_server::lifecycle::BOX_LEFT);
        assert_eq!(
            of("failed", &left),
            Standing::Up,
            "whoever reaches for it looks again"
        );
    }
}
