//! What an exit means: from a pod's annotations, and the rules of its spec, to an action.
//!
//! Pure: no I/O, no clock. Follows KEP-5307 (rules) and KEP-5532 (`RestartAllContainers`).

mod error;
mod failure;
mod options;
mod read;
mod request;
mod rules;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::ids::Exit;
use crate::kube::{KubeletFeatures, PodSpec};
use error::Problems;
pub use error::{Fault, Place, PolicyError, Problem};
pub use failure::{FailureAction, FailurePolicy};
pub use options::{CompletedContainers, LONGEST_GRACE, Options, Start};
pub use read::Unread;
use read::{Nodes, PodRules, Text};
pub(crate) use request::{POD_REQUEST_KEY, URGENT};
pub use request::{REQUEST_KEY, Request, RequestError};
pub use rules::{
    Action, Condition, MAX_RULES, MAX_SIGNALS, MAX_VALUES, MatchedBy, Operator, Rule, Rules,
};

/// Every annotation key of Reprise is in this domain.
pub const DOMAIN: &str = "reprise.dev";
/// The annotation that holds restart rules; see [`Policy`] for the order in which its places are
/// looked up.
pub const RULES_KEY: &str = "restart-rules.reprise.dev";
/// The annotation that holds [`Options`].
pub const OPTIONS_KEY: &str = "restart-options.reprise.dev";
/// The annotation that holds a [`FailurePolicy`].
pub const FAILURE_KEY: &str = "failure-policy.reprise.dev";
/// Those whose values are YAML or JSON, unlike that of [`REQUEST_KEY`].
const DOCUMENT_KEYS: [&str; 3] = [RULES_KEY, OPTIONS_KEY, FAILURE_KEY];

/// The restart rules and options of one pod.
///
/// The rules of a container are the first that exist of: the annotation
/// `restart-rules.reprise.dev/container.<name>`, its entry in a mapping on
/// `restart-rules.reprise.dev/pod`, the list on `restart-rules.reprise.dev/pod`, the one on
/// `restart-rules.reprise.dev`, and `restartPolicyRules` of its spec. They are never merged, and an
/// empty list takes a container out. Annotations in a pod with rules in its spec that its kubelet acts on are refused: two
/// would restart it.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Policy {
    written: Arc<Written>,
    spec: BTreeMap<String, Rules>,
    /// What the kubelet does by itself about `spec`; `None`: nobody knows.
    native: Option<KubeletFeatures>,
}

/// What the annotations of a pod say. They are read once: it takes a node's time, and they cannot change, being the
/// sandbox's.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Written {
    own: BTreeMap<String, Rules>,
    mapped: BTreeMap<String, Rules>,
    pod: Option<Rules>,
    plain: Option<Rules>,
    options: Options,
    /// What somebody had asked for by then.
    request: Option<Request>,
    about_options: Problems,
    about_rules: Problems,
}

impl Written {
    /// Reads them, some milliseconds at the worst. Never fails: what is wrong is told to whoever asks for the policy.
    #[must_use]
    pub fn read(unread: &Unread) -> Self {
        let mut written = Self::default();
        let nodes = &mut Nodes::of_pod();
        let options = Options::read(unread, nodes, &mut written.about_options);
        // Half of them would serve nobody.
        if written.about_options.is_empty() {
            written.options = options;
        }
        written.request = unread.request();
        for (place, text) in unread.at(RULES_KEY) {
            written.read_rules(place, text, nodes);
        }
        written
    }

    fn read_rules(&mut self, place: &str, text: Text<'_>, nodes: &mut Nodes) {
        let at = Place::key(text.key);
        let problems = &mut self.about_rules;
        match (place, place.strip_prefix("container.")) {
            ("", _) => self.plain = Some(read::rules(&at, text, nodes, problems)),
            ("pod", _) => match read::pod_rules(&at, text, nodes, problems) {
                PodRules::All(rules) => self.pod = Some(rules),
                PodRules::Each(each) => self.mapped = each,
            },
            (_, Some(container)) if !container.is_empty() => match read::named(container) {
                Ok(()) => {
                    let rules = read::rules(&at, text, nodes, problems);
                    self.own.insert(container.to_owned(), rules);
                }
                Err(fault) => problems.note(&at, fault),
            },
            _ => problems.note(
                &at,
                Fault::UnknownPlace(
                    "restart-rules.reprise.dev, restart-rules.reprise.dev/pod, \
                     restart-rules.reprise.dev/container.<name>",
                ),
            ),
        }
    }

