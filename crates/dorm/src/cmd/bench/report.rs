//! What was measured, as a table and as JSON.

use std::time::Duration;

use anyhow::Result;
use dorm_server::api::types::Template;
use hdrhistogram::Histogram;
use serde::Serialize;

use crate::output::Table;

/// Durations of one measured thing.
pub(super) struct Samples(Histogram<u64>);

impl Samples {
    pub(super) fn new() -> Result<Self> {
        Ok(Self(Histogram::new(3)?))
    }

    pub(super) fn add(&mut self, took: Duration) -> Result<()> {
        Ok(self.0.record(took.as_nanos() as u64)?)
    }
}

#[derive(Debug, Serialize)]
pub(super) struct Measurement {
    pub(super) name: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    skipped: Option<String>,
    #[serde(flatten)]
    times: Option<Times>,
}

#[derive(Debug, Serialize)]
struct Times {
    runs: u64,
    p50_ms: f64,
    p95_ms: f64,
    p99_ms: f64,
    max_ms: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    mib_per_second: Option<f64>,
}

impl Measurement {
    /// `bytes` is what one run moved, if moving is what it did.
    pub(super) fn new(name: &'static str, samples: &Samples, bytes: Option<u64>) -> Self {
        let ms = |nanos: u64| nanos as f64 / 1e6;
        let at = |quantile| ms(samples.0.value_at_quantile(quantile));
        let rate = |bytes: u64| bytes as f64 / f64::from(1 << 20) / (at(0.5) / 1e3);
        let times = Times {
            runs: samples.0.len(),
            p50_ms: at(0.5),
            p95_ms: at(0.95),
            p99_ms: at(0.99),
            max_ms: ms(samples.0.max()),
            mib_per_second: bytes.map(rate),
        };
        Self {
            name,
            skipped: None,
            times: Some(times),
        }
    }

    pub(super) fn skipped(name: &'static str, why: impl Into<String>) -> Self {
        Self {
            name,
            skipped: Some(why.into()),
            times: None,
        }
    }
}

/// Something that was counted or weighed once.
#[derive(Debug, Serialize)]
pub(super) struct Figure {
    name: &'static str,
    value: f64,
    unit: &'static str,
}

impl Figure {
    pub(super) fn ms(name: &'static str, value: f64) -> Self {
        Self {
            name,
            value,
            unit: "ms",
        }
    }

    pub(super) fn mib(name: &'static str, bytes: f64) -> Self {
        let value = bytes / f64::from(1 << 20);
        Self {
            name,
            value,
            unit: "MiB",
        }
    }

    pub(super) fn kib(name: &'static str, bytes: f64) -> Self {
        let value = bytes / 1024.0;
        Self {
            name,
            value,
            unit: "KiB",
        }
    }

    pub(super) fn count(name: &'static str, value: u32) -> Self {
        let value = f64::from(value);
        Self {
            name,
            value,
            unit: "",
        }
    }
}

/// A ratio of two medians, and what it should be at most.
pub(super) struct Aim {
    pub(super) name: &'static str,
    pub(super) of: &'static str,
    pub(super) against: &'static str,
    pub(super) at_most: f64,
}

/// A time that would be nice, and what of it there is no way around.
pub(super) struct Wish {
    pub(super) of: &'static str,
    pub(super) ms: f64,
    /// Each of which is part of the one before.
    pub(super) parts: &'static [&'static str],
}

#[derive(Debug, Serialize)]
struct Wished {
    name: &'static str,
    p50_ms: f64,
    wish_ms: f64,
    reached: bool,
    of_which: Vec<Part>,
}

#[derive(Debug, Serialize)]
struct Part {
    name: &'static str,
    p50_ms: f64,
}

#[derive(Debug, Serialize)]
struct Ratio {
    name: &'static str,
    ratio: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    at_most: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    met: Option<bool>,
}

#[derive(Debug, Serialize)]
pub(super) struct Report {
    version: &'static str,
    runs: u32,
    template: String,
    pub(super) measurements: Vec<Measurement>,
    pub(super) figures: Vec<Figure>,
    ratios: Vec<Ratio>,
    wishes: Vec<Wished>,
}

impl Report {
    pub(super) fn new(runs: u32, template: &Template) -> Self {
        let version = env!("CARGO_PKG_VERSION");
        Self {
            version,
            runs,
            template: template.name.clone(),
            measurements: Vec::new(),
            figures: Vec::new(),
            ratios: Vec::new(),
            wishes: Vec::new(),
        }
    }

    fn median(&self, name: &str) -> Option<f64> {
        let measured = self.measurements.iter().find(|m| m.name == name)?;
        Some(measured.times.as_ref()?.p50_ms)
    }

    /// Adds the wish if what it is of was measured.
    pub(super) fn wish(&mut self, wish: Wish) {
        if let Some(p50_ms) = self.median(wish.of) {
            let part = |name| self.median(name).map(|p50_ms| Part { name, p50_ms });
            let of_which = wish.parts.iter().copied().filter_map(part).collect();
            self.wishes.push(Wished {
                name: wish.of,
                p50_ms,
                wish_ms: wish.ms,
                reached: p50_ms <= wish.ms,
                of_which,
            });
        }
    }

