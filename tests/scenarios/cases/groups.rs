//! Groups of pods that restart together, by `JobSet`'s own controller and agents: whichever container fails, its pod restarts;
//! the agent in that pod then begins an attempt of the group, and the agents in the others exit, so that those restart as well.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use futures::future::try_join_all;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{ConfigMap, ServiceAccount};
use k8s_openapi::api::rbac::v1::{Role, RoleBinding};
use serde_json::{Value, json};

use super::jobs::template;
use crate::evidence::Deed;
use crate::jobset::{self, Controller, Door};
use crate::pod::LivePod;
use crate::restarted::Before;
use crate::scenario::{Scenario, of_containerd, scenarios, taking_long, telling_nodes_apart};
use crate::shape::{Shape, rule};
use crate::stage::Stage;
use crate::wait::{self, PATIENCE};

/// Where an agent looks for its namespace.
const ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
const AGENT: &str = "/jobset/in-place-restart-agent";
/// Beside what the scenario looks at: the container ends as the agent does.
const AGENT_BESIDE: &str = r#"{ /jobset/in-place-restart-agent; echo $? >"/ev/$name"; } &"#;

pub(crate) fn scenarios() -> Vec<Scenario> {
    // Kubelets that could restart the pods themselves are none that need it.
    let mut scenarios = telling_nodes_apart(scenarios![Shared:
        jobset_whose_agents_start_the_workers_is_replayed,
    ]);
    scenarios.extend(taking_long(scenarios![Shared:
        jobset_whose_agents_are_sidecars_waits_for_all_of_them,
    ]));
    of_containerd("nothing is replayed on CRI-O", scenarios)
}

async fn jobset_whose_agents_start_the_workers_is_replayed(stage: Stage) -> Result<()> {
    let group = Group::begin(&stage, Shape::on_failure().regular("worker"), |template| {
        let worker = &mut template["spec"]["containers"][0];
        let script = worker["command"][2].take();
        worker["command"] = json!([AGENT]);
        let mut variables = variables();
        variables.extend([
            json!({"name": "WORKER_COMMAND", "value": script}),
            json!({"name": "SHELL", "value": "/bin/sh"}),
        ]);
        worker["env"] = json!(variables);
    })
    .await?;
    for (failing, attempt) in [(0, 1), (1, 2)] {
        group.restarts(failing, attempt, "by replay").await?;
    }
    Ok(())
}

async fn jobset_whose_agents_are_sidecars_waits_for_all_of_them(stage: Stage) -> Result<()> {
    let barrier = json!({
        "httpGet": {"path": "/barrier-is-down", "port": 8081},
        "periodSeconds": 1,
        "failureThreshold": 600,
    });
    let shape = Shape::on_failure()
        .sidecar("agent")
        .field("env", json!(variables()))
        .field("startupProbe", barrier)
        .at_first(AGENT_BESIDE)
        .regular("worker");
    let group = Group::begin(&stage, shape, |_| ()).await?;
    let first = "no replay: agent has a startup probe";
    // The kubelet's back-off may be due as well.
    let later = "no replay: ";
    for (failing, attempt, why) in [(0, 1, first), (1, 2, later)] {
        let before = group.restarts(failing, attempt, why).await?;
        group.workers_waited(&before)?;
    }
    Ok(())
}

fn variables() -> Vec<Value> {
    let from = |field: &str| json!({"fieldRef": {"fieldPath": field}});
    let group = from("metadata.annotations['jobset.sigs.k8s.io/jobset-name']");
    vec![
        json!({"name": "JOBSET_NAME", "valueFrom": group}),
        json!({"name": "POD_NAME", "valueFrom": from("metadata.name")}),
        // Where pods get no token by themselves, nor the API server's address.
        json!({"name": "KUBECONFIG", "value": format!("{ACCOUNT}/kubeconfig")}),
    ]
}

/// A `JobSet` of two pods, which run.
struct Group {
    stage: Stage,
    name: String,
    pods: [Arc<LivePod>; 2],
    _controller: Arc<Controller>,
    _door: Door,
}

