//! What the command line names: pods, and what has pods.

use std::fmt;
use std::str::FromStr;

/// Why a word of the command line names nothing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadTarget {
    /// No object can be called that.
    #[error("no object can have the name {0:?}: letters a-z, digits, - and . only")]
    Name(String),
    /// Nothing is known of the pods of such a thing.
    #[error(
        "{0:?} is none of pod, job, jobset, deployment, statefulset, daemonset: use -l with labels of its pods"
    )]
    Kind(String),
    /// A type where a name is expected, as kubectl takes it.
    #[error("{0} of what name? Write {0}/NAME (or pod/{0}, if a pod is called so)")]
    Nameless(String),
    /// Only a pod can be meant.
    #[error("{0:?} is no pod")]
    NoPod(String),
    /// All pods are not asked for by leaving something out.
    #[error("an empty selector would be for all pods")]
    EmptySelector,
}

/// The name of a pod, with or without `pod/` before it, as kubectl prints it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodName(String);

/// A label selector, as the API server takes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Selector(String);

/// A pod, or what has pods.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    pub(super) kind: Kind,
    pub(super) name: String,
}

/// What a target is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Pod,
    /// Its name is in a label of its pods.
    Labelled(Labelled),
    /// It says by which labels its pods are known.
    Selecting(Selecting),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Labelled {
    Job,
    JobSet,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Selecting {
    Deployment,
    StatefulSet,
    DaemonSet,
}

/// By name, plural and short name, with the API group that may follow.
const KINDS: [(&[&str], &str, Kind); 6] = [
    (&["pod", "pods", "po"], "", Kind::Pod),
    (&["job", "jobs"], "batch", Kind::Labelled(Labelled::Job)),
    (
        &["jobset", "jobsets"],
        "jobset.x-k8s.io",
        Kind::Labelled(Labelled::JobSet),
    ),
    (
        &["deployment", "deployments", "deploy"],
        "apps",
        Kind::Selecting(Selecting::Deployment),
    ),
    (
        &["statefulset", "statefulsets", "sts"],
        "apps",
        Kind::Selecting(Selecting::StatefulSet),
    ),
    (
        &["daemonset", "daemonsets", "ds"],
        "apps",
        Kind::Selecting(Selecting::DaemonSet),
    ),
];

impl Labelled {
    /// The label of its pods (`k8s.io/api/batch/v1`, `sigs.k8s.io/jobset/api/jobset/v1alpha2`).
    pub(super) fn label(self) -> &'static str {
        match self {
            Self::Job => "batch.kubernetes.io/job-name",
            Self::JobSet => "jobset.sigs.k8s.io/jobset-name",
        }
    }
}

impl Selecting {
    /// As RBAC calls it.
    pub(super) fn resource(self) -> &'static str {
        match self {
            Self::Deployment => "deployments.apps",
            Self::StatefulSet => "statefulsets.apps",
            Self::DaemonSet => "daemonsets.apps",
        }
    }
}

fn kind(word: &str) -> Option<Kind> {
    let (word, group) = match word.split_once('.') {
        Some((word, group)) => (word, Some(group)),
        None => (word, None),
    };
    let is_it = |(words, its, _): &&(&[&str], &str, Kind)| {
        words.contains(&word) && group.is_none_or(|group| !its.is_empty() && group == *its)
    };
    KINDS.iter().find(is_it).map(|(.., kind)| *kind)
}

/// Whether it can be an object's name, which becomes a segment of a path.
fn name(name: &str) -> Result<String, BadTarget> {
    let is_end = |char: char| char.is_ascii_lowercase() || char.is_ascii_digit();
    let well = name.len() <= 253
        && name.starts_with(is_end)
        && name.ends_with(is_end)
        && name
            .chars()
            .all(|char| is_end(char) || matches!(char, '-' | '.'));
    if well {
        Ok(name.to_owned())
    } else {
        Err(BadTarget::Name(name.to_owned()))
    }
}

