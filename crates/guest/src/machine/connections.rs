//! Connections of the machine to the outside, which end with a sleep on disk: whoever waits for the other end hears of it, and not nothing
//! for ever.

use std::io;

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage, NetlinkPayload,
};
use netlink_packet_sock_diag::constants::{AF_INET, AF_INET6, IPPROTO_TCP};
use netlink_packet_sock_diag::inet::{ExtensionFlags, InetRequest, SocketId, StateFlags};
use netlink_packet_sock_diag::{SOCK_DESTROY, SockDiagMessage};
use netlink_sys::protocols::NETLINK_SOCK_DIAG;
use netlink_sys::{Socket, SocketAddr};

use crate::log::log;

/// Of the kernel's answers, which are at most as long.
const BUFFER: usize = 32 * 1024;

/// Resets all connections over TCP but those that the machine has with itself.
pub(super) async fn end_to_outside() {
    for (family, table) in [(AF_INET, "/proc/net/tcp"), (AF_INET6, "/proc/net/tcp6")] {
        // To end one, the kernel has to load modules first, which takes its time in emulation, and another thread of this program.
        match std::fs::read_to_string(table) {
            Ok(table) if !tells_of_outside(&table) => continue,
            // Without IPv6.
            Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
            _ => {}
        }
        let ended = tokio::task::spawn_blocking(move || end_all(family)).await;
        if let Err(e) = ended.unwrap_or_else(|e| Err(io::Error::other(e))) {
            log!("connections to the outside cannot be ended: {e}");
        }
    }
}

/// Whether a table of the kernel's has a connection that may lead outside.
fn tells_of_outside(table: &str) -> bool {
    table.lines().skip(1).any(|line| {
        let mut fields = line.split_ascii_whitespace().skip(1);
        let addresses = [fields.next(), fields.next()].map(|field| field?.split_once(':'));
        let [Some((from, _)), Some((to, _))] = addresses else {
            return true;
        };
        // One that listens or has ended leads nowhere.
        let open = !matches!(fields.next(), Some("0A" | "06" | "07"));
        // Words of 32 bits, each with its last byte first.
        let within = from == to
            || to == "00000000000000000000000001000000"
            || to.ends_with("7F") && (to.len() == 8 || to.contains("FFFF0000"));
        open && !within
    })
}

fn end_all(family: u8) -> io::Result<()> {
    let mut kernel = Socket::new(NETLINK_SOCK_DIAG)?;
    kernel.bind_auto()?;
    kernel.connect(&SocketAddr::new(0, 0))?;
    let open = StateFlags::all() - StateFlags::LISTEN - StateFlags::TIME_WAIT - StateFlags::CLOSE;
    let mut all = request(family, open, SocketId::new_v4());
    all.header.flags = NLM_F_REQUEST | NLM_F_DUMP;
    let mut found = Vec::new();
    ask(&kernel, &mut all, |socket| found.push(socket))?;
    for socket in found.into_iter().filter(leads_outside) {
        let mut end = request(family, StateFlags::empty(), socket);
        end.header.flags = NLM_F_REQUEST | NLM_F_ACK;
        end.header.message_type = SOCK_DESTROY;
        // One that has ended meanwhile is not there.
        let _ = ask(&kernel, &mut end, |_| ());
    }
    Ok(())
}

fn leads_outside(socket: &SocketId) -> bool {
    let [from, to] =
        [socket.source_address, socket.destination_address].map(|address| address.to_canonical());
    from != to && !to.is_loopback() && !to.is_unspecified()
}

fn request(family: u8, states: StateFlags, socket_id: SocketId) -> NetlinkMessage<SockDiagMessage> {
    let request = InetRequest {
        family,
        protocol: IPPROTO_TCP,
        extensions: ExtensionFlags::empty(),
        states,
        socket_id,
    };
    let mut message = NetlinkMessage::new(
        NetlinkHeader::default(),
        NetlinkPayload::from(SockDiagMessage::InetRequest(request)),
    );
    message.finalize();
    message
}

/// Has each socket that the kernel names taken by `take`, until it has done what it was asked.
fn ask(
    kernel: &Socket,
    message: &mut NetlinkMessage<SockDiagMessage>,
    mut take: impl FnMut(SocketId),
) -> io::Result<()> {
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    kernel.send(&bytes, 0)?;
    let mut buffer = vec![0; BUFFER];
    loop {
        let received = kernel.recv(&mut &mut buffer[..], 0)?;
        let mut rest = &buffer[..received];
        while !rest.is_empty() {
            let answer = NetlinkMessage::<SockDiagMessage>::deserialize(rest).map_err(io::Error::other)?;
            match answer.payload {
                NetlinkPayload::InnerMessage(SockDiagMessage::InetResponse(found)) => {
                    take(found.header.socket_id);
                }
                NetlinkPayload::Done(_) => return Ok(()),
                NetlinkPayload::Error(e) if e.code.is_none() => return Ok(()),
                NetlinkPayload::Error(e) => return Err(e.to_io()),
                _ => {}
            }
            let length = (answer.header.length as usize).next_multiple_of(4);
            rest = rest.get(length..).unwrap_or_default();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_without_a_connection_to_the_outside_is_seen_to_have_none() {
        let head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n";
        let table = |from: &str, to: &str, state: &str| {
            format!(
                "{head}   0: {from}:1F90 {to}:C350 {state} 00000000:00000000 00:00000000 00000000     0        0 1 1 0\n"
            )
        };
        let (here, there) = ("0200000A", "010200C0");
        let mapped = |address: &str| format!("0000000000000000FFFF0000{address}");
        assert!(tells_of_outside(&table(here, there, "01")));
        assert!(tells_of_outside(&table(&mapped(here), &mapped(there), "08")));
        assert!(tells_of_outside(&table(
            "B80D0120000000000000000002000000",
            "B80D0120000000000000000001000000",
            "01"
        )));
        for (from, to, state) in [
            (here, "00000000", "0A"),
            (here, there, "06"),
            (here, here, "01"),
            ("0100007F", "0100007F", "01"),
            (&mapped("0100007F"), &mapped("0200007F"), "01"),
            (
                "00000000000000000000000001000000",
                "00000000000000000000000001000000",
                "01",
            ),
        ] {
            assert!(!tells_of_outside(&table(from, to, state)), "{from} {to} {state}");
        }
        assert!(!tells_of_outside(head));
    }

    #[test]
    fn only_what_leads_outside_is_ended() {
        let socket = |from: &str, to: &str| SocketId {
            source_address: from.parse().unwrap(),
            destination_address: to.parse().unwrap(),
            ..SocketId::new_v4()
        };
        assert!(leads_outside(&socket("10.0.0.2", "192.0.2.1")));
        assert!(leads_outside(&socket("::ffff:10.0.0.2", "::ffff:192.0.2.1")));
        assert!(!leads_outside(&socket("127.0.0.1", "127.0.0.1")));
        assert!(!leads_outside(&socket("::ffff:127.0.0.1", "::ffff:127.0.0.2")));
        assert!(!leads_outside(&socket("::1", "::1")));
        assert!(!leads_outside(&socket("10.0.0.2", "10.0.0.2")));
    }
}