impl Group {
    /// `change` makes of the pod template what the shape cannot say.
    async fn begin(stage: &Stage, shape: Shape, change: impl FnOnce(&mut Value)) -> Result<Self> {
        let node = &stage.node;
        let controller = Controller::of(node).await?;
        let door = Door::open(node, &format!("{ACCOUNT}/token")).await?;
        let name = stage.name();
        have_account(stage, &name, &door).await?;

        let rules = json!([rule("RestartAllContainers", "NotIn", &[0])]);
        let mounts = [("ev", "/ev"), ("jobset", "/jobset"), ("account", ACCOUNT)]
            .map(|(volume, path)| json!({"name": volume, "mountPath": path}));
        let shape = shape
            .annotation("restart-rules.reprise.dev/pod", rules.to_string())
            .started_by("Auto")
            .spec("serviceAccountName", json!(name))
            .volume("jobset", json!({"hostPath": {"path": node.jobset}}))
            .volume("account", account(&name));
        let mut template = template(stage, &shape, &name)?;
        for kind in ["initContainers", "containers"] {
            for container in template["spec"][kind].as_array_mut().into_iter().flatten() {
                container["volumeMounts"] = json!(mounts);
            }
        }
        change(&mut template);
        let job = json!({
            "completionMode": "Indexed",
            "completions": 2,
            "parallelism": 2,
            "backoffLimit": i32::MAX,
            "podReplacementPolicy": "Failed",
            "template": template,
        });
        let jobset = json!({
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {"name": name},
            // Much of it is what its webhook would add.
            "spec": {
                "failurePolicy": {"maxRestarts": 2, "restartStrategy": "InPlaceRestart"},
                "successPolicy": {"operator": "All"},
                "startupPolicy": {"startupPolicyOrder": "AnyOrder"},
                "network": {"enableDNSHostnames": false},
                "replicatedJobs": [{"name": "w", "replicas": 1, "template": {"spec": job}}],
            },
        });
        stage.create_of(jobset::kind(), jobset).await?;
        let pod = async |index: u32| {
            let index = format!("batch.kubernetes.io/job-completion-index={index}");
            stage
                .adopt(shape.clone(), &format!("app={name},{index}"))
                .await
        };
        let pods = [pod(0).await?, pod(1).await?];
        stage.takes_along::<Job>(format!("{name}-w-0"));
        let group = Self {
            stage: stage.clone(),
            name,
            pods,
            _controller: controller,
            _door: door,
        };
        group.has_begun(0).await?;
        Ok(group)
    }

    /// Lets the worker of one pod fail: both pods restart in place, once, which ends as told.
    async fn restarts(&self, failing: usize, attempt: u64, how: &str) -> Result<[Before; 2]> {
        let [first, second] = &self.pods;
        let before = [Before::of(first).await?, Before::of(second).await?];
        self.pods[failing].exit("worker", 1).await?;
        // A worker that an agent starts begins after its container.
        let pods = || self.pods.iter().zip(&before);
        try_join_all(pods().map(|(pod, before)| pod.until_begun_again(before))).await?;
        try_join_all(pods().map(|(pod, before)| pod.has_restarted(before))).await?;
        for pod in &self.pods {
            pod.restart_ended(how)?;
        }
        self.has_begun(attempt).await?;
        Ok(before)
    }

    /// The controller counts that attempt as the one that all pods have begun, and none that made pods anew.
    async fn has_begun(&self, attempt: u64) -> Result<()> {
        let jobsets = self.stage.node.objects_of(&jobset::kind());
        let status = wait::until("all agents have begun the attempt", PATIENCE, async || {
            let status = jobsets.get(&self.name).await?.data["status"].take();
            let begun = status["currentInPlaceRestartAttempt"] == json!(attempt);
            Ok(if begun {
                Ok(status)
            } else {
                Err(status.to_string())
            })
        })
        .await?;
        let previous = status["previousInPlaceRestartAttempt"].as_u64();
        let made_anew = status["restarts"].as_u64().unwrap_or(0);
        ensure!(
            previous == attempt.checked_sub(1) && made_anew == 0,
            "{status}"
        );
        Ok(())
    }

    /// No worker began before the agents of both pods had.
    fn workers_waited(&self, before: &[Before; 2]) -> Result<()> {
        let mut began = [Vec::new(), Vec::new()];
        for (pod, before) in self.pods.iter().zip(before) {
            for entry in pod.evidence_since(before)? {
                if entry.deed == Deed::Began {
                    began[usize::from(entry.container == "worker")].push(entry.at);
                }
            }
        }
        let [agents, workers] = &began;
        let (last, first) = (agents.iter().max(), workers.iter().min());
        let (last, first) = (last.context("no agent")?, first.context("no worker")?);
        ensure!(last < first, "a worker did not wait: {began:?}");
        Ok(())
    }
}

/// Who the agents are, and what they may do.
async fn have_account(stage: &Stage, name: &str, door: &Door) -> Result<()> {
    let object = |api: &str, kind: &str| json!({"apiVersion": api, "kind": kind, "metadata": {"name": name}});
    let mut kubeconfig = object("v1", "ConfigMap");
    kubeconfig["data"] = json!({"kubeconfig": door.kubeconfig});
    let mut role = object("rbac.authorization.k8s.io/v1", "Role");
    role["rules"] = json!([
        {"apiGroups": ["jobset.x-k8s.io"], "resources": ["jobsets"], "verbs": ["get", "list", "watch"]},
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["patch"]},
    ]);
    let mut binding = object("rbac.authorization.k8s.io/v1", "RoleBinding");
    binding["roleRef"] =
        json!({"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name});
    binding["subjects"] = json!([{"kind": "ServiceAccount", "name": name, "namespace": "default"}]);
    stage.create::<ConfigMap>(kubeconfig).await?;
    stage
        .create::<ServiceAccount>(object("v1", "ServiceAccount"))
        .await?;
    stage.create::<Role>(role).await?;
    stage.create::<RoleBinding>(binding).await
}

/// What a pod would have of its account, but for the kubeconfig.
fn account(name: &str) -> Value {
    let namespace = json!({"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}});
    json!({"projected": {"sources": [
        {"serviceAccountToken": {"path": "token"}},
        {"configMap": {"name": name}},
        {"downwardAPI": {"items": [namespace]}},
    ]}})
}
