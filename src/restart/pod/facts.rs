//! What is known of a pod, as it is asked for.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use super::Pod;
use crate::clock::Moment;
use crate::ids::{ContainerId, ContainerName, ExitCode, PodUid};
use crate::kube::{ContainerKind, RestartPolicy, StartDuty};
use crate::node::{Instance, InstanceState};
use crate::policy::Action;
use crate::restart::back_off::Past;
use crate::restart::machine::{Machine, Phase};
use crate::restart::plan::{Member, Old, Plan, RestartId, Trigger};
use crate::restart::record::Record;

/// Which restart, and how often it has begun anew.
pub(in crate::restart) type Generation = (RestartId, u8);

impl Pod {
    /// Its restart, if one is under way, or is over and wants things done.
    pub(in crate::restart) fn machine(&self) -> Option<&Machine> {
        self.machine.as_ref()
    }

    /// What its restart is to do.
    pub(in crate::restart) fn plan(&self) -> Option<&Plan> {
        self.machine.as_ref().map(Machine::plan)
    }

    pub(in crate::restart) fn generation(&self) -> Option<Generation> {
        let plan = self.plan()?;
        Some((plan.id.clone(), plan.again))
    }

    /// What must outlive the plugin.
    pub(in crate::restart) fn record(&self) -> Option<Record> {
        let machine = self.machine.as_ref()?;
        Some(Record {
            phase: machine.phase(),
            plan: machine.plan().clone(),
        })
    }

    pub(in crate::restart) fn past(&self) -> &Past {
        &self.past
    }

    /// When it is to be told that time has passed.
    pub(in crate::restart) fn deadline(&self) -> Option<Instant> {
        self.machine.as_ref().and_then(Machine::deadline)
    }

    /// Whether the hook of this container is to wait.
    pub(in crate::restart) fn is_held(&self, id: &ContainerId) -> bool {
        self.holds.contains_key(id)
    }

    /// Whether exits of its restart are held. A generation that begins anew is about containers that were started without a
    /// hook, and needs the gate.
    pub(in crate::restart) fn is_holding(&self) -> bool {
        let machine = self.machine.as_ref();
        machine.is_some_and(|it| it.is_holding() && it.plan().again == 0)
    }

    /// The UID that the API server knows the pod by: only a static pod has another one there.
    pub(in crate::restart) fn api_uid(&self) -> &PodUid {
        let spec = self.spec.as_ref();
        spec.map_or(&self.identity.uid, |spec| &spec.api_uid)
    }

    pub(in crate::restart) fn instance(&self, id: &ContainerId) -> Option<&Instance> {
        self.instances.get(id)
    }

    pub(in crate::restart) fn may_replay(&self) -> bool {
        self.machine.as_ref().is_some_and(Machine::may_replay)
    }

    /// Whether it waits for its turn.
    pub(in crate::restart) fn is_queued(&self) -> bool {
        self.machine.as_ref().is_some_and(Machine::is_queued)
    }

    /// Whether others had better wait until what has ended of it is shielded.
    pub(in crate::restart) fn is_exposed(&self) -> bool {
        self.machine.as_ref().is_some_and(Machine::is_exposed)
    }

    /// Whether it has, or still wants, a turn among the pods of this node.
    pub(in crate::restart) fn wants_turn(&self) -> bool {
        self.machine.as_ref().is_some_and(Machine::wants_turn)
    }

    /// Whether its restart under way stops this container.
    pub(in crate::restart) fn is_to_end(&self, id: &ContainerId) -> bool {
        self.machine.as_ref().is_some_and(|it| it.ends(id))
    }

    /// Whether placeholders before this container are still wanted.
    pub(in crate::restart) fn is_to_be_shielded(&self, id: &ContainerId) -> bool {
        let machine = self.machine.as_ref();
        machine.is_some_and(|it| it.is_to_be_shielded(id))
    }

    /// Behind a placeholder the kubelet does not see that a container runs, and starts another one beside it as
    /// soon as no gate keeps it from doing so: if this process dies, for one. That is risked for the moment that a kill
    /// takes, but not before it is under way, not for a grace period, and not if the gate is away.
    pub(in crate::restart) fn may_be_shielded(&self, id: &ContainerId) -> bool {
        let at_once = self.machine.as_ref().is_some_and(Machine::kills_at_once);
        let instance = self.instances.get(id);
        // One that the kubelet has just created is about to run.
        let lives = instance.is_some_and(|it| !matches!(it.state, InstanceState::Ended(_)));
        !lives || (at_once && self.shared.gate.is_there())
    }