    /// What the pod was made with: nobody asks by it.
    pub(crate) fn request(&self) -> Option<&Request> {
        self.request.as_ref()
    }

    /// How the pod wants its restarts done; where anything is wrong with that, as any other.
    pub(crate) fn options(&self) -> &Options {
        &self.options
    }

    fn has_rules(&self) -> bool {
        self.rules().any(|rules| !rules.is_empty())
    }

    fn rules(&self) -> impl Iterator<Item = &Rules> {
        let named = self.own.values().chain(self.mapped.values());
        named.chain(&self.pod).chain(&self.plain)
    }

    /// The rules for `container`, an empty list among them.
    fn of(&self, container: &str) -> Option<&Rules> {
        self.found(container).map(|(_, rules)| rules)
    }

    /// The same, and where they are.
    fn found(&self, container: &str) -> Option<(Source, &Rules)> {
        let own = self.own.get(container).map(|it| (Source::Own, it));
        let mapped = self.mapped.get(container).or(self.pod.as_ref());
        let mapped = mapped.map(|it| (Source::Pod, it));
        let plain = self.plain.as_ref().map(|it| (Source::Plain, it));
        own.or(mapped).or(plain)
    }
}

/// Where the rules of a container are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    Own,
    Pod,
    Plain,
    Spec,
}

impl Source {
    fn name(self, container: &str) -> String {
        match self {
            Self::Own => format!("{RULES_KEY}/container.{container}"),
            Self::Pod => format!("{RULES_KEY}/pod"),
            Self::Plain => RULES_KEY.to_owned(),
            Self::Spec => "restartPolicyRules".to_owned(),
        }
    }
}

/// The rule that an exit has matched.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MatchedRule {
    /// Counted from 1.
    pub number: usize,
    /// Among which it stands: the key of the annotation, or `restartPolicyRules` of the container's spec.
    pub source: String,
    /// What of it has matched.
    #[serde(default)]
    pub by: MatchedBy,
}

/// As people are told of it: `rule 2`, and by what it matches unless that is what every rule of the KEP does.
impl fmt::Display for MatchedRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rule {}", self.number)?;
        match self.by {
            MatchedBy::ExitCodes => Ok(()),
            by => write!(f, ", {by}"),
        }
    }
}

