//! One layer of the configuration, and how layers lie over each other.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use dorm_server::isolation::Choice;
use serde::Deserialize;

use crate::size::Size;

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
    /// Their memory goes to disk, where that is possible
    Hibernate,
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
    pub(crate) domain: Option<String>,
    pub(crate) data: Option<PathBuf>,
    pub(crate) log: Option<String>,
    pub(crate) log_format: Option<LogFormat>,
    pub(crate) on_shutdown: Option<Shutdown>,
    pub(crate) stop_grace: Option<f64>,
    pub(crate) first_uid: Option<u32>,
    pub(crate) max_agents: Option<u32>,
    pub(crate) max_body: Option<Size>,
    pub(crate) tls: TlsLayer,
    pub(crate) standby: StandbyLayer,
    pub(crate) defaults: DefaultsLayer,
    pub(crate) network: NetworkLayer,
    pub(crate) pool: PoolLayer,
    pub(crate) templates: TemplatesLayer,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct TlsLayer {
    pub(crate) certificate: Option<PathBuf>,
    pub(crate) key: Option<PathBuf>,
    pub(crate) acme: Option<bool>,
    pub(crate) acme_directory: Option<String>,
    pub(crate) acme_contact: Option<String>,
    pub(crate) acme_ca: Option<PathBuf>,
    pub(crate) acme_dns: Option<PathBuf>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct StandbyLayer {
    pub(crate) after: Option<f64>,
    pub(crate) durable_after: Option<f64>,
    pub(crate) hibernate_after: Option<f64>,
    pub(crate) cpu: Option<f64>,
    pub(crate) memory: Option<MemoryBudget>,
}

/// Of the host's memory, as `"50%"`, or a size.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(untagged)]
pub(crate) enum MemoryBudget {
    Size(Size),
    Percent(Percent),
}

#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(try_from = "String")]
pub(crate) struct Percent(pub(crate) f64);

impl TryFrom<String> for Percent {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let number = text
            .strip_suffix('%')
            .and_then(|number| number.trim().parse::<f64>().ok());
        number
            .filter(|number| (0.0..=100.0).contains(number))
            .map(Self)
            .ok_or_else(|| format!("`{text}` is neither a size nor a part such as 50%"))
    }
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct DefaultsLayer {
    pub(crate) cpus: Option<f64>,
    pub(crate) memory: Option<Size>,
    pub(crate) disk: Option<Size>,
    pub(crate) pids: Option<u32>,
    pub(crate) io: Option<Size>,
    pub(crate) isolation: Option<Choice>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct NetworkLayer {
    pub(crate) range: Option<String>,
    pub(crate) nameservers: Option<Vec<IpAddr>>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct PoolLayer {
    pub(crate) size: Option<Size>,
    pub(crate) max: Option<Size>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct TemplatesLayer {
    pub(crate) cache: Option<PathBuf>,
    pub(crate) host_ca: Option<bool>,
    pub(crate) host_ca_file: Option<PathBuf>,
}

/// Keeps the fields of `$upper` that are set, and takes the others from `$lower`.
macro_rules! over {
    ($upper:expr, $lower:expr, $type:ident { $($field:ident),* } $(, $($nested:ident),*)?) => {
        $type { $($field: $upper.$field.or($lower.$field),)* $($($nested: $upper.$nested.over($lower.$nested),)*)? }
    };
}

impl Layer {
    pub(crate) fn over(self, lower: Self) -> Self {
        over!(
            self,
            lower,
            Layer {
                listen,
                domain,
                data,
                log,
                log_format,
                on_shutdown,
                stop_grace,
                first_uid,
                max_agents,
                max_body
            },
            tls,
            standby,
            defaults,
            network,
            pool,
            templates
        )
    }
}

impl TlsLayer {
    pub(crate) fn over(self, lower: Self) -> Self {
        over!(
            self,
            lower,
            TlsLayer {
                certificate,
                key,
                acme,
                acme_directory,
                acme_contact,
                acme_ca,
                acme_dns
            }
        )
    }
}

impl StandbyLayer {
    pub(crate) fn over(self, lower: Self) -> Self {
        over!(
            self,
            lower,
            StandbyLayer {
                after,
                durable_after,
                hibernate_after,
                cpu,
                memory
            }
        )
    }
}

impl DefaultsLayer {
    pub(crate) fn over(self, lower: Self) -> Self {
        over!(
            self,
            lower,
            DefaultsLayer {
                cpus,
                memory,
                disk,
                pids,
                io,
                isolation
            }
        )
    }
}

impl NetworkLayer {
    pub(crate) fn over(self, lower: Self) -> Self {
        over!(self, lower, NetworkLayer { range, nameservers })
    }
}

impl PoolLayer {
    pub(crate) fn over(self, lower: Self) -> Self {
        over!(self, lower, PoolLayer { size, max })
    }
}

impl TemplatesLayer {
    pub(crate) fn over(self, lower: Self) -> Self {
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
