//! The messages of `process.Process` in their JSON form.

use std::collections::BTreeMap;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Bytes, which are base64 in the protocol's JSON.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Base64(pub(crate) Vec<u8>);

impl Serialize for Base64 {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(&BASE64_STANDARD.encode(&self.0))
    }
}

impl<'de> Deserialize<'de> for Base64 {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let text = String::deserialize(d)?;
        BASE64_STANDARD
            .decode(text)
            .map(Self)
            .map_err(serde::de::Error::custom)
    }
}

/// 64-bit integers, which are strings in the protocol's JSON, and may be numbers.
fn int64<'de, D: Deserializer<'de>>(d: D) -> Result<i64, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Written {
        Number(i64),
        Text(String),
    }
    match Written::deserialize(d)? {
        Written::Number(number) => Ok(number),
        Written::Text(text) => text.parse().map_err(serde::de::Error::custom),
    }
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Config {
    pub(crate) cmd: String,
    pub(crate) args: Vec<String>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) envs: BTreeMap<String, String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) cwd: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct WindowSize {
    pub(crate) cols: u16,
    pub(crate) rows: u16,
}

#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Pty {
    pub(crate) size: WindowSize,
}

#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct StartRequest {
    pub(crate) process: Config,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) pty: Option<Pty>,
    pub(crate) stdin: bool,
    /// Keep the whole output for those who attach later.
    pub(crate) keep: bool,
    /// 0 is never.
    pub(crate) timeout_ms: u64,
    /// Whether the agent is at work while it runs.
    pub(crate) keeps_awake: bool,
}

impl StartRequest {
    /// A plain command: no terminal, no input, nothing kept.
    pub(crate) fn command(cmd: impl Into<String>, args: impl IntoIterator<Item = impl Into<String>>) -> Self {
        let process = Config {
            cmd: cmd.into(),
            args: args.into_iter().map(Into::into).collect(),
            ..Config::default()
        };
        Self {
            process,
            pty: None,
            stdin: false,
            keep: false,
            timeout_ms: 0,
            keeps_awake: true,
        }
    }
}

#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum Selector {
    Pid(u32),
    RunId(String),
}

impl From<&str> for Selector {
    /// People name a run by its id, or by its process in the box.
    fn from(text: &str) -> Self {
        text.parse()
            .map_or_else(|_| Self::RunId(text.to_owned()), Self::Pid)
    }
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum Event {
    Start(Started),
    Data(Data),
    End(End),
    Keepalive {},
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct Started {
    pub(crate) pid: u32,
    pub(crate) run_id: String,
}

/// Output; one of the three streams is there.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct Data {
    pub(crate) stdout: Option<Base64>,
    pub(crate) stderr: Option<Base64>,
    pub(crate) pty: Option<Base64>,
    #[serde(deserialize_with = "int64")]
    pub(crate) offset: i64,
}

impl Data {
    /// How much output there was when this was sent, itself included.
    pub(crate) fn end_offset(&self) -> u64 {
        let bytes = [&self.stdout, &self.stderr, &self.pty];
        self.offset as u64
            + bytes
                .iter()
                .filter_map(|b| b.as_ref())
                .map(|b| b.0.len() as u64)
                .sum::<u64>()
    }
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct End {
    pub(crate) exit_code: i32,
    pub(crate) status: String,
    pub(crate) error: Option<String>,
    pub(crate) signal: i32,
    pub(crate) timed_out: bool,
    pub(crate) oom: bool,
}

impl End {
    /// As a shell has it.
    pub(crate) fn code(&self) -> i32 {
        if self.timed_out {
            crate::exit::Exit::Timeout.code()
        } else if self.signal > 0 {
            128 + self.signal
        } else {
            self.exit_code
        }
    }
}

/// One run as the guest lists it.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct Run {
    pub(crate) config: Config,
    pub(crate) pid: u32,
    pub(crate) run_id: String,
    #[serde(deserialize_with = "int64")]
    pub(crate) started_ms: i64,
    pub(crate) user: String,
    pub(crate) ended: bool,
    pub(crate) exit_code: Option<i32>,
    pub(crate) signal: u32,
    pub(crate) timed_out: bool,
    #[serde(deserialize_with = "int64")]
    pub(crate) output_bytes: i64,
    /// A guest of an earlier version does not tell.
    pub(crate) keeps_awake: Option<bool>,
}

#[derive(Deserialize)]
pub(crate) struct EventAnswer {
    pub(crate) event: Option<Event>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_read_as_the_guest_writes_them() {
        let read = |text: &str| serde_json::from_str::<EventAnswer>(text).unwrap().event.unwrap();
        assert!(
            matches!(read(r#"{"event":{"start":{"pid":7,"runId":"r1"}}}"#), Event::Start(s) if s.pid == 7)
        );
        assert!(matches!(
            read(r#"{"event":{"keepalive":{}}}"#),
            Event::Keepalive {}
        ));
        let Event::Data(data) = read(r#"{"event":{"data":{"stdout":"aGk=","offset":"40"}}}"#) else {
            panic!()
        };
        assert_eq!(
            (data.stdout.as_ref().unwrap().0.as_slice(), data.end_offset()),
            (b"hi".as_slice(), 42)
        );
        let Event::End(end) =
            read(r#"{"event":{"end":{"exitCode":-1,"status":"signal: killed","signal":9}}}"#)
        else {
            panic!()
        };
        assert_eq!(end.code(), 137);
        assert!(matches!(read(r#"{"event":{"end":{"exited":true}}}"#), Event::End(e) if e.code() == 0));
    }

    #[test]
    fn a_run_is_named_by_its_id_or_by_its_pid() {
        assert!(matches!(Selector::from("12"), Selector::Pid(12)));
        assert_eq!(
            serde_json::to_string(&Selector::from("r12")).unwrap(),
            r#"{"runId":"r12"}"#
        );
    }
}
