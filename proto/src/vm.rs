//! How the daemon speaks to a guest that is process 1 of a virtual machine: over one serial port.
//!
//! Everything goes over streams that a multiplexer makes of the port. The daemon opens them, and begins each with an
//! [`Order`], as JSON behind its length in four bytes. Some are answered in the same way; [`Order::Guest`] and
//! [`Order::Port`] turn the stream into a connection.
//!
//! Below the multiplexer lies an [escape](Escape): either side of a serial port can be gone at any moment, the daemon by a
//! restart and the guest by a return to an earlier memory, and the other must be able to tell where the bytes of a new
//! conversation begin.

use std::collections::VecDeque;
use std::net::Ipv4Addr;

use serde::{Deserialize, Serialize};

use crate::boot::BootConfig;

/// Name of the serial port, as the guest finds it.
pub const PORT_NAME: &str = "dorm";
/// Name and first argument under which a machine's kernel and initial file system start the guest.
pub const INIT: &str = "/init";
/// Where the initial file system has the kernel's modules, named so that their order is that of loading.
pub const MODULES: &str = "/modules";
/// Where those are that are loaded once the guest serves.
pub const LATER_MODULES: &str = "/later";
/// On the kernel's command line, if the machine's second disk holds the kernel's modules.
pub const WITH_MODULES: &str = "dorm.modules";
/// Longest order and longest answer.
pub const MAX_MESSAGE: usize = 256 * 1024;

/// The first words on a stream.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// What a box is told at its start; answered when the guest serves.
    Boot {
        config: Box<BootConfig>,
        network: Network,
        /// Milliseconds since the epoch.
        now_ms: i64,
        /// Hexadecimal; for the kernel's random source.
        entropy: String,
        /// Where the volumes are to be mounted, in the order in which [`crate::volume`] counts them.
        #[serde(default)]
        volumes: Vec<String>,
        /// How many processes its runs may have.
        #[serde(default)]
        pids: Option<u32>,
    },
    /// After a return from disk: answered when the machine knows the time and who it is, and its processes go on. It says that it
    /// failed if its network could not be set up; everything else is done then.
    Resume {
        hostname: String,
        network: Network,
        now_ms: i64,
        entropy: String,
        /// Whose machine it is now. Daemons of earlier versions do not say.
        #[serde(default)]
        agent_id: Option<String>,
    },
    /// After a time in which the machine stood still, or was about to.
    Clock { now_ms: i64 },
    /// Answered when no process of the box runs, everything written is on the machine's disk, and nothing is under way to its volumes, as is
    /// right for a machine that is about to stand still; with [`Answer::Held`] where the disk takes too long. [`Order::Resume`] or
    /// [`Order::Clock`] let all of it go on. It says that it failed where the volumes take too long, and all of it goes on at once.
    Sync,
    /// As SIGTERM to process 1 of a container; the machine is off at the end.
    Stop,
    /// Which TCP ports are listened on.
    Listening,
    /// Everything on the root disk as a tar archive, in chunks behind their lengths in four bytes. One of length zero is the last;
    /// the answer behind it says whether the archive is whole.
    Archive,
    /// The stream becomes a connection to the guest's server. Not answered.
    Guest,
    /// The stream becomes a connection to a port of the loopback, once that is answered.
    Port { port: u16 },
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    Done,
    /// Nothing listens on the port.
    Refused,
    Failed(String),
    /// What listens in `/proc/net/tcp` and `/proc/net/tcp6`, below their heads: all that these say of it, or the fields up to its state.
    Listening(Vec<String>),
    /// To [`Order::Sync`]: no process runs, but not everything written is on the disk. Earlier guests wait for that, however long it takes.
    Held,
}

/// What a machine's interface is to have.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Network {
    pub mac: [u8; 6],
    pub address: Ipv4Addr,
    pub gateway: Ipv4Addr,
    pub gateway_mac: [u8; 6],
    pub mtu: Option<u32>,
}

/// Which conversation it is. Chosen at random by the daemon.
pub type Epoch = [u8; 8];

const MARK: u8 = 0xff;
const LITERAL: u8 = 0x00;
const BEGIN: u8 = 0x01;

/// Appends `data` to `out` so that no beginning is seen in it.
pub fn escape(data: &[u8], out: &mut Vec<u8>) {
    let mut rest = data;
    while let Some(at) = memchr::memchr(MARK, rest) {
        out.extend_from_slice(&rest[..=at]);
        out.push(LITERAL);
        rest = &rest[at + 1..];
    }
    out.extend_from_slice(rest);
}