impl Policy {
    /// Reads a pod's annotations. `None`: they carry no restart rules.
    ///
    /// The error names everything that is wrong with rules and options, not only the first.
    pub fn from_annotations<'a>(
        annotations: impl IntoIterator<Item = (&'a str, &'a str)>,
    ) -> Result<Option<Self>, PolicyError> {
        Self::from_pod(annotations, [], None)
    }

    /// Reads a pod's annotations and takes `spec`, the `restartPolicyRules` of its containers by
    /// name, for those to which no annotation applies. What of them the kubelet acts on by itself,
    /// as `native` says, is left to it; as long as nobody knows, the whole pod is. `None`: there is nothing to do at all.
    pub fn from_pod<'a>(
        annotations: impl IntoIterator<Item = (&'a str, &'a str)>,
        spec: impl IntoIterator<Item = (String, Rules)>,
        native: Option<KubeletFeatures>,
    ) -> Result<Option<Self>, PolicyError> {
        let written = Written::read(&Unread::of(annotations));
        Self::new(Arc::new(written), spec, native)
    }

    /// Takes what a pod's annotations say and its spec, as [`Self::from_pod`], and checks that annotations name its containers.
    /// Where the kubelet does not know a container's own restart policy, that comes after the container's rules.
    pub(crate) fn of_pod(
        written: Arc<Written>,
        spec: Option<&PodSpec>,
        native: Option<KubeletFeatures>,
    ) -> Result<Option<Self>, PolicyError> {
        let containers = spec.iter().flat_map(|spec| &spec.containers);
        let knows_own = native.is_none_or(|it| it.container_rules);
        let rules = containers
            .filter(|container| !container.rules.is_empty())
            .map(|container| {
                let rules = Rules::from(&*container.rules);
                let own = container.restart_policy.filter(|_| !knows_own);
                let rules = own.into_iter().fold(rules, Rules::then);
                (container.name.to_string(), rules)
            });
        let policy = Self::new(written, rules, native)?;
        if let Some((policy, spec)) = policy.as_ref().zip(spec) {
            policy.check_names(&spec.container_names().collect::<Vec<_>>())?;
        }
        Ok(policy)
    }

    fn new(
        written: Arc<Written>,
        spec: impl IntoIterator<Item = (String, Rules)>,
        native: Option<KubeletFeatures>,
    ) -> Result<Option<Self>, PolicyError> {
        let policy = Self {
            written,
            spec: spec.into_iter().collect(),
            native,
        };
        let written = &policy.written;
        let is_known = native.is_some() || !policy.has_spec_rules();
        if !is_known || (policy.has_no_rules() && written.about_rules.is_empty()) {
            return Ok(None);
        }
        let mut problems = written.about_options.clone();
        problems.extend(&written.about_rules);
        if policy.has_rules_twice() && policy.kubelet_acts() {
            problems.note(&Place::key(RULES_KEY), Fault::KubeletActs);
        }
        problems.into_result().map(|()| Some(policy))
    }

    fn has_no_rules(&self) -> bool {
        !self.written.has_rules() && !self.spec.values().any(|rules| self.acts_on_spec(rules))
    }

    /// Whether there are rules in annotations and in the spec.
    pub(crate) fn has_rules_twice(&self) -> bool {
        self.written.has_rules() && self.has_spec_rules()
    }

    fn has_spec_rules(&self) -> bool {
        self.spec.values().any(|rules| !rules.is_empty())
    }

    /// Whether the kubelet acts on any rule of the spec by itself.
    fn kubelet_acts(&self) -> bool {
        let mut actions = self.spec.values().flat_map(Rules::actions);
        actions.any(|action| self.is_native(action))
    }

    /// Whether any of these rules of the spec is not the kubelet's business.
    fn acts_on_spec(&self, rules: &Rules) -> bool {
        rules.actions().any(|action| !self.is_native(action))
    }

    fn is_native(&self, action: Action) -> bool {
        is_native(action, self.native)
    }

    /// Fails if an annotation names a container that is not among `names`, all containers and init
    /// containers of the pod: such a rule would never be used.
    pub fn check_names(&self, names: &[&str]) -> Result<(), PolicyError> {
        let unknown = |name: &&String| !names.contains(&name.as_str());
        let mut problems = Problems::default();
        let mut note = |key: &str, name: &String| {
            problems.note(&Place::key(key), Fault::NoSuchContainer(name.clone()));
        };
        for name in self.written.own.keys().filter(unknown) {
            note(&format!("{RULES_KEY}/container.{name}"), name);
        }
        for name in self.written.mapped.keys().filter(unknown) {
            note(&format!("{RULES_KEY}/pod"), name);
        }
        problems.into_result()
    }

    /// What an exit of `container` asks for. `None`: no rule matches, and its
    /// restartPolicy stands.
    ///
    /// Success (0) is a code like any other here, also for init containers.
    #[must_use]
    pub fn action(&self, container: &str, exit: impl Into<Exit>) -> Option<Action> {
        self.actions(container)(exit.into())
    }

    /// The same, and which rule asks for it; `None`: the container's own `restartPolicy` does, which comes after the rules of
    /// its spec.
    #[must_use]
    pub fn matched(
        &self,
        container: &str,
        exit: impl Into<Exit>,
    ) -> Option<(Action, Option<MatchedRule>)> {
        let found = self.found(container)?;
        let (action, rule) = self.ours(found, exit.into())?;
        let rule = rule.map(|(number, by)| MatchedRule {
            number,
            source: found.0.name(container),
            by,
        });
        Some((action, rule))
    }

    /// The same action, for many exits of one container.
    pub fn actions(&self, container: &str) -> impl Fn(Exit) -> Option<Action> {
        let found = self.found(container);
        move |exit| self.ours(found?, exit).map(|(action, _)| action)
    }

    fn found(&self, container: &str) -> Option<(Source, &Rules)> {
        let spec = || self.spec.get(container).map(|it| (Source::Spec, it));
        self.written.found(container).or_else(spec)
    }

    /// The action, and the rule that asks for it, unless the kubelet acts on that by itself.
    fn ours(
        &self,
        (source, rules): (Source, &Rules),
        exit: Exit,
    ) -> Option<(Action, Option<(usize, MatchedBy)>)> {
        let matched = rules.matched(exit);
        matched.filter(|(action, _)| source != Source::Spec || !self.is_native(*action))
    }

    /// Whether any rule applies to `container`, so that its exits must be held.
    #[must_use]
    pub fn covers(&self, container: &str) -> bool {
        match self.written.of(container) {
            Some(rules) => !rules.is_empty(),
            None => self
                .spec
                .get(container)
                .is_some_and(|rules| self.acts_on_spec(rules)),
        }
    }

    /// The annotation whose rules are those of `container`, an empty list among them. `None`: its spec's are.
    pub(crate) fn annotation_for(&self, container: &str) -> Option<String> {
        let written = &self.written;
        let place = if written.own.contains_key(container) {
            format!("/container.{container}")
        } else if written.mapped.contains_key(container) || written.pod.is_some() {
            "/pod".to_owned()
        } else {
            written.plain.as_ref()?;
            String::new()
        };
        Some(format!("{RULES_KEY}{place}"))
    }

    /// Whether the rules of the container's spec are used, so that its own restart policy stands behind them, and by nobody
    /// else.
    #[must_use]
    pub fn goes_by_spec(&self, container: &str) -> bool {
        let written = self.written.of(container).is_some();
        !written && self.spec.contains_key(container) && !self.is_native(Action::Restart)
    }

    /// What is done about a request: containers have time to stop where that is all that the rules know.
    #[must_use]
    pub fn action_on_request(&self) -> Action {
        let rules = self.written.rules().chain(self.spec.values());
        let actions: Vec<Action> = rules.flat_map(Rules::actions).collect();
        let has = |action| actions.contains(&action);
        if has(Action::RestartPod) && !has(Action::RestartAllContainers) {
            Action::RestartPod
        } else {
            Action::RestartAllContainers
        }
    }

    /// How the pod wants its restarts done.
    #[must_use]
    pub fn options(&self) -> &Options {
        self.written.options()
    }
}

