//! The daemon's configuration: `defaults.toml`, below a file, below the environment, below flags.
//!
//! Every layer is read into the same [`Layer`], so that a mistake is reported with the place it was made
//! in. Nothing is touched before all of it is understood.

mod layer;

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use dorm_engine::network::{self, GATEWAY, Range};
use dorm_engine::{Limits, home};
use dorm_server::config::{NetworkRange, OnShutdown, Standby};
use dorm_server::lifecycle::idle::pressure::Budget;
use dorm_server::tls::{Acme, TlsConfig, TlsFiles};

use crate::env::{self, Variable};
use crate::exit::{Exit, Failure};
pub(crate) use layer::{Layer, LogFormat, Shutdown, TlsLayer};

pub(crate) const DEFAULTS: &str = include_str!("../defaults.toml");
/// As large as the one that the engine chooses where none is configured; its choice takes the place of this.
const SOME_RANGE: NetworkRange = NetworkRange {
    base: Ipv4Addr::new(10, 128, 0, 0),
    prefix: 16,
};
const SYSTEM_FILE: &str = "/etc/dorm/config.toml";

/// Everything `dorm serve` needs to know, checked.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    pub(crate) server: dorm_server::config::Config,
    pub(crate) log: String,
    pub(crate) log_format: LogFormat,
    pub(crate) network: network::Config,
    pub(crate) pool: home::Config,
}

/// Reads all layers. `file` is what `--config` or the environment named, `data` what is known of the data
/// directory before the configuration file, `variables` the environment.
pub(crate) fn load(
    flags: Layer,
    file: Option<&Path>,
    data: &Path,
    variables: impl Fn(&str) -> Option<String>,
) -> Result<Settings> {
    let defaults: Layer = toml::from_str(DEFAULTS).context("the built-in defaults are wrong")?;
    let file = match file {
        Some(path) => read(path)?,
        None => match [data.join("config.toml"), SYSTEM_FILE.into()]
            .iter()
            .find(|path| path.exists())
        {
            Some(path) => read(path)?,
            None => Layer::default(),
        },
    };
    let merged = flags.over(environment(variables)?).over(file).over(defaults);
    settings(merged).map_err(|e| wrong("the configuration cannot be used", e))
}

fn wrong(what: impl Into<String>, cause: impl Into<anyhow::Error>) -> anyhow::Error {
    Failure::new(Exit::Usage, what)
        .cause(cause)
        .hint("`dorm serve --print-config` shows every key with its default")
        .into()
}

fn read(path: &Path) -> Result<Layer> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    toml::from_str(&text).map_err(|e| {
        wrong(
            format!("{} is not a configuration", path.display()),
            anyhow::anyhow!("{}", e.to_string().trim_end()),
        )
    })
}

/// One layer out of all variables that stand for a key.
fn environment(variables: impl Fn(&str) -> Option<String>) -> Result<Layer> {
    let defaults: toml::Table = toml::from_str(DEFAULTS)?;
    let mut layer = Layer::default();
    for Variable { name, key, .. } in env::ALL {
        let (Some(key), Some(text)) = (key, variables(name)) else {
            continue;
        };
        let (table, field) = key
            .split_once('.')
            .map_or((None, *key), |(table, field)| (Some(table), field));
        let home = table
            .map_or(Some(&defaults), |table| defaults[table].as_table())
            .context("a key's table")?;
        let value = typed(&text, &home[field]).map_err(|e| wrong(format!("{name} cannot be used"), e))?;
        let mut entry = toml::Table::from_iter([(field.to_owned(), value)]);
        if let Some(table) = table {
            entry = toml::Table::from_iter([(table.to_owned(), entry.into())]);
        }
        let one: Layer = entry
            .try_into()
            .map_err(|e: toml::de::Error| wrong(format!("{name} cannot be used"), e))?;
        layer = one.over(layer);
    }
    Ok(layer)
}

/// A variable's text as the kind of value that the key has by default.
fn typed(text: &str, like: &toml::Value) -> Result<toml::Value> {
    Ok(match like {
        toml::Value::Boolean(_) => text
            .parse::<bool>()
            .with_context(|| format!("`{text}` is neither true nor false"))?
            .into(),
        // A number by default, but perhaps a size or a fraction here.
        toml::Value::Integer(_) | toml::Value::Float(_) => match (text.parse::<i64>(), text.parse::<f64>()) {
            (Ok(number), _) => number.into(),
            (_, Ok(number)) => number.into(),
            _ => text.into(),
        },
        toml::Value::Array(_) => {
            let items = text.split(',').map(str::trim).filter(|item| !item.is_empty());
            items
                .map(|item| toml::Value::from(item.to_owned()))
                .collect::<Vec<_>>()
                .into()
        }
        _ => text.into(),
    })
}

/// Every key has a default: defaults.toml names them all, which a test sees to.
fn given<T>(value: Option<T>, key: &str) -> Result<T> {
    value.with_context(|| format!("`{key}` has no value"))
}

