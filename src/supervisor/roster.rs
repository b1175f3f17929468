//! The pods with restart rules on this node, each with its driver, and the way from news to the right one.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, PoisonError, RwLock};

use serde_json::Value;

use crate::cri::{self, ContainerSummary, SandboxSummary};
use crate::exit_hold::hook::HookArgs;
use crate::exit_hold::{Answer, Knock};
use crate::ids::{ContainerId, ExitCode, PodIdentity, PodKey, PodUid, SandboxId};
use crate::kube::{KubeletFeatures, PodChange, PodSpec, Pods};
use crate::node::{Instance, InstanceState, PLACEHOLDER_ANNOTATION, now_ns};
use crate::policy;
use crate::restart::back_off::Past;
use crate::restart::driver::{Charge, Driver, Tools};
use crate::restart::record::Record;

/// On the sandboxes of static pods: where the kubelet has them from (`pkg/kubelet/types/pod_update.go`).
const CONFIG_SOURCE: &str = "kubernetes.io/config.source";

/// All pods with restart rules.
#[derive(Debug)]
pub struct Roster {
    tools: Arc<Tools>,
    pods: Pods,
    entries: RwLock<Entries>,
}

/// A pod as NRI or the CRI shows it.
#[derive(Debug)]
pub struct Sighting<'a, A> {
    /// Its sandbox.
    pub sandbox: &'a SandboxId,
    /// Its UID as the kubelet knows it.
    pub uid: &'a str,
    /// Its namespace.
    pub namespace: &'a str,
    /// Its name.
    pub name: &'a str,
    /// Its runtime class' handler; empty for the default.
    pub handler: &'a str,
    /// Its annotations when the sandbox was made.
    pub annotations: A,
}

#[derive(Debug, Default)]
struct Entries {
    /// What the kubelet does by itself, once the API server has told.
    native: Option<KubeletFeatures>,
    /// Runtime handlers that run no hooks.
    hookless: HashSet<String>,
    /// What a predecessor left is in our hands.
    taken_over: bool,
    pasts: HashMap<SandboxId, Past>,
    /// `None`: the pod's rules cannot be used, which has been said once.
    by_sandbox: HashMap<SandboxId, Option<Arc<Driver>>>,
    of_container: HashMap<ContainerId, SandboxId>,
}

impl Roster {
    /// An empty roster. `pasts`: the restarts of pods under another plugin.
    #[must_use]
    pub fn new(tools: Arc<Tools>, pods: Pods, pasts: HashMap<SandboxId, Past>) -> Self {
        Self {
            tools,
            pods,
            entries: RwLock::new(Entries {
                pasts,
                ..Entries::default()
            }),
        }
    }

