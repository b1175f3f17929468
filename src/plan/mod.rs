//! What one restart is to do, settled at the moment it is decided.

mod member;
mod seen;

use std::fmt;
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::ids::{ContainerId, ContainerName, ExitCode, PodIdentity};
use crate::kube::{ContainerKind, RestartPolicy};
use crate::policy::{Action, MatchedRule, Request};
pub use member::{Member, Old};
pub(crate) use seen::Seen;

/// Names a restart in logs, events and on disk.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RestartId(pub String);

/// Which restart, and how often it has begun anew.
pub(crate) type Generation = (RestartId, u8);

impl fmt::Display for RestartId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// How the kubelet is brought to start the containers again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Way {
    /// The pod's own restart policy restarts exited containers: they stay in the runtime, with their
    /// `lastState`, count and logs. Only what the policy would not run again is removed.
    Kept,
    /// Placeholders stand before the exited containers until the kubelet has replaced them.
    Shielded,
    /// Placeholders stand until the kubelet has recorded them as waiting, then everything is removed: with no
    /// container of the pod left, it begins with the first init container (`computePodActions`).
    Cleared,
}

/// Who makes and starts the new attempts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Starter {
    /// The plugin, by replay while all exits are held; if that fails, the kubelet in the plan's [`Way`].
    Plugin,
    /// The plugin, as far as one container that the kubelet is to start, with those after it.
    Both {
        /// That container.
        from: ContainerName,
        /// Why it is the kubelet's.
        why: String,
    },
    /// The kubelet, for this reason.
    Kubelet(String),
}

/// The exit that the restart answers, or begins with if somebody asked for it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trigger {
    /// The container's name.
    pub name: ContainerName,
    /// The attempt that exited.
    pub container: ContainerId,
    /// What it exited with, or will.
    pub code: ExitCode,
    /// The rule that says what that asks for, if a rule does.
    #[serde(default)]
    pub rule: Option<MatchedRule>,
    /// What asked for the restart, if that was no exit: the container is ended with the others.
    #[serde(default)]
    pub request: Option<Request>,
}

/// All that a restart needs to know; written to disk before anything is killed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// The restart's name.
    pub id: RestartId,
    /// The pod, whose sandbox is kept.
    pub pod: PodIdentity,
    /// What set it off.
    pub trigger: Trigger,
    /// A request that came when it was under way, and is answered by it.
    #[serde(default)]
    pub joined: Option<Request>,
    /// What it does: one container, or all with or without time to stop.
    pub action: Action,
    /// The type of the pod condition that tells of it, if there is one: the same from beginning to end, whatever is
    /// learnt of the kubelet meanwhile.
    pub condition: Option<String>,
    /// Who starts the containers again.
    pub starter: Starter,
    /// How the kubelet is brought to do so, if it is to.
    pub way: Way,
    /// The container whose refused creation proves that the kubelet has recorded the shields.
    pub guard: ContainerName,
    /// The containers, in start order. Under action `Restart` the trigger, and what another restart like it was to start.
    pub members: Vec<Member>,
    /// Whether kinds and order are the spec's; else they are guessed, and no order is kept.
    pub ordered: bool,
    /// How long a container may take to stop, in milliseconds; 0 kills at once.
    pub grace_ms: u64,
    /// When it was decided, for people: milliseconds since the Unix epoch.
    pub decided_at_ms: u64,
    /// The same, for what is measured: how long the machine had been up, in milliseconds (see [`crate::clock`]).
    pub decided_up_ms: u64,
    /// How long after that no container may start: the pod restarts too often. In milliseconds.
    pub back_off_ms: u64,
    /// How often it has begun anew because containers were started behind its back.
    pub again: u8,
    /// Whether init containers were replayed before, which have completed to the kubelet's knowledge.
    pub replayed_inits: bool,
    /// Whether the kubelet may see what is being removed exit.
    #[serde(default)]
    pub removals_show: bool,
}

