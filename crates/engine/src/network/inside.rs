//! Work inside the network namespaces of boxes.
//!
//! A thread of its own enters a namespace, makes a socket there and returns. A socket stays in the
//! namespace it was made in, so everything else happens on it from anywhere.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

use rtnetlink::packet_route::link::LinkMessage;
use rtnetlink::packet_route::neighbour::NeighbourState;
use rtnetlink::packet_route::route::{RouteMessage, RouteScope, RouteType};
use rtnetlink::{Handle, LinkUnspec, RouteMessageBuilder};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use tokio::net::{TcpSocket, TcpStream};

use super::{GATEWAY, GATEWAY_MAC, index_of};
use crate::{EngineError, Result};

/// The kernel's routing table of own addresses.
const LOCAL_TABLE: u32 = 255;
const CONNECT: Duration = Duration::from_secs(10);
/// Of a connection to a guest.
const SEND_BUFFER: usize = 1 << 20;

/// What `lo` is in every namespace.
const LOOPBACK: u32 = 1;

type Job = Box<dyn FnOnce() + Send>;

/// Which addresses are a box's own.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Owned {
    One,
    /// Sockets come back bound to what was the box's address, or that of the one it was forked from, whatever it
    /// is now; and the kernel binds and connects from own addresses only.
    Every,
}

fn every_address() -> RouteMessage {
    RouteMessageBuilder::<Ipv4Addr>::new()
        .kind(RouteType::Local)
        .table_id(LOCAL_TABLE)
        .scope(RouteScope::Host)
        .output_interface(LOOPBACK)
        .build()
}

/// The thread that enters namespaces.
#[derive(Debug, Clone)]
pub struct Inside {
    jobs: mpsc::Sender<(Arc<OwnedFd>, Job)>,
}

impl Inside {
    pub(crate) fn start() -> Result<Self> {
        let failed = || EngineError::io("cannot start the thread that enters boxes");
        let host = dorm_sys::namespace::open(std::process::id() as i32, "net").map_err(failed())?;
        let (jobs, queue) = mpsc::channel::<(Arc<OwnedFd>, Job)>();
        let work = move || {
            for (netns, job) in queue {
                if dorm_sys::namespace::enter_network(netns.as_fd()).is_ok() {
                    job();
                }
                // Staying would keep the box's namespace alive after its end.
                dorm_sys::namespace::enter_network(host.as_fd())
                    .expect("the host's own namespace can be entered");
            }
        };
        std::thread::Builder::new()
            .name("inside".to_owned())
            .spawn(work)
            .map_err(failed())?;
        Ok(Self { jobs })
    }

