//! Every environment variable that dorm reads. `dorm environment` and the help derive from this list,
//! and the daemon's configuration takes its environment layer from it.

/// One variable.
pub(crate) struct Variable {
    pub(crate) name: &'static str,
    pub(crate) what: &'static str,
    /// The configuration key of `dorm serve` that it sets, as `table.key`.
    pub(crate) key: Option<&'static str>,
}

pub(crate) const URL: &str = "DORM_URL";
pub(crate) const API_KEY: &str = "DORM_API_KEY";
pub(crate) const DATA: &str = "DORM_DATA";
pub(crate) const CA: &str = "DORM_CA";
pub(crate) const CONFIG: &str = "DORM_CONFIG";

const fn client(name: &'static str, what: &'static str) -> Variable {
    Variable {
        name,
        what,
        key: None,
    }
}

const fn daemon(name: &'static str, key: &'static str, what: &'static str) -> Variable {
    Variable {
        name,
        what,
        key: Some(key),
    }
}

pub(crate) const ALL: &[Variable] = &[
    client(
        URL,
        "Address of the daemon; otherwise that of the data directory's daemon, or http://127.0.0.1:3676",
    ),
    client(
        API_KEY,
        "API key; otherwise the one in the data directory's api-key",
    ),
    client(
        CA,
        "Certificates of CAs to trust with an https:// URL, besides this machine's and DATA/tls/ca.pem",
    ),
    client(DATA, "Data directory, /var/lib/dorm by default"),
    client(
        CONFIG,
        "serve: configuration file; otherwise DATA/config.toml, then /etc/dorm/config.toml",
    ),
    client(
        "DORM_CRIU",
        "serve, doctor, bench: folder of dorm's own copy of CRIU; otherwise /usr/local/lib/dorm/criu",
    ),
    client("DORM_FAULT", "serve: a fault to happen once, for tests"),
    client(
        "DORM_RESTORE_LIMIT",
        "serve: milliseconds that a container may take to come back from disk, for tests",
    ),
    daemon("DORM_LISTEN", "listen", "serve: address and port to answer on"),
    daemon(
        "DORM_DOMAIN",
        "domain",
        "serve: boxes are reached as PORT-ID.DOMAIN; localhost works in any case",
    ),
    daemon(
        "DORM_TLS_CERTIFICATE",
        "tls.certificate",
        "serve: certificates in PEM, for HTTPS",
    ),
    daemon(
        "DORM_ACME",
        "tls.acme",
        "serve: whether to get a certificate for the domain by ACME",
    ),
    daemon(
        "DORM_TLS_KEY",
        "tls.key",
        "serve: the key of the certificate, in PEM",
    ),
    daemon(
        "DORM_LOG",
        "log",
        "serve: log level, or filter as in `info,dorm_server=debug`",
    ),
    daemon(
        "DORM_ISOLATION",
        "defaults.isolation",
        "serve: container, gvisor, vm or auto, of agents that name none",
    ),
    daemon("DORM_LOG_FORMAT", "log_format", "serve: text or json"),
    daemon(
        "DORM_ON_SHUTDOWN",
        "on_shutdown",
        "serve: hibernate boxes at the end, leave them, or stop them",
    ),
    daemon(
        "DORM_STOP_GRACE",
        "stop_grace",
        "serve: seconds a box has to end before it is ended",
    ),
    daemon(
        "DORM_FIRST_UID",
        "first_uid",
        "serve: first host uid that boxes' users are mapped to",
    ),
    daemon(
        "DORM_STANDBY_AFTER",
        "standby.after",
        "serve: seconds until an agent that nobody uses goes to standby; 0 is never",
    ),
    daemon(
        "DORM_DURABLE_AFTER",
        "standby.durable_after",
        "serve: seconds until the memory of an agent in standby is on disk too",
    ),
    daemon(
        "DORM_HIBERNATE_AFTER",
        "standby.hibernate_after",
        "serve: seconds in standby until an agent goes to disk; 0 is never",
    ),
    daemon(
        "DORM_STANDBY_CPU",
        "standby.cpu",
        "serve: percentage of a core below which a box does nothing",
    ),
    daemon(
        "DORM_STANDBY_MEMORY",
        "standby.memory",
        "serve: what boxes in standby may hold, as 8G or 50%",
    ),
    daemon(
        "DORM_DEFAULT_CPUS",
        "defaults.cpus",
        "serve: cores of an agent that asks for none",
    ),
    daemon(
        "DORM_DEFAULT_MEMORY",
        "defaults.memory",
        "serve: memory of an agent that asks for none",
    ),
    daemon(
        "DORM_DEFAULT_DISK",
        "defaults.disk",
        "serve: disk of an agent that asks for none",
    ),
    daemon(
        "DORM_DEFAULT_PIDS",
        "defaults.pids",
        "serve: processes of an agent that asks for none",
    ),
    daemon(
        "DORM_DEFAULT_IO",
        "defaults.io",
        "serve: bytes a second to and from disk; 0 is unlimited",
    ),
    daemon(
        "DORM_NETWORK_RANGE",
        "network.range",
        "serve: addresses of boxes, as 10.213.0.0/16 or auto",
    ),
    daemon(
        "DORM_NAMESERVERS",
        "network.nameservers",
        "serve: DNS servers, separated by commas; empty takes the host's",
    ),
    daemon(
        "DORM_POOL_SIZE",
        "pool.size",
        "serve: first size of the pool file, where one is needed",
    ),
    daemon(
        "DORM_POOL_MAX",
        "pool.max",
        "serve: size the pool file may grow to; 0 is what the disk has",
    ),
    daemon(
        "DORM_TEMPLATE_CACHE",
        "templates.cache",
        "serve: folder that keeps built templates across data directories",
    ),
    daemon(
        "DORM_HOST_CA",
        "templates.host_ca",
        "serve: whether template builds get the host's CA certificates",
    ),
    daemon(
        "DORM_HOST_CA_FILE",
        "templates.host_ca_file",
        "serve: the host's CA bundle",
    ),
];

/// The reference as text, for the terminal.
pub(crate) fn reference() -> String {
    let width = ALL.iter().map(|v| v.name.len()).max().unwrap_or(0);
    let mut text = String::from("Environment variables:\n");
    for variable in ALL {
        text += &format!("  {:width$}  {}", variable.name, variable.what);
        if let Some(key) = variable.key {
            text += &format!(" [{key}]");
        }
        text.push('\n');
    }
    text
}
