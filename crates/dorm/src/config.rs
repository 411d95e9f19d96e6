//! The daemon's configuration: `defaults.toml`, below a file, below the environment, below flags.
//!
//! Every layer is read into the same [`Layer`], so that a mistake is reported with the place it was made
//! in. Nothing is touched before all of it is understood.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use dorm_engine::network::{self, GATEWAY, Range};
use dorm_engine::{Limits, home};
use dorm_server::config::{NetworkRange, OnShutdown};
use serde::Deserialize;

use crate::env::{self, Variable};
use crate::exit::{Exit, Failure};
use crate::size::Size;

pub(crate) const DEFAULTS: &str = include_str!("defaults.toml");
const SYSTEM_FILE: &str = "/etc/dorm/config.toml";

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub(crate) enum LogFormat {
    /// For people
    Text,
    /// For machines
    Json,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Shutdown {
    /// They go on, and the next daemon takes them over
    Leave,
    /// They are stopped
    Stop,
}

/// One source of settings. What it does not say is left to the layer below.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Layer {
    pub(crate) listen: Option<SocketAddr>,
    pub(crate) data: Option<PathBuf>,
    pub(crate) log: Option<String>,
    pub(crate) log_format: Option<LogFormat>,
    pub(crate) on_shutdown: Option<Shutdown>,
    pub(crate) stop_grace: Option<f64>,
    pub(crate) first_uid: Option<u32>,
    pub(crate) max_agents: Option<u32>,
    pub(crate) max_body: Option<Size>,
    pub(crate) defaults: DefaultsLayer,
    pub(crate) network: NetworkLayer,
    pub(crate) pool: PoolLayer,
    pub(crate) templates: TemplatesLayer,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct DefaultsLayer {
    cpus: Option<f64>,
    memory: Option<Size>,
    disk: Option<Size>,
    pids: Option<u32>,
    io: Option<Size>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct NetworkLayer {
    range: Option<String>,
    nameservers: Option<Vec<IpAddr>>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct PoolLayer {
    size: Option<Size>,
    max: Option<Size>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct TemplatesLayer {
    cache: Option<PathBuf>,
    host_ca: Option<bool>,
    host_ca_file: Option<PathBuf>,
}

/// Keeps the fields of `$upper` that are set, and takes the others from `$lower`.
macro_rules! over {
    ($upper:expr, $lower:expr, $type:ident { $($field:ident),* } $(, $($nested:ident),*)?) => {
        $type { $($field: $upper.$field.or($lower.$field),)* $($($nested: $upper.$nested.over($lower.$nested),)*)? }
    };
}

impl Layer {
    fn over(self, lower: Self) -> Self {
        over!(
            self,
            lower,
            Layer {
                listen,
                data,
                log,
                log_format,
                on_shutdown,
                stop_grace,
                first_uid,
                max_agents,
                max_body
            },
            defaults,
            network,
            pool,
            templates
        )
    }
}

impl DefaultsLayer {
    fn over(self, lower: Self) -> Self {
        over!(
            self,
            lower,
            DefaultsLayer {
                cpus,
                memory,
                disk,
                pids,
                io
            }
        )
    }
}

impl NetworkLayer {
    fn over(self, lower: Self) -> Self {
        over!(self, lower, NetworkLayer { range, nameservers })
    }
}

impl PoolLayer {
    fn over(self, lower: Self) -> Self {
        over!(self, lower, PoolLayer { size, max })
    }
}

impl TemplatesLayer {
    fn over(self, lower: Self) -> Self {
        over!(
            self,
            lower,
            TemplatesLayer {
                cache,
                host_ca,
                host_ca_file
            }
        )
    }
}

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

fn settings(layer: Layer) -> Result<Settings> {
    // Every key has a default: defaults.toml names them all, which a test sees to.
    fn given<T>(value: Option<T>, key: &str) -> Result<T> {
        value.with_context(|| format!("`{key}` has no value"))
    }
    let range = given(layer.network.range, "network.range")?;
    let range: Range = range
        .parse()
        .with_context(|| format!("network.range is `{range}`"))?;
    let stop_grace = given(layer.stop_grace, "stop_grace")?;
    let cpus = given(layer.defaults.cpus, "defaults.cpus")?;
    let io = given(layer.defaults.io, "defaults.io")?.0;
    anyhow::ensure!(cpus.is_finite() && cpus >= 0.001, "defaults.cpus must be above 0");
    let cache = given(layer.templates.cache, "templates.cache")?;
    let host_ca = given(layer.templates.host_ca_file, "templates.host_ca_file")?;
    let server = dorm_server::config::Config {
        data: given(layer.data, "data")?,
        listen: given(layer.listen, "listen")?,
        defaults: Limits {
            cpu_millis: (cpus * 1000.0).round() as u32,
            memory: given(layer.defaults.memory, "defaults.memory")?.0,
            pids: given(layer.defaults.pids, "defaults.pids")?,
            disk: given(layer.defaults.disk, "defaults.disk")?.0,
            io_bps: (io > 0).then_some(io),
        },
        first_uid: given(layer.first_uid, "first_uid")?,
        max_slots: given(layer.max_agents, "max_agents")?,
        network_range: NetworkRange {
            base: range.base,
            prefix: range.prefix,
        },
        nameservers: vec![GATEWAY.to_string()],
        on_shutdown: match given(layer.on_shutdown, "on_shutdown")? {
            Shutdown::Leave => OnShutdown::Leave,
            Shutdown::Stop => OnShutdown::Stop,
        },
        stop_grace: Duration::try_from_secs_f64(stop_grace).context("stop_grace is no number of seconds")?,
        template_cache: (!cache.as_os_str().is_empty()).then_some(cache),
        host_ca: given(layer.templates.host_ca, "templates.host_ca")?.then_some(host_ca),
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
