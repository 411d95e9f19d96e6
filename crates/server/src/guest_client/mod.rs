//! What the daemon itself asks of a guest: to run a command and to write a file.
//!
//! The guest speaks Connect with JSON over HTTP/1.1 on a stream that the engine opens. Every request
//! has a stream of its own, because a build asks rarely and each run takes long.

use std::collections::BTreeMap;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::Bytes;
use dorm_engine::{BootConfig, Engine, EngineError, Id};
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use serde::{Deserialize, Serialize};

use envelope::{Envelopes, envelope};

mod envelope;
#[cfg(test)]
pub(crate) mod fake;

/// Longest answer that is not a stream.
const MAX_ANSWER: usize = 1024 * 1024;

#[derive(Debug, thiserror::Error)]
pub enum GuestError {
    #[error("the guest cannot be reached")]
    Connect(#[source] EngineError),
    #[error("the connection to the guest broke")]
    Broken(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The guest answered with an error of its own.
    #[error("{message}")]
    Refused { code: String, message: String },
    #[error("the guest's answer cannot be understood: {0}")]
    Protocol(String),
}

/// One command, as process 1 of the box starts it.
#[derive(Debug, Clone, Default)]
pub struct Run<'a> {
    pub command: &'a str,
    pub args: &'a [&'a str],
    pub user: &'a str,
    pub workdir: Option<&'a str>,
    pub env: BTreeMap<String, String>,
}

/// How a run ended.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Exit {
    pub exit_code: i32,
    /// 0 unless a signal ended it.
    pub signal: u32,
    /// Killed for want of memory.
    pub oom: bool,
    pub error: Option<String>,
}

impl Exit {
    pub fn succeeded(&self) -> bool {
        self.exit_code == 0 && self.signal == 0 && self.error.is_none()
    }
}

impl std::fmt::Display for Exit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self { oom: true, .. } => f.write_str("killed: out of memory"),
            Self { signal: 1.., .. } => write!(f, "killed by signal {}", self.signal),
            Self { exit_code: 1.., .. } => write!(f, "exit code {}", self.exit_code),
            Self {
                error: Some(error), ..
            } => f.write_str(error),
            _ => write!(f, "exit code {}", self.exit_code),
        }
    }
}

/// The guest of one box.
#[derive(Clone)]
pub struct GuestClient {
    engine: Arc<dyn Engine>,
    id: Id,
}

impl GuestClient {
    pub fn new(engine: Arc<dyn Engine>, id: Id) -> Self {
        Self { engine, id }
    }

    /// Starts a command. Dropping what is returned leaves it running.
    pub async fn start(&self, run: &Run<'_>) -> Result<Running, GuestError> {
        let request = StartRequest {
            process: Process {
                cmd: run.command,
                args: run.args,
                envs: &run.env,
                cwd: run.workdir,
            },
            stdin: false,
            user: run.user,
        };
        let body = serde_json::to_vec(&request).map_err(|e| GuestError::Protocol(e.to_string()))?;
        let request = Request::builder()
            .method(Method::POST)
            .uri("/process.Process/Start")
            .header(header::CONTENT_TYPE, "application/connect+json")
            .header("connect-protocol-version", "1");
        let response = self.send(authorized(request, run.user), envelope(&body)).await?;
        if response.status() != StatusCode::OK {
            return Err(refusal(response).await);
        }
        Ok(Running {
            envelopes: Envelopes::new(response.into_body()),
        })
    }

    /// Runs that have not ended.
    pub async fn runs(&self) -> Result<Vec<ListedRun>, GuestError> {
        let request = Request::builder()
            .method(Method::POST)
            .uri("/process.Process/List")
            .header(header::CONTENT_TYPE, "application/json")
            .header("connect-protocol-version", "1");
        let response = self
            .send(authorized(request, "root"), Bytes::from_static(b"{}"))
            .await?;
        if response.status() != StatusCode::OK {
            return Err(refusal(response).await);
        }
        let body = Limited::new(response.into_body(), MAX_ANSWER)
            .collect()
            .await
            .map_err(GuestError::Broken)?;
        let listed: ListResponse =
            serde_json::from_slice(&body.to_bytes()).map_err(|e| GuestError::Protocol(e.to_string()))?;
        Ok(listed.processes)
    }

    /// Tells a guest that was restored from another agent's memory who it is now.
    pub async fn introduce(&self, boot: &BootConfig) -> Result<(), GuestError> {
        let mut entropy = [0u8; 64];
        getrandom::fill(&mut entropy).map_err(|e| GuestError::Protocol(e.to_string()))?;
        let init = Init {
            agent_id: &boot.agent_id,
            hostname: &boot.hostname,
            env_vars: &boot.env,
            default_user: boot.default_user.as_deref(),
            default_workdir: boot.default_workdir.as_deref(),
            nameservers: &boot.nameservers,
            entropy: BASE64.encode(entropy),
        };
        let body = serde_json::to_vec(&init).map_err(|e| GuestError::Protocol(e.to_string()))?;
        let request = Request::builder()
            .method(Method::POST)
            .uri("/init")
            .header(header::CONTENT_TYPE, "application/json");
        let response = self.send(authorized(request, "root"), body.into()).await?;
        if response.status().is_success() {
            Ok(())
        } else {
            Err(refusal(response).await)
        }
    }

