//! A pod and what befalls it.

use proptest::prelude::*;
use proptest::sample::Index;

use super::Ms;
use super::runtime::Is;
use crate::ids::{ContainerName, ExitCode};
use crate::kube::{ContainerKind, RestartPolicy};
use crate::policy::Action;

pub(super) const INIT_FAILURE: ExitCode = ExitCode(3);
/// What the second trigger ends with.
pub(super) const SECOND: ExitCode = ExitCode(43);

pub(super) const LONGEST_FAULT: Ms = 20_000;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Kill,
    Make,
    Remove,
}

/// What is wrong with one kind of call to the runtime.
#[derive(Debug, Clone, Copy)]
pub(super) enum Fault {
    None,
    /// The next one fails.
    Once(Kind),
    /// They take that much longer.
    Slow(Kind, Ms),
    /// They fail for that long from the beginning.
    Down(Kind, Ms),
    /// The next one is done, and the runtime ends before it answers.
    Lost(Kind),
}

/// Kubelets that differ in what is played here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Version {
    V1_33,
    /// `lastState` outlives its container.
    V1_36,
    /// An exited regular container initialises a pod.
    V1_37,
}

#[derive(Debug, Clone)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "each is a circumstance of its own"
)]
pub(super) struct Case {
    pub(super) policy: RestartPolicy,
    /// In start order.
    pub(super) containers: Vec<(ContainerName, ContainerKind)>,
    pub(super) trigger: usize,
    pub(super) code: ExitCode,
    pub(super) action: Action,
    /// The last regular container had ended so.
    pub(super) completed: Option<ExitCode>,
    /// Each container had an attempt before.
    pub(super) older: bool,
    /// This one was made without a hook.
    pub(super) unhooked: Option<usize>,
    /// Another container ends by itself, that long after the beginning.
    pub(super) own_exit: Option<(usize, Ms, ExitCode)>,
    /// Another container has a rule of its own, and ends as that one names, that long after the beginning.
    pub(super) second: Option<(usize, Ms, Action)>,
    /// The trigger asks once more, that long after it has started again.
    pub(super) again: Option<Ms>,
    /// The first init container that runs fails.
    pub(super) init_fails: Option<ExitCode>,
    pub(super) back_off: Ms,
    pub(super) grace: Ms,
    /// What containers end with that have time to stop.
    pub(super) stops_with: ExitCode,
    /// How long the startup probe of a sidecar takes, if it has one.
    pub(super) probe: Option<Ms>,
    /// Whether the pod may be replayed.
    pub(super) replay: bool,
    /// How long it waits for its turn.
    pub(super) turn: Option<Ms>,
    /// Whether the runtime tells what containers were made from.
    pub(super) tells: bool,
    pub(super) spec_known: bool,
    pub(super) api: bool,
    pub(super) kubelet: Version,
    /// How long it takes at the most from the list of a pod's containers to their states.
    pub(super) inspecting: Ms,
    pub(super) fault: Fault,
    /// When the plugin dies and how long it is away.
    pub(super) deaths: Vec<(Ms, Ms)>,
    /// When its connection to NRI ends, and for how long there is none.
    pub(super) cut: Option<(Ms, Ms)>,
    pub(super) deleted: Option<Ms>,
    /// When the API server tells the kubelet something about the pod.
    pub(super) nudges: Vec<Ms>,
    pub(super) collected: Ms,
    /// How late a time that was asked for is told.
    pub(super) late: Ms,
    /// When somebody asks for a restart, and whether at once.
    pub(super) asks: Vec<(Ms, bool)>,
    /// Whether that is all: the trigger does not end by itself.
    pub(super) asked: bool,
    pub(super) luck: Vec<u8>,
}

impl Case {
    pub(super) fn trigger_name(&self) -> ContainerName {
        self.containers[self.trigger].0.clone()
    }

    pub(super) fn kind_of(&self, name: &ContainerName) -> ContainerKind {
        let mut containers = self.containers.iter();
        containers
            .find(|(it, _)| it == name)
            .map_or(ContainerKind::Regular, |it| it.1)
    }

    pub(super) fn regulars(&self) -> impl Iterator<Item = &ContainerName> {
        let regulars = self.containers.iter();
        regulars
            .filter(|it| it.1 == ContainerKind::Regular)
            .map(|it| &it.0)
    }

    pub(super) fn inits(&self) -> impl Iterator<Item = &(ContainerName, ContainerKind)> {
        let containers = self.containers.iter();
        containers.filter(|it| it.1 != ContainerKind::Regular)
    }

    pub(super) fn restarts_after(&self, code: ExitCode) -> bool {
        match self.policy {
            RestartPolicy::Always => true,
            RestartPolicy::OnFailure => code != ExitCode::SUCCESS,
            RestartPolicy::Never => false,
        }
    }

