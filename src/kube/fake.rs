//! An API server for the tests: answers one request after the other as the test wrote them, then never again.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use http::{Request, Response, StatusCode};
use kube::client::Body;
use serde_json::Value;

/// One answer.
pub(super) struct Answer {
    status: StatusCode,
    body: String,
}

impl Answer {
    pub(super) fn json(body: &Value) -> Self {
        Self::text(body.to_string())
    }

    pub(super) fn text(body: String) -> Self {
        let status = StatusCode::OK;
        Self { status, body }
    }

    pub(super) fn away() -> Self {
        Self::status(StatusCode::SERVICE_UNAVAILABLE)
    }

    pub(super) fn status(status: StatusCode) -> Self {
        let body = serde_json::json!({
            "kind": "Status", "apiVersion": "v1", "status": "Failure",
            "code": status.as_u16(), "message": "no", "reason": "No"
        });
        let body = body.to_string();
        Self { status, body }
    }
}

/// The requests that came: method, path and query, then the body.
pub(super) type Calls = Arc<Mutex<Vec<String>>>;

/// A client of a server with these answers.
pub(super) fn client(answers: Vec<Answer>) -> (kube::Client, Calls) {
    let answers = Arc::new(Mutex::new(VecDeque::from(answers)));
    let calls = Calls::default();
    let seen = Arc::clone(&calls);
    let service = tower::service_fn(move |request: Request<Body>| {
        let answers = Arc::clone(&answers);
        let seen = Arc::clone(&seen);
        async move {
            let (head, body) = request.into_parts();
            let body = body.collect_bytes().await?;
            let body = String::from_utf8_lossy(&body);
            let call = format!("{} {} {body}", head.method, head.uri);
            seen.lock().unwrap().push(call);
            let next = answers.lock().unwrap().pop_front();
            let Some(answer) = next else {
                return std::future::pending().await;
            };
            let mut response = Response::new(Body::from(answer.body.into_bytes()));
            *response.status_mut() = answer.status;
            Ok::<_, kube::Error>(response)
        }
    });
    (kube::Client::new(service, "default"), calls)
}
