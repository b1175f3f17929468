//! Performs what the machine of one pod decides, and tells it what came of it.
//!
//! One driver a pod. Its lock is held only to take note and decide; calls to the runtime, the disk and the API
//! are made by tasks that own nothing of the pod.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tokio::sync::{mpsc, oneshot};
use tokio::task::AbortHandle;
use tokio::time::{sleep, sleep_until};

use super::machine::{Effect, Event, Found, FoundState, Machine, Outcome, Phase, Verdict};
use super::placeholder::Placeholders;
use super::plan::{Circumstances, Member, Old, Plan, RestartId, Trigger, Way};
use super::record::{Record, Records};
use crate::cri::{self, ContainerState, Containerd, CriError};
use crate::exit_hold::Answer;
use crate::ids::{ContainerId, ContainerName, ExitCode, PodIdentity};
use crate::kube::{ContainerKind, PodSpec, RestartPolicy};
use crate::node::{Instance, InstanceState, Instances};
use crate::policy::{Action, Policy};
use crate::report::{Reporter, Story};

/// An exit that no hook has announced by then is not held: the container was made before the plugin, or its
/// hook did not run. On a busy node the hook comes up to a second after the exit event.
const HOOK_LIMIT: Duration = Duration::from_secs(1);
/// The exit event is sent before the hook runs; one that is this late was lost, or came before this process.
const EVENT_LIMIT: Duration = Duration::from_millis(300);
/// Between two tries of a call that failed.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);
/// How long a container of `RestartPod` may take to stop, at most: the trigger's exit is held meanwhile.
const GRACE_LIMIT: Duration = Duration::from_secs(4);
/// The runtime's answer to a stop, beyond the grace period.
const STOP_LIMIT: Duration = Duration::from_secs(10);
/// How long one removal is tried before it is tried afresh.
const REMOVE_LIMIT: Duration = Duration::from_secs(30);

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
struct State {
    /// `None`: the rules turned out to be wrong; the pod is left alone.
    policy: Option<Arc<Policy>>,
    spec: Option<Arc<PodSpec>>,
    instances: Instances,
    machine: Option<Machine>,
    /// Exits that are held; dropping a sender releases one.
    holds: HashMap<ContainerId, oneshot::Sender<()>>,
    kills: HashMap<ContainerId, AbortHandle>,
    /// Exits that have been judged: none begins two restarts.
    decided: HashSet<ContainerId>,
    deleting: bool,
    restarts: u32,
}

impl State {
    /// A container as the kubelet sees it: one whose exit is held runs.
    fn member(&self, name: ContainerName, kind: ContainerKind) -> Member {
        let newest = self.instances.newest(&name);
        let old = newest.map(|(id, instance)| Old {
            id: id.clone(),
            exit: match instance.state {
                InstanceState::Ended(code) if !self.holds.contains_key(id) => {
                    Some(code.unwrap_or(ExitCode::UNKNOWN))
                }
                _ => None,
            },
        });
        Member {
            kind,
            older: self.instances.older(&name),
            old,
            name,
            placeholders: 0,
        }
    }

    /// The pod's restart policy, and its containers in start order. A restart that goes on after the plugin came
    /// back may know them before the API server has told.
    fn shape(&self) -> Option<(RestartPolicy, Vec<(ContainerName, ContainerKind)>)> {
        if let Some(spec) = &self.spec {
            let containers = spec.containers.iter();
            let containers = containers.map(|it| (it.name.clone(), it.kind));
            return Some((spec.restart_policy, containers.collect()));
        }
        let plan = self.machine.as_ref().map(Machine::plan)?;
        let members = plan.members.iter();
        let members = members.map(|it| (it.name.clone(), it.kind));
        (plan.whole_pod && plan.ordered).then(|| (plan.restart_policy, members.collect()))
    }
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

