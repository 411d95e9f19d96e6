//! What of a request's and an answer's headers goes on, and what is added.

use http::header::{
    AUTHORIZATION, CONNECTION, COOKIE, EXPECT, HOST, HeaderName, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, TE,
    TRANSFER_ENCODING, UPGRADE,
};
use http::request::Parts;
use http::{HeaderMap, HeaderValue};

use super::Peer;
use super::route::GUEST_PORT;
use crate::api::{API_KEY, bearer};
use crate::records::Reach;

const FORWARDED_FOR: &str = "x-forwarded-for";
const FORWARDED_HOST: &str = "x-forwarded-host";
const FORWARDED_PROTO: &str = "x-forwarded-proto";

/// What a box sees of a request that was let in.
pub(super) fn forward(parts: &mut Parts, reach: &Reach, port: u16) {
    let host = host(parts);
    if port == GUEST_PORT {
        return for_guest(&mut parts.headers);
    }
    let masked = reach
        .host
        .as_ref()
        .map(|mask| mask.replace("${PORT}", &port.to_string()));
    if let Some(seen) = masked.as_ref().or(host.as_ref())
        && let Ok(seen) = HeaderValue::from_str(seen)
    {
        parts.headers.insert(HOST, seen);
    }
    let peer = parts.extensions.get::<Peer>().copied();
    add_forwarded(&mut parts.headers, peer, host.as_deref());
}

/// The guest is told nothing of the daemon's: neither key nor token, nor the name it was reached by.
pub(crate) fn for_guest(headers: &mut HeaderMap) {
    headers.remove(HOST);
    headers.remove(API_KEY);
    // A basic `Authorization` names the user of a run, and is the guest's.
    remove_values(headers, AUTHORIZATION, |value| bearer(value).is_some());
}

pub(super) fn host(parts: &Parts) -> Option<String> {
    let named = parts.headers.get(HOST).and_then(|host| host.to_str().ok());
    named
        .or_else(|| parts.uri.authority().map(http::uri::Authority::as_str))
        .map(str::to_owned)
}

/// A proxy on this machine is believed; whoever comes from elsewhere is who it seems.
fn add_forwarded(headers: &mut HeaderMap, peer: Option<Peer>, host: Option<&str>) {
    let Some(peer) = peer else { return };
    let address = peer.address.ip().to_canonical();
    let before = match address.is_loopback() {
        true => headers.get(FORWARDED_FOR).and_then(|before| before.to_str().ok()),
        false => None,
    };
    let chain = match before {
        Some(before) => format!("{before}, {address}"),
        None => address.to_string(),
    };
    let believed = before.is_some();
    let mut set = |name: &'static str, value: &str| {
        if let Ok(value) = HeaderValue::from_str(value)
            && !(believed && headers.contains_key(name))
        {
            headers.insert(name, value);
        }
    };
    set(FORWARDED_PROTO, if peer.tls { "https" } else { "http" });
    if let Some(host) = host {
        set(FORWARDED_HOST, host);
    }
    if let Ok(chain) = HeaderValue::from_str(&chain) {
        headers.insert(FORWARDED_FOR, chain);
    }
}

/// Removes the cookies of this name and gives their values.
pub(super) fn take_cookies(headers: &mut HeaderMap, name: &str) -> Vec<String> {
    let mut taken = Vec::new();
    let mut kept = Vec::new();
    for value in headers.get_all(COOKIE) {
        let Ok(text) = value.to_str() else {
            kept.push(value.clone());
            continue;
        };
        let mut others = Vec::new();
        for pair in text.split(';').map(str::trim) {
            match pair.split_once('=') {
                Some((key, value)) if key == name => taken.push(value.to_owned()),
                _ => others.push(pair),
            }
        }
        if let Ok(value) = HeaderValue::from_str(&others.join("; "))
            && !others.is_empty()
        {
            kept.push(value);
        }
    }
    if !taken.is_empty() {
        headers.remove(COOKIE);
        for value in kept {
            headers.append(COOKIE, value);
        }
    }
    taken
}

