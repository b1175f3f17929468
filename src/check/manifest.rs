//! Finds pods and pod templates in manifests of any kind, without knowing the kinds.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::lines::Place;
use super::report::Cause;
use crate::kube::{ContainerKind, RestartPolicy};
use crate::policy;
use crate::text;

/// The longest that a name or a path is kept, in bytes: no API server takes a longer name.
const LONGEST: usize = 253;

/// What concerns Reprise in a document.
pub(super) struct Found<'d> {
    pub(super) object: Object,
    pub(super) at: Place<'d>,
    pub(super) what: What<'d>,
}

pub(super) enum What<'d> {
    /// A pod, or the template of one.
    Pod(Pod<'d>),
    /// Annotations of ours on something that is neither.
    Misplaced(Vec<&'d str>),
}

/// An object, and a place in it.
#[derive(Debug, Clone, Default, Serialize)]
pub(super) struct Object {
    pub(super) kind: Option<String>,
    namespace: Option<String>,
    name: Option<String>,
    /// Of the template in it; empty: the object itself.
    path: String,
}

/// A pod, or the template of one, as far as exits are concerned.
pub(super) struct Pod<'d> {
    pub(super) annotations: BTreeMap<&'d str, &'d str>,
    pub(super) restart_policy: RestartPolicy,
    /// Init containers in order, then regular ones.
    pub(super) containers: Vec<Container<'d>>,
    /// What the API server would refuse, and why.
    pub(super) refused: Vec<(Cause, String)>,
}

pub(super) struct Container<'d> {
    pub(super) name: &'d str,
    pub(super) kind: ContainerKind,
    /// The container's own (KEP-5307).
    pub(super) restart_policy: Option<RestartPolicy>,
    /// As written.
    pub(super) value: &'d Value,
    /// Where it is in the pod.
    pub(super) path: String,
    pub(super) at: Place<'d>,
}

/// The pods of a document and what is misplaced in it, from the outside in.
pub(super) fn find<'d>(document: &'d Value, at: Place<'d>) -> Vec<Found<'d>> {
    let mut found = Vec::new();
    search(document, at, &Object::of(document), &mut found);
    found
}

impl Object {
    pub(super) fn of(value: &Value) -> Self {
        let text = |pointer: &str| {
            let text = value.pointer(pointer).and_then(Value::as_str);
            text.map(|text| text::cut(text, LONGEST).into_owned())
        };
        Self {
            kind: text("/kind"),
            namespace: text("/metadata/namespace"),
            name: text("/metadata/name").or_else(|| text("/metadata/generateName")),
            path: String::new(),
        }
    }

    fn field(&self, name: &str) -> Self {
        let dot = if self.path.is_empty() { "" } else { "." };
        self.at(&format!("{}{dot}{name}", self.path))
    }

    fn item(&self, index: usize) -> Self {
        self.at(&format!("{}[{index}]", self.path))
    }

    fn at(&self, path: &str) -> Self {
        Self {
            path: text::cut(path, LONGEST).into_owned(),
            ..self.clone()
        }
    }
}

/// In words.
impl fmt::Display for Object {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.kind.as_deref().unwrap_or("object"))?;
        match (&self.namespace, &self.name) {
            (Some(namespace), Some(name)) => write!(f, " {namespace}/{name}")?,
            (None, Some(name)) => write!(f, " {name}")?,
            (_, None) => {}
        }
        if !self.path.is_empty() {
            write!(f, ", {}", self.path)?;
        }
        Ok(())
    }
}

fn search<'d>(value: &'d Value, at: Place<'d>, object: &Object, found: &mut Vec<Found<'d>>) {
    match value {
        Value::Object(fields) => {
            // An item of a list is an object of its own.
            let named = fields.contains_key("kind") && fields.contains_key("apiVersion");
            let object = &if named {
                Object::of(value)
            } else {
                object.clone()
            };
            let mut push = |what| {
                let object = object.clone();
                found.push(Found { object, at, what });
            };
            let spec = value.get("spec");
            if let Some(spec) = spec.filter(|spec| spec["containers"].is_array()) {
                return push(What::Pod(Pod::of(value, spec, at)));
            }
            let keys = annotations(value).into_iter().flat_map(Map::keys);
            let ours: Vec<_> = keys
                .map(String::as_str)
                .filter(|it| policy::is_ours(it))
                .collect();
            if !ours.is_empty() {
                push(What::Misplaced(ours));
            }
            for (name, value) in fields {
                search(value, at.field(name), &object.field(name), found);
            }
        }
        Value::Array(items) => {
            for (index, item) in items.iter().enumerate() {
                search(item, at.item(index), &object.item(index), found);
            }
        }
        _ => {}
    }
}

fn annotations(object: &Value) -> Option<&Map<String, Value>> {
    object.get("metadata")?.get("annotations")?.as_object()
}

impl<'d> Pod<'d> {
    fn of(object: &'d Value, spec: &'d Value, at: Place<'d>) -> Self {
        let mut pod = Self {
            annotations: BTreeMap::new(),
            restart_policy: RestartPolicy::Always,
            containers: Vec::new(),
            refused: Vec::new(),
        };
        for (key, value) in annotations(object).into_iter().flatten() {
            if let Value::String(text) = value {
                pod.annotations.insert(key, text);
            } else if policy::is_ours(key) {
                let why = format!(
                    "{key} is not a string: the value of an annotation is text, write it after `|` or in quotes"
                );
                pod.refused.push((Cause::annotation(at, key), why));
            }
        }
        let at = at.field("spec");
        if let Some(policy) = pod.restart_policy(spec, "spec", "spec", at) {
            pod.restart_policy = policy;
        }
        for (field, init) in [("initContainers", true), ("containers", false)] {
            let containers = spec[field].as_array().into_iter().flatten();
            for (index, value) in containers.enumerate() {
                let path = format!("spec.{field}[{index}]");
                pod.add(value, init, path, at.field(field).item(index));
            }
        }
        pod
    }

    fn add(&mut self, value: &'d Value, init: bool, path: String, at: Place<'d>) {
        let name = value["name"].as_str().unwrap_or_default();
        let restart_policy = self.restart_policy(value, &format!("container {name}"), &path, at);
        let kind = match (init, restart_policy) {
            (false, _) => ContainerKind::Regular,
            (true, Some(RestartPolicy::Always)) => ContainerKind::Sidecar,
            (true, _) => ContainerKind::Init,
        };
        self.containers.push(Container {
            name,
            kind,
            restart_policy,
            value,
            path,
            at,
        });
    }

    fn restart_policy(
        &mut self,
        holder: &Value,
        who: &str,
        path: &str,
        at: Place<'d>,
    ) -> Option<RestartPolicy> {
        let value = holder.get("restartPolicy").filter(|it| !it.is_null())?;
        let policy = RestartPolicy::deserialize(value);
        if policy.is_err() {
            let cause = Cause::field(path, at, "restartPolicy");
            let why =
                format!("{who}: restartPolicy is {value}, allowed are Always, OnFailure, Never");
            self.refused.push((cause, why));
        }
        policy.ok()
    }
}