    /// The driver of this pod, made when the pod has rules and is seen for the first time.
    pub fn adopt<'a, A>(&self, pod: &Sighting<'a, A>) -> Option<Arc<Driver>>
    where
        A: Iterator<Item = (&'a String, &'a String)> + Clone,
    {
        let annotations = pod.annotations.clone();
        let annotated = policy::has_rules(annotations.map(|(key, _)| key.as_str()));
        let uid = PodUid::from(pod.uid);
        let spec = self.pods.get(&uid);
        if !annotated && spec.as_ref().is_none_or(|spec| !has_rules(spec)) {
            return None;
        }
        if let Some(known) = self.read(|entries| entries.by_sandbox.get(pod.sandbox).cloned()) {
            return known;
        }
        self.write(|entries| {
            let native = entries.native;
            let runs_hooks = !entries.hookless.contains(pod.handler);
            let past = entries.pasts.remove(pod.sandbox).unwrap_or_default();
            // Somebody else may have been first.
            let entry = entries.by_sandbox.entry(pod.sandbox.clone());
            entry
                .or_insert_with(|| {
                    let charge = charge(pod, native, runs_hooks, spec, past);
                    Driver::spawn(Arc::clone(&self.tools), identity(pod, uid), charge)
                })
                .clone()
        })
    }

    /// A container of a pod with rules was made.
    pub fn created(&self, driver: &Arc<Driver>, id: ContainerId, instance: Instance) {
        let sandbox = driver.pod().sandbox.clone();
        self.write(|entries| entries.of_container.insert(id.clone(), sandbox));
        driver.created(id, instance);
    }

    /// A container was removed.
    pub fn removed(&self, id: &ContainerId) {
        if let Some(driver) = self.driver_of(id) {
            driver.removed(id);
            self.write(|entries| entries.of_container.remove(id));
        }
    }

    /// A container has ended.
    pub fn ended(&self, id: &ContainerId, code: Option<ExitCode>) {
        if let Some(driver) = self.driver_of(id) {
            driver.ended(id, code);
        }
    }

    /// A hook asks.
    pub fn knock(&self, knock: &Knock) -> Answer {
        match self.driver_of(&knock.container) {
            Some(driver) => driver.knock(knock),
            None => Answer::Go,
        }
    }

    /// Whether any pod's exits are held.
    pub fn holds(&self) -> bool {
        self.read(|entries| {
            let mut drivers = entries.by_sandbox.values().flatten();
            drivers.any(|driver| driver.holds())
        })
    }

    /// A sandbox was stopped or removed: its pod is over.
    pub fn sandbox_stopped(&self, sandbox: &SandboxId) {
        let driver = self.write(|entries| {
            entries.of_container.retain(|_, of| of != sandbox);
            entries.by_sandbox.remove(sandbox).flatten()
        });
        if let Some(driver) = driver {
            driver.close();
        }
    }

    /// The API tells of a pod. Returns whether the runtime should be asked about it: its spec has rules, and it may
    /// have containers that nobody looks after.
    pub fn pod_changed(&self, change: PodChange) -> bool {
        match change {
            PodChange::Applied(spec) => {
                let drivers = self.drivers_of(&spec.uid);
                for driver in &drivers {
                    driver.spec_changed(Arc::clone(&spec));
                }
                self.end_condition(&spec, &drivers);
                drivers.is_empty() && has_rules(&spec)
            }
            PodChange::Deleted(uid) => {
                for driver in self.drivers_of(&uid) {
                    driver.deleted();
                }
                false
            }
        }
    }

    /// The API tells what the kubelet does by itself.
    pub fn features_changed(&self, native: KubeletFeatures) {
        self.write(|entries| entries.native = Some(native));
        self.tools.reporter.features(native);
        for driver in self.drivers() {
            driver.features_changed(native);
        }
        self.end_conditions();
    }

    /// No condition stays True for a restart that nobody carries out: a plugin may have died in between.
    fn end_conditions(&self) {
        for spec in self.pods.all() {
            let drivers = self.drivers_of(&spec.uid);
            self.end_condition(&spec, &drivers);
        }
    }

    fn end_condition(&self, spec: &PodSpec, drivers: &[Arc<Driver>]) {
        let busy = drivers.iter().any(|driver| driver.is_busy());
        // Before that, what a predecessor began may yet go on.
        let native = self.read(|entries| entries.native.filter(|_| entries.taken_over));
        if let Some(native) = native.filter(|_| !busy) {
            self.tools.reporter.end_conditions(spec, native);
        }
    }

    /// Compares with what the runtime has. `records`: restarts that a predecessor left, the first time.
    pub async fn relist(&self, mut records: Vec<Record>) -> Result<(), cri::CriError> {
        let asked = now_ns();
        let hookless = self.tools.cri.handlers_without_hooks().await?;
        self.write(|entries| entries.hookless = hookless);
        let sandboxes = self.tools.cri.list_sandboxes().await?;
        let containers = self.tools.cri.list_containers(None).await?;
        let ready: Vec<&SandboxSummary> = sandboxes
            .iter()
            .filter(|it| it.state == cri::SandboxState::Ready)
            .collect();
        let gone: Vec<SandboxId> = self.read(|entries| {
            let known = entries.by_sandbox.keys();
            known
                .filter(|id| !ready.iter().any(|it| it.id == **id))
                .cloned()
                .collect()
        });
        for sandbox in gone {
            self.sandbox_stopped(&sandbox);
        }
        for sandbox in &ready {
            let Some(driver) = self.adopt(&sighting(sandbox)) else {
                continue;
            };
            let mut found = Vec::new();
            for container in containers.iter().filter(|it| it.sandbox == sandbox.id) {
                let instance = self.instance(&driver, container).await?;
                found.push((container.id.clone(), instance));
            }
            self.write(|entries| {
                for (id, _) in &found {
                    entries.of_container.insert(id.clone(), sandbox.id.clone());
                }
            });
            let begun = records
                .iter()
                .position(|record| record.plan.pod.sandbox == sandbox.id)
                .map(|index| records.swap_remove(index));
            // The first time is before NRI has taken this plugin in: another one may be at work.
            let sweep = self.read(|entries| entries.taken_over);
            driver.relisted(found, asked, begun, sweep);
        }
        let there = ready.iter().map(|it| it.id.clone()).collect();
        if let Err(error) = self.tools.records.forget_pasts(&there) {
            tracing::warn!(%error, "could not remove the back-off of pods that are gone");
        }
        for record in records {
            // Its sandbox is gone or stopped, and so is everything that the record was for.
            let sandbox = &record.plan.pod.sandbox;
            let unstarted = containers.iter().filter(|it| it.sandbox == *sandbox);
            let unstarted = unstarted.filter(|it| it.state == cri::ContainerState::Created);
            for container in unstarted {
                if let Err(error) = self.tools.cri.remove_container(&container.id).await {
                    tracing::warn!(pod = %record.plan.pod.key, container = %container.id, %error, "could not remove what was never started");
                }
            }
            if let Err(error) = self.tools.records.forget(&record.plan.pod.sandbox) {
                tracing::warn!(pod = %record.plan.pod.key, %error, "could not remove the record of a pod that is gone");
            }
        }
        if !self.write(|entries| std::mem::replace(&mut entries.taken_over, true)) {
            self.end_conditions();
        }
        Ok(())
    }

    async fn instance(
        &self,
        driver: &Driver,
        container: &ContainerSummary,
    ) -> Result<Instance, cri::CriError> {
        let state = match container.state {
            cri::ContainerState::Created => InstanceState::Created,
            cri::ContainerState::Running | cri::ContainerState::Unknown => InstanceState::Running,
            cri::ContainerState::Exited => {
                match self.tools.cri.container_status(&container.id).await {
                    Ok(status) => InstanceState::Ended(status.exit_code),
                    Err(cri::CriError::Gone { .. }) => InstanceState::Ended(None),
                    Err(error) => return Err(error),
                }
            }
        };
        let placeholder = container.annotations.contains_key(PLACEHOLDER_ANNOTATION);
        let hooked = match driver.is_hooked(&container.id) {
            None if state == InstanceState::Running && !placeholder => {
                self.is_hooked(&container.id).await?
            }
            known => known,
        };
        Ok(Instance {
            name: container.name.clone(),
            state,
            placeholder,
            created_at: container.created_at,
            hooked,
        })
    }

    /// Whether the runtime runs our hook when this container ends; `None`: it does not tell, or the container is gone.
    async fn is_hooked(&self, id: &ContainerId) -> Result<Option<bool>, cri::CriError> {
        let info = match self.tools.cri.container_info(id).await {
            Ok(info) => info,
            Err(cri::CriError::Gone { .. }) => None,
            Err(error) => return Err(error),
        };
        let spec = info.as_ref().and_then(|info| info.get("runtimeSpec"));
        Ok(spec.map(|spec| {
            let hooks = spec.pointer("/hooks/poststop").and_then(Value::as_array);
            hooks.into_iter().flatten().any(|hook| {
                let args = hook["args"].as_array().into_iter().flatten();
                let args: Vec<&str> = args.filter_map(Value::as_str).collect();
                HookArgs::are_ours(&args)
            })
        }))
    }

    fn drivers(&self) -> Vec<Arc<Driver>> {
        self.read(|entries| entries.by_sandbox.values().flatten().cloned().collect())
    }

    fn driver_of(&self, id: &ContainerId) -> Option<Arc<Driver>> {
        self.read(|entries| {
            let sandbox = entries.of_container.get(id)?;
            entries.by_sandbox.get(sandbox).cloned().flatten()
        })
    }

    fn drivers_of(&self, uid: &PodUid) -> Vec<Arc<Driver>> {
        self.read(|entries| {
            let drivers = entries.by_sandbox.values().flatten();
            drivers
                .filter(|driver| driver.pod().uid == *uid)
                .cloned()
                .collect()
        })
    }

    fn read<T>(&self, with: impl FnOnce(&Entries) -> T) -> T {
        with(&self.entries.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn write<T>(&self, with: impl FnOnce(&mut Entries) -> T) -> T {
        with(&mut self.entries.write().unwrap_or_else(PoisonError::into_inner))
    }
}

fn identity<A>(pod: &Sighting<'_, A>, uid: PodUid) -> PodIdentity {
    PodIdentity {
        sandbox: pod.sandbox.clone(),
        uid,
        key: PodKey {
            namespace: pod.namespace.to_owned(),
            name: pod.name.to_owned(),
        },
    }
}

fn charge<'a, A>(
    pod: &Sighting<'a, A>,
    native: Option<KubeletFeatures>,
    runs_hooks: bool,
    spec: Option<Arc<PodSpec>>,
    past: Past,
) -> Charge
where
    A: Iterator<Item = (&'a String, &'a String)> + Clone,
{
    let annotations = || pod.annotations.clone();
    let ours = annotations().filter(|(key, _)| policy::is_ours(key));
    Charge {
        annotations: ours
            .map(|(key, value)| (key.clone(), value.clone()))
            .collect(),
        is_static: annotations().any(|(key, value)| key == CONFIG_SOURCE && value == "file"),
        runs_hooks,
        native,
        spec,
        past,
    }
}

fn sighting(
    sandbox: &SandboxSummary,
) -> Sighting<'_, impl Iterator<Item = (&String, &String)> + Clone> {
    Sighting {
        sandbox: &sandbox.id,
        uid: sandbox.uid.as_str(),
        namespace: &sandbox.pod.namespace,
        name: &sandbox.pod.name,
        handler: &sandbox.runtime_handler,
        annotations: sandbox.annotations.iter(),
    }
}

/// Whether the pod's own spec has rules.
fn has_rules(spec: &PodSpec) -> bool {
    spec.containers.iter().any(|it| !it.rules.is_empty())
}
