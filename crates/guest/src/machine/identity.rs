//! Who a machine is: its clock, its name, its random numbers, its network.

use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, UdpSocket};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use dorm_proto::vm::Network;
use futures_util::TryStreamExt;
use rtnetlink::packet_route::address::AddressAttribute;
use rtnetlink::packet_route::neighbour::NeighbourState;
use rtnetlink::packet_route::route::RouteScope;
use rtnetlink::{Handle, LinkUnspec, RouteMessageBuilder};

use crate::log::log;
use crate::sys::check;

const INTERFACES: &str = "/sys/class/net";
const DRIVER: &str = "virtio_net";
/// An address that nobody has (TEST-NET-1): the way there is that to anywhere.
const OUTSIDE: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
const NEIGHBOURS: &str = "/proc/net/arp";
/// What the kernel says of a neighbour that it does not forget.
const LASTING: &str = "0x6";
/// What the machine was last given.
static GIVEN: Mutex<Option<Network>> = Mutex::new(None);

pub(super) fn set_clock(now_ms: i64) {
    let now = libc::timespec {
        tv_sec: now_ms.div_euclid(1000),
        tv_nsec: now_ms.rem_euclid(1000) * 1_000_000,
    };
    // SAFETY: the call reads one timespec.
    if let Err(e) = check(unsafe { libc::clock_settime(libc::CLOCK_REALTIME, &raw const now) }) {
        log!("the clock cannot be set: {e}");
    }
}

pub(super) fn set_hostname(name: &str) {
    // SAFETY: the pointer and the length are those of a live string.
    if let Err(e) = check(unsafe { libc::sethostname(name.as_ptr().cast(), name.len()) }) {
        log!("the host name cannot be set: {e}");
    }
}

/// Mixes `entropy` into the kernel's generator and makes it begin anew: a machine that came back from disk has the one that
/// it was saved with, and so have all others that came from there.
pub(super) fn reseed(entropy: &[u8]) {
    const RNDADDENTROPY: libc::c_ulong = 0x4008_5203;
    const RNDRESEEDCRNG: libc::c_ulong = 0x5207;
    const LARGEST: usize = 256;
    #[repr(C)]
    struct Pool {
        bits: libc::c_int,
        size: libc::c_int,
        bytes: [u8; LARGEST],
    }
    let entropy = &entropy[..entropy.len().min(LARGEST)];
    let mut pool = Pool {
        // Four for each hexadecimal digit.
        bits: entropy.len() as libc::c_int * 4,
        size: entropy.len() as libc::c_int,
        bytes: [0; LARGEST],
    };
    pool.bytes[..entropy.len()].copy_from_slice(entropy);
    let reseeded = std::fs::File::open("/dev/urandom").and_then(|source| {
        // SAFETY: the first request reads the two numbers and `size` bytes, all within the structure; the second reads nothing.
        unsafe {
            check(libc::ioctl(source.as_raw_fd(), RNDADDENTROPY, &raw const pool))?;
            check(libc::ioctl(source.as_raw_fd(), RNDRESEEDCRNG))
        }
    });
    if let Err(e) = reseeded {
        log!("the random source cannot be seeded anew: {e}");
    }
}

/// Gives the machine the addresses and routes of `network`, and takes away those it had.
pub(super) async fn set_network(network: &Network) -> io::Result<()> {
    // So it is after most wakes, and each question to the kernel takes milliseconds in emulation.
    if given().as_ref() == Some(network) && is_whole(network).unwrap_or(false) {
        return Ok(());
    }
    *given() = None;
    let index = own_interface(Path::new(INTERFACES))?;
    let (connection, handle, _) = rtnetlink::new_connection()?;
    let connection = tokio::spawn(connection);
    let done = configure(&handle, index, network).await;
    connection.abort();
    done.map_err(io::Error::other)?;
    *given() = Some(network.clone());
    Ok(())
}

fn given() -> MutexGuard<'static, Option<Network>> {
    GIVEN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether root has left it what it was given, as far as that takes to reach the outside and oneself.
fn is_whole(network: &Network) -> io::Result<bool> {
    Ok(leads_from(network.address, OUTSIDE)?
        && leads_from(Ipv4Addr::LOCALHOST, Ipv4Addr::LOCALHOST)?
        && knows_gateway(&fs::read_to_string(NEIGHBOURS)?, network))
}

/// Whether what goes to `to` leaves from the address `from`: a link is up then, and has address and route. Nothing is sent.
fn leads_from(from: Ipv4Addr, to: Ipv4Addr) -> io::Result<bool> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    socket.connect((to, 9))?;
    Ok(socket.local_addr()?.ip() == from)
}

/// Whether the table of neighbours has the gateway, for good: nobody would answer who asks for it.
fn knows_gateway(neighbours: &str, network: &Network) -> bool {
    let mac = network.gateway_mac.map(|byte| format!("{byte:02x}")).join(":");
    neighbours.lines().any(|line| {
        let fields: Vec<&str> = line.split_ascii_whitespace().collect();
        matches!(fields[..], [address, _, LASTING, found, ..]
            if found == mac && address.parse() == Ok(network.gateway))
    })
}

