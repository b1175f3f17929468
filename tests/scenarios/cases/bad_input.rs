//! Annotations that mean nothing: the pod runs as without the plugin, and its owner is told once.

use std::process::Stdio;

use anyhow::{Result, ensure};
use futures::future::try_join_all;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::PostParams;
use serde_json::{Value, json};

use super::requests::ask;
use crate::plugin::Sockets;
use crate::pod::LivePod;
use crate::scenario::{Scenario, scenarios};
use crate::shape::{RestartPolicy, Shape, restart_all_on, rule};
use crate::stage::Stage;
use crate::wait::{self, PATIENCE};

const REASON: &str = "InvalidRestartRules";
const OPTIONS_KEY: &str = "restart-options.reprise.dev";
const KEY: &str = "restart-rules.reprise.dev/container.trainer";

pub(crate) fn scenarios() -> Vec<Scenario> {
    let mut scenarios = scenarios![Shared:
        annotation_that_cannot_be_read_is_reported,
        unknown_action_is_reported,
        unknown_operator_is_reported,
        grace_periods_that_are_none_are_reported,
        back_offs_that_are_none_are_reported,
        twenty_one_rules_are_reported,
        two_hundred_fifty_six_values_are_reported,
        rules_for_a_container_that_is_not_in_the_pod_are_reported,
        more_mistakes_than_an_event_can_have_are_reported,
        annotation_of_a_quarter_of_a_mebibyte_is_reported,
        anchors_are_reported,
        pod_that_takes_the_uid_of_another_changes_nothing_for_it,
        request_that_is_too_long_is_reported,
        failure_policy_that_is_none_is_reported,
    ];
    // A second plugin would report the others' annotations, too.
    scenarios.extend(scenarios![Alone:
        socket_that_is_missing_is_said_to_be,
        hook_that_the_runtime_cannot_run_is_said_to_be,
    ]);
    scenarios
}

/// The pod with that value fails as without the plugin, and the one event names `needles`.
async fn is_reported(stage: &Stage, key: &str, value: &str, needles: &[&str]) -> Result<()> {
    let shape = Shape::never().regular("trainer").annotation(key, value);
    is_reported_of(stage, shape, key, needles).await
}

/// The same of any pod with a trainer, of which `key` is wrong.
async fn is_reported_of(stage: &Stage, shape: Shape, key: &str, needles: &[&str]) -> Result<()> {
    let pod = stage.running(shape).await?;
    let message = the_one_warning(&pod).await?;
    for needle in std::iter::once(&key).chain(needles) {
        ensure!(message.contains(needle), "{needle:?} is not in {message:?}");
    }
    pod.exit("trainer", 42).await?;
    let now = pod.until_phase("Failed").await?;
    ensure!(
        now.containers["trainer"].state == "exit 42 (Error)",
        "{now}"
    );
    // Now that the pod is over, nothing more can come.
    the_one_warning(&pod).await?;
    let lines: Vec<String> = stage
        .plugin
        .log_lines(&pod.name)?
        .into_iter()
        .filter(|line| line.contains(key))
        .collect();
    ensure!(lines.len() == 1, "log lines about it: {lines:#?}");
    Ok(())
}

/// The message of the pod's only warning of ours.
async fn the_one_warning(pod: &LivePod) -> Result<String> {
    let event = wait::until("a warning event on the pod", PATIENCE, async || {
        let mut events = pod.events(REASON).await?;
        Ok(events.pop().ok_or_else(|| "no event".to_owned()))
    })
    .await?;
    let all = pod.events(REASON).await?;
    ensure!(all.len() == 1, "{} events instead of one", all.len());
    ensure!(event.type_.as_deref() == Some("Warning"), "{event:?}");
    let times = event.count.unwrap_or(1);
    ensure!(times == 1, "the event was sent {times} times");
    Ok(event.message.unwrap_or_default())
}

async fn rules_are_reported(stage: &Stage, rules: &Value, needles: &[&str]) -> Result<()> {
    is_reported(stage, KEY, &rules.to_string(), needles).await
}

