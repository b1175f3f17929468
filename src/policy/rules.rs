//! Restart rules of one container, after KEP-5307 and KEP-5532: which exit asks for which restart. That a rule may name signals,
//! and the lack of memory, is ours.

use std::fmt;

use k8s_openapi::api::core::v1::ContainerRestartRule;
use nix::sys::signal::Signal;
use serde::{Deserialize, Serialize};

use super::read::Word;
use crate::ids::Exit;
use crate::kube::RestartPolicy;

/// KEP-5307: at most 20 rules for a container.
pub const MAX_RULES: usize = 20;
/// KEP-5307: at most 255 exit codes in a rule.
pub const MAX_VALUES: usize = 255;
/// As many as there are on Linux.
pub const MAX_SIGNALS: usize = 64;
/// What a runtime adds to the number of the signal that has ended a container's first process.
const SIGNALLED: i32 = 128;

/// What an exit asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Action {
    /// Start this container again, whatever its restartPolicy (KEP-5307).
    Restart,
    /// Kill all containers of the pod without grace and start them again in place (KEP-5532).
    RestartAllContainers,
    /// As `RestartAllContainers`, but containers are stopped with grace (the earlier draft of
    /// KEP-5532).
    RestartPod,
}

impl Action {
    /// The action that a rule calls `name`.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::from_word(name)
    }

    /// Its name in rules.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.word()
    }

    /// Whether it is for all containers of the pod.
    pub(crate) fn is_whole_pod(self) -> bool {
        match self {
            Self::RestartAllContainers | Self::RestartPod => true,
            Self::Restart => false,
        }
    }
}

impl Word for Action {
    const WORDS: &'static [(&'static str, Self)] = &[
        ("Restart", Self::Restart),
        ("RestartAllContainers", Self::RestartAllContainers),
        ("RestartPod", Self::RestartPod),
    ];
}

/// How an exit code is compared with the values of a rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Operator {
    /// Matches the codes that are listed.
    In,
    /// Matches every other code, success (0) included: KEP-5307 makes no exception for it.
    NotIn,
}

impl Operator {
    /// The operator that a rule calls `name`.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::from_word(name)
    }
}

impl Word for Operator {
    const WORDS: &'static [(&'static str, Self)] = &[("In", Self::In), ("NotIn", Self::NotIn)];
}

/// What a rule matches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Condition {
    /// The exit code compares like this with these (KEP-5307).
    ExitCodes(Operator, Vec<i32>),
    /// The exit code is that of a process which one of these has ended. No runtime tells it from one that a process chose.
    Signals(Vec<Signal>),
    /// The kernel has killed a process of the container because it was out of memory.
    OomKilled,
}

impl Condition {
    fn matches(&self, exit: Exit) -> bool {
        match self {
            Self::ExitCodes(Operator::In, values) => values.contains(&exit.code.0),
            Self::ExitCodes(Operator::NotIn, values) => !values.contains(&exit.code.0),
            Self::Signals(signals) => {
                let mut codes = signals.iter().map(|signal| SIGNALLED + *signal as i32);
                codes.any(|code| code == exit.code.0)
            }
            Self::OomKilled => exit.oom_killed,
        }
    }

    fn key(&self) -> MatchedBy {
        match self {
            Self::ExitCodes(..) => MatchedBy::ExitCodes,
            Self::Signals(_) => MatchedBy::Signal,
            Self::OomKilled => MatchedBy::OomKilled,
        }
    }
}

/// What of a rule has matched an exit: the key of the condition, the first of several.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum MatchedBy {
    /// Its exit codes; also what a record tells that an older version wrote.
    #[default]
    #[serde(rename = "exitCodes")]
    ExitCodes,
    /// Its signals.
    #[serde(rename = "onSignal")]
    Signal,
    /// That it goes by the lack of memory.
    #[serde(rename = "onOOMKilled")]
    OomKilled,
}

impl fmt::Display for MatchedBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// One rule: these exits ask for this.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// What a matching exit asks for.
    pub action: Action,
    /// Any of these is enough.
    pub conditions: Vec<Condition>,
}

impl Rule {
    /// One of the KEP's.
    #[must_use]
    pub fn on_codes(action: Action, operator: Operator, values: Vec<i32>) -> Self {
        Self {
            action,
            conditions: vec![Condition::ExitCodes(operator, values)],
        }
    }

    fn matched(&self, exit: Exit) -> Option<MatchedBy> {
        let mut conditions = self.conditions.iter();
        conditions.find(|it| it.matches(exit)).map(Condition::key)
    }

    /// Whether it is one that the API takes in a pod's spec.
    fn is_of_api(&self) -> bool {
        let mut conditions = self.conditions.iter();
        conditions.all(|it| matches!(it, Condition::ExitCodes(..)))
    }
}

/// The rules of one container, in order.
///
/// How many there may be is checked where they are read: by [`super::Policy::from_annotations`], or
/// by the API server for those of a pod's spec.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rules(Vec<Numbered>);

