//! Tokens that open one agent each: derived from a secret of the server, the agent's id and a purpose, and
//! never stored. A fork has another id, and so other tokens.
//!
//! Whoever has the access token of an agent may do in it what the guest does: run commands, read and
//! write files. Whoever has its traffic token may reach its ports.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use dorm_engine::Id;
use sha2::{Digest as _, Sha256};
use subtle::ConstantTimeEq as _;

use crate::store::{Result, Store};

const SECRET: &str = "tokens";

pub struct Tokens {
    secret: [u8; 32],
}

#[derive(Clone, Copy)]
enum Purpose {
    Access,
    Traffic,
    Volume,
}

/// A request for `/files` that carries a signature in place of a token.
#[derive(Debug, Clone, Copy)]
pub struct Signed<'a> {
    pub path: &'a str,
    pub operation: Operation,
    /// Empty if the request names none.
    pub user: &'a str,
    pub signature: &'a str,
    /// Seconds since 1970, as the request spells them.
    pub expiration: Option<&'a str>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    Read,
    Write,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BadSignature {
    #[error("invalid signature")]
    Wrong,
    #[error("signature is already expired")]
    Expired,
}

impl Tokens {
    /// With the secret of this store, which is made at the first start.
    pub async fn open(store: &dyn Store) -> Result<Self> {
        let mut new = [0u8; 32];
        getrandom::fill(&mut new).expect("the kernel's random source answers");
        let secret = store.server_secret(SECRET, new).await?;
        Ok(Self { secret })
    }

    /// Opens the guest of the agent; E2B calls it `envdAccessToken`.
    pub fn access(&self, agent: &Id) -> String {
        self.token(agent, Purpose::Access)
    }

    /// Opens the agent's ports; E2B calls it `trafficAccessToken`.
    pub fn traffic(&self, agent: &Id) -> String {
        self.token(agent, Purpose::Traffic)
    }

    /// Opens the files of a volume.
    pub fn volume(&self, volume: &Id) -> String {
        self.token(volume, Purpose::Volume)
    }

    pub fn is_volume(&self, volume: &Id, given: &str) -> bool {
        same(&self.volume(volume), given)
    }

    pub fn is_access(&self, agent: &Id, given: &str) -> bool {
        same(&self.access(agent), given)
    }

    pub fn is_traffic(&self, agent: &Id, given: &str) -> bool {
        same(&self.traffic(agent), given)
    }

    /// Whether the request was signed with the access token of `agent`, and is still good at `now`, in
    /// seconds since 1970.
    pub fn check(&self, agent: &Id, signed: &Signed<'_>, now: i64) -> Result<(), BadSignature> {
        let operation = match signed.operation {
            Operation::Read => "read",
            Operation::Write => "write",
        };
        let mut text = format!(
            "{}:{operation}:{}:{}",
            signed.path,
            signed.user,
            self.access(agent)
        );
        if let Some(expiration) = signed.expiration {
            text = format!("{text}:{expiration}");
        }
        let right = format!("v1_{}", STANDARD_NO_PAD.encode(Sha256::digest(text)));
        if !same(&right, signed.signature) {
            return Err(BadSignature::Wrong);
        }
        match signed.expiration.map(str::parse::<i64>) {
            None => Ok(()),
            Some(Ok(until)) if until >= now => Ok(()),
            Some(_) => Err(BadSignature::Expired),
        }
    }

    fn token(&self, agent: &Id, purpose: Purpose) -> String {
        let purpose = match purpose {
            Purpose::Access => "access",
            Purpose::Traffic => "traffic",
            Purpose::Volume => "volume",
        };
        // An id has a fixed length, so that no two pairs give the same text.
        let text = format!("{agent}{purpose}");
        blake3::keyed_hash(&self.secret, text.as_bytes())
            .to_hex()
            .to_string()
    }
}

fn same(right: &str, given: &str) -> bool {
    right.as_bytes().ct_eq(given.as_bytes()).into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::memory::MemoryStore;

    fn tokens() -> Tokens {
        Tokens { secret: [7; 32] }
    }

    #[tokio::test]
    async fn tokens_stay_the_same_while_the_store_does() {
        let (store, id) = (MemoryStore::default(), Id::random());
        let first = Tokens::open(&store).await.unwrap();
        let again = Tokens::open(&store).await.unwrap();
        assert_eq!(first.access(&id), again.access(&id));
        let elsewhere = Tokens::open(&MemoryStore::default()).await.unwrap();
        assert_ne!(first.access(&id), elsewhere.access(&id));
    }

    #[test]
    fn a_token_opens_one_agent_for_one_purpose() {
        let (tokens, one, other) = (tokens(), Id::random(), Id::random());
        assert!(tokens.is_access(&one, &tokens.access(&one)));
        assert!(tokens.is_traffic(&one, &tokens.traffic(&one)));
        assert!(!tokens.is_access(&other, &tokens.access(&one)));
        assert!(!tokens.is_access(&one, &tokens.traffic(&one)));
        assert!(!tokens.is_traffic(&one, &tokens.access(&one)));
        assert!(!tokens.is_access(&one, ""));
    }

    #[test]
    fn a_signature_is_the_one_that_e2b_clients_make() {
        let (tokens, id) = (tokens(), "abcdefghijklmnopqrst".parse().unwrap());
        let text = format!("/tmp/a:read:user:{}:1700000000", tokens.access(&id));
        let signature = format!("v1_{}", STANDARD_NO_PAD.encode(Sha256::digest(text)));
        let signed = Signed {
            path: "/tmp/a",
            operation: Operation::Read,
            user: "user",
            signature: &signature,
            expiration: Some("1700000000"),
        };
        assert_eq!(tokens.check(&id, &signed, 1_700_000_000), Ok(()));
        assert_eq!(
            tokens.check(&id, &signed, 1_700_000_001),
            Err(BadSignature::Expired)
        );
        for wrong in [
            Signed {
                path: "/tmp/b",
                ..signed
            },
            Signed {
                operation: Operation::Write,
                ..signed
            },
            Signed { user: "", ..signed },
            Signed {
                expiration: Some("1800000000"),
                ..signed
            },
            Signed {
                expiration: None,
                ..signed
            },
        ] {
            assert_eq!(
                tokens.check(&id, &wrong, 0),
                Err(BadSignature::Wrong),
                "{wrong:?}"
            );
        }
        assert_eq!(tokens.check(&Id::random(), &signed, 0), Err(BadSignature::Wrong));
    }
}
