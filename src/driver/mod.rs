//! Carries out what is decided about one pod, and tells what came of it.
//!
//! One driver a pod. Its lock is held only to tell the [`Pod`] something and to take note of what is to be done; calls to
//! the runtime, the disk and the API are made by tasks that own nothing of the pod.

mod bounds;
mod exits;
mod hooks;
mod hosts;
mod lifecycle;
mod perform;
mod placeholder;
mod processes;
mod replay;
mod starts;
mod stop;
#[cfg(test)]
pub(crate) mod stranger_tests;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
mod told;
pub mod turns;

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Instant;

use rustix::process::setpriority_process;
use tokio::sync::{Notify, Semaphore, SemaphorePermit, mpsc, oneshot, watch};
use tokio::task::{AbortHandle, JoinHandle, spawn_blocking};

use crate::back_off::Past;
use crate::clock::{self, Clock, Moment};
use crate::cri::{self, Containerd};
use crate::exit_hold::{self, Hold, HoldDecision, HoldRequest};
use crate::ids::{ContainerId, ContainerName, Exit, ExitCode, PodIdentity};
use crate::kube::{Endings, KubeletFeatures, Manifest, PodSpec, StaticPods};
use crate::metrics::{Counted, Metrics};
use crate::node::Instance;
use crate::policy::{Unread, Written};
use crate::records::Records;
use crate::report::{Reporter, Unprotected};
use crate::restart::Refused;
use crate::restart::machine::{Event, Record};
use crate::restart::pod::{Order, Pod, Shared, Task};
use bounds::Bounds;
use hooks::Hooks;
use placeholder::Placeholders;
use replay::Replay;
pub use starts::Starts;
use told::Told;
use turns::{Exposed, Turn, Turns};

/// What all drivers use.
#[derive(Debug)]
pub struct Tools {
    /// The runtime.
    pub cri: cri::Client,
    /// The same, if it is containerd.
    pub containerd: Option<Containerd>,
    /// How exits are held.
    pub hold: Hold,
    /// What is decided with, the same for all pods.
    pub shared: Arc<Shared>,
    /// Which pods restart at once.
    pub turns: Turns,
    /// Restarts on disk.
    pub records: Records,
    /// Logs, events and conditions.
    pub reporter: Reporter,
    /// What is counted and measured.
    pub metrics: Arc<Metrics>,
    /// Which pods the kubelet is ending, if there is an API server.
    pub endings: Option<Endings>,
    /// Where the kubelet has its static pods from.
    pub static_pods: StaticPods,
    /// What is measured across processes is measured by it.
    pub clock: Clock,
    /// Whose turn it is to have its annotations read.
    pub readers: Readers,
    /// What is being started.
    pub starts: Starts,
}

/// Of long annotations, those of one pod are read at a time: however many there are, and whatever is in them, they take one
/// core that nobody else wants, the memory of one, and nothing from those of usual length.
#[derive(Debug)]
pub struct Readers(Semaphore);

impl Readers {
    /// What is no longer takes less than a millisecond.
    const USUAL: usize = 2 * 1024;
    /// The nice value of the thread that reads what is longer: whoever answers the runtime goes before it.
    const NICE: i32 = 10;

    /// `None` if that cannot be done.
    async fn read(&self, annotations: Unread) -> Option<Written> {
        if annotations.len() <= Self::USUAL {
            let written = spawn_blocking(move || Written::read(&annotations));
            return written.await.ok();
        }
        let _turn = self.turn().await;
        let (send, written) = oneshot::channel();
        let read = move || {
            // It is slower for others without.
            let _ = setpriority_process(None, Self::NICE);
            let _ = send.send(Written::read(&annotations));
        };
        thread::Builder::new().spawn(read).ok()?;
        written.await.ok()
    }

    async fn turn(&self) -> Option<SemaphorePermit<'_>> {
        // Nobody closes it.
        self.0.acquire().await.ok()
    }
}

impl Default for Readers {
    fn default() -> Self {
        Self(Semaphore::new(1))
    }
}

/// What is known of a pod when it is first seen.
#[derive(Debug)]
pub struct Charge {
    /// Its annotations when its sandbox was made: they cannot change any more.
    pub annotations: Unread,
    /// Whether it comes from a manifest on this node.
    pub is_static: bool,
    /// Whether exits can be held under its runtime handler.
    pub holdable: bool,
    /// What the kubelet does by itself; `None`: the API server has not told.
    pub native: Option<KubeletFeatures>,
    /// Its spec, if the API server has told.
    pub spec: Option<Arc<PodSpec>>,
    /// Its restarts under another plugin.
    pub past: Past,
}

