//! `reprise check`: validates the annotations of manifests and says what each exit does.

mod files;
mod lines;
mod manifest;
mod outcome;
mod pod;
mod report;

use std::fs;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use serde_json::Value;

use files::Unreadable;
use lines::{Lines, Place};
use manifest::{Object, What};
use report::{Cause, Finding};

use crate::kube::KubeletFeatures;
use crate::yaml;

/// The command line of `reprise check`.
#[derive(Debug, Clone, Args)]
pub struct CheckArgs {
    /// Manifests, and directories with manifests in them or below (*.yaml, *.yml, *.json); - is standard input
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<PathBuf>,
    /// Say who acts on each rule beside a kubelet of this version, as in 1.36: Reprise, or the kubelet itself
    ///
    /// The kubelet acts on rules of the spec (restartPolicyRules) whose feature gate is on by default in that version:
    /// `Restart` from 1.35 on, `RestartAllContainers` from 1.36 on. Reprise acts on annotations, and on what the kubelet
    /// leaves. Both in one pod are an error there.
    #[arg(long, value_name = "VERSION", value_parser = KubeletFeatures::of_version)]
    pub kubelet: Option<KubeletFeatures>,
    /// How to say it
    #[arg(long, value_enum, default_value = "text")]
    pub output: Output,
}

/// How it is said.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// For people
    Text,
    /// A list with an entry for each pod and pod template
    Json,
}

/// Checks files, directories and (`-`) all of `stdin`, and writes what it finds to `out`. Returns whether all is
/// well; fails only if `out` does.
pub fn run(args: &CheckArgs, mut stdin: impl Read, out: &mut impl Write) -> io::Result<bool> {
    let mut findings = Vec::new();
    for argument in &args.files {
        if argument == Path::new("-") {
            let text = io::read_to_string(&mut stdin);
            findings.extend(examine("stdin", text, args.kubelet));
            continue;
        }
        for file in files::of(argument) {
            let (path, text) = match file {
                Ok(path) => (path.clone(), fs::read_to_string(path)),
                Err(Unreadable { path, why }) => (path, Err(io::Error::other(why))),
            };
            let name = path.display().to_string();
            findings.extend(examine(&name, text, args.kubelet));
        }
    }
    match args.output {
        Output::Text => report::write_text(&findings, out)?,
        Output::Json => report::write_json(&findings, out)?,
    }
    Ok(findings.iter().all(Finding::is_well))
}

fn examine(file: &str, text: io::Result<String>, kubelet: Option<KubeletFeatures>) -> Vec<Finding> {
    let failed = |line, why: String| {
        let mut finding = Finding::of_file(file);
        finding.error(Cause { key: None, line }, why);
        vec![finding]
    };
    let text = match text {
        Ok(text) => text,
        Err(error) => return failed(None, error.to_string()),
    };
    let documents = match yaml::documents(&text) {
        Ok(documents) => documents,
        Err(error) => return failed(error.line(), error.to_string()),
    };
    let lines = Lines::of(&text);
    // A mere word is no object.
    let objects = documents
        .iter()
        .filter(|it| it.is_object() || it.is_array());
    let findings = objects.enumerate().flat_map(|(index, object)| {
        let (document, at) = lines.document(index);
        examine_object(object, at, kubelet, |object, at| {
            Finding::of_object(file, document, at.line(), object)
        })
    });
    let mut findings: Vec<_> = findings.collect();
    if findings.is_empty() {
        let mut finding = Finding::of_file(file);
        finding.note("nothing in it");
        findings.push(finding);
    }
    findings
}

fn examine_object<'d>(
    object: &'d Value,
    at: Place<'d>,
    kubelet: Option<KubeletFeatures>,
    finding: impl Fn(Object, Place<'d>) -> Finding,
) -> Vec<Finding> {
    let found = manifest::find(object, at);
    if found.is_empty() {
        let mut finding = finding(Object::of(object), at);
        finding.note("no pod in it");
        return vec![finding];
    }
    let findings = found.into_iter().map(|found| {
        let kind = found.object.kind.clone();
        let mut finding = finding(found.object, found.at);
        match found.what {
            What::Pod(pod) => {
                let kind = kind.as_deref().unwrap_or_default();
                pod::check(&pod, kind, found.at, kubelet, &mut finding);
            }
            What::Misplaced(keys) => {
                for key in keys {
                    let why = format!(
                        "{key} has no effect here: it belongs to metadata.annotations of the pod or of its template"
                    );
                    finding.error(Cause::annotation(found.at, key), why);
                }
            }
        }
        finding
    });
    findings.collect()
}

#[cfg(test)]
mod tests;
