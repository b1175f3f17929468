//! What is in the runtime, asked over the CRI. Deliberately not the product's own client: a judge
//! should not see through the eyes of the accused. Only the fields looked at are declared.

use std::collections::HashMap;

use anyhow::{Context, Result, bail};
use hyper_util::rt::TokioIo;
use prost::Message;
use serde_json::Value;
use tokio::net::UnixStream;
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint, Uri};
use tonic_prost::ProstCodec;
use tower::service_fn;

/// Marks a placeholder and nothing else.
const PLACEHOLDER: &str = "reprise.dev/placeholder";
const REPLAY: &str = "reprise.dev/replay";

#[derive(Clone, PartialEq, Message)]
struct Filter {
    #[prost(map = "string, string", tag = "4")]
    labels: HashMap<String, String>,
}

#[derive(Clone, PartialEq, Message)]
struct SandboxFilter {
    #[prost(map = "string, string", tag = "3")]
    labels: HashMap<String, String>,
}

#[derive(Clone, PartialEq, Message)]
struct ListContainersRequest {
    #[prost(message, optional, tag = "1")]
    filter: Option<Filter>,
}

#[derive(Clone, PartialEq, Message)]
struct ListContainersResponse {
    #[prost(message, repeated, tag = "1")]
    containers: Vec<Container>,
}