    /// Whether this container stands for one that the kubelet is to start.
    pub(in crate::restart) fn is_shield(&self, id: &ContainerId) -> bool {
        let mut shields = self.machine.iter().flat_map(Machine::leftovers);
        shields.any(|(_, shield)| shield == *id)
    }

    /// Placeholders that stand while nobody tells of their removal.
    pub(in crate::restart) fn unwatched_shields(&self) -> Option<Vec<ContainerId>> {
        let machine = self.machine.as_ref()?;
        let unwatched = machine.is_holding() && !self.shared.gate.is_there();
        let ids = machine.leftovers().into_iter().map(|(_, id)| id);
        unwatched.then(|| ids.collect())
    }

    /// Whether that restart is being replayed.
    pub(in crate::restart) fn is_replaying(&self, id: &RestartId) -> bool {
        self.is_restart(id, |machine| machine.phase() == Phase::Replay)
    }

    /// Whether this attempt, which a replay has made, is to be started.
    pub(in crate::restart) fn is_to_start(&self, id: &ContainerId) -> bool {
        self.machine.as_ref().is_some_and(|it| it.is_to_start(id))
    }

    /// Whether that restart is replayed, or still can be.
    pub(in crate::restart) fn may_still_replay(&self, id: &RestartId) -> bool {
        self.is_restart(id, Machine::may_replay)
    }

    fn is_restart(&self, id: &RestartId, so_far: impl Fn(&Machine) -> bool) -> bool {
        let machine = self.machine.as_ref();
        machine.is_some_and(|machine| machine.plan().id == *id && so_far(machine))
    }

    /// Whether the hook of this container waits, and nobody has told what it exited with.
    pub(in crate::restart) fn waits_for_code(&self, id: &ContainerId) -> bool {
        let replaced = self.machine.as_ref().is_some_and(|it| it.replaces(id));
        !replaced && self.lacks_code(id) && self.is_held(id)
    }

    /// Whether its restart waits to learn what this container exited with.
    pub(in crate::restart) fn is_to_learn_code(&self, id: &ContainerId) -> bool {
        self.lacks_code(id) && self.is_to_end(id)
    }

    /// Whether there is something to do for the pod, or may be when its annotations have been read.
    pub(super) fn may_act(&self) -> bool {
        self.policy.is_some() || self.written.is_none()
    }

    /// Containers whose exits cannot be held, by name.
    pub(super) fn unhooked(&self) -> BTreeSet<ContainerName> {
        let unhooked = self.instances.iter().filter(|(_, it)| {
            it.hooked == Some(false)
                && it.state < InstanceState::Ended(None)
                && !it.is_placeholder()
        });
        let names = unhooked.map(|(_, instance)| instance.name.clone());
        names.filter(|name| self.is_member(name)).collect()
    }

    /// Whatever the attempts that a restart replaces exit with belongs to it, even if the news comes when it is over.
    pub(super) fn settle_olds(&mut self, plan: &Plan) {
        let olds = plan.members.iter().filter_map(|member| member.old.as_ref());
        let olds = olds.map(|old| old.id.clone());
        let there = olds.filter(|id| self.instances.get(id).is_some());
        self.decided.extend(there);
    }

    /// What containers exited with that still count as running, because their exits are held.
    pub(super) fn codes_of_held(&self, plan: &Plan) -> Vec<(ContainerName, ContainerId, ExitCode)> {
        let members = plan.members.iter();
        let held = members.filter_map(|member| {
            let old = member.old.as_ref().filter(|old| old.exit.is_none())?;
            match self.instances.get(&old.id)?.state {
                InstanceState::Ended(code) => Some((member.name.clone(), old.id.clone(), code?)),
                InstanceState::Created | InstanceState::Running => None,
            }
        });
        held.collect()
    }

