//! What is answered in place of a box: JSON in the form that E2B's clients know, or a page for people.

use std::sync::Arc;

use axum::response::{Html, IntoResponse, Response};
use dorm_engine::EngineError;
use http::header::{ACCEPT, CACHE_CONTROL, RETRY_AFTER};
use http::{HeaderMap, HeaderValue, StatusCode};
use serde_json::json;

use super::forward::Failed;
use super::route::GUEST_PORT;
use crate::api::AppState;
use crate::e2b::NotAdmitted;
use crate::lifecycle::{Agent, Trouble};
use crate::tokens::BadSignature;

#[derive(Debug)]
pub(super) enum Why {
    /// Or it is paused, and nothing but its owner may wake it.
    NotFound,
    PortClosed,
    NeedsAccessToken,
    NeedsTrafficToken,
    WrongTrafficToken,
    BadSignature(BadSignature),
    Internal,
    ShuttingDown,
    /// It was put to sleep on purpose, or its connections were cut for a snapshot.
    Asleep,
    Failed(String),
}

impl Why {
    fn status(&self) -> StatusCode {
        match self {
            Self::NotFound | Self::PortClosed | Self::Failed(_) => StatusCode::BAD_GATEWAY,
            Self::NeedsAccessToken | Self::BadSignature(_) => StatusCode::UNAUTHORIZED,
            Self::NeedsTrafficToken | Self::WrongTrafficToken | Self::Internal => StatusCode::FORBIDDEN,
            Self::ShuttingDown | Self::Asleep => StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    /// E2B's clients look for some of these words.
    fn message(&self) -> String {
        match self {
            Self::NotFound => "The sandbox was not found".to_owned(),
            Self::PortClosed => "The sandbox is running but port is not open".to_owned(),
            Self::NeedsAccessToken => {
                "unauthorized access, please provide a valid access token or method signing if supported"
                    .to_owned()
            }
            Self::NeedsTrafficToken => {
                "Sandbox is secured with traffic access token. Token header 'e2b-traffic-access-token' is missing"
                    .to_owned()
            }
            Self::WrongTrafficToken => {
                "Sandbox is secured with traffic access token. Provided token is not valid".to_owned()
            }
            Self::BadSignature(why) => why.to_string(),
            Self::Internal => "only the server itself may do this".to_owned(),
            Self::ShuttingDown => "the server is shutting down".to_owned(),
            Self::Asleep => Failed::Asleep.to_string(),
            Self::Failed(reason) => reason.clone(),
        }
    }
}

impl From<Trouble> for Why {
    fn from(trouble: Trouble) -> Self {
        match trouble {
            Trouble::Refused(_) | Trouble::NotFound(_) => Self::NotFound,
            Trouble::ShuttingDown => Self::ShuttingDown,
            trouble => Self::Failed(trouble.in_full()),
        }
    }
}

impl From<NotAdmitted> for Why {
    fn from(not: NotAdmitted) -> Self {
        match not {
            NotAdmitted::Paused => Self::NotFound,
            NotAdmitted::Trouble(trouble) => trouble.into(),
        }
    }
}

impl From<Failed> for Why {
    fn from(failed: Failed) -> Self {
        match failed {
            Failed::Trouble(trouble) => trouble.into(),
            Failed::Unreachable(EngineError::PortClosed { .. }) => Self::PortClosed,
            Failed::Unreachable(error) => Self::Failed(dorm_engine::chain(&error)),
            Failed::Asleep => Self::Asleep,
            failed @ (Failed::CutOff | Failed::Broken(_)) => Self::Failed(failed.to_string()),
        }
    }
}

/// An answer that no box gave.
#[derive(Debug)]
pub(super) struct Refusal {
    id: String,
    port: u16,
    why: Why,
    page: Option<Page>,
}

#[derive(Debug, Default)]
struct Page {
    name: String,
    /// Open ports, with where they are reached.
    links: Vec<(u16, String)>,
}

impl Refusal {
    pub(super) fn new(id: &str, port: u16, why: Why) -> Self {
        Self {
            id: id.to_owned(),
            port,
            why,
            page: None,
        }
    }

    pub(super) fn page_if(mut self, wanted: bool) -> Self {
        self.page = (wanted && self.port != GUEST_PORT).then(Page::default);
        self
    }
}

pub(super) fn wants_page(headers: &HeaderMap) -> bool {
    let accepted = headers.get(ACCEPT).and_then(|accepted| accepted.to_str().ok());
    accepted.is_some_and(|accepted| accepted.contains("text/html"))
}

/// Adds to a page what of the agent can be reached instead. Only for those who were let in.
pub(super) async fn explain(
    state: &AppState,
    agent: &Arc<Agent>,
    mut refusal: Refusal,
    host: Option<String>,
) -> Refusal {
    let (Some(page), Why::PortClosed) = (&mut refusal.page, &refusal.why) else {
        return refusal;
    };
    let id = &agent.profile.id;
    page.name = agent.profile.name.clone();
    let mut open: Vec<u16> = match state.engine.listening(id).await {
        Ok(open) => open.into_iter().map(|one| one.port).collect(),
        Err(_) => Vec::new(),
    };
    open.dedup();
    // By the name that the reader came by, which is one that works for him.
    let came_by = host.and_then(|host| Some(host.split_once(&format!("-{id}."))?.1.to_owned()));
    let link = |port: u16| match &came_by {
        Some(domain) => format!("//{port}-{id}.{domain}/"),
        None => state.names.url(id, port),
    };
    page.links = open.into_iter().map(|port| (port, link(port))).collect();
    refusal
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let (status, port) = (self.why.status(), self.port);
        let mut headers = HeaderMap::new();
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        if matches!(self.why, Why::Asleep) {
            headers.insert(RETRY_AFTER, HeaderValue::from_static("1"));
        }
        if let Some(page) = &self.page {
            return (status, headers, Html(self.html(page))).into_response();
        }
        let (code, message) = (status.as_u16(), self.why.message());
        let body = match &self.why {
            Why::NotFound => json!({"sandboxId": self.id, "message": message, "code": code}),
            // As envd puts it.
            Why::NeedsAccessToken | Why::BadSignature(_) | Why::Internal => {
                json!({"code": code, "message": message})
            }
            _ => json!({"sandboxId": self.id, "message": message, "port": port, "code": code}),
        };
        (status, headers, axum::Json(body)).into_response()
    }
}

impl Refusal {
    fn html(&self, page: &Page) -> String {
        let port = self.port;
        let (title, text) = match &self.why {
            Why::NotFound => (
                "No such agent".to_owned(),
                "<p>The sandbox was not found. It was deleted, or the address is mistyped.</p>".to_owned(),
            ),
            Why::PortClosed => (
                format!("Nothing listens on port {port}"),
                format!(
                    "<p>{} is running but port is not open. Once a server listens there, reload this page.</p>{}",
                    escape(&page.name),
                    links(&page.links)
                ),
            ),
            Why::NeedsTrafficToken | Why::WrongTrafficToken => (
                "This port needs a token".to_owned(),
                format!(
                    "<p>Open it by a link that carries one, which <code>dorm url NAME {port} --token</code> prints. \
                     The ports of an agent made with <code>--public</code> need none.</p>"
                ),
            ),
            why => (
                "The agent did not answer".to_owned(),
                format!("<p>{}</p>", escape(&why.message())),
            ),
        };
        PAGE.replace("{title}", &escape(&title)).replace("{text}", &text)
    }
}

fn links(links: &[(u16, String)]) -> String {
    if links.is_empty() {
        return "<p>No port of it is open.</p>".to_owned();
    }
    let items: String = links
        .iter()
        .map(|(port, url)| format!("<li><a href=\"{}\">port {port}</a></li>", escape(url)))
        .collect();
    format!("<p>These ports are open:</p><ul>{items}</ul>")
}

fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            c => escaped.push(c),
        }
    }
    escaped
}

const PAGE: &str = "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\"><title>{title}</title>\
    <meta name=\"viewport\" content=\"width=device-width\"><style>body{font:16px/1.5 system-ui,sans-serif;\
    max-width:36em;margin:15vh auto;padding:0 1em;color:#222;background:#fff}h1{font-size:1.4em}code{background:#eee;\
    padding:.1em .3em;border-radius:3px}@media(prefers-color-scheme:dark){body{color:#ddd;background:#181818}\
    code{background:#333}a{color:#8cf}}</style></head><body><h1>{title}</h1>{text}</body></html>\n";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_that_a_client_chose_becomes_markup() {
        let links = links(&[(80, "//x\"><script>".to_owned())]);
        assert!(!links.contains("<script>"), "{links}");
        assert_eq!(escape("<a href='x'>&\""), "&lt;a href=&#39;x&#39;&gt;&amp;&quot;");
    }
}
