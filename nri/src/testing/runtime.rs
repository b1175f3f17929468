//! A runtime for tests: the other end of a real socket, as strict as the one written in Go.

use std::collections::HashMap;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use futures::StreamExt;
use futures::stream::{once, pending as never};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, ReadHalf, WriteHalf, duplex, split};
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use ttrpc::r#async::transport::{Listener, Socket};
use ttrpc::r#async::{Client, Server, TtrpcContext};
use ttrpc::context::{Context, with_duration};
use ttrpc::{Code, get_status};

use crate::mux::{PLUGIN, RUNTIME};
use crate::wire::nri::{
    ConfigureRequest, ConfigureResponse, Container, Empty, PodSandbox, RegisterPluginRequest,
    SynchronizeRequest, SynchronizeResponse,
};
use crate::wire::nri_ttrpc::{self, PluginClient, create_runtime};

/// Far beyond what anything here takes: only decides when a broken test gives up.
const PATIENCE: Duration = Duration::from_secs(20);

/// What `future` comes to, which must be soon.
pub(crate) async fn soon<T>(future: impl Future<Output = T>) -> T {
    timeout(PATIENCE, future).await.expect("it took too long")
}

/// The context of an event, with the time that runtimes give it.
pub(crate) fn in_two_seconds() -> Context {
    with_duration(Duration::from_secs(2))
}

/// A runtime that listens on a socket of its own.
pub(crate) struct Runtime {
    directory: TempDir,
    listener: Option<UnixListener>,
}

impl Runtime {
    pub(crate) fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mut runtime = Self {
            directory,
            listener: None,
        };
        runtime.come_back();
        runtime
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.directory.path().join("nri.sock")
    }

    /// Stops to listen. The socket stays behind, as when a runtime is killed.
    pub(crate) fn go_away(&mut self) {
        self.listener = None;
    }

    /// Listens on a new socket, as a runtime does when it starts.
    pub(crate) fn come_back(&mut self) {
        let _ = std::fs::remove_file(self.socket());
        self.listener = Some(UnixListener::bind(self.socket()).unwrap());
    }

    pub(crate) async fn accept(&self) -> Connection {
        self.accept_and(Registration::Accept).await
    }

    pub(crate) async fn accept_and(&self, registration: Registration) -> Connection {
        Connection::over(self.accept_trunk().await, registration).await
    }

    /// Accepts a plugin, and leaves it alone.
    pub(crate) async fn accept_trunk(&self) -> UnixStream {
        let listener = self.listener.as_ref().expect("the runtime is away");
        soon(listener.accept()).await.unwrap().0
    }
}

/// What to do with a plugin that registers.
#[derive(Debug)]
pub(crate) enum Registration {
    Accept,
    Refuse(&'static str),
    /// Configures the plugin before answering.
    ConfigureFirst,
    /// Answers when told to.
    Wait(oneshot::Receiver<()>),
}

/// A plugin's connection, as the runtime has it.
pub(crate) struct Connection {
    pub(crate) plugin: PluginClient,
    frames: Arc<Mutex<Vec<Frame>>>,
    registrations: UnboundedReceiver<RegisterPluginRequest>,
    raw: UnboundedSender<Vec<u8>>,
    trunk: JoinHandle<&'static str>,
    _server: Server,
}

/// A frame that came from the plugin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Frame {
    pub(crate) id: u32,
    pub(crate) length: usize,
}

impl Connection {
    pub(crate) async fn over(trunk: UnixStream, registration: Registration) -> Self {
        let (to_plugin, plugin_pipe) = duplex(1 << 16);
        let (from_plugin, runtime_pipe) = duplex(1 << 16);
        let frames = Arc::default();
        let (raw, raw_frames) = unbounded_channel();
        let trunk = tokio::spawn(multiplex(
            trunk,
            plugin_pipe,
            runtime_pipe,
            raw_frames,
            Arc::clone(&frames),
        ));

        let plugin = PluginClient::new(Client::new(Socket::new(to_plugin)));
        let (registered, registrations) = unbounded_channel();
        let service = Service {
            plugin: plugin.clone(),
            registered,
            registration: Mutex::new(Some(registration)),
        };
        let listener = Listener::new(once(async { io::Result::Ok(from_plugin) }).chain(never()));
        let mut server = Server::new()
            .register_service(create_runtime(Arc::new(service)))
            .add_listener(listener);
        server.start().await.unwrap();
        Self {
            plugin,
            frames,
            registrations,
            raw,
            trunk,
            _server: server,
        }
    }

    pub(crate) async fn registration(&mut self) -> RegisterPluginRequest {
        soon(self.registrations.recv())
            .await
            .expect("the plugin hung up")
    }

    /// Takes the plugin in, as containerd 2.3 does.
    pub(crate) async fn welcome(&mut self) {
        self.registration().await;
        self.configure(containerd("v2.3.7")).await.unwrap();
        self.synchronize(&[], &[], false).await;
    }

    pub(crate) async fn configure(
        &self,
        request: ConfigureRequest,
    ) -> ttrpc::Result<ConfigureResponse> {
        soon(self.plugin.configure(in_two_seconds(), &request)).await
    }

    pub(crate) async fn synchronize(
        &self,
        pods: &[PodSandbox],
        containers: &[Container],
        more: bool,
    ) -> SynchronizeResponse {
        let mut request = SynchronizeRequest::new();
        request.pods = pods.to_vec();
        request.containers = containers.to_vec();
        request.more = more;
        soon(self.plugin.synchronize(in_two_seconds(), &request))
            .await
            .unwrap()
    }

