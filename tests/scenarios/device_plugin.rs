//! A device plugin of the kubelet: one device, which gives a container a device node and a CDI device. The messages are
//! those of `v1beta1` (`k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1/api.proto`); only the fields set are declared.

use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::task::{Context as Polling, Poll};

use anyhow::{Context, Result};
use futures::future::BoxFuture;
use futures::stream::{self, BoxStream, StreamExt};
use prost::Message;
use serde_json::json;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::task::JoinSet;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::http::{Request, Response};
use tonic::server::{Grpc, NamedService};
use tonic::transport::Server;
use tonic_prost::ProstCodec;
use tower::{Service, service_fn};

/// What the kubelet asks of whoever listens in its directory (`pluginregistration/v1`).
#[derive(Clone, PartialEq, Message)]
struct PluginInfo {
    /// What kind of plugin it is.
    #[prost(string, tag = "1")]
    kind: String,
    #[prost(string, tag = "2")]
    name: String,
    /// The socket of the plugin itself.
    #[prost(string, tag = "3")]
    endpoint: String,
    #[prost(string, repeated, tag = "4")]
    supported_versions: Vec<String>,
}

/// Any message none of whose fields matters: one can be read as it, and it is one with no field set.
#[derive(Clone, PartialEq, Message)]
struct Empty {}

#[derive(Clone, PartialEq, Message)]
struct ListAndWatchResponse {
    #[prost(message, repeated, tag = "1")]
    devices: Vec<Device>,
}

#[derive(Clone, PartialEq, Message)]
struct Device {
    #[prost(string, tag = "1")]
    id: String,
    #[prost(string, tag = "2")]
    health: String,
}

#[derive(Clone, PartialEq, Message)]
struct AllocateResponse {
    #[prost(message, repeated, tag = "1")]
    containers: Vec<ContainerAllocateResponse>,
}

#[derive(Clone, PartialEq, Message)]
struct ContainerAllocateResponse {
    #[prost(message, repeated, tag = "3")]
    devices: Vec<DeviceSpec>,
    #[prost(message, repeated, tag = "5")]
    cdi_devices: Vec<CdiDevice>,
}

#[derive(Clone, PartialEq, Message)]
struct DeviceSpec {
    #[prost(string, tag = "1")]
    container_path: String,
    #[prost(string, tag = "2")]
    host_path: String,
    #[prost(string, tag = "3")]
    permissions: String,
}

#[derive(Clone, PartialEq, Message)]
struct CdiDevice {
    #[prost(string, tag = "1")]
    name: String,
}

/// Serves until dropped.
pub(crate) struct DevicePlugin {
    /// What a container asks for.
    pub(crate) resource: String,
    files: [PathBuf; 2],
    _tasks: JoinSet<()>,
    _dir: TempDir,
}

impl DevicePlugin {
    /// One device of a resource `vendor/name`, for the kubelet that looks into `dir` for plugins. A container that gets
    /// it has `/dev/reprise`, which reads as zeros, and of its CDI device `/dev/reprise-cdi`, the same, and the
    /// variable `CDI_WORD`.
    pub(crate) fn start(dir: &Path, cdi_dir: &Path, vendor: &str, name: &str) -> Result<Self> {
        let resource = format!("{vendor}/{name}");
        let spec = cdi_dir.join(name).with_extension("json");
        let node = json!({"path": "/dev/reprise-cdi", "hostPath": "/dev/zero"});
        let edits = json!({"env": ["CDI_WORD=hello"], "deviceNodes": [node]});
        let devices = json!([{"name": "one", "containerEdits": edits}]);
        let spec_of_it = json!({"cdiVersion": "0.6.0", "kind": resource, "devices": devices});
        std::fs::write(&spec, spec_of_it.to_string())?;

        let own_dir = tempfile::tempdir()?;
        let endpoint = own_dir.path().join("devices.sock");
        let devices = UnixListener::bind(&endpoint)?;
        let registration = dir.join(name).with_extension("sock");
        let kubelet = UnixListener::bind(&registration)
            .with_context(|| format!("cannot listen at {}", registration.display()))?;
        let info = PluginInfo {
            kind: "DevicePlugin".to_owned(),
            name: resource.clone(),
            endpoint: endpoint.display().to_string(),
            supported_versions: vec!["v1beta1".to_owned()],
        };
        let service = Devices {
            cdi_device: format!("{resource}=one"),
        };
        let server = Server::builder().add_service(service);
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            // Whoever waits for the device sees that nobody serves it.
            let _ = server
                .serve_with_incoming(UnixListenerStream::new(devices))
                .await;
        });
        tasks.spawn(async move {
            while let Ok((connection, _)) = kubelet.accept().await {
                let _ = introduce(connection, &info).await;
            }
        });
        Ok(Self {
            resource,
            files: [spec, registration],
            _tasks: tasks,
            _dir: own_dir,
        })
    }
}

impl Drop for DevicePlugin {
    fn drop(&mut self) {
        for file in &self.files {
            let _ = std::fs::remove_file(file);
        }
    }
}

