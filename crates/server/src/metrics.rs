//! What Prometheus finds at `/metrics`. Counters are kept here; gauges are read when it asks.

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

use crate::records::State;

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct StateLabel {
    state: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct RequestLabels {
    route: Arc<str>,
    status: u16,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ResultLabel {
    result: &'static str,
}

pub struct Metrics {
    registry: Registry,
    agents: Family<StateLabel, Gauge>,
    starts: Family<ResultLabel, Counter>,
    start_seconds: Histogram,
    requests: Family<RequestLabels, Counter>,
    open_requests: Gauge,
    pool_total: Gauge,
    pool_free: Gauge,
}

/// What is true at the moment of asking.
#[derive(Debug, Default)]
pub struct Now {
    pub agents: Vec<(State, usize)>,
    pub open_requests: usize,
    pub pool_total: u64,
    pub pool_free: u64,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("dorm");
        let metrics = Self {
            agents: Family::default(),
            starts: Family::default(),
            start_seconds: Histogram::new(exponential_buckets(0.005, 2.0, 14)),
            requests: Family::default(),
            open_requests: Gauge::default(),
            pool_total: Gauge::default(),
            pool_free: Gauge::default(),
            registry: Registry::default(),
        };
        registry.register("agents", "Agents by state", metrics.agents.clone());
        registry.register("starts", "Boxes started, by result", metrics.starts.clone());
        registry.register(
            "start_seconds",
            "Time from the request to a guest that answers",
            metrics.start_seconds.clone(),
        );
        registry.register(
            "requests",
            "HTTP requests by route and status",
            metrics.requests.clone(),
        );
        registry.register(
            "open_guest_requests",
            "Requests to guests that are open",
            metrics.open_requests.clone(),
        );
        registry.register(
            "pool_bytes",
            "Size of the pool of homes",
            metrics.pool_total.clone(),
        );
        registry.register(
            "pool_free_bytes",
            "Free space in the pool of homes",
            metrics.pool_free.clone(),
        );
        Self { registry, ..metrics }
    }
}

impl Metrics {
    pub fn started(&self, ok: bool, took: Duration) {
        self.starts
            .get_or_create(&ResultLabel {
                result: if ok { "ok" } else { "failed" },
            })
            .inc();
        if ok {
            self.start_seconds.observe(took.as_secs_f64());
        }
    }

    pub fn requested(&self, route: &Arc<str>, status: u16) {
        self.requests
            .get_or_create(&RequestLabels {
                route: route.clone(),
                status,
            })
            .inc();
    }

    /// A request that was for a box.
    pub fn requested_of_box(&self, status: u16) {
        static ROUTE: LazyLock<Arc<str>> = LazyLock::new(|| "box".into());
        self.requested(&ROUTE, status);
    }

    pub fn render(&self, now: &Now) -> String {
        for state in State::ALL {
            let count = now
                .agents
                .iter()
                .find(|(of, _)| *of == state)
                .map_or(0, |(_, count)| *count);
            self.agents
                .get_or_create(&StateLabel {
                    state: state.as_str(),
                })
                .set(signed(count as u64));
        }
        self.open_requests.set(signed(now.open_requests as u64));
        self.pool_total.set(signed(now.pool_total));
        self.pool_free.set(signed(now.pool_free));
        let mut text = String::new();
        encode(&mut text, &self.registry).expect("a string takes what is written to it");
        text
    }
}

fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}