async fn request_that_is_too_long_is_reported(stage: Stage) -> Result<()> {
    let shape = Shape::always().regular("trainer");
    let pod = stage.running(shape.restarts_all("trainer", 42)).await?;
    let before = pod.recorder.current();
    ask(&pod, &"x".repeat(129)).await?;
    pod.until_told("InvalidRestartRequest", "has 129 bytes")
        .await?;
    let now = pod.recorder.current();
    ensure!(now.containers == before.containers, "{now}");
    Ok(())
}

async fn failure_policy_that_is_none_is_reported(stage: Stage) -> Result<()> {
    let shape = Shape::always().regular("trainer");
    let shape = shape.annotation("failure-policy.reprise.dev", "action: Explode");
    let pod = stage.running(shape).await?;
    pod.until_told("InvalidFailurePolicy", "Explode").await
}

async fn annotation_that_cannot_be_read_is_reported(stage: Stage) -> Result<()> {
    is_reported(&stage, KEY, "[{action: ", &[]).await
}

async fn unknown_action_is_reported(stage: Stage) -> Result<()> {
    let rules = json!([
        restart_all_on(&[41]),
        rule("RestartEverything", "In", &[42])
    ]);
    rules_are_reported(&stage, &rules, &["RestartEverything"]).await
}

async fn unknown_operator_is_reported(stage: Stage) -> Result<()> {
    let rules = json!([rule("RestartAllContainers", "Within", &[42])]);
    rules_are_reported(&stage, &rules, &["Within"]).await
}

async fn grace_periods_that_are_none_are_reported(stage: Stage) -> Result<()> {
    let reported = ["-1", "86401", "soon"].map(|period| {
        let options = format!("gracePeriodSeconds: {period}");
        let stage = &stage;
        async move {
            let allowed = "a whole number from 0 to 86400";
            let shape = Shape::never()
                .regular("trainer")
                .annotation(OPTIONS_KEY, options)
                .restarts_all("trainer", 42);
            is_reported_of(stage, shape, OPTIONS_KEY, &[period, allowed]).await
        }
    });
    try_join_all(reported).await?;
    Ok(())
}

async fn back_offs_that_are_none_are_reported(stage: Stage) -> Result<()> {
    let allowed = "a whole number from 0 to 86400";
    let reported = [
        ("{firstSeconds: -1}", allowed),
        ("{maxSeconds: 18446744073709551616}", allowed),
        ("{resetSeconds: 0.5}", allowed),
        (
            "{firstSeconds: 2, maxSeconds: 1}",
            "longer than the longest",
        ),
        ("10", "expected a mapping"),
    ];
    let reported = reported.map(|(back_off, why)| {
        let stage = &stage;
        async move {
            let shape = Shape::never()
                .regular("trainer")
                .annotation(OPTIONS_KEY, format!("backOff: {back_off}"))
                .restarts_all("trainer", 42);
            is_reported_of(stage, shape, OPTIONS_KEY, &["backOff", why]).await
        }
    });
    try_join_all(reported).await?;
    Ok(())
}

async fn twenty_one_rules_are_reported(stage: Stage) -> Result<()> {
    let rules = json!(vec![restart_all_on(&[42]); 21]);
    rules_are_reported(&stage, &rules, &["21", "20"]).await
}

async fn two_hundred_fifty_six_values_are_reported(stage: Stage) -> Result<()> {
    let values: Vec<i32> = (0..256).collect();
    let rules = json!([restart_all_on(&values)]);
    rules_are_reported(&stage, &rules, &["256", "255"]).await
}

async fn rules_for_a_container_that_is_not_in_the_pod_are_reported(stage: Stage) -> Result<()> {
    let key = "restart-rules.reprise.dev/container.trainee";
    let rules = json!([restart_all_on(&[42])]);
    is_reported(&stage, key, &rules.to_string(), &["trainee"]).await
}

async fn more_mistakes_than_an_event_can_have_are_reported(stage: Stage) -> Result<()> {
    let mistake = rule(&"RestartEverything".repeat(3), "Within", &[256, 257]);
    rules_are_reported(&stage, &json!(vec![mistake; 20]), &["rule 2", "…"]).await
}

