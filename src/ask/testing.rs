//! An API server for tests.

use http::{Method, Request, Response};
use kube::Client;
use kube::client::Body;
use serde_json::{Value, json};
use tower_test::mock::{Handle, SendResponse, pair};

pub(super) struct Server(Handle<Request<Body>, Response<Body>>);

/// What it was asked.
pub(super) struct Call {
    pub(super) method: Method,
    pub(super) path: String,
    pub(super) query: String,
    pub(super) body: Value,
    answer: SendResponse<Response<Body>>,
}

impl Server {
    pub(super) fn new() -> (Client, Self) {
        let (service, server) = pair();
        (Client::new(service, "default"), Self(server))
    }

    pub(super) async fn next(&mut self) -> Call {
        let (request, answer) = self.0.next_request().await.unwrap();
        let (request, body) = request.into_parts();
        let body = body.collect_bytes().await.unwrap();
        Call {
            method: request.method,
            path: request.uri.path().to_owned(),
            query: request.uri.query().unwrap_or_default().to_owned(),
            body: serde_json::from_slice(&body).unwrap_or_default(),
            answer,
        }
    }
}

impl Call {
    pub(super) fn ok(self, answer: &Value) {
        self.send(200, answer.to_string());
    }

    pub(super) fn list(self, pods: &[Value]) {
        let list = json!({"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": pods});
        self.ok(&list);
    }

    /// Events of a watch, one a line.
    pub(super) fn events(self, events: &[Value]) {
        let lines: Vec<_> = events.iter().map(|event| format!("{event}\n")).collect();
        self.send(200, lines.concat());
    }

    pub(super) fn fails(self, code: u16, message: &str) {
        let reason = if code == 404 { "NotFound" } else { "" };
        let status = json!({"kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": message});
        self.send(code, status.to_string());
    }

    fn send(self, code: u16, body: String) {
        let body = Body::from(body.into_bytes());
        let response = Response::builder().status(code).body(body).unwrap();
        self.answer.send_response(response);
    }
}

/// A pod in namespace `n` that can be asked.
pub(super) fn pod(name: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": "n", "uid": format!("uid-{name}"), "resourceVersion": "1"},
        "spec": {"nodeName": "node-1", "containers": []},
        "status": {"phase": "Running"},
    })
}
