//! What each exit of a container leads to.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::RangeInclusive;

use serde::Serialize;

use super::manifest::{Container, Pod};
use crate::ids::{Exit, ExitCode};
use crate::kube::{ContainerKind, KubeletFeatures, RestartPolicy};
use crate::policy::{self, Action, Policy, Rules};

/// The rules of a pod, wherever they are written.
pub(super) struct Rulings {
    /// Those that Reprise acts on.
    pub(super) policy: Policy,
    /// Those of the spec, by container.
    pub(super) spec: BTreeMap<String, Rules>,
    /// The kubelet beside which they are read; `None`: one that acts on none, and nobody asks who does.
    pub(super) kubelet: Option<KubeletFeatures>,
}

/// Who acts on a rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(super) enum Actor {
    Reprise,
    #[serde(rename = "kubelet")]
    Kubelet,
}

/// What an exit leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    /// A rule matches.
    Rule(Action, Actor),
    /// An init container succeeded.
    Next,
    /// The restartPolicy starts the container again.
    Again,
    /// The container is done.
    Done,
    /// The container failed, and so will the pod.
    Failed,
}

/// A container, and what each of its exits leads to.
#[derive(Debug, Serialize)]
pub(super) struct Outcomes {
    name: String,
    kind: &'static str,
    /// Those after an OOM kill come first.
    exits: Vec<Exits>,
}

/// Exits that lead to the same.
#[derive(Debug, Serialize)]
struct Exits {
    /// First and last of each run.
    codes: Vec<(u8, u8)>,
    /// After an OOM kill, where that makes a difference.
    #[serde(rename = "oomKilled")]
    oom_killed: bool,
    /// That of the rule which matches, and else the `restartPolicy` says.
    action: Option<&'static str>,
    by: Option<Actor>,
    #[serde(rename = "restartPolicy")]
    restart_policy: Option<RestartPolicy>,
    then: Cow<'static, str>,
}

/// Codes that lead to the same.
type Group = (Outcome, Vec<u8>);

/// All codes that a container can exit with.
const CODES: RangeInclusive<u8> = 0..=255;

impl Rulings {
    /// What the rules say of exits of that container.
    fn of(&self, container: &str) -> impl Fn(Exit) -> Option<(Action, Actor)> {
        let ours = self.policy.actions(container);
        let theirs = self.kubelet.and_then(|_| self.spec.get(container));
        let native = |action: &Action| policy::is_native(*action, self.kubelet);
        move |exit| {
            if let Some(action) = ours(exit) {
                return Some((action, Actor::Reprise));
            }
            let action = theirs?.action(exit).filter(native)?;
            Some((action, Actor::Kubelet))
        }
    }

    /// A kubelet that knows the pod's policy alone goes by that, but for sidecars.
    fn restart_policy(&self, container: &Container<'_>, pod: &Pod<'_>) -> RestartPolicy {
        let knows_own = self.kubelet.is_none_or(|it| it.container_rules)
            || container.kind == ContainerKind::Sidecar
            || self.policy.goes_by_spec(container.name);
        let own = container.restart_policy.filter(|_| knows_own);
        own.unwrap_or(pod.restart_policy)
    }

    /// The container with every group of exits.
    pub(super) fn outcomes(&self, container: &Container<'_>, pod: &Pod<'_>) -> Outcomes {
        let restart_policy = self.restart_policy(container, pod);
        let rule = self.of(container.name);
        let leads = |code: u8, oom_killed| {
            let rule = rule(exit(code, oom_killed));
            outcome(container.kind, restart_policy, rule, code)
        };
        let mut groups = grouped(CODES.map(|code| (leads(code, false), code)));
        let oom_killed = after_oom_kill(leads, &groups);
        // What rules say comes first; the largest group comes last, as "any other exit".
        groups.sort_by_key(|(outcome, codes)| (codes.len(), by_policy(*outcome)));
        let largest = groups.len() - 1;
        groups[..largest].sort_by_key(|(outcome, _)| by_policy(*outcome));
        let exits = |oom_killed| {
            move |group: &Group| self.exits(group, oom_killed, container.kind, restart_policy)
        };
        let oom_killed = oom_killed.iter().map(exits(true));
        Outcomes {
            name: container.name.to_owned(),
            kind: match container.kind {
                ContainerKind::Init => "init",
                ContainerKind::Sidecar => "sidecar",
                ContainerKind::Regular => "regular",
            },
            exits: oom_killed.chain(groups.iter().map(exits(false))).collect(),
        }
    }

    fn exits(
        &self,
        (outcome, codes): &Group,
        oom_killed: bool,
        kind: ContainerKind,
        restart_policy: RestartPolicy,
    ) -> Exits {
        let (action, by) = match outcome {
            Outcome::Rule(action, by) => (Some(action.name()), self.kubelet.map(|_| *by)),
            _ => (None, None),
        };
        let goes_by_policy = by_policy(*outcome) && *outcome != Outcome::Next;
        Exits {
            codes: runs(codes),
            oom_killed,
            action,
            by,
            restart_policy: goes_by_policy.then_some(restart_policy),
            then: self.words(*outcome, kind),
        }
    }

