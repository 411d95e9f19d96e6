//! The HTTP API as a program meets it: keys, errors, documentation.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::harness::{self, Reply, Server};

harness::tests![
    a_request_without_a_key_or_with_a_wrong_one_is_refused,
    a_key_is_taken_as_header_and_as_bearer_token,
    health_and_documentation_need_no_key,
    the_openapi_document_lists_every_route,
    the_documentation_is_a_page,
    keys_are_made_listed_and_withdrawn_at_once,
    an_unknown_field_is_refused_with_a_hint,
    a_body_that_is_no_json_is_refused,
    a_body_that_is_too_large_is_refused,
    an_upload_that_is_refused_at_once_is_told_why,
    a_path_that_is_no_utf8_is_refused,
    unknown_routes_and_methods_are_told_as_json,
    an_agent_is_made_used_and_deleted_by_http_alone,
    metrics_are_there_for_prometheus,
    info_tells_version_and_space,
    a_stopped_agent_that_is_made_by_http_stays_stopped,
    requests_at_the_same_time_make_one_agent_of_a_name,
    a_client_that_goes_away_half_way_leaves_nothing,
];

/// `{code, message, hint?}` with this status and code.
fn is_error(reply: &Reply, status: u16, code: &str) -> Result<Value> {
    let body = reply.json()?;
    ensure!(reply.status == status && body["code"] == code, "{}: {body}", reply.status);
    ensure!(body["message"].as_str().is_some_and(|m| !m.is_empty()), "{body}");
    ensure!(reply.content_type.starts_with("application/json"), "{}", reply.content_type);
    Ok(body)
}

