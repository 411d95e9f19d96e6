//! The names under which boxes are reached: `<port>-<id>.<domain>`.

use dorm_engine::Id;
use http::uri::Authority;

/// Works everywhere: browsers and most resolvers take it for this machine.
const LOCAL: &str = "localhost";

#[derive(Debug, Clone)]
pub struct Names {
    scheme: &'static str,
    /// Without port.
    domain: Option<String>,
    /// With the port, unless it is the scheme's own.
    shown: String,
}

/// A port of what claims to be an agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BoxName {
    pub port: u16,
    pub id: String,
}

impl Names {
    /// `domain` is a name, perhaps with the port that clients see; `port` is where the daemon listens.
    pub fn new(domain: Option<&str>, port: u16, tls: bool) -> Self {
        let (scheme, usual) = if tls { ("https", 443) } else { ("http", 80) };
        let domain = domain.map(str::to_ascii_lowercase);
        let (name, port) = match domain.as_deref().map(|domain| (domain, domain.rsplit_once(':'))) {
            None => (None, port),
            Some((domain, None)) => (Some(domain.to_owned()), port),
            Some((_, Some((name, own)))) => (Some(name.to_owned()), own.parse().unwrap_or(port)),
        };
        let base = name.as_deref().unwrap_or(LOCAL);
        let shown = if port == usual {
            base.to_owned()
        } else {
            format!("{base}:{port}")
        };
        Self {
            scheme,
            domain: name,
            shown,
        }
    }

    /// What follows `<port>-<id>.` in the name of a box, as E2B clients are told it.
    pub fn domain(&self) -> &str {
        &self.shown
    }

    pub fn url(&self, id: &Id, port: u16) -> String {
        format!("{}://{port}-{id}.{}", self.scheme, self.shown)
    }

    /// The box that a host name speaks of, if it is one of ours.
    pub(crate) fn parse(&self, authority: &str) -> Option<BoxName> {
        let authority: Authority = authority.parse().ok()?;
        let host = authority.host().to_ascii_lowercase();
        let (label, domain) = host.split_once('.')?;
        if domain != LOCAL && Some(domain) != self.domain.as_deref() {
            return None;
        }
        let (port, id) = label.split_once('-')?;
        Some(BoxName {
            port: port.parse().ok().filter(|&port| port > 0)?,
            id: id.to_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "abcdefghijklmnopqrst";

    #[test]
    fn a_host_name_speaks_of_a_port_of_an_agent() {
        let names = Names::new(Some("Example.org"), 443, true);
        let found = Some(BoxName {
            port: 3000,
            id: ID.to_owned(),
        });
        for host in [
            "3000-abcdefghijklmnopqrst.example.org",
            "3000-abcdefghijklmnopqrst.EXAMPLE.org:443",
            "3000-abcdefghijklmnopqrst.localhost:3676",
        ] {
            assert_eq!(names.parse(host), found, "{host}");
        }
        for host in [
            "api.example.org",
            "localhost:3676",
            "127.0.0.1",
            "[::1]:3676",
            "3000-abcdefghijklmnopqrst.example.com",
            "3000-abcdefghijklmnopqrst.evil.example.org",
            "0-abcdefghijklmnopqrst.example.org",
            "70000-abcdefghijklmnopqrst.example.org",
        ] {
            assert_eq!(names.parse(host), None, "{host}");
        }
    }

    #[test]
    fn a_url_says_what_a_browser_needs() {
        let id = ID.parse().unwrap();
        let url = |domain, port, tls| Names::new(domain, port, tls).url(&id, 80);
        assert_eq!(
            url(None, 3676, false),
            "http://80-abcdefghijklmnopqrst.localhost:3676"
        );
        assert_eq!(
            url(Some("example.org"), 443, true),
            "https://80-abcdefghijklmnopqrst.example.org"
        );
        assert_eq!(
            url(Some("example.org:8443"), 3676, true),
            "https://80-abcdefghijklmnopqrst.example.org:8443"
        );
    }
}
