//! What the plugin does at each NRI event: note it, and for a container about to be created, decide.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use tokio::sync::Notify;

use super::roster::Roster;
use crate::exit_hold::hook::HookArgs;
use crate::ids::{ContainerId, ContainerName, ExitCode, PodIdentity, PodKey, SandboxId};
use crate::node::{Instance, InstanceState, PLACEHOLDER_ANNOTATION};
use crate::nri::api::{
    Container, ContainerAdjustment, ContainerState, Hook, Hooks, OptionalInt, PodSandbox,
};
use crate::nri::{EventMask, Plugin, Refusal, RuntimeInfo};
use crate::restart::driver::Driver;
use crate::restart::record::Records;

/// The runtime ends a hook that takes longer (OCI runtime-spec, "POSIX-platform Hooks", `timeout`, seconds).
const HOOK_TIMEOUT_SECONDS: i64 = 10;

/// Reprise as an NRI plugin.
#[derive(Debug)]
pub struct Reprise {
    roster: Arc<Roster>,
    records: Records,
    hook: PathBuf,
    hook_socket: PathBuf,
    /// Wakes whoever compares with the runtime's lists: not from inside a handler, which would deadlock.
    synchronized: Arc<Notify>,
}

impl Reprise {
    /// `hook`: our executable, where the runtime finds it.
    #[must_use]
    pub fn new(
        roster: Arc<Roster>,
        records: Records,
        hook: PathBuf,
        hook_socket: PathBuf,
        synchronized: Arc<Notify>,
    ) -> Self {
        Self {
            roster,
            records,
            hook,
            hook_socket,
            synchronized,
        }
    }

    fn driver(&self, pod: &PodSandbox) -> Option<Arc<Driver>> {
        let annotations = pod
            .annotations
            .iter()
            .map(|(key, value)| (key.as_str(), value.as_str()));
        let sandbox = SandboxId::from(pod.id.as_str());
        let identity = || PodIdentity {
            sandbox: sandbox.clone(),
            uid: pod.uid.as_str().into(),
            key: PodKey {
                namespace: pod.namespace.clone(),
                name: pod.name.clone(),
            },
        };
        self.roster.adopt(identity, &sandbox, annotations)
    }

    /// The exit hold: a `poststop` hook.
    fn hold(&self, sandbox: &SandboxId) -> ContainerAdjustment {
        let args = HookArgs {
            socket: self.hook_socket.clone(),
            marker: self.records.marker(sandbox),
        };
        let name = "reprise".to_owned();
        let hook = Hook {
            path: self.hook.display().to_string(),
            args: std::iter::once(name).chain(args.to_args()).collect(),
            timeout: Some(OptionalInt {
                value: HOOK_TIMEOUT_SECONDS,
                ..Default::default()
            })
            .into(),
            ..Default::default()
        };
        ContainerAdjustment {
            hooks: Some(Hooks {
                poststop: vec![hook],
                ..Default::default()
            })
            .into(),
            ..Default::default()
        }
    }
}

impl Plugin for Reprise {
    fn events(&self) -> EventMask {
        EventMask::CREATE_CONTAINER
            | EventMask::POST_CREATE_CONTAINER
            | EventMask::POST_START_CONTAINER
            | EventMask::STOP_CONTAINER
            | EventMask::REMOVE_CONTAINER
            | EventMask::STOP_POD_SANDBOX
            | EventMask::REMOVE_POD_SANDBOX
    }

    async fn configure(&self, runtime: RuntimeInfo, _config: String) -> Result<(), Refusal> {
        tracing::info!(
            runtime = runtime.name,
            version = runtime.version,
            "connected to NRI"
        );
        Ok(())
    }

    async fn synchronize(&self, _pods: Vec<PodSandbox>, _containers: Vec<Container>) {
        // Exited containers are not in it: the CRI's lists are.
        self.synchronized.notify_one();
    }

    async fn create_container(
        &self,
        pod: PodSandbox,
        container: Container,
    ) -> Result<ContainerAdjustment, Refusal> {
        let Some(driver) = self.driver(&pod) else {
            return Ok(ContainerAdjustment::new());
        };
        if is_placeholder(&container) {
            return Ok(ContainerAdjustment::new());
        }
        driver
            .attempt(&ContainerName::from(container.name.as_str()))
            .map_err(|reason| Refusal::new(format!("reprise: {reason}")))?;
        Ok(self.hold(&driver.pod().sandbox))
    }

    async fn post_create_container(&self, pod: PodSandbox, container: Container) {
        if let Some(driver) = self.driver(&pod) {
            let instance = Instance {
                name: container.name.as_str().into(),
                state: InstanceState::Created,
                placeholder: is_placeholder(&container),
                created_at: now_ns(),
            };
            self.roster.created(&driver, id(&container), instance);
        }
    }

    async fn post_start_container(&self, _pod: PodSandbox, container: Container) {
        self.roster.started(&id(&container));
    }

    async fn stop_container(&self, _pod: PodSandbox, container: Container) {
        // Also sent when a stop begins, and before containerd 2.3 without saying so.
        if container.state.enum_value() == Ok(ContainerState::CONTAINER_STOPPED) {
            self.roster
                .ended(&id(&container), Some(ExitCode(container.exit_code)));
        }
    }

    async fn remove_container(&self, _pod: PodSandbox, container: Container) {
        self.roster.removed(&id(&container));
    }

    async fn stop_pod_sandbox(&self, pod: PodSandbox) {
        self.roster.sandbox_stopped(&pod.id.as_str().into());
    }

    async fn remove_pod_sandbox(&self, pod: PodSandbox) {
        self.roster.sandbox_stopped(&pod.id.as_str().into());
    }
}

fn id(container: &Container) -> ContainerId {
    container.id.as_str().into()
}

fn is_placeholder(container: &Container) -> bool {
    container.annotations.contains_key(PLACEHOLDER_ANNOTATION)
}

fn now_ns() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    // Fits until 2262.
    i64::try_from(since.unwrap_or_default().as_nanos()).unwrap_or(i64::MAX)
}
