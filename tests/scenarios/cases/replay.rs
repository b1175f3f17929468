//! The plugin starts the containers itself, and nobody can tell.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};
use tokio::time::sleep;

use super::{HOOKS_GIVE_UP, under};
use crate::plugin::Phase;
use crate::pod::LivePod;
use crate::recorder::Snapshot;
use crate::restarted::{Before, TWO_RELISTS};
use crate::scenario::{Company, Scenario, Skipped, scenarios, telling_nodes_apart};
use crate::shape::{RestartPolicy, Shape};
use crate::stage::Stage;
use crate::under_way::UnderWay;
use crate::wait::{self, PATIENCE};
use RestartPolicy::{Always, Never, OnFailure};

/// Where a node's log collectors look.
const LOG_LINKS: &str = "/var/log/containers";

pub(crate) fn scenarios() -> Vec<Scenario> {
    let all = [Always, OnFailure, Never];
    let mut scenarios = [
        under(&all, "of_one_container_is_replayed", one),
        under(&all, "of_three_containers_is_replayed", three),
        under(&all, "with_inits_and_sidecars_is_replayed", all_kinds),
        under(&all, "is_replayed_after_an_exit_with_0", after_success),
        under(&[Never, Always], "with_limits_is_replayed", limited),
        under(
            &[Never, Always],
            "that_was_resized_is_the_kubelets",
            resized,
        ),
        under(
            &[Never, Always],
            "whose_init_container_has_another_image_by_now_is_the_kubelets",
            other_image,
        ),
        under(
            &[Never, Always],
            "that_requests_other_memory_is_the_kubelets",
            requests_other_memory,
        ),
        under(
            &[Never, Always],
            "whose_image_has_another_name_by_now_is_the_kubelets",
            moved_image,
        ),
        telling_nodes_apart(under(
            &[Never, Always],
            "with_an_image_volume_is_replayed",
            image_volume,
        )),
        under(
            &[Never, Always],
            "has_its_hosts_as_after_a_start_by_the_kubelet",
            writes_to_hosts,
        ),
        under(
            &[Never, Always],
            "that_has_written_to_its_hosts_is_the_kubelets",
            has_written_to_hosts,
        ),
        under(
            &all,
            "whose_init_container_takes_long_is_the_kubelets",
            slow_init,
        ),
        under(
            &all,
            "whose_init_container_is_slow_this_time_is_replayed",
            slower_init,
        ),
        under(
            &[Never, Always],
            "with_variables_of_others_is_the_kubelets",
            variables,
        ),
        under(
            &[Never, Always],
            "with_variables_of_its_own_is_replayed",
            own_variables,
        ),
        under(
            &[Never, Always],
            "whose_variables_would_be_others_by_now_is_the_kubelets",
            changed_variables,
        ),
    ]
    .concat();
    scenarios.extend(scenarios![Shared:
        replay_gives_each_attempt_a_termination_message_of_its_own,
        replay_can_be_forced_on_pods_with_variables_of_others,
        never_pod_whose_init_container_fails_in_the_replay_fails,
        always_pod_whose_init_container_fails_in_the_replay_comes_up,
    ]);
    for away in [100, 1000, 20_000] {
        for (policy, name) in [(Never, "never"), (Always, "always")] {
            let name =
                format!("{name}_pod_survives_a_plugin_away_for_{away}ms_while_it_is_replayed");
            scenarios.push(Scenario::new(name, Company::Alone, move |stage| {
                plugin_dies(stage, policy, Duration::from_millis(away))
            }));
        }
    }
    scenarios
}

fn replayed(shape: Shape) -> Shape {
    shape.started_by("Auto")
}

async fn one(stage: Stage, shape: Shape) -> Result<()> {
    is_replayed(stage, shape.regular("trainer"), 42).await
}

async fn three(stage: Stage, shape: Shape) -> Result<()> {
    let shape = shape.regular("trainer").regular("logger").regular("server");
    is_replayed(stage, shape, 42).await
}

async fn all_kinds(stage: Stage, shape: Shape) -> Result<()> {
    let shape = shape.init("fetch").sidecar("proxy").init("check");
    let shape = shape.sidecar("mesh").regular("trainer");
    is_replayed(stage, shape.regular("logger"), 42).await
}

