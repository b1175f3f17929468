//! The plugin: the pod that ships, and what the driver does with what it wants.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::case::{Kind, SECOND, Version};
use super::runtime::{Container, Is};
use super::{BEGIN, Call, Case, Job, Ms, World};
use crate::back_off::{BackOff, Past};
use crate::clock::Moment;
use crate::ids::{Attempt, ContainerId, ContainerName, ExitCode, PodIdentity, PodKey};
use crate::kube::{ContainerKind, KubeletFeatures, PodSpec};
use crate::node::{Instance, InstanceState};
use crate::plan::{Generation, Plan, Starter};
use crate::policy::{Action, Start, Unread, Written};
use crate::restart::machine::{Effect, Event, Machine, Phase, Record};
use crate::restart::pod::{Command, Gate, Order, Pod, Shared, Task};
use crate::times::RESERVED_LIMIT;

/// A process of the plugin.
#[derive(Debug)]
pub(super) struct Plugin {
    pod: Pod,
    gate: Arc<Gate>,
    queue: VecDeque<Order>,
    kills: BTreeSet<ContainerId>,
    sweeping: BTreeSet<ContainerId>,
    batches: Vec<Batch>,
    /// NRI asks it.
    connected: bool,
}

/// Attempts that are started when all of them have been made.
#[derive(Debug)]
struct Batch {
    generation: Generation,
    missing: usize,
    made: Vec<ContainerId>,
    failed: Option<ContainerName>,
}

impl Plugin {
    /// Takes charge of a pod of which nothing is known but its annotations.
    fn new(case: &Case, past: Past) -> Self {
        let gate = Arc::new(Gate::default());
        let shared = Shared {
            gate: Arc::clone(&gate),
            start: if case.replay {
                Start::Auto
            } else {
                Start::Kubelet
            },
            tells_all: true,
            removals_show: false,
            replay_devices: Vec::new(),
            back_off: back_off(case),
        };
        let identity = PodIdentity {
            sandbox: "sandbox".into(),
            uid: "uid".into(),
            key: PodKey {
                namespace: "default".into(),
                name: "pod".into(),
            },
        };
        let native = KubeletFeatures {
            exited_initialises: case.kubelet == Version::V1_37,
            ..KubeletFeatures::default()
        };
        Self {
            pod: Pod::new(identity, Arc::new(shared), Some(native), past),
            gate,
            queue: VecDeque::new(),
            kills: BTreeSet::new(),
            sweeping: BTreeSet::new(),
            batches: Vec::new(),
            connected: false,
        }
    }

    pub(super) fn is_idle(&self) -> bool {
        self.pod.machine().is_none() && self.queue.is_empty() && self.connected
    }

    fn connect(&mut self) {
        self.connected = true;
        self.gate.set(true);
    }

    fn disconnect(&mut self) {
        self.connected = false;
        self.gate.set(false);
    }
}

fn back_off(case: &Case) -> BackOff {
    let gap = Duration::from_millis(case.back_off);
    BackOff::try_new(gap, 10 * gap, Duration::from_mins(10)).unwrap()
}

/// As if a restart had just been over.
pub(super) fn past(case: &Case) -> Past {
    let of = (case.action == Action::Restart).then(|| case.trigger_name());
    let mut past = Past::default();
    if case.back_off > 0 {
        past.begun(of.as_ref(), BEGIN, Duration::ZERO, &back_off(case));
    }
    past
}

fn written(case: &Case) -> Written {
    let rule = |at: usize, action: Action, code: ExitCode| {
        let key = format!(
            "restart-rules.reprise.dev/container.{}",
            case.containers[at].0
        );
        let rules = json!([{
            "action": format!("{action:?}"),
            "exitCodes": {"operator": "In", "values": [code.0]},
        }]);
        (key, rules.to_string())
    };
    let second = case.second.map(|(at, _, action)| rule(at, action, SECOND));
    let options = json!({"gracePeriodSeconds": case.grace / 1000});
    let options = (
        "restart-options.reprise.dev".to_owned(),
        options.to_string(),
    );
    let annotations = [rule(case.trigger, case.action, case.code), options];
    let annotations = annotations.iter().chain(&second);
    Written::read(&Unread::of(
        annotations.map(|(key, value)| (key.as_str(), value.as_str())),
    ))
}

