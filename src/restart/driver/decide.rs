//! What an exit means for its pod, and the restarts that follow from it.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::spawn_blocking;

use super::perform::story;
use super::places::Place;
use super::state::{Gone, State};
use super::{Driver, Job, Readers};
use crate::cri::{ContainerState, CriError};
use crate::ids::{ContainerId, ContainerName, ExitCode};
use crate::kube::{ContainerKind, Manifest, RestartPolicy};
use crate::node::{InstanceState, Maker};
use crate::policy::{Action, CompletedContainers, Policy, Rules, Unread, Written};
use crate::report::condition_type;
use crate::restart::machine::{Effect, Event, Machine};
use crate::restart::plan::{
    Circumstances, Member, Plan, RestartId, Starter, Trigger, start_at_once,
};
use crate::restart::replay::{self, Obstacle};

impl Driver {
    /// Reads what the pod's author wrote, away from the tasks that answer the runtime: it asks about one container at a
    /// time (`Adaptation.CreateContainer` in NRI's `pkg/adaptation` holds a lock), whosever it is.
    pub(super) async fn read(self: Arc<Self>, annotations: Unread) {
        let turn = match annotations.len() {
            0..=Readers::USUAL => None,
            _ => self.tools.readers.turn().await,
        };
        let read = spawn_blocking(move || Written::read(&annotations)).await;
        drop(turn);
        let written = read.unwrap_or_else(|panic| {
            tracing::error!(pod = %self.pod.key, %panic, "the annotations cannot be read, which is a bug: the pod runs as without the plugin");
            Written::default()
        });
        let mut state = self.lock();
        state.written = Some(Arc::new(written));
        self.judge(&mut state);
        self.say_what_is_bare(&mut state);
        for id in std::mem::take(&mut state.unjudged) {
            self.decide(&mut state, &id);
        }
        drop(state);
        self.read.send_replace(true);
    }

    /// What exits mean, from what is known of the pod.
    pub(super) fn judge(&self, state: &mut State) {
        let Some(written) = state.written.clone() else {
            return;
        };
        let containers = state.spec.iter().flat_map(|spec| &spec.containers);
        let rules = containers
            .filter(|container| !container.rules.is_empty())
            .map(|container| (container.name.to_string(), Rules::from(&*container.rules)));
        let native = state.native.unwrap_or_default();
        let names = state
            .spec
            .as_ref()
            .map(|spec| spec.container_names().collect::<Vec<_>>());
        let policy = Policy::new(written, rules, native).and_then(|policy| {
            if let Some((policy, names)) = policy.as_ref().zip(names) {
                policy.check_names(&names)?;
            }
            Ok(policy)
        });
        state.policy = match policy {
            Ok(policy) => policy.map(Arc::new),
            Err(error) => {
                if !std::mem::replace(&mut state.said_invalid, true) {
                    self.tools.reporter.invalid_rules(&self.pod, &error);
                }
                None
            }
        };
    }

    /// A static pod is over when its manifest is. Without an API server, that says what it is made of as well.
    pub(super) fn look_for_manifest(self: &Arc<Self>) {
        let driver = Arc::clone(self);
        spawn_blocking(move || {
            let Some(Manifest { path, spec }) = driver.tools.static_pods.find(&driver.pod) else {
                return;
            };
            let mut state = driver.lock();
            state.manifest = Some(path);
            // The API server may have been faster.
            let unknown = state.spec.is_none();
            drop(state);
            if unknown {
                driver.spec_changed(Arc::new(spec));
            }
        });
    }

    /// Settles what the exit of this container means: it is part of a restart, begins one, or is let go.
    pub(super) fn decide(self: &Arc<Self>, state: &mut State, id: &ContainerId) {
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
        if state.written.is_none() {
            state.unjudged.push(id.clone());
            return;
        }
        if !state.decided.insert(id.clone()) {
            // Its hook came late: what it announces has been settled.
            state.holds.remove(id);
            return;
        }
        match state.asked(id) {
            Some((trigger, action)) if !state.deleting => match state.manifest.clone() {
                Some(manifest) => self.begin_unless_withdrawn(trigger, action, manifest),
                None => self.begin(state, trigger, action),
            },
            _ if state.is_replayed(id) => {}
            _ => {
                state.holds.remove(id);
            }
        }
    }

    /// A static pod is deleted by taking its manifest away, of which no API tells in time. That may be taken back before
    /// the kubelet has noticed, so that it is asked at each exit.
    fn begin_unless_withdrawn(
        self: &Arc<Self>,
        trigger: Trigger,
        action: Action,
        manifest: PathBuf,
    ) {
        let driver = Arc::clone(self);
        spawn_blocking(move || {
            let static_pods = &driver.tools.static_pods;
            let withdrawn = static_pods.is_withdrawn(&manifest, &driver.pod);
            let mut state = driver.lock();
            if withdrawn {
                driver.let_go(&mut state);
            } else if !state.deleting {
                driver.begin(&mut state, trigger, action);
            }
        });
    }

