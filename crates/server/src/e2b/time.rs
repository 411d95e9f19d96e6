//! Times as the SDKs write and read them.

use jiff::Timestamp;
use jiff::civil::DateTime;
use jiff::tz::TimeZone;

use super::errors::{Error, Result};

/// The end of what has none: the SDKs want a date.
pub(super) const NEVER: i64 = 32_503_593_600_000;
/// Ten years, in seconds.
const LONGEST: i64 = 10 * 366 * 24 * 3600;

pub(super) fn rfc3339(millis: i64) -> String {
    Timestamp::from_millisecond(millis).map_or_else(|_| String::new(), |time| format!("{time:.3}"))
}

/// Milliseconds since 1970. A time without a zone is UTC.
pub(super) fn parse(text: &str) -> Result<i64> {
    let zoned = text.parse::<Timestamp>().ok();
    let plain = || {
        let time: DateTime = text.parse().ok()?;
        Some(time.to_zoned(TimeZone::UTC).ok()?.timestamp())
    };
    let time = zoned.or_else(plain);
    time.map(Timestamp::as_millisecond)
        .ok_or_else(|| Error::invalid(format!("{text:?} is no time; RFC 3339 is expected")))
}

/// From the seconds of a request to milliseconds.
pub(super) fn timeout(seconds: i64) -> Result<i64> {
    match seconds {
        0..=LONGEST => Ok(seconds * 1000),
        _ => Err(Error::invalid(format!(
            "a timeout of {seconds} seconds is out of range: from 0 to {LONGEST}"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_as_every_sdk_writes_them() {
        for text in [
            "2026-11-16T00:00:01.500Z",
            "2026-11-16T00:00:01.500000+00:00",
            "2026-11-16T01:00:01.5+01:00",
            "2026-11-16T00:00:01.5",
        ] {
            assert_eq!(
                rfc3339(parse(text).unwrap()),
                "2026-11-16T00:00:01.500Z",
                "{text}"
            );
        }
        assert!(parse("yesterday").is_err());
        assert_eq!(rfc3339(NEVER), "2999-12-31T00:00:00.000Z");
        assert!(timeout(-1).is_err() && timeout(0).is_ok());
    }
}