pub(super) fn remove_values(headers: &mut HeaderMap, name: HeaderName, is_ours: impl Fn(&str) -> bool) {
    let ours = |value: &HeaderValue| value.to_str().is_ok_and(&is_ours);
    if !headers.get_all(&name).iter().any(ours) {
        return;
    }
    let kept: Vec<_> = headers
        .get_all(&name)
        .iter()
        .filter(|v| !ours(v))
        .cloned()
        .collect();
    headers.remove(&name);
    for value in kept {
        headers.append(name.clone(), value);
    }
}

/// The protocol that a request, or an answer, changes to.
pub(super) fn upgrade(headers: &HeaderMap) -> Option<HeaderValue> {
    let named = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .any(|name| name.trim().eq_ignore_ascii_case("upgrade"));
    named.then(|| headers.get(UPGRADE).cloned()).flatten()
}

/// Removes what concerns one connection only. An upgrade, and that trailers are welcome, is kept.
pub(super) fn remove_hop_by_hop(headers: &mut HeaderMap) {
    let upgrade = upgrade(headers);
    let trailers = headers
        .get(TE)
        .is_some_and(|te| te.to_str().is_ok_and(|te| te.contains("trailers")));
    let named: Vec<HeaderName> = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    for name in named {
        headers.remove(name);
    }
    let fixed = [
        CONNECTION,
        PROXY_AUTHENTICATE,
        PROXY_AUTHORIZATION,
        TE,
        TRANSFER_ENCODING,
        UPGRADE,
        EXPECT,
    ];
    for name in fixed {
        headers.remove(name);
    }
    headers.remove("keep-alive");
    headers.remove("proxy-connection");
    if let Some(protocol) = upgrade {
        headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(UPGRADE, protocol);
    }
    if trailers {
        headers.insert(TE, HeaderValue::from_static("trailers"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cookies_of_one_name_are_taken_and_others_stay() {
        let mut headers = HeaderMap::new();
        headers.append(COOKIE, HeaderValue::from_static("a=1; token=x; b=2"));
        headers.append(COOKIE, HeaderValue::from_static("token=y"));
        assert_eq!(take_cookies(&mut headers, "token"), ["x", "y"]);
        let left: Vec<_> = headers.get_all(COOKIE).iter().collect();
        assert_eq!(left, ["a=1; b=2"]);
    }

    #[test]
    fn who_comes_from_elsewhere_cannot_say_who_it_is() {
        let mut headers = HeaderMap::new();
        headers.insert(FORWARDED_FOR, HeaderValue::from_static("1.2.3.4"));
        headers.insert(FORWARDED_PROTO, HeaderValue::from_static("https"));
        let peer = |address: &str| {
            Some(Peer {
                address: address.parse().unwrap(),
                tls: false,
            })
        };
        let mut behind_proxy = headers.clone();
        add_forwarded(&mut headers, peer("192.0.2.1:5"), Some("h"));
        assert_eq!(headers[FORWARDED_FOR], "192.0.2.1");
        assert_eq!(headers[FORWARDED_PROTO], "http");
        add_forwarded(&mut behind_proxy, peer("127.0.0.1:5"), Some("h"));
        assert_eq!(behind_proxy[FORWARDED_FOR], "1.2.3.4, 127.0.0.1");
        assert_eq!(behind_proxy[FORWARDED_PROTO], "https");
        assert_eq!(behind_proxy[FORWARDED_HOST], "h");
    }

    #[test]
    fn an_upgrade_goes_on_and_the_rest_of_the_connection_does_not() {
        let mut headers = HeaderMap::new();
        headers.insert(CONNECTION, HeaderValue::from_static("keep-alive, Upgrade, x-hop"));
        headers.insert(UPGRADE, HeaderValue::from_static("websocket"));
        headers.insert("x-hop", HeaderValue::from_static("1"));
        headers.insert(TE, HeaderValue::from_static("gzip, trailers"));
        remove_hop_by_hop(&mut headers);
        assert_eq!(headers[CONNECTION], "upgrade");
        assert_eq!(headers[UPGRADE], "websocket");
        assert_eq!(headers[TE], "trailers");
        assert!(!headers.contains_key("x-hop"));
    }
}
