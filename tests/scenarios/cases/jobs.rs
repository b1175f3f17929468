//! Pods that belong to a controller, which would replace them if it noticed.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::batch::v1::{Job, JobCondition};
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::runtime::watcher;
use serde_json::{Value, json};

use crate::history::History;
use crate::pod::LivePod;
use crate::restarted::Before;
use crate::scenario::{Scenario, scenarios};
use crate::shape::{Shape, rule};
use crate::stage::Stage;

pub(crate) fn scenarios() -> Vec<Scenario> {
    scenarios![Shared:
        jobs_pod_restarts_and_its_failure_policy_sees_the_last_exit_alone,
        job_that_forgives_no_failure_outlives_two_restarts,
        job_whose_container_restarts_alone_completes,
        jobs_pod_restarts_by_the_jobs_name,
        jobs_pod_flushes_what_it_has_before_it_restarts,
        deployments_pod_keeps_its_endpoint,
    ]
}

/// A Job of one pod, which runs.
struct LiveJob {
    name: String,
    pod: Arc<LivePod>,
    history: History<Job>,
    mark: usize,
}

impl LiveJob {
    /// `fields` come on top of its spec.
    async fn begin(stage: &Stage, shape: Shape, fields: &Value) -> Result<Self> {
        let name = stage.name();
        let selection = watcher::Config::default().fields(&format!("metadata.name={name}"));
        let history = History::start(stage.node.objects(), selection);
        let mut job = json!({
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": name},
            "spec": {"template": template(stage, &shape, &name)?},
        });
        for (field, value) in fields.as_object().into_iter().flatten() {
            job["spec"][field] = value.clone();
        }
        stage.create::<Job>(job).await?;
        let pod = stage.adopt(shape, &format!("app={name}")).await?;
        history
            .until("the Job counts its pod", |job| {
                counts(job) == (1, 0) && is_ready(job)
            })
            .await?;
        let mark = history.mark();
        Ok(Self {
            name,
            pod,
            history,
            mark,
        })
    }

    /// One active pod, none that failed, all the time.
    fn is_untouched(&self) -> Result<()> {
        for job in self.history.since(self.mark) {
            ensure!(counts(&job) == (1, 0), "the Job was seen {:?}", job.status);
        }
        Ok(())
    }
}

/// Pods that are active and that have failed.
fn counts(job: &Job) -> (i32, i32) {
    let status = job.status.as_ref();
    let count = |count: Option<i32>| count.unwrap_or(0);
    status.map_or((0, 0), |status| {
        (count(status.active), count(status.failed))
    })
}

fn is_ready(job: &Job) -> bool {
    let status = job.status.as_ref();
    status.is_some_and(|status| status.ready == Some(1))
}

fn failure(job: &Job) -> Option<&JobCondition> {
    let conditions = job.status.as_ref()?.conditions.as_ref()?;
    conditions
        .iter()
        .find(|condition| condition.type_ == "Failed" && condition.status == "True")
}

/// The shape as a pod template, with the label `app` to know its pods by.
pub(super) fn template(stage: &Stage, shape: &Shape, app: &str) -> Result<Value> {
    let shape = shape.clone().started_by_default(&stage.plugin.start);
    let pod = shape.manifest(app, &stage.node.name, &stage.node.image)?;
    Ok(json!({
        "metadata": {"labels": {"app": app}, "annotations": pod.metadata.annotations},
        "spec": pod.spec,
    }))
}

async fn jobs_pod_restarts_and_its_failure_policy_sees_the_last_exit_alone(
    stage: Stage,
) -> Result<()> {
    let shape = Shape::never()
        .init("fetch")
        .regular("trainer")
        .restarts_all("trainer", 42);
    let on_seven = json!({"containerName": "trainer", "operator": "In", "values": [7]});
    let policy = json!({"rules": [{"action": "FailJob", "onExitCodes": on_seven}]});
    let job = LiveJob::begin(&stage, shape, &json!({"podFailurePolicy": policy})).await?;
    job.pod.restarts_all("trainer", 42).await?;
    job.is_untouched()?;
    job.pod.exit("trainer", 7).await?;
    let failed = |job: &Job| failure(job).is_some();
    let now = job.history.until("the Job has failed", failed).await?;
    ensure!(counts(&now) == (0, 1), "the Job is {:?}", now.status);
    let failure = failure(&now).context("it has no condition Failed")?;
    let message = failure.message.as_deref().unwrap_or_default();
    ensure!(
        failure.reason.as_deref() == Some("PodFailurePolicy") && message.contains("exit code 7"),
        "it failed for the wrong reason: {failure:?}"
    );
    Ok(())
}