    /// Adds the ratio if both of its sides were measured.
    pub(super) fn aim(&mut self, aim: Aim) {
        if let (Some(of), Some(against)) = (self.median(aim.of), self.median(aim.against)) {
            let ratio = of / against;
            let at_most = aim.at_most.is_finite().then_some(aim.at_most);
            let met = at_most.map(|most| ratio <= most);
            self.ratios.push(Ratio {
                name: aim.name,
                ratio,
                at_most,
                met,
            });
        }
    }

    pub(super) fn render(&self) -> String {
        let mut table = Table::new([
            "MEASURED", ">RUNS", ">P50 MS", ">P95 MS", ">P99 MS", ">MAX MS", ">MIB/S",
        ]);
        let mut skipped = String::new();
        for measured in &self.measurements {
            let (name, ms) = (measured.name, |value: f64| format!("{value:.2}"));
            if let Some(t) = &measured.times {
                table.row([
                    name.to_owned(),
                    t.runs.to_string(),
                    ms(t.p50_ms),
                    ms(t.p95_ms),
                    ms(t.p99_ms),
                    ms(t.max_ms),
                    t.mib_per_second.map(|r| format!("{r:.0}")).unwrap_or_default(),
                ]);
            }
            if let Some(why) = &measured.skipped {
                skipped += &format!("skipped: {name}: {}\n", why.trim());
            }
        }
        let mut text = match self.measurements.iter().any(|m| m.times.is_some()) {
            true => table.render(),
            false => String::new(),
        };
        text += &skipped;
        if !self.figures.is_empty() {
            let mut figures = Table::new(["FIGURE", ">IS", ""]);
            for Figure { name, value, unit } in &self.figures {
                let digits = if unit.is_empty() { 0 } else { 2 };
                figures.row([
                    (*name).to_owned(),
                    format!("{value:.digits$}"),
                    (*unit).to_owned(),
                ]);
            }
            text.push('\n');
            text += &figures.render();
        }
        if !self.ratios.is_empty() {
            let mut ratios = Table::new(["RATIO OF MEDIANS", ">IS", ">AIM", ""]);
            for ratio in &self.ratios {
                ratios.row([
                    ratio.name.to_owned(),
                    format!("{:.2}", ratio.ratio),
                    ratio.at_most.map(|m| format!("<= {m}")).unwrap_or_default(),
                    ratio
                        .met
                        .map_or("", |met| if met { "met" } else { "missed" })
                        .to_owned(),
                ]);
            }
            text.push('\n');
            text += &ratios.render();
        }
        if !self.wishes.is_empty() {
            let mut wishes = Table::new(["WISH", ">P50 MS", ">WISHED", ""]);
            for wish in &self.wishes {
                let reached = if wish.reached { "reached" } else { "not reached" };
                wishes.row([
                    wish.name.to_owned(),
                    format!("{:.2}", wish.p50_ms),
                    format!("<= {}", wish.wish_ms),
                    reached.to_owned(),
                ]);
                for part in &wish.of_which {
                    wishes.row([
                        format!("  of which {}", part.name),
                        format!("{:.2}", part.p50_ms),
                        String::new(),
                        String::new(),
                    ]);
                }
            }
            text.push('\n');
            text += &wishes.render();
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(name: &'static str, millis: u64) -> Measurement {
        let mut samples = Samples::new().unwrap();
        samples.add(Duration::from_millis(millis)).unwrap();
        Measurement::new(name, &samples, Some(1 << 20))
    }

    fn report(measurements: Vec<Measurement>) -> Report {
        Report {
            version: "0",
            runs: 1,
            template: "base".into(),
            measurements,
            figures: Vec::new(),
            ratios: Vec::new(),
            wishes: Vec::new(),
        }
    }

    #[test]
    fn an_aim_is_met_or_missed_by_the_medians() {
        let mut report = report(vec![measured("a", 20), measured("b", 10)]);
        report.aim(Aim {
            name: "met",
            of: "a",
            against: "b",
            at_most: 3.0,
        });
        report.aim(Aim {
            name: "missed",
            of: "a",
            against: "b",
            at_most: 1.0,
        });
        assert_eq!(
            report.ratios.iter().map(|r| r.met).collect::<Vec<_>>(),
            [Some(true), Some(false)]
        );
        assert!((report.ratios[0].ratio - 2.0).abs() < 0.01);
    }

    #[test]
    fn a_wish_is_told_with_what_it_is_made_of() {
        let mut report = report(vec![measured("a", 20), measured("b", 10)]);
        report.wish(Wish {
            of: "a",
            ms: 5.0,
            parts: &["b", "not measured"],
        });
        report.wish(Wish {
            of: "not measured",
            ms: 5.0,
            parts: &[],
        });
        let [wish] = &report.wishes[..] else {
            panic!("{:?}", report.wishes)
        };
        assert!(!wish.reached);
        assert_eq!(wish.of_which.len(), 1);
        let text = report.render();
        assert!(text.contains("not reached"), "{text}");
        assert!(text.contains("of which b"), "{text}");
    }

    #[test]
    fn what_was_skipped_says_why_and_has_no_ratio() {
        let mut report = report(vec![
            measured("a", 20),
            Measurement::skipped("b", "not installed"),
        ]);
        report.aim(Aim {
            name: "none",
            of: "a",
            against: "b",
            at_most: 3.0,
        });
        assert!(report.ratios.is_empty());
        assert!(report.render().ends_with("skipped: b: not installed\n"));
    }
}
