//! What was found, and how it is said.

use std::io::{self, Write};

use serde::Serialize;

use super::lines::Place;
use super::manifest::Object;
use super::outcome::Outcomes;
use crate::text;

/// What was found of one object, or of a file.
#[derive(Debug, Default, Serialize)]
pub(super) struct Finding {
    file: String,
    /// Which document of the file, counted from 0; `None`: it is about the file.
    document: Option<usize>,
    line: Option<usize>,
    #[serde(flatten)]
    object: Object,
    containers: Vec<Outcomes>,
    notes: Vec<String>,
    problems: Vec<Problem>,
}

#[derive(Debug, Serialize)]
struct Problem {
    severity: Severity,
    message: String,
    line: Option<usize>,
    /// The annotation, or the field's path in the pod or its template.
    key: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Severity {
    Error,
    Warning,
}

/// What a problem is about, and its line.
#[derive(Debug, Clone, Default)]
pub(super) struct Cause {
    pub(super) key: Option<String>,
    pub(super) line: Option<usize>,
}

impl Cause {
    /// An annotation of the pod there.
    pub(super) fn annotation(pod: Place<'_>, key: &str) -> Self {
        let annotations = pod.field("metadata").field("annotations");
        Self {
            key: Some(key.to_owned()),
            line: annotations.field(key).line(),
        }
    }

    /// A field of what is at that path in the pod.
    pub(super) fn field(path: &str, at: Place<'_>, name: &str) -> Self {
        Self {
            key: Some(format!("{path}.{name}")),
            line: at.field(name).line(),
        }
    }
}

impl Finding {
    pub(super) fn of_file(file: &str) -> Self {
        Self {
            file: file.to_owned(),
            ..Self::default()
        }
    }

    pub(super) fn of_object(
        file: &str,
        document: usize,
        line: Option<usize>,
        object: Object,
    ) -> Self {
        Self {
            document: Some(document),
            line,
            object,
            ..Self::of_file(file)
        }
    }

    pub(super) fn container(&mut self, outcomes: Outcomes) {
        self.containers.push(outcomes);
    }

    pub(super) fn note(&mut self, note: impl Into<String>) {
        self.notes.push(note.into());
    }

    pub(super) fn error(&mut self, cause: Cause, message: impl Into<String>) {
        self.problem(Severity::Error, cause, message.into());
    }

    pub(super) fn warning(&mut self, cause: Cause, message: impl Into<String>) {
        self.problem(Severity::Warning, cause, message.into());
    }

    fn problem(&mut self, severity: Severity, Cause { key, line }: Cause, message: String) {
        self.problems.push(Problem {
            severity,
            message,
            line,
            key,
        });
    }