    /// What a container was doing at the beginning; `None`: it had not been created.
    pub(super) fn was(&self, at: usize) -> Option<Is> {
        let (_, kind) = &self.containers[at];
        let initialising = self.containers[self.trigger].1 == ContainerKind::Init;
        let last = at + 1 == self.containers.len();
        match kind {
            _ if at == self.trigger => Some(Is::Running),
            _ if initialising && at > self.trigger => None,
            ContainerKind::Init => Some(Is::Exited(ExitCode::SUCCESS)),
            ContainerKind::Regular if last => Some(self.completed.map_or(Is::Running, Is::Exited)),
            ContainerKind::Sidecar | ContainerKind::Regular => Some(Is::Running),
        }
    }

    pub(super) fn delays(&self, call: Kind) -> bool {
        let (Fault::Slow(kind, _) | Fault::Down(kind, _)) = self.fault else {
            return false;
        };
        kind == call
    }

    /// Nothing happens but the one restart.
    pub(super) fn is_plain(&self) -> bool {
        // Without the spec no order is kept.
        self.spec_known
            && self.unhooked.is_none()
            && self.second.is_none()
            && self.again.is_none()
            && self.init_fails.is_none()
            && matches!(self.fault, Fault::None)
            && self.deaths.is_empty()
            && self.cut.is_none()
            && self.deleted.is_none()
            && self.asks.len() == usize::from(self.asked)
            && !(self.asked && self.own_exit.is_some())
    }
}

fn any_policy() -> impl Strategy<Value = RestartPolicy> {
    prop_oneof![
        Just(RestartPolicy::Never),
        Just(RestartPolicy::OnFailure),
        Just(RestartPolicy::Always)
    ]
}

fn any_action() -> impl Strategy<Value = Action> {
    prop_oneof![
        6 => Just(Action::RestartAllContainers),
        2 => Just(Action::RestartPod),
        1 => Just(Action::Restart)
    ]
}

fn any_version() -> impl Strategy<Value = Version> {
    prop_oneof![
        Just(Version::V1_33),
        Just(Version::V1_36),
        Just(Version::V1_37)
    ]
}

fn any_fault() -> impl Strategy<Value = Fault> {
    let kind = prop_oneof![Just(Kind::Kill), Just(Kind::Make), Just(Kind::Remove)];
    (kind, 0..8, 0..LONGEST_FAULT).prop_map(|(kind, fault, long)| match fault {
        0 => Fault::Once(kind),
        1 => Fault::Slow(kind, long / 2),
        2 => Fault::Down(kind, long),
        3 => Fault::Lost(kind),
        _ => Fault::None,
    })
}

fn seldom<T: std::fmt::Debug + Clone + 'static>(
    value: impl Strategy<Value = T> + 'static,
) -> impl Strategy<Value = Option<T>> {
    prop::option::weighted(0.15, value)
}

fn any_pod() -> impl Strategy<Value = Case> {
    let spec = (
        1usize..=3,
        0usize..=2,
        prop::option::of(0usize..=2),
        any::<Index>(),
    );
    let rule = (any_policy(), any_action(), any::<bool>());
    let past = (seldom(any::<bool>()), any::<bool>(), seldom(any::<Index>()));
    (spec, rule, past).prop_map(|(spec, rule, past)| {
        let (regulars, inits, sidecar, trigger) = spec;
        let (policy, action, succeeds) = rule;
        let (completed, older, unhooked) = past;
        let names = ["i", "j"].into_iter().take(inits);
        let mut containers: Vec<_> = names.map(|it| (it.into(), ContainerKind::Init)).collect();
        if let Some(at) = sidecar {
            containers.insert(at.min(inits), ("s".into(), ContainerKind::Sidecar));
        }
        let names = ["a", "b", "c"].into_iter().take(regulars);
        containers.extend(names.map(|it| (it.into(), ContainerKind::Regular)));
        let trigger = trigger.index(containers.len());
        let regular = containers[trigger].1 == ContainerKind::Regular;
        Case {
            policy,
            trigger,
            code: ExitCode(if regular && succeeds { 0 } else { 42 }),
            action,
            // The pod would be over.
            completed: completed
                .filter(|_| regulars > 1)
                .and_then(|failed| match policy {
                    RestartPolicy::Never if failed => Some(ExitCode(1)),
                    RestartPolicy::Never | RestartPolicy::OnFailure => Some(ExitCode::SUCCESS),
                    RestartPolicy::Always => None,
                }),
            older,
            unhooked: unhooked.map(|it| it.index(containers.len())),
            containers,
            own_exit: None,
            second: None,
            again: None,
            init_fails: None,
            back_off: 0,
            grace: 0,
            stops_with: ExitCode::SUCCESS,
            probe: None,
            replay: false,
            turn: None,
            tells: true,
            spec_known: true,
            api: true,
            kubelet: Version::V1_33,
            inspecting: 0,
            fault: Fault::None,
            deaths: Vec::new(),
            cut: None,
            deleted: None,
            nudges: Vec::new(),
            collected: 0,
            late: 0,
            asks: Vec::new(),
            asked: false,
            luck: Vec::new(),
        }
    })
}

