//! How the plugin begins a restart (`driver/decide.rs`).

use std::time::Duration;

use super::case::{Kind, Version};
use super::plugin::Plugin;
use super::runtime::Is;
use super::{BEGIN, Ms, World};
use crate::ids::{ContainerId, ContainerName, ExitCode};
use crate::kube::{ContainerKind, RestartPolicy};
use crate::node::{InstanceState, Maker};
use crate::restart::machine::{Event, Machine, RELIST_INTERVAL};
use crate::restart::plan::tests::circumstances;
use crate::restart::plan::{Circumstances, Member, Old, Plan, RestartId, Starter, Trigger};

impl Plugin {
    pub(super) fn member(
        &self,
        name: &ContainerName,
        kind: ContainerKind,
        policy: RestartPolicy,
    ) -> Member {
        let newest = self.instances.newest(name);
        Member {
            name: name.clone(),
            kind,
            restart_policy: policy,
            old: newest.map(|(id, instance)| Old {
                id: id.clone(),
                exit: match instance.state {
                    InstanceState::Ended(code) if !self.holds.contains(id) => {
                        Some(code.unwrap_or(ExitCode::UNKNOWN))
                    }
                    _ => None,
                },
            }),
            bare: newest.is_some_and(|(_, it)| it.hooked == Some(false)),
            older: self.instances.older(name),
            startup_probe: false,
            placeholders: 0,
        }
    }

    /// What has ended while others run was an init container, as far as one can tell without a spec.
    pub(super) fn guess(&self, trigger: &ContainerName) -> Vec<Member> {
        let names = self.instances.names_by_creation().into_iter();
        names
            .map(|name| {
                let regular = self.member(&name, ContainerKind::Regular, RestartPolicy::Never);
                match &regular.old {
                    Some(Old { exit: Some(_), .. }) if name != *trigger => Member {
                        kind: ContainerKind::Init,
                        ..regular
                    },
                    _ => regular,
                }
            })
            .collect()
    }
}

impl World {
    pub(super) fn begin(&mut self, id: &ContainerId) {
        let plugin = self.plugin.as_mut().unwrap();
        plugin.restarts += 1;
        let restart = RestartId(format!("{id}-{}", plugin.restarts));
        let trigger = Trigger {
            name: self.case.trigger_name(),
            container: id.clone(),
            code: self.case.code,
        };
        let mut circumstances = self.circumstances(restart, trigger);
        circumstances.back_off_ms = self.case.back_off;
        if self.may_replay() {
            circumstances.starter = Starter::Plugin;
        }
        match circumstances.plan() {
            Some(plan) => self.carry_out(plan, 0),
            None => self.let_go(id),
        }
    }

    /// `replay::obstacle`, and what the driver asks beside it.
    fn may_replay(&self) -> bool {
        let (case, plugin) = (&self.case, self.plugin.as_ref().unwrap());
        let probed = |kind| kind == ContainerKind::Sidecar && case.probe.is_some();
        let replayable = |(name, kind): &(ContainerName, ContainerKind)| {
            let newest = plugin.instances.newest(name);
            !probed(*kind) && newest.is_some_and(|(_, it)| it.hooked != Some(false))
        };
        case.replay
            && case.spec_known
            && case.back_off == 0
            && case.grace == 0
            && plugin.connected
            && case.containers.iter().all(replayable)
    }

    fn is_initialising(&self) -> bool {
        let mut containers = self.runtime.containers.values();
        containers.any(|it| {
            let lives = matches!(it.is, Is::Created | Is::Running);
            lives && !it.is_placeholder() && self.case.kind_of(&it.name) == ContainerKind::Init
        })
    }

