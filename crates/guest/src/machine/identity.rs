//! Who a machine is: its clock, its name, its random numbers, its network.

use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::AsRawFd;
use std::path::Path;

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
    let index = own_interface(Path::new(INTERFACES))?;
    let (connection, handle, _) = rtnetlink::new_connection()?;
    let connection = tokio::spawn(connection);
    let done = configure(&handle, index, network).await;
    connection.abort();
    done.map_err(io::Error::other)
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
}
