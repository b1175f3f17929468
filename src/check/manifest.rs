//! Finds pods and pod templates in manifests of any kind, without knowing the kinds.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use crate::policy;

/// What concerns Reprise in a document.
pub(super) enum Found {
    /// A pod, or the template of one.
    Pod(Pod),
    /// An annotation of ours on something that is neither.
    Misplaced {
        /// The object, in words.
        place: String,
        /// The annotation.
        key: String,
    },
}

/// A pod, or the template of one, as far as exits are concerned.
pub(super) struct Pod {
    pub(super) place: String,
    /// Of the object that it is, or is in.
    pub(super) kind: String,
    pub(super) annotations: BTreeMap<String, String>,
    /// Init containers in order, then regular ones.
    pub(super) containers: Vec<Container>,
    /// What the API server would refuse.
    pub(super) problems: Vec<String>,
}

pub(super) struct Container {
    pub(super) name: String,
    pub(super) kind: Kind,
    /// The container's own, else the pod's (KEP-5307).
    pub(super) restart_policy: RestartPolicy,
    /// `restartPolicyRules` as written.
    pub(super) rules: Option<Value>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Init,
    Sidecar,
    Regular,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum RestartPolicy {
    Always,
    OnFailure,
    Never,
}

/// The pods of a document and what is misplaced in it, from the outside in.
pub(super) fn find(document: &Value) -> Vec<Found> {
    let mut found = Vec::new();
    search(document, &describe(document), "", &mut found);
    found
}

/// An object in words: kind, namespace and name.
pub(super) fn describe(object: &Value) -> String {
    let text = |pointer: &str| object.pointer(pointer).and_then(Value::as_str);
    let kind = text("/kind").unwrap_or("object");
    let name = text("/metadata/name").or_else(|| text("/metadata/generateName"));
    match (text("/metadata/namespace"), name) {
        (Some(namespace), Some(name)) => format!("{kind} {namespace}/{name}"),
        (None, Some(name)) => format!("{kind} {name}"),
        (_, None) => kind.to_owned(),
    }
}

fn search(value: &Value, object: &str, path: &str, found: &mut Vec<Found>) {
    match value {
        Value::Object(fields) => {
            // An item of a list is an object of its own.
            let named = (fields.contains_key("kind") && fields.contains_key("apiVersion"))
                .then(|| describe(value));
            let (object, path) = named.as_deref().map_or((object, path), |name| (name, ""));
            let place = if path.is_empty() {
                object.to_owned()
            } else {
                format!("{object}, {path}")
            };
            if let Some(spec) = value
                .get("spec")
                .filter(|spec| spec["containers"].is_array())
            {
                found.push(Found::Pod(pod(place, value, spec)));
                return;
            }
            let ours = annotations(value).into_iter().flat_map(Map::keys);
            for key in ours.filter(|key| policy::is_ours(key)) {
                found.push(Found::Misplaced {
                    place: place.clone(),
                    key: key.clone(),
                });
            }
            for (name, value) in fields {
                let dot = if path.is_empty() { "" } else { "." };
                search(value, object, &format!("{path}{dot}{name}"), found);
            }
        }
        Value::Array(items) => {
            for (index, item) in items.iter().enumerate() {
                search(item, object, &format!("{path}[{index}]"), found);
            }
        }
        _ => {}
    }
}

fn annotations(object: &Value) -> Option<&Map<String, Value>> {
    object.get("metadata")?.get("annotations")?.as_object()
}

fn pod(place: String, object: &Value, spec: &Value) -> Pod {
    let mut problems = Vec::new();
    let mut texts = BTreeMap::new();
    for (key, value) in annotations(object).into_iter().flatten() {
        if let Value::String(text) = value {
            texts.insert(key.clone(), text.clone());
        } else if policy::is_ours(key) {
            problems.push(format!(
                "{key} is not a string: the value of an annotation is text, write it after `|` or \
                 in quotes"
            ));
        }
    }
    let of_pod = restart_policy(spec, "spec", &mut problems).unwrap_or(RestartPolicy::Always);
    let mut containers = Vec::new();
    for (field, init) in [("initContainers", true), ("containers", false)] {
        for container in spec[field].as_array().into_iter().flatten() {
            let name = container["name"].as_str().unwrap_or_default().to_owned();
            let own = restart_policy(container, &format!("container {name}"), &mut problems);
            let kind = match (init, own) {
                (false, _) => Kind::Regular,
                (true, Some(RestartPolicy::Always)) => Kind::Sidecar,
                (true, _) => Kind::Init,
            };
            let rules = container.get("restartPolicyRules").cloned();
            let restart_policy = own.unwrap_or(of_pod);
            containers.push(Container {
                name,
                kind,
                restart_policy,
                rules,
            });
        }
    }
    let kind = place
        .split([' ', ','])
        .next()
        .unwrap_or_default()
        .to_owned();
    Pod {
        place,
        kind,
        annotations: texts,
        containers,
        problems,
    }
}

fn restart_policy(
    holder: &Value,
    place: &str,
    problems: &mut Vec<String>,
) -> Option<RestartPolicy> {
    match holder.get("restartPolicy")? {
        Value::Null => None,
        value => match value.as_str() {
            Some("Always") => Some(RestartPolicy::Always),
            Some("OnFailure") => Some(RestartPolicy::OnFailure),
            Some("Never") => Some(RestartPolicy::Never),
            _ => {
                problems.push(format!(
                    "{place}: restartPolicy is {value}, allowed are Always, OnFailure, Never"
                ));
                None
            }
        },
    }
}
