//! An API server that takes events and knows of nothing. A real one is on another machine: here it would take the cores that
//! the plugin is measured on.

use std::convert::Infallible;
use std::fs;
use std::future::pending;
use std::path::{Path, PathBuf};

use anyhow::Result;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use serde_json::json;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

pub(crate) struct ApiServer {
    pub(crate) kubeconfig: PathBuf,
    task: JoinHandle<()>,
}

impl ApiServer {
    /// Its kubeconfig lies in `dir`.
    pub(crate) async fn start(dir: &Path) -> Result<Self> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let server = format!("http://{}", listener.local_addr()?);
        let kubeconfig = dir.join("kubeconfig");
        let text = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "stub",
            "clusters": [{"name": "stub", "cluster": {"server": server}}],
            "contexts": [{"name": "stub", "context": {"cluster": "stub", "user": "plugin"}}],
            "users": [{"name": "plugin", "user": {}}],
        });
        fs::write(&kubeconfig, text.to_string())?;
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let service = service_fn(answer);
                tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
            }
        });
        Ok(Self { kubeconfig, task })
    }
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn answer(request: Request<Incoming>) -> Result<Response<String>, Infallible> {
    let uri = request.uri();
    let text = if request.method() != Method::GET {
        json!({"apiVersion": "v1", "kind": "Event", "metadata": {"name": "taken"}})
    } else if uri.query().unwrap_or_default().contains("watch=true") {
        // Nothing ever happens.
        pending().await
    } else {
        let kind = if uri.path().ends_with("/nodes") {
            "NodeList"
        } else {
            "PodList"
        };
        json!({"apiVersion": "v1", "kind": kind, "metadata": {"resourceVersion": "1"}, "items": []})
    };
    Ok(Response::new(text.to_string()))
}
