//! The hooks of a container's life, as its spec has them (`pkg/kubelet/lifecycle/handlers.go`, 1.33 to 1.37).

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::{self as api, Container, HTTPGetAction, LifecycleHandler};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

/// What is done right after a container's start, or before it is told to stop.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LifecycleHook {
    /// A command is run in the container.
    Exec(Vec<String>),
    /// A request is sent from the node.
    HttpGet(HttpGet),
    /// Nothing for that long.
    Sleep(Duration),
    /// `tcpSocket`, for one, which the API takes and the kubelet does not run; or more than is kept of a pod here. It fails.
    Invalid,
}

/// On containers: what the kubelet itself goes by where it does not know a pod's spec (`restoreSpecsFromContainerLabels`,
/// `pkg/kubelet/kuberuntime/kuberuntime_container.go`).
const PRE_STOP: &str = "io.kubernetes.container.preStopHandler";
const PORTS: &str = "io.kubernetes.container.ports";

/// What is kept of one hook: words, and their bytes. Whoever writes more means harm.
const MOST_WORDS: usize = 256;
const MOST_BYTES: usize = 16 * 1024;

/// A request, whatever it is answered with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HttpGet {
    /// Whether by HTTPS, whoever answers.
    pub tls: bool,
    /// Whom it is sent to; `None`: the pod.
    pub host: Option<String>,
    /// To which port, or what is wrong with it.
    pub port: Result<u16, String>,
    /// Path and query.
    pub path: String,
    /// Names with their values.
    pub headers: Vec<(String, String)>,
}

/// The hooks of one container.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Lifecycle {
    /// Run right after its start; a failure ends the container.
    pub post_start: Option<LifecycleHook>,
    /// Run before it is told to stop, within the time that it has for that.
    pub pre_stop: Option<LifecycleHook>,
}

impl Lifecycle {
    pub(super) fn of(container: &Container) -> Self {
        let hook = |handler: &LifecycleHandler| LifecycleHook::of(handler, container);
        let lifecycle = container.lifecycle.as_ref();
        Self {
            post_start: lifecycle.and_then(|it| it.post_start.as_ref()).map(hook),
            pre_stop: lifecycle.and_then(|it| it.pre_stop.as_ref()).map(hook),
        }
    }
}

impl LifecycleHook {
    /// Whether it does the same wherever it is run from. Others are the node's to send, or fail.
    pub(crate) fn is_run_anywhere(&self) -> bool {
        matches!(self, Self::Exec(_) | Self::Sleep(_))
    }

    /// What a container runs before it is told to stop, from its annotations.
    pub(crate) fn pre_stop_in(annotations: &BTreeMap<String, String>) -> Option<Self> {
        let read = |key| annotations.get(key);
        let pre_stop = serde_json::from_str(read(PRE_STOP)?).ok()?;
        let ports = read(PORTS).and_then(|ports| serde_json::from_str(ports).ok());
        let lifecycle = api::Lifecycle {
            pre_stop: Some(pre_stop),
            ..Default::default()
        };
        let container = Container {
            lifecycle: Some(lifecycle),
            ports,
            ..Default::default()
        };
        Lifecycle::of(&container).pre_stop
    }

    fn of(handler: &LifecycleHandler, container: &Container) -> Self {
        let exec = handler
            .exec
            .iter()
            .flat_map(|it| it.command.iter().flatten());
        let get = handler.http_get.iter();
        let headers = get.flat_map(|it| it.http_headers.iter().flatten());
        let headers = headers.flat_map(|it| [&it.name, &it.value]);
        let path = handler.http_get.iter().filter_map(|it| it.path.as_ref());
        let lengths: Vec<usize> = exec.chain(headers).chain(path).map(String::len).collect();
        if lengths.len() > MOST_WORDS || lengths.iter().sum::<usize>() > MOST_BYTES {
            return Self::Invalid;
        }
        if let Some(exec) = &handler.exec {
            Self::Exec(exec.command.clone().unwrap_or_default())
        } else if let Some(get) = &handler.http_get {
            Self::HttpGet(HttpGet::of(get, container))
        } else if let Some(sleep) = &handler.sleep {
            Self::Sleep(Duration::from_secs(sleep.seconds.try_into().unwrap_or(0)))
        } else {
            Self::Invalid
        }
    }
}

impl HttpGet {
    fn of(get: &HTTPGetAction, container: &Container) -> Self {
        let headers = get.http_headers.iter().flatten();
        Self {
            tls: get
                .scheme
                .as_deref()
                .is_some_and(|it| it.eq_ignore_ascii_case("https")),
            host: get.host.clone().filter(|host| !host.is_empty()),
            port: port(&get.port, container),
            path: get.path.clone().unwrap_or_default(),
            headers: headers
                .map(|it| (it.name.clone(), it.value.clone()))
                .collect(),
        }
    }
}

