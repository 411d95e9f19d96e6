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
pub(super) fn end_to_outside() {
    for family in [AF_INET, AF_INET6] {
        if let Err(e) = end_all(family) {
            log!("connections to the outside cannot be ended: {e}");
        }
    }
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
