//! A guest for tests of what uses it: it remembers what was asked, and answers as it was told.

use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::{BufMut as _, Bytes, BytesMut};
use dorm_engine::fake::FakeEngine;
use http::{Request, Response};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};

/// What a run prints, and its exit code. `None` leaves the run unfinished.
type Answer = Box<dyn Fn(&str) -> Option<(String, i32)> + Send + Sync>;

#[derive(Default)]
pub(crate) struct Asked {
    /// Commands with their arguments, joined by spaces.
    pub(crate) runs: Vec<String>,
    pub(crate) requests: Vec<Value>,
    pub(crate) files: Vec<(String, Vec<u8>)>,
    /// Who guests were told to be.
    pub(crate) introduced: Vec<Value>,
    /// Runs that are listed, as a guest does.
    pub(crate) in_progress: Vec<Value>,
}

#[derive(Clone)]
pub(crate) struct FakeGuests {
    asked: Arc<Mutex<Asked>>,
    answer: Arc<Answer>,
}

impl FakeGuests {
    pub(crate) fn answering(
        engine: &FakeEngine,
        answer: impl Fn(&str) -> Option<(String, i32)> + Send + Sync + 'static,
    ) -> Self {
        let guests = Self {
            asked: Arc::default(),
            answer: Arc::new(Box::new(answer)),
        };
        let serving = guests.clone();
        engine.serve_guests(move |_id, stream| {
            let serving = serving.clone();
            tokio::spawn(async move {
                let service = service_fn(move |request| {
                    let serving = serving.clone();
                    async move { Ok::<_, Infallible>(serving.handle(request).await) }
                });
                let _ = hyper::server::conn::http1::Builder::new()
                    .serve_connection(TokioIo::new(stream), service)
                    .await;
            });
        });
        guests
    }

    pub(crate) fn asked<T>(&self, look: impl FnOnce(&Asked) -> T) -> T {
        look(&self.asked.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Runs as a guest lists them.
    pub(crate) fn now_running(&self, runs: &[Value]) {
        self.asked
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .in_progress = runs.to_vec();
    }

    async fn handle(&self, request: Request<Incoming>) -> Response<Full<Bytes>> {
        let (parts, body) = request.into_parts();
        let body = body.collect().await.expect("the request's body").to_bytes();
        if parts.uri.path() == "/files" {
            let query = parts.uri.query().unwrap_or_default().to_owned();
            self.asked
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .files
                .push((query, body.to_vec()));
            return Response::new(Full::new(Bytes::from_static(b"[]")));
        }
        if parts.uri.path() == "/init" {
            let told = serde_json::from_slice(&body).expect("a JSON body");
            self.asked
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .introduced
                .push(told);
            return Response::new(Full::default());
        }
        if parts.uri.path() == "/process.Process/List" {
            let runs = self.asked(|asked| asked.in_progress.clone());
            return Response::new(Full::from(json!({ "processes": runs }).to_string()));
        }
        let request: Value = serde_json::from_slice(&body[5..]).expect("a JSON message");
        let args = request["process"]["args"].as_array().cloned().unwrap_or_default();
        let run = args
            .iter()
            .filter_map(Value::as_str)
            .collect::<Vec<_>>()
            .join(" ");
        {
            let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
            asked.runs.push(run.clone());
            asked.requests.push(request);
        }
        let Some((output, code)) = (self.answer)(&run) else {
            std::future::pending().await
        };
        let mut stream = BytesMut::new();
        message(&mut stream, 0, &json!({"event": {"start": {"pid": 7}}}));
        message(
            &mut stream,
            0,
            &json!({"event": {"data": {"stdout": BASE64.encode(output)}}}),
        );
        message(
            &mut stream,
            0,
            &json!({"event": {"end": {"exitCode": code, "exited": true}}}),
        );
        message(&mut stream, 2, &json!({}));
        Response::new(Full::new(stream.freeze()))
    }
}

fn message(stream: &mut BytesMut, flags: u8, json: &Value) {
    let text = json.to_string();
    stream.put_u8(flags);
    stream.put_u32(u32::try_from(text.len()).expect("a short message"));
    stream.put_slice(text.as_bytes());
}
