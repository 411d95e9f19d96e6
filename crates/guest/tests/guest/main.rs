//! Drives the guest as the E2B SDKs do: HTTP/1.1 with JSON, over its socket.

mod binary;
mod client;
mod files;
mod init;
mod input;
mod keep;
mod runs;
mod tarball;
mod transfer;
mod watch;
mod wrong;