    fn begin(self: &Arc<Self>, state: &mut State, trigger: Trigger, action: Action) {
        state.restarts += 1;
        let options = state.policy.as_ref().map(|policy| policy.options().clone());
        let grace = match (action, options) {
            (Action::RestartPod, Some(options)) => options.grace(),
            _ => Duration::ZERO,
        };
        let container = trigger.container.clone();
        let id = RestartId(format!("{}-{}", short(container.as_str()), state.restarts));
        let mut circumstances = self.circumstances(state, id, trigger, action, grace);
        let (scope, now) = (
            scope(action, &circumstances.trigger),
            circumstances.decided_up_ms,
        );
        let wait = state.past.wait(scope.as_ref(), now, &self.tools.back_off);
        circumstances.back_off_ms = millis(wait);
        let (starter, place) = match self.place(state, &circumstances) {
            Ok(place) => (Starter::Plugin, place),
            Err(obstacle) => (Starter::Kubelet(obstacle.to_string()), None),
        };
        circumstances.starter = starter;
        let Some(plan) = circumstances.plan() else {
            state.holds.remove(&container);
            return;
        };
        state.place = place;
        state.past.begun(scope.as_ref(), now, &self.tools.back_off);
        self.tools.reporter.restarting(&story(&plan));
        self.carry_out(state, plan, Duration::ZERO);
    }

    /// Whether the containers can be replayed. Only one after another takes a place: what starts at once is as safe as
    /// behind placeholders as soon as all of it is made.
    fn place(
        &self,
        state: &State,
        circumstances: &Circumstances,
    ) -> Result<Option<Place>, Obstacle> {
        let Circumstances {
            action, trigger, ..
        } = circumstances;
        let members = circumstances.containers.iter();
        let concerned = |it: &&Member| *action != Action::Restart || it.name == trigger.name;
        let members: Vec<&Member> = members.filter(concerned).collect();
        let asked = state.policy.as_ref().and_then(|it| it.options().start);
        let start = self.tools.start.asked(asked);
        let spec = state.spec.as_deref();
        let obstacle = if circumstances.back_off_ms > 0 {
            Some(Obstacle::BackOff)
        } else if circumstances.grace_ms > 0 {
            Some(Obstacle::GracePeriod)
        } else if !self.tools.gate.is_there() {
            Some(Obstacle::NoGate)
        } else {
            replay::obstacle(start, spec, &members)
        };
        if let Some(obstacle) = obstacle {
            return Err(obstacle);
        }
        if start_at_once(members) {
            return Ok(None);
        }
        self.tools.places.take().map(Some).ok_or(Obstacle::Busy)
    }

    /// What a replay made and did not start shields nothing, and nobody else would remove it before the kubelet collects
    /// it.
    pub(super) fn sweep_unstarted(self: &Arc<Self>, state: &mut State) {
        let unstarted = state.instances.iter();
        let unstarted = unstarted
            .filter(|(_, it)| it.state == InstanceState::Created && it.maker == Maker::Replay);
        let unstarted: Vec<ContainerId> = unstarted.map(|(id, _)| id.clone()).collect();
        for id in unstarted {
            state.instances.removed(&id);
            // Whatever is heard of it until it is gone: one that was just being started is none of the next round's.
            state.removed.insert(id.clone(), Gone::Soon);
            self.sweep(id);
        }
    }

    /// A replay has failed: the kubelet starts the containers, from what there is now.
    pub(super) fn hand_over(self: &Arc<Self>, state: &mut State, why: String) {
        let Some(plan) = state.machine.as_ref().map(Machine::plan) else {
            return;
        };
        let held = self.tools.clock.since(plan.decided_up_ms);
        let again = plan.again;
        tracing::warn!(pod = %self.pod.key, restart = %plan.id, why, "handing the start over to the kubelet");
        self.sweep_unstarted(state);
        self.plan_anew(state, again, Starter::Kubelet(why), held);
    }

    pub(super) fn begin_again(self: &Arc<Self>, state: &mut State) {
        let Some(plan) = state.machine.as_ref().map(Machine::plan) else {
            return;
        };
        let again = plan.again + 1;
        tracing::warn!(pod = %self.pod.key, restart = %plan.id, again, "containers were started out of order while the gate was away: beginning anew");
        let starter = Starter::Kubelet("the restart was disturbed".into());
        self.plan_anew(state, again, starter, Duration::ZERO);
    }

    /// The same restart, from what there is now.
    fn plan_anew(self: &Arc<Self>, state: &mut State, again: u8, starter: Starter, held: Duration) {
        let Some(plan) = state.machine.as_ref().map(Machine::plan) else {
            return;
        };
        let (id, trigger) = (plan.id.clone(), plan.trigger.clone());
        let (action, grace) = (plan.action, Duration::from_millis(plan.grace_ms));
        let condition = plan.condition.clone();
        let back_off = plan.back_off();
        let back_off = back_off.saturating_sub(self.tools.clock.since(plan.decided_up_ms));
        let mut circumstances = self.circumstances(state, id, trigger, action, grace);
        circumstances.again = again;
        circumstances.starter = starter;
        circumstances.condition = condition;
        circumstances.back_off_ms = millis(back_off);
        if let Some(plan) = circumstances.plan() {
            self.carry_out(state, plan, held);
        }
    }

