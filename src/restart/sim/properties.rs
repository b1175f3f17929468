//! What must be true of every restart.

use std::collections::BTreeSet;

use super::case::{INIT_FAILURE, Kind, LONGEST_FAULT};
use super::kubelet::{Phase as PodPhase, SLOWED};
use super::plugin::Plugin;
use super::runtime::Is;
use super::{BEGIN, Ms, STANDSTILL, World};
use crate::ids::{ContainerName, ExitCode};
use crate::kube::{ContainerKind, RestartPolicy};
use crate::plan::{Member, Old, Plan, Way};
use crate::policy::Request;
use crate::restart::machine::{Effect, Machine, Phase};

/// How long a pod that is over is watched: for longer than any fault lasts.
const AFTERMATH: Ms = LONGEST_FAULT + 1_000;

impl World {
    /// What the kubelet thinks of the pod.
    pub(super) fn phase_is(&mut self, phase: PodPhase) {
        if matches!(phase, PodPhase::Pending | PodPhase::Running) {
            return;
        }
        let its_own_doing = self.excused || self.decisions.is_empty() || self.is_to_fail();
        self.demand(its_own_doing, || format!("the pod is not {phase:?}"));
        self.ends(false);
    }

    /// Looks at what the machine wants done.
    pub(super) fn judge(&mut self, effect: &Effect) {
        if let Effect::Finish(outcome) = effect {
            self.reach(format!("over: {outcome:?}"));
        }
        match effect {
            Effect::Announce(restarting) => self.told = *restarting,
            Effect::Kill(id) => {
                let whole = self.machine().is_some_and(|it| it.plan().is_whole_pod());
                let replaced = self.machine().is_some_and(|it| it.replaces(id));
                let killed = self.runtime.containers.get(id);
                let twin = killed.is_some_and(|it| self.runtime.running(&it.name) > 1);
                let told = self.told || !whole || !replaced || twin;
                self.demand(told, || "nothing is killed unannounced".into());
            }
            _ => {}
        }
    }

    /// Looks at what shields the exits that may be seen from now on.
    pub(super) fn judge_release(&mut self) {
        let slow = self.machine().is_some_and(Machine::may_replay) && self.case.delays(Kind::Make);
        self.excuse(slow, "a replay that takes seconds to make an attempt");
        let mut shields = self.runtime.containers.values();
        let young = shields.any(|it| it.is_placeholder() && it.age(self.now) < SLOWED);
        let young = young && self.case.delays(Kind::Make);
        self.excuse(young, "a slow relist may have missed what shields");
        // At the end of `Down`, of which the disk knows only after it.
        if self.marked() && !self.are_shielded() {
            self.excuse_unshielded();
        }
    }

    /// What is shown while the pod waits is removed where its shields take too long, and may be seen before it is gone.
    pub(super) fn excuse_exposed(&mut self) {
        let leftovers = self.machine().map(Machine::leftovers).unwrap_or_default();
        let lacks = |it: &Member, old: &Old| {
            let stands = leftovers.iter().filter(|(name, _)| *name == it.name);
            let ended = self.runtime.containers.get(&old.id);
            ended.is_some_and(|it| matches!(it.is, Is::Stopped(_)))
                && stands.count() < usize::from(it.placeholders)
        };
        let plan = self.decisions.last();
        let mut members = plan.into_iter().flat_map(|plan| &plan.members);
        let lacks = members.any(|it| it.old.as_ref().is_some_and(|old| lacks(it, old)));
        let late = self.shields_may_be_late();
        self.excuse(late && lacks, "it is shown without all its shields");
    }

    pub(super) fn shields_may_be_late(&self) -> bool {
        self.was_away || self.case.delays(Kind::Make)
    }

    pub(super) fn excuse_unshielded(&mut self) {
        self.demand(self.shields_may_be_late(), || {
            "nothing is released unshielded".into()
        });
        self.excuse(true, "nothing shields in time");
    }

    fn are_shielded(&self) -> bool {
        let plan = self.decisions.last().unwrap();
        let containers = &self.runtime.containers;
        // What the kubelet was about to start when it was decided hides the exit before as well.
        let runs_anew = |it: &Member, old: &Old| {
            let mut others = containers
                .iter()
                .filter(|(id, of)| of.name == it.name && **id != old.id);
            others.any(|(_, of)| of.is == Is::Running)
        };
        let leftovers = self.machine().map(Machine::leftovers).unwrap_or_default();
        let standing = |it: &Member| {
            let shields = leftovers.iter().filter(|(name, _)| *name == it.name);
            shields
                .filter(|(_, id)| containers.contains_key(id))
                .count()
        };
        let is_shielded = |it: &Member| {
            let old = it.old.as_ref();
            let shown = old.filter(|old| containers.contains_key(&old.id) && !runs_anew(it, old));
            shown.is_none() || standing(it) >= usize::from(it.placeholders)
        };
        let replays = self
            .machine()
            .is_some_and(|it| it.replays() && plan.back_off_ms == 0);
        let all = plan.members.iter().all(is_shielded);
        self.over.is_some() || replays || plan.way == Way::Kept || all
    }

