//! What an exit means for its pod, and the restarts that follow from it.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use super::{BegunAnew, Command, Course, Order, Pod, Saying};
use crate::back_off::BackOff;
use crate::clock::Moment;
use crate::ids::{ContainerId, ContainerName, ExitCode};
use crate::kube::{DEFAULT_GRACE, RestartPolicy};
use crate::node::InstanceState;
use crate::plan::{Member, Plan, RestartId, Starter, Trigger, Way, start_at_once};
use crate::policy::{self, Action, CompletedContainers, Policy, Start};
use crate::replay::{self, ReplayBlocker};
use crate::report::condition_type;
use crate::restart::machine::{Effect, Event, Machine, Phase};

impl Pod {
    /// What exits mean, from what is known of the pod.
    pub(super) fn judge(&mut self) {
        let Some(written) = self.written.clone() else {
            return;
        };
        self.policy = match Policy::of_pod(written, self.spec.as_deref(), self.native) {
            Ok(policy) => policy.map(Arc::new),
            Err(error) => {
                if !std::mem::replace(&mut self.said_invalid, true) {
                    self.say(Saying::InvalidRules(error));
                }
                None
            }
        };
        self.say_what_kills_restart();
    }

    /// A kubelet that ends a pod, or one of its containers, may not have said so by the time of the exit.
    fn say_what_kills_restart(&mut self) {
        let Some((policy, spec)) = self.policy.as_ref().zip(self.spec.as_ref()) else {
            return;
        };
        let names = spec.containers.iter().map(|container| &container.name);
        let kills = |name: &str| !policy::kills_that_restart(policy.actions(name)).is_empty();
        let kills = names.filter(|name| kills(name.as_str()));
        let kills: BTreeSet<ContainerName> = kills.cloned().collect();
        if !kills.is_empty() && !std::mem::replace(&mut self.said_kills, true) {
            self.say(Saying::KillsRestart(kills));
        }
    }

    /// The container's own restart policy, if it leaves the container as it is now and the kubelet, which goes by the pod's,
    /// does not (KEP-5307). A restart of all containers is for those that have ended, too.
    pub(super) fn stays_ended(&self, name: &ContainerName) -> Option<RestartPolicy> {
        let own = self.spec.as_ref()?.container(name)?.restart_policy?;
        let restarts = self.has_restart(|it| it.is_to_start_again(name));
        let policy = self.policy.as_ref()?;
        if restarts || !policy.goes_by_spec(name.as_str()) {
            return None;
        }
        let (_, newest) = self.instances.newest(name)?;
        let InstanceState::Ended(Some(code)) = newest.state else {
            return None;
        };
        // What it starts again stands among the rules (`Rules::then`).
        let action = policy.action(name.as_str(), code.0);
        action.is_none().then_some(own)
    }

    /// Settles what the exit of this container means: it is part of a restart, begins one, or is released.
    pub(super) fn decide(&mut self, id: &ContainerId, now: &Moment) {
        if self.is_replaced(id) {
            self.commands.push(Command::EndKill(id.clone()));
            let event = match self.holds.get(id) {
                Some(since) => Event::Held(id.clone(), *since),
                None => Event::Exited(id.clone()),
            };
            return self.feed(event, now);
        }
        if self.has_restart(|it| it.owes(id)) {
            return;
        }
        // A plugin before this one has replayed it, and nobody has seen its exit.
        if self.is_followed(id) && self.holds.remove(id).is_some() {
            self.decided.insert(id.clone());
            return;
        }
        if self.written.is_none() {
            return self.unjudged.push(id.clone());
        }
        if self.awaits_oom(id) {
            if self.unsettled.insert(id.clone()) {
                self.commands.push(Command::LearnOom(id.clone()));
            }
            return;
        }
        if !self.decided.insert(id.clone()) {
            // Its hook came late, or once more: what it announces has been settled, or is hidden.
            if !self.is_replayed(id) {
                self.holds.remove(id);
            }
            return;
        }
        match self.asked(id) {
            Some((trigger, action)) if !self.deleting => self.begin_if_there(trigger, action, now),
            _ if self.is_replayed(id) => {}
            _ => {
                self.say_what_is_unmatched(id);
                self.holds.remove(id);
            }
        }
    }

    fn say_what_is_unmatched(&mut self, id: &ContainerId) {
        if let Some((name, code)) = self.unmatched(id) {
            self.say(Saying::Unmatched(name, code));
        }
    }