/// Whether none of these containers waits for another.
pub(crate) fn start_at_once<'m>(members: impl IntoIterator<Item = &'m Member>) -> bool {
    let mut members = members.into_iter();
    members.all(|member| member.kind == ContainerKind::Regular)
}

impl Plan {
    /// Settles who takes part, and how the kubelet is brought to start them; so far all containers of the pod do.
    /// `keep_completed`: regular ones that had ended for good stay as they are; `exited_initialises`: the kubelet runs no
    /// init container while a regular one is there, an exited one as well.
    pub(crate) fn settle(mut self, keep_completed: bool, exited_initialises: bool) -> Self {
        let trigger = self.trigger.name.clone();
        if !self.is_whole_pod() {
            self.members.retain(|it| it.is_to_run);
            for member in &mut self.members {
                // With one, the pod would count as stopped if every other container had ended (getPhase).
                member.placeholders = 2;
            }
            self.way = Way::Shielded;
            return self;
        }
        let none_left = exited_initialises && self.members.iter().any(Member::starts_in_order);
        if keep_completed && !none_left {
            self.members.retain(|member| {
                member.name == trigger
                    || member.kind != ContainerKind::Regular
                    || !member.had_completed()
            });
        }
        self.way = self.choose_way(none_left);
        self.guard = self.choose_guard();
        if self.way != Way::Kept {
            self.place_shields();
        }
        self
    }

    fn choose_way(&self, none_left: bool) -> Way {
        // The release of a regular container's exit is what wakes the kubelet; without one to release, nothing tells it
        // that the init containers are gone.
        let wakes = |it: &Member| {
            it.kind == ContainerKind::Regular && (it.was_running() || it.name == self.trigger.name)
        };
        if none_left || !self.ordered || !self.members.iter().any(wakes) {
            Way::Cleared
        } else if self.is_by_policy() {
            Way::Kept
        } else if self.starts_at_once() {
            Way::Shielded
        } else {
            Way::Cleared
        }
    }

    /// The member of that name; ephemeral containers, for one, are none.
    pub(crate) fn member(&self, name: &ContainerName) -> Option<&Member> {
        self.members.iter().find(|member| member.name == *name)
    }

    /// Whether that container was there when the restart was decided.
    pub(crate) fn knew(&self, id: &ContainerId) -> bool {
        self.members.iter().any(|member| member.knew(id))
    }

    /// What is answered by it: the newest of the requests.
    pub(crate) fn answers(&self) -> Option<&Request> {
        self.joined.as_ref().or(self.trigger.request.as_ref())
    }

    /// Whether its exit has asked for the restart.
    pub(crate) fn has_asked(&self, id: &ContainerId) -> bool {
        self.trigger.request.is_none() && self.trigger.container == *id
    }

    /// How long this old container may take to stop.
    pub(crate) fn grace_of(&self, id: &ContainerId) -> Duration {
        let mut members = self.members.iter();
        let at_once = members.any(|it| it.at_once && it.old_id() == Some(id));
        if at_once {
            Duration::ZERO
        } else {
            self.grace()
        }
    }

    /// Whether all containers of the pod take part.
    pub(crate) fn is_whole_pod(&self) -> bool {
        self.action.is_whole_pod()
    }

    /// Whether no container waits for another.
    pub(crate) fn starts_at_once(&self) -> bool {
        start_at_once(&self.members)
    }

    /// Whether the kubelet starts all regular containers again by itself when it sees them exited. What has time to stop may
    /// end with a success, and what is asked for may come when a container has just done so.
    pub(crate) fn is_by_policy(&self) -> bool {
        let may_succeed = self.action == Action::RestartPod || self.trigger.request.is_some();
        let stays = |it: &Member| match it.restart_policy {
            RestartPolicy::Always => false,
            RestartPolicy::OnFailure => (may_succeed || it.may_have_succeeded) && it.was_running(),
            RestartPolicy::Never => true,
        };
        let mut regulars = self.members.iter();
        let trigger = self.member(&self.trigger.name);
        trigger.is_some_and(|it| it.is_restarted_after(self.trigger.code))
            && !regulars.any(|it| it.kind == ContainerKind::Regular && stays(it))
    }