#[derive(Clone, PartialEq, Message)]
struct ContainerMetadata {
    #[prost(uint32, tag = "2")]
    attempt: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub(crate) enum State {
    Created = 0,
    Running = 1,
    Exited = 2,
    Unknown = 3,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct Container {
    #[prost(string, tag = "1")]
    pub(crate) id: String,
    #[prost(message, optional, tag = "3")]
    metadata: Option<ContainerMetadata>,
    #[prost(enumeration = "State", tag = "6")]
    state: i32,
    /// Nanoseconds since the epoch.
    #[prost(int64, tag = "7")]
    pub(crate) created_at: i64,
    #[prost(map = "string, string", tag = "8")]
    labels: HashMap<String, String>,
    #[prost(map = "string, string", tag = "9")]
    annotations: HashMap<String, String>,
}

impl Container {
    pub(crate) fn name(&self) -> &str {
        self.labels
            .get("io.kubernetes.container.name")
            .map_or("", String::as_str)
    }

    pub(crate) fn attempt(&self) -> u32 {
        self.metadata
            .as_ref()
            .map_or(0, |metadata| metadata.attempt)
    }

    pub(crate) fn is_placeholder(&self) -> bool {
        self.annotations.contains_key(PLACEHOLDER)
    }

    /// Whether the kubelet made it.
    pub(crate) fn is_the_kubelets(&self) -> bool {
        !self.is_placeholder() && !self.annotations.contains_key(REPLAY)
    }
}

#[derive(Clone, PartialEq, Message)]
struct ListSandboxesRequest {
    #[prost(message, optional, tag = "1")]
    filter: Option<SandboxFilter>,
}

#[derive(Clone, PartialEq, Message)]
struct ListSandboxesResponse {
    #[prost(message, repeated, tag = "1")]
    items: Vec<Sandbox>,
}

#[derive(Clone, PartialEq, Message)]
struct Sandbox {
    #[prost(string, tag = "1")]
    id: String,
}

#[derive(Clone, PartialEq, Message)]
struct StopSandboxRequest {
    #[prost(string, tag = "1")]
    id: String,
}

#[derive(Clone, PartialEq, Message)]
struct Empty {}

#[derive(Clone, PartialEq, Message)]
struct StatusRequest {
    #[prost(string, tag = "1")]
    container_id: String,
    #[prost(bool, tag = "2")]
    verbose: bool,
}

#[derive(Clone, PartialEq, Message)]
struct StatusResponse {
    #[prost(message, optional, tag = "1")]
    status: Option<ContainerStatus>,
    #[prost(map = "string, string", tag = "2")]
    info: HashMap<String, String>,
}

#[derive(Clone, PartialEq, Message)]
struct ContainerStatus {
    /// Nanoseconds since the epoch.
    #[prost(int64, tag = "5")]
    started_at: i64,
}

#[derive(Clone)]
pub(crate) struct Runtime {
    channel: Channel,
}

impl Runtime {
    /// `endpoint` is `unix://PATH`; the connection is made at the first call and again when lost.
    pub(crate) fn new(endpoint: &str) -> Result<Self> {
        let Some(path) = endpoint.strip_prefix("unix://").map(str::to_owned) else {
            bail!("CRI endpoint {endpoint} is not a unix:// address");
        };
        let channel = Endpoint::from_static("http://cri").connect_with_connector_lazy(service_fn(
            move |_: Uri| {
                let path = path.clone();
                async move { UnixStream::connect(path).await.map(TokioIo::new) }
            },
        ));
        Ok(Self { channel })
    }

    /// The connection, for a proxy to pass calls on.
    pub(crate) fn channel(&self) -> Channel {
        self.channel.clone()
    }

    /// The pod's containers, placeholders too, oldest first.
    pub(crate) async fn containers(&self, pod_uid: &str) -> Result<Vec<Container>> {
        let request = ListContainersRequest {
            filter: Some(Filter {
                labels: of_pod(pod_uid),
            }),
        };
        let response: ListContainersResponse = self.call("ListContainers", request).await?;
        let mut containers = response.containers;
        containers.sort_by_key(|container| container.created_at);
        Ok(containers)
    }

    /// Ids of the pod's sandboxes, dead ones too.
    pub(crate) async fn sandboxes(&self, pod_uid: &str) -> Result<Vec<String>> {
        let request = ListSandboxesRequest {
            filter: Some(SandboxFilter {
                labels: of_pod(pod_uid),
            }),
        };
        let response: ListSandboxesResponse = self.call("ListPodSandbox", request).await?;
        Ok(response.items.into_iter().map(|item| item.id).collect())
    }

    /// As the kubelet ends a pod.
    pub(crate) async fn stop_sandbox(&self, id: &str) -> Result<()> {
        let request = StopSandboxRequest { id: id.to_owned() };
        let Empty {} = self.call("StopPodSandbox", request).await?;
        Ok(())
    }

    /// When it was started, in nanoseconds since the epoch.
    pub(crate) async fn started_at(&self, container_id: &str) -> Result<i64> {
        let status = self.status(container_id, false).await?.status;
        Ok(status.context("the runtime tells no status")?.started_at)
    }

    async fn status(&self, container_id: &str, verbose: bool) -> Result<StatusResponse> {
        let request = StatusRequest {
            container_id: container_id.to_owned(),
            verbose,
        };
        self.call("ContainerStatus", request).await
    }

    /// All that the runtime says of a container: what it was made from, its OCI configuration.
    pub(crate) async fn info(&self, container_id: &str) -> Result<Value> {
        let response = self.status(container_id, true).await?;
        let info = response
            .info
            .get("info")
            .context("the runtime's verbose status has no field info")?;
        Ok(serde_json::from_str(info)?)
    }

    /// Paths of the poststop hooks in the container's OCI configuration.
    pub(crate) async fn poststop_hooks(&self, container_id: &str) -> Result<Vec<String>> {
        let info = self.info(container_id).await?;
        let hooks = info.pointer("/runtimeSpec/hooks/poststop");
        Ok(hooks
            .and_then(Value::as_array)
            .into_iter()
            .flatten()
            .filter_map(|hook| hook["path"].as_str().map(str::to_owned))
            .collect())
    }

    async fn call<Q, A>(&self, method: &str, request: Q) -> Result<A>
    where
        Q: Message + Send + Sync + 'static,
        A: Message + Default + Send + Sync + 'static,
    {
        let mut grpc = Grpc::new(self.channel.clone());
        grpc.ready()
            .await
            .with_context(|| format!("the runtime cannot be reached for {method}"))?;
        let path = PathAndQuery::try_from(format!("/runtime.v1.RuntimeService/{method}"))?;
        let response = grpc
            .unary(tonic::Request::new(request), path, ProstCodec::default())
            .await
            .with_context(|| format!("CRI {method} failed"))?;
        Ok(response.into_inner())
    }
}

fn of_pod(uid: &str) -> HashMap<String, String> {
    HashMap::from([("io.kubernetes.pod.uid".to_owned(), uid.to_owned())])
}

/// One line per container, for people.
pub(crate) fn describe(containers: &[Container]) -> String {
    containers
        .iter()
        .map(|container| {
            format!(
                "{} attempt {} {:?}{} {}",
                container.name(),
                container.attempt(),
                container.state(),
                if container.is_placeholder() {
                    " placeholder"
                } else {
                    ""
                },
                container.id.get(..12).unwrap_or(&container.id),
            )
        })
        .collect::<Vec<_>>()
        .join("\n")
}