    /// Runs `work` on a thread that is in `netns`.
    async fn run<T: Send + 'static>(
        &self,
        netns: Arc<OwnedFd>,
        work: impl FnOnce() -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        let (done, result) = tokio::sync::oneshot::channel();
        let runtime = tokio::runtime::Handle::current();
        let job: Job = Box::new(move || {
            let _runtime = runtime.enter();
            let _ = done.send(work());
        });
        self.jobs
            .send((netns, job))
            .map_err(|_| io::ErrorKind::BrokenPipe)?;
        result
            .await
            .map_err(|_| io::Error::other("the box's network namespace cannot be entered"))?
    }

    /// Connects to an abstract unix socket in `netns`.
    pub async fn connect(&self, netns: Arc<OwnedFd>, name: &'static str) -> io::Result<UnixStream> {
        self.run(netns, move || {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
            let address = rustix::net::SocketAddrUnix::new_abstract_name(name.as_bytes())?;
            // With more under way, an upload needs fewer turns of the two that pass it on.
            let _ = rustix::net::sockopt::set_socket_send_buffer_size_force(&socket, SEND_BUFFER);
            rustix::net::connect(&socket, &address)?;
            Ok(UnixStream::from(socket))
        })
        .await
    }

    /// Leaves the box with its own address, after [`Owned::Every`].
    pub(crate) async fn disown_others(&self, netns: Arc<OwnedFd>) -> Result<()> {
        let change = async |handle: &Handle| handle.route().del(every_address()).execute().await;
        self.with_handle(netns, change).await
    }

    /// Connects to a port of the loopback of `netns`, of IPv4 or else of IPv6.
    pub(crate) async fn connect_port(&self, netns: &Arc<OwnedFd>, port: u16) -> io::Result<TcpStream> {
        let socket = self.run(Arc::clone(netns), TcpSocket::new_v4).await?;
        let refused = match connect(socket, (Ipv4Addr::LOCALHOST, port).into()).await {
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => error,
            other => return other,
        };
        let socket = self.run(Arc::clone(netns), TcpSocket::new_v6).await?;
        // A box without IPv6 has no such address; what counts is that IPv4 refused.
        match connect(socket, (Ipv6Addr::LOCALHOST, port).into()).await {
            Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable => Err(refused),
            other => other,
        }
    }

    /// Brings up `lo` and `eth0` in `netns`, with all traffic going to the gateway.
    pub(super) async fn configure(&self, netns: Arc<OwnedFd>, address: Ipv4Addr, owned: Owned) -> Result<()> {
        let change = async |handle: &Handle| {
            configure(handle, address).await?;
            match owned {
                Owned::Every => handle.route().add(every_address()).execute().await,
                Owned::One => Ok(()),
            }
        };
        self.with_handle(netns, change).await
    }

    /// Brings up `lo` in `netns`, and nothing else.
    pub(crate) async fn loop_back(&self, netns: Arc<OwnedFd>) -> Result<()> {
        let change = async |handle: &Handle| loop_back(handle).await;
        self.with_handle(netns, change).await
    }

    async fn with_handle(
        &self,
        netns: Arc<OwnedFd>,
        work: impl AsyncFnOnce(&Handle) -> Result<(), rtnetlink::Error>,
    ) -> Result<()> {
        let failed = || EngineError::io("cannot configure the box's network");
        let (connection, handle, _) = self
            .run(netns, rtnetlink::new_connection)
            .await
            .map_err(failed())?;
        let connection = tokio::spawn(connection);
        let done = work(&handle).await;
        connection.abort();
        done.map_err(|e| failed()(io::Error::other(e)))
    }
}

/// A loopback answers at once, unless the queue of the listener is full.
async fn connect(socket: TcpSocket, to: SocketAddr) -> io::Result<TcpStream> {
    let stream = tokio::time::timeout(CONNECT, socket.connect(to)).await??;
    stream.set_nodelay(true)?;
    Ok(stream)
}

fn up(name: &str) -> LinkMessage {
    LinkUnspec::new_with_name(name).up().build()
}

async fn loop_back(handle: &Handle) -> Result<(), rtnetlink::Error> {
    handle.link().set(up("lo")).execute().await
}

async fn configure(handle: &Handle, address: Ipv4Addr) -> Result<(), rtnetlink::Error> {
    loop_back(handle).await?;
    handle.link().set(up("eth0")).execute().await?;
    let index = index_of(handle, "eth0").await?;
    handle
        .address()
        .add(index, IpAddr::V4(address), 32)
        .execute()
        .await?;
    handle
        .neighbours()
        .add(index, IpAddr::V4(GATEWAY))
        .link_layer_address(&GATEWAY_MAC)
        .state(NeighbourState::Permanent)
        .replace()
        .execute()
        .await?;
    let to_gateway = RouteMessageBuilder::<Ipv4Addr>::new()
        .destination_prefix(GATEWAY, 32)
        .output_interface(index)
        .scope(RouteScope::Link)
        .build();
    handle.route().add(to_gateway).execute().await?;
    let default = RouteMessageBuilder::<Ipv4Addr>::new()
        .gateway(GATEWAY)
        .output_interface(index)
        .build();
    handle.route().add(default).execute().await
}
