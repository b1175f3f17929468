//! Performs what the machine of one pod decides, and tells it what came of it.
//!
//! One driver a pod. Its lock is held only to take note and decide; calls to the runtime, the disk and the API
//! are made by tasks that own nothing of the pod.

mod bounds;
mod decide;
mod hooks;
mod perform;
mod places;
mod replay;
mod state;
#[cfg(test)]
pub(crate) mod stranger_tests;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{Semaphore, SemaphorePermit, mpsc, oneshot, watch};

use super::back_off::{BackOff, Past};
use super::machine::{Effect, Event, Found, FoundState, Machine, Phase, Verdict};
use super::placeholder::Placeholders;
use super::plan::Plan;
use super::record::{Record, Records};
use crate::clock::Clock;
use crate::cri::{self, Containerd};
use crate::exit_hold::{Answer, Knock};
use crate::ids::{ContainerId, ContainerName, ExitCode, PodIdentity};
use crate::kube::{KubeletFeatures, PodSpec, StaticPods};
use crate::node::{Instance, InstanceState};
use crate::policy::{Start, Unread};
use crate::report::{Reporter, Unprotected};
use bounds::Bounds;
use hooks::Hooks;
pub use places::Places;
pub use state::OLDEST_LIST;
use state::{Hold, State};

/// An exit that no hook has announced by then may not be held: the container was made before the plugin, or its hook did
/// not run. On a busy node the hook may come even later.
const HOOK_LIMIT: Duration = Duration::from_secs(1);

/// NRI may tell of a container a little before the runtime lists it.
const LIST_SLACK: Duration = Duration::from_secs(2);

/// What all drivers use.
#[derive(Debug)]
pub struct Tools {
    /// The runtime.
    pub cri: cri::Client,
    /// The same, if it is containerd.
    pub containerd: Option<Containerd>,
    /// Whether the kubelet can be kept from creating containers just now.
    pub gate: Arc<Gate>,
    /// Restarts on disk.
    pub records: Records,
    /// Logs, events and conditions.
    pub reporter: Reporter,
    /// Who starts containers again where no pod asks for anything else, and may.
    pub start: Start,
    /// The gaps between restarts.
    pub back_off: BackOff,
    /// How many pods are replayed at once.
    pub places: Places,
    /// Where the kubelet has its static pods from.
    pub static_pods: StaticPods,
    /// What is measured across processes is measured by it.
    pub clock: Clock,
    /// Whose turn it is to have its annotations read.
    pub readers: Readers,
}

/// Of long annotations, those of one pod are read at a time: however many there are, and whatever is in them, they take one
/// core, the memory of one, and nothing from those of usual length.
#[derive(Debug)]
pub struct Readers(Semaphore);

impl Readers {
    /// What is no longer takes less than a millisecond.
    const USUAL: usize = 2 * 1024;

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
    /// Whether its runtime handler runs hooks on the host.
    pub runs_hooks: bool,
    /// What the kubelet does by itself; `None`: the API server has not told.
    pub native: Option<KubeletFeatures>,
    /// Its spec, if the API server has told.
    pub spec: Option<Arc<PodSpec>>,
    /// Its restarts under another plugin.
    pub past: Past,
}

/// Whether the runtime asks before it creates a container, which it does not while it is not connected.
#[derive(Debug, Default)]
pub struct Gate(AtomicBool);

impl Gate {
    /// It asks from now on, or does not.
    pub fn set(&self, there: bool) {
        self.0.store(there, Ordering::Relaxed);
    }