    /// `held`: for how long exits that belong to it have been held, at the least.
    fn carry_out(self: &Arc<Self>, state: &mut State, plan: Plan, held: Duration) {
        state.settle_olds(&plan);
        let spent = state.held_for().max(held);
        let held: Vec<ContainerId> = state.holds.keys().cloned().collect();
        let ran = state.oldest_run(&plan);
        let now = Instant::now();
        let (machine, effects) =
            Machine::begin(plan, &held, state.machine.as_ref(), ran, spent, now);
        let codes = state.codes_of_held(machine.plan());
        state.machine = Some(machine);
        state.replay = None;
        state.creating.clear();
        self.apply(state, effects);
        for (name, id, code) in codes {
            self.feed(state, Event::Ended(name, id, Some(code)));
        }
    }

    fn circumstances(
        &self,
        state: &State,
        id: RestartId,
        trigger: Trigger,
        action: Action,
        grace: Duration,
    ) -> Circumstances {
        let known = state.shape();
        let restart_policy = known.as_ref().map(|(policy, _)| *policy);
        let containers = known.map_or_else(
            || guessed_members(state, &trigger.name),
            |(_, members)| members,
        );
        Circumstances {
            id,
            pod: self.pod.clone(),
            trigger,
            action,
            condition: condition_type(action, state.native).map(str::to_owned),
            // Whoever plans settles who starts.
            starter: Starter::Plugin,
            restart_policy,
            containers,
            grace_ms: millis(grace),
            keep_completed: state.policy.as_ref().is_some_and(|policy| {
                policy.options().completed_containers == CompletedContainers::Keep
            }),
            decided_at_ms: self.tools.clock.unix_ms(),
            decided_up_ms: self.tools.clock.up_ms(),
            back_off_ms: 0,
            again: 0,
            replayed_inits: state
                .machine
                .as_ref()
                .is_some_and(Machine::has_replayed_inits),
            exited_initialises: state.native.is_none_or(|it| it.exited_initialises),
        }
    }

    /// Asks the runtime whether a container that was refused a successor, or one that waits for its end, really runs: its
    /// end may have fallen between two plugins.
    pub(super) fn verify(self: &Arc<Self>, id: ContainerId) {
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

    /// Returns whether this was news.
    pub(super) fn note_end(
        self: &Arc<Self>,
        state: &mut State,
        id: &ContainerId,
        code: Option<ExitCode>,
    ) -> bool {
        let news = state.instances.ended(id, code);
        if let Some(instance) = state.instances.get(id)
            && news
            && !instance.is_placeholder()
            // Otherwise an init container that asks for another restart would have failed in this one.
            && !state.will_ask(id)
        {
            let name = instance.name.clone();
            self.feed(state, Event::Ended(name, id.clone(), code));
        }
        news
    }

    /// The pod ends: nothing is held any more.
    pub(super) fn let_go(self: &Arc<Self>, state: &mut State) {
        self.feed(state, Event::Deleted);
        state.holds.clear();
    }

    pub(super) fn feed(self: &Arc<Self>, state: &mut State, event: Event) {
        if let Some(machine) = &mut state.machine {
            tracing::debug!(pod = %self.pod.key, phase = ?machine.phase(), ?event);
            let deadline = machine.deadline();
            let effects = machine.handle(Instant::now(), event);
            if machine.deadline() != deadline {
                drop(self.jobs.send(Job::Retime));
            }
            self.apply(state, effects);
        }
    }

    pub(super) fn apply(self: &Arc<Self>, state: &mut State, effects: Vec<Effect>) {
        if !state.machine.as_ref().is_some_and(Machine::may_replay) {
            state.place = None;
            state.turn = None;
        }
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
                Effect::HandOver(why) => self.hand_over(state, why),
                // The queue is closed only after the pod is gone, when nothing matters any more.
                effect => drop(self.jobs.send(Job::Do(effect))),
            }
        }
    }
}

/// What has ended while others run was an init container, as far as one can tell without a spec.
fn guessed_members(state: &State, trigger: &ContainerName) -> Vec<Member> {
    let names = state.instances.names_by_creation().into_iter();
    names
        .map(|name| {
            let mut member = state.member(name, ContainerKind::Regular, RestartPolicy::Never);
            let ended = member.old.as_ref().is_some_and(|old| old.exit.is_some());
            if ended && member.name != *trigger {
                member.kind = ContainerKind::Init;
            }
            member
        })
        .collect()
}

/// Whose row of restarts it belongs to: a container's own, or the pod's.
pub(super) fn scope(action: Action, trigger: &Trigger) -> Option<ContainerName> {
    (action == Action::Restart).then(|| trigger.name.clone())
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

fn short(id: &str) -> &str {
    id.get(..8).unwrap_or(id)
}
