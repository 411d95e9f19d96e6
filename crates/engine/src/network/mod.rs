//! The network of boxes: an interface pair for each, one firewall table for all.
//!
//! A box has a /32 address and reaches everything through a gateway that is only a neighbour entry: no address of the
//! host is involved, and boxes share no link. What boxes may reach is decided in [`firewall`], what one of them may in [`gate`].

use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use rtnetlink::packet_route::link::{InfoData, InfoVeth};
use rtnetlink::{Handle, LinkMessageBuilder, LinkUnspec, LinkVeth, RouteMessageBuilder};

use self::gate::Gate;
use self::names::{Ears, Names};
use crate::{EngineError, Id, Result};

mod firewall;
mod gate;
mod inside;
mod listening;
mod names;
mod policy;
mod range;
mod resolver;

pub use inside::Inside;
pub(crate) use inside::Owned;
pub(crate) use listening::{listening, listening_in};
pub use policy::{Block, InvalidTarget, Name, Policy, Target};
pub use range::{InvalidRange, Range};

/// The resolvers that boxes use if none are configured.
pub fn host_resolvers() -> Vec<Ipv4Addr> {
    resolver::resolvers(&[])
}

/// The gateway of every box: a link-local address that exists only as their neighbour.
pub const GATEWAY: Ipv4Addr = Ipv4Addr::new(169, 254, 1, 1);
/// Hardware address of the host's end of every pair.
const GATEWAY_MAC: [u8; 6] = [0xee, 0xee, 0xee, 0xee, 0xee, 0xee];

#[derive(Debug, Clone)]
pub struct Config {
    /// Addresses of boxes; `None` for a block that nothing on this host uses.
    pub range: Option<Range>,
    /// Resolvers that DNS queries of boxes are sent to; empty for the host's own.
    pub nameservers: Vec<IpAddr>,
}

/// The networks of one daemon's boxes.
#[derive(Debug)]
pub struct Network {
    range: Range,
    /// Tells this daemon's interfaces and tables from another's on the same host.
    instance: String,
    host: Handle,
    inside: Inside,
    mtu: Option<u32>,
    gate: Arc<Gate>,
    names: Arc<Names>,
}

impl Network {
    /// Loads the firewall. Must be called within a tokio runtime.
    pub async fn open(config: &Config, data: &Path, instance: &str) -> Result<Self> {
        let failed = || EngineError::io("cannot set up the network of boxes");
        let (connection, host, _) = rtnetlink::new_connection().map_err(failed())?;
        tokio::spawn(connection);
        std::fs::write("/proc/sys/net/ipv4/ip_forward", "1")
            .map_err(EngineError::io("cannot turn on IPv4 forwarding"))?;
        let range = range::claim(&host, config.range, data, instance).await?;
        let resolvers = resolver::resolvers(&config.nameservers);
        if resolvers.is_empty() {
            tracing::warn!("no resolver is known that boxes could use; set network.nameservers");
        }
        let ears = match listen(&host, range.base).await {
            Ok(ears) => Some(ears),
            Err(reason) => {
                tracing::warn!(reason, "names cannot be allowed to single boxes; addresses can");
                None
            }
        };
        let own = ears.as_ref().map(|ears| ears.address);
        firewall::load(instance, &range, &resolvers, own).await?;
        let gate = Arc::new(Gate::open(instance).await?);
        let mtu = outward_mtu(&host).await;
        Ok(Self {
            range,
            names: Names::serve(ears, resolvers, gate.clone()),
            gate,
            instance: instance.to_owned(),
            host,
            inside: Inside::start()?,
            mtu,
        })
    }

    pub async fn close(&self) {
        firewall::unload(&self.instance).await;
        silence(&self.host, self.range.base).await;
        range::release(&self.host, &self.range, &self.instance).await;
    }

    pub fn range(&self) -> Range {
        self.range
    }

    pub fn inside(&self) -> &Inside {
        &self.inside
    }

    pub fn address(&self, slot: u32) -> Result<Ipv4Addr> {
        let none = || {
            EngineError::io("no address is left")(io::Error::other(format!("slot {slot} of {}", self.range)))
        };
        self.range.address(slot).ok_or_else(none)
    }

    fn interface(&self, id: &Id) -> String {
        format!(
            "{}{}",
            firewall::interface_prefix(&self.instance),
            &id.as_str()[..10]
        )
    }

    /// Makes `policy` hold for the box `id` in `slot`, whether it runs or comes up, in one step.
    pub async fn apply(&self, id: &Id, slot: u32, policy: &Policy) -> Result<()> {
        let (address, interface) = (self.address(slot)?, self.interface(id));
        let kept = self.names.apply(&interface, address, policy);
        self.gate
            .apply(&interface, address, policy, kept.as_deref())
            .await
    }

    /// Gives the namespace `netns` of box `id` its interface, address and routes, once `policy` holds for it.
    pub async fn attach(&self, id: &Id, slot: u32, policy: &Policy, netns: &Arc<OwnedFd>) -> Result<()> {
        self.apply(id, slot, policy).await?;
        self.connect(id, slot, netns, Owned::One).await
    }