    pub(super) fn hand_over(&mut self, why: String) {
        let plan = self.machine().unwrap().plan();
        let (restart, trigger) = (plan.id.clone(), plan.trigger.clone());
        let held = self.now - plan.decided_at_ms;
        let plugin = self.plugin.as_mut().unwrap();
        let unstarted = plugin.instances.iter();
        let unstarted = unstarted
            .filter(|(_, it)| it.state == InstanceState::Created && it.maker == Maker::Replay);
        let unstarted: Vec<ContainerId> = unstarted.map(|(id, _)| id.clone()).collect();
        for id in unstarted {
            self.plugin.as_mut().unwrap().instances.removed(&id);
            self.sweep(id);
        }
        let mut circumstances = self.circumstances(restart, trigger);
        circumstances.starter = Starter::Kubelet(why);
        // The kubelet may look before one is removed that never ran.
        let slow = self.case.delays(Kind::Remove);
        let mut inits = self.runtime.containers.values();
        self.excused |= slow
            && inits.any(|it| {
                let unstarted = it.is == Is::Created && !it.is_placeholder();
                unstarted && self.case.kind_of(&it.name) == ContainerKind::Init
            });
        // It is the same restart.
        self.decisions.pop();
        self.carry_out(circumstances.plan().unwrap(), held);
    }

    pub(super) fn begin_again(&mut self) {
        let plan = self.machine().unwrap().plan();
        let (again, start_at) = (plan.again + 1, plan.decided_at_ms + plan.back_off_ms);
        let (restart, trigger) = (plan.id.clone(), plan.trigger.clone());
        let mut circumstances = self.circumstances(restart, trigger);
        circumstances.again = again;
        circumstances.back_off_ms = start_at.saturating_sub(self.now);
        self.carry_out(circumstances.plan().unwrap(), 0);
    }

    pub(super) fn circumstances(&self, id: RestartId, trigger: Trigger) -> Circumstances {
        let (plugin, case) = (self.plugin.as_ref().unwrap(), &self.case);
        let known = case.containers.iter().filter(|_| case.spec_known);
        let known = known.map(|(name, kind)| Member {
            startup_probe: case.probe.is_some(),
            ..plugin.member(name, *kind, case.policy)
        });
        Circumstances {
            id,
            action: case.action,
            containers: if case.spec_known {
                known.collect()
            } else {
                plugin.guess(&trigger.name)
            },
            restart_policy: case.spec_known.then_some(case.policy),
            grace_ms: case.grace,
            decided_at_ms: self.now,
            decided_up_ms: self.now,
            replayed_inits: self.machine().is_some_and(Machine::has_replayed_inits),
            exited_initialises: case.kubelet == Version::V1_37,
            trigger,
            ..circumstances(None, &[], "", 0)
        }
    }

    pub(super) fn carry_out(&mut self, plan: Plan, held: Ms) {
        // What the kubelet does not record cannot be shown to it.
        self.excused |= self.kubelet.stale;
        // Without a spec, an init container that runs, or is about to, is taken for a regular one: killed, it has failed, and seen
        // to wait it has the status dropped.
        self.excused |= self.is_initialising() && !self.case.spec_known;
        // Had it ended for good before, then the kubelet has yet to record that it ran.
        let runs = self.runtime.runs.iter();
        let relist = Ms::try_from(RELIST_INTERVAL.as_millis()).unwrap();
        let began = runs.filter(|run| run.at > BEGIN && run.at + relist > self.now);
        let last = self.case.containers.last().map(|(name, _)| name);
        self.excused |=
            self.case.completed.is_some() && began.map(|run| &run.name).any(|it| Some(it) == last);
        self.decisions.push(plan.clone());
        let now = self.instant();
        let plugin = self.plugin.as_mut().unwrap();
        plugin.settle_olds(&plan);
        let holds: Vec<ContainerId> = plugin.holds.iter().cloned().collect();
        let since = holds.iter().filter_map(|id| self.runtime.knocked.get(id));
        let spent = since.min().map_or(0, |since| self.now - since).max(held);
        let spent = Duration::from_millis(spent);
        // Whatever runs has run for long enough to have been seen.
        let ran = RELIST_INTERVAL;
        let members = plan.members.iter();
        let held = members.filter_map(|it| {
            let old = it.old.as_ref().filter(|old| old.exit.is_none())?;
            Some((it.name.clone(), old.id.clone(), plugin.code(&old.id)?))
        });
        let codes: Vec<_> = held.collect();
        let (machine, effects) =
            Machine::begin(plan, &holds, plugin.machine.as_ref(), ran, spent, now);
        plugin.machine = Some(machine);
        self.apply(effects);
        for (name, id, code) in codes {
            self.feed(Event::Ended(name, id, Some(code)));
        }
    }
}