fn a_request_without_a_key_or_with_a_wrong_one_is_refused() -> Result<()> {
    let server = Server::shared()?;
    let wrong = format!("e2b_{}", "0".repeat(40));
    for path in ["/v1/agents", "/v1/info", "/v1/templates", "/v1/keys", "/v1/agents/x/guest/health", "/metrics"] {
        let body = is_error(&server.get(path)?, 401, "unauthorized")?;
        ensure!(body["hint"].is_string(), "{path}: {body}");
        for headers in [("x-api-key", wrong.as_str()), ("x-api-key", ""), ("authorization", "Bearer nonsense"), ("authorization", "Basic eA==")] {
            is_error(&server.http_with("GET", path, &[headers], b"")?, 401, "unauthorized").context(path)?;
        }
    }
    is_error(&server.http_with("POST", "/v1/agents", &[], br#"{"name":"sneaky"}"#)?, 401, "unauthorized")?;
    is_error(&server.http_with("DELETE", "/v1/agents/x", &[], b"")?, 401, "unauthorized")?;
    Ok(())
}

fn a_key_is_taken_as_header_and_as_bearer_token() -> Result<()> {
    let server = Server::shared()?;
    let key = server.key()?;
    ensure!(server.http_with("GET", "/v1/agents", &[("x-api-key", &key)], b"")?.status == 200);
    ensure!(server.http_with("GET", "/v1/agents", &[("authorization", &format!("Bearer {key}"))], b"")?.status == 200);
    Ok(())
}

fn health_and_documentation_need_no_key() -> Result<()> {
    let server = Server::shared()?;
    for path in ["/healthz", "/openapi.json", "/docs"] {
        ensure!(server.get(path)?.status == 200, "{path}");
    }
    Ok(())
}

fn the_openapi_document_lists_every_route() -> Result<()> {
    let document = Server::shared()?.get("/openapi.json")?.json()?;
    ensure!(document["openapi"].as_str().is_some_and(|v| v.starts_with("3.")), "{}", document["openapi"]);
    let paths = document["paths"].as_object().context("paths")?;
    let mut listed = BTreeSet::new();
    for (path, methods) in paths {
        for (method, operation) in methods.as_object().context("methods")? {
            listed.insert(format!("{} {path}", method.to_uppercase()));
            ensure!(operation["responses"].as_object().is_some_and(|r| !r.is_empty()), "{method} {path} has no answers");
        }
    }
    for route in [
        "GET /healthz",
        "GET /metrics",
        "GET /v1/info",
        "POST /v1/agents",
        "GET /v1/agents",
        "GET /v1/agents/{agent}",
        "DELETE /v1/agents/{agent}",
        "POST /v1/agents/{agent}/start",
        "POST /v1/agents/{agent}/stop",
        "GET /v1/agents/{agent}/stats",
        "GET /v1/agents/{agent}/events",
        "GET /v1/templates",
        "GET /v1/templates/{template}",
        "DELETE /v1/templates/{template}",
        "POST /v1/templates/{name}/build",
        "POST /v1/templates/{name}/import",
        "GET /v1/templates/{template}/log",
        "POST /v1/keys",
        "GET /v1/keys",
        "DELETE /v1/keys/{id}",
    ] {
        let wanted = shape(route);
        ensure!(listed.iter().any(|r| shape(r) == wanted), "{route} is missing in {listed:?}");
    }
    let text = document.to_string();
    for (reference, _) in text.match_indices("#/components/schemas/").map(|(i, m)| (&text[i + m.len()..], ())) {
        let name: String = reference.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
        ensure!(document["components"]["schemas"][&name].is_object(), "the schema {name} is not there");
    }
    Ok(())
}

/// A route without the names of its parameters.
fn shape(route: &str) -> String {
    route.split('/').map(|part| if part.starts_with('{') { "{}" } else { part }).collect::<Vec<_>>().join("/")
}

fn the_documentation_is_a_page() -> Result<()> {
    let server = Server::shared()?;
    let page = [server.get("/docs")?, server.get("/docs/")?];
    let page = page.iter().find(|p| p.status == 200).context("no page")?;
    ensure!(page.content_type.starts_with("text/html"), "{}", page.content_type);
    ensure!(page.text().to_lowercase().contains("<html"), "{}", page.text());
    ensure!(!page.text().contains("https://"), "the page needs something from elsewhere: {}", page.text());
    Ok(())
}

fn keys_are_made_listed_and_withdrawn_at_once() -> Result<()> {
    let server = Server::shared()?;
    let made = server.json(&["key", "create", "second"])?;
    let secret = made["secret"].as_str().context("a new key is shown")?.to_owned();
    let id = made["id"].as_str().context("a key has an id")?;
    ensure!(secret.starts_with("e2b_") && secret.len() == 44, "{secret}");
    let with = |path: &str| server.http_with("GET", path, &[("x-api-key", &secret)], b"");
    ensure!(with("/v1/agents")?.status == 200);
    let listed = server.dorm(&["key", "ls", "--json"])?.text()?;
    ensure!(listed.contains("second") && !listed.contains(&secret), "{listed}");
    let keys: Value = serde_json::from_str(&listed)?;
    let entry = keys.as_array().into_iter().flatten().find(|k| k["id"] == id).context("the key is listed")?;
    ensure!(entry["prefix"].as_str().is_some_and(|p| secret.starts_with(p) && p.len() < 16), "{entry}");
    server.dorm(&["key", "rm", id])?.succeeded()?;
    is_error(&with("/v1/agents")?, 401, "unauthorized")?;
    server.dorm(&["key", "rm", id])?.refused(3, &[])
}

fn an_unknown_field_is_refused_with_a_hint() -> Result<()> {
    let server = Server::shared()?;
    let reply = server.http("POST", "/v1/agents", br#"{"name":"fields","colour":"blue"}"#)?;
    let body = is_error(&reply, 400, "invalid_argument")?;
    ensure!(body.to_string().contains("colour") && body["hint"].is_string(), "{body}");
    ensure!(!server.names()?.contains(&"fields".to_owned()));
    Ok(())
}

fn a_body_that_is_no_json_is_refused() -> Result<()> {
    let server = Server::shared()?;
    for body in [&b"{"[..], b"", b"[]", b"\xff\xfe", br#"{"name":7}"#, br#"{"name":"x","memory":-1}"#, br#"{"name":"x","memory":1e99}"#] {
        is_error(&server.http("POST", "/v1/agents", body)?, 400, "invalid_argument")
            .with_context(|| String::from_utf8_lossy(body).into_owned())?;
    }
    let deep = [vec![b'['; 100_000], vec![b']'; 100_000]].concat();
    is_error(&server.http("POST", "/v1/agents", &deep)?, 400, "invalid_argument")?;
    Ok(())
}

fn a_body_that_is_too_large_is_refused() -> Result<()> {
    let server = Server::shared()?;
    let body = json!({"name": "large", "env": {"A": "x".repeat(17 << 20)}}).to_string();
    is_error(&server.http("POST", "/v1/agents", body.as_bytes())?, 413, "too_large")?;
    ensure!(!server.names()?.contains(&"large".to_owned()));
    ensure!(server.get("/healthz")?.status == 200);
    Ok(())
}

/// A client that reads the answer only once it has sent everything.
fn an_upload_that_is_refused_at_once_is_told_why() -> Result<()> {
    use std::io::{Read, Write};
    let server = Server::shared()?;
    let key = server.key()?;
    let wrong = format!("e2b_{}", "0".repeat(40));
    let much = vec![b'x'; 20 << 20];
    for (path, key, status) in [
        ("/v1/agents/nobody-there/guest/files?path=/tmp/x", &key, "404"),
        ("/v1/templates/Bad%2FName/import", &key, "400"),
        ("/v1/agents", &key, "413"),
        ("/v1/agents", &wrong, "401"),
        ("/nothing-here", &key, "404"),
    ] {
        let mut stream = std::net::TcpStream::connect(server.url.trim_start_matches("http://"))?;
        write!(
            stream,
            "POST {path} HTTP/1.1\r\nhost: x\r\nx-api-key: {key}\r\ncontent-type: application/json\r\n\
             content-length: {}\r\nconnection: close\r\n\r\n",
            much.len()
        )?;
        stream.write_all(&much).with_context(|| format!("the connection for {path} was closed"))?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).with_context(|| format!("no answer for {path}"))?;
        ensure!(answer.starts_with(&format!("HTTP/1.1 {status} ")) && answer.contains("\"message\""), "{path}: {answer}");
    }
    Ok(())
}

fn a_path_that_is_no_utf8_is_refused() -> Result<()> {
    let server = Server::shared()?;
    for path in ["/v1/agents/%ff%fe", "/v1/templates/%ff", "/v1/agents/%00", "/v1/agents/..%2f..%2fetc"] {
        let reply = server.http("GET", path, b"")?;
        ensure!(reply.status == 400 || reply.status == 404, "{path}: {} {}", reply.status, reply.text());
        ensure!(reply.json()?["message"].is_string(), "{path}: {}", reply.text());
    }
    let agent = server.agent("odd-path")?;
    for path in ["?path=/tmp/%ff", "?path=/tmp/a%00b"] {
        let reply = server.http("GET", &format!("/v1/agents/{}/guest/files{path}", agent.name), b"")?;
        ensure!((400..500).contains(&reply.status), "{path}: {} {}", reply.status, reply.text());
    }
    Ok(())
}

fn unknown_routes_and_methods_are_told_as_json() -> Result<()> {
    let server = Server::shared()?;
    is_error(&server.http("GET", "/v1/nothing-here", b"")?, 404, "not_found")?;
    is_error(&server.http("GET", "/v1/agents/nobody-there", b"")?, 404, "not_found")?;
    is_error(&server.http("GET", "/v1/agents/nobody-there/guest/health", b"")?, 404, "not_found")?;
    let reply = server.http("PATCH", "/v1/agents", b"{}")?;
    ensure!(reply.status == 405 && reply.json()?["message"].is_string(), "{}: {}", reply.status, reply.text());
    let reply = server.get("/nothing-here")?;
    ensure!(matches!(reply.status, 401 | 404) && reply.json()?["code"].is_string(), "{}: {}", reply.status, reply.text());
    Ok(())
}

fn an_agent_is_made_used_and_deleted_by_http_alone() -> Result<()> {
    let server = Server::shared()?;
    let reply = server.http("POST", "/v1/agents", br#"{"name":"by-http","memory":268435456,"env":{"A":"b"}}"#)?;
    ensure!(reply.status == 201 || reply.status == 200, "{}: {}", reply.status, reply.text());
    let agent = server.adopt("by-http")?;
    ensure!(reply.json()?["state"] == "running" && reply.json()?["id"] == agent.id.as_str());
    is_error(&server.http("POST", "/v1/agents", br#"{"name":"by-http"}"#)?, 409, "already_exists")?;
    let path = "/v1/agents/by-http/guest/files?path=/home/user/note&username=user";
    let key = server.key()?;
    let headers = [("x-api-key", key.as_str()), ("content-type", "application/octet-stream")];
    let written = server.http_with("POST", path, &headers, b"by http")?;
    ensure!(written.status == 200, "{}: {}", written.status, written.text());
    ensure!(server.http("GET", path, b"")?.body == b"by http");
    ensure!(agent.sh_text("cat note")? == "by http");
    ensure!(server.http("POST", "/v1/agents/by-http/stop", b"{}")?.json()?["state"] == "stopped");
    ensure!(server.http("POST", "/v1/agents/by-http/start", b"")?.json()?["state"] == "running");
    let deleted = server.http("DELETE", "/v1/agents/by-http", b"")?;
    ensure!(deleted.status == 204 || deleted.status == 200, "{}", deleted.status);
    is_error(&server.http("GET", "/v1/agents/by-http", b"")?, 404, "not_found")?;
    Ok(())
}

fn metrics_are_there_for_prometheus() -> Result<()> {
    let reply = Server::shared()?.http("GET", "/metrics", b"")?;
    ensure!(reply.status == 200, "{}", reply.status);
    let text = reply.text();
    ensure!(text.contains("# TYPE dorm_") && text.contains("# HELP dorm_"), "{text}");
    for line in text.lines().filter(|l| !l.starts_with('#') && !l.is_empty()) {
        let value = line.rsplit(' ').next().and_then(|v| v.parse::<f64>().ok());
        ensure!(value.is_some(), "{line}");
    }
    Ok(())
}

fn info_tells_version_and_space() -> Result<()> {
    let info = Server::shared()?.http("GET", "/v1/info", b"")?.json()?;
    ensure!(info["version"].is_string() && info["guest_protocol"] == 3, "{info}");
    ensure!(info["pool_free"].as_u64() > Some(1 << 30) && info["pool_total"].as_u64() >= info["pool_free"].as_u64(), "{info}");
    Ok(())
}

fn a_stopped_agent_that_is_made_by_http_stays_stopped() -> Result<()> {
    let server = Server::shared()?;
    server.http("POST", "/v1/agents", br#"{"name":"sleeping","start":false}"#)?;
    let agent = server.adopt("sleeping")?;
    ensure!(agent.state()? == "stopped" && server.remains.of_box(&agent.id).is_empty());
    ensure!(agent.stats()?["pids"] == 0, "asking for stats starts nothing");
    ensure!(agent.state()? == "stopped");
    Ok(())
}

fn requests_at_the_same_time_make_one_agent_of_a_name() -> Result<()> {
    let server = Server::shared()?;
    let results: Vec<u16> = std::thread::scope(|scope| {
        let make = || server.http("POST", "/v1/agents", br#"{"name":"race"}"#).map(|reply| reply.status);
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(make)).collect();
        threads.into_iter().map(|t| t.join().expect("no panic")).collect::<Result<_>>()
    })?;
    let _agent = server.adopt("race")?;
    let made = results.iter().filter(|s| **s < 300).count();
    ensure!(made == 1 && results.iter().filter(|s| **s == 409).count() == 7, "{results:?}");
    Ok(())
}

fn a_client_that_goes_away_half_way_leaves_nothing() -> Result<()> {
    use std::io::Write;
    let server = Server::shared()?;
    let key = server.key()?;
    let address = server.url.trim_start_matches("http://");
    for path in ["/v1/agents", "/v1/templates/half/import", "/v1/templates/half/build"] {
        let mut stream = std::net::TcpStream::connect(address)?;
        write!(stream, "POST {path} HTTP/1.1\r\nhost: x\r\nx-api-key: {key}\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n{{\"name\":")?;
        drop(stream);
    }
    harness::eventually("nothing is left of the uploads", || {
        Ok(std::fs::read_dir(server.data.join("tmp"))?.next().is_none().then_some(()))
    })?;
    let templates = server.json(&["template", "ls"])?.to_string();
    ensure!(!templates.contains("\"half\""), "{templates}");
    Ok(())
}