/// A rule, and its number where it is written, from 1. `None`: nobody wrote it, see [`Rules::then`].
type Numbered = (Option<usize>, Rule);

impl From<Vec<Rule>> for Rules {
    fn from(rules: Vec<Rule>) -> Self {
        Self(numbers().zip(rules).collect())
    }
}

fn numbers() -> impl Iterator<Item = Option<usize>> {
    (1..).map(Some)
}

impl From<&[ContainerRestartRule]> for Rules {
    /// Of a container's spec. The API server has checked them; what this version does not know, a
    /// newer one may, and is passed over like a rule that does not match.
    fn from(rules: &[ContainerRestartRule]) -> Self {
        let known = |(number, rule): (_, &ContainerRestartRule)| {
            let exit_codes = rule.exit_codes.as_ref()?;
            let action = Action::from_name(&rule.action)?;
            let operator = Operator::from_name(&exit_codes.operator)?;
            let values = exit_codes.values.clone().unwrap_or_default();
            Some((number, Rule::on_codes(action, operator, values)))
        };
        Self(numbers().zip(rules).filter_map(known).collect())
    }
}

impl Rules {
    /// The same, and after them what the container's own restart policy starts again (KEP-5307), for a kubelet that knows
    /// the pod's alone.
    #[must_use]
    pub fn then(mut self, policy: RestartPolicy) -> Self {
        let but = match policy {
            RestartPolicy::Always => Some(vec![]),
            RestartPolicy::OnFailure => Some(vec![0]),
            RestartPolicy::Never => None,
        };
        let rule = but.map(|values| Rule::on_codes(Action::Restart, Operator::NotIn, values));
        self.0.extend(rule.map(|rule| (None, rule)));
        self
    }

    /// What an exit asks for: the first rule that matches decides (KEP-5307). `None`:
    /// no rule matches, and the container's restartPolicy stands.
    #[must_use]
    pub fn action(&self, exit: impl Into<Exit>) -> Option<Action> {
        self.matched(exit.into()).map(|(action, _)| action)
    }

    /// The same, and the number of the rule, and what of it has matched.
    pub(super) fn matched(&self, exit: Exit) -> Option<(Action, Option<(usize, MatchedBy)>)> {
        let mut rules = self.0.iter();
        let matched = |(number, rule): &Numbered| {
            let by = rule.matched(exit)?;
            Some((rule.action, number.map(|number| (number, by))))
        };
        rules.find_map(matched)
    }

    /// What the rules ask for, in their order.
    pub(super) fn actions(&self) -> impl Iterator<Item = Action> {
        self.0.iter().map(|(_, rule)| rule.action)
    }

    /// Whether the API takes them all in a pod's spec.
    pub(super) fn are_of_api(&self) -> bool {
        self.0.iter().all(|(_, rule)| rule.is_of_api())
    }

    /// Whether there is no rule at all.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
pub(super) mod tests {
    use k8s_openapi::api::core::v1::ContainerRestartRuleOnExitCodes;
    use proptest::prelude::*;

    use super::*;
    use crate::ids::ExitCode;

    pub(in crate::policy) fn any_action() -> impl Strategy<Value = Action> {
        prop_oneof![
            Just(Action::Restart),
            Just(Action::RestartAllContainers),
            Just(Action::RestartPod)
        ]
    }

    /// What a rule of an annotation may match.
    fn any_condition() -> impl Strategy<Value = Condition> {
        let operator = prop_oneof![Just(Operator::In), Just(Operator::NotIn)];
        let values = prop::collection::vec(0..=255_i32, 1..8);
        let signal = prop::sample::select(Signal::iterator().collect::<Vec<_>>());
        prop_oneof![
            4 => (operator, values).prop_map(|(operator, values)| Condition::ExitCodes(operator, values)),
            1 => prop::collection::vec(signal, 1..8).prop_map(Condition::Signals),
            1 => Just(Condition::OomKilled),
        ]
    }

    /// A rule that an annotation may hold, with each kind of condition once at most.
    pub(in crate::policy) fn any_rule() -> impl Strategy<Value = Rule> {
        let kind = |it: &Condition| std::mem::discriminant(it);
        let conditions = prop::collection::vec(any_condition(), 1..4);
        (any_action(), conditions).prop_map(move |(action, mut conditions)| {
            conditions.sort_by_key(|it| match it {
                Condition::ExitCodes(..) => 0,
                Condition::Signals(_) => 1,
                Condition::OomKilled => 2,
            });
            conditions.dedup_by_key(|it| kind(it));
            Rule { action, conditions }
        })
    }

    fn exit(code: i32, oom_killed: bool) -> Exit {
        let code = ExitCode(code);
        Exit { code, oom_killed }
    }

    fn any_exit() -> impl Strategy<Value = Exit> {
        (0..=255_i32, any::<bool>()).prop_map(|(code, oom_killed)| exit(code, oom_killed))
    }

