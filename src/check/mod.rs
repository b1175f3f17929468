//! `reprise check`: validates the annotations of manifests and says what each exit does.

mod manifest;
mod outcome;

use std::fs;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use manifest::{Found, Pod};

use crate::kube::KubeletFeatures;
use crate::policy::{
    self, FAILURE_KEY, FailureAction, FailurePolicy, OPTIONS_KEY, Policy, PolicyError, RULES_KEY,
};
use crate::text;
use crate::yaml;

/// Checks `files` (`-`: all of `stdin`) and writes what it finds to `out`. Returns whether all is
/// well; fails only if `out` does.
pub fn run(files: &[PathBuf], stdin: impl Read, out: &mut impl Write) -> io::Result<bool> {
    let mut stdin = stdin;
    let mut all_well = true;
    for file in files {
        let from_stdin = file == Path::new("-");
        let name = if from_stdin {
            "stdin".to_owned()
        } else {
            file.display().to_string()
        };
        let text = if from_stdin {
            io::read_to_string(&mut stdin)
        } else {
            fs::read_to_string(file)
        };
        let report = match text {
            Ok(text) => examine(&name, &text),
            Err(error) => Report::failed(&name, &error.to_string()),
        };
        out.write_all(report.text.as_bytes())?;
        all_well &= report.problems == 0;
    }
    Ok(all_well)
}

/// What was found in one file.
#[derive(Default)]
struct Report {
    text: String,
    problems: usize,
}

impl Report {
    fn failed(name: &str, error: &str) -> Self {
        Self {
            text: format!("{name}: problem: {}\n", text::printable(error)),
            problems: 1,
        }
    }

    fn heading(&mut self, heading: &str) {
        self.text.push_str(&text::printable(heading));
        self.text.push('\n');
    }

    fn line(&mut self, line: &str) {
        self.text.push_str("  ");
        self.text.push_str(&text::printable(line));
        self.text.push('\n');
    }

    fn problem(&mut self, problem: &str) {
        self.problems += 1;
        self.line(&format!("problem: {problem}"));
    }

    fn policy_problems(&mut self, error: &PolicyError) {
        for problem in error.problems() {
            self.problem(&problem.to_string());
        }
        if error.more() > 0 {
            self.problems += error.more();
            self.line(&format!("and {} more problems", error.more()));
        }
    }
}

fn examine(name: &str, text: &str) -> Report {
    let documents = match yaml::documents(text) {
        Ok(documents) => documents,
        Err(error) => return Report::failed(name, &error.to_string()),
    };
    let mut report = Report::default();
    if documents.is_empty() {
        report.heading(&format!("{name}: nothing in it"));
    }
    for document in &documents {
        let found = manifest::find(document);
        if found.is_empty() {
            report.heading(&format!(
                "{name}: {}: no pod in it",
                manifest::describe(document)
            ));
        }
        for found in found {
            match found {
                Found::Pod(pod) => examine_pod(name, &pod, &mut report),
                Found::Misplaced { place, key } => {
                    report.heading(&format!("{name}: {place}"));
                    report.problem(&format!(
                        "{key} has no effect here: it belongs to metadata.annotations of the pod \
                         or of its template"
                    ));
                }
            }
        }
    }
    report
}

fn examine_pod(name: &str, pod: &Pod, report: &mut Report) {
    report.heading(&format!("{name}: {}", pod.place));
    for problem in &pod.problems {
        report.problem(problem);
    }
    for key in pod
        .annotations
        .keys()
        .filter(|key| policy::is_unknown_key(key))
    {
        report.problem(&format!(
            "{key} is no annotation of Reprise: see {RULES_KEY}, {OPTIONS_KEY}, {FAILURE_KEY}"
        ));
    }
    let mut spec_rules = Vec::new();
    for container in &pod.containers {
        let Some(rules) = &container.rules else {
            continue;
        };
        let field = format!("restartPolicyRules of container {}", container.name);
        match policy::spec_rules(&field, rules) {
            Ok(rules) => spec_rules.push((container.name.clone(), rules)),
            Err(error) => report.policy_problems(&error),
        }
    }
    let annotations = || {
        pod.annotations
            .iter()
            .map(|(key, value)| (key.as_str(), value.as_str()))
    };
    examine_failure_policy(pod, FailurePolicy::from_annotations(annotations()), report);
    // Of a kubelet that acts on no rules, so that what they lead to can be told.
    let native = Some(KubeletFeatures::default());
    let policy = match Policy::from_pod(annotations(), spec_rules, native) {
        Ok(Some(policy)) => policy,
        Ok(None) => {
            report.line("no restart rules: Reprise leaves this pod alone");
            if let Err(error) = policy::Options::from_annotations(annotations()) {
                report.policy_problems(&error);
            }
            return;
        }
        Err(error) => return report.policy_problems(&error),
    };
    let names: Vec<_> = pod
        .containers
        .iter()
        .map(|container| container.name.as_str())
        .collect();
    if let Err(error) = policy.check_names(&names) {
        report.policy_problems(&error);
    }
    for container in &pod.containers {
        report.line(&outcome::sentence(container, &policy));
        for warning in outcome::warnings(container, &policy) {
            report.line(&format!("warning: {warning}"));
        }
    }
    if policy.has_rules_twice() {
        report.line("warning: there are rules in annotations and in the spec: a node whose kubelet acts on those of the spec uses no others");
    }
}

fn examine_failure_policy(
    pod: &Pod,
    policy: Result<Option<FailurePolicy>, PolicyError>,
    report: &mut Report,
) {
    let policy = match policy {
        Ok(Some(policy)) => policy,
        Ok(None) => return,
        Err(error) => return report.policy_problems(&error),
    };
    if policy.action == FailureAction::None {
        return report.line("failure policy: the pod stays, however often it crashes");
    }
    let restarts = match policy.max_restarts {
        Some(restarts) => format!("more than {restarts} restarts of a container"),
        None => {
            "more restarts of a container than the node allows (7, unless configured)".to_owned()
        }
    };
    report.line(&format!(
        "failure policy: after {restarts}, and not Ready for 10 minutes (unless configured), the pod is evicted, so that its controller makes a new one"
    ));
    // A template has the kind of what it is in.
    let never = match pod.kind.as_str() {
        "Pod" => "a pod without a controller is never deleted, for nobody would make a new one",
        "DaemonSet" => {
            "pods of a DaemonSet are never deleted: the new one would be on the same node"
        }
        "Job" | "CronJob" => "pods of a Job are never deleted: it may make no new one",
        _ => return,
    };
    report.line(&format!("warning: {never}"));
}

#[cfg(test)]
mod tests;
