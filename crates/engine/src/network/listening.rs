//! What listens in a box, read from outside of it.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::Listening;

const LISTEN: &str = "0A";

/// The TCP ports that are listened on in the network namespace of `pid`, by number.
pub(crate) fn listening(pid: i32) -> io::Result<Vec<Listening>> {
    let mut tables = vec![std::fs::read_to_string(format!("/proc/{pid}/net/tcp"))?];
    match std::fs::read_to_string(format!("/proc/{pid}/net/tcp6")) {
        Ok(table) => tables.push(table),
        // A kernel without IPv6.
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    Ok(listening_in(&tables))
}

/// The same, of tables as the kernel writes them.
pub(crate) fn listening_in(tables: &[String]) -> Vec<Listening> {
    let mut found: Vec<Listening> = tables.iter().flat_map(|table| parse(table)).collect();
    found.sort_unstable();
    found.dedup();
    found
}

fn parse(table: &str) -> Vec<Listening> {
    let listener = |line: &str| {
        let mut fields = line.split_ascii_whitespace().skip(1);
        let (address, port) = fields.next()?.split_once(':')?;
        let is_listener = fields.nth(1)? == LISTEN;
        is_listener.then_some(Listening {
            port: u16::from_str_radix(port, 16).ok()?,
            address: ip(address)?,
        })
    };
    table.lines().skip(1).filter_map(listener).collect()
}

/// Words of four bytes, each as a number of this machine.
fn ip(hex: &str) -> Option<IpAddr> {
    let word = |at: usize| Some(u32::from_str_radix(hex.get(at..at + 8)?, 16).ok()?.to_ne_bytes());
    match hex.len() {
        8 => Some(Ipv4Addr::from(word(0)?).into()),
        32 => {
            let mut bytes = [0; 16];
            for (n, part) in bytes.chunks_mut(4).enumerate() {
                part.copy_from_slice(&word(n * 8)?);
            }
            let address = Ipv6Addr::from(bytes);
            Some(address.to_ipv4_mapped().map_or(address.into(), Into::into))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listeners_are_found_and_connections_are_not() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid\n   \
            0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 1 1 0 100 0 0 10 0\n   \
            1: 00000000:0BB8 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 1 1 0 100 0 0 10 0\n   \
            2: 0100007F:1F90 0100007F:B2F4 01 00000000:00000000 00:00000000 00000000  1000        0 1 1 0 100 0 0 10 0\n";
        let found = parse(table);
        let on = |port, address: [u8; 4]| Listening {
            port,
            address: Ipv4Addr::from(address).into(),
        };
        assert_eq!(found, [on(8080, [127, 0, 0, 1]), on(3000, [0, 0, 0, 0])]);
    }

    #[test]
    fn addresses_of_both_families_are_read() {
        assert_eq!(ip("0100007F"), Some(Ipv4Addr::LOCALHOST.into()));
        assert_eq!(
            ip("00000000000000000000000001000000"),
            Some(Ipv6Addr::LOCALHOST.into())
        );
        assert_eq!(
            ip("0000000000000000FFFF00000100007F"),
            Some(Ipv4Addr::LOCALHOST.into())
        );
        assert_eq!(ip("0100"), None);
    }

    #[test]
    fn a_listener_of_this_process_is_seen() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let found = listening(std::process::id() as i32).unwrap();
        assert!(found.iter().any(|one| one.port == port), "{found:?}");
    }
}