fn standby(layer: layer::StandbyLayer) -> Result<Standby> {
    let time = |value: Option<f64>, key: &str| {
        Duration::try_from_secs_f64(given(value, key)?)
            .with_context(|| format!("{key} is no number of seconds"))
    };
    let cpu = given(layer.cpu, "standby.cpu")?;
    anyhow::ensure!(
        (0.0..=100.0).contains(&cpu),
        "standby.cpu is a percentage of a core"
    );
    Ok(Standby {
        after: time(layer.after, "standby.after")?,
        durable_after: time(layer.durable_after, "standby.durable_after")?,
        hibernate_after: time(layer.hibernate_after, "standby.hibernate_after")?,
        cpu: cpu / 100.0,
        memory: match given(layer.memory, "standby.memory")? {
            layer::MemoryBudget::Size(size) => Budget::Bytes(size.0),
            layer::MemoryBudget::Percent(percent) => Budget::Percent(percent.0),
        },
    })
}

fn tls(layer: layer::TlsLayer, data: &Path, domain: &str) -> Result<Option<TlsConfig>> {
    let path = |value: Option<PathBuf>, key: &str| -> Result<Option<PathBuf>> {
        Ok(Some(given(value, key)?).filter(|path| !path.as_os_str().is_empty()))
    };
    let text = |value: Option<String>, key: &str| -> Result<Option<String>> {
        Ok(Some(given(value, key)?).filter(|text| !text.is_empty()))
    };
    let certificate = path(layer.certificate, "tls.certificate")?;
    let key = path(layer.key, "tls.key")?;
    let acme = Acme {
        dir: data.join("acme"),
        domain: domain.split(':').next().unwrap_or_default().to_ascii_lowercase(),
        directory: text(layer.acme_directory, "tls.acme_directory")?,
        contact: text(layer.acme_contact, "tls.acme_contact")?,
        ca: path(layer.acme_ca, "tls.acme_ca")?,
        dns: path(layer.acme_dns, "tls.acme_dns")?,
    };
    Ok(match (certificate, key, given(layer.acme, "tls.acme")?) {
        (None, None, false) => None,
        (Some(certificate), Some(key), false) => Some(TlsConfig::Files(TlsFiles { certificate, key })),
        (None, None, true) => {
            anyhow::ensure!(acme.domain.contains('.'), "tls.acme needs a domain");
            Some(TlsConfig::Acme(acme))
        }
        (Some(_), Some(_), true) => anyhow::bail!("tls.acme and tls.certificate exclude each other"),
        _ => anyhow::bail!("tls.certificate and tls.key need each other"),
    })
}

fn settings(layer: Layer) -> Result<Settings> {
    let range = match given(layer.network.range, "network.range")?.as_str() {
        "auto" => None,
        text => Some(
            text.parse::<Range>()
                .with_context(|| format!("network.range is `{text}`"))?,
        ),
    };
    let stop_grace = given(layer.stop_grace, "stop_grace")?;
    let cpus = given(layer.defaults.cpus, "defaults.cpus")?;
    let io = given(layer.defaults.io, "defaults.io")?.0;
    anyhow::ensure!(cpus.is_finite() && cpus >= 0.001, "defaults.cpus must be above 0");
    let standby = standby(layer.standby)?;
    let cache = given(layer.templates.cache, "templates.cache")?;
    let host_ca = given(layer.templates.host_ca_file, "templates.host_ca_file")?;
    let domain = given(layer.domain, "domain")?;
    let data = given(layer.data, "data")?;
    let server = dorm_server::config::Config {
        listen: given(layer.listen, "listen")?,
        tls: tls(layer.tls, &data, &domain)?,
        data,
        domain: (!domain.is_empty()).then_some(domain),
        isolation: given(layer.defaults.isolation, "defaults.isolation")?,
        defaults: Limits {
            cpu_millis: (cpus * 1000.0).round() as u32,
            memory: given(layer.defaults.memory, "defaults.memory")?.0,
            pids: given(layer.defaults.pids, "defaults.pids")?,
            disk: given(layer.defaults.disk, "defaults.disk")?.0,
            io_bps: (io > 0).then_some(io),
        },
        first_uid: given(layer.first_uid, "first_uid")?,
        max_slots: given(layer.max_agents, "max_agents")?,
        network_range: range.map_or(SOME_RANGE, |r| NetworkRange {
            base: r.base,
            prefix: r.prefix,
        }),
        nameservers: vec![GATEWAY.to_string()],
        on_shutdown: match given(layer.on_shutdown, "on_shutdown")? {
            Shutdown::Hibernate => OnShutdown::Hibernate,
            Shutdown::Leave => OnShutdown::Leave,
            Shutdown::Stop => OnShutdown::Stop,
        },
        stop_grace: Duration::try_from_secs_f64(stop_grace).context("stop_grace is no number of seconds")?,
        template_cache: (!cache.as_os_str().is_empty()).then_some(cache),
        host_ca: given(layer.templates.host_ca, "templates.host_ca")?.then_some(host_ca),
        standby,
        max_body: given(layer.max_body, "max_body")?.0,
    };
    server.check()?;
    Ok(Settings {
        log: given(layer.log, "log")?,
        log_format: given(layer.log_format, "log_format")?,
        network: network::Config {
            range,
            nameservers: given(layer.network.nameservers, "network.nameservers")?,
        },
        pool: home::Config {
            data: server.data.clone(),
            initial_size: given(layer.pool.size, "pool.size")?.0,
            max_size: given(layer.pool.max, "pool.max")?.0,
        },
        server,
    })
}

#[cfg(test)]
mod tests;
