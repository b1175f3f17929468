//! Pods that the kubelet ends by itself: whatever their containers exit with, they keep their grace period and nothing is
//! started again.

use std::sync::Arc;

use anyhow::{Result, ensure};
use futures::future::try_join_all;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

use super::under;
use crate::evidence::{self, Deed, Entry};
use crate::logind::Logind;
use crate::node::NATIVE;
use crate::pod::LivePod;
use crate::restarted::Before;
use crate::restarted::TWO_RELISTS;
use crate::scenario::{Company, Scenario, scenarios, telling_nodes_apart};
use crate::shape::RestartPolicy::{Always, Never};
use crate::shape::{RestartPolicy, Shape, rule};
use crate::stage::Stage;
use crate::wait::PATIENCE;

/// Ends as its rules say, and at once.
const ASKING_END: &str = r#"say "note asks"; exit 3"#;
/// Takes its time.
const CLEAN_END: &str = r#"sleep 6; say "note stopped"; exit 0"#;
/// The same of a second.
const QUICK_END: &str = r#"sleep 0.2; say "note stopped"; exit 0"#;

pub(crate) fn scenarios() -> Vec<Scenario> {
    [
        under(
            &[Never, Always],
            "past_its_deadline_keeps_its_grace_period",
            is_past_its_deadline,
        ),
        under(
            &[Never, Always],
            "past_its_deadline_while_it_stops_is_not_started_again",
            is_past_its_deadline_while_it_stops,
        ),
        under(
            &[Never, Always],
            "that_is_evicted_is_not_started_again",
            is_evicted,
        ),
        scenarios![Alone: pod_that_makes_way_for_a_critical_one_keeps_its_grace_period,
            pods_keep_their_grace_periods_when_the_node_shuts_down],
        kills_of_one_container(),
    ]
    .concat()
}

fn asking(shape: Shape) -> Shape {
    shape
        .regular("trainer")
        .on_term(ASKING_END)
        .regular("logger")
        .on_term(CLEAN_END)
        .rules(
            "trainer",
            &json!([rule("RestartAllContainers", "NotIn", &[0])]),
        )
        .grace_period_seconds(20)
}

