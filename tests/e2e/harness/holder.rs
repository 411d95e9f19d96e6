//! A process that tells by its memory whether it is still the same.

use anyhow::{Context, Result, ensure};

use super::agent::Agent;

/// Holds so many megabytes, no two pages of which are alike, a secret, and a count; answers on a socket with all of them. The
/// socket is in memory as well: nothing of it needs the disk.
const HOLDER: &str = r#"
import os, socket, struct, sys, threading, time, zlib
secret, count = os.urandom(8).hex(), 0
ballast = bytearray(os.urandom(1 << 20)) * int(sys.argv[1])
for page in range(len(ballast) >> 12):
    struct.pack_into('Q', ballast, page << 12, page)
def tick():
    global count
    while True:
        count += 1
        time.sleep(0.01)
threading.Thread(target=tick, daemon=True).start()
server = socket.socket(socket.AF_UNIX)
server.bind('/dev/shm/holder')
server.listen()
while True:
    peer, _ = server.accept()
    with peer:
        peer.sendall(f'{secret} {zlib.crc32(ballast)} {count}'.encode())
"#;

/// A Python script that prints what [`Held::from_answer`] reads.
pub(crate) const ASK: &str = "import socket; s = socket.socket(socket.AF_UNIX); s.connect('/dev/shm/holder'); print(s.recv(200).decode())";

/// What the holder had in its memory when it was asked.
#[derive(Debug)]
pub(crate) struct Held {
    /// Its secret, and the checksum of its megabytes.
    pub(crate) word: String,
    pub(crate) count: u64,
}

impl Held {
    pub(crate) fn from_answer(answer: &str) -> Result<Self> {
        let (word, count) = answer.rsplit_once(' ').context("the holder said too little")?;
        Ok(Self {
            word: word.to_owned(),
            count: count.parse()?,
        })
    }

    /// Whether `later` is what the same holder had later.
    pub(crate) fn goes_on_in(&self, later: &Self) -> Result<()> {
        ensure!(
            later.word == self.word && later.count >= self.count,
            "{self:?} became {later:?}"
        );
        Ok(())
    }
}

impl Agent {
    /// Starts a holder of so many megabytes.
    pub(crate) fn holder(&self, megabytes: u32) -> Result<()> {
        self.exec_with(&["-d"], &["python3", "-c", HOLDER, &megabytes.to_string()])?
            .succeeded()?;
        self.until("the holder listens", "test -S /dev/shm/holder")
    }

    /// What it holds now.
    pub(crate) fn held(&self) -> Result<Held> {
        Held::from_answer(&self.exec(&["python3", "-c", ASK])?.text()?)
    }
}
