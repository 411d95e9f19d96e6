//! Connect's framing of streams: a byte of flags, the length in 32 bits, the message.

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use serde_json::Value;

use super::{GuestError, broken, refused};

const HEAD: usize = 5;
const COMPRESSED: u8 = 0x01;
const END: u8 = 0x02;
const MAX_MESSAGE: usize = 16 * 1024 * 1024;

pub(super) fn envelope(message: &[u8]) -> Bytes {
    framed(0, message)
}

fn framed(flags: u8, message: &[u8]) -> Bytes {
    let mut bytes = BytesMut::with_capacity(HEAD + message.len());
    bytes.put_u8(flags);
    bytes.put_u32(u32::try_from(message.len()).unwrap_or(u32::MAX));
    bytes.put_slice(message);
    bytes.freeze()
}

/// The messages of an answer, up to its end frame.
pub(super) struct Envelopes {
    body: Incoming,
    buffer: BytesMut,
    ended: bool,
}

impl Envelopes {
    pub(super) fn new(body: Incoming) -> Self {
        Self {
            body,
            buffer: BytesMut::new(),
            ended: false,
        }
    }

    /// The next message; `None` after the end frame. An error in the end frame is returned as one.
    pub(super) async fn next(&mut self) -> Result<Option<Bytes>, GuestError> {
        while !self.ended {
            let Some((flags, message)) = take(&mut self.buffer)? else {
                self.fill().await?;
                continue;
            };
            if flags & END == 0 {
                return Ok(Some(message));
            }
            self.ended = true;
            let end: Value = serde_json::from_slice(&message).unwrap_or_default();
            if let Some(error) = end.get("error").filter(|error| !error.is_null()) {
                return Err(refused(error.to_string().as_bytes(), "unknown"));
            }
        }
        Ok(None)
    }

    async fn fill(&mut self) -> Result<(), GuestError> {
        match self.body.frame().await {
            Some(frame) => {
                if let Ok(data) = frame.map_err(broken)?.into_data() {
                    self.buffer.extend_from_slice(&data);
                }
                Ok(())
            }
            None => Err(GuestError::Broken("it ended in the middle of an answer".into())),
        }
    }
}

fn take(buffer: &mut BytesMut) -> Result<Option<(u8, Bytes)>, GuestError> {
    if buffer.len() < HEAD {
        return Ok(None);
    }
    let flags = buffer[0];
    let length = u32::from_be_bytes([buffer[1], buffer[2], buffer[3], buffer[4]]) as usize;
    if flags & COMPRESSED != 0 || length > MAX_MESSAGE {
        return Err(GuestError::Protocol("a message is compressed or too long".into()));
    }
    if buffer.len() < HEAD + length {
        return Ok(None);
    }
    buffer.advance(HEAD);
    Ok(Some((flags, buffer.split_to(length).freeze())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_taken_whole_however_they_arrive() {
        let sent = [framed(0, b"one"), framed(0, b""), framed(END, b"{}")].concat();
        let mut buffer = BytesMut::new();
        let mut taken = Vec::new();
        for byte in sent {
            buffer.put_u8(byte);
            while let Some((flags, message)) = take(&mut buffer).unwrap() {
                taken.push((flags, message));
            }
        }
        assert_eq!(
            taken,
            [
                (0, "one".into()),
                (0, "".into()),
                (END, Bytes::from_static(b"{}"))
            ]
        );
    }

    #[test]
    fn a_message_that_is_too_long_is_refused_before_it_is_read() {
        let mut buffer = BytesMut::from(&[0, 0xff, 0xff, 0xff, 0xff][..]);
        assert!(matches!(take(&mut buffer), Err(GuestError::Protocol(_))));
    }
}
