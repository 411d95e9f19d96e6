//! What the daemon tells a guest before it serves: one JSON message on descriptor 3, answered by
//! `ready` or by an error text, after which the guest closes the descriptor.
//!
//! A guest that is started with [`ON_STDIO`], because no such descriptor can be handed to it, reads the message from its
//! standard input, and answers on its standard output. It serves on [`GUEST_PORT`], to whoever knows the secret.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The descriptor on which process 1 finds its [`BootConfig`], a `SOCK_SEQPACKET` socket.
pub const BOOT_FD: i32 = 3;
/// The answer of a guest that serves.
pub const READY: &[u8] = b"ready";
/// Longest boot message, both ways.
pub const MAX_BOOT_MESSAGE: usize = 160 * 1024;
/// Abstract unix socket, in the box's network namespace, on which the guest serves. Only peers from
/// outside the box's pid namespace are answered.
pub const GUEST_SOCKET: &str = "dorm-guest";
/// The argument of a guest that boots by its standard input and output.
pub const ON_STDIO: &str = "--stdio";
/// The port of the box's loopback on which such a guest serves. A connection begins with the secret. All that follows goes
/// both ways through a [`crate::window`], and begins with one of the letters below.
pub const GUEST_PORT: u16 = 49983;
/// HTTP follows.
pub const SPEAK_HTTP: u8 = b'h';
/// The number of a port follows, in two bytes, the higher first. The guest answers with one of the two letters below, and
/// if it is the first, what goes on is a connection to that port of the box's loopback, of IPv4 or else of IPv6.
pub const CONNECT_PORT: u8 = b'p';
pub const CONNECTED: u8 = b'o';
pub const REFUSED: u8 = b'r';
/// The guest answers with the kernel's tables of TCP sockets, IPv4 and then IPv6, and closes.
pub const LIST_SOCKETS: u8 = b'l';
/// Bytes of a secret, which is text.
pub const SECRET_LENGTH: usize = 64;
/// Generation of the guest protocol. Fields and methods are only ever added.
pub const PROTOCOL_VERSION: u32 = 3;
/// Where the guest's own binary is mounted in the box.
pub const GUEST_PATH: &str = "/run/dorm/guest";
/// Where a program finds the id of its agent. A fork's guest writes it anew, so it tells a program that was
/// running before the fork, whose environment stays as it was, what it is part of now.
pub const AGENT_ID_PATH: &str = "/run/dorm/agent-id";
/// The same, in the environment of every run.
pub const AGENT_ID_VARIABLE: &str = "DORM_AGENT_ID";

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct BootConfig {
    /// The daemon's [`PROTOCOL_VERSION`].
    pub protocol: u32,
    pub agent_id: String,
    pub hostname: String,
    /// Environment of every run, below what the run itself sets.
    pub env: BTreeMap<String, String>,
    pub default_user: Option<String>,
    pub default_workdir: Option<String>,
    /// Run once the guest serves, and again each time the box is started from files.
    pub start_command: Option<Command>,
    /// Written to /etc/resolv.conf.
    pub nameservers: Vec<String>,
}

/// The message to a guest that is started with [`ON_STDIO`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BootOnStdio {
    pub config: BootConfig,
    /// What connections to [`GUEST_PORT`] begin with, [`SECRET_LENGTH`] bytes.
    pub secret: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Command {
    /// Given to `/bin/bash -l -c`.
    pub command: String,
    pub user: Option<String>,
    /// Whether the agent is at work while it runs, which a service is not.
    #[serde(default)]
    pub keeps_awake: bool,
}