async fn job_that_forgives_no_failure_outlives_two_restarts(stage: Stage) -> Result<()> {
    let shape = Shape::never()
        .regular("trainer")
        .regular("logger")
        .restarts_all("trainer", 42);
    let job = LiveJob::begin(&stage, shape, &json!({"backoffLimit": 0})).await?;
    job.pod.restarts_all("trainer", 42).await?;
    job.pod.restarts_all("trainer", 42).await?;
    job.is_untouched()
}

async fn jobs_pod_restarts_by_the_jobs_name(stage: Stage) -> Result<()> {
    let shape = Shape::never()
        .regular("trainer")
        .restarts_all("trainer", 42);
    let job = LiveJob::begin(&stage, shape, &json!({"backoffLimit": 0})).await?;
    let before = Before::of(&job.pod).await?;
    let target = format!("job/{}", job.name);
    let done = stage.ask_for_restart(&[&target, "--wait"]).await?;
    ensure!(done.status.success(), "{done:?}");
    job.pod.has_restarted(&before).await?;
    job.is_untouched()
}

/// A checkpoint takes longer to write than any exit is held.
async fn jobs_pod_flushes_what_it_has_before_it_restarts(stage: Stage) -> Result<()> {
    let shape = Shape::never()
        .init("fetch")
        .regular("watcher")
        .regular("trainer")
        .on_term(r#"sleep 12; echo 7 >/ev/checkpoint; say "note flushed"; exit 42"#)
        .at_first("[ -e /ev/checkpoint ] && say 'note resumed'")
        .grace_period_seconds(30)
        .restarts_pod("watcher", 88);
    let job = LiveJob::begin(&stage, shape, &json!({"backoffLimit": 0})).await?;
    let before = job.pod.restarted("watcher", 88).await?;
    job.is_untouched()?;
    let notes = job.pod.notes_since(&before)?;
    ensure!(notes == ["flushed", "resumed"], "{notes:?}");
    Ok(())
}

async fn job_whose_container_restarts_alone_completes(stage: Stage) -> Result<()> {
    let shape = Shape::never()
        .init("fetch")
        .regular("trainer")
        .rules("trainer", &json!([rule("Restart", "In", &[42])]));
    let job = LiveJob::begin(&stage, shape, &json!({"backoffLimit": 0})).await?;
    job.pod.restarts_alone("trainer", 42).await?;
    job.is_untouched()?;
    job.pod.exit("trainer", 0).await?;
    let succeeded = |job: &Job| job.status.as_ref().and_then(|it| it.succeeded) == Some(1);
    let now = job.history.until("the Job completes", succeeded).await?;
    ensure!(counts(&now).1 == 0, "the Job is {:?}", now.status);
    Ok(())
}

async fn deployments_pod_keeps_its_endpoint(stage: Stage) -> Result<()> {
    let shape = Shape::always()
        .init("fetch")
        .regular("trainer")
        .regular("logger")
        .restarts_all("trainer", 42);
    let name = stage.name();
    let of_service = format!("kubernetes.io/service-name={name}");
    let slices = History::start(
        stage.node.objects::<EndpointSlice>(),
        watcher::Config::default().labels(&of_service),
    );
    stage
        .create::<Service>(json!({
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": name},
            "spec": {"selector": {"app": name}, "ports": [{"port": 80}]},
        }))
        .await?;
    stage
        .create::<Deployment>(json!({
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": name},
            "spec": {
                "selector": {"matchLabels": {"app": name}},
                "template": template(&stage, &shape, &name)?,
            },
        }))
        .await?;
    let pod = stage.adopt(shape, &format!("app={name}")).await?;
    let ip = pod.recorder.current().ip;
    let ready = vec![(ip.clone(), true)];
    let is_ready = |slice: &EndpointSlice| endpoints(slice) == ready;
    slices
        .until("the pod is a ready endpoint", is_ready)
        .await?;
    let mark = slices.mark();
    pod.restarts_all("trainer", 42).await?;
    slices.until("the pod is ready again", is_ready).await?;
    let before = Before::of(&pod).await?;
    let target = format!("deployment/{name}");
    let done = stage.ask_for_restart(&[&target, "--now", "--wait"]).await?;
    ensure!(done.status.success(), "{done:?}");
    pod.has_restarted(&before).await?;
    slices.until("the pod is ready again", is_ready).await?;
    for slice in slices.since(mark) {
        let seen = endpoints(&slice);
        ensure!(
            seen.len() == 1 && seen[0].0 == ip,
            "endpoints were seen other than {ip}: {seen:?}"
        );
    }
    Ok(())
}

/// Addresses, and whether they are ready.
fn endpoints(slice: &EndpointSlice) -> Vec<(String, bool)> {
    let endpoints = slice.endpoints.iter().flatten();
    endpoints
        .flat_map(|endpoint| {
            let conditions = endpoint.conditions.as_ref();
            let ready = conditions.is_some_and(|conditions| conditions.ready == Some(true));
            endpoint.addresses.iter().map(move |it| (it.clone(), ready))
        })
        .collect()
}
