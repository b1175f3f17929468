//! What the plugin does at each NRI event: note it, and for a container about to be created, decide.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use futures::future::join;
use nri::api::{
    Container, ContainerAdjustment, ContainerState, FailurePolicy, Hook, Hooks, OptionalInt,
    PodSandbox,
};
use nri::{EventMask, Plugin, Refusal, RuntimeInfo};
use tokio::sync::{Notify, oneshot};

use super::registry::{Registry, Sighting};
use crate::cri::CONTAINER_NAME;
use crate::driver::Driver;
use crate::exit_hold::HookCopies;
use crate::exit_hold::hook::HookArgs;
use crate::ids::{ContainerId, ContainerName, ExitCode, SandboxId};
use crate::kube::Declaration;
use crate::metrics::{Handling, Health};
use crate::node::{Instance, Maker};
use crate::records::Records;
use crate::restart::pod::Gate;

/// The runtime ends a hook that takes longer (OCI runtime-spec, "POSIX-platform Hooks", `timeout`, seconds).
const HOOK_TIMEOUT_SECONDS: i64 = 10;

/// Reprise as an NRI plugin. Until [`Self::begin`] it objects to nothing: a plugin that the runtime launches must
/// register before it knows its configuration, and before the runtime answers anybody.
#[derive(Debug)]
pub struct Reprise {
    parts: OnceLock<Parts>,
    gate: Arc<Gate>,
    health: Arc<Health>,
    /// Hears the configuration text that the runtime hands over, once.
    configured: Mutex<Option<oneshot::Sender<String>>>,
}

/// What the plugin works with.
#[derive(Debug)]
pub struct Parts {
    /// The pods with rules.
    pub registry: Arc<Registry>,
    /// What the node declares of us; `None`: there is no API server.
    pub declaration: Option<Arc<Declaration>>,
    /// Where the hooks' markers are.
    pub records: Records,
    /// Our executable, where the runtime finds it, if it is to run it.
    pub hook: Option<PathBuf>,
    /// Where copies of it are, if this process has put it there.
    pub copies: Option<HookCopies>,
    /// Where the hooks ask.
    pub hook_socket: PathBuf,
    /// Wakes whoever compares with the runtime's lists: not from inside a handler, which would deadlock.
    pub missed: Arc<Notify>,
}

impl Reprise {
    /// The plugin, and the configuration text that it will be given.
    #[must_use]
    pub fn new() -> (Self, oneshot::Receiver<String>) {
        let (configured, configuration) = oneshot::channel();
        let gate = Arc::default();
        let plugin = Self {
            parts: OnceLock::new(),
            health: Arc::new(Health::new(Arc::default(), Arc::clone(&gate))),
            gate,
            configured: Mutex::new(Some(configured)),
        };
        (plugin, configuration)
    }

    /// From now on pods with rules are looked after.
    pub fn begin(&self, parts: Parts) {
        // Called once; parts that are there already are the ones in use.
        let _ = self.parts.set(parts);
    }

    /// Whether the runtime asks this plugin before it creates a container.
    #[must_use]
    pub fn gate(&self) -> Arc<Gate> {
        Arc::clone(&self.gate)
    }

    /// How the plugin is.
    #[must_use]
    pub fn health(&self) -> Arc<Health> {
        Arc::clone(&self.health)
    }

    /// No other plugin follows: waits, for a while, for the restarts under way.
    pub async fn finish(&self) {
        if let Some(registry) = self.registry() {
            registry.until_restarts_are_over().await;
        }
    }

    /// Waits until what is being started has been; nothing is started from then on, or declared.
    pub async fn end(&self) {
        let Some(parts) = self.parts.get() else {
            return;
        };
        let declaration = async {
            if let Some(declaration) = &parts.declaration {
                declaration.take_back().await;
            }
        };
        join(parts.registry.end_starts(), declaration).await;
    }

    fn registry(&self) -> Option<&Registry> {
        self.parts.get().map(|parts| &*parts.registry)
    }

    fn driver(&self, pod: &PodSandbox) -> Option<Arc<Driver>> {
        let sandbox = SandboxId::from(pod.id.as_str());
        self.registry()?.adopt(&Sighting {
            sandbox: &sandbox,
            uid: &pod.uid,
            namespace: &pod.namespace,
            name: &pod.name,
            handler: &pod.runtime_handler,
            annotations: pod.annotations.iter(),
        })
    }