/// The restarts of one pod.
#[derive(Debug)]
pub struct Driver {
    tools: Arc<Tools>,
    pod: PodIdentity,
    placeholders: Placeholders,
    bounds: Bounds,
    hosts: hosts::Known,
    /// Whether exits can be held under its runtime handler.
    holdable: bool,
    state: Mutex<State>,
    /// Its annotations have been read.
    read: watch::Sender<bool>,
    jobs: mpsc::UnboundedSender<Job>,
    /// The pod's deadline has changed.
    retimed: Notify,
}

/// A container is being ended.
#[derive(Debug)]
struct Kill {
    /// Until then it may end by itself.
    until: tokio::time::Instant,
    task: AbortHandle,
}

/// A hook waits until this is dropped.
#[derive(Debug)]
struct Waiting {
    hook: oneshot::Sender<()>,
    since: Instant,
    metrics: Arc<Metrics>,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let held = clock::now().saturating_duration_since(self.since);
        self.metrics.exit_held(held.min(exit_hold::LIMIT));
    }
}

#[derive(Debug)]
struct State {
    pod: Pod,
    hooks: Hooks,
    /// Whoever asks about an exit, more than one at times, until it may be seen.
    waiting: HashMap<ContainerId, Vec<Waiting>>,
    kills: HashMap<ContainerId, Kill>,
    /// Containers that are being removed: once is enough.
    sweeping: HashSet<ContainerId>,
    /// What the restart under way is replayed from.
    replay: Option<Arc<Replay>>,
    /// Until its first containers have been started: the others follow when an init container has ended, which nobody
    /// waits for.
    turn: Option<Turn>,
    /// While others had better wait for what shields it.
    exposed: Option<Exposed>,
    /// While it restarts, and while that waits for a back-off.
    under_way: Option<Counted>,
    backing_off: Option<Counted>,
    /// A condition was set: what the API tells of it may be older, and no predecessor's.
    announced: bool,
    told: Told,
}

impl State {
    /// Has this container ended by `then`, unless it is about to be by then already.
    fn end(
        &mut self,
        id: &ContainerId,
        then: tokio::time::Instant,
        begin: impl FnOnce() -> JoinHandle<()>,
    ) {
        let kill = self.kills.get(id);
        if kill.is_some_and(|kill| kill.until <= then) {
            return;
        }
        let task = begin().abort_handle();
        let kill = Kill { until: then, task };
        if let Some(before) = self.kills.insert(id.clone(), kill) {
            before.task.abort();
        }
    }
}

#[derive(Debug)]
enum Job {
    Do(Order),
    Close,
}

impl Driver {
    /// Takes charge of a pod. Whatever its annotations are, this takes no time: they are read meanwhile. Must be called on
    /// the async runtime.
    #[must_use]
    pub fn spawn(tools: Arc<Tools>, pod: PodIdentity, charge: Charge) -> Arc<Self> {
        let (jobs, queue) = mpsc::unbounded_channel();
        let unread = !charge.annotations.is_empty();
        let without = match tools.hold {
            _ if !charge.holdable => Some(Unprotected::ItsHandler),
            Hold::Hook => None,
            Hold::Holder(_) | Hold::Nothing => Some(Unprotected::NotHeld),
        };
        let told = Told::of(&charge.past);
        let driver = Arc::new(Self {
            placeholders: Placeholders::new(pod.sandbox.clone()),
            bounds: Bounds::new(),
            hosts: hosts::Known::default(),
            holdable: charge.holdable,
            state: Mutex::new(State {
                pod: Pod::new(
                    pod.clone(),
                    Arc::clone(&tools.shared),
                    charge.native,
                    charge.past,
                ),
                hooks: Hooks::new(without),
                waiting: HashMap::new(),
                kills: HashMap::new(),
                sweeping: HashSet::new(),
                replay: None,
                turn: None,
                exposed: None,
                under_way: None,
                backing_off: None,
                announced: false,
                told,
            }),
            tools,
            pod,
            read: watch::Sender::new(!unread),
            jobs,
            retimed: Notify::new(),
        });
        if charge.annotations.can_wait() {
            // Options ask for nothing: until they have been read, rules of the spec have the default ones.
            driver.tell(|pod, now| pod.written(Written::default(), now));
        }
        if let Some(spec) = charge.spec {
            driver.spec_changed(spec);
        }
        if charge.is_static {
            driver.look_for_manifest();
        }
        if unread {
            tokio::spawn(Arc::clone(&driver).read(charge.annotations));
        }
        tokio::spawn(Arc::clone(&driver).work(queue));
        driver
    }

