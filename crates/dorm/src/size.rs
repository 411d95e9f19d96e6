//! Sizes as people write them: `512M`, `2G`, `1.5G`, or bytes. Units are powers of 1024.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Size(pub(crate) u64);

const UNITS: [(&str, u64); 4] = [("T", 1 << 40), ("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10)];

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct InvalidSize(String);

impl fmt::Display for InvalidSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "`{}` is no size; write it as 512M, 2G, 1.5G or as a number of bytes",
            self.0
        )
    }
}

impl std::error::Error for InvalidSize {}

impl FromStr for Size {
    type Err = InvalidSize;

    fn from_str(text: &str) -> Result<Self, InvalidSize> {
        let refuse = || InvalidSize(text.to_owned());
        let upper = text.trim().to_ascii_uppercase();
        let split = upper
            .find(|c: char| !c.is_ascii_digit() && c != '.')
            .unwrap_or(upper.len());
        let (number, unit) = upper.split_at(split);
        let unit = match unit.trim_start() {
            "" | "B" => 1,
            unit => {
                let stem = unit.strip_suffix("IB").or(unit.strip_suffix('B')).unwrap_or(unit);
                UNITS.iter().find(|(name, _)| *name == stem).ok_or_else(refuse)?.1
            }
        };
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        if whole.is_empty() || (number.contains('.') && (fraction.is_empty() || fraction.contains('.'))) {
            return Err(refuse());
        }
        let whole: u64 = whole.parse().map_err(|_| refuse())?;
        let mut bytes = whole.checked_mul(unit).ok_or_else(refuse)?;
        if !fraction.is_empty() {
            let part: f64 = format!("0.{fraction}").parse().map_err(|_| refuse())?;
            bytes = bytes
                .checked_add((part * unit as f64).round() as u64)
                .ok_or_else(refuse)?;
        }
        Ok(Self(bytes))
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, unit) in UNITS {
            if self.0 >= unit {
                let value = self.0 as f64 / unit as f64;
                // One decimal, and none where it would be zero: `2G`, `1.5G`.
                let text = format!("{value:.1}");
                return f.pad(&format!("{}{name}", text.strip_suffix(".0").unwrap_or(&text)));
            }
        }
        f.pad(&format!("{}B", self.0))
    }
}

impl Serialize for Size {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_u64(self.0)
    }
}

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "a size such as \"2G\", or a number of bytes")]
        enum Written {
            Bytes(u64),
            Text(String),
        }
        match Written::deserialize(d)? {
            Written::Bytes(bytes) => Ok(Self(bytes)),
            Written::Text(text) => text.parse().map_err(serde::de::Error::custom),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_in_powers_of_1024() {
        for (text, bytes) in [
            ("0", 0),
            ("1024", 1024),
            ("12B", 12),
            ("512M", 512 << 20),
            ("512m", 512 << 20),
            ("512MiB", 512 << 20),
            ("512 MB", 512 << 20),
            ("2G", 2 << 30),
            ("1.5G", 3 << 29),
            ("1T", 1 << 40),
        ] {
            assert_eq!(text.parse(), Ok(Size(bytes)), "{text}");
        }
    }

    #[test]
    fn what_is_no_size_is_refused() {
        for text in [
            "",
            "G",
            "-1G",
            "1.G",
            ".5G",
            "1.2.3G",
            "1GG",
            "1 G 2",
            "1e3",
            "99999999999T",
            "iB",
            "1iB",
            "16E",
        ] {
            assert!(text.parse::<Size>().is_err(), "{text} was taken");
        }
    }

    #[test]
    fn sizes_are_shown_short_and_read_back() {
        for (bytes, text) in [
            (0, "0B"),
            (1023, "1023B"),
            (1 << 30, "1G"),
            (3 << 29, "1.5G"),
            (20 << 30, "20G"),
        ] {
            assert_eq!(Size(bytes).to_string(), text);
            assert_eq!(text.parse(), Ok(Size(bytes)));
        }
    }
}