    /// A static pod is deleted by taking its manifest away, of which no API tells in time. That may be taken back before
    /// the kubelet has noticed, so that it is asked at each exit.
    pub(super) fn begin_if_there(&mut self, trigger: Trigger, action: Action, now: &Moment) {
        match self.manifest.clone() {
            Some(manifest) => {
                let ask = Command::AskManifest(trigger, action, manifest);
                self.commands.push(ask);
            }
            None => self.begin(&trigger, action, now),
        }
    }

    /// Whether the manifest of a static pod was gone.
    pub(crate) fn manifest_asked(
        &mut self,
        trigger: &Trigger,
        action: Action,
        withdrawn: bool,
        now: &Moment,
    ) {
        // Whoever asks is heard at every news of the pod.
        let (request, ended) = (trigger.request.as_ref(), &trigger.container);
        let is_restarted = self.is_replaced(ended) || self.is_followed(ended);
        if withdrawn {
            self.release_all(now);
        } else if request.is_none() && is_restarted {
            // Another exit was asked about as well, and its restart is of both, or was.
            self.decide(ended, now);
        } else if !self.deleting && request.is_none_or(|it| self.is_still_asked(it)) {
            self.begin(trigger, action, now);
        }
    }

    fn begin(&mut self, trigger: &Trigger, action: Action, now: &Moment) {
        self.restarts += 1;
        let restarts = |it: Member| it.is_restarted_after(trigger.code);
        if action == Action::Restart && self.known_member(&trigger.name).is_some_and(restarts) {
            // The kubelet does so by itself (KEP-5307).
            self.holds.remove(&trigger.container);
            return;
        }
        let machine = self.machine.as_ref();
        let before = machine.filter(|it| it.has_ended_others(&trigger.name));
        // Those would never start if one container alone were restarted in place of a restart that has ended them. Where they
        // are one container's as well, they start together, and none before its time.
        let (action, left) = match before.map(Machine::plan) {
            Some(plan) if !action.is_whole_pod() && plan.is_whole_pod() => (plan.action, 0),
            Some(plan) if !action.is_whole_pod() => (action, left_of_back_off(plan, now)),
            _ => (action, 0),
        };
        // What another restart has made and not started, nobody starts any more.
        self.sweep_unstarted();
        let held = self.holds.get(&trigger.container).copied();
        self.course = Some(Course::new(held.unwrap_or(now.at)));
        let wait = self.note_begin(trigger, action, now);
        let plan = Plan {
            back_off_ms: millis(wait).max(left),
            ..self.draft(trigger.clone(), action, now)
        };
        let blocker = self.blocker(&plan);
        let mut plan = self.settle(plan);
        if let Some(blocker) = blocker {
            let why = blocker.to_string();
            let first = blocker.container();
            plan.starter = if let Some(both) = first.and_then(|it| plan.replayed_until(it, &why)) {
                both
            } else {
                self.say(Saying::NotReplayed(blocker));
                Starter::Kubelet(why)
            };
        }
        self.say(Saying::Restarting(Box::new(plan.clone())));
        self.carry_out(plan, now);
    }

    /// Takes note of it in the row of restarts, and says how long it is to wait. A request is no crash: it neither waits nor
    /// counts.
    fn note_begin(&mut self, trigger: &Trigger, action: Action, now: &Moment) -> Duration {
        if trigger.request.is_some() {
            return Duration::ZERO;
        }
        let (scope, back_off) = (scope(action, trigger), &self.back_off());
        let wait = self.past.wait(scope.as_ref(), now.up_ms, back_off);
        self.past_before = self.past.clone();
        self.past.begun(scope.as_ref(), now.up_ms, wait, back_off);
        wait
    }

    /// The gaps between its restarts.
    pub(super) fn back_off(&self) -> BackOff {
        let node = self.shared.back_off;
        self.options()
            .map_or(node, |options| node.asked(&options.back_off))
    }

    /// What keeps the containers from being replayed.
    fn blocker(&self, plan: &Plan) -> Option<ReplayBlocker> {
        let concerned = |it: &&Member| plan.is_whole_pod() || it.is_to_run;
        let members: Vec<&Member> = plan.members.iter().filter(concerned).collect();
        let start = self.start();
        let at_once = start_at_once(members.iter().copied());
        if !self.shared.tells_all && start != Start::Kubelet {
            Some(ReplayBlocker::Untold)
        } else if plan.back_off_ms > 0 && !at_once {
            Some(ReplayBlocker::BackOff)
        } else if !self.shared.gate.is_there() {
            Some(ReplayBlocker::NoGate)
        } else {
            let (spec, devices) = (self.spec.as_deref(), &self.shared.replay_devices);
            let blocker = replay::blocker(start, spec, &members, devices);
            // What comes before that container may be replayed.
            let first = blocker.as_ref().map(ReplayBlocker::container);
            let before = members
                .iter()
                .take_while(|it| first != Some(Some(&it.name)));
            let before: Vec<&Member> = before.copied().collect();
            let changed = self.requests.changed(&before, spec);
            changed.filter(|_| first != Some(None)).or(blocker)
        }
    }

