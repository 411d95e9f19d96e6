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

pub(crate) struct Asleep {
    pub(crate) state: String,
    events: EventStream,
}

impl Asleep {
    /// Until something happens to the agent, or it should be looked at again: the connection may be gone without a word.
    pub(crate) async fn changes(mut self) {
        let next = tokio::time::timeout(LOOK_AGAIN, self.events.next()).await;
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

    /// The agent, if it was put to sleep although somebody waits for it: paused by a user, or put to disk, by a user or since it was
    /// paused. Asking does not wake it. What the daemon puts to disk at its end, to go on with the next, is not meant.
    pub(crate) async fn asleep(&self) -> Result<Option<Asleep>> {
        let path = self.prefix.trim_end_matches("/guest");
        // Before the look at its state, so that no change after it is missed.
        let events = self.client.follow(&format!("{path}/events"), 0).await?;
        let agent: dorm_server::api::types::Agent = self.client.get(path).await?;
        let asleep = match agent.state.as_str() {
            "freezing" | "standby" => agent.reason.starts_with("asked to "),
            "hibernating" | "hibernated" => agent.reason != dorm_server::lifecycle::GOES_ON_WITH_THE_NEXT,
            _ => false,
        };
        let state = agent.state;
        Ok(asleep.then_some(Asleep { state, events }))
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
