//! Groups of pods that restart together, as `JobSet`'s in-place restart has them do: whichever container fails, its pod restarts;
//! the agent in that pod then begins an attempt of the group, and the agents in the others exit, so that those restart as well.
//! The agents' part in the API is played here.

use std::fs::File;
use std::sync::Arc;

use anyhow::{Result, ensure};
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

use super::probes::probe;
use crate::evidence::{self, Deed};
use crate::pod::LivePod;
use crate::restarted::Before;
use crate::scenario::{Scenario, scenarios};
use crate::shape::{Shape, rule};
use crate::stage::Stage;
use crate::wait::{self, PATIENCE};

/// What an agent writes on its pod.
const ATTEMPT: &str = "jobset.sigs.k8s.io/in-place-restart-attempt";
/// What its container has a variable from.
const GROUP: &str = "jobset.sigs.k8s.io/jobset-name";
/// While it is not there, the agent keeps the worker from starting.
const LIFTED: &str = "lifted";

pub(crate) fn scenarios() -> Vec<Scenario> {
    scenarios![Shared:
        group_whose_agents_start_the_workers_is_replayed,
        group_whose_agents_are_sidecars_waits_for_all_of_them,
    ]
}

/// `JobSet`'s rule, and the agent's variable.
fn of_group(shape: Shape) -> Shape {
    let rules = json!([rule("RestartAllContainers", "NotIn", &[0])]);
    shape
        .annotation("restart-rules.reprise.dev/pod", rules.to_string())
        .annotation(GROUP, "training")
        .started_by("Auto")
}

fn variables() -> Value {
    let group = json!({"fieldRef": {"fieldPath": format!("metadata.annotations['{GROUP}']")}});
    let pod = json!({"fieldRef": {"fieldPath": "metadata.name"}});
    json!([{"name": "JOBSET_NAME", "valueFrom": group}, {"name": "POD_NAME", "valueFrom": pod}])
}

async fn has_attempt(pod: &LivePod, attempt: u32) -> Result<()> {
    let patch = Patch::Merge(json!({"metadata": {"annotations": {ATTEMPT: attempt.to_string()}}}));
    let pods = pod.node.pods();
    pods.patch(&pod.name, &PatchParams::default(), &patch)
        .await?;
    Ok(())
}

/// Lets a container of one pod fail, and then the agent of the other, each of which begins the attempt when its agent does.
async fn begin_anew(
    failing: (&LivePod, &str),
    other: &LivePod,
    attempt: u32,
) -> Result<[Before; 2]> {
    let before = [Before::of(failing.0).await?, Before::of(other).await?];
    for ((pod, container), before) in [failing, (other, "agent")].into_iter().zip(&before) {
        pod.exit(container, 1).await?;
        wait::until("the agent has begun again", PATIENCE, async || {
            Ok(evidence::have_begun(
                &pod.evidence_since(before)?,
                ["agent"].into_iter(),
            ))
        })
        .await?;
        has_attempt(pod, attempt).await?;
    }
    Ok(before)
}

async fn group_whose_agents_start_the_workers_is_replayed(stage: Stage) -> Result<()> {
    let shape = Shape::on_failure()
        .regular("agent")
        .field("env", variables())
        .at_first("say \"note $JOBSET_NAME\"");
    let shape = of_group(shape);
    let pods = [
        stage.running(shape.clone()).await?,
        stage.running(shape).await?,
    ];
    for pod in &pods {
        has_attempt(pod, 0).await?;
    }
    let [first, other] = &pods;
    let before = begin_anew((first, "agent"), other, 1).await?;
    for (pod, before) in pods.iter().zip(&before) {
        pod.has_restarted(before).await?;
        pod.restart_ended("by replay")?;
        let notes = pod.notes_since(before)?;
        ensure!(notes == ["training"], "{notes:?}");
    }
    Ok(())
}

async fn group_whose_agents_are_sidecars_waits_for_all_of_them(stage: Stage) -> Result<()> {
    let lifted = format!("test -e /ev/{LIFTED}");
    let probe = probe(&lifted, json!({"failureThreshold": 600}));
    let shape = Shape::on_failure()
        .sidecar("agent")
        .field("env", variables())
        .field("startupProbe", probe)
        .at_first("rm -f /ev/lifted")
        .regular("worker");
    let shape = of_group(shape);
    let pods = [stage.pod(shape.clone()).await?, stage.pod(shape).await?];
    for pod in &pods {
        pod.until_listening("agent").await?;
        has_attempt(pod, 0).await?;
    }
    lift(&pods)?;
    for pod in &pods {
        pod.until_running().await?;
    }
    let [first, other] = &pods;
    let before = begin_anew((first, "worker"), other, 1).await?;
    for (pod, before) in pods.iter().zip(&before) {
        pod.until_listening("agent").await?;
        let after = pod.evidence_since(before)?;
        let worker = |it: &&evidence::Entry| it.container == "worker" && it.deed == Deed::Began;
        let early = after.iter().find(worker);
        ensure!(early.is_none(), "the worker did not wait: {after:?}");
    }
    lift(&pods)?;
    for (pod, before) in pods.iter().zip(&before) {
        pod.has_restarted(before).await?;
        pod.restart_ended("no replay: agent has a startup probe")?;
    }
    Ok(())
}

/// All agents have begun the same attempt.
fn lift(pods: &[Arc<LivePod>]) -> Result<()> {
    for pod in pods {
        File::create(pod.node.evidence_dir(&pod.uid).join(LIFTED))?;
    }
    Ok(())
}