fn spec(case: &Case, request: Option<&str>) -> PodSpec {
    let of_kind = |regular: bool| -> Vec<Value> {
        let containers = case.containers.iter();
        let containers = containers.filter(|it| (it.1 == ContainerKind::Regular) == regular);
        let spec = containers.map(|(name, kind)| match kind {
            ContainerKind::Sidecar => json!({
                "name": name.as_str(),
                "restartPolicy": "Always",
                "startupProbe": case.probe.map(|_| json!({})),
            }),
            ContainerKind::Init | ContainerKind::Regular => json!({"name": name.as_str()}),
        });
        spec.collect()
    };
    let pod = json!({
        "metadata": {
            "name": "pod", "namespace": "default", "uid": "uid",
            "annotations": request.map(|it| json!({"restart-request.reprise.dev/pod": it})),
        },
        "spec": {
            "restartPolicy": format!("{:?}", case.policy),
            "initContainers": of_kind(false),
            "containers": of_kind(true),
        },
    });
    PodSpec::from_pod(&serde_json::from_value(pod).unwrap(), "node").unwrap()
}

impl World {
    /// A process of the plugin is there, after others or as the first one.
    pub(super) fn comes(&mut self, connected: bool) {
        self.epoch += 1;
        let mut plugin = Plugin::new(&self.case, self.past.clone());
        if connected {
            plugin.connect();
        }
        self.plugin = Some(plugin);
        let written = written(&self.case);
        self.tell(|pod, now| pod.written(written, now));
        self.tell_spec();
        if self.lost {
            return self.record = None;
        }
        let record = self.record.clone();
        self.relisted(record);
        if self.machine().is_none() {
            // Nobody carries on what it tells of.
            self.condition = false;
        }
        for id in self.runtime.hooks.clone() {
            let down = |it: &Machine| it.phase() == Phase::Down;
            if !self.decide_hold(&id) && self.machine().is_some_and(down) {
                // Its time is all but over.
                self.excuse_exposed();
            }
        }
        if !connected {
            self.after(10, Job::Connect(self.epoch));
        }
    }

    fn tell_spec(&mut self) {
        if self.case.spec_known {
            let spec = Arc::new(spec(&self.case, self.request.as_deref()));
            self.tell(|pod, now| pod.spec_changed(spec, now));
        }
    }

    /// Somebody asks for a restart.
    pub(super) fn is_asked(&mut self, value: String) {
        if self.over.is_some() {
            return;
        }
        let stage = self.stage();
        self.reach(format!("somebody asks: {stage}"));
        let gap = |world: &Self| world.machine().map_or(0, |it| it.plan().back_off_ms);
        let before = gap(self);
        self.request = Some(value);
        self.tell_spec();
        if gap(self) < before {
            self.reach("a back-off is cut short");
        }
    }

    /// The plugin lives, and NRI neither tells nor asks it anything.
    pub(super) fn cut(&mut self, away: Ms) {
        let stage = self.stage();
        let Some(plugin) = self.plugin.as_mut().filter(|it| it.connected) else {
            return;
        };
        plugin.disconnect();
        self.reach(format!("NRI is cut: {stage}"));
        self.was_away = true;
        self.after(away, Job::Connect(self.epoch));
    }

    /// A runtime takes no plugin in while exits are held.
    pub(super) fn connect(&mut self) {
        let mut hooks = self.runtime.hooks.iter();
        let waiting = hooks.any(|id| self.is_held(id));
        let plugin = self.plugin.as_mut().unwrap();
        if waiting || plugin.pod.wants(Task::Holds) {
            return self.after(10, Job::Connect(self.epoch));
        }
        plugin.connect();
        self.relisted(None);
    }