/// The number of the machine's own interface: root may have renamed it, and given its name to another.
fn own_interface(interfaces: &Path) -> io::Result<u32> {
    let is_own = |interface: &Path| {
        let driver = fs::read_link(interface.join("device/driver"));
        driver.is_ok_and(|driver| driver.ends_with(DRIVER))
    };
    let found = fs::read_dir(interfaces)?.flatten().map(|entry| entry.path());
    let own = found.filter(|interface| is_own(interface)).find_map(|interface| {
        let index = fs::read_to_string(interface.join("ifindex")).ok()?;
        index.trim().parse().ok()
    });
    let gone = "the machine has no network device any more; a restart of the agent brings it back";
    own.ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, gone))
}

async fn configure(handle: &Handle, index: u32, network: &Network) -> Result<(), rtnetlink::Error> {
    handle
        .link()
        .set(LinkUnspec::new_with_name("lo").up().build())
        .execute()
        .await?;
    let mut link = LinkUnspec::new_with_index(index)
        .address(network.mac.to_vec())
        .up();
    if let Some(mtu) = network.mtu {
        link = link.mtu(mtu);
    }
    handle.link().set(link.build()).execute().await?;

    let own = AddressAttribute::Local(IpAddr::V4(network.address));
    let mut has_own = false;
    let mut found = handle.address().get().set_link_index_filter(index).execute();
    while let Some(message) = found.try_next().await? {
        if message.attributes.contains(&own) {
            has_own = true;
        } else if message.header.prefix_len == 32 {
            handle.address().del(message).execute().await?;
        }
    }
    if !has_own {
        handle
            .address()
            .add(index, IpAddr::V4(network.address), 32)
            .execute()
            .await?;
    }
    handle
        .neighbours()
        .add(index, IpAddr::V4(network.gateway))
        .link_layer_address(&network.gateway_mac)
        .state(NeighbourState::Permanent)
        .replace()
        .execute()
        .await?;
    let to_gateway = RouteMessageBuilder::<Ipv4Addr>::new()
        .destination_prefix(network.gateway, 32)
        .output_interface(index)
        .scope(RouteScope::Link)
        .build();
    handle.route().add(to_gateway).replace().execute().await?;
    let default = RouteMessageBuilder::<Ipv4Addr>::new()
        .gateway(network.gateway)
        .output_interface(index)
        .build();
    handle.route().add(default).replace().execute().await
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn the_machines_own_interface_is_found_under_any_name() {
        let folder = tempfile::tempdir().unwrap();
        let interface = |name: &str, index: &str, driver: Option<&str>| {
            let at = folder.path().join(name);
            fs::create_dir_all(at.join("device")).unwrap();
            fs::write(at.join("ifindex"), index).unwrap();
            if let Some(driver) = driver {
                symlink(format!("../../drivers/{driver}"), at.join("device/driver")).unwrap();
            }
        };
        interface("lo", "1\n", None);
        interface("eth0", "3\n", Some("netdevsim"));
        let gone = own_interface(folder.path()).unwrap_err();
        assert!(gone.to_string().contains("restart"), "{gone}");
        interface("uplink", "2\n", Some("virtio_net"));
        assert_eq!(own_interface(folder.path()).unwrap(), 2);
    }

    #[test]
    fn a_gateway_is_known_if_it_is_the_right_one_and_for_good() {
        let network = Network {
            mac: [2, 0, 0, 0, 0, 1],
            address: Ipv4Addr::new(10, 0, 0, 2),
            gateway: Ipv4Addr::new(10, 0, 0, 1),
            gateway_mac: [2, 0, 0, 0, 0, 0xfe],
            mtu: None,
        };
        let table = |address: &str, flags: &str, mac: &str| {
            format!(
                "IP address       HW type     Flags       HW address            Mask     Device\n\
                 {address:<17}0x1         {flags}         {mac}     *        eth0\n"
            )
        };
        assert!(knows_gateway(
            &table("10.0.0.1", "0x6", "02:00:00:00:00:fe"),
            &network
        ));
        for (address, flags, mac) in [
            ("10.0.0.1", "0x2", "02:00:00:00:00:fe"),
            ("10.0.0.1", "0x6", "02:00:00:00:00:ff"),
            ("10.0.0.11", "0x6", "02:00:00:00:00:fe"),
        ] {
            let other = table(address, flags, mac);
            assert!(!knows_gateway(&other, &network), "{other}");
        }
    }

    #[test]
    fn a_way_leads_from_the_address_that_it_leaves_from() {
        assert!(leads_from(Ipv4Addr::LOCALHOST, Ipv4Addr::LOCALHOST).unwrap());
        assert!(!leads_from(Ipv4Addr::new(10, 0, 0, 2), Ipv4Addr::LOCALHOST).unwrap());
    }
}
