//! Streams into a sandbox.

use std::io;
use std::path::Path;
use std::time::Duration;

use dorm_proto::boot::{CONNECT_PORT, CONNECTED, GUEST_PORT, LIST_SOCKETS, SPEAK_HTTP};
use dorm_proto::window;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::Gvisor;
use super::control::Control;
use super::start::SECRET;
use crate::host::LiveBox;
use crate::network;
use crate::{EngineError, GuestStream, Id, Listening, Result};

/// A guest answers within milliseconds.
const ANSWER: Duration = Duration::from_secs(10);
/// How long what was written to a stream that nobody holds any more is offered to a guest that does not take it.
const FAREWELL: Duration = Duration::from_secs(10);
/// Longest tables of sockets that are read. Whoever has that many has opened them for this.
const MAX_TABLES: u64 = 1 << 20;

impl Gvisor {
    pub(super) async fn reach_guest(&self, live: &LiveBox) -> io::Result<window::Stream> {
        self.open_door(&live.id, &[SPEAK_HTTP]).await
    }

    async fn open_door(&self, id: &Id, words: &[u8]) -> io::Result<window::Stream> {
        open_door(&self.host.run_directory(id), id, words).await
    }

    /// By way of the guest: the sandbox itself would hand over more than it can.
    pub(super) async fn reach_port(&self, live: &LiveBox, port: u16) -> Result<Box<dyn GuestStream>> {
        let [high, low] = port.to_be_bytes();
        let connected = async {
            let mut stream = self.open_door(&live.id, &[CONNECT_PORT, high, low]).await?;
            let answer = stream.read_u8().await?;
            io::Result::Ok((answer, stream))
        };
        let connected = tokio::time::timeout(ANSWER, connected).await;
        match connected.unwrap_or_else(|e| Err(e.into())) {
            Ok((CONNECTED, stream)) => Ok(Box::new(stream)),
            Ok(_) => {
                let id = live.id.clone();
                Err(EngineError::PortClosed { id, port })
            }
            Err(error) => Err(EngineError::io("cannot reach a port of the box")(error)),
        }
    }

    /// Those of a frozen box are what they were when it was frozen.
    pub(super) async fn ports(&self, live: &LiveBox) -> Result<Vec<Listening>> {
        if self.is_held(&live.id)? {
            return Ok(self.listeners().get(&live.id).cloned().unwrap_or_default());
        }
        let ports = self.ask_for_ports(&live.id).await;
        ports.map_err(EngineError::io("cannot read the ports of the box"))
    }

    pub(super) async fn ask_for_ports(&self, id: &Id) -> io::Result<Vec<Listening>> {
        let mut found = network::listening_in(&[tables_of(&self.host.run_directory(id), id).await?]);
        found.retain(|one| one.port != GUEST_PORT);
        Ok(found)
    }
}

/// A stream to the guest of the sandbox `id` that has its run directory there.
async fn open_door(directory: &Path, id: &Id, words: &[u8]) -> io::Result<window::Stream> {
    let secret = tokio::fs::read(directory.join(SECRET)).await?;
    let mut stream = Control::of(directory.to_owned(), id).forward(GUEST_PORT).await?;
    stream.write_all(&secret).await?;
    let mut stream = window::through(stream, Some(FAREWELL));
    stream.write_all(words).await?;
    Ok(stream)
}

/// Its tables of sockets.
pub(super) async fn tables_of(directory: &Path, id: &Id) -> io::Result<String> {
    let tables = async {
        let stream = open_door(directory, id, &[LIST_SOCKETS]).await?;
        let mut tables = Vec::new();
        stream.take(MAX_TABLES).read_to_end(&mut tables).await?;
        io::Result::Ok(String::from_utf8_lossy(&tables).into_owned())
    };
    tokio::time::timeout(ANSWER, tables).await?
}