/// A request, and whether it is all; a second trigger, and when it ends; when what has ended for good and runs again restarts
/// with all others.
type Other = (
    Option<Vec<(Ms, bool)>>,
    bool,
    Option<(Index, Ms, Option<Action>)>,
    Option<Ms>,
);

/// What else asks for a restart.
fn any_other() -> impl Strategy<Value = Other> {
    let asks = prop::option::weighted(
        0.1,
        prop::collection::vec((0u64..8000, any::<bool>()), 1..=2),
    );
    // At the same time, or later in a restart. More often than not by the same rule.
    let when = prop_oneof![0u64..300, 0u64..8000];
    let action = prop::option::weighted(0.4, any_action());
    let second = prop::option::weighted(0.35, (any::<Index>(), when, action));
    let anew = prop::option::weighted(0.1, 0u64..3000);
    (asks, any::<bool>(), second, anew)
}

pub(super) fn any_case() -> impl Strategy<Value = Case> {
    let soon = 0u64..5000;
    let code = prop_oneof![Just(ExitCode::SUCCESS), Just(ExitCode(1))];
    let exits = (
        seldom((any::<Index>(), 0u64..200, code)),
        seldom(0u64..3000),
        seldom(Just(INIT_FAILURE)),
        seldom(1000u64..40_000),
        0usize..4,
        prop::option::of(0u64..2000),
        any::<bool>(),
        seldom(0u64..15_000),
        prop::bool::weighted(0.9),
    );
    let around = (
        prop::bool::weighted(0.9),
        prop::bool::weighted(0.8),
        (any_version(), 0u64..200),
        any_fault(),
        prop::collection::vec((soon.clone(), 20u64..12_000), 0..=1),
        seldom(soon.clone()),
        prop::collection::vec(soon, 0..=2),
        0u64..60_000,
    );
    let luck = prop::collection::vec(any::<u8>(), 0..200);
    // Last, so that what was drawn before stays what it was.
    let cut = seldom((0u64..5000, 20u64..12_000));
    let late = 0u64..60;
    // About when a back-off ends, and when the pod's turn comes.
    let then = 0u64..500;
    let at_turn = seldom(0u64..1000);
    let stops_with = prop_oneof![
        Just(ExitCode::SUCCESS),
        Just(ExitCode(143)),
        Just(ExitCode(1))
    ];
    // Probes, and others that have the kubelet look at the pod.
    let often = prop::option::weighted(0.3, prop::collection::vec(0u64..12_000, 4..=16));
    let last = (cut, late, then, at_turn, stops_with, often, any_other());
    (any_pod(), exits, around, luck, last).prop_map(|(pod, exits, around, luck, last)| {
        let (cut, late, then, at_turn, stops_with, often, (asks, asked, second, anew)) = last;
        let (own_exit, again, init_fails, back_off, grace, probe, replay, turn, tells) = exits;
        let (spec_known, api, (kubelet, inspecting), fault, deaths, deleted, nudges, collected) =
            around;
        let (others, own) = (
            pod.regulars().count() > 1,
            pod.policy != RestartPolicy::Always,
        );
        let anew = anew.filter(|_| others && own);
        let completed = anew.map(|_| ExitCode::SUCCESS).or(pod.completed);
        // Only of a pod that is known it can be told, and no restart of one container answers it.
        let asks = asks.filter(|_| spec_known && pod.action != Action::Restart);
        let second = second.map(|(at, when, action)| {
            let at = at.index(pod.containers.len());
            (at, when, action.unwrap_or(pod.action))
        });
        let second = second.filter(|(at, ..)| *at != pod.trigger && asks.is_none());
        let stops = [Some(pod.action), second.map(|it| it.2)].contains(&Some(Action::RestartPod));
        let then = back_off.map(|long| (long + then).saturating_sub(400));
        let at_turn = turn.zip(at_turn).map(|(turn, after)| turn + after);
        Case {
            own_exit: own_exit.map(|(at, when, code)| (at.index(pod.containers.len()), when, code)),
            second,
            completed,
            again: anew.or(again),
            init_fails,
            back_off: back_off.unwrap_or_default(),
            // None, less than exits can be held, and more.
            grace: if stops {
                [0, 1000, 4000, 30_000][grace]
            } else {
                0
            },
            probe,
            stops_with,
            replay,
            turn,
            tells,
            spec_known,
            api,
            kubelet,
            inspecting,
            fault,
            deaths,
            cut,
            deleted,
            nudges: [nudges, often.unwrap_or_default()]
                .into_iter()
                .flatten()
                .chain(then)
                .chain(at_turn)
                .collect(),
            collected,
            late,
            asked: asked && asks.is_some(),
            asks: asks.unwrap_or_default(),
            luck,
            ..pod
        }
    })
}