    /// The gate has let this one pass, if there is one.
    pub(super) fn admitted(&mut self, name: &ContainerName) {
        // With the gate open, the kubelet may start what a placeholder hides from it.
        let alone = !self.connected() || !self.runtime.runs(name);
        self.demand(alone, || format!("{name} runs once at a time"));
        let under_way = |it: &&Machine| self.connected() && it.phase() != Phase::Over;
        let machine = self.machine().filter(under_way);
        let Some(plan) = machine
            .map(Machine::plan)
            .filter(|it| it.member(name).is_some())
        else {
            return;
        };
        let since = plan.decided_at_ms;
        let stale: Ms = match self.case.cut {
            // What the kubelet started meanwhile nobody had heard of.
            Some(_) if self.was_away => since - BEGIN,
            // One that comes back may decide on a list from before the last start, as old as it is.
            None if self.was_away => self.deaf.max(1000),
            _ => 0,
        };
        let due = self.now >= since + plan.back_off_ms;
        let keeps_order = plan.ordered && plan.is_whole_pod() && plan.way != Way::Shielded;
        let ran = |other: &ContainerName, kind| {
            let mut runs = self.runtime.runs.iter();
            let last = runs.rfind(|run| run.name == *other && run.at + stale >= since);
            let completed = |end: Option<ExitCode>| {
                kind == ContainerKind::Sidecar || end == Some(ExitCode::SUCCESS)
            };
            last.is_some_and(|run| completed(run.end))
        };
        let turn = !keeps_order || {
            let mut before = self.case.inits().take_while(|it| it.0 != *name);
            before.all(|(other, kind)| ran(other, *kind))
        };
        self.demand(due, || format!("{name} waits until the back-off is over"));
        let probed = |(other, kind): &(ContainerName, ContainerKind)| {
            let mut runs = self.runtime.runs.iter();
            let last = runs.rfind(|run| run.name == *other);
            let since = last.map_or(0, |run| run.at);
            // The model counts from its creation, which is up to 100 ms before its start.
            let passed = |long| self.now + 100 >= since + long;
            *kind != ContainerKind::Sidecar || self.case.probe.is_none_or(passed)
        };
        let regular = self.case.kind_of(name) == ContainerKind::Regular;
        let waits = regular && keeps_order && self.plain;
        let ready = !waits || self.case.inits().all(probed);
        self.demand(ready, || format!("{name} waits for startup probes"));
        self.demand(turn, || format!("{name} waits for its turn"));
    }

    /// Whether nothing will happen any more.
    pub(super) fn is_quiet(&self) -> bool {
        if let Some(over) = self.over {
            return self.now > over + AFTERMATH;
        }
        self.is_idle()
            && self
                .agenda
                .values()
                .all(|job| job.is_routine() || job.epoch().is_some_and(|it| it != self.epoch))
            && self.runtime.hooks.is_empty()
            && self.all_run()
    }

    /// Whether nothing happens to a pod that is not as it should be.
    pub(super) fn stands_still(&self) -> bool {
        let is_done = self.over.is_some() || (self.is_idle() && self.all_run());
        let back_off = self.decisions.last();
        let due = back_off.map_or(0, |plan| plan.decided_at_ms + plan.back_off_ms);
        // Without a spec it is not known that the kubelet has gone on.
        self.case.spec_known && !is_done && self.now > self.stirred.max(due) + STANDSTILL
    }

    fn is_idle(&self) -> bool {
        self.plugin.as_ref().is_some_and(Plugin::is_idle)
    }

    pub(super) fn all_run(&self) -> bool {
        // A plugin that comes back late leaves alone what has completed.
        let ran = |member: &Member| {
            !self.was_away || member.old.as_ref().is_none_or(|old| old.exit.is_none())
        };
        let restarted = |plan: &Plan, name: &ContainerName| plan.member(name).is_some_and(ran);
        let expected = |name: &ContainerName| {
            self.case.kind_of(name) != ContainerKind::Init
                && self.decisions.iter().any(|plan| restarted(plan, name))
        };
        let lenient = self.excused && self.case.policy != RestartPolicy::Always;
        let mut containers = self.case.containers.iter();
        lenient || containers.all(|(name, _)| !expected(name) || self.runtime.runs(name))
    }