    fn words(&self, outcome: Outcome, kind: ContainerKind) -> Cow<'static, str> {
        Cow::Borrowed(match (outcome, kind) {
            (Outcome::Rule(Action::Restart, _), _) => "restart this container",
            (Outcome::Rule(Action::RestartAllContainers, _), _) => {
                "restart all containers in place"
            }
            (Outcome::Rule(Action::RestartPod, _), _) => match self.policy.options().grace_period {
                Some(period) => {
                    let period = period.as_secs();
                    return Cow::Owned(format!(
                        "restart all containers in place, with {period} s to stop"
                    ));
                }
                None => "restart all containers in place, with the pod's grace period to stop",
            },
            (Outcome::Next, _) => "the next container starts",
            (Outcome::Again, _) => "the kubelet restarts it",
            (Outcome::Done, _) => "it is done",
            (Outcome::Failed, ContainerKind::Init) => "the pod fails",
            (Outcome::Failed, _) => "the pod fails once all containers have ended",
        })
    }

    /// What is allowed but hardly meant.
    pub(super) fn warnings(&self, container: &Container<'_>) -> Vec<String> {
        let name = container.name;
        let mut warnings = Vec::new();
        let rule = self.of(name);
        let success = rule(0.into());
        if container.kind == ContainerKind::Init && success.is_some_and(|(it, _)| it.is_whole_pod())
        {
            warnings.push(format!(
                "success (0) of the init container {name} restarts the pod, so that it never gets beyond; list 0 in a \
                 NotIn rule"
            ));
        }
        let killed = policy::kills_that_restart(|exit| rule(exit).map(|(action, _)| action));
        let killed: Vec<_> = killed.iter().map(ToString::to_string).collect();
        if !killed.is_empty() {
            warnings.push(format!(
                "{name} restarts the pod with exit {}, which it also ends with when somebody else kills it (SIGKILL: 137, \
                 SIGTERM: 143): list that in a NotIn rule, or do not name the signal",
                killed.join(" or ")
            ));
        }
        warnings
    }

    /// Whether Reprise restarts the whole pod for any exit of that container.
    pub(super) fn restarts_pod(&self, container: &Container<'_>) -> bool {
        let action = self.policy.actions(container.name);
        let exits = CODES.flat_map(|code| [false, true].map(|oom_killed| exit(code, oom_killed)));
        exits.filter_map(action).any(Action::is_whole_pod)
    }
}

fn exit(code: u8, oom_killed: bool) -> Exit {
    let code = ExitCode(code.into());
    Exit { code, oom_killed }
}

fn outcome(
    kind: ContainerKind,
    restart_policy: RestartPolicy,
    rule: Option<(Action, Actor)>,
    code: u8,
) -> Outcome {
    match (rule, kind) {
        // KEP-5307: rules repeat an init container "until it succeeds".
        (Some((Action::Restart, _)) | None, ContainerKind::Init) if code == 0 => Outcome::Next,
        (Some((action, by)), _) => Outcome::Rule(action, by),
        (None, _) => match restart_policy {
            RestartPolicy::Always => Outcome::Again,
            RestartPolicy::OnFailure if code != 0 => Outcome::Again,
            RestartPolicy::Never if code != 0 => Outcome::Failed,
            RestartPolicy::OnFailure | RestartPolicy::Never => Outcome::Done,
        },
    }
}

/// What rules do not say.
fn by_policy(outcome: Outcome) -> bool {
    !matches!(outcome, Outcome::Rule(..))
}

fn grouped(outcomes: impl Iterator<Item = (Outcome, u8)>) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    for (outcome, code) in outcomes {
        match groups.iter_mut().find(|(known, _)| *known == outcome) {
            Some((_, codes)) => codes.push(code),
            None => groups.push((outcome, vec![code])),
        }
    }
    groups
}

/// Where an OOM kill makes a difference: all codes if they lead to the same then, else those that lead elsewhere.
fn after_oom_kill(leads: impl Fn(u8, bool) -> Outcome, otherwise: &[Group]) -> Vec<Group> {
    let all = grouped(CODES.map(|code| (leads(code, true), code)));
    if all == otherwise {
        return Vec::new();
    }
    if all.len() == 1 {
        return all;
    }
    let elsewhere = CODES.filter(|code| leads(*code, true) != leads(*code, false));
    grouped(elsewhere.map(|code| (leads(code, true), code)))
}

fn runs(codes: &[u8]) -> Vec<(u8, u8)> {
    let runs = codes.chunk_by(|a, b| a + 1 == *b);
    runs.filter_map(|run| Some((*run.first()?, *run.last()?)))
        .collect()
}

/// On one line: `1, 3-5 → …`.
impl fmt::Display for Outcomes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}): ", self.name, self.kind)?;
        let last = self.exits.len().saturating_sub(1);
        for (index, exits) in self.exits.iter().enumerate() {
            let semicolon = if index == 0 { "" } else { "; " };
            f.write_str(semicolon)?;
            match exits.codes[..] {
                [(0, u8::MAX)] if exits.oom_killed || last == 0 => f.write_str("any exit")?,
                _ if index == last => f.write_str("any other exit")?,
                _ => write!(f, "exit {}", ranges(&exits.codes))?,
            }
            if exits.oom_killed {
                f.write_str(" after an OOM kill")?;
            }
            write!(f, " → {exits}")?;
        }
        Ok(())
    }
}

/// What they lead to.
impl fmt::Display for Exits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(policy) = self.restart_policy {
            write!(f, "restartPolicy {policy:?}: ")?;
        }
        f.write_str(&self.then)?;
        match self.by {
            Some(Actor::Reprise) => f.write_str(", by Reprise"),
            Some(Actor::Kubelet) => f.write_str(", by the kubelet"),
            None => Ok(()),
        }
    }
}

fn ranges(codes: &[(u8, u8)]) -> String {
    let ranges = codes.iter().map(|(first, last)| {
        if first == last {
            first.to_string()
        } else {
            format!("{first}-{last}")
        }
    });
    ranges.collect::<Vec<_>>().join(", ")
}