    /// Sends bytes as they are.
    pub(crate) fn send_raw(&self, bytes: Vec<u8>) {
        self.raw.send(bytes).unwrap();
    }

    /// The frames that came from the plugin since the last call, on the connection that it serves.
    pub(crate) fn take_frames(&self) -> Vec<usize> {
        let frames = std::mem::take(&mut *self.frames.lock().unwrap());
        frames
            .iter()
            .filter(|frame| frame.id == PLUGIN)
            .map(|frame| frame.length)
            .collect()
    }

    /// Waits until the connection ends, and tells why.
    pub(crate) async fn ended(self) -> &'static str {
        soon(self.trunk).await.unwrap()
    }

    pub(crate) async fn close(self) {
        self.trunk.abort();
        let _ = self.trunk.await;
    }
}

pub(crate) fn containerd(version: &str) -> ConfigureRequest {
    let mut request = ConfigureRequest::new();
    request.runtime_name = "containerd".into();
    request.runtime_version = version.into();
    request.request_timeout = 2000;
    request
}

struct Service {
    plugin: PluginClient,
    registered: UnboundedSender<RegisterPluginRequest>,
    registration: Mutex<Option<Registration>>,
}

#[async_trait]
impl nri_ttrpc::Runtime for Service {
    async fn register_plugin(
        &self,
        _: &TtrpcContext,
        request: RegisterPluginRequest,
    ) -> ttrpc::Result<Empty> {
        let registration = self.registration.lock().unwrap().take();
        match registration.expect("the plugin registered twice over one connection") {
            Registration::Accept => {}
            Registration::Refuse(reason) => {
                return Err(ttrpc::Error::RpcStatus(get_status(Code::UNKNOWN, reason)));
            }
            Registration::ConfigureFirst => {
                let request = containerd("v2.3.7");
                self.plugin
                    .configure(in_two_seconds(), &request)
                    .await
                    .unwrap();
            }
            Registration::Wait(go) => go.await.unwrap(),
        }
        let _ = self.registered.send(request);
        Ok(Empty::new())
    }
}

/// Until the connection ends, which is told in words.
async fn multiplex(
    trunk: UnixStream,
    plugin: DuplexStream,
    runtime: DuplexStream,
    raw: UnboundedReceiver<Vec<u8>>,
    frames: Arc<Mutex<Vec<Frame>>>,
) -> &'static str {
    let (trunk_reader, trunk_writer) = trunk.into_split();
    let (plugin_reader, plugin_writer) = split(plugin);
    let (runtime_reader, runtime_writer) = split(runtime);
    let inputs = HashMap::from([(PLUGIN, plugin_writer), (RUNTIME, runtime_writer)]);
    tokio::select! {
        why = receive(trunk_reader, inputs, frames) => why,
        why = send(trunk_writer, plugin_reader, runtime_reader, raw) => why,
    }
}

async fn receive(
    mut trunk: OwnedReadHalf,
    mut inputs: HashMap<u32, WriteHalf<DuplexStream>>,
    frames: Arc<Mutex<Vec<Frame>>>,
) -> &'static str {
    // What is still to come of the message that a connection is in the middle of.
    let mut missing: HashMap<u32, usize> = HashMap::new();
    loop {
        let Ok(id) = trunk.read_u32().await else {
            return "the plugin closed the connection";
        };
        let length = trunk.read_u32().await.unwrap() as usize;
        let mut payload = vec![0; length];
        trunk.read_exact(&mut payload).await.unwrap();
        frames.lock().unwrap().push(Frame { id, length });

        let rest = missing.entry(id).or_default();
        if *rest == 0 {
            // `channel.recv` of Go's ttrpc: a buffered reader of 4096 bytes, then the header.
            if length > 4096 {
                return "cannot allocate memory";
            }
            *rest = 10 + u32::from_be_bytes(payload[..4].try_into().unwrap()) as usize;
        } else if length > (*rest).max(4096) {
            return "cannot allocate memory";
        }
        *rest -= length;
        inputs
            .get_mut(&id)
            .expect("an unknown connection")
            .write_all(&payload)
            .await
            .unwrap();
    }
}

/// Cuts what it sends anywhere, since only the plugin's own reader could mind.
async fn send(
    mut trunk: OwnedWriteHalf,
    mut plugin: ReadHalf<DuplexStream>,
    mut runtime: ReadHalf<DuplexStream>,
    mut raw: UnboundedReceiver<Vec<u8>>,
) -> &'static str {
    let (mut to_plugin, mut to_runtime) = (vec![0; 5000], vec![0; 5000]);
    loop {
        let bytes = tokio::select! {
            read = plugin.read(&mut to_plugin) => frame(PLUGIN, &to_plugin[..read.unwrap()]),
            read = runtime.read(&mut to_runtime) => frame(RUNTIME, &to_runtime[..read.unwrap()]),
            Some(bytes) = raw.recv() => bytes,
        };
        if trunk.write_all(&bytes).await.is_err() {
            return "the plugin closed the connection";
        }
    }
}

pub(crate) fn frame(id: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = id.to_be_bytes().to_vec();
    bytes.extend(u32::try_from(payload.len()).unwrap().to_be_bytes());
    bytes.extend(payload);
    bytes
}
