//! Variables that hold a label or an annotation of their pod. The kubelet reads them anew at each start
//! (`podFieldSelectorRuntimeValue`, `pkg/kubelet/kubelet_pods.go`).

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::{Container, EnvVar, EnvVarSource};

/// What such a variable holds, by the key.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Field {
    /// A label.
    Label(String),
    /// An annotation.
    Annotation(String),
}

/// Those of a container, by their names.
pub type Variables = BTreeMap<String, Field>;

/// What the labels and annotations have that variables hold.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Fields(BTreeMap<Field, String>);

/// What one variable is made from.
enum Source {
    /// A pod's identity and place stay.
    Fixed,
    Field(Field),
    Other,
}

/// Those of a container. `None`: one is made from what nobody tells here, or cannot be told from another.
pub(super) fn variables(container: &Container) -> Option<Variables> {
    let mut variables = Variables::new();
    let mut names = BTreeSet::new();
    for variable in container.env.iter().flatten() {
        let first = names.insert(&variable.name);
        match source(variable) {
            Source::Fixed => {}
            Source::Field(field) => {
                variables.insert(variable.name.clone(), field);
            }
            Source::Other => return None,
        }
        // The last one counts, but others may have been made from those before (`$(NAME)`, `makeEnvironmentVariables`).
        if !first && variables.contains_key(&variable.name) {
            return None;
        }
    }
    let sources = container.env_from.as_ref();
    sources.is_none_or(Vec::is_empty).then_some(variables)
}

fn source(variable: &EnvVar) -> Source {
    let Some(source) = &variable.value_from else {
        return Source::Fixed;
    };
    let EnvVarSource {
        config_map_key_ref: None,
        secret_key_ref: None,
        resource_field_ref: None,
        file_key_ref: None,
        field_ref: Some(field),
    } = source
    else {
        return Source::Other;
    };
    Source::of(&field.field_path)
}

impl Source {
    /// As the kubelet reads a path (`SplitMaybeSubscriptedPath`, `pkg/fieldpath/fieldpath.go`).
    fn of(path: &str) -> Self {
        let subscripted = path.strip_suffix("']").and_then(|it| it.split_once("['"));
        match subscripted {
            Some(("metadata.labels", key)) => Self::Field(Field::Label(key.to_owned())),
            Some(("metadata.annotations", key)) => Self::Field(Field::Annotation(key.to_owned())),
            Some(_) => Self::Other,
            None if path.starts_with("metadata.labels") => Self::Other,
            None if path.starts_with("metadata.annotations") => Self::Other,
            None => Self::Fixed,
        }
    }
}

impl Fields {
    /// Those that the variables of these containers hold.
    pub(super) fn of<'c>(
        containers: impl IntoIterator<Item = &'c Variables>,
        labels: Option<&BTreeMap<String, String>>,
        annotations: Option<&BTreeMap<String, String>>,
    ) -> Self {
        let held = containers.into_iter().flat_map(BTreeMap::values);
        let held: BTreeSet<&Field> = held.collect();
        let fields = held.into_iter().filter_map(|field| {
            let value = match field {
                Field::Label(key) => labels?.get(key),
                Field::Annotation(key) => annotations?.get(key),
            };
            Some((field.clone(), value?.clone()))
        });
        Self(fields.collect())
    }

    /// What a variable that holds this field has.
    #[must_use]
    pub fn value(&self, field: &Field) -> &str {
        self.0.get(field).map_or("", String::as_str)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn held(env: &Value) -> Option<Variables> {
        let container = json!({"name": "a", "env": env});
        variables(&serde_json::from_value(container).unwrap())
    }

    fn field(name: &str, path: &str) -> Value {
        json!({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}})
    }

    #[test]
    fn variables_hold_labels_and_annotations_by_any_key() {
        let env = json!([
            {"name": "PLAIN", "value": "$(RANK)"},
            field("POD", "metadata.name"),
            field("RANK", "metadata.labels['example.com/rank']"),
            field("é =\n", "metadata.annotations['a[b]['c']"),
            field("EMPTY", "metadata.labels['']"),
        ]);
        let label = |key: &str| Field::Label(key.to_owned());
        let wanted = [
            ("EMPTY", label("")),
            ("RANK", label("example.com/rank")),
            ("é =\n", Field::Annotation("a[b]['c".to_owned())),
        ];
        let wanted = wanted.map(|(name, field)| (name.to_owned(), field));
        assert_eq!(held(&env), Some(BTreeMap::from(wanted)));
    }

    #[test]
    fn what_cannot_be_told_from_the_pod_is_none() {
        for path in [
            "metadata.labels",
            "metadata.annotations",
            "metadata.labels['a'",
            "metadata.labels[a]",
            "metadata.finalizers['a']",
            "['a']",
        ] {
            assert_eq!(held(&json!([field("A", path)])), None, "{path}");
        }
    }

    #[test]
    fn a_variable_that_is_there_twice_may_have_made_another_one() {
        let label = field("A", "metadata.labels['a']");
        let plain = json!({"name": "A", "value": "1"});
        assert_eq!(held(&json!([label, plain])), None);
        assert_eq!(held(&json!([plain, label])), None);
        assert_eq!(held(&json!([label, label])), None);
        assert_eq!(held(&json!([plain, plain])), Some(Variables::new()));
    }

    #[test]
    fn only_what_variables_hold_is_kept_and_that_once() {
        let both = json!([
            field("A", "metadata.annotations['a']"),
            field("B", "metadata.annotations['a']")
        ]);
        let held = [held(&both).unwrap(), held(&both).unwrap()];
        let annotations = [("a", "1"), ("b", "2")];
        let annotations = annotations.map(|(key, value)| (key.to_owned(), value.to_owned()));
        let fields = Fields::of(&held, None, Some(&BTreeMap::from(annotations)));
        assert_eq!(fields.0.len(), 1);
        assert_eq!(fields.value(&Field::Annotation("a".into())), "1");
        assert_eq!(fields.value(&Field::Label("a".into())), "");
    }
}
