//! What an exit means: from a pod's annotations, and the rules of its spec, to an action.
//!
//! Pure: no I/O, no clock. Follows KEP-5307 (rules) and KEP-5532 (`RestartAllContainers`).

mod error;
mod options;
mod read;
mod rules;

use std::collections::BTreeMap;

use serde_json::Value;

use crate::kube::KubeletFeatures;
pub use error::{Fault, Place, PolicyError, Problem};
pub use options::{CompletedContainers, LONGEST_GRACE, Options, Start};
use read::PodRules;
pub use rules::{Action, MAX_RULES, MAX_VALUES, Operator, Rule, Rules};

/// Every annotation key of Reprise is in this domain.
pub const DOMAIN: &str = "reprise.dev";
/// The annotation that holds restart rules; see [`Policy`] for the order in which its places are
/// looked up.
pub const RULES_KEY: &str = "restart-rules.reprise.dev";
/// The annotation that holds [`Options`].
pub const OPTIONS_KEY: &str = "restart-options.reprise.dev";
/// The annotation whose every new value asks for one restart.
pub const REQUEST_KEY: &str = "restart-request.reprise.dev";
/// The annotation that says what becomes of a pod that restarts too often on its node.
pub const FAILURE_POLICY_KEY: &str = "failure-policy.reprise.dev";

/// The restart rules and options of one pod.
///
/// The rules of a container are the first that exist of: the annotation
/// `restart-rules.reprise.dev/container.<name>`, its entry in a mapping on
/// `restart-rules.reprise.dev/pod`, the list on `restart-rules.reprise.dev/pod`, the one on
/// `restart-rules.reprise.dev`, and `restartPolicyRules` of its spec. They are never merged, and an
/// empty list takes a container out.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Policy {
    own: BTreeMap<String, Rules>,
    mapped: BTreeMap<String, Rules>,
    pod: Option<Rules>,
    plain: Option<Rules>,
    spec: BTreeMap<String, Rules>,
    /// What the kubelet does by itself about `spec`.
    native: KubeletFeatures,
    options: Options,
}

