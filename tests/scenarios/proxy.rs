//! Between the plugin, or the kubelet, and the runtime's gRPC socket: passes every call on, streams too, but for those
//! that are to fail.

use std::collections::HashMap;
use std::convert::Infallible;
use std::future::pending;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::Result;
use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tempfile::TempDir;
use tokio::net::UnixListener;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::sleep;
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
    /// All are done, and nobody hears of it.
    Lost,
    /// The runtime hears of them that much later.
    Late(Duration),
}

pub(crate) struct Proxy {
    pub(crate) endpoint: String,
    faults: Arc<Faults>,
    task: JoinHandle<()>,
    /// Where its socket is, unless somebody else says.
    _dir: Option<TempDir>,
}

impl Proxy {
    /// Listens until dropped, for calls that go on to `runtime`.
    pub(crate) fn start(runtime: Channel) -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let socket = dir.path().join("cri.sock");
        Self::at(&socket, runtime, Some(dir))
    }

    /// The same, at this place.
    pub(crate) fn listen(runtime: Channel, socket: &Path) -> Result<Self> {
        Self::at(socket, runtime, None)
    }

    fn at(socket: &Path, runtime: Channel, dir: Option<TempDir>) -> Result<Self> {
        let listener = UnixListener::bind(socket)?;
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

    /// How many calls of the method were under way at the same time, at most.
    pub(crate) fn most_at_once(&self, method: &str) -> usize {
        let load = self.faults.load();
        load.get(method).map_or(0, |(_, most)| *most)
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

#[derive(Default)]
struct Faults {
    /// By method, with how many calls met it.
    faults: Mutex<HashMap<&'static str, (Fault, u32)>>,
    /// By method, how many calls are under way, and how many were at most.
    load: Mutex<HashMap<String, (usize, usize)>>,
}

impl Faults {
    fn lock(&self) -> MutexGuard<'_, HashMap<&'static str, (Fault, u32)>> {
        self.faults.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn load(&self) -> MutexGuard<'_, HashMap<String, (usize, usize)>> {
        self.load.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin(&self, method: &str) -> UnderWay<'_> {
        let mut load = self.load();
        let (now, most) = load.entry(method.to_owned()).or_default();
        *now += 1;
        *most = (*most).max(*now);
        UnderWay {
            faults: self,
            method: method.to_owned(),
        }
    }

    /// What this call meets.
    fn meet(&self, method: &str) -> Option<Fault> {
        let mut faults = self.lock();
        let (fault, met) = faults.get_mut(method)?;
        *met += 1;
        (*fault != Fault::Once || *met == 1).then_some(*fault)
    }
}

/// A call, until this is dropped.
struct UnderWay<'a> {
    faults: &'a Faults,
    method: String,
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        if let Some((now, _)) = self.faults.load().get_mut(&self.method) {
            *now -= 1;
        }
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
    let _under_way = faults.begin(method);
    let fault = faults.meet(method);
    if let Some(Fault::Late(time)) = fault {
        sleep(time).await;
    }
    match fault {
        Some(Fault::Hang) => pending().await,
        Some(Fault::Once | Fault::Always) => {
            // The code that runtimes give to most failures.
            Ok(Status::unknown("made to fail").into_http())
        }
        Some(Fault::Lost) => {
            // Done when it is answered.
            let _ = runtime.oneshot(request.map(Body::new)).await;
            Ok(Status::unavailable("made to be lost").into_http())
        }
        Some(Fault::Late(_)) | None => match runtime.oneshot(request.map(Body::new)).await {
            Ok(response) => Ok(response),
            Err(error) => Ok(Status::unavailable(error.to_string()).into_http()),
        },
    }
}