/// Answers whatever the kubelet asks on this connection with who the plugin is: it asks that, and then says that the
/// plugin is registered, to which any message is an answer. By hand, because its calls have the socket's path as their
/// `:authority`, which Rust's HTTP/2 takes for an error.
async fn introduce(mut connection: UnixStream, info: &PluginInfo) -> Result<()> {
    // RFC 9113, 6 and 4.1: a frame is length, type, flags, stream and payload.
    const DATA: u8 = 0;
    const HEADERS: u8 = 1;
    const SETTINGS: u8 = 4;
    const PING: u8 = 6;
    const ACK: u8 = 1;
    const END_STREAM: u8 = 1;
    const END_HEADERS: u8 = 4;
    let frame = |kind: u8, flags: u8, stream: u32, payload: &[u8]| {
        let length = u32::try_from(payload.len()).unwrap_or(u32::MAX);
        let head = [&length.to_be_bytes()[1..], &[kind, flags]].concat();
        [&head, &stream.to_be_bytes()[..], payload].concat()
    };
    // RFC 7541, 6.1 and 6.2.2: `:status: 200`, `content-type` and `grpc-status: 0`, the last by its full name.
    let head = b"\x88\x0f\x10\x10application/grpc";
    let trailers = b"\x00\x0bgrpc-status\x010";
    let message = info.encode_to_vec();
    let length = u32::try_from(message.len())?.to_be_bytes();
    let message = [&[0], &length[..], &message].concat();

    let mut preface = [0; 24];
    connection.read_exact(&mut preface).await?;
    connection.write_all(&frame(SETTINGS, 0, 0, &[])).await?;
    loop {
        let mut head_of_frame = [0; 9];
        connection.read_exact(&mut head_of_frame).await?;
        let [a, b, c, kind, flags, stream @ ..] = head_of_frame;
        let mut payload = vec![0; u32::from_be_bytes([0, a, b, c]).try_into()?];
        connection.read_exact(&mut payload).await?;
        let stream = u32::from_be_bytes(stream);
        let answer = match kind {
            SETTINGS if flags & ACK == 0 => frame(SETTINGS, ACK, 0, &[]),
            PING if flags & ACK == 0 => frame(PING, ACK, 0, &payload),
            DATA if flags & END_STREAM != 0 => [
                frame(HEADERS, END_HEADERS, stream, head),
                frame(DATA, 0, stream, &message),
                frame(HEADERS, END_HEADERS | END_STREAM, stream, trailers),
            ]
            .concat(),
            _ => continue,
        };
        connection.write_all(&answer).await?;
    }
}

#[derive(Clone)]
struct Devices {
    cdi_device: String,
}

impl NamedService for Devices {
    const NAME: &'static str = "v1beta1.DevicePlugin";
}

impl Service<Request<Body>> for Devices {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Polling<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        Box::pin(self.clone().answer(request))
    }
}

impl Devices {
    async fn answer(self, request: Request<Body>) -> Result<Response<Body>, Infallible> {
        let path = request.uri().path().to_owned();
        Ok(match path.rsplit('/').next().unwrap_or_default() {
            "ListAndWatch" => list(request).await,
            "Allocate" => {
                let device = DeviceSpec {
                    container_path: "/dev/reprise".to_owned(),
                    host_path: "/dev/zero".to_owned(),
                    permissions: "rw".to_owned(),
                };
                let cdi_device = CdiDevice {
                    name: self.cdi_device,
                };
                let container = ContainerAllocateResponse {
                    devices: vec![device],
                    cdi_devices: vec![cdi_device],
                };
                let containers = vec![container];
                unary(AllocateResponse { containers }, request).await
            }
            // No options; nothing to do before a container starts.
            "GetDevicePluginOptions" | "PreStartContainer" => unary(Empty {}, request).await,
            _ => Status::unimplemented(path).into_http(),
        })
    }
}

async fn unary<M: Message + Clone + 'static>(answer: M, request: Request<Body>) -> Response<Body> {
    let answer = service_fn(move |_: tonic::Request<Empty>| {
        let answer = answer.clone();
        async { Ok::<_, Status>(tonic::Response::new(answer)) }
    });
    let codec = ProstCodec::<M, Empty>::default();
    Grpc::new(codec).unary(answer, request).await
}

/// The one device, and no news of it.
async fn list(request: Request<Body>) -> Response<Body> {
    let answer = service_fn(|_: tonic::Request<Empty>| async {
        let device = Device {
            id: "one".to_owned(),
            health: "Healthy".to_owned(),
        };
        let devices = vec![device];
        let first = ListAndWatchResponse { devices };
        let list: BoxStream<'static, Result<ListAndWatchResponse, Status>> =
            stream::iter([Ok(first)]).chain(stream::pending()).boxed();
        Ok::<_, Status>(tonic::Response::new(list))
    });
    let codec = ProstCodec::<ListAndWatchResponse, Empty>::default();
    Grpc::new(codec).server_streaming(answer, request).await
}
