//! Says in words what each exit of a container leads to.

use std::ops::RangeInclusive;

use super::manifest::{Container, Kind, RestartPolicy};
use crate::policy::{Action, Policy};

/// What an exit leads to.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Outcome {
    /// A rule matches.
    Rule(Action),
    /// An init container succeeded.
    Next,
    /// The restartPolicy starts the container again.
    Again,
    /// The container is done.
    Done,
    /// The container failed, and so will the pod.
    Failed,
}

/// All codes that a container can exit with.
const CODES: RangeInclusive<i32> = 0..=255;

fn outcome(container: &Container, action: Option<Action>, code: i32) -> Outcome {
    match (action, container.kind) {
        // KEP-5307: rules repeat an init container "until it succeeds".
        (Some(Action::Restart) | None, Kind::Init) if code == 0 => Outcome::Next,
        (Some(action), _) => Outcome::Rule(action),
        (None, _) => match container.restart_policy {
            RestartPolicy::Always => Outcome::Again,
            RestartPolicy::OnFailure if code != 0 => Outcome::Again,
            RestartPolicy::Never if code != 0 => Outcome::Failed,
            RestartPolicy::OnFailure | RestartPolicy::Never => Outcome::Done,
        },
    }
}

/// One line: the container, and every group of exit codes with what it leads to.
pub(super) fn sentence(container: &Container, policy: &Policy) -> String {
    let mut groups: Vec<(Outcome, Vec<i32>)> = Vec::new();
    let action = policy.actions(&container.name);
    for code in CODES {
        let outcome = outcome(container, action(code), code);
        match groups.iter_mut().find(|(known, _)| *known == outcome) {
            Some((_, codes)) => codes.push(code),
            None => groups.push((outcome, vec![code])),
        }
    }
    // What rules say comes first; the largest group comes last, as "any other exit".
    groups.sort_by_key(|(outcome, codes)| (codes.len(), !matches!(outcome, Outcome::Rule(_))));
    let largest = groups.len() - 1;
    groups[..largest].sort_by_key(|(outcome, _)| !matches!(outcome, Outcome::Rule(_)));
    let parts: Vec<_> = groups
        .iter()
        .enumerate()
        .map(|(index, (outcome, codes))| {
            let exits = match (index == largest, largest) {
                (true, 0) => "any exit".to_owned(),
                (true, _) => "any other exit".to_owned(),
                (false, _) => format!("exit {}", ranges(codes)),
            };
            format!("{exits} → {}", words(*outcome, container, policy))
        })
        .collect();
    let kind = match container.kind {
        Kind::Init => "init",
        Kind::Sidecar => "sidecar",
        Kind::Regular => "regular",
    };
    format!("{} ({kind}): {}", container.name, parts.join("; "))
}

/// What is allowed but hardly meant.
pub(super) fn warnings(container: &Container, policy: &Policy) -> Vec<String> {
    let (name, action) = (&container.name, policy.actions(&container.name));
    let restarts = |code| {
        let outcome = outcome(container, action(code), code);
        let whole = [Action::RestartAllContainers, Action::RestartPod];
        whole.map(Outcome::Rule).contains(&outcome)
    };
    let mut warnings = Vec::new();
    if container.kind == Kind::Init && restarts(0) {
        warnings.push(format!(
            "success (0) of the init container {name} restarts the pod, so that it never gets beyond; \
             list 0 in a NotIn rule"
        ));
    }
    let killed = policy.kills_that_restart(name);
    let killed: Vec<_> = killed.iter().map(ToString::to_string).collect();
    if !killed.is_empty() {
        warnings.push(format!(
            "{name} restarts the pod with exit {}, which it also ends with when somebody else kills it (SIGKILL: 137, \
             SIGTERM: 143): list that in a NotIn rule",
            killed.join(" or ")
        ));
    }
    warnings
}

fn words(outcome: Outcome, container: &Container, policy: &Policy) -> String {
    let by_policy = |what: &str| format!("restartPolicy {:?}: {what}", container.restart_policy);
    match (outcome, container.kind) {
        (Outcome::Rule(Action::Restart), _) => "restart this container".to_owned(),
        (Outcome::Rule(Action::RestartAllContainers), _) => {
            "restart all containers in place".to_owned()
        }
        (Outcome::Rule(Action::RestartPod), _) => match policy.options().grace_period {
            Some(period) => format!(
                "restart all containers in place, with {} s to stop",
                period.as_secs()
            ),
            None => {
                "restart all containers in place, with the pod's grace period to stop".to_owned()
            }
        },
        (Outcome::Next, _) => "the next container starts".to_owned(),
        (Outcome::Again, _) => by_policy("the kubelet restarts it"),
        (Outcome::Done, _) => by_policy("it is done"),
        (Outcome::Failed, Kind::Init) => by_policy("the pod fails"),
        (Outcome::Failed, _) => by_policy("the pod fails once all containers have ended"),
    }
}

/// Sorted codes with runs shortened: `1, 3-5`.
fn ranges(codes: &[i32]) -> String {
    let runs = codes.chunk_by(|a, b| a + 1 == *b).map(|run| match run {
        [one] => one.to_string(),
        [first, .., last] => format!("{first}-{last}"),
        [] => String::new(),
    });
    runs.collect::<Vec<_>>().join(", ")
}