    pub(super) fn dies(&mut self) {
        let stage = self.stage();
        self.reach(format!("the plugin dies: {stage}"));
        self.plugin = None;
        self.was_away = true;
        self.lost |= self.over.is_some();
        for call in self.calls_under_way() {
            if self.upto(1) == 1 {
                self.carry_out_call(call);
            }
        }
        // The runtime cancels what it had been asked to start, and may have been a moment ago.
        for id in self.starts_under_way() {
            let cancelled = self.upto(1) == 1;
            if let Some(attempt) = self.runtime.containers.get_mut(&id).filter(|_| cancelled) {
                attempt.is = Is::Exited(ExitCode::START_ERROR);
                self.excuse(true, "a start is cancelled");
            }
        }
    }

    fn relisted(&mut self, begun: Option<Record>) {
        self.listed = self.now;
        let containers = self.runtime.containers.iter();
        let listed = containers.map(|(id, it)| {
            let running = it.seen() == InstanceState::Running;
            let instance = Instance {
                // The first process has been there for long.
                heard_at: if self.epoch == 1 {
                    self.begun
                } else {
                    self.instant()
                },
                listed: true,
                hooked: running.then_some(it.hooked),
                ..self.instance(it)
            };
            (id.clone(), instance)
        });
        let (found, sweep) = (listed.collect(), self.connected());
        if let Some(record) = &begun {
            let phase = record.phase;
            self.log
                .push(format!("{} resumes in {phase:?}: {found:?}", self.now));
            self.reach(format!("another goes on: {phase:?}"));
        }
        self.tell(|pod, now| pod.relisted(found, now.at, begun, sweep, now));
    }

    fn instance(&self, container: &Container) -> Instance {
        Instance {
            name: container.name.clone(),
            state: container.seen(),
            maker: container.maker,
            // Clocks are not set here.
            attempt: Attempt(0),
            created_at: container.created_at,
            heard_at: self.instant(),
            started_at: None,
            listed: false,
            hooked: Some(container.hooked),
        }
    }

    pub(super) fn pod(&self) -> Option<&Pod> {
        Some(&self.plugin.as_ref()?.pod)
    }

    pub(super) fn machine(&self) -> Option<&Machine> {
        self.pod()?.machine()
    }

    pub(super) fn listening(&self) -> bool {
        self.plugin.is_some()
    }

    pub(super) fn connected(&self) -> bool {
        self.plugin.as_ref().is_some_and(|it| it.connected)
    }

    fn wants(&self, task: Task<'_>) -> bool {
        self.pod().is_some_and(|pod| pod.wants(task))
    }

    pub(super) fn is_held(&self, id: &ContainerId) -> bool {
        self.wants(Task::Hold(id))
    }

    /// Whether hooks wait for a plugin that is away.
    pub(super) fn marked(&self) -> bool {
        let record = self.record.as_ref();
        record.is_some_and(|it| it.phase.is_holding(it.plan.way))
    }

    pub(super) fn tell_created(&mut self, id: &ContainerId) {
        let container = self.runtime.containers.get(id);
        let Some(container) = container.filter(|_| self.connected()) else {
            return;
        };
        let instance = self.instance(container);
        self.tell(|pod, _| pod.created(id.clone(), instance));
    }

    pub(super) fn tell_started(&mut self, id: &ContainerId) {
        if self.connected() {
            self.tell_created(id);
            self.tell(|pod, now| pod.started(id, now));
        }
    }

    /// A hook asks whether it is to wait.
    pub(super) fn decide_hold(&mut self, id: &ContainerId) -> bool {
        let since = self.runtime.hook_asked.get(id).copied();
        let waited = Duration::from_millis(self.now - since.unwrap_or(self.now));
        let waits = self.tell(|pod, now| pod.decide_hold(id, waited, now));
        waits == Some(true)
    }

    pub(super) fn learn_code(&mut self, id: &ContainerId) {
        if !self.wants(Task::Code(id)) {
            return;
        }
        let is = self.runtime.containers.get(id).map(|it| it.is);
        if let Some(Is::Stopped(code) | Is::Exited(code)) = is {
            self.tell(|pod, now| pod.ended(id, Some(code), now));
        }
    }