    /// Reads what the pod's author wrote, away from the tasks that answer the runtime: it asks about one container at a
    /// time (`Adaptation.CreateContainer` in NRI's `pkg/adaptation` holds a lock), whosever it is.
    async fn read(self: Arc<Self>, annotations: Unread) {
        let written = self.tools.readers.read(annotations).await;
        let written = written.unwrap_or_else(|| {
            tracing::error!(pod = %self.pod.key, "the annotations cannot be read, which is a bug: the pod runs as without the plugin");
            Written::default()
        });
        self.tell(|pod, now| pod.written(written, now));
        self.read.send_replace(true);
    }

    /// Waits until the pod's annotations have been read, if it has any.
    pub async fn until_read(&self) {
        // The sender lives as long as the driver.
        let _ = self.read.subscribe().wait_for(|read| *read).await;
    }

    fn look_for_manifest(self: &Arc<Self>) {
        let driver = Arc::clone(self);
        spawn_blocking(move || {
            if let Some(Manifest { path, spec }) = driver.tools.static_pods.find(&driver.pod) {
                driver.tell(|pod, now| pod.manifest_found(path, spec, now));
            }
        });
    }

    /// Whether exits of this pod are held, or will be as soon as their hooks ask again.
    pub(crate) fn holds(&self) -> bool {
        let state = self.lock();
        // A hook gives up by itself.
        let mut waiting = state.waiting.values().flatten();
        state.pod.wants(Task::Holds) || waiting.any(|it| !it.hook.is_closed())
    }

    /// Whether what runs is being stopped behind its shield.
    pub(crate) fn hides(&self) -> bool {
        self.wants(Task::Hide)
    }

    /// Whether exits of its containers are held, where it is not for each of them to have a hook or not.
    pub(crate) fn is_held_without_hook(&self) -> Option<bool> {
        match &self.tools.hold {
            Hold::Hook => None,
            Hold::Holder(keeper) => Some(self.holdable && keeper.holds()),
            Hold::Nothing => Some(false),
        }
    }

    /// Whose restarts these are.
    pub(crate) fn pod(&self) -> &PodIdentity {
        &self.pod
    }

    /// Whether a container that is about to be made is to have our hook: there is something to do for the pod, or may
    /// be, the host runs hooks, and the runtime does not refuse them.
    pub(crate) fn is_to_have_hook(self: &Arc<Self>, name: &ContainerName) -> bool {
        self.with(|state, now| {
            let wanted = state.pod.wants(Task::Hook);
            state.hooks.ask(name, wanted, now.at)
        })
    }

    /// A container of that name was made, with our hook or without.
    pub(crate) fn was_made(self: &Arc<Self>, name: &ContainerName, hooked: bool) {
        self.with(|state, now| state.hooks.made(name, hooked, now.at));
    }

    /// This may be another runtime, or the same with another configuration.
    pub(crate) fn reconnected(self: &Arc<Self>) {
        self.with(|state, _| state.hooks.reconnected());
    }

    /// What is known of that container.
    pub(crate) fn instance(&self, id: &ContainerId) -> Option<Instance> {
        self.lock().pod.instance(id).cloned()
    }

    /// Whether a restart is under way.
    pub(crate) fn is_busy(&self) -> bool {
        self.wants(Task::Restart)
    }

    /// Whether the pod's conditions are set by this process: for the restart under way, or one before.
    pub(crate) fn sets_conditions(&self) -> bool {
        self.is_busy() || self.lock().announced
    }

    /// The pod's spec is known, or has changed.
    pub(crate) fn spec_changed(self: &Arc<Self>, spec: Arc<PodSpec>) {
        if let Some(Ok(request)) = &spec.request
            && let Some(last) = self.lock().told.again(request)
        {
            tracing::info!(pod = %self.pod.key, "a request was answered and its pod does not say so: telling it again");
            self.tools
                .reporter
                .ended(&self.pod.key, &spec.api_uid, last);
        }
        self.tell(|pod, now| pod.spec_changed(spec, now));
    }

    /// What the kubelet does by itself is known, or has changed.
    pub(crate) fn features_changed(self: &Arc<Self>, native: KubeletFeatures) {
        self.tell(|pod, _| pod.features_changed(native));
    }

