//! What a guest may send of the protocol of streams.
//!
//! The session answers some frames, and keeps its answers for as long as nobody reads them: a guest that sends such frames and
//! reads nothing would fill the daemon's memory. A guest of dorm's answers on the streams that the daemon opens and does nothing else.

const HEADER: usize = 12;
const DATA: u8 = 0;
const WINDOW_UPDATE: u8 = 1;
const SYN: u16 = 1;

/// Follows what a guest sends, from header to header.
#[derive(Debug, Default)]
pub(super) struct Frames {
    header: [u8; HEADER],
    /// How much of the header is there.
    have: usize,
    /// Bytes of the frame's content that are still to come.
    content: usize,
}

impl Frames {
    /// Whether all frames that begin in `bytes` are of the kinds that a guest has reason to send.
    pub(super) fn are_due(&mut self, mut bytes: &[u8]) -> bool {
        while !bytes.is_empty() {
            let passed = self.content.min(bytes.len());
            self.content -= passed;
            bytes = &bytes[passed..];
            let taken = (HEADER - self.have).min(bytes.len());
            self.header[self.have..self.have + taken].copy_from_slice(&bytes[..taken]);
            self.have += taken;
            bytes = &bytes[taken..];
            if self.have == HEADER {
                self.have = 0;
                let [_, kind, a, b, _, _, _, _, length @ ..] = self.header;
                if u16::from_be_bytes([a, b]) & SYN != 0 {
                    return false;
                }
                match kind {
                    DATA => self.content = u32::from_be_bytes(length) as usize,
                    WINDOW_UPDATE => {}
                    _ => return false,
                }
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: u8, flags: u16, length: u32) -> Vec<u8> {
        let mut bytes = vec![0, kind];
        bytes.extend(flags.to_be_bytes());
        bytes.extend(1u32.to_be_bytes());
        bytes.extend(length.to_be_bytes());
        bytes
    }

    fn are_due(bytes: &[u8], part: usize) -> bool {
        let mut frames = Frames::default();
        bytes.chunks(part).all(|part| frames.are_due(part))
    }

    #[test]
    fn answers_on_open_streams_pass_however_they_are_cut() {
        let mut bytes = frame(WINDOW_UPDATE, 2, 262_144);
        bytes.extend(frame(DATA, 2, 40));
        // Content that looks like a ping is content.
        bytes.extend(frame(2, 1, 0));
        bytes.extend([2; 28]);
        bytes.extend(frame(DATA, 4, 0));
        bytes.extend(frame(WINDOW_UPDATE, 8, 0));
        for part in 1..=bytes.len() {
            assert!(are_due(&bytes, part), "in parts of {part}");
        }
    }

    #[test]
    fn pings_farewells_and_streams_that_a_guest_opens_do_not() {
        for (kind, flags) in [
            (2, 1),
            (2, 2),
            (3, 0),
            (DATA, 1),
            (WINDOW_UPDATE, 1),
            (WINDOW_UPDATE, 3),
            (4, 0),
        ] {
            let mut bytes = frame(DATA, 0, 3);
            bytes.extend([0; 3]);
            bytes.extend(frame(kind, flags, 0));
            for part in 1..=bytes.len() {
                assert!(!are_due(&bytes, part), "{kind} {flags} in parts of {part}");
            }
        }
    }
}