    pub(super) fn verify(&mut self, id: &ContainerId) {
        match self.runtime.containers.get(id).map(Container::seen) {
            Some(InstanceState::Running) => {
                self.tell(|pod, now| pod.started(id, now));
            }
            Some(InstanceState::Ended(code)) => {
                self.tell(|pod, now| pod.ended(id, code, now));
            }
            None => self.removed(id),
            Some(_) => {}
        }
    }

    /// Whether the kubelet may create that container.
    pub(super) fn admits(&mut self, name: &ContainerName) -> bool {
        if !self.connected() {
            return true;
        }
        let admitted = self.tell(|pod, now| pod.admit_create(name, now));
        admitted.is_some_and(|it| it.is_ok())
    }

    pub(super) fn removed(&mut self, id: &ContainerId) {
        self.tell(|pod, now| pod.removed(id, now));
    }

    pub(super) fn let_pod_go(&mut self) {
        self.tell(Pod::deleted);
        self.lost |= self.plugin.is_none();
    }

    pub(super) fn tick_at(&self) -> Option<Ms> {
        let at = self.pod()?.deadline()?;
        let since = at.saturating_duration_since(self.begun);
        let at = u64::try_from(since.as_millis()).unwrap() + self.case.late;
        Some(at.max(self.now))
    }

    pub(super) fn instant(&self) -> Instant {
        self.begun + Duration::from_millis(self.now)
    }

    pub(super) fn feed(&mut self, event: Event) {
        self.log.push(format!("{} {event:?}", self.now));
        self.tell(|pod, now| pod.feed(event, now));
    }

    /// Tells the plugin's pod something, if the plugin is there, and does what follows from it.
    pub(super) fn tell<T>(&mut self, news: impl FnOnce(&mut Pod, &Moment) -> T) -> Option<T> {
        let now = Moment {
            at: self.instant(),
            up_ms: self.now,
            unix_ms: self.now,
        };
        let held_before = self.held_hooks();
        let pod = &mut self.plugin.as_mut()?.pod;
        let holds = |pod: &Pod| pod.machine().map(Machine::is_holding);
        let held = holds(pod);
        let answer = news(pod, &now);
        let commands = pod.commands();
        let releases = held != Some(false) && holds(pod) == Some(false);
        self.note_plan();
        if self.is_shown(&held_before) {
            let stops = self.machine().is_some_and(|it| it.plan().grace_ms > 0);
            self.reach(if stops {
                "it is shown while others stop"
            } else {
                "it is shown while it waits"
            });
            self.excuse_exposed();
        } else if releases {
            self.judge_release();
        }
        if self.machine().is_some_and(Machine::is_failing) {
            self.excuse_unshielded();
        }
        let phase = self.machine().map(Machine::phase);
        let before = std::mem::replace(&mut self.phase, phase);
        if phase != before {
            let stage = self.stage();
            self.reach(stage);
        }
        if (before, phase) == (Some(Phase::Up), Some(Phase::Replay)) {
            self.reach("a replay after a back-off");
        }
        for command in commands {
            self.settle(command);
        }
        Some(answer)
    }

    /// Whether an exit has been released of a pod that waits for its turn, or whose containers stop, or has done so just now.
    fn is_shown(&self, held_before: &[ContainerId]) -> bool {
        let waits = |it: &Machine| it.phase() == Phase::Down;
        let mut hooks = held_before.iter();
        self.machine().is_some_and(waits) && hooks.any(|id| !self.is_held(id))
    }

    fn held_hooks(&self) -> Vec<ContainerId> {
        let hooks = self.runtime.hooks.iter();
        hooks.filter(|id| self.is_held(id)).cloned().collect()
    }