async fn after_success(stage: Stage, shape: Shape) -> Result<()> {
    is_replayed(stage, shape.regular("trainer").regular("logger"), 0).await
}

fn limits(cpu: &str) -> Value {
    json!({"limits": {"cpu": cpu, "memory": "64Mi"}, "requests": {"cpu": "10m", "memory": "32Mi"}})
}

/// Its limit, in microseconds of each tenth of a second, as the container itself finds it in its cgroup.
const NOTE_LIMIT: &str = r#"
v1=/sys/fs/cgroup/cpu/cpu.cfs_quota_us
say "note $(cat $v1 2>/dev/null || cut -d ' ' -f 1 /sys/fs/cgroup/cpu.max)"
"#;

fn with_limits(shape: Shape) -> Shape {
    let shape = shape.regular("trainer").field("resources", limits("200m"));
    let shape = shape.at_first(NOTE_LIMIT).regular("logger");
    replayed(shape.restarts_all("trainer", 42))
}

/// Of the only attempt since.
fn limit(pod: &LivePod, before: &Before) -> Result<String> {
    let mut notes = pod.notes_since(before)?;
    ensure!(notes.len() == 1, "limits were noted: {notes:?}");
    Ok(notes.remove(0))
}

async fn limited(stage: Stage, shape: Shape) -> Result<()> {
    let pod = stage.running(with_limits(shape)).await?;
    let before = has_replayed(&stage, &pod, 42).await?;
    let limit = limit(&pod, &before)?;
    ensure!(limit == "20000", "its limit is {limit}");
    Ok(())
}

/// The kubelet sets at the start what the pod's spec says by then.
async fn resized(stage: Stage, shape: Shape) -> Result<()> {
    was_resized(stage, shape, limits("300m"), "30000").await
}

/// Nothing but the score for the kernel's OOM killer goes by it, and of that the runtime tells nothing.
async fn requests_other_memory(stage: Stage, shape: Shape) -> Result<()> {
    let mut resources = limits("200m");
    resources["requests"]["memory"] = json!("40Mi");
    was_resized(stage, shape, resources, "20000").await
}

async fn was_resized(stage: Stage, shape: Shape, resources: Value, quota: &str) -> Result<()> {
    let pod = stage.running(with_limits(shape)).await?;
    let pods = stage.node.pods();
    let container = json!({"name": "trainer", "resources": resources});
    let patch = Patch::Strategic(json!({"spec": {"containers": [container]}}));
    let params = PatchParams::default();
    pods.patch_subresource("resize", &pod.name, &params, &patch)
        .await?;
    wait::until("the kubelet has resized it", PATIENCE, async || {
        let status = pods.get_status(&pod.name).await?.status.unwrap_or_default();
        let mut containers = status.container_statuses.into_iter().flatten();
        let trainer = containers.find(|it| it.name == "trainer");
        let now = json!(trainer.and_then(|it| it.resources));
        Ok((now == resources)
            .then_some(())
            .ok_or_else(|| now.to_string()))
    })
    .await?;
    let before = Before::of(&pod).await?;
    pod.restarts_all("trainer", 42).await?;
    pod.restart_ended("no replay: trainer was resized")?;
    let limit = limit(&pod, &before)?;
    ensure!(limit == quota, "its limit is {limit}");
    Ok(())
}

/// It does not run, so that the kubelet does nothing about that before it is to start it.
async fn other_image(stage: Stage, shape: Shape) -> Result<()> {
    let shape = shape.init("fetch").regular("trainer").regular("logger");
    let pod = stage
        .running(replayed(shape.restarts_all("trainer", 42)))
        .await?;
    let other = "localhost/reprise/other:1";
    stage.node.name_image(&stage.node.image, other).await?;
    let container = json!({"name": "fetch", "image": other});
    pod.patch(&json!({"spec": {"initContainers": [container]}}))
        .await?;
    // The plugin is to have heard of it.
    sleep(TWO_RELISTS).await;
    pod.restarts_all("trainer", 42).await?;
    pod.restart_ended("no replay: fetch has another image by now")
}