    /// Begins the same restart anew from what there is now, for the kubelet to start: what was planned cannot be done, as
    /// when a replay fails, or the restart was disturbed.
    pub(crate) fn begin_anew(&mut self, disturbed: bool, why: String, now: &Moment) {
        let Some(before) = self.plan().cloned() else {
            return;
        };
        self.say(Saying::BegunAnew(Box::new(BegunAnew {
            restart: before.id.clone(),
            again: before.again,
            disturbed,
            why: why.clone(),
        })));
        if !disturbed {
            self.sweep_unstarted();
        }
        let waited = now.since(before.decided_up_ms);
        if let Some(course) = &mut self.course {
            course.note_anew(&before, waited);
        }
        // Of those that restart alone, what has begun goes on.
        let alone = self.machine.as_ref().filter(|_| !before.is_whole_pod());
        let mut plan = self.draft(before.trigger.clone(), before.action, now);
        for member in &mut plan.members {
            let then = before.member(&member.name);
            // What the kubelet has started meanwhile is ended, and is to run again as well.
            let begun = alone.is_some_and(|it| it.runs_again(&member.name));
            member.is_to_run |= then.is_some_and(|it| it.is_to_run) && !begun;
            let old = member.old_id();
            let was = then.is_some_and(|it| it.at_once);
            member.at_once = member.unhooked && (was || old.is_some_and(|id| !before.knew(id)));
        }
        let left = left_of_back_off(&before, now);
        let plan = Plan {
            id: before.id,
            condition: before.condition,
            // What a replay has begun to start is ended at once: exits are held meanwhile.
            grace_ms: if disturbed {
                before.grace_ms.saturating_sub(millis(waited))
            } else {
                0
            },
            back_off_ms: left,
            again: before.again + u8::from(disturbed),
            starter: Starter::Kubelet(why),
            ..plan
        };
        self.carry_out(self.settle(plan), now);
    }

    fn carry_out(&mut self, plan: Plan, now: &Moment) {
        self.settle_olds(&plan);
        let (holds, found) = (&self.holds, &self.instances);
        let before = self.machine.as_ref();
        let (machine, effects) = Machine::begin(plan, holds, before, found, now.at);
        self.machine = Some(machine);
        self.apply(effects, now);
        self.tell_recorded(now);
    }

    /// A restart that begins now, as far as it can be told before it is settled.
    fn draft(&self, trigger: Trigger, action: Action, now: &Moment) -> Plan {
        let machine = self.machine.as_ref();
        let replayed_inits = machine.is_some_and(Machine::has_replayed_inits);
        let grace = match action {
            // What a replay has just begun to start has nothing to lose, and the kubelet may see none of it end by itself.
            Action::RestartPod if !replayed_inits => self.grace(),
            Action::RestartPod | Action::Restart | Action::RestartAllContainers => Duration::ZERO,
        };
        let shape = self.shape();
        let ordered = shape.is_some();
        let mut members = shape.unwrap_or_else(|| self.guessed(&trigger.name));
        // One container alone replaces no restart of the whole pod.
        let replaced = machine.filter(|it| action.is_whole_pod() || !it.plan().is_whole_pod());
        for member in &mut members {
            // One that waits for its start in a restart which this one replaces.
            let waits = replaced.is_some_and(|it| it.is_to_run_again(&member.name));
            member.runs_unrecorded =
                member.exit().is_none() && self.completed.contains(&member.name);
            let ends = action.is_whole_pod() && member.was_running();
            member.is_to_run = ends || waits || member.name == trigger.name;
        }
        Plan {
            id: RestartId(format!(
                "{}-{}",
                short(trigger.container.as_str()),
                self.restarts
            )),
            pod: self.identity.clone(),
            action,
            condition: condition_type(action, self.native).map(str::to_owned),
            starter: Starter::Plugin,
            way: Way::Cleared,
            guard: trigger.name.clone(),
            // One that this one replaces has been asked for.
            joined: machine.and_then(|it| it.plan().answers()).cloned(),
            trigger,
            members,
            ordered,
            grace_ms: millis(grace),
            decided_at_ms: now.unix_ms,
            decided_up_ms: now.up_ms,
            back_off_ms: 0,
            again: 0,
            replayed_inits,
            removals_show: self.shared.removals_show,
        }
    }