/// The beginning of the conversation `epoch`. Its digits are text, so that they hold no mark.
pub fn beginning(epoch: Epoch) -> Vec<u8> {
    let mut out = vec![MARK, BEGIN];
    out.extend(
        epoch
            .iter()
            .flat_map(|byte| [b'a' + (byte >> 4), b'a' + (byte & 15)]),
    );
    out
}

/// A piece of what was received.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Piece {
    Data(Vec<u8>),
    Begin(Epoch),
}

/// Takes apart what [`escape`] and [`beginning`] made, whatever was lost before a beginning.
#[derive(Debug, Default)]
pub struct Escape {
    state: State,
    ready: VecDeque<Piece>,
}

#[derive(Debug, Default)]
enum State {
    #[default]
    Plain,
    Marked,
    Beginning(Vec<u8>),
}

impl Escape {
    pub fn push(&mut self, received: &[u8]) {
        let mut data = Vec::with_capacity(received.len());
        let mut rest = received;
        while let Some((byte, others)) = rest.split_first() {
            if let State::Plain = self.state {
                // Most of what comes is plain, and long.
                let plain = memchr::memchr(MARK, rest).unwrap_or(rest.len());
                if plain > 0 {
                    data.extend_from_slice(&rest[..plain]);
                    rest = &rest[plain..];
                    continue;
                }
            }
            rest = others;
            match (&mut self.state, *byte) {
                // A mark is never part of anything else, so what came before it was cut off.
                (_, MARK) => self.state = State::Marked,
                (State::Plain, byte) => data.push(byte),
                (State::Marked, LITERAL) => {
                    data.push(MARK);
                    self.state = State::Plain;
                }
                (State::Marked, BEGIN) => self.state = State::Beginning(Vec::new()),
                (State::Marked, byte) => {
                    data.push(byte);
                    self.state = State::Plain;
                }
                (State::Beginning(digits), digit) => {
                    digits.push(digit.wrapping_sub(b'a') & 15);
                    if digits.len() == 2 * size_of::<Epoch>() {
                        let mut epoch = Epoch::default();
                        for (byte, pair) in epoch.iter_mut().zip(digits.chunks_exact(2)) {
                            *byte = pair[0] << 4 | pair[1];
                        }
                        if !data.is_empty() {
                            self.ready.push_back(Piece::Data(std::mem::take(&mut data)));
                        }
                        self.ready.push_back(Piece::Begin(epoch));
                        self.state = State::Plain;
                    }
                }
            }
        }
        if !data.is_empty() {
            self.ready.push_back(Piece::Data(data));
        }
    }

    /// The next piece of what was pushed.
    pub fn next_piece(&mut self) -> Option<Piece> {
        self.ready.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(escape: &mut Escape) -> Vec<Piece> {
        std::iter::from_fn(|| escape.next_piece()).collect()
    }

    #[test]
    fn every_byte_comes_through_however_it_is_cut() {
        let data: Vec<u8> = (0..=255).chain([MARK, MARK, BEGIN, MARK]).collect();
        let mut wire = Vec::new();
        escape(&data, &mut wire);
        for size in [1, 2, 3, wire.len()] {
            let mut receiver = Escape::default();
            let mut got = Vec::new();
            for part in wire.chunks(size) {
                receiver.push(part);
                for piece in pieces(&mut receiver) {
                    match piece {
                        Piece::Data(data) => got.extend(data),
                        Piece::Begin(_) => panic!("data was taken for a beginning"),
                    }
                }
            }
            assert_eq!(got, data);
        }
    }

    #[test]
    fn a_beginning_is_found_wherever_the_conversation_before_it_was_cut_off() {
        let (old, new) = ([0x12; 8], [0xff, 0, 1, 2, 3, 4, 5, 0xfe]);
        let mut before = vec![b'x', MARK, LITERAL];
        before.extend(beginning(old));
        for cut in 0..=before.len() {
            let mut wire = before[..cut].to_vec();
            wire.extend(beginning(new));
            escape(b"after\xff", &mut wire);
            let mut receiver = Escape::default();
            receiver.push(&wire);
            let got = pieces(&mut receiver);
            let tail = [Piece::Begin(new), Piece::Data(b"after\xff".to_vec())];
            assert_eq!(got[got.len() - 2..], tail, "cut after {cut}");
        }
    }
}
