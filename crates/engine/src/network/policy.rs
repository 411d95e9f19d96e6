//! What one agent's boxes may reach, beyond what no box ever may.
//!
//! Whatever is allowed wins over what is denied; what neither names is reachable. A name is allowed by the addresses
//! that its DNS answers give, so it is a promise about addresses: see docs/network.md.

use std::fmt;
use std::net::Ipv4Addr;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Policy {
    /// Without it, nothing is reachable but what is allowed.
    pub internet: bool,
    pub allow: Vec<Target>,
    pub deny: Vec<Block>,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            internet: true,
            allow: Vec::new(),
            deny: Vec::new(),
        }
    }
}

impl Policy {
    /// Whether it asks for nothing beyond what holds for all boxes.
    pub fn is_default(&self) -> bool {
        self.internet && self.deny.is_empty()
    }

    pub fn denies_everything_else(&self) -> bool {
        !self.internet || self.deny.contains(&Block::ALL)
    }

    /// The names, if they make a difference.
    pub(super) fn names(&self) -> Vec<Name> {
        let names = self.allow.iter().filter_map(|target| match target {
            Target::Name(name) => Some(name.clone()),
            Target::Block(_) => None,
        });
        if self.is_default() {
            Vec::new()
        } else {
            names.collect()
        }
    }

    pub(super) fn allowed_blocks(&self) -> Vec<Block> {
        let blocks = self.allow.iter().filter_map(|target| match target {
            Target::Block(block) => Some(*block),
            Target::Name(_) => None,
        });
        disjoint(blocks.collect())
    }

    pub(super) fn denied_blocks(&self) -> Vec<Block> {
        if self.denies_everything_else() {
            return vec![Block::ALL];
        }
        disjoint(self.deny.clone())
    }
}

/// Blocks either lie within one another or do not meet; those within others are left out.
fn disjoint(mut blocks: Vec<Block>) -> Vec<Block> {
    blocks.sort_by_key(|block| (block.prefix, block.base));
    let mut kept: Vec<Block> = Vec::new();
    for block in blocks {
        if !kept.iter().any(|wider| wider.contains(block.base)) {
            kept.push(block);
        }
    }
    kept
}

/// Something that can be allowed.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Target {
    Block(Block),
    Name(Name),
}

/// IPv4 addresses that begin with the same bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Block {
    base: Ipv4Addr,
    prefix: u8,
}

impl Block {
    pub const ALL: Self = Self {
        base: Ipv4Addr::UNSPECIFIED,
        prefix: 0,
    };

    pub fn contains(&self, address: Ipv4Addr) -> bool {
        mask(self.prefix) & address.to_bits() == self.base.to_bits()
    }

    /// Whether it lies as a whole within what no box may reach.
    pub fn is_out_of_bounds(&self) -> bool {
        super::firewall::OUT_OF_BOUNDS
            .split(',')
            .filter_map(|text| text.trim().parse::<Block>().ok())
            .any(|wider| wider.prefix <= self.prefix && wider.contains(self.base))
    }
}

fn mask(prefix: u8) -> u32 {
    u32::MAX.checked_shl(32 - u32::from(prefix)).unwrap_or(0)
}

/// A DNS name, or all names below one, in lower case.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Name {
    below: bool,
    name: Box<str>,
}

impl Name {
    /// `name` is in lower case and has no dot at its end.
    pub fn matches(&self, name: &str) -> bool {
        match self.below {
            false => name == &*self.name,
            true => name
                .strip_suffix(&*self.name)
                .is_some_and(|rest| rest.len() > 1 && rest.ends_with('.')),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidTarget {
    #[error(
        "{0:?} is no IPv4 address, no block of them like 198.51.100.0/24, and no name like *.example.org"
    )]
    Unknown(String),
    #[error("{0:?} is no IPv4 address, and no block of them like 198.51.100.0/24")]
    NoBlock(String),
    #[error("{0:?} is an IPv6 address; boxes have no IPv6")]
    Ipv6(String),
    #[error("the block {0:?} has bits set after its prefix")]
    LooseBits(String),
}

impl FromStr for Block {
    type Err = InvalidTarget;

    fn from_str(text: &str) -> Result<Self, InvalidTarget> {
        let no_block = || InvalidTarget::NoBlock(text.to_owned());
        let (address, prefix) = text.split_once('/').unwrap_or((text, "32"));
        if address.parse::<std::net::Ipv6Addr>().is_ok() {
            return Err(InvalidTarget::Ipv6(text.to_owned()));
        }
        let base: Ipv4Addr = address.parse().map_err(|_| no_block())?;
        let fits = !prefix.is_empty() && prefix.bytes().all(|b| b.is_ascii_digit());
        let prefix: u8 = prefix
            .parse()
            .ok()
            .filter(|p| fits && *p <= 32)
            .ok_or_else(no_block)?;
        if base.to_bits() & !mask(prefix) != 0 {
            return Err(InvalidTarget::LooseBits(text.to_owned()));
        }
        Ok(Self { base, prefix })
    }
}

impl FromStr for Name {
    type Err = InvalidTarget;