/// What it takes to read, and to say what is wrong with, is for the plugin's own tests.
async fn annotation_of_a_quarter_of_a_mebibyte_is_reported(stage: Stage) -> Result<()> {
    let value = format!("{{? {} : [{}]}}", "x".repeat(8000), "[],".repeat(80_000));
    let key = "restart-rules.reprise.dev/pod";
    is_reported(&stage, key, &value, &["248009", "65536"]).await
}

async fn anchors_are_reported(stage: Stage) -> Result<()> {
    let value = "[&a {action: Restart, exitCodes: {operator: In, values: [1]}}, *a]";
    is_reported(&stage, KEY, value, &["anchors"]).await
}

/// By an annotation that any pod may have, and as the mirror of a static pod, which anybody may call a pod. That one the
/// kubelet deletes.
async fn pod_that_takes_the_uid_of_another_changes_nothing_for_it(stage: Stage) -> Result<()> {
    let victim = Shape::never()
        .regular("trainer")
        .regular("logger")
        .restarts_all("trainer", 42);
    let victim = stage.running(victim).await?;
    // A spec that would have no restart begin.
    let stranger = Shape::new(RestartPolicy::Always)
        .regular("stranger")
        .annotation("kubernetes.io/config.hash", &victim.uid);
    let other = stage.running(stranger.clone()).await?;
    other.begin_delete().await?;
    let node = &stage.node;
    let name = stage.name();
    let mirror = stranger.annotation("kubernetes.io/config.mirror", &victim.uid);
    let mut mirror = mirror.manifest(&name, &node.name, &node.image)?;
    mirror.metadata.owner_references = Some(vec![OwnerReference {
        api_version: "v1".to_owned(),
        kind: "Node".to_owned(),
        name: node.name.clone(),
        uid: "unknown".to_owned(),
        controller: Some(true),
        ..OwnerReference::default()
    }]);
    let pods = node.pods();
    pods.create(&PostParams::default(), &mirror).await?;
    wait::until("the kubelet deletes the mirror", PATIENCE, async || {
        let there = pods.get_opt(&name).await?;
        Ok(there.map_or(Ok(()), |_| Err("it is there".to_owned())))
    })
    .await?;
    other.recorder.until_gone(PATIENCE).await?;
    victim.restarts_all("trainer", 42).await
}

/// As on a node whose runtime has NRI off.
async fn socket_that_is_missing_is_said_to_be(stage: Stage) -> Result<()> {
    let dir = tempfile::tempdir()?;
    let sockets = Sockets {
        nri: dir.path().join("nri.sock"),
        ..Sockets::of(&stage.node)
    };
    let socket = sockets.nri.to_string_lossy().into_owned();
    is_refused(&stage, &sockets, &[&socket, "NRI", "disable"]).await
}

async fn hook_that_the_runtime_cannot_run_is_said_to_be(stage: Stage) -> Result<()> {
    let dir = tempfile::tempdir()?;
    let hook = dir.path().join("reprise");
    let path = hook.to_string_lossy().into_owned();
    let sockets = Sockets {
        hook: Some(hook.clone()),
        ..Sockets::of(&stage.node)
    };
    is_refused(&stage, &sockets, &[&path, "No such file", "--hook-path"]).await?;
    std::fs::write(&hook, "")?;
    is_refused(&stage, &sockets, &[&path, "not executable"]).await
}

/// A plugin of its own ends with 1, and says these.
async fn is_refused(stage: &Stage, sockets: &Sockets, needles: &[&str]) -> Result<()> {
    let dir = tempfile::tempdir()?;
    let mut plugin = stage
        .plugin
        .command(dir.path(), sockets)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()?;
    wait::until_ended(&mut plugin, PATIENCE).await?;
    let output = plugin.wait_with_output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.code() == Some(1),
        "ended with {} and said {said:?}",
        output.status
    );
    for needle in needles {
        ensure!(said.contains(needle), "{needle:?} is not in {said:?}");
    }
    ensure!(!said.contains("panicked"), "{said}");
    Ok(())
}