impl Policy {
    /// Reads a pod's annotations. `None`: they carry no restart rules.
    ///
    /// The error names everything that is wrong with rules and options, not only the first.
    pub fn from_annotations<'a>(
        annotations: impl IntoIterator<Item = (&'a str, &'a str)>,
    ) -> Result<Option<Self>, PolicyError> {
        Self::from_pod(annotations, [], KubeletFeatures::default())
    }

    /// Reads a pod's annotations and takes `spec`, the `restartPolicyRules` of its containers by
    /// name, for those to which no annotation applies. What of them the kubelet acts on by itself,
    /// as `native` says, is left to it. `None`: there is nothing to do at all.
    pub fn from_pod<'a>(
        annotations: impl IntoIterator<Item = (&'a str, &'a str)>,
        spec: impl IntoIterator<Item = (String, Rules)>,
        native: KubeletFeatures,
    ) -> Result<Option<Self>, PolicyError> {
        let mut policy = Self {
            spec: spec.into_iter().collect(),
            native,
            ..Self::default()
        };
        let mut problems = Vec::new();
        let mut about_options = Vec::new();
        for (key, text) in annotations {
            if place(key, OPTIONS_KEY).is_some() {
                about_options.push((key, text));
            } else if let Some(place) = place(key, RULES_KEY) {
                policy.read(key, place, text, &mut problems);
            }
        }
        if policy.has_no_rules() && problems.is_empty() {
            return Ok(None);
        }
        match Options::from_annotations(about_options) {
            Ok(options) => policy.options = options,
            Err(error) => problems.extend(error.problems().iter().cloned()),
        }
        PolicyError::from_problems(problems)?;
        Ok(Some(policy))
    }

    fn read(&mut self, key: &str, place: &str, text: &str, problems: &mut Vec<Problem>) {
        let at = Place::key(key);
        match (place, place.strip_prefix("container.")) {
            ("", _) => self.plain = Some(read::rules(&at, text, problems)),
            ("pod", _) => match read::pod_rules(&at, text, problems) {
                PodRules::All(rules) => self.pod = Some(rules),
                PodRules::Each(each) => self.mapped = each,
            },
            (_, Some(container)) if !container.is_empty() => {
                self.own
                    .insert(container.to_owned(), read::rules(&at, text, problems));
            }
            _ => problems.push(Problem {
                place: at,
                fault: Fault::UnknownPlace(
                    "restart-rules.reprise.dev, restart-rules.reprise.dev/pod, \
                     restart-rules.reprise.dev/container.<name>",
                ),
            }),
        }
    }

    fn has_no_rules(&self) -> bool {
        let written = self.own.values().chain(self.mapped.values());
        let none_written = written
            .chain(&self.pod)
            .chain(&self.plain)
            .all(Rules::is_empty);
        none_written && !self.spec.values().any(|rules| self.acts_on_spec(rules))
    }

    /// Whether any of these rules of the spec is not the kubelet's business.
    fn acts_on_spec(&self, rules: &Rules) -> bool {
        rules.actions().any(|action| !self.is_native(action))
    }

    fn is_native(&self, action: Action) -> bool {
        match action {
            Action::Restart => self.native.container_rules,
            Action::RestartAllContainers => self.native.restart_all,
            // No kubelet has it: it is of a draft.
            Action::RestartPod => false,
        }
    }

    /// Fails if an annotation names a container that is not among `names`, all containers and init
    /// containers of the pod: such a rule would never be used.
    pub fn check_names(&self, names: &[&str]) -> Result<(), PolicyError> {
        let own = self
            .own
            .keys()
            .map(|name| (format!("{RULES_KEY}/container.{name}"), name));
        let mapped = self
            .mapped
            .keys()
            .map(|name| (format!("{RULES_KEY}/pod"), name));
        let unknown = own
            .chain(mapped)
            .filter(|(_, name)| !names.contains(&name.as_str()));
        let problem = |(key, name): (String, &String)| Problem {
            place: Place::key(&key),
            fault: Fault::NoSuchContainer(name.clone()),
        };
        PolicyError::from_problems(unknown.map(problem).collect())
    }

    /// What an exit of `container` with `code` asks for. `None`: no rule matches, and its
    /// restartPolicy stands.
    ///
    /// Success (0) is a code like any other here, also for init containers.
    #[must_use]
    pub fn action(&self, container: &str, code: i32) -> Option<Action> {
        if let Some(rules) = self.annotated(container) {
            return rules.action(code);
        }
        let action = self.spec.get(container)?.action(code)?;
        (!self.is_native(action)).then_some(action)
    }

    /// Whether any rule applies to `container`, so that its exits must be held.
    #[must_use]
    pub fn covers(&self, container: &str) -> bool {
        match self.annotated(container) {
            Some(rules) => !rules.is_empty(),
            None => self
                .spec
                .get(container)
                .is_some_and(|rules| self.acts_on_spec(rules)),
        }
    }

    /// How the pod wants its restarts done.
    #[must_use]
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// The rules that annotations have for `container`, an empty list among them.
    fn annotated(&self, container: &str) -> Option<&Rules> {
        let named = self
            .own
            .get(container)
            .or_else(|| self.mapped.get(container));
        named.or(self.pod.as_ref()).or(self.plain.as_ref())
    }
}

/// Whether a pod with annotations of these keys may have restart rules: a test of the keys alone, which
/// allocates nothing, because it runs for every container that a node creates.
pub fn has_rules<'a>(keys: impl IntoIterator<Item = &'a str>) -> bool {
    keys.into_iter().any(|key| place(key, RULES_KEY).is_some())
}

/// Reads `restartPolicyRules` as written in a manifest; `field` names the place in errors.
pub(crate) fn spec_rules(field: &str, value: &Value) -> Result<Rules, PolicyError> {
    let mut problems = Vec::new();
    let rules = read::rules_value(&Place::key(field), value, &mut problems);
    PolicyError::from_problems(problems)?;
    Ok(rules)
}

/// Whether `key` is in our domain but none that we read: most likely a typo.
pub(crate) fn is_unknown_key(key: &str) -> bool {
    let prefix = key.split('/').next().unwrap_or(key);
    let ours = prefix
        .strip_suffix(DOMAIN)
        .is_some_and(|rest| rest.is_empty() || rest.ends_with('.'));
    ours && ![RULES_KEY, OPTIONS_KEY, REQUEST_KEY, FAILURE_POLICY_KEY].contains(&prefix)
}

/// Whether `key` is in our domain, known or not.
pub(crate) fn is_ours(key: &str) -> bool {
    is_unknown_key(key)
        || [RULES_KEY, OPTIONS_KEY, REQUEST_KEY, FAILURE_POLICY_KEY]
            .iter()
            .any(|k| place(key, k).is_some())
}

/// Where an annotation applies: `place` of `<wanted>/<place>`, or nothing for `<wanted>` alone.
/// `None`: another key.
fn place<'k>(key: &'k str, wanted: &str) -> Option<&'k str> {
    match key.strip_prefix(wanted)? {
        "" => Some(""),
        rest => rest.strip_prefix('/').filter(|place| !place.is_empty()),
    }
}

#[cfg(test)]
mod tests;
