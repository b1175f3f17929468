//! Performs what the machine of one pod decides, and tells it what came of it.
//!
//! One driver a pod. Its lock is held only to take note and decide; calls to the runtime, the disk and the API
//! are made by tasks that own nothing of the pod.

mod decide;
mod perform;
mod places;
mod replay;
mod state;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, oneshot};

use super::back_off::{BackOff, Past};
use super::machine::{Effect, Event, Found, FoundState, Machine, Phase, Verdict};
use super::placeholder::Placeholders;
use super::plan::Plan;
use super::record::{Record, Records};
use crate::cri::{self, Containerd};
use crate::exit_hold::{Answer, Knock};
use crate::ids::{ContainerId, ContainerName, ExitCode, PodIdentity};
use crate::kube::{KubeletFeatures, PodSpec, StaticPods};
use crate::node::{Instance, InstanceState, now_ns};
use crate::policy::Start;
use crate::report::Reporter;
pub use places::Places;
use state::{Hold, State};

/// An exit that no hook has announced by then may not be held: the container was made before the plugin, or its hook did
/// not run. On a busy node the hook may come even later.
const HOOK_LIMIT: Duration = Duration::from_secs(1);

/// NRI may tell of a container a little before the runtime lists it.
const LIST_SLACK_NS: i64 = 2_000_000_000;

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
    /// Who starts containers again where the pod does not say.
    pub start: Start,
    /// The gaps between restarts.
    pub back_off: BackOff,
    /// How many pods are replayed at once.
    pub places: Places,
    /// Where the kubelet has its static pods from.
    pub static_pods: StaticPods,
}

/// What is known of a pod when it is first seen.
#[derive(Debug)]
pub struct Charge {
    /// Its annotations in our domain, when its sandbox was made.
    pub annotations: BTreeMap<String, String>,
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
    annotations: BTreeMap<String, String>,
    is_static: bool,
    runs_hooks: bool,
    placeholders: Placeholders,
    state: Mutex<State>,
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
    /// Takes charge of a pod. `None`: its rules ask for nothing, or cannot be used, which is said here. Must be called
    /// on the async runtime.
    #[must_use]
    pub fn spawn(tools: Arc<Tools>, pod: PodIdentity, charge: Charge) -> Option<Arc<Self>> {
        let (jobs, queue) = mpsc::unbounded_channel();
        let state = State::new(charge.native, charge.past);
        let driver = Arc::new(Self {
            placeholders: Placeholders::new(pod.sandbox.clone()),
            tools,
            pod,
            annotations: charge.annotations,
            is_static: charge.is_static,
            runs_hooks: charge.runs_hooks,
            state: Mutex::new(state),
            jobs,
        });
        if let Some(spec) = charge.spec {
            driver.spec_changed(spec);
        } else {
            driver.judge(&mut driver.lock());
            driver.look_for_manifest();
        }
        // Annotations cannot change any more (they are the sandbox's); the spec may yet tell of rules.
        let hopeless = driver.lock().policy.is_none() && !driver.annotations.is_empty();
        if hopeless {
            return None;
        }
        tokio::spawn(Arc::clone(&driver).work(queue));
        Some(driver)
    }

    /// Whether exits of this pod are held, or will be as soon as their hooks knock again.
    #[must_use]
    pub fn holds(&self) -> bool {
        let state = self.lock();
        // A round that begins anew is about containers that were started without a hook, and needs the gate.
        let machine = state.machine.as_ref();
        let holding = machine.is_some_and(|it| it.is_holding() && it.plan().again == 0);
        holding || !state.holds.is_empty()
    }

    /// Whose restarts these are.
    #[must_use]
    pub fn pod(&self) -> &PodIdentity {
        &self.pod
    }

    /// Whether its containers are to have our hook: there is something to do for the pod, and the host runs hooks.
    #[must_use]
    pub fn wants_hooks(&self) -> bool {
        self.runs_hooks && self.lock().policy.is_some()
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
        self.let_go(&mut self.lock());
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
        state.instances.removed(id);
        state.holds.remove(id);
        state.decided.remove(id);
        state.removed.insert(id.clone(), now_ns());
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
        let covered = policy.is_some_and(|policy| policy.covers(name.as_str()));
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
        if state.policy.is_none() || state.deleting {
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

    /// What was in the runtime at `asked` (nanoseconds since the Unix epoch), whatever was heard before.
    /// `begun`: a restart that a predecessor left; `sweep`: placeholders that belong to no restart are leftovers.
    pub fn relisted(
        self: &Arc<Self>,
        mut found: Vec<(ContainerId, Instance)>,
        asked: i64,
        begun: Option<Record>,
        sweep: bool,
    ) {
        let mut state = self.lock();
        found.retain(|(id, _)| !state.removed.contains_key(id));
        state.removed.retain(|_, at| *at >= asked);
        // What was made meanwhile cannot be in the list, and is not gone.
        let known = state.instances.iter();
        let known = known.filter(|(_, instance)| instance.created_at < asked - LIST_SLACK_NS);
        let known: Vec<ContainerId> = known.map(|(id, _)| id.clone()).collect();
        for id in known {
            if !found.iter().any(|(seen, _)| *seen == id) {
                state.instances.removed(&id);
                self.feed(&mut state, Event::Gone(id));
            }
        }
        let mut news = Vec::new();
        for (id, instance) in found {
            let (name, now, placeholder) =
                (instance.name.clone(), instance.state, instance.placeholder);
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

    /// Says once which containers are not protected.
    fn say_what_is_bare(&self, state: &mut State) {
        let bare = state.bare();
        if bare.is_empty() || state.policy.is_none() || state.said_bare {
            return;
        }
        state.said_bare = true;
        let reporter = &self.tools.reporter;
        reporter.not_protected(&self.pod, &bare, self.runs_hooks);
    }

    fn resume(self: &Arc<Self>, state: &mut State, record: Record) {
        let Record { phase, plan } = record;
        let found: Vec<Found> = state
            .instances
            .iter()
            .map(|(id, instance)| found(id, instance, &plan))
            .collect();
        let elapsed = Duration::from_millis(unix_ms().saturating_sub(plan.decided_at_ms));
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
    let created_ms = u64::try_from(instance.created_at / 1_000_000).unwrap_or(0);
    Found {
        id: id.clone(),
        name: instance.name.clone(),
        placeholder: instance.placeholder,
        created_at: instance.created_at,
        new: created_ms > plan.decided_at_ms,
        state: match instance.state {
            InstanceState::Created => FoundState::Created,
            InstanceState::Running => FoundState::Running,
            InstanceState::Ended(code) => FoundState::Exited(code),
        },
    }
}

fn unix_ms() -> u64 {
    // A clock before 1970 breaks more than this.
    u64::try_from(now_ns() / 1_000_000).unwrap_or(0)
}