    fn settle(&mut self, command: Command) {
        let plugin = self.plugin.as_mut().unwrap();
        match command {
            Command::Do(order) => {
                let effect = order.effect.clone();
                self.log.push(format!("{}   {effect:?}", self.now));
                plugin.queue.push_back(order);
                if plugin.queue.len() == 1 {
                    self.after(0, Job::Work(self.epoch));
                }
                self.judge(&effect);
            }
            Command::Kill(id) => self.kill(id, 0),
            Command::Remove(id) => self.sweep(id),
            Command::EndKill(id) => drop(plugin.kills.remove(&id)),
            Command::AwaitHook(id) => self.after(1000, Job::NoHook(self.epoch, id)),
            Command::LearnCode(id) => self.after(300, Job::LearnCode(self.epoch, id)),
            Command::Verify(id) => {
                let asking = self.upto(20);
                self.after(asking, Job::Verify(self.epoch, id));
            }
            Command::LearnOom(_) => unreachable!("no rule here is about memory"),
            Command::AskManifest(..) => unreachable!("no pod here is static"),
            Command::Watch(_) | Command::Say(_) => {}
        }
    }

    /// Takes note of what has been decided.
    fn note_plan(&mut self) {
        let Some(plan) = self.pod().and_then(Pod::plan).cloned() else {
            return;
        };
        let same = |last: &&Plan| last.id == plan.id && last.again == plan.again;
        let last = self.decisions.last().filter(same);
        let is_new = last.is_none_or(|last| {
            last.decided_at_ms != plan.decided_at_ms || last.members != plan.members
        });
        if !is_new {
            return;
        }
        let fell_back = last.is_some();
        // What the kubelet does not record cannot be shown to it. A plugin that has come back knows of no restart before, nor
        // does one without a spec.
        let stale = self.kubelet.stale && (self.epoch > 1 || !self.case.spec_known);
        self.excuse(stale, "the status is stale");
        // Without a spec, an init container that runs, or is about to, is taken for a regular one: killed, it has failed, and seen
        // to wait it has the status dropped.
        let initialising = self.is_initialising() && !self.case.spec_known;
        self.excuse(initialising, "an init container of an unknown spec");
        if fell_back {
            // It is the same restart, fallen back. The kubelet may relist before an attempt is removed that never ran.
            let slow = self.case.delays(Kind::Remove);
            let mut inits = self.runtime.containers.values();
            let seen = slow
                && inits.any(|it| {
                    let unstarted = it.is == Is::Created && !it.is_placeholder();
                    unstarted && self.case.kind_of(&it.name) == ContainerKind::Init
                });
            self.excuse(seen, "an attempt that is removed slowly");
            self.decisions.pop();
            self.reach("a replay falls back");
        } else if plan.again > 0 {
            self.reach("it begins anew");
        } else if !self.decisions.is_empty() {
            self.reach("a restart replaces another, or follows it");
            let alone = plan.members.iter().filter(|it| it.is_to_run).count();
            if !plan.is_whole_pod() && alone > 1 {
                self.reach("two containers restart alone together");
            }
        }
        let starter = match plan.starter {
            Starter::Plugin => "by replay",
            Starter::Both { .. } => "by both",
            Starter::Kubelet(_) => "by the kubelet",
        };
        self.reach(format!("{starter}, {:?}", plan.way));
        self.deaf = if self.connected() {
            0
        } else {
            self.now - self.listed
        };
        self.decisions.push(plan);
    }

    fn is_initialising(&self) -> bool {
        let mut containers = self.runtime.containers.values();
        containers.any(|it| {
            let lives = matches!(it.is, Is::Created | Is::Running);
            lives && !it.is_placeholder() && self.case.kind_of(&it.name) == ContainerKind::Init
        })
    }

    /// Performs one effect.
    pub(super) fn work(&mut self) {
        let plugin = self.plugin.as_mut().unwrap();
        let Some(order) = plugin.queue.pop_front() else {
            return;
        };
        if !plugin.queue.is_empty() {
            let pause = self.upto(4);
            self.after(pause, Job::Work(self.epoch));
        }
        self.perform(order);
    }

