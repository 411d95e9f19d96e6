//! Takes the rest of a request's body after it was refused. A connection that is closed on a client that still
//! sends is reset, and the client never reads why.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use axum::middleware::Next;
use axum::response::Response;
use bytes::Bytes;
use http_body::{Body as _, Frame, SizeHint};
use http_body_util::BodyExt;

/// What a client may send in vain. Beyond it, the connection is closed all the same.
const MOST: usize = 64 << 20;
const LONGEST: Duration = Duration::from_secs(10);

pub(super) async fn drain(request: Request, next: Next) -> Response {
    next.run(request.map(|body| Body::new(Drained(body)))).await
}

/// A body that reads itself to its end when it is dropped before.
struct Drained(Body);

impl http_body::Body for Drained {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.0).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.0.size_hint()
    }
}

impl Drop for Drained {
    fn drop(&mut self) {
        let body = std::mem::take(&mut self.0);
        if body.is_end_stream() {
            return;
        }
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(tokio::time::timeout(LONGEST, discard(body)));
        }
    }
}

async fn discard(mut body: Body) {
    let mut taken = 0;
    while taken < MOST {
        match body.frame().await {
            Some(Ok(frame)) => taken += frame.data_ref().map_or(0, Bytes::len),
            _ => return,
        }
    }
}