/// Its containers have more time to stop for a restart than the deadline leaves it.
async fn is_past_its_deadline_while_it_stops(stage: Stage, shape: Shape) -> Result<()> {
    let shape = shape
        .regular("trainer")
        .regular("logger")
        .on_term(r#"say "note asks"; sleep 16; say "note stopped"; exit 0"#)
        .restarts_pod("trainer", 42)
        .grace_period_seconds(40);
    ends_past_its_deadline(&stage, &shape, true).await
}

async fn is_past_its_deadline(stage: Stage, shape: Shape) -> Result<()> {
    ends_past_its_deadline(&stage, &asking(shape), false).await
}

/// `in_a_restart`: it is stopping for one by then. Once more where the plugin was not told in time that the kubelet was ending
/// the pod.
async fn ends_past_its_deadline(stage: &Stage, shape: &Shape, in_a_restart: bool) -> Result<()> {
    let mut tries = 0;
    loop {
        let pod = stage.running(shape.clone()).await?;
        if in_a_restart {
            pod.exit("trainer", 42).await?;
            pod.notes().await?;
        }
        // It has run for longer.
        pod.patch(&json!({"spec": {"activeDeadlineSeconds": 1}}))
            .await?;
        let ended = ends_with_grace(&pod).await;
        tries += 1;
        if ended.is_ok() || tries == TRIES || !was_not_told(&pod)? {
            return ended;
        }
    }
}

fn was_not_told(pod: &LivePod) -> Result<bool> {
    let lines = pod.plugin.log_lines(&pod.name)?;
    Ok(lines.iter().any(|line| line.contains(NOT_TOLD)))
}

async fn pod_that_makes_way_for_a_critical_one_keeps_its_grace_period(stage: Stage) -> Result<()> {
    // Each wants more than half of what the node has.
    let cpus = stage.node.allocatable_millicpus().await?;
    let requests = json!({"requests": {"cpu": format!("{}m", cpus * 6 / 10)}});
    let shape = asking(Shape::never()).field("resources", requests.clone());
    let pod = stage.running(shape).await?;
    let critical = Shape::never()
        .regular("server")
        .field("resources", requests)
        .spec("priorityClassName", json!("system-node-critical"));
    let critical = stage.pod(critical).await?;
    ends_with_grace(&pod).await?;
    critical.until_running().await?;
    Ok(())
}

async fn pods_keep_their_grace_periods_when_the_node_shuts_down(stage: Stage) -> Result<()> {
    let logind = Logind::listen(&stage.node.login_manager_socket())?;
    stage
        .node
        .swap_kubelet("kubelet", "kubelet-shutdown")
        .await?;
    let kept = shuts_down(&stage, &logind).await;
    stage
        .node
        .swap_kubelet("kubelet-shutdown", "kubelet")
        .await?;
    kept
}

async fn shuts_down(stage: &Stage, logind: &Logind) -> Result<()> {
    logind.until_inhibited().await?;
    let mut pods = Vec::new();
    for policy in [Never, Always] {
        pods.push(stage.running(asking(Shape::new(policy))).await?);
    }
    logind.shuts_down(true)?;
    try_join_all(pods.iter().map(ends_with_grace)).await?;
    for pod in &pods {
        let now = stage.node.pods().get_status(&pod.name).await?.status;
        let reason = now.and_then(|it| it.reason);
        ensure!(reason.as_deref() == Some("Terminated"), "{reason:?}");
    }
    logind.shuts_down(false)
}

/// For what it has written: the kubelet gives it a second (`immediateEvictionGracePeriodSeconds`,
/// `pkg/kubelet/eviction/eviction_manager.go`).
async fn is_evicted(stage: Stage, shape: Shape) -> Result<()> {
    let shape = shape
        .volume("much", json!({"emptyDir": {"sizeLimit": "1Mi"}}))
        .regular("trainer")
        .on_term(ASKING_END)
        .regular("logger")
        .on_term(QUICK_END)
        .rules(
            "trainer",
            &json!([rule("RestartAllContainers", "NotIn", &[0])]),
        );
    let pod = stage.running(shape).await?;
    let volume = stage.node.evidence_dir(&pod.uid).with_file_name("much");
    std::fs::write(volume.join("file"), vec![0; 2_000_000])?;
    ends_with_grace(&pod).await?;
    let now = stage.node.pods().get_status(&pod.name).await?.status;
    let reason = now.and_then(|it| it.reason);
    ensure!(reason.as_deref() == Some("Evicted"), "{reason:?}");
    Ok(())
}

/// The trainer asks for a restart with its end, and the logger is left in peace.
async fn ends_with_grace(pod: &Arc<LivePod>) -> Result<()> {
    ends(pod, &["asks", "stopped"]).await
}

async fn ends(pod: &Arc<LivePod>, words: &[&str]) -> Result<()> {
    // Its volume goes with it.
    let evidence = pod.evidence_file()?;
    pod.until_phase("Failed").await?;
    let lasts = pod.recorder.stays_for(TWO_RELISTS, |now| {
        (now.phase != "Failed").then(|| format!("the pod is {}", now.phase))
    });
    lasts.await?;
    let evidence = evidence::entries(evidence)?;
    for &word in words {
        let noted = Deed::Noted(word.to_owned());
        let found = evidence.iter().any(|it| it.deed == noted);
        ensure!(found, "nobody noted that it {word}: {evidence:?}");
    }
    let begun: Vec<&Entry> = evidence
        .iter()
        .filter(|it| it.deed == Deed::Began)
        .collect();
    ensure!(
        begun.len() == 2,
        "something was started again: {evidence:?}"
    );
    pod.until_told("NotRestarted", "the kubelet is ending the pod")
        .await
}

/// An API server that has less of the processor than it needs answers late. The plugin says so.
const TRIES: usize = 5;
const NOT_TOLD: &str = "not told in time what the kubelet is ending";

/// Why the kubelet ends one container.
#[derive(Clone, Copy)]
enum Kill {
    Probe,
    Image,
    Resize,
}

/// Where it starts it again in the same breath, no rule heeds that; where it does not, as under Never, its exit is one like
/// any other. Side by side with the kubelet's own rules where it has them.
fn kills_of_one_container() -> Vec<Scenario> {
    let kills = [
        ("always_pod", Always, "a_liveness_probe", Kill::Probe),
        ("always_pod", Always, "a_new_image", Kill::Image),
        ("always_pod", Always, "a_resize", Kill::Resize),
        ("never_pod", Never, "a_liveness_probe", Kill::Probe),
    ];
    let scenarios = kills.map(|(pod, policy, why, kill)| {
        let does = if policy == Never {
            "restarts"
        } else {
            "does_not_restart"
        };
        let name = format!("{pod}_{does}_as_natively_when_a_container_is_killed_for_{why}");
        Scenario::new(name, Company::Shared, move |stage| {
            restarts_as_natively(stage, policy, kill)
        })
    });
    telling_nodes_apart(scenarios.into())
}

async fn restarts_as_natively(stage: Stage, policy: RestartPolicy, kill: Kill) -> Result<()> {
    let rules = json!([rule("RestartAllContainers", "NotIn", &[0])]);
    let of_two = || {
        let shape = Shape::new(policy).regular("logger").regular("trainer");
        match kill {
            Kill::Probe => shape.field("livenessProbe", fails_once()),
            Kill::Image => shape,
            Kill::Resize => shape
                .field("resources", memory("64Mi"))
                .field("resizePolicy", restarts_for_memory()),
        }
    };
    let expected = policy == Never;
    for attempt in 1.. {
        let ours = of_two().rules("trainer", &rules);
        let (pod, ours) = restarts_others(&stage, ours, kill).await?;
        if ours == expected {
            break;
        }
        // It may also have been told in time that nothing was known of it yet.
        let untold = was_not_told(&pod)?;
        ensure!(attempt < TRIES, "the plugin restarts all: {ours}");
        println!("note: restarts all: {ours}; not told in time: {untold}");
    }
    if stage.node.declares(NATIVE).await? {
        let native = of_two()
            .field("restartPolicy", json!(format!("{policy:?}")))
            .field("restartPolicyRules", rules);
        let (_, native) = restarts_others(&stage, native, kill).await?;
        ensure!(native == expected, "the kubelet restarts all: {native}");
    }
    Ok(())
}

/// Whether the whole pod restarts when the kubelet ends its trainer.
async fn restarts_others(stage: &Stage, shape: Shape, kill: Kill) -> Result<(Arc<LivePod>, bool)> {
    let pod = stage.running(shape).await?;
    let before = Before::of(&pod).await?;
    let pods = stage.node.pods();
    let params = PatchParams::default();
    let change = |field: &str, value: Value| {
        let mut container = json!({"name": "trainer"});
        container[field] = value;
        json!({"spec": {"containers": [container]}})
    };
    match kill {
        Kill::Probe => stage.node.make_sick(&pod.uid)?,
        Kill::Image => {
            pod.patch(&change("image", json!(stage.node.other_image)))
                .await?;
        }
        Kill::Resize => {
            let patch = Patch::Strategic(change("resources", memory("80Mi")));
            pods.patch_subresource("resize", &pod.name, &params, &patch)
                .await?;
        }
    }
    pod.until_container_is_new(&before, "trainer", PATIENCE)
        .await?;
    let others = pod.until_container_is_new(&before, "logger", 3 * TWO_RELISTS);
    let restarted = others.await.is_ok();
    Ok((pod, restarted))
}

fn fails_once() -> Value {
    let script = "[ ! -e /ev/sick ] || ! rm /ev/sick";
    json!({"exec": {"command": ["/bin/sh", "-c", script]}, "periodSeconds": 1, "failureThreshold": 1})
}

fn memory(amount: &str) -> Value {
    json!({"limits": {"memory": amount}, "requests": {"memory": amount}})
}

fn restarts_for_memory() -> Value {
    json!([{"resourceName": "memory", "restartPolicy": "RestartContainer"}])
}