    /// A handler runs until this is dropped.
    fn handling(&self, event: &'static str) -> Handling<'_> {
        self.health.metrics().handlers().begin(event)
    }

    fn sandbox_is_gone(&self, pod: &PodSandbox) {
        if let Some(registry) = self.registry() {
            registry.sandbox_stopped(&pod.id.as_str().into());
        }
    }

    /// Takes note of a container of a pod with rules.
    fn note(&self, driver: &Arc<Driver>, container: &Container) {
        let Some(registry) = self.registry() else {
            return;
        };
        let hooked = driver.is_held_without_hook();
        let hooked = hooked.or_else(|| Some(is_hooked(container)));
        let instance = Instance::just_made(name(container), &container.annotations, hooked);
        registry.created(driver, id(container), instance);
    }
}

impl Parts {
    /// The exit hold: a `poststop` hook.
    fn hold(&self, sandbox: &SandboxId, path: &Path) -> ContainerAdjustment {
        let args = HookArgs {
            socket: self.hook_socket.clone(),
            marker: self.records.marker(sandbox),
        };
        let hook = Hook {
            path: path.display().to_string(),
            args: args.to_args(),
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

    /// To be dropped for an answer that is late on a busy node would leave every pod without its gate until the runtime
    /// has taken the plugin in again, which may freeze the node (see [`Self::connecting`]).
    fn failure_policy(&self) -> FailurePolicy {
        FailurePolicy {
            keep_connected: true,
            ..Default::default()
        }
    }

    async fn configure(&self, runtime: RuntimeInfo, config: String) -> Result<(), Refusal> {
        self.health.has_time(runtime.request_timeout);
        let mut configured = self
            .configured
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(configured) = configured.take() {
            // Only a plugin that was launched waits for it.
            let _ = configured.send(config);
        }
        Ok(())
    }

    /// While an exit is held, a runtime that takes in a plugin freezes: it asks the shim for the container's state,
    /// which waits for the hook, and keeps every other CRI call waiting meanwhile (containerd `syncPlugin`,
    /// `internal/nri/nri.go` 2.3). So what is held is released first, and what is being stopped has stopped (see
    /// [`super::stops`]). Where there is always one pod or another that holds, it is left at that: no hook waits for long.
    async fn connecting(&self) {
        let Some(registry) = self.registry() else {
            return;
        };
        registry.until_stops_are_over().await;
        if registry.until_released().await.is_err() {
            tracing::warn!("exits are held all the time: connecting to NRI all the same");
        }
    }

    async fn disconnected(&self) {
        self.gate.set(false);
        self.health.metrics().nri_lost();
    }

    async fn synchronize(&self, _pods: Vec<PodSandbox>, containers: Vec<Container>) {
        let _handling = self.handling("Synchronize");
        self.gate.set(true);
        self.health.metrics().nri_connected();
        if let Some(copies) = self.parts.get().and_then(|parts| parts.copies.clone()) {
            // Another version's may have other arguments.
            let named = containers.iter().flat_map(|it| &it.hooks.poststop);
            let named = named.map(|hook| PathBuf::from(&hook.path)).collect();
            tokio::task::spawn_blocking(move || copies.remove_unnamed(named));
        }
        if let Some(registry) = self.registry() {
            registry.reconnected();
        }
        // Exited containers are not in it: the CRI's lists are.
        if let Some(parts) = self.parts.get() {
            parts.missed.notify_one();
        }
        tracing::info!("connected to NRI");
    }

    async fn create_container(
        &self,
        pod: PodSandbox,
        container: Container,
    ) -> Result<ContainerAdjustment, Refusal> {
        let _handling = self.handling("CreateContainer");
        let Some((parts, driver)) = self.parts.get().zip(self.driver(&pod)) else {
            return Ok(ContainerAdjustment::new());
        };
        let name = name(&container);
        match Maker::of(&container.annotations) {
            Maker::Placeholder => return Ok(ContainerAdjustment::new()),
            Maker::Replay => {}
            Maker::Kubelet => driver
                .admit_create(&name)
                .map_err(|reason| Refusal::new(format!("reprise: {reason}")))?,
        }
        let wanted = driver.is_to_have_hook(&name);
        Ok(match parts.hook.as_deref().filter(|_| wanted) {
            Some(hook) => parts.hold(&driver.pod().sandbox, hook),
            None => ContainerAdjustment::new(),
        })
    }

    async fn post_create_container(&self, pod: PodSandbox, container: Container) {
        let _handling = self.handling("PostCreateContainer");
        let Some(driver) = self.driver(&pod) else {
            return;
        };
        if !is_placeholder(&container) {
            driver.was_made(&name(&container), is_hooked(&container));
        }
        self.note(&driver, &container);
    }

    async fn post_start_container(&self, pod: PodSandbox, container: Container) {
        let _handling = self.handling("PostStartContainer");
        if let Some(driver) = self.driver(&pod) {
            // It may have been made before this plugin was there.
            self.note(&driver, &container);
            driver.started(&id(&container));
        }
    }

    async fn stop_container(&self, _pod: PodSandbox, container: Container) {
        let _handling = self.handling("StopContainer");
        // Also sent when a stop begins, and before containerd 2.3 without saying so.
        let stopped = container.state.enum_value() == Ok(ContainerState::CONTAINER_STOPPED);
        if let Some(registry) = self.registry().filter(|_| stopped) {
            registry.ended(&id(&container), Some(ExitCode(container.exit_code)));
        }
    }

    async fn remove_container(&self, _pod: PodSandbox, container: Container) {
        let _handling = self.handling("RemoveContainer");
        if let Some(registry) = self.registry() {
            registry.removed(&id(&container));
        }
    }

    async fn stop_pod_sandbox(&self, pod: PodSandbox) {
        let _handling = self.handling("StopPodSandbox");
        self.sandbox_is_gone(&pod);
    }

    async fn remove_pod_sandbox(&self, pod: PodSandbox) {
        let _handling = self.handling("RemovePodSandbox");
        self.sandbox_is_gone(&pod);
    }
}

fn id(container: &Container) -> ContainerId {
    container.id.as_str().into()
}

/// To the kubelet: a placeholder has another name in the runtime.
fn name(container: &Container) -> ContainerName {
    let labelled = container.labels.get(CONTAINER_NAME);
    labelled.unwrap_or(&container.name).as_str().into()
}

/// From the specification that the container was made from: an answer that was late has not adjusted it.
fn is_hooked(container: &Container) -> bool {
    hooks(container).next().is_some()
}

fn hooks(container: &Container) -> impl Iterator<Item = &Hook> {
    let hooks = container.hooks.poststop.iter();
    hooks.filter(|hook| HookArgs::are_ours(&hook.args))
}

fn is_placeholder(container: &Container) -> bool {
    Maker::of(&container.annotations) == Maker::Placeholder
}