    /// The same, where the policy holds already.
    pub(crate) async fn connect(&self, id: &Id, slot: u32, netns: &Arc<OwnedFd>, owned: Owned) -> Result<()> {
        let failed = |doing: &'static str| move |e| EngineError::io(doing)(io::Error::other(e));
        let address = self.address(slot)?;
        let name = self.interface(id);
        let peer = LinkMessageBuilder::<LinkUnspec>::new()
            .name("eth0".to_owned())
            .setns_by_fd(netns.as_raw_fd());
        let mut pair = LinkMessageBuilder::<LinkVeth>::new(&name, "eth0")
            .set_info_data(InfoData::Veth(InfoVeth::Peer(with_mtu(peer, self.mtu).build())))
            .address(GATEWAY_MAC.to_vec())
            .up();
        pair = with_mtu(pair, self.mtu);
        self.host
            .link()
            .add(pair.build())
            .execute()
            .await
            .map_err(failed("cannot make the interface pair"))?;

        let host_side = self.route_to(address, &name);
        let box_side = self.inside.configure(Arc::clone(netns), address, owned);
        let (host_side, box_side) = tokio::join!(host_side, box_side);
        host_side.map_err(failed("cannot route to the box"))?;
        box_side
    }

    /// The name that the interface of a machine is to have.
    pub(crate) fn machine_interface(&self, id: &Id) -> String {
        self.interface(id)
    }

    /// What the guest of a machine in `slot` gives its interface. The hardware address follows from the other.
    pub(crate) fn of_machine(&self, slot: u32) -> Result<dorm_proto::vm::Network> {
        let address = self.address(slot)?;
        let [a, b, c, d] = address.octets();
        Ok(dorm_proto::vm::Network {
            mac: [0x02, 0xfc, a, b, c, d],
            address,
            gateway: GATEWAY,
            gateway_mac: GATEWAY_MAC,
            mtu: self.mtu,
        })
    }

    /// Connects the interface of the machine `id`, which its process has made, once `policy` holds for it.
    pub(crate) async fn attach_machine(&self, id: &Id, slot: u32, policy: &Policy) -> Result<()> {
        let failed = |doing: &'static str| move |e| EngineError::io(doing)(io::Error::other(e));
        let address = self.address(slot)?;
        let name = self.interface(id);
        self.apply(id, slot, policy).await?;
        let link = LinkMessageBuilder::<LinkUnspec>::new()
            .name(name.clone())
            .address(GATEWAY_MAC.to_vec())
            .up();
        self.host
            .link()
            .set(with_mtu(link, self.mtu).build())
            .execute()
            .await
            .map_err(failed("cannot bring up the machine's interface"))?;
        self.route_to(address, &name)
            .await
            .map_err(failed("cannot route to the box"))
    }

    async fn route_to(&self, address: Ipv4Addr, interface: &str) -> Result<(), rtnetlink::Error> {
        let route = RouteMessageBuilder::<Ipv4Addr>::new()
            .destination_prefix(address, 32)
            .output_interface(index_of(&self.host, interface).await?)
            .scope(rtnetlink::packet_route::route::RouteScope::Link)
            .build();
        self.host.route().add(route).replace().execute().await
    }

    /// Removes the host's end of a box's interface, and with it the pair, and its policy. Nothing there is no error.
    pub async fn detach(&self, id: &Id) {
        let interface = self.interface(id);
        if let Ok(index) = index_of(&self.host, &interface).await {
            let _ = self.host.link().del(index).execute().await;
        }
        self.names.forget(&interface);
        self.gate.remove(&interface).await;
    }
}

const EXISTS: i32 = rustix::io::Errno::EXIST.raw_os_error();

/// Sockets for the queries of boxes, on an address that no box has and nobody but them is led to.
async fn listen(host: &Handle, address: Ipv4Addr) -> Result<Ears, String> {
    let loopback = index_of(host, "lo").await.map_err(|e| e.to_string())?;
    let added = host.address().add(loopback, IpAddr::V4(address), 32);
    match added.execute().await {
        Err(rtnetlink::Error::NetlinkError(error)) if error.raw_code() == -EXISTS => {}
        added => added.map_err(|e| e.to_string())?,
    }
    Ears::bind(address).await.map_err(|e| e.to_string())
}

async fn silence(host: &Handle, address: Ipv4Addr) {
    use futures_util::TryStreamExt;
    let mut found = host
        .address()
        .get()
        .set_address_filter(IpAddr::V4(address))
        .execute();
    if let Ok(Some(message)) = found.try_next().await {
        let _ = host.address().del(message).execute().await;
    }
}

fn with_mtu<T>(builder: LinkMessageBuilder<T>, mtu: Option<u32>) -> LinkMessageBuilder<T> {
    match mtu {
        Some(mtu) => builder.mtu(mtu),
        None => builder,
    }
}

async fn index_of(handle: &Handle, name: &str) -> Result<u32, rtnetlink::Error> {
    use futures_util::TryStreamExt;
    let mut links = handle.link().get().match_name(name.to_owned()).execute();
    links
        .try_next()
        .await?
        .map(|link| link.header.index)
        .ok_or(rtnetlink::Error::RequestFailed)
}

/// The packet size of the interface that the default route leads to.
async fn outward_mtu(handle: &Handle) -> Option<u32> {
    use futures_util::TryStreamExt;
    use rtnetlink::packet_route::link::LinkAttribute;
    use rtnetlink::packet_route::route::RouteAttribute;
    let mut routes = handle
        .route()
        .get(RouteMessageBuilder::<Ipv4Addr>::new().build())
        .execute();
    let index = loop {
        let route = routes.try_next().await.ok()??;
        let out = route.attributes.iter().find_map(|a| match a {
            RouteAttribute::Oif(index) => Some(*index),
            _ => None,
        });
        if route.header.destination_prefix_length == 0 && out.is_some() {
            break out?;
        }
    };
    let link = handle
        .link()
        .get()
        .match_index(index)
        .execute()
        .try_next()
        .await
        .ok()??;
    link.attributes.iter().find_map(|a| match a {
        LinkAttribute::Mtu(mtu) => Some(*mtu),
        _ => None,
    })
}
