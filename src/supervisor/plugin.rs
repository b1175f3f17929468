//! What the plugin does at each NRI event: note it, and for a container about to be created, decide.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use tokio::sync::{Notify, oneshot};

use super::roster::Roster;
use crate::exit_hold::hook::HookArgs;
use crate::ids::{ContainerId, ContainerName, ExitCode, PodIdentity, PodKey, SandboxId};
use crate::node::{Instance, InstanceState, PLACEHOLDER_ANNOTATION, now_ns};
use crate::nri::api::{
    Container, ContainerAdjustment, ContainerState, Hook, Hooks, OptionalInt, PodSandbox,
};
use crate::nri::{EventMask, Plugin, Refusal, RuntimeInfo};
use crate::restart::driver::Driver;
use crate::restart::record::Records;

/// The runtime ends a hook that takes longer (OCI runtime-spec, "POSIX-platform Hooks", `timeout`, seconds).
const HOOK_TIMEOUT_SECONDS: i64 = 10;

/// Reprise as an NRI plugin. Until [`Self::begin`] it objects to nothing: a plugin that the runtime launches must
/// register before it knows its configuration, and before the runtime answers anybody.
#[derive(Debug)]
pub struct Reprise {
    parts: OnceLock<Parts>,
    /// Hears the configuration text that the runtime hands over, once.
    configured: Mutex<Option<oneshot::Sender<String>>>,
}

/// What the plugin works with.
#[derive(Debug)]
pub struct Parts {
    /// The pods with rules.
    pub roster: Arc<Roster>,
    /// Where the hooks' markers are.
    pub records: Records,
    /// Our executable, where the runtime finds it.
    pub hook: PathBuf,
    /// Where the hooks knock.
    pub hook_socket: PathBuf,
    /// Wakes whoever compares with the runtime's lists: not from inside a handler, which would deadlock.
    pub missed: Arc<Notify>,
}

impl Reprise {
    /// The plugin, and the configuration text that it will be given.
    #[must_use]
    pub fn new() -> (Self, oneshot::Receiver<String>) {
        let (configured, configuration) = oneshot::channel();
        let plugin = Self {
            parts: OnceLock::new(),
            configured: Mutex::new(Some(configured)),
        };
        (plugin, configuration)
    }

    /// From now on pods with rules are looked after.
    pub fn begin(&self, parts: Parts) {
        // Called once; parts that are there already are the ones in use.
        let _ = self.parts.set(parts);
    }

    fn roster(&self) -> Option<&Roster> {
        self.parts.get().map(|parts| &*parts.roster)
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
        self.roster()?.adopt(identity, &sandbox, annotations)
    }

    /// Takes note of a container of a pod with rules.
    fn note(&self, pod: &PodSandbox, container: &Container) -> Option<Arc<Driver>> {
        let (roster, driver) = self.roster().zip(self.driver(pod))?;
        let instance = Instance {
            name: container.name.as_str().into(),
            state: InstanceState::Created,
            placeholder: is_placeholder(container),
            created_at: now_ns(),
        };
        roster.created(&driver, id(container), instance);
        Some(driver)
    }
}

impl Parts {
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

    async fn configure(&self, runtime: RuntimeInfo, config: String) -> Result<(), Refusal> {
        let mut configured = self
            .configured
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(configured) = configured.take() {
            // Only a plugin that was launched waits for it.
            let _ = configured.send(config);
        }
        tracing::info!(
            runtime = runtime.name,
            version = runtime.version,
            "connected to NRI"
        );
        Ok(())
    }

    async fn synchronize(&self, _pods: Vec<PodSandbox>, _containers: Vec<Container>) {
        // Exited containers are not in it: the CRI's lists are.
        if let Some(parts) = self.parts.get() {
            parts.missed.notify_one();
        }
    }

    async fn create_container(
        &self,
        pod: PodSandbox,
        container: Container,
    ) -> Result<ContainerAdjustment, Refusal> {
        let Some((parts, driver)) = self.parts.get().zip(self.driver(&pod)) else {
            return Ok(ContainerAdjustment::new());
        };
        if is_placeholder(&container) {
            return Ok(ContainerAdjustment::new());
        }
        driver
            .attempt(&ContainerName::from(container.name.as_str()))
            .map_err(|reason| Refusal::new(format!("reprise: {reason}")))?;
        Ok(parts.hold(&driver.pod().sandbox))
    }

    async fn post_create_container(&self, pod: PodSandbox, container: Container) {
        self.note(&pod, &container);
    }

    async fn post_start_container(&self, pod: PodSandbox, container: Container) {
        // It may have been made before this plugin was there.
        if let Some(driver) = self.note(&pod, &container) {
            driver.started(&id(&container));
        }
    }

    async fn stop_container(&self, _pod: PodSandbox, container: Container) {
        // Also sent when a stop begins, and before containerd 2.3 without saying so.
        let stopped = container.state.enum_value() == Ok(ContainerState::CONTAINER_STOPPED);
        if let Some(roster) = self.roster().filter(|_| stopped) {
            roster.ended(&id(&container), Some(ExitCode(container.exit_code)));
        }
    }

    async fn remove_container(&self, _pod: PodSandbox, container: Container) {
        if let Some(roster) = self.roster() {
            roster.removed(&id(&container));
        }
    }

    async fn stop_pod_sandbox(&self, pod: PodSandbox) {
        if let Some(roster) = self.roster() {
            roster.sandbox_stopped(&pod.id.as_str().into());
        }
    }

    async fn remove_pod_sandbox(&self, pod: PodSandbox) {
        self.stop_pod_sandbox(pod).await;
    }
}

fn id(container: &Container) -> ContainerId {
    container.id.as_str().into()
}

fn is_placeholder(container: &Container) -> bool {
    container.annotations.contains_key(PLACEHOLDER_ANNOTATION)
}