    fn perform(&mut self, order: Order) {
        let generation = order.record.plan.generation();
        match order.effect {
            Effect::Save => self.record = Some((*order.record).clone()),
            Effect::AskForTurn => match self.case.turn {
                None => self.called(),
                Some(wait) => {
                    self.feed(Event::Queued);
                    self.reach("it waits for its turn");
                    self.after(wait, Job::Called(self.epoch));
                }
            },
            Effect::Announce(restarting) => {
                self.condition = restarting && order.record.plan.condition.is_some();
                // An API server that has gone silent is waited for once, and not for long after that.
                let patience = if self.case.api { self.upto(400) } else { 2000 };
                let restart = generation.0.clone();
                self.after(patience, Job::Announced(self.epoch, restart));
            }
            Effect::Kill(id) => {
                let grace = self.grace_of(&id);
                self.kill(id, grace);
            }
            Effect::MakePlaceholder(name, like) => {
                let making = self.upto(100);
                self.call(making, Call::Make(name, like, generation));
            }
            Effect::Remove(id) => self.sweep(id),
            Effect::Finish(outcome) => {
                let restart = &generation.0;
                let finished = self.tell(|pod, now| pod.finish(restart, outcome, now));
                if let Some(finished) = finished.flatten() {
                    self.record = None;
                    self.past = finished.past;
                    if finished.plan.joined.is_some() {
                        self.reach("a request is answered by another restart");
                    }
                }
            }
            Effect::Recover => {
                let asking = self.upto(50);
                self.after(self.slowed(Kind::Make, asking), Job::Recovered(self.epoch));
            }
            Effect::Replay(names) => {
                let batches = &mut self.plugin.as_mut().unwrap().batches;
                let batch = batches.len();
                batches.push(Batch {
                    generation,
                    missing: names.len(),
                    made: Vec::new(),
                    failed: None,
                });
                for name in names {
                    let making = self.upto(100);
                    self.call(making, Call::Replay(name, batch, self.now));
                }
            }
            Effect::Start(id) => {
                let starting = self.upto(100);
                self.reach("another starts what was made");
                self.after(starting, Job::Replayed(self.epoch, id));
            }
            Effect::Release(_) | Effect::BeginAnew { .. } => {
                unreachable!("done by the pod")
            }
        }
    }

    /// Whether that container may be told to stop: in a plugin that is dead, nothing waits any more.
    pub(super) fn may_signal(&self, id: &ContainerId) -> bool {
        let Some(plan) = self.pod().and_then(Pod::plan) else {
            return true;
        };
        self.now >= plan.decided_up_ms + plan.grace_ms || self.wants(Task::Signal(id))
    }

    /// How long that container may take to stop.
    pub(super) fn grace_of(&self, id: &ContainerId) -> Ms {
        let plan = self.decisions.last();
        let at_once = plan.is_some_and(|plan| plan.grace_of(id).is_zero());
        if at_once { 0 } else { self.case.grace }
    }

    fn kill(&mut self, id: ContainerId, grace: Ms) {
        if self.plugin.as_mut().unwrap().kills.insert(id.clone()) {
            let stopping = self.upto(100 + grace);
            self.call(stopping, Call::Kill(id));
        }
    }

    pub(super) fn called(&mut self) {
        if self.wants(Task::Queue) {
            self.feed(Event::Called);
        }
    }

    pub(super) fn recovered(&mut self) {
        let result = self.case.tells.then_some(()).ok_or_else(|| "untold".into());
        self.feed(Event::Recovered(result));
    }

    pub(super) fn sweep(&mut self, id: ContainerId) {
        if self.plugin.as_mut().unwrap().sweeping.insert(id.clone()) {
            let removing = self.upto(2000);
            self.call(removing, Call::Remove(id));
        }
    }

