//! The HTTP API without the CLI in between.

use anyhow::{Context, Result};
use serde_json::Value;
use ureq::http::Request;

use super::cli;
use super::server::Server;
use super::wait::slowness;

/// An answer, whatever its status.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) content_type: String,
    pub(crate) body: Vec<u8>,
}

impl Reply {
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub(crate) fn json(&self) -> Result<Value> {
        serde_json::from_slice(&self.body)
            .with_context(|| format!("no JSON, status {}: {}", self.status, self.text()))
    }
}

impl Server {
    pub(crate) fn key(&self) -> Result<String> {
        Ok(std::fs::read_to_string(self.data.join("api-key"))?
            .trim()
            .to_owned())
    }

    /// A request with the server's own key.
    pub(crate) fn http(&self, method: &str, path: &str, body: &[u8]) -> Result<Reply> {
        let key = self.key()?;
        self.http_with(
            method,
            path,
            &[("x-api-key", &key), ("content-type", "application/json")],
            body,
        )
    }

    /// A request with these headers only.
    pub(crate) fn http_with(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> Result<Reply> {
        let config = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .allow_non_standard_methods(true)
            .timeout_global(Some(cli::LONGEST * slowness()))
            .max_idle_connections(0)
            .build();
        let mut request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.url));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let what = || format!("{method} {path}");
        let mut reply = config.new_agent().run(request.body(body)?).with_context(what)?;
        let content_type = reply
            .headers()
            .get("content-type")
            .and_then(|v| v.to_str().ok())
            .unwrap_or_default();
        Ok(Reply {
            status: reply.status().as_u16(),
            content_type: content_type.to_owned(),
            body: reply
                .body_mut()
                .with_config()
                .limit(64 << 20)
                .read_to_vec()
                .with_context(what)?,
        })
    }

    /// A request without a key.
    pub(crate) fn get(&self, path: &str) -> Result<Reply> {
        self.http_with("GET", path, &[], b"")
    }
}