    pub(super) fn look_back(&mut self) {
        if !self.lost && self.plugin.is_some() {
            // Attempts that a runtime makes after the plugin that asked for them has died, the kubelet collects.
            let late = self.was_away && self.case.delays(Kind::Make);
            let mut containers = self.runtime.containers.values();
            let left = containers.any(|it| it.is == Is::Created && (it.is_placeholder() || !late));
            let nothing = !left && self.runtime.hooks.is_empty();
            self.demand(nothing, || "nothing is left".into());
            let silent = !self.condition && self.record.is_none();
            self.demand(silent, || "nobody is told of a restart that is over".into());
        }
        let listens = self.connected() && self.over.is_none();
        let mut names = self.case.containers.iter().map(|(name, _)| name);
        let twice = names.find(|name| self.runtime.running(name) > 1).cloned();
        self.demand(twice.is_none() || !listens, || {
            format!("{twice:?} runs twice for good")
        });
        let lasts = self.over.is_none() && !self.is_to_fail();
        let halved = lasts && self.plugin.is_some() && self.is_halved();
        self.demand(!halved, || {
            "no pod goes on with some of its containers".into()
        });
        // It says nothing of a pod in which one runs again that had completed.
        let own = self.case.own_exit.map(|(_, _, code)| code);
        // Of two that ask, the one that comes second may have ended for good when that is known.
        let second = self.case.second.map(|_| self.case.code);
        let mut codes = self.case.completed.into_iter().chain(own).chain(second);
        let completed = codes.any(|code| !self.case.restarts_after(code));
        let unsaid = self.kubelet.stale && !completed && self.over.is_none() && !self.excused;
        self.demand(!unsaid, || "the kubelet says what it sees".into());
        let answered = self.past.answered.as_ref().map(Request::as_str);
        // Nothing restarts a pod of which nothing is left, or nothing but sidecars runs yet.
        let mut containers = self.runtime.containers.values();
        let lives = containers.any(|it| {
            it.is == Is::Running && self.case.kind_of(&it.name) != ContainerKind::Sidecar
        });
        let heard = lives && self.over.is_none() && self.plugin.is_some();
        let unanswered = heard && self.request.is_some() && answered != self.request.as_deref();
        self.demand(!unanswered, || "what was asked for is answered".into());
        let requested = self.decisions.iter().filter_map(|plan| {
            let request = plan.trigger.request.as_ref()?;
            Some((request.as_str(), &plan.id.0))
        });
        let restarts: BTreeSet<_> = requested.collect();
        let requests: BTreeSet<_> = restarts.iter().map(|it| it.0).collect();
        let once = restarts.len() == requests.len();
        self.demand(once, || "a request makes one restart".into());
        if self.over.is_none() && self.plain {
            // What the kubelet was creating by then may make it begin anew.
            let ids: BTreeSet<_> = self.decisions.iter().map(|plan| &plan.id.0).collect();
            self.demand(ids.len() <= 1, || "one exit makes one restart".into());
            let starts = |since: Ms, member: &Member| {
                let old = member.old.as_ref().map(|old| &old.id);
                let runs = self
                    .runtime
                    .runs
                    .iter()
                    .filter(|run| run.name == member.name);
                runs.filter(|run| run.at >= since && Some(&run.id) != old)
                    .count()
            };
            let once = self.decisions.last().is_none_or(|plan| {
                let since = plan.decided_at_ms;
                plan.members.iter().all(|it| starts(since, it) == 1)
            });
            self.demand(once, || "each container starts once".into());
        }
    }

    /// An init container has failed, for which the kubelet fails the pod as soon as it looks.
    fn is_to_fail(&self) -> bool {
        let mut runs = self.runtime.runs.iter();
        let never = self.case.policy == RestartPolicy::Never;
        never && runs.any(|run| run.end == Some(INIT_FAILURE))
    }

    /// Whether some regular containers run again, and others have ended for good by the restart.
    fn is_halved(&self) -> bool {
        let Some(plan) = self.decisions.last().filter(|it| it.is_whole_pod()) else {
            return false;
        };
        // The plan may have been made without a spec.
        let regular = |it: &&Member| self.case.kind_of(&it.name) == ContainerKind::Regular;
        let regulars: Vec<&Member> = plan.members.iter().filter(regular).collect();
        // Where it has begun anew, what has started since the exit may have come before that.
        let since = |it: &Member| {
            let old = it.old.as_ref().map(|old| &old.id);
            let mut runs = self.runtime.runs.iter();
            let last = runs.rfind(|run| run.name == it.name);
            last.filter(|run| Some(&run.id) != old)
        };
        let again = |it: &Member| since(it).is_some_and(|run| run.end.is_none());
        let waits = |it: &Member| {
            let mut containers = self.runtime.containers.values();
            containers.any(|is| is.name == it.name && matches!(is.is, Is::Created | Is::Running))
        };
        let ran = |old: &Old| old.exit.is_none() || old.id == plan.trigger.container;
        let ended =
            |it: &Member| it.old.as_ref().is_some_and(ran) && since(it).is_none() && !waits(it);
        self.case.policy == RestartPolicy::Never
            && regulars.iter().any(|it| again(it))
            && regulars.iter().any(|it| ended(it))
    }

    pub(super) fn demand(&mut self, truth: bool, what: impl FnOnce() -> String) {
        if !truth && self.wrong.is_none() {
            self.wrong = Some(format!("at {}: {}", self.now, what()));
        }
    }
}