    fn from_str(text: &str) -> Result<Self, InvalidTarget> {
        let lower = text.to_ascii_lowercase();
        let whole = lower.strip_suffix('.').unwrap_or(&lower);
        let (below, name) = match whole.strip_prefix("*.") {
            Some(rest) => (true, rest),
            None => (false, whole),
        };
        let label = |label: &str| {
            (1..=63).contains(&label.len())
                && label
                    .bytes()
                    .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-' || b == b'_')
        };
        // A last label of digits would be an address that was mistyped.
        let last_is_word = |name: &str| {
            name.rsplit('.')
                .next()
                .is_some_and(|l| l.bytes().any(|b| b.is_ascii_lowercase()))
        };
        let fits = name.len() <= 253 && name.split('.').all(label) && last_is_word(name);
        if !fits {
            return Err(InvalidTarget::Unknown(text.to_owned()));
        }
        Ok(Self {
            below,
            name: name.into(),
        })
    }
}

impl FromStr for Target {
    type Err = InvalidTarget;

    fn from_str(text: &str) -> Result<Self, InvalidTarget> {
        match text.parse::<Block>() {
            Ok(block) => Ok(Self::Block(block)),
            Err(InvalidTarget::NoBlock(_)) => text.parse().map(Self::Name),
            Err(other) => Err(other),
        }
    }
}

impl fmt::Display for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.prefix {
            32 => write!(f, "{}", self.base),
            prefix => write!(f, "{}/{prefix}", self.base),
        }
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", if self.below { "*." } else { "" }, self.name)
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Block(block) => block.fmt(f),
            Self::Name(name) => name.fmt(f),
        }
    }
}

macro_rules! as_text {
    ($($kind:ty),*) => {$(
        impl TryFrom<String> for $kind {
            type Error = InvalidTarget;
            fn try_from(text: String) -> Result<Self, InvalidTarget> {
                text.parse()
            }
        }
        impl From<$kind> for String {
            fn from(target: $kind) -> String {
                target.to_string()
            }
        }
    )*};
}

as_text!(Block, Name, Target);

#[cfg(test)]
mod tests {
    use super::*;

    fn target(text: &str) -> Result<Target, InvalidTarget> {
        text.parse()
    }

    #[test]
    fn addresses_blocks_and_names_are_told_apart_and_written_back() {
        for text in [
            "198.51.100.7",
            "198.51.100.0/24",
            "0.0.0.0/0",
            "example.org",
            "*.example.org",
        ] {
            assert_eq!(target(text).unwrap().to_string(), text);
        }
        assert_eq!(target("198.51.100.7/32").unwrap().to_string(), "198.51.100.7");
        assert_eq!(target("Example.ORG.").unwrap().to_string(), "example.org");
    }

    #[test]
    fn what_is_no_target_is_refused_with_its_kind() {
        for text in [
            "",
            "*",
            "a..b",
            "1.2.3",
            "1.2.3.4.5",
            "a b",
            "*.*.example.org",
            "1.2.3.4/33",
            "1.2.3.4/+8",
        ] {
            assert!(
                matches!(target(text), Err(InvalidTarget::Unknown(_))),
                "{text:?}: {:?}",
                target(text)
            );
        }
        assert!(matches!(target("2001:db8::1"), Err(InvalidTarget::Ipv6(_))));
        assert!(matches!(target("10.0.0.1/8"), Err(InvalidTarget::LooseBits(_))));
    }

    #[test]
    fn a_star_stands_for_all_names_below_and_not_for_the_name_itself() {
        let below: Name = "*.example.org".parse().unwrap();
        assert!(below.matches("a.example.org") && below.matches("a.b.example.org"));
        assert!(
            !below.matches("example.org")
                && !below.matches("badexample.org")
                && !below.matches(".example.org")
        );
        let one: Name = "example.org".parse().unwrap();
        assert!(one.matches("example.org") && !one.matches("a.example.org"));
    }

    #[test]
    fn blocks_within_others_are_left_out() {
        let blocks = ["10.1.0.0/16", "10.0.0.0/8", "10.1.2.3", "192.0.2.1"].map(|text| text.parse().unwrap());
        let kept: Vec<String> = disjoint(blocks.to_vec()).iter().map(Block::to_string).collect();
        assert_eq!(kept, ["10.0.0.0/8", "192.0.2.1"]);
        assert_eq!(disjoint(vec![Block::ALL, Block::ALL]), [Block::ALL]);
    }

    #[test]
    fn private_blocks_are_out_of_bounds_and_all_addresses_are_not() {
        let out = |text: &str| text.parse::<Block>().unwrap().is_out_of_bounds();
        assert!(out("10.0.0.0/8") && out("10.9.0.0/16") && out("169.254.169.254"));
        assert!(!out("0.0.0.0/0") && !out("198.51.100.1") && !out("8.0.0.0/6"));
    }
}
