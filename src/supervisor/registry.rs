//! The pods with restart rules on this node, each with its driver, and the way from news to the right one.

use std::collections::{HashMap, HashSet};
use std::pin::pin;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use tokio::time::error::Elapsed;
use tokio::time::{sleep, timeout};

use super::stops::{Patience, Stop};
use super::stranded;
use crate::back_off::Past;
use crate::clock;
use crate::cri::{self, ContainerSummary, SandboxSummary};
use crate::driver::{Charge, Driver, Tools};
use crate::exit_hold::hook::HookArgs;
use crate::exit_hold::{Hold, HoldDecision, HoldRequest};
use crate::ids::{ContainerId, ExitCode, PodIdentity, PodKey, PodUid, SandboxId};
use crate::kube::{KubeletFeatures, PodChange, PodSpec, Pods};
use crate::node::{self, Instance, InstanceState, Maker};
use crate::policy::{self, Unread};
use crate::restart::machine::Record;
use crate::text;

/// How long the API server may take to tell of the node's pods, where something depends on it.
const API_LIMIT: Duration = Duration::from_secs(2);
/// How long it is waited for that no exit is held, on a node where one pod or another restarts all the time, and between two
/// looks.
const HOLDS_LIMIT: Duration = Duration::from_secs(30);
const RELEASE_INTERVAL: Duration = Duration::from_millis(10);
/// How long a plugin that was asked to end waits for kills of what the kubelet would start again without it, and between two
/// looks.
const HIDDEN_LIMIT: Duration = Duration::from_secs(2);
const HIDDEN_INTERVAL: Duration = Duration::from_millis(20);
/// How long a plugin that was asked to end says nothing of what it waits for.
const SAY_AFTER: Duration = Duration::from_secs(2);
/// How long it waits after that.
const STARTS_LIMIT: Duration = Duration::from_secs(8);
/// How long a plugin without a successor waits for restarts under way, and between two looks.
const RESTARTS_LIMIT: Duration = Duration::from_secs(12);
const RESTARTS_INTERVAL: Duration = Duration::from_millis(50);
/// Between two looks whether containers are still being stopped.
const STOPS_INTERVAL: Duration = Duration::from_secs(1);

/// On the sandboxes of static pods: where the kubelet has them from (`pkg/kubelet/types/pod_update.go`).
const CONFIG_SOURCE: &str = "kubernetes.io/config.source";

/// All pods with restart rules.
#[derive(Debug)]
pub struct Registry {
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
    /// Runtime handlers of whose containers no exit can be held.
    without_hold: HashSet<String>,
    /// Containers of which the runtime does not tell all, which has been said.
    untold: HashSet<ContainerId>,
    /// What a predecessor left is in our hands.
    taken_over: bool,
    pasts: HashMap<SandboxId, Past>,
    by_sandbox: HashMap<SandboxId, Arc<Driver>>,
    of_container: HashMap<ContainerId, SandboxId>,
}

impl Registry {
    /// An empty registry. `pasts`: the restarts of pods under another plugin.
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