impl FromStr for Target {
    type Err = BadTarget;

    fn from_str(text: &str) -> Result<Self, BadTarget> {
        let (kind, name) = match text.split_once('/') {
            Some((word, rest)) => {
                let kind = kind(word).ok_or_else(|| BadTarget::Kind(word.to_owned()))?;
                (kind, name(rest)?)
            }
            None if kind(text).is_some() => return Err(BadTarget::Nameless(text.to_owned())),
            None => (Kind::Pod, name(text)?),
        };
        Ok(Self { kind, name })
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            Kind::Pod => "pod",
            Kind::Labelled(Labelled::Job) => "job",
            Kind::Labelled(Labelled::JobSet) => "jobset",
            Kind::Selecting(Selecting::Deployment) => "deployment",
            Kind::Selecting(Selecting::StatefulSet) => "statefulset",
            Kind::Selecting(Selecting::DaemonSet) => "daemonset",
        };
        write!(f, "{kind}/{}", self.name)
    }
}

impl FromStr for PodName {
    type Err = BadTarget;

    fn from_str(text: &str) -> Result<Self, BadTarget> {
        match text.split_once('/') {
            None => name(text).map(Self),
            Some((word, rest)) if kind(word) == Some(Kind::Pod) => name(rest).map(Self),
            Some(_) => Err(BadTarget::NoPod(text.to_owned())),
        }
    }
}

impl PodName {
    pub(super) fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Selector {
    type Err = BadTarget;

    fn from_str(text: &str) -> Result<Self, BadTarget> {
        match text.trim() {
            "" => Err(BadTarget::EmptySelector),
            text => Ok(Self(text.to_owned())),
        }
    }
}

impl Selector {
    pub(super) fn as_str(&self) -> &str {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(text: &str) -> Result<String, BadTarget> {
        text.parse::<Target>().map(|target| target.to_string())
    }

    #[test]
    fn types_are_called_as_kubectl_calls_them() {
        for (text, expected) in [
            ("web-0", "pod/web-0"),
            ("pod/web.0", "pod/web.0"),
            ("pods/job", "pod/job"),
            ("job/a", "job/a"),
            ("job.batch/a", "job/a"),
            ("jobset.jobset.x-k8s.io/a", "jobset/a"),
            ("deploy/a", "deployment/a"),
            ("deployments.apps/a", "deployment/a"),
            ("sts/a", "statefulset/a"),
            ("ds/a", "daemonset/a"),
        ] {
            assert_eq!(target(text).as_deref(), Ok(expected));
        }
    }

    #[test]
    fn what_names_nothing_is_refused() {
        for name in [
            "", "..", "a/b/c", "pod/", "pod/../x", "A", "a?b", "-a", "a.",
        ] {
            let last = name.split_once('/').map_or(name, |(_, rest)| rest);
            let refused = if name == "a/b/c" {
                BadTarget::Kind("a".to_owned())
            } else {
                BadTarget::Name(last.to_owned())
            };
            assert_eq!(target(name), Err(refused), "{name}");
        }
        for word in ["node", "job.apps", "pod.v1", "cronjob"] {
            let refused = BadTarget::Kind(word.to_owned());
            assert_eq!(target(&format!("{word}/a")), Err(refused));
        }
        assert_eq!(target("job"), Err(BadTarget::Nameless("job".to_owned())));
        assert_eq!(" ".parse::<Selector>(), Err(BadTarget::EmptySelector));
    }

    #[test]
    fn a_status_is_of_pods_alone() {
        let pod = |text: &str| text.parse::<PodName>().map(|pod| pod.0);
        assert_eq!(pod("pod/a").as_deref(), Ok("a"));
        assert_eq!(pod("job").as_deref(), Ok("job"));
        assert_eq!(pod("job/a"), Err(BadTarget::NoPod("job/a".to_owned())));
    }
}