    /// For how long the oldest of the containers that the restart ends has been there, at the least.
    pub(super) fn oldest_run(&self, plan: &Plan, now: &Moment) -> Duration {
        let olds = plan.members.iter().filter_map(|member| member.old.as_ref());
        let running = olds.filter(|old| old.exit.is_none());
        let since = running.filter_map(|old| Some(self.instances.get(&old.id)?.heard_at));
        let since = since.min();
        since.map_or(Duration::ZERO, |since| {
            now.at.saturating_duration_since(since)
        })
    }

    /// A container as the kubelet sees it: one whose exit is held runs.
    pub(super) fn member(
        &self,
        name: ContainerName,
        kind: ContainerKind,
        restart_policy: RestartPolicy,
    ) -> Member {
        let newest = self.instances.newest(&name);
        let old = newest.map(|(id, instance)| Old {
            id: id.clone(),
            exit: match instance.state {
                InstanceState::Ended(code) if !self.is_held(id) => {
                    Some(code.unwrap_or(ExitCode::UNKNOWN))
                }
                _ => None,
            },
        });
        Member {
            kind,
            restart_policy,
            older: self.instances.older(&name),
            unhooked: newest.is_some_and(|(_, instance)| instance.hooked == Some(false)),
            old,
            name,
            startup_probe: false,
            placeholders: 0,
        }
    }

    /// The pod's restart policy, and its containers in start order. A restart that goes on after the plugin came
    /// back may know them before the API server has told.
    pub(super) fn shape(&self) -> Option<(RestartPolicy, Vec<Member>)> {
        if let Some(spec) = &self.spec {
            // Other kubelets have the pod's alone.
            let own = self.native.is_some_and(|native| native.container_rules);
            let members = spec.containers.iter().map(|container| {
                let policy = container.restart_policy.filter(|_| own);
                let policy = policy.unwrap_or(spec.restart_policy);
                Member {
                    startup_probe: container.duties.contains(&StartDuty::StartupProbe),
                    ..self.member(container.name.clone(), container.kind, policy)
                }
            });
            return Some((spec.restart_policy, members.collect()));
        }
        let plan = self.machine.as_ref().map(Machine::plan)?;
        let members = plan.members.iter().map(|it| Member {
            startup_probe: it.startup_probe,
            ..self.member(it.name.clone(), it.kind, it.restart_policy)
        });
        (plan.is_whole_pod() && plan.ordered).then(|| (plan.restart_policy, members.collect()))
    }

    pub(super) fn trigger(&self, id: &ContainerId) -> Option<Trigger> {
        let instance = self.instances.get(id)?;
        let InstanceState::Ended(Some(code)) = instance.state else {
            return None;
        };
        (!instance.is_placeholder() && self.is_member(&instance.name)).then(|| Trigger {
            name: instance.name.clone(),
            container: id.clone(),
            code,
        })
    }

    /// Whether it is an init container whose exit the replay under way keeps unseen.
    pub(super) fn is_replayed(&self, id: &ContainerId) -> bool {
        let (machine, instance) = (self.machine.as_ref(), self.instances.get(id));
        let both = machine.zip(instance);
        !self.deleting && both.is_some_and(|(machine, it)| machine.holds_replayed(&it.name))
    }

    /// Whether it has ended, and nobody has told its code.
    fn lacks_code(&self, id: &ContainerId) -> bool {
        let instance = self.instances.get(id);
        instance.is_some_and(|it| it.state == InstanceState::Ended(None))
    }

    /// What the exit of this container asks for.
    pub(super) fn asked(&self, id: &ContainerId) -> Option<(Trigger, Action)> {
        let trigger = self.trigger(id)?;
        let policy = self.policy.as_ref()?;
        let action = policy.action(trigger.name.as_str(), trigger.code.0)?;
        Some((trigger, action))
    }

    /// Whether its failure is about to begin a restart.
    pub(super) fn will_ask(&self, id: &ContainerId) -> bool {
        let machine = self.machine.as_ref();
        let belongs = machine.is_some_and(|machine| machine.replaces(id));
        let failure = |(trigger, _): (Trigger, Action)| trigger.code != ExitCode::SUCCESS;
        !belongs && !self.deleting && self.asked(id).is_some_and(failure)
    }

    /// Rules for the whole pod are not for ephemeral containers, which are none of its spec's.
    pub(super) fn is_member(&self, name: &ContainerName) -> bool {
        self.spec.as_ref().is_none_or(|spec| {
            spec.containers
                .iter()
                .any(|container| container.name == *name)
        })
    }
}