    /// The pod is being deleted or its sandbox is gone: nothing is held any more.
    pub(crate) fn deleted(self: &Arc<Self>) {
        self.tell(Pod::deleted);
    }

    /// The sandbox is gone for good: the driver ends when what it has begun has ended.
    pub fn close(self: &Arc<Self>) {
        self.deleted();
        self.enqueue(Job::Close);
    }

    /// The kubelet, or we, made a container.
    pub(crate) fn created(self: &Arc<Self>, id: ContainerId, instance: Instance) {
        self.tell(|pod, _| pod.created(id, instance));
    }

    /// A container's process runs.
    pub(crate) fn started(self: &Arc<Self>, id: &ContainerId) {
        self.tell(|pod, now| pod.started(id, now));
    }

    /// A container's process has ended. The exit may not be visible yet.
    pub(crate) fn ended(self: &Arc<Self>, id: &ContainerId, code: Option<ExitCode>) {
        self.tell(|pod, now| pod.ended(id, code, now));
    }

    /// The kernel has killed a process of a container because it was out of memory.
    pub(crate) fn oom_killed(self: &Arc<Self>, id: &ContainerId) {
        self.tell(|pod, now| pod.oom_told(id, true, now));
    }

    /// A container is no longer in the runtime.
    pub(crate) fn removed(self: &Arc<Self>, id: &ContainerId) {
        self.tell(|pod, now| pod.removed(id, now));
    }

    /// A hook asks whether the exit of this container may be seen.
    pub(crate) fn decide_hold(self: &Arc<Self>, request: &HoldRequest) -> HoldDecision {
        let id = &request.container;
        self.with(|state, now| {
            let mut waits = state.pod.decide_hold(id, request.waited, now);
            if let Some(Exit { code, oom_killed }) = request.exit {
                state.pod.oom_told(id, oom_killed, now);
                state.pod.ended(id, Some(code), now);
                waits = state.pod.is_held(id);
            }
            if !waits {
                return HoldDecision::Go;
            }
            let (hook, released) = oneshot::channel();
            let waiting = Waiting {
                hook,
                since: now.at.checked_sub(request.waited).unwrap_or(now.at),
                metrics: Arc::clone(&self.tools.metrics),
            };
            let all = state.waiting.entry(id.clone()).or_default();
            all.retain(|it| !it.hook.is_closed());
            all.push(waiting);
            HoldDecision::Wait(released)
        })
    }

    /// Whether the kubelet may create a container of that name now.
    pub(crate) fn admit_create(self: &Arc<Self>, name: &ContainerName) -> Result<(), Refused> {
        self.hosts.is_written();
        let admitted = self.tell(|pod, now| pod.admit_create(name, now));
        if let Err(refused) = &admitted {
            self.tools.metrics.gate_refused(refused);
        }
        admitted
    }

    /// What was in the runtime at `asked`, no longer than [`OLDEST_LIST`] ago, whatever was heard before.
    /// `begun`: a restart that a predecessor left; `sweep`: what belongs to no restart is a leftover.
    ///
    /// [`OLDEST_LIST`]: crate::node::OLDEST_LIST
    pub fn relisted(
        self: &Arc<Self>,
        found: Vec<(ContainerId, Instance)>,
        asked: Instant,
        begun: Option<Record>,
        sweep: bool,
    ) {
        self.tell(|pod, now| pod.relisted(found, asked, begun, sweep, now));
    }

    fn feed(self: &Arc<Self>, event: Event) {
        self.tell(|pod, now| pod.feed(event, now));
    }

    fn tell<T>(self: &Arc<Self>, news: impl FnOnce(&mut Pod, &Moment) -> T) -> T {
        self.with(|state, now| news(&mut state.pod, now))
    }

    /// Whatever the pod is told, what follows is done.
    fn with<T>(self: &Arc<Self>, news: impl FnOnce(&mut State, &Moment) -> T) -> T {
        let mut state = self.lock();
        let now = self.tools.clock.moment();
        let deadline = state.pod.deadline();
        let answer = news(&mut state, &now);
        if self.tools.starts.are_ending() {
            return answer;
        }
        if state.pod.deadline() != deadline {
            self.retimed.notify_one();
        }
        self.settle(&mut state);
        answer
    }

    /// The queue is closed only after the pod is gone, when nothing matters any more.
    fn enqueue(&self, job: Job) {
        drop(self.jobs.send(job));
    }

    /// A panic while the lock was held is a bug of one pod's restart: the others, and this one's exits, go on.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