    pub(super) fn is_well(&self) -> bool {
        let mut problems = self.problems.iter();
        problems.all(|problem| problem.severity != Severity::Error)
    }
}

/// A heading for each object, and below what there is to be said of it. Problems begin as those of compilers do.
pub(super) fn write_text(findings: &[Finding], out: &mut impl Write) -> io::Result<()> {
    for finding in findings {
        let mut say = |indent: &str, line: &str| {
            let line = text::printable(line);
            writeln!(out, "{indent}{line}")
        };
        let at = |line: Option<usize>| match line {
            Some(line) => format!("{}:{line}", finding.file),
            None => finding.file.clone(),
        };
        let (indent, before) = if finding.document.is_some() {
            say("", &format!("{}: {}", at(finding.line), finding.object))?;
            ("  ", String::new())
        } else {
            ("", format!("{}: ", finding.file))
        };
        for container in &finding.containers {
            say(indent, &container.to_string())?;
        }
        for note in &finding.notes {
            say(indent, &format!("{before}{note}"))?;
        }
        for problem in &finding.problems {
            let severity = match problem.severity {
                Severity::Error => "error",
                Severity::Warning => "warning",
            };
            let at = at(problem.line.or(finding.line));
            say(indent, &format!("{at}: {severity}: {}", problem.message))?;
        }
    }
    Ok(())
}

/// A list with a line for each object.
pub(super) fn write_json(findings: &[Finding], out: &mut impl Write) -> io::Result<()> {
    let mut before = "[";
    for finding in findings {
        let json = serde_json::to_string(finding)?;
        writeln!(out, "{before}")?;
        write!(out, "{}", text::printable_json(&json))?;
        before = ",";
    }
    writeln!(out, "\n]")
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::check::examine;
    use crate::check::tests::RULES_IN_SPEC;
    use crate::kube::KubeletFeatures;

    fn said(text: &str, kubelet: &str) -> String {
        let kubelet = KubeletFeatures::of_version(kubelet).unwrap();
        let findings = examine("f", Ok(text.to_owned()), Some(kubelet));
        let mut out = Vec::new();
        write_json(&findings, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn json_has_an_entry_for_each_pod() {
        let text = "
---
kind: Job
metadata: {name: j, namespace: ml}
spec:
  template:
    metadata:
      annotations:
        restart-rules.reprise.dev: '[{action: RestartPod, exitCodes: {operator: In, values: [1, 2, 143]}}]'
        restart-rule.reprise.dev: x
    spec: {restartPolicy: Never, containers: [{name: a, image: i:1}]}
---
kind: ConfigMap
";
        let said = said(text, "1.36");
        let read: Value = serde_json::from_str(&said).unwrap();
        let job = json!({
            "file": "f", "document": 0, "line": 6,
            "kind": "Job", "namespace": "ml", "name": "j", "path": "spec.template",
            "containers": [{"name": "a", "kind": "regular", "exits": [
                {
                    "codes": [[1, 2], [143, 143]], "oomKilled": false,
                    "action": "RestartPod", "by": "Reprise", "restartPolicy": null,
                    "then": "restart all containers in place, with the pod's grace period to stop",
                },
                {
                    "codes": [[0, 0]], "oomKilled": false, "action": null, "by": null, "restartPolicy": "Never",
                    "then": "it is done",
                },
                {
                    "codes": [[3, 142], [144, 255]], "oomKilled": false, "action": null, "by": null, "restartPolicy": "Never",
                    "then": "the pod fails once all containers have ended",
                },
            ]}],
            "notes": [],
            "problems": [
                {
                    "severity": "error", "line": 10, "key": "restart-rule.reprise.dev",
                    "message": read[0]["problems"][0]["message"],
                },
                {
                    "severity": "warning", "line": 9, "key": "restart-rules.reprise.dev",
                    "message": read[0]["problems"][1]["message"],
                },
            ],
        });
        let config_map = json!({
            "file": "f", "document": 1, "line": 13,
            "kind": "ConfigMap", "namespace": null, "name": null, "path": "",
            "containers": [], "notes": ["no pod in it"], "problems": [],
        });
        assert_eq!(read, json!([job, config_map]));
        assert_eq!(said.lines().count(), 4);
    }

    #[test]
    fn json_has_exits_after_an_oom_kill_and_signals_as_their_codes() {
        let text = "
kind: Pod
metadata:
  name: p
  annotations:
    restart-rules.reprise.dev: '[{action: Restart, onSignal: [SIGSEGV]}, {action: RestartPod, onOOMKilled: {}}]'
spec: {containers: [{name: a, image: i:1}]}
";
        let read: Value = serde_json::from_str(&said(text, "1.36")).unwrap();
        let exits = read[0]["containers"][0]["exits"].as_array().unwrap();
        let exits = exits.iter().map(|it| {
            let keys = ["codes", "oomKilled", "action", "by"];
            json!(keys.map(|key| &it[key]))
        });
        let expected = json!([
            [[[0, 138], [140, 255]], true, "RestartPod", "Reprise"],
            [[[139, 139]], false, "Restart", "Reprise"],
            [[[0, 138], [140, 255]], false, null, null],
        ]);
        assert_eq!(exits.collect::<Value>(), expected);
    }

    #[test]
    fn json_has_what_is_wrong_with_a_file_and_fields_by_their_paths() {
        let text = said("a: [", "1.36");
        assert!(
            text.starts_with("[\n{\"file\":\"f\",\"document\":null,\"line\":null,"),
            "{text}"
        );
        assert!(text.contains("\"line\":1,\"key\":null}]}"), "{text}");
        let text = said(&RULES_IN_SPEC.replace("OnFailure", "Sometimes"), "1.36");
        let expected = "\"line\":12,\"key\":\"spec.containers[1].restartPolicy\"}";
        assert!(text.contains(expected), "{text}");
        let by = "\"action\":\"Restart\",\"by\":\"kubelet\"";
        assert!(text.contains(by), "{text}");
    }

    #[test]
    fn json_is_escaped_for_terminals_and_stays_what_it_says() {
        let name = "run\u{9b}2J\u{202e}";
        let text = said(
            "kind: Pod\nmetadata: {name: \"run\\x9b2J\\u202e\"}\n",
            "1.36",
        );
        assert!(text.contains(r"run\u009b2J\u202e"), "{text}");
        let read: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(read[0]["name"], name);
    }
}
