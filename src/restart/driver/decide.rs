//! What an exit means for its pod, and the restarts that follow from it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::perform::story;
use super::state::State;
use super::{Driver, Job, unix_ms};
use crate::cri::{ContainerState, CriError};
use crate::ids::{ContainerId, ExitCode};
use crate::kube::ContainerKind;
use crate::policy::{Action, CompletedContainers};
use crate::restart::machine::{Effect, Event, Machine};
use crate::restart::plan::{Circumstances, Plan, RestartId, Trigger};

impl Driver {
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
        if !state.decided.insert(id.clone()) {
            // Its hook came late: what it announces has been settled.
            state.holds.remove(id);
            return;
        }
        let trigger = state.trigger(id);
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

    pub(super) fn begin(self: &Arc<Self>, state: &mut State, trigger: Trigger, action: Action) {
        state.restarts += 1;
        let options = state.policy.as_ref().map(|policy| policy.options().clone());
        let grace = match (action, options) {
            (Action::RestartPod, Some(options)) => options.grace(),
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

    pub(super) fn begin_again(self: &Arc<Self>, state: &mut State) {
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

    pub(super) fn carry_out(self: &Arc<Self>, state: &mut State, plan: Plan) {
        state.settle_olds(&plan);
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

    pub(super) fn circumstances(
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
            keep_completed: state.policy.as_ref().is_some_and(|policy| {
                policy.options().completed_containers == CompletedContainers::Keep
            }),
            decided_at_ms: unix_ms(),
            again,
        }
    }

    /// Asks the runtime whether a container that was refused a successor really runs: its end may have fallen
    /// between two plugins.
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
            && !instance.placeholder
        {
            let name = instance.name.clone();
            self.feed(state, Event::Ended(name, id.clone(), code));
        }
        news
    }

    pub(super) fn let_go(self: &Arc<Self>, state: &mut State) {
        state.deleting = true;
        self.feed(state, Event::Deleted);
        state.holds.clear();
    }

    pub(super) fn feed(self: &Arc<Self>, state: &mut State, event: Event) {
        if let Some(machine) = &mut state.machine {
            tracing::debug!(pod = %self.pod.key, phase = ?machine.phase(), ?event);
            let effects = machine.handle(Instant::now(), event);
            self.apply(state, effects);
        }
    }

    pub(super) fn apply(self: &Arc<Self>, state: &mut State, effects: Vec<Effect>) {
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
}

fn short(id: &str) -> &str {
    id.get(..8).unwrap_or(id)
}
