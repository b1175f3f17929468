//! Restart rules of one container, after KEP-5307 and KEP-5532: which exit asks for which restart.

use k8s_openapi::api::core::v1::ContainerRestartRule;
use serde::{Deserialize, Serialize};

use super::read::Word;
use crate::kube::RestartPolicy;

/// KEP-5307: at most 20 rules for a container.
pub const MAX_RULES: usize = 20;
/// KEP-5307: at most 255 exit codes in a rule.
pub const MAX_VALUES: usize = 255;

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

/// One rule: these exits ask for this.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// What a matching exit asks for.
    pub action: Action,
    /// How the exit code is compared with `values`.
    pub operator: Operator,
    /// Exit codes.
    pub values: Vec<i32>,
}

impl Rule {
    fn matches(&self, code: i32) -> bool {
        let listed = self.values.contains(&code);
        match self.operator {
            Operator::In => listed,
            Operator::NotIn => !listed,
        }
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
            let rule = Rule {
                action: Action::from_name(&rule.action)?,
                operator: Operator::from_name(&exit_codes.operator)?,
                values: exit_codes.values.clone().unwrap_or_default(),
            };
            Some((number, rule))
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
        let rule = but.map(|values| Rule {
            action: Action::Restart,
            operator: Operator::NotIn,
            values,
        });
        self.0.extend(rule.map(|rule| (None, rule)));
        self
    }

    /// What an exit with `code` asks for: the first rule that matches decides (KEP-5307). `None`:
    /// no rule matches, and the container's restartPolicy stands.
    #[must_use]
    pub fn action(&self, code: i32) -> Option<Action> {
        self.matched(code).map(|(_, action)| action)
    }

    /// The same, and the number of the rule.
    pub(super) fn matched(&self, code: i32) -> Option<(Option<usize>, Action)> {
        let mut rules = self.0.iter();
        let (number, rule) = rules.find(|(_, rule)| rule.matches(code))?;
        Some((*number, rule.action))
    }

    /// What the rules ask for, in their order.
    pub(super) fn actions(&self) -> impl Iterator<Item = Action> {
        self.0.iter().map(|(_, rule)| rule.action)
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

    pub(in crate::policy) fn any_action() -> impl Strategy<Value = Action> {
        prop_oneof![
            Just(Action::Restart),
            Just(Action::RestartAllContainers),
            Just(Action::RestartPod)
        ]
    }

    /// A rule that an annotation may hold.
    pub(in crate::policy) fn any_rule() -> impl Strategy<Value = Rule> {
        let operator = prop_oneof![Just(Operator::In), Just(Operator::NotIn)];
        (
            any_action(),
            operator,
            prop::collection::vec(0..=255_i32, 1..8),
        )
            .prop_map(|(action, operator, values)| Rule {
                action,
                operator,
                values,
            })
    }

    proptest! {
        #[test]
        fn the_first_rule_that_matches_decides(
            rules in prop::collection::vec(any_rule(), 0..20),
            code in 0..=255_i32,
        ) {
            let mut expected = None;
            for rule in rules.iter().rev() {
                if rule.values.contains(&code) == (rule.operator == Operator::In) {
                    expected = Some(rule.action);
                }
            }
            prop_assert_eq!(Rules::from(rules).action(code), expected);
        }

        #[test]
        fn in_and_not_in_share_out_all_codes(rule in any_rule(), code in any::<i32>()) {
            let other = match rule.operator {
                Operator::In => Operator::NotIn,
                Operator::NotIn => Operator::In,
            };
            let opposite = Rule { operator: other, ..rule.clone() };
            prop_assert_ne!(rule.matches(code), opposite.matches(code));
        }
    }

    #[test]
    fn what_no_rule_matches_goes_by_the_containers_own_policy() {
        let all = vec![Rule {
            action: Action::RestartAllContainers,
            operator: Operator::In,
            values: vec![42],
        }];
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
        let numbers = [1, 2, 3].map(|code| rules.matched(code).unwrap().0);
        assert_eq!(numbers, [Some(1), None, Some(3)]);
    }

    #[test]
    fn no_rule_matches_nothing() {
        assert_eq!(Rules::default().action(0), None);
    }

    #[test]
    fn not_in_matches_success_unless_it_is_listed() {
        let rules = |values| {
            Rules::from(vec![Rule {
                action: Action::Restart,
                operator: Operator::NotIn,
                values,
            }])
        };
        assert_eq!(rules(vec![1]).action(0), Some(Action::Restart));
        assert_eq!(rules(vec![0]).action(0), None);
        assert_eq!(rules(vec![]).action(7), Some(Action::Restart));
    }
}