/// The kubelet would find the other one.
async fn moved_image(stage: Stage, shape: Shape) -> Result<()> {
    let node = &stage.node;
    let name = format!("localhost/reprise/{}:1", stage.name());
    node.name_image(&node.image, &name).await?;
    let shape = shape
        .regular("trainer")
        .field("image", json!(name))
        .at_first("[ -e /other ] && say 'note other'")
        .regular("logger");
    let pod = stage
        .running(replayed(shape.restarts_all("trainer", 42)))
        .await?;
    node.name_image(&node.other_image, &name).await?;
    // The runtime is to have heard of it.
    sleep(TWO_RELISTS).await;
    let before = Before::of(&pod).await?;
    pod.restarts_all("trainer", 42).await?;
    pod.restart_ended("no replay: trainer has another image by now")?;
    let notes = pod.notes_since(&before)?;
    ensure!(notes == ["other"], "{notes:?}");
    Ok(())
}

async fn image_volume(stage: Stage, shape: Shape) -> Result<()> {
    if !stage.node.mounts_images() {
        bail!(Skipped("this kubelet mounts no images"));
    }
    let image = json!({"reference": stage.node.image, "pullPolicy": "Never"});
    let shape = shape
        .volume("files", json!({"image": image}))
        .init("fetch")
        .regular("trainer")
        .at_first("[ -x /files/bin/busybox ] && say 'note mounted'")
        .regular("logger");
    let pod = stage
        .running(replayed(shape.restarts_all("trainer", 42)))
        .await?;
    let before = pod.restarts_all_since("trainer", 42).await?;
    pod.restart_ended("all containers run again, by replay")?;
    let notes = pod.notes_since(&before)?;
    ensure!(notes == ["mounted"], "{notes:?}");
    Ok(())
}

async fn writes_to_hosts(stage: Stage, shape: Shape) -> Result<()> {
    let shape = shape
        .init("fetch")
        .at_first("echo 10.0.0.9 peer >>/etc/hosts");
    let shape = shape.regular("trainer").regular("logger");
    let pod = stage
        .running(replayed(shape.restarts_all("trainer", 42)))
        .await?;
    let file = stage.node.hosts_file(&pod.uid);
    let hosts = fs::read_to_string(&file)?;
    ensure!(!hosts.contains("peer"), "the kubelet left it: {hosts}");
    pod.restarts_all("trainer", 42).await?;
    pod.restart_ended("all containers run again, by replay")?;
    let now = fs::read_to_string(&file)?;
    ensure!(now == hosts, "{now}");
    Ok(())
}

async fn has_written_to_hosts(stage: Stage, shape: Shape) -> Result<()> {
    let shape = shape.regular("logger").regular("trainer");
    let shape = shape
        .at_first("grep -q peer /etc/hosts && say \"note peer\"; echo 10.0.0.9 peer >>/etc/hosts");
    let pod = stage
        .running(replayed(shape.restarts_all("trainer", 42)))
        .await?;
    let before = Before::of(&pod).await?;
    pod.restarts_all("trainer", 42).await?;
    pod.restart_ended("no replay: a container has written to /etc/hosts")?;
    let notes = pod.notes_since(&before)?;
    ensure!(notes.is_empty(), "lines pile up: {notes:?}");
    Ok(())
}

async fn is_replayed(stage: Stage, shape: Shape, code: i32) -> Result<()> {
    let shape = replayed(shape.restarts_all("trainer", code));
    let pod = stage.running(shape).await?;
    has_replayed(&stage, &pod, code).await?;
    Ok(())
}

/// What is kept of each container, and told of it, is looked at after every replay.
async fn has_replayed(stage: &Stage, pod: &LivePod, code: i32) -> Result<Before> {
    let before = pod.restarts_all_since("trainer", code).await?;
    pod.restart_ended("all containers run again, by replay")?;
    for container in pod.containers().await? {
        has_log_link(stage, pod, container.name(), &container.id)?;
    }
    Ok(before)
}