    /// The driver of this pod, made when there is something to do for it and it is seen for the first time. Whatever its
    /// annotations are, nobody waits for them to be read.
    pub fn adopt<'a, A>(&self, pod: &Sighting<'a, A>) -> Option<Arc<Driver>>
    where
        A: Iterator<Item = (&'a String, &'a String)> + Clone,
    {
        self.adopt_if(pod, false)
    }

    /// The same. `restarts`: a predecessor has left a restart of it, for which somebody may have asked.
    fn adopt_if<'a, A>(&self, pod: &Sighting<'a, A>, restarts: bool) -> Option<Arc<Driver>>
    where
        A: Iterator<Item = (&'a String, &'a String)> + Clone,
    {
        let annotations = pod.annotations.clone();
        let annotated = policy::has_rules(annotations.map(|(key, _)| key.as_str()));
        let identity = identity(pod);
        let spec = self.pods.get(&identity.key, &identity.uid);
        if !(annotated || restarts || spec.as_ref().is_some_and(|spec| is_for_us(spec))) {
            return None;
        }
        if let Some(known) = self.read(|entries| entries.by_sandbox.get(pod.sandbox).cloned()) {
            return Some(known);
        }
        let annotations = pod.annotations.clone();
        let annotations = annotations.map(|(key, value)| (key.as_str(), value.as_str()));
        let annotations = Unread::of(annotations);
        let mut source = pod.annotations.clone();
        let is_static = source.any(|(key, value)| key == CONFIG_SOURCE && value == "file");
        let driver = self.write(|entries| {
            let native = entries.native;
            let holdable = !entries.without_hold.contains(pod.handler);
            let past = entries.pasts.remove(pod.sandbox).unwrap_or_default();
            // Somebody else may have been first.
            let entry = entries.by_sandbox.entry(pod.sandbox.clone());
            let charge = || Charge {
                annotations,
                is_static,
                holdable,
                native,
                spec,
                past,
            };
            let spawn = || Driver::spawn(Arc::clone(&self.tools), identity, charge());
            Arc::clone(entry.or_insert_with(spawn))
        });
        Some(driver)
    }

    /// A container of a pod with rules was made.
    pub fn created(&self, driver: &Arc<Driver>, id: ContainerId, instance: Instance) {
        let sandbox = driver.pod().sandbox.clone();
        self.write(|entries| entries.of_container.insert(id.clone(), sandbox));
        self.may_be_held(driver, &id, instance.maker);
        driver.created(id, instance);
    }

    /// A container was removed.
    pub fn removed(&self, id: &ContainerId) {
        if let Some(driver) = self.driver_of(id) {
            driver.removed(id);
            self.write(|entries| entries.of_container.remove(id));
            self.forget([id]);
        }
    }

    /// Its exits are asked about from now on. Nobody waits for that of what is never started.
    fn may_be_held(&self, driver: &Driver, id: &ContainerId, maker: Maker) {
        if let Some(keeper) = self.tools.hold.keeper()
            && maker != Maker::Placeholder
        {
            let sandbox = &driver.pod().sandbox;
            keeper.hold(id.clone(), self.tools.records.marker(sandbox));
        }
    }

    fn forget<'a>(&self, ids: impl IntoIterator<Item = &'a ContainerId>) {
        if let Some(keeper) = self.tools.hold.keeper() {
            ids.into_iter().for_each(|id| keeper.forget(id.clone()));
        }
    }

    /// A container has ended.
    pub fn ended(&self, id: &ContainerId, code: Option<ExitCode>) {
        if let Some(driver) = self.driver_of(id) {
            driver.ended(id, code);
        }
    }

    /// The kernel has killed a process of a container because it was out of memory.
    pub fn oom_killed(&self, id: &ContainerId) {
        if let Some(driver) = self.driver_of(id) {
            driver.oom_killed(id);
        }
    }

    /// A hook asks.
    pub fn decide_hold(&self, request: &HoldRequest) -> HoldDecision {
        match self.driver_of(&request.container) {
            Some(driver) => driver.decide_hold(request),
            None => HoldDecision::Go,
        }
    }

    /// The runtime has taken the plugin in anew.
    pub fn reconnected(&self) {
        for driver in self.drivers() {
            driver.reconnected();
        }
    }

    /// Waits until no pod's exits are held, but not for long: others may come.
    pub async fn until_released(&self) -> Result<(), Elapsed> {
        let holds = |entries: &Entries| entries.by_sandbox.values().any(|driver| driver.holds());
        while_so(|| self.read(holds), RELEASE_INTERVAL, HOLDS_LIMIT).await
    }

    /// Whether a pod restarts.
    pub fn restarts(&self) -> bool {
        self.drivers().iter().any(|driver| driver.is_busy())
    }

    /// Whether the lists are worth a look in between. What was started while the gate is away is put in order when it is back.
    pub fn may_have_missed(&self) -> bool {
        self.tools.shared.gate.is_there() && self.restarts()
    }

    /// Waits until no pod restarts, but not for long: others may begin, and some wait for minutes.
    pub async fn until_restarts_are_over(&self) {
        let over = while_so(|| self.restarts(), RESTARTS_INTERVAL, RESTARTS_LIMIT);
        if over.await.is_err() {
            tracing::warn!("ending although pods restart: the kubelet goes on with them");
        }
    }

    /// Waits until what is being stopped and started has been. Nothing is started from then on: this process is about to end.
    pub async fn end_starts(&self) {
        // In a container what holds them ends with this process, and no successor can go on.
        if matches!(self.tools.hold, Hold::Holder(_)) && self.until_released().await.is_err() {
            tracing::warn!("ending although exits are held: the kubelet sees them");
        }
        // For a moment that is all but always shorter: others come, and nobody is to be kept from restarting for long.
        let hides = || self.drivers().iter().any(|driver| driver.hides());
        let hidden = while_so(hides, HIDDEN_INTERVAL, HIDDEN_LIMIT);
        if hidden.await.is_err() {
            tracing::warn!(
                "ending although containers are being stopped behind placeholders: some may run twice"
            );
        }
        let mut over = pin!(self.tools.starts.end());
        if timeout(SAY_AFTER, &mut over).await.is_ok() {
            return;
        }
        tracing::info!("ending as soon as the containers that are being started have been");
        if timeout(STARTS_LIMIT, over).await.is_err() {
            tracing::warn!("ending although containers are being started: some may fail to start");
        }
    }

    /// Waits, for as long as it takes and no longer, while containers are being stopped as far as anybody can tell.
    pub async fn until_stops_are_over(&self) {
        // As a rule it has told by now, and one that is away will not.
        let _ = timeout(API_LIMIT, self.pods.told()).await;
        let mut patience = Patience::new(clock::now());
        let mut said = false;
        loop {
            let stops = self.stops().await;
            let waits = patience.waits_for(&stops, clock::now());
            if waits.is_empty() {
                break;
            }
            if !std::mem::replace(&mut said, true) {
                let pods: Vec<_> = waits.iter().map(|stop| stop.pod.to_string()).collect();
                let pods = text::listed(&pods);
                let longest = waits.iter().map(|stop| stop.grace.as_secs()).max();
                tracing::warn!(
                    pods,
                    longest_grace_s = longest,
                    "containers are being stopped: NRI is left alone until they have, because to register now would freeze the node (containerd#14083); containers that are made meanwhile are not protected"
                );
            }
            sleep(STOPS_INTERVAL).await;
        }
        if said {
            tracing::info!(
                "no container is being stopped any more, or not for long: connecting to NRI"
            );
        }
    }

    /// Pods that end and whose containers run. None where the runtime does not answer: nothing is stopped there.
    async fn stops(&self) -> Vec<Stop> {
        let mut ending = self.pods.all();
        ending.retain(|spec| spec.ending);
        if ending.is_empty() {
            return Vec::new();
        }
        let lists = async {
            let cri = &self.tools.cri;
            let sandboxes = cri.list_sandboxes().await?;
            Ok::<_, cri::CriError>((sandboxes, cri.list_containers(None).await?))
        };
        let (sandboxes, containers) = lists.await.unwrap_or_default();
        let running = containers.iter();
        let running = running.filter(|it| it.state == cri::ContainerState::Running);
        let running: HashSet<&SandboxId> = running.map(|it| &it.sandbox).collect();
        let running = sandboxes.iter().filter(|it| running.contains(&it.id));
        let running: HashSet<&PodUid> = running.map(|it| &it.uid).collect();
        let stopping = ending.iter().filter(|spec| running.contains(&spec.uid));
        let stops = stopping.map(|spec| Stop {
            uid: spec.uid.clone(),
            pod: spec.key.clone(),
            grace: spec.grace,
        });
        stops.collect()
    }

    /// A sandbox was stopped or removed: its pod is over.
    pub fn sandbox_stopped(&self, sandbox: &SandboxId) {
        let (driver, gone) = self.write(|entries| {
            let gone = entries.of_container.extract_if(|_, of| of == sandbox);
            let gone: Vec<_> = gone.map(|(id, _)| id).collect();
            (entries.by_sandbox.remove(sandbox), gone)
        });
        self.forget(&gone);
        if let Some(driver) = driver {
            if driver.is_busy() {
                self.free_stranded(driver.pod().clone());
            }
            driver.close();
        }
    }

    /// The sandbox of that pod is gone in the middle of a restart.
    fn free_stranded(&self, pod: PodIdentity) {
        let (tools, pods) = (Arc::clone(&self.tools), self.pods.clone());
        tokio::spawn(stranded::free(tools, pods, pod));
    }

    /// The API tells of a pod. Returns whether the runtime should be asked about it: its spec has rules, and it may
    /// have containers that nobody looks after.
    pub fn pod_changed(&self, change: PodChange) -> bool {
        match change {
            PodChange::Applied(spec) => {
                let drivers = self.drivers_of(&spec);
                for driver in &drivers {
                    driver.spec_changed(Arc::clone(&spec));
                }
                self.end_condition(&spec, &drivers);
                drivers.is_empty() && is_for_us(&spec)
            }
            PodChange::Deleted(spec) => {
                for driver in self.drivers_of(&spec) {
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

    /// No condition stays True for a restart that nobody carries out: a plugin may have died in between. What this process
    /// has set it takes back itself, and may be told of after that.
    fn end_conditions(&self) {
        for spec in self.pods.all() {
            let drivers = self.drivers_of(&spec);
            self.end_condition(&spec, &drivers);
        }
    }

    fn end_condition(&self, spec: &PodSpec, drivers: &[Arc<Driver>]) {
        let ours = drivers.iter().any(|driver| driver.sets_conditions());
        // Before that, what a predecessor began may yet go on.
        let native = self.read(|entries| entries.native.filter(|_| entries.taken_over));
        if let Some(native) = native.filter(|_| !ours) {
            self.tools.reporter.end_conditions(spec, native);
        }
    }

    /// Compares with what the runtime has. `records`: restarts that a predecessor left, the first time.
    ///
    /// Fails where the runtime as a whole does not answer, and no driver has heard of anything then. What cannot be learnt of
    /// one container keeps nobody from looking after the others.
    pub async fn relist(&self, mut records: Vec<Record>) -> Result<(), cri::CriError> {
        let asked = clock::now();
        match self.tools.cri.handlers_without_hold().await {
            Ok(handlers) => self.write(|entries| entries.without_hold = handlers),
            Err(error) => {
                self.excuse(
                    error,
                    None,
                    "under which runtime handlers exits can be held",
                )
                .await?;
            }
        }
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
        let mut seen = Vec::new();
        for sandbox in &ready {
            let mut left = records.iter().map(|record| &record.plan.pod.sandbox);
            let restarts = left.any(|it| *it == sandbox.id);
            let Some(driver) = self.adopt_if(&sighting(sandbox), restarts) else {
                continue;
            };
            // A restart that a predecessor left goes by them.
            driver.until_read().await;
            let mut found = Vec::new();
            for container in containers.iter().filter(|it| it.sandbox == sandbox.id) {
                let instance = self.instance(&driver, container).await?;
                found.push((container.id.clone(), instance));
            }
            seen.push((driver, found));
        }
        // The first time is before NRI has taken this plugin in: another one may be at work.
        let sweep = self.read(|entries| entries.taken_over);
        for (driver, found) in seen {
            let sandbox = &driver.pod().sandbox;
            self.write(|entries| {
                for (id, _) in &found {
                    entries.of_container.insert(id.clone(), sandbox.clone());
                }
            });
            for (id, instance) in &found {
                self.may_be_held(&driver, id, instance.maker);
            }
            let begun = records
                .iter()
                .position(|record| record.plan.pod.sandbox == *sandbox)
                .map(|index| records.swap_remove(index));
            driver.relisted(found, asked, begun, sweep);
            // What was removed while nobody told of it.
            let gone: Vec<_> = self.write(|entries| {
                let of_container = &mut entries.of_container;
                let gone = of_container
                    .extract_if(|id, of| of == sandbox && driver.instance(id).is_none());
                gone.map(|(id, _)| id).collect()
            });
            self.forget(&gone);
        }
        let there: HashSet<SandboxId> = ready.iter().map(|it| it.id.clone()).collect();
        self.write(|entries| {
            entries.pasts.retain(|id, _| there.contains(id));
            let of_container = &entries.of_container;
            entries.untold.retain(|id| of_container.contains_key(id));
        });
        self.tools.records.forget_pasts(there).await;
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
            self.tools.records.forget(sandbox.clone()).await;
            self.free_stranded(record.plan.pod);
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
                    Err(error) => {
                        self.excuse(error, Some((driver, container)), "its exit code")
                            .await?;
                        InstanceState::Ended(None)
                    }
                }
            }
        };
        let maker = Maker::of(&container.annotations);
        let known = driver.instance(&container.id);
        let hooked = match driver
            .is_held_without_hook()
            .or(known.and_then(|it| it.hooked))
        {
            None if state == InstanceState::Running && maker != Maker::Placeholder => {
                self.is_hooked(driver, container).await?
            }
            known => known,
        };
        Ok(Instance {
            name: container.name.clone(),
            state,
            maker,
            attempt: node::attempt(&container.annotations),
            created_at: container.created_at,
            heard_at: clock::now(),
            started_at: None,
            listed: true,
            hooked,
        })
    }

    /// Whether the runtime runs our hook when this container ends; `None`: it does not tell, or the container is gone.
    ///
    /// Where that cannot be learnt, it is taken for no. If it is yes after all, the restart is only slower: nothing is
    /// replayed, and what shields the exit is made before anything is killed; an exit whose hook asks is held as ever. To
    /// take it for yes would be to kill what cannot be held before it is shielded, and to wait for hooks that never come.
    async fn is_hooked(
        &self,
        driver: &Driver,
        container: &ContainerSummary,
    ) -> Result<Option<bool>, cri::CriError> {
        match self.tools.cri.poststop_hooks(&container.id).await {
            Ok(hooks) => Ok(hooks.map(|hooks| hooks.iter().any(|args| HookArgs::are_ours(args)))),
            Err(cri::CriError::Gone { .. }) => Ok(None),
            Err(error) => {
                let what = "whether its exit can be held, which is taken for no";
                self.excuse(error, Some((driver, container)), what).await?;
                Ok(Some(false))
            }
        }
    }

    /// What the runtime does not tell of one container is no reason to ask all over again, unless it tells nothing at all.
    async fn excuse(
        &self,
        error: cri::CriError,
        of: Option<(&Driver, &ContainerSummary)>,
        what: &str,
    ) -> Result<(), cri::CriError> {
        let away = match &error {
            cri::CriError::Away { .. } => true,
            // It may be this one container that it has stalled over.
            cri::CriError::Deadline { .. } => self.tools.cri.version().await.is_err(),
            _ => false,
        };
        if away {
            return Err(error);
        }
        match of {
            Some((_, container))
                if !self.write(|entries| entries.untold.insert(container.id.clone())) => {}
            Some((driver, container)) => {
                let pod = &driver.pod().key;
                tracing::warn!(%pod, container = %container.name, id = %container.id, %error, "the runtime does not tell of a container {what}");
            }
            None => tracing::warn!(%error, "the runtime does not tell {what}"),
        }
        Ok(())
    }

    fn drivers(&self) -> Vec<Arc<Driver>> {
        self.read(|entries| entries.by_sandbox.values().cloned().collect())
    }

    fn driver_of(&self, id: &ContainerId) -> Option<Arc<Driver>> {
        self.read(|entries| {
            let sandbox = entries.of_container.get(id)?;
            entries.by_sandbox.get(sandbox).cloned()
        })
    }

    /// Those of this very pod: a UID alone proves nothing.
    fn drivers_of(&self, spec: &PodSpec) -> Vec<Arc<Driver>> {
        self.read(|entries| {
            let drivers = entries.by_sandbox.values();
            drivers
                .filter(|driver| driver.pod().uid == spec.uid && driver.pod().key == spec.key)
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

fn identity<A>(pod: &Sighting<'_, A>) -> PodIdentity {
    PodIdentity {
        sandbox: pod.sandbox.clone(),
        uid: pod.uid.into(),
        key: PodKey {
            namespace: pod.namespace.to_owned(),
            name: pod.name.to_owned(),
        },
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

/// Whether the pod's own spec has rules, or somebody asks for its restart.
fn is_for_us(spec: &PodSpec) -> bool {
    spec.request.is_some() || spec.containers.iter().any(|it| !it.rules.is_empty())
}

/// Waits until it is not so any more, and looks every `interval`.
async fn while_so(
    so: impl Fn() -> bool,
    interval: Duration,
    limit: Duration,
) -> Result<(), Elapsed> {
    let over = async {
        while so() {
            sleep(interval).await;
        }
    };
    timeout(limit, over).await
}

#[cfg(test)]
mod stranger_tests;
#[cfg(test)]
mod tests;