    /// A failed call is made again if it is still wanted.
    pub(super) fn retry(&mut self, call: Call) {
        let plugin = self.plugin.as_mut().unwrap();
        let wanted = match &call {
            Call::Kill(id) => plugin.kills.contains(id) && plugin.pod.wants(Task::Kill(id)),
            Call::Make(name, _, generation) => {
                let wanted = plugin.pod.wants(Task::Shield(generation, name));
                if !wanted {
                    let (name, generation) = (name.clone(), generation.clone());
                    self.not_made(name, &generation);
                }
                wanted
            }
            Call::Replay(name, batch, _) => {
                return self.attempt_answered(*batch, name, None);
            }
            Call::Remove(_) => true,
        };
        if wanted {
            self.call(5, call);
        }
    }

    pub(super) fn answer_kill(&mut self, event: Event, id: &ContainerId) {
        let plugin = self.plugin.as_mut();
        if plugin.is_some_and(|it| it.kills.remove(id)) {
            self.feed(event);
        }
    }

    /// A placeholder stands.
    pub(super) fn stands(&mut self, name: ContainerName, id: ContainerId, generation: &Generation) {
        let took = Duration::from_millis(self.slowed(Kind::Make, 0));
        self.tell(|pod, now| pod.placeholder_made(name, id, generation, took, now));
    }

    /// None stands, and nobody goes on trying.
    pub(super) fn not_made(&mut self, name: ContainerName, generation: &Generation) {
        self.tell(|pod, now| pod.placeholder_not_made(name, generation, now));
    }

    /// Whether an attempt is asked for again whose name somebody else has.
    pub(super) fn goes_on_asking(&self, batch: usize, since: Ms) -> bool {
        let batch = self.plugin.as_ref().and_then(|it| it.batches.get(batch));
        let in_time = Duration::from_millis(self.now - since) < RESERVED_LIMIT;
        in_time && batch.is_some_and(|it| self.wants(Task::Replay(&it.generation.0)))
    }

    /// An attempt is there, or is not going to be.
    pub(super) fn attempt_answered(
        &mut self,
        batch: usize,
        name: &ContainerName,
        made: Option<ContainerId>,
    ) {
        // Nobody is there to hear it of whom it asked for.
        let Some(batch) = self
            .plugin
            .as_mut()
            .and_then(|it| it.batches.get_mut(batch))
        else {
            return;
        };
        batch.missing -= 1;
        match made {
            Some(id) => batch.made.push(id),
            None => batch.failed = Some(name.clone()),
        }
        if batch.missing > 0 {
            return;
        }
        let (made, failed) = (std::mem::take(&mut batch.made), batch.failed.take());
        let restart = batch.generation.0.clone();
        if let Some(name) = failed {
            let why = "it fails".to_owned();
            self.tell(|pod, now| pod.not_replayed(&restart, name, why, now));
            for id in made {
                self.sweep(id);
            }
            return;
        }
        for id in &made {
            let Some(container) = self.runtime.containers.get(id) else {
                let (name, why) = (name.clone(), "it is gone".to_owned());
                self.tell(|pod, now| pod.not_replayed(&restart, name, why, now));
                continue;
            };
            let attempt = self.instance(container);
            let took = Duration::from_millis(self.slowed(Kind::Make, 0));
            self.tell(|pod, now| pod.attempt_made(&restart, id, attempt, took, now));
        }
        for id in made {
            let starting = self.upto(100);
            self.after(starting, Job::Replayed(self.epoch, id));
        }
    }

    /// The plugin starts what it has made, if that is still wanted.
    pub(super) fn start_replayed(&mut self, id: &ContainerId) {
        let Some(container) = self.runtime.containers.get(id) else {
            return;
        };
        let name = container.name.clone();
        if container.is != Is::Created {
            self.verify(id);
        } else if self.wants(Task::Start(id)) {
            self.admitted(&name);
            self.start(id);
            // The runtime may have told of it already.
            self.tell(|pod, now| pod.started(id, now));
        } else if !self.wants(Task::Stand(id)) {
            self.sweep(id.clone());
        }
    }

    pub(super) fn swept(&mut self, id: &ContainerId) {
        if let Some(plugin) = &mut self.plugin {
            plugin.sweeping.remove(id);
            self.removed(id);
        }
    }
}