fn has_log_link(stage: &Stage, pod: &LivePod, name: &str, id: &str) -> Result<()> {
    let namespace = stage.node.pods().namespace().unwrap_or_default().to_owned();
    let link = format!("{}_{namespace}_{name}-{id}.log", pod.name);
    let log = fs::read_to_string(Path::new(LOG_LINKS).join(&link))
        .with_context(|| format!("no log of {name} at {link}"))?;
    ensure!(log.contains(&format!("{name} begins")), "{link}: {log}");
    Ok(())
}

/// Longer than is waited for.
async fn slow_init(stage: Stage, shape: Shape) -> Result<()> {
    let shape = shape.init("fetch").at_first("sleep 3");
    let shape = shape.regular("trainer").restarts_all("trainer", 42);
    let pod = stage.running(replayed(shape)).await?;
    pod.restarts_all("trainer", 42).await?;
    pod.restart_ended("no replay: the init containers took ")
}

/// It outlasts the hold.
async fn slower_init(stage: Stage, shape: Shape) -> Result<()> {
    let wait_the_second_time = "if [ -e /ev/slow ]; then sleep 6; fi; : >/ev/slow";
    let shape = shape.init("fetch").at_first(wait_the_second_time);
    let shape = shape.regular("trainer").regular("logger");
    let shape = replayed(shape.restarts_all("trainer", 42));
    let restart = UnderWay::begin(&stage, shape).await?;
    let UnderWay { pod, before } = &restart;
    restart.until_over().await?;
    pod.has_recovered(before).await?;
    pod.restart_ended("by replay")
}

/// The kubelet reads the variables anew.
async fn variables(stage: Stage, shape: Shape) -> Result<()> {
    let pod = with_variable(&stage, shape, "Auto").await?;
    let before = Before::of(&pod).await?;
    pod.restarts_all("trainer", 42).await?;
    pod.restart_ended("no replay: trainer has variables from objects that may have changed")?;
    let notes = pod.notes_since(&before)?;
    ensure!(notes == ["new"], "{notes:?}");
    Ok(())
}

async fn replay_can_be_forced_on_pods_with_variables_of_others(stage: Stage) -> Result<()> {
    let pod = with_variable(&stage, Shape::never(), "Replay").await?;
    let before = pod.restarts_all_since("trainer", 42).await?;
    pod.restart_ended("by replay")?;
    let notes = pod.notes_since(&before)?;
    ensure!(notes == ["old"], "{notes:?}");
    Ok(())
}

/// A pod with a variable from a `ConfigMap` that has changed since.
async fn with_variable(stage: &Stage, shape: Shape, start: &str) -> Result<Arc<LivePod>> {
    let name = stage.name();
    let object = json!({"metadata": {"name": name}, "data": {"word": "old"}});
    stage.create::<ConfigMap>(object).await?;
    let source = json!({"configMapKeyRef": {"name": name, "key": "word"}});
    let shape = shape
        .regular("trainer")
        .field("env", json!([{"name": "WORD", "valueFrom": source}]))
        .at_first("say \"note $WORD\"")
        .regular("logger")
        .restarts_all("trainer", 42)
        .started_by(start);
    let pod = stage.running(shape).await?;
    let patch = Patch::Merge(json!({"data": {"word": "new"}}));
    let objects = stage.node.config_maps();
    objects
        .patch(&name, &PatchParams::default(), &patch)
        .await?;
    Ok(pod)
}

async fn own_variables(stage: Stage, shape: Shape) -> Result<()> {
    let pod = with_own_variables(&stage, shape, json!({"example.com/other": "new"})).await?;
    let before = has_replayed(&stage, &pod, 42).await?;
    let notes = pod.notes_since(&before)?;
    ensure!(notes == ["old,,"], "{notes:?}");
    Ok(())
}

async fn changed_variables(stage: Stage, shape: Shape) -> Result<()> {
    let pod = with_own_variables(&stage, shape, json!({"example.com/word": "new"})).await?;
    let before = Before::of(&pod).await?;
    pod.restarts_all("trainer", 42).await?;
    pod.restart_ended("no replay: trainer has another value of WORD by now")?;
    let notes = pod.notes_since(&before)?;
    ensure!(notes == ["new,,"], "{notes:?}");
    Ok(())
}

