//! What a request is for, going by its host name, its headers or its signature.

use axum::extract::Request;
use http::header::HOST;

use crate::names::Names;

/// Where E2B's clients expect the guest.
pub(crate) const GUEST_PORT: u16 = 49983;
const SANDBOX_ID: &str = "e2b-sandbox-id";
const SANDBOX_PORT: &str = "e2b-sandbox-port";

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Route {
    Api,
    Box { id: String, port: u16 },
    Signed,
}

pub(super) fn route(names: &Names, request: &Request) -> Route {
    let headers = request.headers();
    let host = authority(request);
    if let Some(name) = host.and_then(|host| names.parse(host)) {
        return Route::Box {
            id: name.id,
            port: name.port,
        };
    }
    if let Some(id) = headers.get(SANDBOX_ID).and_then(|id| id.to_str().ok()) {
        let port = headers.get(SANDBOX_PORT).and_then(|port| port.to_str().ok());
        return Route::Box {
            id: id.to_owned(),
            port: port.and_then(|port| port.parse().ok()).unwrap_or(GUEST_PORT),
        };
    }
    let is_signed = || {
        let query = request.uri().query().unwrap_or_default();
        query.split('&').any(|pair| pair.starts_with("signature="))
    };
    if request.uri().path() == "/files" && is_signed() {
        return Route::Signed;
    }
    Route::Api
}

/// The host that was asked for, which HTTP/2 says in the URI.
pub(super) fn authority(request: &Request) -> Option<&str> {
    let named = request.headers().get(HOST).and_then(|host| host.to_str().ok());
    named.or_else(|| request.uri().authority().map(http::uri::Authority::as_str))
}

#[cfg(test)]
mod tests {
    use axum::body::Body;

    use super::*;

    const ID: &str = "abcdefghijklmnopqrst";

    fn of(uri: &str, headers: &[(&str, &str)]) -> Route {
        let mut request = Request::builder().uri(uri);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let names = Names::new(Some("example.org"), 3676, false);
        route(&names, &request.body(Body::empty()).unwrap())
    }

    fn to(port: u16) -> Route {
        Route::Box {
            id: ID.to_owned(),
            port,
        }
    }

    #[test]
    fn the_host_name_decides_before_headers() {
        let host = ("host", "3000-abcdefghijklmnopqrst.example.org");
        assert_eq!(of("/v1/agents", &[host]), to(3000));
        assert_eq!(of("/", &[host, ("e2b-sandbox-id", "other")]), to(3000));
        assert_eq!(
            of("http://3000-abcdefghijklmnopqrst.localhost:1/x", &[]),
            to(3000)
        );
    }

    #[test]
    fn headers_decide_where_the_host_says_nothing() {
        let (host, id) = (("host", "127.0.0.1:3676"), ("e2b-sandbox-id", ID));
        assert_eq!(of("/", &[host, id, ("e2b-sandbox-port", "49999")]), to(49999));
        assert_eq!(of("/", &[host, id]), to(GUEST_PORT));
        assert_eq!(of("/v1/agents", &[host]), Route::Api);
    }

    #[test]
    fn a_signed_url_may_name_no_agent() {
        let host = [("host", "127.0.0.1:3676")];
        assert_eq!(of("/files?path=a&signature=v1_x", &host), Route::Signed);
        assert_eq!(of("/files?path=a", &host), Route::Api);
        assert_eq!(of("/other?signature=v1_x", &host), Route::Api);
    }
}
