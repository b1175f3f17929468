//! Performs what the machine of one pod decides, and tells it what came of it.
//!
//! One driver a pod. Its lock is held only to take note and decide; calls to the runtime, the disk and the API
//! are made by tasks that own nothing of the pod.

mod decide;
mod perform;
mod state;

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, oneshot};

use super::machine::{Effect, Event, Found, FoundState, Machine, Phase, Verdict};
use super::placeholder::Placeholders;
use super::plan::Plan;
use super::record::{Record, Records};
use crate::cri::{self, Containerd};
use crate::exit_hold::Answer;
use crate::ids::{ContainerId, ContainerName, ExitCode, PodIdentity};
use crate::kube::PodSpec;
use crate::node::{Instance, InstanceState, Instances, now_ns};
use crate::policy::Policy;
use crate::report::Reporter;
use state::State;

/// An exit that no hook has announced by then is not held: the container was made before the plugin, or its
/// hook did not run. On a busy node the hook comes up to a second after the exit event.
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
    /// Restarts on disk.
    pub records: Records,
    /// Logs and events.
    pub reporter: Reporter,
}

/// The restarts of one pod.
#[derive(Debug)]
pub struct Driver {
    tools: Arc<Tools>,
    pod: PodIdentity,
    placeholders: Placeholders,
    state: Mutex<State>,
    jobs: mpsc::UnboundedSender<Job>,
}

#[derive(Debug)]
enum Job {
    Do(Effect),
    Close,
}

impl Driver {
    /// Takes charge of a pod. Must be called on the async runtime.
    #[must_use]
    pub fn spawn(
        tools: Arc<Tools>,
        pod: PodIdentity,
        policy: Policy,
        spec: Option<Arc<PodSpec>>,
    ) -> Arc<Self> {
        let (jobs, queue) = mpsc::unbounded_channel();
        let driver = Arc::new(Self {
            placeholders: Placeholders::new(pod.sandbox.clone()),
            tools,
            pod,
            state: Mutex::new(State {
                policy: Some(Arc::new(policy)),
                spec: None,
                instances: Instances::default(),
                machine: None,
                holds: HashMap::new(),
                kills: HashMap::new(),
                decided: HashSet::new(),
                removed: HashMap::new(),
                deleting: false,
                restarts: 0,
            }),
            jobs,
        });
        if let Some(spec) = spec {
            driver.spec_changed(spec);
        }
        tokio::spawn(Arc::clone(&driver).work(queue));
        driver
    }

    /// Whether exits of this pod are held, or will be as soon as their hooks knock again.
    #[must_use]
    pub fn holds(&self) -> bool {
        let state = self.lock();
        let holding = state.machine.as_ref().is_some_and(Machine::is_holding);
        holding || !state.holds.is_empty()
    }

    /// Whose restarts these are.
    #[must_use]
    pub fn pod(&self) -> &PodIdentity {
        &self.pod
    }

    /// The pod's spec is known, or has changed.
    pub fn spec_changed(self: &Arc<Self>, spec: Arc<PodSpec>) {
        let mut state = self.lock();
        let deleted = spec.deleting && !state.deleting;
        if state.spec.is_none()
            && let Some(policy) = &state.policy
        {
            let names: Vec<&str> = spec.container_names().collect();
            if let Err(error) = policy.check_names(&names) {
                self.tools.reporter.invalid_rules(&self.pod, &error);
                state.policy = None;
            }
        }
        state.spec = Some(spec);
        if deleted {
            self.let_go(&mut state);
        }
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
        self.lock().instances.insert(id, instance);
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
        if state.holds.contains_key(id) {
            self.decide(&mut state, id);
        } else {
            self.later(HOOK_LIMIT, id, |driver, state, id| {
                if !state.holds.contains_key(id) {
                    driver.decide(state, id);
                }
            });
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
    pub fn knock(self: &Arc<Self>, id: &ContainerId) -> Answer {
        let mut state = self.lock();
        let Some(instance) = state.instances.get(id) else {
            return Answer::Go;
        };
        let (name, ended) = (instance.name.clone(), instance.state);
        let machine = state.machine.as_ref();
        let replaced = machine.is_some_and(|machine| machine.replaces(id));
        let held = machine.is_some_and(|machine| machine.holds(id));
        let policy = state.policy.as_ref();
        let watched = !replaced && policy.is_some_and(|policy| policy.covers(name.as_str()));
        if state.deleting || !(held || watched) {
            // It may be one that the restart under way waits for.
            self.note_end(&mut state, id, None);
            return Answer::Go;
        }
        let (release, released) = oneshot::channel();
        state.holds.insert(id.clone(), release);
        self.note_end(&mut state, id, None);
        if held || matches!(ended, InstanceState::Ended(Some(_))) {
            self.decide(&mut state, id);
        } else {
            self.ask_for_code(id);
        }
        Answer::Wait(released)
    }

    /// Whether the kubelet may create a container of that name now; the refusal is written for people.
    pub fn attempt(self: &Arc<Self>, name: &ContainerName) -> Result<(), String> {
        let mut state = self.lock();
        if state.policy.is_none() || state.deleting {
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
        self.apply(&mut state, effects);
        match verdict {
            Verdict::Admit => Ok(()),
            Verdict::NotYet => Err(format!(
                "pod restarts in place ({restart}), container {name} starts again in a moment"
            )),
            Verdict::OutOfOrder => Err(format!(
                "pod restarts in place ({restart}), container {name} starts after the init containers before it"
            )),
        }
    }

    /// What was in the runtime at `asked` (nanoseconds since the Unix epoch), whatever was heard before.
    /// `begun`: a restart that a predecessor left.
    pub fn relisted(
        self: &Arc<Self>,
        mut found: Vec<(ContainerId, Instance)>,
        asked: i64,
        begun: Option<Record>,
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
            let before = state.instances.get(&id).map(|instance| instance.state);
            if !instance.placeholder && before != Some(instance.state) {
                news.push((id.clone(), instance.name.clone(), instance.state));
            }
            state.instances.insert(id, instance);
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
        } else {
            let leftover = state.instances.iter().filter(|(_, it)| it.placeholder);
            for (id, _) in leftover {
                self.sweep(id.clone());
            }
        }
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
