//! `dorm serve`: the daemon.

use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::Result;

use crate::cli::Global;
use crate::config::{self, Layer, LogFormat, Shutdown, TlsLayer};
use crate::{env, output};

/// Run the daemon
#[derive(Debug, clap::Args)]
#[command(after_help = "Example: sudo dorm serve --data /srv/dorm --listen 127.0.0.1:4000")]
pub(crate) struct Args {
    /// Address and port to answer on
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: Option<SocketAddr>,
    /// Configuration file [default: DATA/config.toml, then /etc/dorm/config.toml]
    #[arg(long, value_name = "FILE", env = env::CONFIG)]
    config: Option<PathBuf>,
    /// error, warn, info, debug, trace, or a filter
    #[arg(long, value_name = "LEVEL")]
    log: Option<String>,
    #[arg(long, value_enum, value_name = "FORMAT")]
    log_format: Option<LogFormat>,
    /// What becomes of running boxes when the daemon ends
    #[arg(long, value_enum, value_name = "WHAT")]
    on_shutdown: Option<Shutdown>,
    /// Seconds that a box's processes have to end before they are ended
    #[arg(long, value_name = "S", value_parser = super::parse_seconds)]
    stop_grace: Option<f64>,
    /// Speak HTTPS, with these certificates in PEM
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_certificate: Option<PathBuf>,
    /// The key of the certificate, in PEM
    #[arg(long, value_name = "FILE", requires = "tls_certificate")]
    tls_key: Option<PathBuf>,
    /// Print every key with its default, and end
    #[arg(long)]
    print_config: bool,
}

pub(crate) async fn run(global: &Global, args: Args) -> Result<()> {
    if args.print_config {
        return output::bytes(config::DEFAULTS.as_bytes());
    }
    let flags = Layer {
        listen: args.listen,
        data: global.data.clone().filter(|data| !data.as_os_str().is_empty()),
        log: args.log,
        log_format: args.log_format,
        on_shutdown: args.on_shutdown,
        stop_grace: args.stop_grace,
        tls: TlsLayer {
            certificate: args.tls_certificate,
            key: args.tls_key,
            ..TlsLayer::default()
        },
        ..Layer::default()
    };
    let file = args.config.as_deref().filter(|path| !path.as_os_str().is_empty());
    let settings = config::load(flags, file, &global.data(), |name| std::env::var(name).ok())?;
    crate::daemon::run(settings).await
}