    /// Writes a file as `root`, and makes the directories above it.
    pub async fn write_file(&self, path: &str, content: Bytes) -> Result<(), GuestError> {
        let request = Request::builder()
            .method(Method::POST)
            .uri(format!("/files?username=root&path={}", percent_encoded(path)))
            .header(header::CONTENT_TYPE, "application/octet-stream");
        let response = self.send(authorized(request, "root"), content).await?;
        if response.status().is_success() {
            Ok(())
        } else {
            Err(refusal(response).await)
        }
    }

    async fn send(
        &self,
        request: http::request::Builder,
        body: Bytes,
    ) -> Result<Response<Incoming>, GuestError> {
        let request = request
            .header(header::HOST, "guest")
            .body(Full::new(body))
            .map_err(|e| GuestError::Protocol(e.to_string()))?;
        let stream = self.engine.connect(&self.id).await.map_err(GuestError::Connect)?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .map_err(broken)?;
        // Ends with the answer's body, or when that is dropped.
        tokio::spawn(connection);
        sender.send_request(request).await.map_err(broken)
    }
}

/// A run as the guest lists it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ListedRun {
    pub run_id: String,
    pub tag: Option<String>,
    keeps_awake: Option<bool>,
}

impl ListedRun {
    /// A guest that does not say so may only have one service, the template's start command.
    pub fn keeps_awake(&self) -> bool {
        self.keeps_awake
            .unwrap_or_else(|| self.tag.as_deref() != Some("start"))
    }
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct ListResponse {
    processes: Vec<ListedRun>,
}

/// A command that was started.
pub struct Running {
    envelopes: Envelopes,
}

/// What a run does next.
#[derive(Debug, PartialEq, Eq)]
pub enum Next {
    /// Of either stream.
    Output(Vec<u8>),
    End(Exit),
}

impl Running {
    /// Nothing comes after [`Next::End`].
    pub async fn next(&mut self) -> Result<Next, GuestError> {
        while let Some(message) = self.envelopes.next().await? {
            let message: StartResponse =
                serde_json::from_slice(&message).map_err(|e| GuestError::Protocol(e.to_string()))?;
            let Event { data, end } = message.event;
            if let Some(output) = data.and_then(|data| data.stdout.or(data.stderr)) {
                let output = BASE64
                    .decode(output)
                    .map_err(|e| GuestError::Protocol(e.to_string()))?;
                return Ok(Next::Output(output));
            }
            if let Some(exit) = end {
                // The end frame may hold an error still.
                while self.envelopes.next().await?.is_some() {}
                return Ok(Next::End(exit));
            }
        }
        Err(GuestError::Protocol("the run's end is missing".into()))
    }
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Init<'a> {
    agent_id: &'a str,
    hostname: &'a str,
    env_vars: &'a BTreeMap<String, String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    default_user: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    default_workdir: Option<&'a str>,
    nameservers: &'a [String],
    /// Base64, for the generators of random numbers in the box.
    entropy: String,
}

#[derive(Serialize)]
struct StartRequest<'a> {
    process: Process<'a>,
    stdin: bool,
    user: &'a str,
}

#[derive(Serialize)]
struct Process<'a> {
    cmd: &'a str,
    args: &'a [&'a str],
    envs: &'a BTreeMap<String, String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cwd: Option<&'a str>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct StartResponse {
    event: Event,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Event {
    data: Option<Data>,
    end: Option<Exit>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Data {
    stdout: Option<String>,
    stderr: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct ErrorAnswer {
    /// A word from Connect, a number from the plain HTTP routes.
    code: serde_json::Value,
    message: String,
}

fn authorized(request: http::request::Builder, user: &str) -> http::request::Builder {
    let basic = format!("Basic {}", BASE64.encode(format!("{user}:")));
    request.header(header::AUTHORIZATION, basic)
}

async fn refusal(response: Response<Incoming>) -> GuestError {
    let status = response.status();
    match Limited::new(response.into_body(), MAX_ANSWER).collect().await {
        Ok(body) => refused(&body.to_bytes(), status.as_str()),
        Err(e) => GuestError::Broken(e),
    }
}

/// What an error's JSON says; `otherwise` if it is none.
fn refused(json: &[u8], otherwise: &str) -> GuestError {
    let answer: ErrorAnswer = serde_json::from_slice(json).unwrap_or_default();
    let code = match answer.code {
        serde_json::Value::String(code) => code,
        serde_json::Value::Number(code) => code.to_string(),
        _ => otherwise.to_owned(),
    };
    let message = if answer.message.is_empty() {
        format!("the guest answered {code}")
    } else {
        answer.message
    };
    GuestError::Refused { code, message }
}

fn broken(e: hyper::Error) -> GuestError {
    GuestError::Broken(e.into())
}

fn percent_encoded(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' => {
                encoded.push(byte as char)
            }
            _ => encoded.push_str(&format!("%{byte:02X}")),
        }
    }
    encoded
}