    /// How the containers are started again, as people read it.
    pub(crate) fn how(&self) -> &'static str {
        match (&self.starter, self.way) {
            (Starter::Plugin, _) => "by replay",
            (Starter::Both { .. }, _) => "first by replay, then by the pod's restart policy",
            (Starter::Kubelet(_), Way::Kept) => "by the pod's restart policy",
            (Starter::Kubelet(_), Way::Shielded) => "behind placeholders",
            (Starter::Kubelet(_), Way::Cleared) => "from the first init container",
        }
    }

    /// Why that is not by replay, or not all of it.
    pub(crate) fn no_replay(&self) -> Option<&str> {
        match &self.starter {
            Starter::Plugin => None,
            Starter::Both { why, .. } | Starter::Kubelet(why) => Some(why),
        }
    }

    /// A replay as far as that container, which is the kubelet's to start for that reason, as are the regular ones after one
    /// that is. `None`: nothing comes before it, or the kubelet must find nothing of the pod.
    pub(crate) fn replayed_until(&self, name: &ContainerName, why: &str) -> Option<Starter> {
        let mut members = self.members.iter();
        let kubelets = |it: &Member| it.name == *name || it.kind == ContainerKind::Regular;
        let from = members.position(kubelets)?;
        let any = from > 0 && self.way == Way::Kept && self.member(name).is_some();
        any.then(|| Starter::Both {
            from: self.members[from].name.clone(),
            why: why.to_owned(),
        })
    }

    /// The containers that a replay starts, in start order.
    pub(crate) fn replayed(&self) -> &[Member] {
        let end = match &self.starter {
            Starter::Both { from, .. } => self.members.iter().position(|it| it.name == *from),
            Starter::Plugin | Starter::Kubelet(_) => None,
        };
        &self.members[..end.unwrap_or(self.members.len())]
    }

    pub(crate) fn generation(&self) -> Generation {
        (self.id.clone(), self.again)
    }

    /// How long its containers have to stop.
    pub(crate) fn grace(&self) -> Duration {
        Duration::from_millis(self.grace_ms)
    }

    /// How long after the decision no container may start.
    pub(crate) fn back_off(&self) -> Duration {
        Duration::from_millis(self.back_off_ms)
    }

    /// When that is, for people: RFC 3339 in UTC, to the second.
    pub(crate) fn start_at(&self) -> String {
        let ms = self.decided_at_ms.saturating_add(self.back_off_ms);
        let at = i64::try_from(ms / 1000).ok();
        let at = at.and_then(|seconds| Timestamp::from_second(seconds).ok());
        at.unwrap_or_default().to_string()
    }

    /// Whether exits may be seen as soon as they happen, so that shields come before the kills.
    pub(crate) fn shields_come_first(&self) -> bool {
        // What was started while no plugin was there has no hook either.
        let unhooked = |member: &Member| member.unhooked && member.was_running();
        // With a grace period the shields wait for the ends, but for what is killed at once: the kubelet must see what runs.
        self.grace_ms == 0 && (self.again > 0 || self.members.iter().any(unhooked))
    }

    /// The kubelet must be about to create the guard when it sees it waiting: a regular container, else the
    /// init container that stopped, or what the kubelet went on to from there, else the sidecar that is all there is. An init
    /// container stops while regular ones run, to the kubelet, if that was in a replay. In a later generation, one that was
    /// started instead of the trigger and has ended is being removed: one which runs is the better guard.
    fn choose_guard(&self) -> ContainerName {
        let trigger = self
            .member(&self.trigger.name)
            .filter(|member| member.old.is_some() && member.kind != ContainerKind::Sidecar);
        let is_itself = |member: &&Member| {
            let stopped = member.old_id() == Some(&self.trigger.container);
            let regular = member.kind == ContainerKind::Regular && !member.runs_unrecorded;
            regular && (stopped || member.was_running())
        };
        let running = |kind| {
            self.members
                .iter()
                .find(move |member| member.kind == kind && member.runs_recorded())
        };
        let guard = trigger
            .filter(is_itself)
            .or_else(|| running(ContainerKind::Regular))
            .or_else(|| self.ended_regular().filter(|_| self.replayed_inits))
            .or_else(|| self.running_after_trigger())
            .or_else(|| {
                let waits = self.ended_regular().or_else(|| self.gone_regular());
                waits.filter(|_| self.has_trigger_succeeded())
            })
            .or(trigger)
            .or_else(|| running(ContainerKind::Init).filter(|_| !self.replayed_inits));
        guard.map_or_else(|| self.trigger.name.clone(), |member| member.name.clone())
    }

    /// What has ended in this restart. The kubelet goes by the regular containers where it knows nothing of the init containers,
    /// because a replay runs them, or is through with them.
    fn ended_regular(&self) -> Option<&Member> {
        let mut members = self.members.iter();
        members.find(|it| it.kind == ContainerKind::Regular && it.is_to_run && it.had_ended())
    }

    /// The same of which the generation before has left nothing but what shielded it.
    fn gone_regular(&self) -> Option<&Member> {
        let mut members = self.members.iter();
        members.find(|it| it.kind == ContainerKind::Regular && it.is_to_run && it.old.is_none())
    }

    /// Whether the kubelet has started the trigger again, an init container, and has gone on from there.
    fn has_trigger_succeeded(&self) -> bool {
        let trigger = self.member(&self.trigger.name);
        trigger.is_some_and(|it| {
            let anew = it.old_id() != Some(&self.trigger.container);
            it.kind == ContainerKind::Init && anew && it.exit() == Some(ExitCode::SUCCESS)
        })
    }

    /// The kubelet has gone on to that init container or sidecar, and does not go back to those before it.
    fn running_after_trigger(&self) -> Option<&Member> {
        let members = self.members.iter().rev();
        let mut later = members.take_while(|it| it.name != self.trigger.name);
        later.find(|it| it.kind != ContainerKind::Regular && it.was_running())
    }

    fn place_shields(&mut self) {
        for member in &mut self.members {
            member.placeholders = match member.kind {
                _ if member.name == self.guard => 2,
                ContainerKind::Init
                    if self.replayed_inits && member.may_fail_pod(member.exit()) =>
                {
                    2
                }
                // Where kinds are guessed, it may be the only regular one.
                ContainerKind::Regular if member.runs_recorded() => 1 + u8::from(!self.ordered),
                // A completed one is to run again too. What is cleared away is gone before the kubelet starts
                // anything; if it were seen as waiting first, the kubelet would drop the pod's whole status, the
                // other shields with it (status_manager.go `checkContainerStateTransition`), and before an init
                // container that is the guard it would count as initialised (`computePodActions`).
                ContainerKind::Regular if member.old.is_some() && self.way == Way::Shielded => 1,
                _ => 0,
            };
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::ids::PodKey;
    use ContainerKind::{Init, Regular, Sidecar};

    /// What a container was doing when the restart was decided.
    #[derive(Debug, Clone, Copy)]
    pub(crate) enum Was {
        Absent,
        Running,
        Exited(i32),
    }

    pub(crate) type Shape<'a> = &'a [(&'a str, ContainerKind, Was)];

    impl Plan {
        /// For a kubelet up to 1.36.
        pub(crate) fn settled(self) -> Self {
            self.settle(false, false)
        }

        /// The same of its trigger alone.
        pub(crate) fn alone(mut self) -> Self {
            self.action = Action::Restart;
            for member in &mut self.members {
                member.is_to_run = member.name == self.trigger.name;
            }
            self
        }
    }

    /// Of a pod of that shape, with nothing settled; without a policy its spec is not known.
    pub(crate) fn draft(
        policy: Option<RestartPolicy>,
        shape: Shape<'_>,
        trigger: &str,
        code: i32,
    ) -> Plan {
        let members = shape
            .iter()
            .map(|&(name, kind, old)| {
                let id = format!("{name}-0").into();
                let old = match old {
                    Was::Absent => None,
                    Was::Running => Some(Old { id, exit: None }),
                    Was::Exited(code) => {
                        let exit = Some(ExitCode(code));
                        Some(Old { id, exit })
                    }
                };
                let ran = old.as_ref().is_some_and(|it: &Old| it.exit.is_none());
                Member {
                    is_to_run: ran || name == trigger,
                    name: name.into(),
                    kind,
                    restart_policy: policy.unwrap_or(RestartPolicy::Never),
                    old,
                    unhooked: false,
                    at_once: false,
                    may_have_succeeded: false,
                    runs_unrecorded: false,
                    older: Vec::new(),
                    startup_probe: false,
                    post_start: false,
                    placeholders: 0,
                }
            })
            .collect();
        Plan {
            id: RestartId("r1".into()),
            pod: PodIdentity {
                sandbox: "s1".into(),
                uid: "u1".into(),
                key: PodKey {
                    namespace: "default".into(),
                    name: "p".into(),
                },
            },
            trigger: Trigger {
                name: trigger.into(),
                container: format!("{trigger}-0").into(),
                code: ExitCode(code),
                rule: None,
                request: None,
            },
            joined: None,
            action: Action::RestartAllContainers,
            condition: Some("AllContainersRestarting".into()),
            starter: Starter::Kubelet("start: Kubelet".into()),
            way: Way::Cleared,
            guard: trigger.into(),
            members,
            ordered: policy.is_some(),
            grace_ms: 0,
            decided_at_ms: 1,
            decided_up_ms: 1,
            back_off_ms: 0,
            again: 0,
            replayed_inits: false,
            removals_show: false,
        }
    }

    pub(crate) fn plan() -> Plan {
        draft(
            Some(RestartPolicy::Always),
            &[("a", Regular, RUNS)],
            "a",
            42,
        )
        .settled()
    }

    pub(crate) const RUNS: Was = Was::Running;
    pub(crate) const DONE: Was = Was::Exited(0);

    fn shields(plan: &Plan) -> Vec<(&str, u8)> {
        plan.members
            .iter()
            .map(|member| (member.name.as_str(), member.placeholders))
            .collect()
    }

    #[test]
    fn always_keeps_the_containers() {
        let shape: Shape<'_> = &[
            ("i", Init, DONE),
            ("s", Sidecar, RUNS),
            ("a", Regular, RUNS),
        ];
        for trigger in ["s", "a"] {
            let plan = draft(Some(RestartPolicy::Always), shape, trigger, 42).settled();
            assert_eq!(plan.way, Way::Kept);
            assert_eq!(shields(&plan), [("i", 0), ("s", 0), ("a", 0)]);
        }
    }

    #[test]
    fn what_comes_before_a_container_that_is_the_kubelets_can_be_replayed() {
        let shape: Shape<'_> = &[
            ("i", Init, DONE),
            ("s", Sidecar, RUNS),
            ("a", Regular, RUNS),
            ("b", Regular, RUNS),
        ];
        let until = |policy, name: &str| {
            let mut plan = draft(Some(policy), shape, "a", 42).settled();
            plan.starter = plan.replayed_until(&name.into(), "it is")?;
            let replayed = plan.replayed().iter().map(|it| it.name.to_string());
            Some(replayed.collect::<Vec<_>>().join(" "))
        };
        for (name, replayed) in [("s", "i"), ("a", "i s"), ("b", "i s")] {
            let policy = RestartPolicy::Always;
            assert_eq!(until(policy, name).as_deref(), Some(replayed), "{name}");
            assert_eq!(until(RestartPolicy::Never, name), None);
        }
        for none in ["i", "another"] {
            assert_eq!(until(RestartPolicy::Always, none), None, "{none}");
        }
    }

    #[test]
    fn where_an_exited_container_initialises_a_pod_none_stays_before_init_containers() {
        let way = |shape: Shape<'_>, probe| {
            let mut newer = draft(Some(RestartPolicy::Always), shape, "a", 42);
            newer.members[0].startup_probe = probe;
            newer.settle(false, true).way
        };
        let with_init: Shape<'_> = &[("i", Init, DONE), ("a", Regular, RUNS)];
        let with_sidecar: Shape<'_> = &[("s", Sidecar, RUNS), ("a", Regular, RUNS)];
        assert_eq!(way(with_init, false), Way::Cleared);
        assert_eq!(way(with_sidecar, false), Way::Kept);
        assert_eq!(way(with_sidecar, true), Way::Cleared);
        assert_eq!(way(&[("a", Regular, RUNS)], true), Way::Kept);
    }

    #[test]
    fn an_init_container_that_triggers_is_guarded_under_every_policy() {
        let shape: Shape<'_> = &[("i", Init, RUNS), ("a", Regular, Was::Absent)];
        for policy in [
            RestartPolicy::Always,
            RestartPolicy::OnFailure,
            RestartPolicy::Never,
        ] {
            let plan = draft(Some(policy), shape, "i", 42).settled();
            assert_eq!(plan.way, Way::Cleared);
            assert_eq!(plan.guard, "i".into());
            assert_eq!(shields(&plan), [("i", 2), ("a", 0)]);
        }
    }

    #[test]
    fn never_without_inits_is_shielded_and_with_them_cleared() {
        let regulars: Shape<'_> = &[
            ("a", Regular, RUNS),
            ("b", Regular, DONE),
            ("c", Regular, RUNS),
        ];
        let plan = draft(Some(RestartPolicy::Never), regulars, "c", 42).settled();
        assert_eq!(plan.way, Way::Shielded);
        assert_eq!(shields(&plan), [("a", 1), ("b", 1), ("c", 2)]);
        let with_init: Shape<'_> = &[("i", Init, DONE), ("a", Regular, RUNS)];
        let plan = draft(Some(RestartPolicy::Never), with_init, "a", 42).settled();
        assert_eq!(plan.way, Way::Cleared);
        assert_eq!(shields(&plan), [("i", 0), ("a", 2)]);
    }

    #[test]
    fn completed_containers_run_again_unless_they_are_to_be_kept() {
        let shape: Shape<'_> = &[
            ("i", Init, DONE),
            ("a", Regular, RUNS),
            ("b", Regular, DONE),
        ];
        let draft = draft(Some(RestartPolicy::Never), shape, "a", 42);
        let kept = draft.clone().settle(true, false);
        assert_eq!(shields(&kept), [("i", 0), ("a", 2)]);
        let all = draft.clone().settled();
        assert_eq!(shields(&all), [("i", 0), ("a", 2), ("b", 0)]);
        // One that stays would keep the kubelet from running init containers.
        assert_eq!(shields(&draft.settle(true, true)), shields(&all));
    }

    #[test]
    fn what_the_policy_starts_again_has_not_completed() {
        let shape: Shape<'_> = &[
            ("a", Regular, RUNS),
            ("b", Regular, DONE),
            ("c", Regular, Was::Exited(7)),
        ];
        let members = |policy| {
            let draft = draft(Some(policy), shape, "a", 42);
            let members = draft.settle(true, false).members.into_iter();
            members
                .map(|member| member.name.to_string())
                .collect::<Vec<_>>()
        };
        assert_eq!(members(RestartPolicy::Always), ["a", "b", "c"]);
        assert_eq!(members(RestartPolicy::OnFailure), ["a", "c"]);
        assert_eq!(members(RestartPolicy::Never), ["a"]);
    }

    #[test]
    fn what_is_cleared_away_is_shielded_only_where_it_ran() {
        let shape: Shape<'_> = &[
            ("i", Init, RUNS),
            ("a", Regular, DONE),
            ("b", Regular, DONE),
        ];
        let plan = draft(Some(RestartPolicy::Always), shape, "i", 42).settled();
        assert_eq!(plan.way, Way::Cleared);
        assert_eq!(shields(&plan), [("i", 2), ("a", 0), ("b", 0)]);
    }

    #[test]
    fn a_sidecar_that_triggers_is_guarded_by_a_regular_container() {
        let shape: Shape<'_> = &[
            ("s", Sidecar, RUNS),
            ("a", Regular, RUNS),
            ("b", Regular, RUNS),
        ];
        let plan = draft(Some(RestartPolicy::Never), shape, "s", 42).settled();
        assert_eq!(plan.guard, "a".into());
        assert_eq!(shields(&plan), [("s", 0), ("a", 2), ("b", 1)]);
    }

    #[test]
    fn an_init_container_that_triggers_in_a_replay_is_guarded_by_what_the_kubelet_sees_run() {
        let shape: Shape<'_> = &[("i", Init, RUNS), ("a", Regular, RUNS)];
        let plan = draft(Some(RestartPolicy::Never), shape, "i", 42).settled();
        assert_eq!(plan.guard, "a".into());
    }

    #[test]
    fn an_init_container_that_the_kubelet_has_passed_is_no_guard() {
        let shape: Shape<'_> = &[
            ("i", Init, DONE),
            ("s", Sidecar, RUNS),
            ("a", Regular, Was::Absent),
        ];
        let plan = draft(Some(RestartPolicy::OnFailure), shape, "i", 42).settled();
        assert_eq!(plan.guard, "s".into());
    }

    #[test]
    fn an_init_container_that_runs_in_a_replay_is_shielded_beside_the_one_that_triggered_it() {
        let shape: Shape<'_> = &[
            ("i", Init, RUNS),
            ("j", Init, Was::Exited(42)),
            ("a", Regular, Was::Absent),
        ];
        let mut later = draft(Some(RestartPolicy::Never), shape, "j", 42);
        later.replayed_inits = true;
        let plan = later.settled();
        assert_eq!(shields(&plan), [("i", 2), ("j", 2), ("a", 0)]);
    }

    #[test]
    fn what_has_ended_after_an_init_container_that_ran_again_guards() {
        let shape: Shape<'_> = &[
            ("s", Sidecar, RUNS),
            ("i", Init, DONE),
            ("a", Regular, Was::Exited(137)),
        ];
        let mut later = draft(Some(RestartPolicy::Never), shape, "i", 42);
        later.members[2].is_to_run = true;
        assert_eq!(later.clone().settled().guard, "i".into());
        later.trigger.container = "i-of-the-generation-before".into();
        assert_eq!(later.settled().guard, "a".into());
    }

    #[test]
    fn what_is_gone_after_an_init_container_that_ran_again_guards() {
        let shape: Shape<'_> = &[
            ("s", Sidecar, RUNS),
            ("i", Init, DONE),
            ("a", Regular, Was::Absent),
        ];
        let mut later = draft(Some(RestartPolicy::Never), shape, "i", 42);
        later.trigger.container = "i-of-the-generation-before".into();
        assert_eq!(later.clone().settled().guard, "i".into());
        later.members[2].is_to_run = true;
        assert_eq!(later.settled().guard, "a".into());
    }

    #[test]
    fn what_has_ended_behind_a_replay_guards_and_not_the_init_container_that_it_runs() {
        let shape: Shape<'_> = &[
            ("s", Sidecar, RUNS),
            ("i", Init, RUNS),
            ("a", Regular, Was::Exited(0)),
        ];
        for (replayed_inits, guard) in [(true, "a"), (false, "i")] {
            let mut later = draft(Some(RestartPolicy::Never), shape, "s", 42);
            later.replayed_inits = replayed_inits;
            later.members[2].is_to_run = true;
            assert_eq!(later.settled().guard, guard.into());
        }
    }

    #[test]
    fn a_later_round_is_guarded_by_what_runs_and_not_by_what_is_being_removed() {
        let shape: Shape<'_> = &[
            ("i", Init, DONE),
            ("a", Regular, RUNS),
            ("b", Regular, Was::Exited(137)),
        ];
        let mut later = draft(Some(RestartPolicy::Never), shape, "b", 42);
        later.trigger.container = "b-of-the-generation-before".into();
        let plan = later.settled();
        assert_eq!(plan.guard, "a".into());
        assert_eq!(shields(&plan), [("i", 0), ("a", 2), ("b", 0)]);
    }

    #[test]
    fn what_the_kubelet_does_not_record_is_no_guard_and_has_no_shield_where_all_is_cleared() {
        let shape: Shape<'_> = &[
            ("s", Sidecar, RUNS),
            ("a", Regular, RUNS),
            ("b", Regular, RUNS),
        ];
        let mut later = draft(Some(RestartPolicy::Never), shape, "a", 42);
        later.members[1].runs_unrecorded = true;
        let plan = later.settled();
        assert_eq!(shields(&plan), [("s", 0), ("a", 0), ("b", 2)]);
    }

    #[test]
    fn on_failure_is_like_always_after_a_failure_and_like_never_after_a_success() {
        let shape: Shape<'_> = &[("a", Regular, RUNS), ("b", Regular, RUNS)];
        let way = |code| {
            draft(Some(RestartPolicy::OnFailure), shape, "a", code)
                .settled()
                .way
        };
        assert_eq!((way(42), way(0)), (Way::Kept, Way::Shielded));
    }

    #[test]
    fn an_unknown_spec_is_the_safest_case() {
        let shape: Shape<'_> = &[("a", Regular, RUNS), ("b", Regular, RUNS)];
        let plan = draft(None, shape, "a", 42).settled();
        assert_eq!(plan.way, Way::Cleared);
        assert!(!plan.ordered);
    }

    #[test]
    fn action_restart_is_left_to_a_kubelet_that_does_it_itself() {
        let shape: Shape<'_> = &[("s", Sidecar, RUNS), ("a", Regular, RUNS)];
        let restart = |policy, trigger, code| {
            let draft = draft(Some(policy), shape, trigger, code).alone();
            let member = draft.member(&draft.trigger.name).unwrap();
            (!member.is_restarted_after(ExitCode(code))).then(|| draft.settled())
        };
        assert_eq!(restart(RestartPolicy::Always, "a", 0), None);
        assert_eq!(restart(RestartPolicy::OnFailure, "a", 1), None);
        assert_eq!(restart(RestartPolicy::Never, "s", 1), None);
        let plan = restart(RestartPolicy::Never, "a", 1).unwrap();
        assert!(!plan.is_whole_pod());
        assert_eq!(shields(&plan), [("a", 2)]);
    }

    #[test]
    fn a_container_that_its_own_policy_would_not_restart_is_shielded() {
        let shape: Shape<'_> = &[("a", Regular, RUNS), ("b", Regular, RUNS)];
        let mut mixed = draft(Some(RestartPolicy::Always), shape, "a", 42);
        mixed.members[1].restart_policy = RestartPolicy::Never;
        let plan = mixed.settled();
        assert_eq!(plan.way, Way::Shielded);
        assert_eq!(shields(&plan), [("a", 2), ("b", 1)]);
    }

    #[test]
    fn shields_come_before_the_kills_where_an_exit_cannot_be_held() {
        let shape: Shape<'_> = &[("a", Regular, RUNS), ("b", Regular, RUNS)];
        let mut late = draft(Some(RestartPolicy::Never), shape, "a", 42);
        assert!(!late.members.iter().any(|member| member.unhooked));
        late.members[1].unhooked = true;
        assert!(late.settled().shields_come_first());
    }
}