/// By number, or by a name of one of the container's ports (`ResolveContainerPort`, `pkg/probe/util.go`).
fn port(port: &IntOrString, container: &Container) -> Result<u16, String> {
    let number = match port {
        IntOrString::Int(number) => Some(*number),
        IntOrString::String(name) => {
            let mut ports = container.ports.iter().flatten();
            let named = ports.find(|it| it.name.as_ref() == Some(name));
            named
                .map(|it| it.container_port)
                .or_else(|| name.parse().ok())
        }
    };
    let number = number.and_then(|number| u16::try_from(number).ok());
    number
        .filter(|number| *number > 0)
        .ok_or_else(|| match port {
            IntOrString::Int(number) => format!("{number} is no port"),
            IntOrString::String(name) => format!("there is no port {name:?}"),
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn a_hook_is_found_in_what_the_kubelet_wrote_on_its_container() {
        let written = |key: &str, value: Value| (key.to_owned(), value.to_string());
        let annotations = BTreeMap::from([
            written(
                PRE_STOP,
                json!({"httpGet": {"path": "/drain", "port": "web"}}),
            ),
            written(PORTS, json!([{"name": "web", "containerPort": 8080}])),
        ]);
        let Some(LifecycleHook::HttpGet(get)) = LifecycleHook::pre_stop_in(&annotations) else {
            panic!("it is a request");
        };
        assert_eq!((get.path.as_str(), get.port), ("/drain", Ok(8080)));
        let garbage = BTreeMap::from([(PRE_STOP.to_owned(), "{".to_owned())]);
        for annotations in [BTreeMap::new(), garbage] {
            assert_eq!(LifecycleHook::pre_stop_in(&annotations), None);
        }
    }

    fn pre_stop(handler: &Value) -> Option<LifecycleHook> {
        let container = json!({
            "name": "a",
            "ports": [{"name": "web", "containerPort": 8080}],
            "lifecycle": {"preStop": handler},
        });
        Lifecycle::of(&serde_json::from_value(container).unwrap()).pre_stop
    }

    #[test]
    fn each_kind_is_read() {
        let exec = pre_stop(&json!({"exec": {"command": ["sh", "-c", "true"]}}));
        let command = ["sh", "-c", "true"].map(str::to_owned).into();
        assert_eq!(exec, Some(LifecycleHook::Exec(command)));
        let sleep = pre_stop(&json!({"sleep": {"seconds": 5}}));
        assert_eq!(sleep, Some(LifecycleHook::Sleep(Duration::from_secs(5))));
        let tcp = pre_stop(&json!({"tcpSocket": {"port": 80}}));
        assert_eq!(tcp, Some(LifecycleHook::Invalid));
        let get = pre_stop(&json!({"httpGet": {
            "scheme": "HTTPS", "port": "web", "path": "/stop?now",
            "httpHeaders": [{"name": "X-A", "value": "1"}],
        }}));
        let expected = HttpGet {
            tls: true,
            host: None,
            port: Ok(8080),
            path: "/stop?now".to_owned(),
            headers: vec![("X-A".to_owned(), "1".to_owned())],
        };
        assert_eq!(get, Some(LifecycleHook::HttpGet(expected)));
    }

    #[test]
    fn of_a_hook_no_more_is_kept_than_a_command_needs() {
        let long = |count: usize, bytes: usize| {
            let command = vec!["x".repeat(bytes); count];
            pre_stop(&json!({"exec": {"command": command}}))
        };
        assert!(matches!(long(256, 64), Some(LifecycleHook::Exec(_))));
        assert_eq!(long(257, 0), Some(LifecycleHook::Invalid));
        assert_eq!(long(2, 9000), Some(LifecycleHook::Invalid));
    }

    #[test]
    fn a_port_is_a_number_or_one_of_the_containers_names() {
        let port = |port: Value| match pre_stop(&json!({"httpGet": {"port": port}})) {
            Some(LifecycleHook::HttpGet(get)) => get.port,
            other => panic!("{other:?}"),
        };
        assert_eq!(port(json!(80)), Ok(80));
        assert_eq!(port(json!("80")), Ok(80));
        assert_eq!(port(json!("web")), Ok(8080));
        assert_eq!(port(json!("db")), Err("there is no port \"db\"".to_owned()));
        assert_eq!(port(json!(0)), Err("0 is no port".to_owned()));
        assert_eq!(port(json!(65_536)), Err("65536 is no port".to_owned()));
    }
}