    /// How long its containers may take to stop.
    fn grace(&self) -> Duration {
        let asked = self.options().and_then(|it| it.grace_period);
        let of_spec = self.spec.as_ref().map_or(DEFAULT_GRACE, |it| it.grace);
        asked.unwrap_or(of_spec)
    }

    fn settle(&self, draft: Plan) -> Plan {
        let completed = self.options().map(|it| it.completed_containers);
        draft.settle(
            completed == Some(CompletedContainers::Keep),
            self.native.is_none_or(|it| it.exited_initialises),
        )
    }

    /// Returns whether this was news.
    pub(super) fn note_end(
        &mut self,
        id: &ContainerId,
        code: Option<ExitCode>,
        now: &Moment,
    ) -> bool {
        let news = self.instances.ended(id, code);
        if news {
            self.tell_end(id, now);
        }
        news
    }

    /// Tells the restart under way of an end, unless that begins another one: an init container that asks for it would have
    /// failed in this one.
    pub(super) fn tell_end(&mut self, id: &ContainerId, now: &Moment) {
        if let Some(instance) = self.instances.get(id)
            && let InstanceState::Ended(code) = instance.state
            && !instance.is_placeholder()
            && !self.will_ask(id)
        {
            let event = if self.is_followed(id) {
                Event::Exited(id.clone())
            } else {
                Event::Ended(instance.name.clone(), id.clone(), code)
            };
            self.feed(event, now);
        }
    }

    /// Whether the news of its end are late: another attempt has followed it.
    pub(super) fn is_followed(&self, id: &ContainerId) -> bool {
        let instance = self.instances.get(id);
        let followed = instance.is_some_and(|it| self.instances.is_followed(it));
        followed && !self.is_replaced(id)
    }

    /// The pod ends: nothing is held any more.
    pub(super) fn release_all(&mut self, now: &Moment) {
        self.feed(Event::Deleted, now);
        self.holds.clear();
    }

    /// When the trigger was made, by the wall clock of now, in nanoseconds: it may have been set back since. Of one that is gone,
    /// the restart's begin.
    fn trigger_made_at(&self, plan: &Plan, now: &Moment) -> i64 {
        let ago = |since| i64::try_from(now.at.saturating_duration_since(since).as_nanos());
        let wall = |ms: u64| i64::try_from(u128::from(ms) * 1_000_000).unwrap_or(i64::MAX);
        match self.instance(&plan.trigger.container) {
            Some(it) => {
                let heard = ago(it.heard_at).map(|ago| wall(now.unix_ms).saturating_sub(ago));
                it.created_at.min(heard.unwrap_or(i64::MAX))
            }
            None => wall(plan.decided_at_ms),
        }
    }

    pub(super) fn apply(&mut self, effects: Vec<Effect>, now: &Moment) {
        if effects.is_empty() {
            return;
        }
        let Some(machine) = &self.machine else { return };
        let record = Arc::new(machine.record());
        let over = record.phase == Phase::Over;
        if matches!(record.phase, Phase::Clear | Phase::Up) {
            self.sweep_unknown(now.at);
        }
        for effect in effects {
            tracing::debug!(pod = %self.identity.key, ?effect);
            match effect {
                // Together and now: the kubelet is to see all exits as one event.
                Effect::Release(ids) => self.holds.retain(|id, _| !ids.contains(id)),
                Effect::BeginAnew { disturbed, why } => self.begin_anew(disturbed, why, now),
                // Until its end has been carried out, there is nothing better to go on from than what is on the disk.
                Effect::Save if over => {}
                effect => {
                    if let Effect::Kill(id) = &effect {
                        // Its exit asks for nothing, and may be seen.
                        self.decided.insert(id.clone());
                    }
                    let order = Order {
                        effect,
                        trigger_made_at: self.trigger_made_at(&record.plan, now),
                        // The same for all generations of the restart.
                        trigger_known_at_ms: self
                            .course
                            .as_ref()
                            .map_or(record.plan.decided_at_ms, |it| now.unix_ms_at(it.since)),
                        record: Arc::clone(&record),
                        spec: self.spec.clone(),
                    };
                    self.commands.push(Command::Do(order));
                }
            }
        }
    }
}

/// Whose row of restarts it belongs to: a container's own, or the pod's.
pub(super) fn scope(action: Action, trigger: &Trigger) -> Option<ContainerName> {
    (action == Action::Restart).then(|| trigger.name.clone())
}

/// In milliseconds.
fn left_of_back_off(plan: &Plan, now: &Moment) -> u64 {
    let waited = millis(now.since(plan.decided_up_ms));
    plan.back_off_ms.saturating_sub(waited)
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

fn short(id: &str) -> &str {
    id.get(..8).unwrap_or(id)
}
