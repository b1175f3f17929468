//! What a replay makes cannot be told from what the kubelet makes: whatever differs between a container's attempts, of
//! which the kubelet made the first, differs in the same way where it made both.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::under;
use crate::pod::LivePod;
use crate::restarted::TRIES;
use crate::scenario::Scenario;
use crate::shape::RestartPolicy::{Always, Never, OnFailure};
use crate::shape::Shape;
use crate::stage::Stage;

/// What the plugin says of itself.
const OURS: &str = "reprise.dev/replay";
/// Digits and letters of a number in base 16: from so many on it is a name that somebody has drawn.
const SHORTEST_NAME: usize = 6;

pub(crate) fn scenarios() -> Vec<Scenario> {
    under(
        &[Never, OnFailure, Always],
        "is_replayed_to_what_the_kubelet_would_have_made",
        is_alike,
    )
}

/// With something of everything that shows in the runtime and may be replayed.
fn rich(shape: Shape) -> Shape {
    shape
        .spec("hostname", json!("somewhere"))
        .spec("hostAliases", json!([{"ip": "10.9.9.9", "hostnames": ["peer"]}]))
        .spec("dnsConfig", json!({"options": [{"name": "ndots", "value": "2"}]}))
        .spec(
            "securityContext",
            json!({"supplementalGroups": [2000], "fsGroup": 3000, "sysctls": [{"name": "kernel.shm_rmid_forced", "value": "1"}]}),
        )
        .volume("scratch", json!({"emptyDir": {"medium": "Memory"}}))
        .volume(
            "about",
            json!({"downwardAPI": {"items": [{"path": "name", "fieldRef": {"fieldPath": "metadata.name"}}]}}),
        )
        .init("fetch")
        .field("env", json!([{"name": "ONE", "value": "1"}]))
        .sidecar("proxy")
        .field("securityContext", json!({"readOnlyRootFilesystem": true, "runAsUser": 0}))
        .regular("trainer")
        .field(
            "env",
            json!([
                {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
                {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
                {"name": "BOTH", "value": "$(IP) on $(NODE)"},
            ]),
        )
        .field(
            "resources",
            json!({"limits": {"cpu": "200m", "memory": "64Mi"}, "requests": {"cpu": "50m", "memory": "32Mi"}}),
        )
        .field(
            "securityContext",
            json!({
                "capabilities": {"add": ["SYS_TIME"], "drop": ["MKNOD"]},
                "allowPrivilegeEscalation": false,
                "seccompProfile": {"type": "RuntimeDefault"},
            }),
        )
        .field("workingDir", json!("/tmp"))
        .field("ports", json!([{"containerPort": 80, "name": "http"}]))
        .regular("logger")
        .field("securityContext", json!({"privileged": true}))
        .field("terminationMessagePath", json!("/tmp/last-words"))
        .field("tty", json!(true))
        .field("stdin", json!(true))
        .restarts_all("trainer", 42)
}

async fn is_alike(stage: Stage, shape: Shape) -> Result<()> {
    let shape = rich(shape);
    let replayed = differences(&stage, shape.clone(), "Auto").await?;
    let started = differences(&stage, shape, "Kubelet").await?;
    for (container, replayed) in &replayed {
        let started = started.get(container).context("another container")?;
        ensure!(!started.is_empty(), "of {container} nothing differs at all");
        let only: Vec<_> = replayed.symmetric_difference(started).collect();
        ensure!(only.is_empty(), "{container} is another one: {only:#?}");
    }
    Ok(())
}

/// What is different of each container after a restart.
async fn differences(
    stage: &Stage,
    shape: Shape,
    start: &str,
) -> Result<BTreeMap<String, BTreeSet<String>>> {
    let shape = shape.started_by(start);
    let mut tries = 0;
    let (pod, before) = loop {
        let pod = stage.running(shape.clone()).await?;
        let before = traits(&pod).await?;
        pod.restarts_all("trainer", 42).await?;
        pod.was_started_again_by(start)?;
        // A second restart has other numbers.
        let restarts = pod.recorder.current().containers["trainer"].restarts;
        tries += 1;
        if restarts == 1 {
            break (pod, before);
        }
        ensure!(tries < TRIES, "it has restarted {restarts} times");
    };
    let now = traits(&pod).await?;
    ensure!(
        before.len() == 4 && now.len() == 4,
        "a container is missing"
    );
    let both = before.into_iter().zip(now);
    Ok(both
        .map(|((name, before), (_, now))| {
            let gone = before.difference(&now).map(|it| format!("- {it}"));
            let come = now.difference(&before).map(|it| format!("+ {it}"));
            (name, gone.chain(come).collect())
        })
        .collect())
}

/// All that the runtime says of the newest attempt of each container, in lines.
async fn traits(pod: &LivePod) -> Result<BTreeMap<String, BTreeSet<String>>> {
    let ip = pod.recorder.current().ip;
    let mut all = BTreeMap::new();
    // Newer ones come later.
    for container in pod.containers().await? {
        let info = pod.node.runtime.info(&container.id).await?;
        let known = [
            (&container.id, "ID"),
            (&pod.uid, "UID"),
            (&pod.name, "POD"),
            (&ip, "IP"),
        ];
        let text = |text: &str| {
            let known = known.iter();
            let text = known.fold(text.to_owned(), |text, (word, name)| {
                text.replace(*word, name)
            });
            without_drawn_names(&text)
        };
        let mut traits = BTreeSet::new();
        for part in ["config", "runtimeSpec"] {
            let value = info.get(part).context("the runtime does not tell all")?;
            list(part, value, &text, &mut traits);
        }
        traits.retain(|line| !line.contains(OURS));
        all.insert(container.name().to_owned(), traits);
    }
    Ok(all)
}

/// A line for each value that has no parts. The place in a list is of no account.
fn list(path: &str, value: &Value, text: &impl Fn(&str) -> String, lines: &mut BTreeSet<String>) {
    match value {
        Value::Object(fields) if !fields.is_empty() => {
            for (name, value) in fields {
                list(&format!("{path}.{name}"), value, text, lines);
            }
        }
        // What belongs together stays together.
        Value::Array(values) if !values.is_empty() => {
            let values = values.iter().map(Value::to_string);
            lines.extend(values.map(|value| format!("{path}: {}", text(&value))));
        }
        Value::String(value) => drop(lines.insert(format!("{path}: {}", text(value)))),
        value => drop(lines.insert(format!("{path}: {value}"))),
    }
}

fn without_drawn_names(line: &str) -> String {
    let mut rest = String::new();
    let mut word = String::new();
    for it in line.chars().chain(['\n']) {
        if it.is_ascii_digit() || ('a'..='f').contains(&it) {
            word.push(it);
            continue;
        }
        let drawn = word.len() >= SHORTEST_NAME && word.bytes().any(|it| it.is_ascii_digit());
        rest.push_str(if drawn { "*" } else { &word });
        rest.push(it);
        word.clear();
    }
    rest.pop();
    rest
}
