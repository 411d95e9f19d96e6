//! Requests whose answer may be lost with the daemon, which is not the same as being refused.

use serde_json::{Value, json};

use crate::harness::Server;

/// What came of a request.
#[derive(Debug, Clone)]
pub(crate) enum Answer {
    Done(Value),
    Refused {
        status: u16,
        message: String,
    },
    /// The daemon went away in between: it may have been done or not.
    Lost(String),
}

impl Answer {
    pub(crate) fn in_words(&self) -> String {
        match self {
            Self::Done(Value::Null) => "done".to_owned(),
            Self::Done(value) => {
                let text = value.to_string();
                text.chars().take(160).collect()
            }
            Self::Refused { status, message } => format!("refused with {status}: {message}"),
            Self::Lost(why) => format!("lost: {why}"),
        }
    }
}

pub(crate) fn call(server: &Server, method: &str, path: &str, body: &Value) -> Answer {
    let body = match body {
        Value::Null => Vec::new(),
        body => body.to_string().into_bytes(),
    };
    send(server, method, path, "application/json", &body, |bytes| {
        Ok(serde_json::from_slice(bytes).unwrap_or(Value::Null))
    })
}

/// Writes a file as an upload.
pub(crate) fn upload(server: &Server, agent: &str, path: &str, content: &str) -> Answer {
    let target = format!("/v1/agents/{agent}/guest/files?path={path}&username=user");
    let kind = "application/octet-stream";
    send(server, "POST", &target, kind, content.as_bytes(), |_| {
        Ok(Value::Null)
    })
}

/// Runs a script to its end and gives what it printed.
pub(crate) fn run(server: &Server, agent: &str, script: &str) -> Answer {
    let request = json!({"process": {"cmd": "bash", "args": ["-c", script]}, "stdin": false}).to_string();
    let mut body = vec![0];
    body.extend((request.len() as u32).to_be_bytes());
    body.extend(request.bytes());
    let path = format!("/v1/agents/{agent}/guest/process.Process/Start");
    send(
        server,
        "POST",
        &path,
        "application/connect+json",
        &body,
        |bytes| output(bytes).map(Value::String),
    )
}

fn send(
    server: &Server,
    method: &str,
    path: &str,
    kind: &str,
    body: &[u8],
    read: impl Fn(&[u8]) -> Result<Value, String>,
) -> Answer {
    let key = match server.key() {
        Ok(key) => key,
        Err(error) => return Answer::Lost(format!("{error:#}")),
    };
    let headers = [
        ("x-api-key", key.as_str()),
        ("content-type", kind),
        ("connect-protocol-version", "1"),
    ];
    match server.http_with(method, path, &headers, body) {
        Ok(reply) if reply.status < 300 => match read(&reply.body) {
            Ok(value) => Answer::Done(value),
            Err(why) => Answer::Lost(why),
        },
        Ok(reply) => Answer::Refused {
            status: reply.status,
            message: reply.text(),
        },
        Err(error) => Answer::Lost(format!("{error:#}")),
    }
}

/// What a run printed, if the stream of its events is whole.
fn output(mut bytes: &[u8]) -> Result<String, String> {
    let mut text = Vec::new();
    let mut ended = None;
    while let Some((head, rest)) = bytes.split_at_checked(5) {
        let length = u32::from_be_bytes([head[1], head[2], head[3], head[4]]) as usize;
        let Some((message, rest)) = rest.split_at_checked(length) else {
            break;
        };
        bytes = rest;
        let message: Value = serde_json::from_slice(message).map_err(|e| e.to_string())?;
        let event = &message["event"];
        if let Some(data) = event["data"]["stdout"].as_str() {
            text.extend(base64(data));
        }
        if event["end"].is_object() {
            ended = Some(event["end"].clone());
        }
    }
    match ended {
        Some(end) if end["exitCode"].as_i64().unwrap_or(0) == 0 => {
            Ok(String::from_utf8_lossy(&text).into_owned())
        }
        Some(end) => Err(format!("the script ended with {end}")),
        None => Err("the stream broke off".to_owned()),
    }
}

fn base64(text: &str) -> Vec<u8> {
    let value = |c: u8| match c {
        b'A'..=b'Z' => Some(c - b'A'),
        b'a'..=b'z' => Some(c - b'a' + 26),
        b'0'..=b'9' => Some(c - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    };
    let mut bytes = Vec::new();
    let (mut bits, mut count) = (0u32, 0);
    for six in text.bytes().filter_map(value) {
        bits = bits << 6 | u32::from(six);
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push((bits >> count) as u8);
        }
    }
    bytes
}