    proptest! {
        #[test]
        fn the_first_rule_that_matches_decides(
            rules in prop::collection::vec(any_rule(), 0..20),
            exit in any_exit(),
        ) {
            let mut expected = None;
            for rule in rules.iter().rev() {
                if rule.conditions.iter().any(|it| it.matches(exit)) {
                    expected = Some(rule.action);
                }
            }
            prop_assert_eq!(Rules::from(rules).action(exit), expected);
        }

        #[test]
        fn in_and_not_in_share_out_all_codes(
            values in prop::collection::vec(0..=255_i32, 0..8),
            code in any::<i32>(),
        ) {
            let matches = |operator| {
                Condition::ExitCodes(operator, values.clone()).matches(code.into())
            };
            prop_assert_eq!(matches(Operator::In), values.contains(&code));
            prop_assert_ne!(matches(Operator::In), matches(Operator::NotIn));
        }

        /// So that nobody need wait for the news where an earlier rule matches without it.
        #[test]
        fn that_it_was_out_of_memory_takes_no_rule_from_an_exit(
            rules in prop::collection::vec(any_rule(), 0..20),
            code in 0..=255_i32,
        ) {
            let rules = Rules::from(rules);
            prop_assert!(rules.action(code).is_none() || rules.action(exit(code, true)).is_some());
        }
    }

    #[test]
    fn a_signal_matches_the_code_that_the_runtime_makes_of_it() {
        let rules = |signals: &[Signal]| {
            let conditions = vec![Condition::Signals(signals.to_vec())];
            let action = Action::RestartAllContainers;
            Rules::from(vec![Rule { action, conditions }])
        };
        let two = rules(&[Signal::SIGSEGV, Signal::SIGSYS]);
        let matched: Vec<i32> = (-1..=256)
            .filter(|code| two.action(*code).is_some())
            .collect();
        assert_eq!(matched, [139, 159]);
    }

    #[test]
    fn a_rule_matches_if_any_of_its_conditions_does() {
        let codes = Condition::ExitCodes(Operator::In, vec![42]);
        let conditions = vec![
            codes,
            Condition::Signals(vec![Signal::SIGBUS]),
            Condition::OomKilled,
        ];
        let rule = Rule {
            action: Action::RestartPod,
            conditions,
        };
        let rules = Rules::from(vec![rule]);
        for (code, oom_killed, by) in [
            (42, false, Some(MatchedBy::ExitCodes)),
            (42, true, Some(MatchedBy::ExitCodes)),
            (135, false, Some(MatchedBy::Signal)),
            (137, true, Some(MatchedBy::OomKilled)),
            (0, true, Some(MatchedBy::OomKilled)),
            (137, false, None),
            (0, false, None),
        ] {
            let matched = rules.matched(exit(code, oom_killed));
            let rule = matched.and_then(|(_, rule)| rule);
            assert_eq!(rule, by.map(|by| (1, by)), "{code}, {oom_killed}");
        }
    }

    #[test]
    fn what_no_rule_matches_goes_by_the_containers_own_policy() {
        let action = Action::RestartAllContainers;
        let all = vec![Rule::on_codes(action, Operator::In, vec![42])];
        for (policy, after) in [
            (RestartPolicy::Always, [true, true]),
            (RestartPolicy::OnFailure, [false, true]),
            (RestartPolicy::Never, [false, false]),
        ] {
            let rules = Rules::from(all.clone()).then(policy);
            let restarts = [0, 1].map(|code| rules.action(code) == Some(Action::Restart));
            assert_eq!(restarts, after, "{policy:?}");
            assert_eq!(rules.action(42), Some(Action::RestartAllContainers));
        }
    }

    #[test]
    fn rules_are_counted_where_they_are_written_and_a_policy_is_none() {
        let rule = |action: &str, value| ContainerRestartRule {
            action: action.to_owned(),
            exit_codes: Some(ContainerRestartRuleOnExitCodes {
                operator: "In".to_owned(),
                values: Some(vec![value]),
            }),
        };
        let spec = [rule("Restart", 1), rule("OfLater", 2), rule("Restart", 3)];
        let rules = Rules::from(&spec[..]).then(RestartPolicy::Always);
        let numbers = [1, 2, 3].map(|code| {
            let (_, rule) = rules.matched(Exit::from(code)).unwrap();
            rule.map(|(number, _)| number)
        });
        assert_eq!(numbers, [Some(1), None, Some(3)]);
    }

    #[test]
    fn no_rule_matches_nothing() {
        assert_eq!(Rules::default().action(0), None);
    }

    #[test]
    fn not_in_matches_success_unless_it_is_listed() {
        let rules = |values| {
            Rules::from(vec![Rule::on_codes(
                Action::Restart,
                Operator::NotIn,
                values,
            )])
        };
        assert_eq!(rules(vec![1]).action(0), Some(Action::Restart));
        assert_eq!(rules(vec![0]).action(0), None);
        assert_eq!(rules(vec![]).action(7), Some(Action::Restart));
    }
}
