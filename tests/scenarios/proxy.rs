//! Between the plugin and the runtime's gRPC socket: passes every call on, streams too, but for those
//! that are to fail.

use std::collections::HashMap;
use std::convert::Infallible;
use std::future::pending;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::Result;
use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tempfile::TempDir;
use tokio::net::UnixListener;
use tokio::task::{JoinHandle, JoinSet};
use tonic::Status;
use tonic::body::Body;
use tonic::transport::Channel;
use tower::ServiceExt;

/// What becomes of the calls of a method.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The next one fails.
    Once,
    /// All fail.
    Always,
    /// None is ever answered.
    Hang,
}

pub(crate) struct Proxy {
    pub(crate) endpoint: String,
    faults: Arc<Faults>,
    task: JoinHandle<()>,
    _dir: TempDir,
}

impl Proxy {
    /// Listens until dropped, for calls that go on to `runtime`.
    pub(crate) fn start(runtime: Channel) -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let socket = dir.path().join("cri.sock");
        let listener = UnixListener::bind(&socket)?;
        let faults = Arc::new(Faults::default());
        Ok(Self {
            endpoint: format!("unix://{}", socket.display()),
            task: tokio::spawn(serve(listener, runtime, Arc::clone(&faults))),
            faults,
            _dir: dir,
        })
    }

    /// From now on, calls of `method` (`StopContainer`) meet that fault.
    pub(crate) fn breaks(&self, method: &'static str, fault: Fault) {
        self.faults.lock().insert(method, (fault, 0));
    }

    /// How many calls have met the method's fault.
    pub(crate) fn met(&self, method: &str) -> u32 {
        let faults = self.faults.lock();
        faults.get(method).map_or(0, |(_, met)| *met)
    }

    /// The fault is over. Calls that hang go on hanging. Returns how many calls met it.
    pub(crate) fn mends(&self, method: &str) -> u32 {
        let fault = self.faults.lock().remove(method);
        fault.map_or(0, |(_, met)| met)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// By method, with how many calls met it.
#[derive(Default)]
struct Faults(Mutex<HashMap<&'static str, (Fault, u32)>>);

impl Faults {
    fn lock(&self) -> MutexGuard<'_, HashMap<&'static str, (Fault, u32)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What this call meets.
    fn meet(&self, method: &str) -> Option<Fault> {
        let mut faults = self.lock();
        let (fault, met) = faults.get_mut(method)?;
        *met += 1;
        (*fault != Fault::Once || *met == 1).then_some(*fault)
    }
}

async fn serve(listener: UnixListener, runtime: Channel, faults: Arc<Faults>) {
    // Ends with this task.
    let mut connections = JoinSet::new();
    while let Ok((plugin, _)) = listener.accept().await {
        let (runtime, faults) = (runtime.clone(), Arc::clone(&faults));
        let service =
            service_fn(move |request| answer(request, runtime.clone(), Arc::clone(&faults)));
        let server = http2::Builder::new(TokioExecutor::new());
        connections.spawn(server.serve_connection(TokioIo::new(plugin), service));
    }
}

async fn answer(
    request: Request<Incoming>,
    runtime: Channel,
    faults: Arc<Faults>,
) -> Result<Response<Body>, Infallible> {
    // `/runtime.v1.RuntimeService/StopContainer`
    let method = request.uri().path().rsplit('/').next().unwrap_or_default();
    match faults.meet(method) {
        Some(Fault::Hang) => pending().await,
        Some(Fault::Once | Fault::Always) => {
            // The code that runtimes give to most failures.
            Ok(Status::unknown("made to fail").into_http())
        }
        None => match runtime.oneshot(request.map(Body::new)).await {
            Ok(response) => Ok(response),
            Err(error) => Ok(Status::unavailable(error.to_string()).into_http()),
        },
    }
}