    // --- what happens to the pod ----------------------------------------------------------------------------

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
        self.feed(&mut state, Event::Gone(id.clone()));
    }

    /// A hook asks whether the exit of this container may be seen.
    pub fn knock(self: &Arc<Self>, id: &ContainerId) -> Answer {
        let mut state = self.lock();
        let Some(instance) = state.instances.get(id) else {
            return Answer::Go;
        };
        let (name, ended) = (instance.name.clone(), instance.state);
        let replaced = state
            .machine
            .as_ref()
            .map(|machine| (machine.replaces(id), machine.holds(id)));
        if state.deleting || matches!(replaced, Some((true, false))) {
            return Answer::Go;
        }
        let watched = state
            .policy
            .as_ref()
            .is_some_and(|policy| policy.covers(name.as_str()));
        let held = matches!(replaced, Some((true, true)));
        if !held && !watched {
            return self.pass(&mut state, id);
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
            && self.is_member(&state, name)
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

    /// What is in the runtime now, whatever was heard before. `begun`: a restart that a predecessor left.
    pub fn relisted(self: &Arc<Self>, found: Vec<(ContainerId, Instance)>, begun: Option<Record>) {
        let mut state = self.lock();
        let known: Vec<ContainerId> = state.instances.iter().map(|(id, _)| id.clone()).collect();
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

    // --- decisions ------------------------------------------------------------------------------------------

    /// Settles what the exit of this container means: it is part of a restart, begins one, or is let go.
    fn decide(self: &Arc<Self>, state: &mut State, id: &ContainerId) {
        let held = state.holds.contains_key(id);
        if state
            .machine
            .as_ref()
            .is_some_and(|machine| machine.replaces(id))
        {
            if let Some(kill) = state.kills.remove(id) {
                kill.abort();
            }
            let id = id.clone();
            let event = if held {
                Event::Held(id)
            } else {
                Event::Exited(id)
            };
            self.feed(state, event);
            return;
        }
        if !state.decided.insert(id.clone()) {
            return;
        }
        let trigger = self.trigger(state, id);
        let action = trigger
            .as_ref()
            .zip(state.policy.as_ref())
            .and_then(|(trigger, policy)| policy.action(trigger.name.as_str(), trigger.code.0));
        match trigger.zip(action) {
            Some((trigger, action)) if !state.deleting => self.begin(state, trigger, action),
            _ => {
                state.holds.remove(id);
            }
        }
    }

    fn trigger(&self, state: &State, id: &ContainerId) -> Option<Trigger> {
        let instance = state.instances.get(id)?;
        let InstanceState::Ended(Some(code)) = instance.state else {
            return None;
        };
        (!instance.placeholder).then(|| Trigger {
            name: instance.name.clone(),
            container: id.clone(),
            code,
        })
    }

    fn begin(self: &Arc<Self>, state: &mut State, trigger: Trigger, action: Action) {
        state.restarts += 1;
        let options = state.policy.as_ref().map(|policy| policy.options().clone());
        let grace = match (action, options) {
            (Action::RestartPod, Some(options)) => options.grace_period.min(GRACE_LIMIT),
            _ => Duration::ZERO,
        };
        let container = trigger.container.clone();
        let id = RestartId(format!("{}-{}", short(container.as_str()), state.restarts));
        let circumstances = self.circumstances(state, id, trigger, grace, 0);
        let plan = match action {
            Action::Restart => circumstances.restart_one(),
            Action::RestartAllContainers | Action::RestartPod => Some(circumstances.restart_all()),
        };
        let Some(plan) = plan else {
            state.holds.remove(&container);
            return;
        };
        self.tools.reporter.restarting(&story(&plan));
        self.carry_out(state, plan);
    }

    fn begin_again(self: &Arc<Self>, state: &mut State) {
        let Some(machine) = &state.machine else {
            return;
        };
        let plan = machine.plan();
        let (id, trigger) = (plan.id.clone(), plan.trigger.clone());
        let grace = Duration::from_millis(plan.grace_ms);
        let again = plan.again + 1;
        tracing::warn!(pod = %self.pod.key, restart = %plan.id, again, "containers were started out of order while the gate was away: beginning anew");
        let plan = self
            .circumstances(state, id, trigger, grace, again)
            .restart_all();
        self.carry_out(state, plan);
    }

    fn carry_out(self: &Arc<Self>, state: &mut State, plan: Plan) {
        let held: Vec<ContainerId> = state.holds.keys().cloned().collect();
        let leftover = state
            .machine
            .as_ref()
            .map(Machine::leftovers)
            .unwrap_or_default();
        let (machine, effects) = Machine::begin(plan, &held, leftover, Instant::now());
        state.machine = Some(machine);
        self.apply(state, effects);
    }

    fn circumstances(
        &self,
        state: &State,
        id: RestartId,
        trigger: Trigger,
        grace: Duration,
        again: u8,
    ) -> Circumstances {
        let known = state.shape();
        let restart_policy = known.as_ref().map(|(policy, _)| *policy);
        let containers = match known {
            Some((_, containers)) => containers
                .into_iter()
                .map(|(name, kind)| state.member(name, kind))
                .collect(),
            None => state
                .instances
                .names_by_creation()
                .into_iter()
                .map(|name| {
                    let mut member = state.member(name, ContainerKind::Regular);
                    // What has ended while others run was an init container, as far as one can tell.
                    let ended = member.old.as_ref().is_some_and(|old| old.exit.is_some());
                    if ended && member.name != trigger.name {
                        member.kind = ContainerKind::Init;
                    }
                    member
                })
                .collect(),
        };
        Circumstances {
            id,
            pod: self.pod.clone(),
            trigger,
            restart_policy,
            containers,
            grace_ms: u64::try_from(grace.as_millis()).unwrap_or(u64::MAX),
            decided_at_ms: unix_ms(),
            again,
        }
    }

    /// Asks the runtime whether a container that was refused a successor really runs: its end may have fallen
    /// between two plugins.
    fn verify(self: &Arc<Self>, id: ContainerId) {
        let driver = Arc::clone(self);
        tokio::spawn(async move {
            match driver.tools.cri.container_status(&id).await {
                Ok(status) if status.state == ContainerState::Exited => {
                    driver.ended(&id, status.exit_code);
                }
                Err(CriError::Gone { .. }) => driver.removed(&id),
                // It runs, or the runtime is away and nothing will be created anyway.
                Ok(_) | Err(_) => {}
            }
        });
    }

    fn is_member(&self, state: &State, name: &ContainerName) -> bool {
        state.spec.as_ref().is_none_or(|spec| {
            spec.containers
                .iter()
                .any(|container| container.name == *name)
        })
    }

    /// An exit without a rule is let go at once, but it may be one that a restart under way waits for.
    fn pass(self: &Arc<Self>, state: &mut State, id: &ContainerId) -> Answer {
        self.note_end(state, id, None);
        Answer::Go
    }

    /// Returns whether this was news.
    fn note_end(
        self: &Arc<Self>,
        state: &mut State,
        id: &ContainerId,
        code: Option<ExitCode>,
    ) -> bool {
        let news = state.instances.ended(id, code);
        if let Some(instance) = state.instances.get(id)
            && news
            && !instance.placeholder
        {
            let name = instance.name.clone();
            self.feed(state, Event::Ended(name, id.clone(), code));
        }
        news
    }

    fn let_go(self: &Arc<Self>, state: &mut State) {
        state.deleting = true;
        self.feed(state, Event::Deleted);
        state.holds.clear();
    }

    fn feed(self: &Arc<Self>, state: &mut State, event: Event) {
        if let Some(machine) = &mut state.machine {
            tracing::debug!(pod = %self.pod.key, phase = ?machine.phase(), ?event);
            let effects = machine.handle(Instant::now(), event);
            self.apply(state, effects);
        }
    }

    fn apply(self: &Arc<Self>, state: &mut State, effects: Vec<Effect>) {
        for effect in effects {
            tracing::debug!(pod = %self.pod.key, ?effect);
            match effect {
                // Together and now: the kubelet is to see all exits as one event.
                Effect::Release(ids) => {
                    for id in &ids {
                        state.holds.remove(id);
                    }
                }
                Effect::Again => self.begin_again(state),
                // The queue is closed only after the pod is gone, when nothing matters any more.
                effect => drop(self.jobs.send(Job::Do(effect))),
            }
        }
    }

    // --- performing -----------------------------------------------------------------------------------------

    async fn work(self: Arc<Self>, mut queue: mpsc::UnboundedReceiver<Job>) {
        loop {
            let deadline = self.lock().machine.as_ref().and_then(Machine::deadline);
            let tick = async {
                match deadline {
                    Some(at) => sleep_until(at.into()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                job = queue.recv() => match job {
                    Some(Job::Do(effect)) => self.perform(effect),
                    Some(Job::Close) | None => return,
                },
                () = tick => self.feed(&mut self.lock(), Event::Tick),
            }
        }
    }

    fn perform(self: &Arc<Self>, effect: Effect) {
        match effect {
            Effect::Save => self.save(),
            Effect::Kill(id) => {
                let mut state = self.lock();
                let task = tokio::spawn(Arc::clone(self).kill(id.clone()));
                state.kills.insert(id, task.abort_handle());
            }
            Effect::MakePlaceholder(name, like) => {
                tokio::spawn(Arc::clone(self).make_placeholder(name, like));
            }
            Effect::Remove(id) => self.sweep(id),
            Effect::Finish(outcome) => self.finish(outcome),
            // Done at once in `apply`.
            Effect::Release(_) | Effect::Again => {}
        }
    }

    fn save(&self) {
        let record = self.lock().machine.as_ref().map(|machine| Record {
            phase: machine.phase(),
            plan: machine.plan().clone(),
        });
        if let Some(record) = record
            && let Err(error) = self.tools.records.save(&record)
        {
            tracing::warn!(pod = %self.pod.key, %error, "could not write down the restart: it goes on, but not beyond this process");
        }
    }

    async fn kill(self: Arc<Self>, id: ContainerId) {
        let grace = Duration::from_millis(
            self.lock()
                .machine
                .as_ref()
                .map_or(0, |machine| machine.plan().grace_ms),
        );
        loop {
            let result = self
                .tools
                .cri
                .stop_container(&id, grace, grace + STOP_LIMIT)
                .await;
            let event = match result {
                Ok(()) => Event::Exited(id.clone()),
                Err(CriError::Gone { .. }) => Event::Gone(id.clone()),
                Err(error) => {
                    tracing::warn!(pod = %self.pod.key, container = %id, %error, "could not stop a container, trying again");
                    sleep(RETRY_INTERVAL).await;
                    if self.still_holds(&id) {
                        continue;
                    }
                    return;
                }
            };
            let mut state = self.lock();
            state.kills.remove(&id);
            self.feed(&mut state, event);
            return;
        }
    }

    async fn make_placeholder(self: Arc<Self>, name: ContainerName, like: ContainerId) {
        let round = |state: &State| {
            let machine = state.machine.as_ref()?;
            Some((machine.plan().id.clone(), machine.plan().again))
        };
        let Some((restart, again)) = round(&self.lock()) else {
            return;
        };
        loop {
            match self
                .placeholders
                .make(&self.tools.cri, &name, &like, &restart)
                .await
            {
                Ok(id) => {
                    let mut state = self.lock();
                    if round(&state) == Some((restart, again)) {
                        self.feed(&mut state, Event::PlaceholderMade(name, id));
                    } else {
                        // The restart that wanted it is over: the pod was deleted, for one.
                        self.sweep(id);
                    }
                    return;
                }
                Err(CriError::Gone { .. }) => {
                    self.feed(&mut self.lock(), Event::Gone(like));
                    return;
                }
                Err(error) => {
                    tracing::warn!(pod = %self.pod.key, container = %name, %error, "could not make a placeholder, trying again");
                    sleep(RETRY_INTERVAL).await;
                    if !self.still_holds(&like) {
                        return;
                    }
                }
            }
        }
    }

    fn sweep(self: &Arc<Self>, id: ContainerId) {
        let driver = Arc::clone(self);
        tokio::spawn(async move {
            while let Err(error) = driver
                .tools
                .cri
                .remove_when_exited(&id, tokio::time::Instant::now() + REMOVE_LIMIT)
                .await
            {
                tracing::warn!(pod = %driver.pod.key, container = %id, %error, "could not remove a container, trying again");
                if driver.jobs.is_closed() {
                    return;
                }
                sleep(RETRY_INTERVAL).await;
            }
            driver.removed(&id);
        });
    }

    fn finish(&self, outcome: Outcome) {
        let over = {
            let mut state = self.lock();
            // Another restart may have taken its place meanwhile: the record is that one's.
            state
                .machine
                .take_if(|machine| machine.phase() == Phase::Over)
        };
        let Some(machine) = over else { return };
        if let Err(error) = self.tools.records.forget(&self.pod.sandbox) {
            tracing::warn!(pod = %self.pod.key, %error, "could not remove the record of a restart that is over");
        }
        let took = Duration::from_millis(unix_ms().saturating_sub(machine.plan().decided_at_ms));
        let (reporter, story) = (&self.tools.reporter, story(machine.plan()));
        match outcome {
            Outcome::Completed => reporter.restarted(&story, took),
            Outcome::InitFailed => reporter.init_failed(&story, took),
            Outcome::Deleted => reporter.deleted_meanwhile(&story, took),
            Outcome::TimedOut => reporter.gave_up(&story, took, &machine.waiting_for()),
        }
    }

    fn still_holds(&self, id: &ContainerId) -> bool {
        self.lock()
            .machine
            .as_ref()
            .is_some_and(|machine| machine.holds(id))
    }

    /// The exit event of a container whose hook waits is missing: asks the runtime, and lets go if it does not
    /// know either.
    fn ask_for_code(self: &Arc<Self>, id: &ContainerId) {
        let driver = Arc::clone(self);
        let id = id.clone();
        tokio::spawn(async move {
            sleep(EVENT_LIMIT).await;
            if !driver.waits_for_code(&id) {
                return;
            }
            if let Some(code) = driver.code_from_task(&id).await {
                driver.ended(&id, Some(code));
                return;
            }
            sleep(HOOK_LIMIT).await;
            if driver.waits_for_code(&id) {
                tracing::warn!(pod = %driver.pod.key, container = %id, "nobody knows the exit code: let the exit go");
                driver.lock().holds.remove(&id);
            }
        });
    }

    async fn code_from_task(&self, id: &ContainerId) -> Option<ExitCode> {
        let containerd = self.tools.containerd.as_ref()?;
        // The shim may not answer while its hook runs: then nobody knows, which is said by who asked.
        containerd.task_exit_code(id).await.ok().flatten()
    }

    fn waits_for_code(&self, id: &ContainerId) -> bool {
        let state = self.lock();
        let unknown = state
            .instances
            .get(id)
            .is_some_and(|instance| instance.state == InstanceState::Ended(None));
        let replaced = state
            .machine
            .as_ref()
            .is_some_and(|machine| machine.replaces(id));
        unknown && !replaced && state.holds.contains_key(id)
    }

    fn later(
        self: &Arc<Self>,
        after: Duration,
        id: &ContainerId,
        then: impl FnOnce(&Arc<Self>, &mut State, &ContainerId) + Send + 'static,
    ) {
        let driver = Arc::clone(self);
        let id = id.clone();
        tokio::spawn(async move {
            sleep(after).await;
            let mut state = driver.lock();
            then(&driver, &mut state, &id);
        });
    }

    /// A panic while the lock was held is a bug of one pod's restart: the others, and this one's exits, go on.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn story(plan: &Plan) -> Story<'_> {
    Story {
        pod: &plan.pod,
        restart: &plan.id.0,
        container: &plan.trigger.name,
        code: plan.trigger.code,
        whole_pod: plan.whole_pod,
        way: match plan.way {
            Way::Kept => "by the pod's restart policy",
            Way::Shielded => "behind placeholders",
            Way::Cleared => "from the first init container",
        },
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
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    // A clock before 1970 breaks more than this.
    u64::try_from(since.unwrap_or_default().as_millis()).unwrap_or(u64::MAX)
}

fn short(id: &str) -> &str {
    id.get(..8).unwrap_or(id)
}