/// With which codes of a container that was killed, by whomever, its pod restarts, where exits ask for these actions: SIGKILL's
/// and SIGTERM's.
pub(crate) fn kills_that_restart(action: impl Fn(Exit) -> Option<Action>) -> Vec<i32> {
    let restarts = |code: &i32| action((*code).into()).is_some_and(Action::is_whole_pod);
    [137, 143].into_iter().filter(restarts).collect()
}

/// Whether the kubelet acts by itself on rules of a spec that ask for this. `None`: nobody knows what it does.
pub(crate) fn is_native(action: Action, kubelet: Option<KubeletFeatures>) -> bool {
    match action {
        Action::Restart => kubelet.is_none_or(|it| it.container_rules),
        Action::RestartAllContainers => kubelet.is_none_or(|it| it.restart_all),
        // No kubelet has it: it is of a draft.
        Action::RestartPod => false,
    }
}

/// Whether a pod with annotations of these keys may have restart rules: a test of the keys alone, which
/// allocates nothing, because it runs for every container that a node creates.
pub fn has_rules<'a>(keys: impl IntoIterator<Item = &'a str>) -> bool {
    keys.into_iter().any(|key| place(key, RULES_KEY).is_some())
}

/// Whether a pod with annotations of these keys may have a failure policy: a test of the keys alone, for every update of
/// every pod.
pub(crate) fn has_failure_policy<'a>(keys: impl IntoIterator<Item = &'a str>) -> bool {
    let mut keys = keys.into_iter();
    keys.any(|key| place(key, FAILURE_KEY).is_some())
}

/// Whether an annotation of that key is one that is read.
fn is_read(key: &str) -> bool {
    let mut read = DOCUMENT_KEYS.iter();
    read.any(|wanted| place(key, wanted).is_some()) || request::is_request(key)
}

/// Reads `restartPolicyRules` as written in a manifest; `field` names the place in errors.
pub(crate) fn spec_rules(field: &str, value: &Value) -> Result<Rules, PolicyError> {
    let mut problems = Problems::default();
    let place = Place::key(field);
    let rules = read::rules_value(&place, value, &mut problems);
    if !rules.are_of_api() {
        problems.note(&place, Fault::NotOfSpec);
    }
    problems.into_result().map(|()| rules)
}

/// Whether `key` is in our domain but none that we read: most likely a typo.
pub(crate) fn is_unknown_key(key: &str) -> bool {
    let prefix = key.split('/').next().unwrap_or(key);
    let ours = prefix
        .strip_suffix(DOMAIN)
        .is_some_and(|rest| rest.is_empty() || rest.ends_with('.'));
    let known = DOCUMENT_KEYS.contains(&prefix);
    ours && !known && !request::is_request(key)
}

/// The keys that are read, for people.
pub(crate) fn known_keys() -> String {
    format!("{}, {REQUEST_KEY}", DOCUMENT_KEYS.join(", "))
}

/// Whether `key` is in our domain, known or not.
pub(crate) fn is_ours(key: &str) -> bool {
    is_unknown_key(key) || is_read(key)
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