    fn is_there(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// The restarts of one pod.
#[derive(Debug)]
pub struct Driver {
    tools: Arc<Tools>,
    pod: PodIdentity,
    runs_hooks: bool,
    placeholders: Placeholders,
    bounds: Bounds,
    state: Mutex<State>,
    /// Its annotations have been read.
    read: watch::Sender<bool>,
    jobs: mpsc::UnboundedSender<Job>,
}

#[derive(Debug)]
enum Job {
    Do(Effect),
    /// The machine's deadline has changed.
    Retime,
    Close,
}

impl Driver {
    /// Takes charge of a pod. Whatever its annotations are, this takes no time: they are read meanwhile. Must be called on
    /// the async runtime.
    #[must_use]
    pub fn spawn(tools: Arc<Tools>, pod: PodIdentity, charge: Charge) -> Arc<Self> {
        let (jobs, queue) = mpsc::unbounded_channel();
        let unread = !charge.annotations.is_empty();
        // Options ask for nothing: until they have been read, rules of the spec have the default ones.
        let written = (!charge.annotations.has_rules()).then(Arc::default);
        let driver = Arc::new(Self {
            placeholders: Placeholders::new(pod.sandbox.clone()),
            bounds: Bounds::new(),
            tools,
            pod,
            runs_hooks: charge.runs_hooks,
            state: Mutex::new(State::new(written, charge.native, charge.past)),
            read: watch::Sender::new(!unread),
            jobs,
        });
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

    /// Waits until the pod's annotations have been read, if it has any.
    pub async fn until_read(&self) {
        // The sender lives as long as the driver.
        let _ = self.read.subscribe().wait_for(|read| *read).await;
    }

    /// Whether exits of this pod are held, or will be as soon as their hooks knock again.
    #[must_use]
    pub fn holds(&self) -> bool {
        let state = self.lock();
        // A round that begins anew is about containers that were started without a hook, and needs the gate.
        let machine = state.machine.as_ref();
        let holding = machine.is_some_and(|it| it.is_holding() && it.plan().again == 0);
        holding || state.holds.values().any(Hold::lasts)
    }

    /// Whose restarts these are.
    #[must_use]
    pub fn pod(&self) -> &PodIdentity {
        &self.pod
    }

    /// Whether a container that is about to be made is to have our hook: there is something to do for the pod, or may
    /// be, the host runs hooks, and the runtime does not refuse them.
    #[must_use]
    pub fn is_to_have_hook(&self, name: &ContainerName) -> bool {
        let mut state = self.lock();
        let wanted = self.runs_hooks && state.may_act();
        state.hooks.ask(name, wanted, Instant::now())
    }

    /// A container of that name was made, with our hook or without.
    pub fn was_made(&self, name: &ContainerName, hooked: bool) {
        self.lock().hooks.made(name, hooked, Instant::now());
    }

    /// This may be another runtime, or the same with another configuration.
    pub fn reconnected(&self) {
        self.lock().hooks = Hooks::default();
    }

    /// Whether it knows of that container.
    #[must_use]
    pub fn knows(&self, id: &ContainerId) -> bool {
        self.lock().instances.get(id).is_some()
    }

    /// Whether that container was made with our hook; `None`: nobody has looked.
    #[must_use]
    pub fn is_hooked(&self, id: &ContainerId) -> Option<bool> {
        self.lock().instances.get(id)?.hooked
    }

    /// Whether a restart is under way.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.lock().machine.is_some()
    }

    /// The pod's spec is known, or has changed.
    pub fn spec_changed(self: &Arc<Self>, spec: Arc<PodSpec>) {
        let mut state = self.lock();
        let ends = spec.ending && !state.deleting;
        let first = state.spec.is_none();
        state.spec = Some(spec);
        if first {
            self.judge(&mut state);
        }
        if ends {
            state.deleting = true;
            self.let_go(&mut state);
        }
    }

    /// What the kubelet does by itself is known, or has changed.
    pub fn features_changed(&self, native: KubeletFeatures) {
        let mut state = self.lock();
        state.native = Some(native);
        self.judge(&mut state);
    }

    /// The pod is being deleted or its sandbox is gone: nothing is held any more.
    pub fn deleted(self: &Arc<Self>) {
        let mut state = self.lock();
        state.deleting = true;
        self.let_go(&mut state);
    }

    /// The sandbox is gone for good: the driver ends when what it has begun has ended.
    pub fn close(self: &Arc<Self>) {
        self.deleted();
        // The worker is gone only if the driver was closed before.
        let _ = self.jobs.send(Job::Close);
    }

    /// The kubelet, or we, made a container.
    pub fn created(&self, id: ContainerId, instance: Instance) {
        let mut state = self.lock();
        if state.removed.contains_key(&id) {
            return;
        }
        state.instances.insert(id, instance);
        self.say_what_is_bare(&mut state);
    }

    /// A container's process runs.
    pub fn started(self: &Arc<Self>, id: &ContainerId) {
        let mut state = self.lock();
        let Some(name) = state.instances.started(id) else {
            return;
        };
        self.feed(&mut state, Event::Started(name, id.clone()));
    }

    /// A container's process has ended. The exit may not be visible yet.
    pub fn ended(self: &Arc<Self>, id: &ContainerId, code: Option<ExitCode>) {
        let mut state = self.lock();
        if !self.note_end(&mut state, id, code) {
            return;
        }
        let bare = state
            .instances
            .get(id)
            .is_some_and(|it| it.hooked == Some(false));
        if bare || state.holds.contains_key(id) {
            self.decide(&mut state, id);
        } else {
            self.wait_for_hook(id);
        }
    }

    /// A container is no longer in the runtime.
    pub fn removed(self: &Arc<Self>, id: &ContainerId) {
        let mut state = self.lock();
        state.gone(id, Instant::now());
        self.feed(&mut state, Event::Gone(id.clone()));
    }

    /// A hook asks whether the exit of this container may be seen.
    pub fn knock(self: &Arc<Self>, knock: &Knock) -> Answer {
        let id = &knock.container;
        let mut state = self.lock();
        let Some(instance) = state.instances.get(id) else {
            return Answer::Go;
        };
        let (name, ended) = (instance.name.clone(), instance.state);
        let machine = state.machine.as_ref();
        let replaced = machine.is_some_and(|machine| machine.replaces(id));
        let held = machine.is_some_and(|machine| machine.holds(id))
            || (!replaced && state.is_replayed(id));
        let policy = state.policy.as_ref();
        // Whether it is so is settled when the annotations have been read.
        let covered =
            state.written.is_none() || policy.is_some_and(|policy| policy.covers(name.as_str()));
        let watched = !replaced && covered && state.is_member(&name);
        if state.deleting || !(held || watched) {
            // It may be one that the restart under way waits for.
            self.note_end(&mut state, id, None);
            if replaced {
                self.learn_code(id);
            }
            return Answer::Go;
        }
        let (release, released) = oneshot::channel();
        state
            .holds
            .insert(id.clone(), Hold::new(release, knock.waited));
        self.note_end(&mut state, id, None);
        let known = matches!(ended, InstanceState::Ended(Some(_)));
        if held || known {
            self.decide(&mut state, id);
        }
        match (known, replaced) {
            (true, _) => {}
            (false, true) => self.learn_code(id),
            (false, false) => self.ask_for_code(id),
        }
        Answer::Wait(released)
    }

    /// Whether the kubelet may create a container of that name now; the refusal is written for people.
    pub fn attempt(self: &Arc<Self>, name: &ContainerName) -> Result<(), String> {
        let mut state = self.lock();
        if !state.may_act() || state.deleting {
            return Ok(());
        }
        // Ours. If the kubelet were faster, the runtime would refuse one of both: they have the same number.
        if state.creating.remove(name) {
            return Ok(());
        }
        // Under load the kubelet may act on what it saw half a second ago.
        if let Some(id) = state.instances.running(name).cloned()
            && state.is_member(name)
        {
            self.verify(id);
            return Err(format!("container {name} is running already"));
        }
        let Some(machine) = &mut state.machine else {
            return Ok(());
        };
        let (verdict, effects) = machine.attempt(Instant::now(), name);
        let restart = machine.plan().id.clone();
        let start_at = machine.plan().start_at();
        self.apply(&mut state, effects);
        match verdict {
            Verdict::Admit => Ok(()),
            Verdict::NotYet => Err(format!(
                "pod restarts in place ({restart}), container {name} starts again in a moment"
            )),
            Verdict::BackOff => Err(format!(
                "back-off: the pod restarts too often ({restart}), container {name} starts again at {start_at}"
            )),
            Verdict::OutOfOrder => {
                for init in state.machine.iter().flat_map(Machine::running_inits) {
                    self.verify(init);
                }
                Err(format!(
                    "pod restarts in place ({restart}), container {name} starts after the init containers before it"
                ))
            }
        }
    }

    /// What was in the runtime at `asked`, no longer than [`OLDEST_LIST`] ago, whatever was heard before.
    /// `begun`: a restart that a predecessor left; `sweep`: placeholders that belong to no restart are leftovers.
    pub fn relisted(
        self: &Arc<Self>,
        mut found: Vec<(ContainerId, Instance)>,
        asked: Instant,
        begun: Option<Record>,
        sweep: bool,
    ) {
        let mut state = self.lock();
        found.retain(|(id, _)| !state.removed.contains_key(id));
        // What was made meanwhile cannot be in the list, and is not gone.
        let known = state.instances.iter();
        let known = known.filter(|(_, it)| it.listed || it.heard_at + LIST_SLACK < asked);
        let known: Vec<ContainerId> = known.map(|(id, _)| id.clone()).collect();
        for id in known {
            if !found.iter().any(|(seen, _)| *seen == id) {
                state.gone(&id, Instant::now());
                self.feed(&mut state, Event::Gone(id));
            }
        }
        let mut news = Vec::new();
        for (id, instance) in found {
            let (name, now, placeholder) = (
                instance.name.clone(),
                instance.state,
                instance.is_placeholder(),
            );
            // A list may be older than what was heard meanwhile.
            if state.instances.insert(id.clone(), instance) && !placeholder {
                news.push((id, name, now));
            }
        }
        if let Some(record) = begun {
            self.resume(&mut state, record);
        } else if state.machine.is_some() {
            for (id, name, now) in news {
                match now {
                    InstanceState::Created => {}
                    InstanceState::Running => self.feed(&mut state, Event::Started(name, id)),
                    InstanceState::Ended(code) => {
                        self.feed(&mut state, Event::Ended(name, id.clone(), code));
                        self.feed(&mut state, Event::Exited(id));
                    }
                }
            }
        } else if sweep {
            self.sweep_leftovers(&state);
        }
        self.say_what_is_bare(&mut state);
    }

    /// Says once which containers are not protected, and once more if that has another reason by then.
    fn say_what_is_bare(&self, state: &mut State) {
        let bare = state.bare();
        if bare.is_empty() || state.policy.is_none() {
            return;
        }
        let why = if !self.runs_hooks {
            Unprotected::NoHooks
        } else if state.hooks.are_refused(Instant::now()) {
            Unprotected::HooksRefused
        } else {
            Unprotected::FromBefore
        };
        if state.said_bare.replace(why) != Some(why) {
            let reporter = &self.tools.reporter;
            reporter.not_protected(&self.pod, &bare, why);
        }
    }

    fn resume(self: &Arc<Self>, state: &mut State, record: Record) {
        let Record { phase, plan } = record;
        let found: Vec<Found> = state
            .instances
            .iter()
            .map(|(id, instance)| found(id, instance, &plan))
            .collect();
        let elapsed = self.tools.clock.since(plan.decided_up_ms);
        tracing::info!(pod = %self.pod.key, restart = %plan.id, ?phase, "went on with a restart that was under way");
        let trigger = &plan.trigger;
        state
            .instances
            .ended(&trigger.container, Some(trigger.code));
        state.decided.insert(trigger.container.clone());
        state.settle_olds(&plan);
        if matches!(phase, Phase::Shielded | Phase::Up) {
            // Their exits were released, whether or not the runtime shows it yet.
            for old in plan.members.iter().filter_map(|member| member.old.as_ref()) {
                state.instances.ended(&old.id, old.exit);
            }
        }
        let (machine, effects) = Machine::resume(plan, phase, &found, elapsed, Instant::now());
        state.machine = Some(machine);
        self.apply(state, effects);
        self.watch_shields();
    }

    /// A panic while the lock was held is a bug of one pod's restart: the others, and this one's exits, go on.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn found(id: &ContainerId, instance: &Instance, plan: &Plan) -> Found {
    Found {
        id: id.clone(),
        name: instance.name.clone(),
        maker: instance.maker,
        created_at: instance.created_at,
        new: !plan.knew(id),
        state: match instance.state {
            InstanceState::Created => FoundState::Created,
            InstanceState::Running => FoundState::Running,
            InstanceState::Ended(code) => FoundState::Exited(code),
        },
    }
}
