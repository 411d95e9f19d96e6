//! The Connect protocol in JSON: unary calls and server streams.
//!
//! A stream is a sequence of envelopes: one byte of flags, the length as a big-endian `u32`, the message. The
//! envelope with [`END`] set is the last one and holds `{}` or `{"error": {"code", "message"}}`.

use anyhow::{Context, Result, bail};
use bytes::{Buf, Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::exit::{Exit, Failure};

const COMPRESSED: u8 = 0x01;
const END: u8 = 0x02;
const HEADER: usize = 5;
/// No message of the guest comes near it; what claims to is not one.
const MAX_MESSAGE: usize = 64 << 20;

#[derive(Debug, Deserialize)]
pub(crate) struct ErrorDetail {
    pub(crate) code: String,
    #[serde(default)]
    pub(crate) message: String,
}

impl ErrorDetail {
    pub(crate) fn into_failure(self) -> Failure {
        let exit = Exit::from_code(&self.code).unwrap_or(Exit::Error);
        Failure::new(
            exit,
            if self.message.is_empty() {
                self.code
            } else {
                self.message
            },
        )
    }
}

/// One message, in its envelope.
pub(crate) fn envelope(message: &impl Serialize) -> Result<Bytes> {
    let mut buffer = vec![0; HEADER];
    serde_json::to_writer(&mut buffer, message)?;
    let length = u32::try_from(buffer.len() - HEADER).context("the message is too long")?;
    buffer[1..HEADER].copy_from_slice(&length.to_be_bytes());
    Ok(buffer.into())
}

/// Takes envelopes out of bytes as they arrive.
#[derive(Default)]
pub(crate) struct Decoder {
    buffer: BytesMut,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Envelope {
    Message(Bytes),
    End(Bytes),
}

impl Decoder {
    pub(crate) fn push(&mut self, data: &[u8]) {
        self.buffer.extend_from_slice(data);
    }

    /// The next whole envelope, if there is one.
    pub(crate) fn next(&mut self) -> Result<Option<Envelope>> {
        if self.buffer.len() < HEADER {
            return Ok(None);
        }
        let flags = self.buffer[0];
        let length = u32::from_be_bytes(self.buffer[1..HEADER].try_into().expect("four bytes")) as usize;
        if flags & COMPRESSED != 0 {
            bail!("the guest sent a compressed message, which was not asked for");
        }
        if length > MAX_MESSAGE {
            bail!("the guest announced a message of {length} bytes");
        }
        if self.buffer.len() < HEADER + length {
            self.buffer.reserve(HEADER + length - self.buffer.len());
            return Ok(None);
        }
        self.buffer.advance(HEADER);
        let message = self.buffer.split_to(length).freeze();
        Ok(Some(if flags & END != 0 {
            Envelope::End(message)
        } else {
            Envelope::Message(message)
        }))
    }
}

/// The answers of a streaming call.
pub(crate) struct Stream {
    body: Incoming,
    decoder: Decoder,
    ended: bool,
}

impl Stream {
    pub(crate) fn new(body: Incoming) -> Self {
        Self {
            body,
            decoder: Decoder::default(),
            ended: false,
        }
    }

    /// The next message; `None` once the stream has ended without an error.
    pub(crate) async fn next<T: DeserializeOwned>(&mut self) -> Result<Option<T>> {
        loop {
            match self.decoder.next()? {
                Some(Envelope::Message(message)) => {
                    let message = serde_json::from_slice(&message);
                    return Ok(Some(message.context(
                        "the guest sent a message this version of dorm does not know",
                    )?));
                }
                Some(Envelope::End(message)) => {
                    self.ended = true;
                    return end(&message).map(|()| None);
                }
                None if self.ended => return Ok(None),
                None => {}
            }
            match self.body.frame().await {
                Some(frame) => {
                    let frame = frame.map_err(|e| broken().cause(anyhow::Error::new(e)))?;
                    if let Ok(data) = frame.into_data() {
                        self.decoder.push(&data);
                    }
                }
                None => return Err(broken().into()),
            }
        }
    }
}

fn broken() -> Failure {
    Failure::new(Exit::Unreachable, "the connection to the box broke off")
        .hint("the box or the daemon may have ended; see `dorm ls`")
}

fn end(message: &[u8]) -> Result<()> {
    #[derive(Deserialize)]
    struct End {
        error: Option<ErrorDetail>,
    }
    let end: End = serde_json::from_slice(message).context("the guest ended its answer in an unknown way")?;
    match end.error {
        Some(error) => Err(error.into_failure().into()),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_envelope_is_found_again_however_the_bytes_arrive() {
        let mut wire = envelope(&json!({"a": 1})).unwrap().to_vec();
        wire.extend_from_slice(&[END, 0, 0, 0, 2]);
        wire.extend_from_slice(b"{}");
        assert_eq!(&wire[..HEADER], &[0, 0, 0, 0, 7]);
        for step in 1..=wire.len() {
            let mut decoder = Decoder::default();
            let mut found = Vec::new();
            for chunk in wire.chunks(step) {
                decoder.push(chunk);
                while let Some(envelope) = decoder.next().unwrap() {
                    found.push(envelope);
                }
            }
            let expected = [
                Envelope::Message(Bytes::from(r#"{"a":1}"#)),
                Envelope::End(Bytes::from("{}")),
            ];
            assert_eq!(found, expected, "in steps of {step}");
        }
    }

    #[test]
    fn what_cannot_be_an_envelope_is_refused() {
        for head in [[COMPRESSED, 0, 0, 0, 1], [0, 0xff, 0xff, 0xff, 0xff]] {
            let mut decoder = Decoder::default();
            decoder.push(&head);
            assert!(decoder.next().is_err());
        }
    }

    #[test]
    fn an_error_at_the_end_of_a_stream_keeps_its_meaning() {
        let error = end(br#"{"error":{"code":"not_found","message":"no such process"}}"#).unwrap_err();
        assert_eq!(error.downcast_ref::<Failure>().unwrap().exit(), Exit::NotFound);
        assert_eq!(error.to_string(), "no such process");
        assert!(end(b"{}").is_ok());
    }
}