/// A pod with variables from its annotations and labels, of which these have changed since.
async fn with_own_variables(
    stage: &Stage,
    shape: Shape,
    annotations: Value,
) -> Result<Arc<LivePod>> {
    let variable = |name: &str, path: &str| json!({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}});
    let env = json!([
        variable("WORD", "metadata.annotations['example.com/word']"),
        variable("NONE", "metadata.annotations['example.com/none']"),
        variable("RANK", "metadata.labels['example.com/rank']"),
    ]);
    let shape = shape
        .annotation("example.com/word", "old")
        .annotation("example.com/other", "old")
        .regular("trainer")
        .field("env", env)
        .at_first("say \"note $WORD,$NONE,$RANK\"")
        .regular("logger");
    let pod = stage
        .running(replayed(shape.restarts_all("trainer", 42)))
        .await?;
    pod.patch(&json!({"metadata": {"annotations": annotations}}))
        .await?;
    // A sync that waits for a relist goes by the pod as it was before (`podWorkerLoop`, `pod_workers.go`).
    sleep(TWO_RELISTS).await;
    Ok(pod)
}

async fn replay_gives_each_attempt_a_termination_message_of_its_own(stage: Stage) -> Result<()> {
    let shape = Shape::always()
        .regular("trainer")
        .at_first("[ -s /dev/termination-log ] && say 'note stale'; echo $$ >/dev/termination-log")
        .regular("logger")
        .restarts_all("trainer", 42);
    let pod = stage.running(replayed(shape)).await?;
    let before = Before::of(&pod).await?;
    pod.restarts_all("trainer", 42).await?;
    pod.restart_ended("by replay")?;
    let notes = pod.notes_since(&before)?;
    ensure!(
        notes.is_empty(),
        "the new attempt found the message of the old one"
    );
    Ok(())
}

/// It succeeds the first time.
fn with_failing_init(shape: Shape, again: &'static str) -> Shape {
    let shape = shape.init("fetch").at_first(again);
    replayed(shape.regular("trainer").restarts_all("trainer", 42))
}

async fn never_pod_whose_init_container_fails_in_the_replay_fails(stage: Stage) -> Result<()> {
    let fails = "[ ! -e /ev/ran ] || exit 3; : >/ev/ran";
    let pod = stage
        .running(with_failing_init(Shape::never(), fails))
        .await?;
    pod.exit("trainer", 42).await?;
    pod.until_phase("Failed").await?;
    let ran_again = |now: &Snapshot| {
        let fetch = &now.containers["fetch"];
        (fetch.state != "exit 3 (Error)").then(|| fetch.state.clone())
    };
    let what = "its init container has failed the second time";
    pod.recorder.until(what, PATIENCE, ran_again).await?;
    Ok(())
}

async fn always_pod_whose_init_container_fails_in_the_replay_comes_up(stage: Stage) -> Result<()> {
    let fails_once = "n=$(cat /ev/n 2>/dev/null); echo 1$n >/ev/n; [ \"$n\" != 1 ] || exit 3";
    let shape = with_failing_init(Shape::always(), fails_once);
    let restart = UnderWay::begin(&stage, shape).await?;
    let UnderWay { pod, before } = &restart;
    restart.until_over().await?;
    pod.has_recovered(before).await?;
    pod.restart_ended("no replay: fetch failed")
}

/// Its init container is at work then.
async fn plugin_dies(stage: Stage, policy: RestartPolicy, away: Duration) -> Result<()> {
    let shape = Shape::new(policy).init("fetch").at_first("sleep 1");
    let shape = shape.sidecar("proxy").regular("trainer").regular("logger");
    let shape = replayed(shape.restarts_all("trainer", 42));
    let restart = UnderWay::begin(&stage, shape).await?;
    ensure!(
        restart.reaches(Phase::Replay).await?,
        "the restart was over before it was seen to be replayed"
    );
    stage.plugin.kill().await?;
    sleep(away).await;
    stage.plugin.start().await?;
    stage.plugin.until_ready(1).await?;
    restart.until_over().await?;
    let UnderWay { pod, before } = &restart;
    // A Never pod's init container is seen when nobody is there to hide its end.
    if policy == Never && away > HOOKS_GIVE_UP {
        return pod.has_recovered_or_failed(before).await;
    }
    pod.has_recovered(before).await
}
