//! Pods that crash for ever are deleted, so that their controllers make new ones; and those that are not.
//!
//! The kubelet's back-off is a second at most, and so are the plugin's own times, but its numbers are those of a cluster.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment, StatefulSet};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Event, Pod};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding};
use k8s_openapi::jiff::Timestamp;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::runtime::watcher;
use kube::{Resource, ResourceExt};
use reprise::reset::{Claim, Reservations, Terms, Verdict};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::time::sleep;

use super::jobs::template;
use crate::history::History;
use crate::plugin::Sockets;
use crate::scenario::{Scenario, scenarios, taking_long};
use crate::shape::Shape;
use crate::stage::Stage;
use crate::wait::{self, PATIENCE};

const RIGHTS: &str = "deploy/kustomize/components/hard-reset/rbac.yaml";
const ROLE: &str = "reprise-hard-reset";
/// Of the right that the file leaves out.
const DELETION: &str = "reprise-hard-reset-delete";
const LEASE: &str = "reprise-hard-resets";
const SYSTEM: &str = "kube-system";
const POLICY: &str = "failure-policy.reprise.dev";
/// More than so many restarts are too many, as by default.
const MOST: i32 = 7;
/// Between two resets of one Deployment.
const COOLDOWN: Duration = Duration::from_secs(25);
/// To crash eight times, on a busy machine.
const CRASHES: Duration = Duration::from_mins(2);
/// In which time what is due is done.
const SOON: Duration = Duration::from_secs(12);

pub(crate) fn scenarios() -> Vec<Scenario> {
    // On a busy machine a new pod may crash as often and go first, before the one that waits.
    let mut scenarios = scenarios![Undisturbed:
        deployments_pods_that_crash_for_ever_are_replaced_one_after_another,
    ];
    scenarios.extend(scenarios![Alone:
        pods_that_do_not_say_are_reset_where_that_is_the_default,
        plain_deletion_heeds_no_budget_where_that_is_configured_and_allowed,
        budget_of_disruption_forbids_a_reset_until_it_allows_it,
        pod_without_a_controller_stays_and_is_told_so,
        restarts_are_counted_across_the_death_of_plugin_and_api_server,
        nothing_is_reset_without_the_rights,
        nothing_is_reset_that_cannot_be_written_down,
    ]);
    scenarios.extend(taking_long(scenarios![Alone:
        two_plugins_keep_one_cooldown,
        two_hundred_races_for_a_reset_have_one_winner_each,
        pod_that_was_ready_is_not_reset,
        restarts_by_a_probe_do_not_count,
        owner_whom_resets_do_not_help_is_given_up,
        pods_of_a_daemon_set_and_of_a_protected_namespace_stay_and_are_told_so,
        pod_of_a_stateful_set_is_replaced_under_its_name,
        node_that_has_had_as_many_as_it_may_resets_no_more,
    ]));
    scenarios
}

/// Ends with 1 at once, and is never Ready.
fn crashing() -> Shape {
    let shape = Shape::always().regular("trainer").at_first(
        r#"echo "no lock on /data"; exit 1
"#,
    );
    never_ready(shape).annotation(POLICY, "action: DeletePod")
}

fn never_ready(shape: Shape) -> Shape {
    let probe = json!({"exec": {"command": ["/bin/false"]}, "periodSeconds": 1});
    shape.field("readinessProbe", probe)
}

/// Plays with a quick kubelet, the rights, and a plugin that is told so.
async fn with(
    stage: &Stage,
    terms: Value,
    play: impl AsyncFnOnce(&Stage) -> Result<()>,
) -> Result<()> {
    stage.node.kubectl(&["apply"], RIGHTS).await?;
    clear_ledger(stage).await?;
    // What was reset in scenarios before counts as well.
    let mut told = json!({
        "notReadySeconds": 3, "cooldownSeconds": COOLDOWN.as_secs(),
        "maxResetsPerHour": 1000, "maxResetsPerHourOnNode": 1000,
    });
    for (key, value) in terms.as_object().into_iter().flatten() {
        told[key] = value.clone();
    }
    let config = json!({"hardReset": told}).to_string();
    let (usual, quick) = ("kubelet", "kubelet-quick-back-off");
    stage.node.swap_kubelet(usual, quick).await?;
    let played = match stage.plugin.configure(&config).await {
        Ok(()) => play(stage).await,
        Err(error) => Err(error),
    };
    stage.node.swap_kubelet(quick, usual).await?;
    played
}

async fn clear_ledger(stage: &Stage) -> Result<()> {
    let leases = stage.node.objects_in::<Lease>(SYSTEM);
    let cleared = json!({"metadata": {"annotations": {"hard-resets.reprise.dev": null}}});
    let params = PatchParams::default();
    leases.patch(LEASE, &params, &Patch::Merge(cleared)).await?;
    Ok(())
}

/// A Deployment or the like, and all that has become of its pods since.
struct Live {
    name: String,
    history: History<Pod>,
}

impl Live {
    async fn of(stage: &Stage, replicas: u32, shape: &Shape) -> Result<Self> {
        Self::owned_by::<Deployment>(stage, replicas, shape).await
    }

    async fn owned_by<K>(stage: &Stage, replicas: u32, shape: &Shape) -> Result<Self>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
        K: Clone + Debug + Serialize + DeserializeOwned,
    {
        // Of a long one, its pods' names have the beginning only.
        let name = stage.name();
        let mut ends = name.rsplit('-');
        let (number, process) = (ends.next(), ends.next());
        let name = format!(
            "crash-{}-{}",
            process.unwrap_or_default(),
            number.unwrap_or_default()
        );
        let selection = watcher::Config::default().labels(&format!("app={name}"));
        let history = History::start(stage.node.pods(), selection);
        let mut template = template(stage, shape, &name)?;
        // The controller of DaemonSets asks for that, as a scheduler would.
        template["spec"]["tolerations"] = json!([{"operator": "Exists"}]);
        stage
            .create::<K>(json!({
                "apiVersion": K::api_version(&()),
                "kind": K::kind(&()),
                "metadata": {"name": name},
                "spec": {
                    "replicas": replicas,
                    "serviceName": "",
                    "selector": {"matchLabels": {"app": name}},
                    "template": template,
                },
            }))
            .await?;
        Ok(Self { name, history })
    }

    /// When which pods began to go, in that order.
    fn gone(&self) -> Vec<(Timestamp, String)> {
        let mut gone = BTreeMap::new();
        for pod in self.history.since(0) {
            // Its time to stop is over then.
            let grace = pod.metadata.deletion_grace_period_seconds.unwrap_or(0);
            if let Some(end) = &pod.metadata.deletion_timestamp {
                let began = end.0 - Duration::from_secs(u64::try_from(grace).unwrap_or(0));
                gone.entry(pod.uid().unwrap_or_default()).or_insert(began);
            }
        }
        let mut gone: Vec<_> = gone.into_iter().map(|(uid, at)| (at, uid)).collect();
        gone.sort();
        gone
    }

    /// Waits until so many have begun to go.
    async fn until_gone(&self, count: usize, patience: Duration) -> Result<Vec<String>> {
        let what = format!("{count} pods go");
        wait::until(&what, patience, async || {
            let gone = self.gone();
            if gone.len() < count {
                return Ok(Err(format!("{gone:?}, restarts {:?}", self.restarts())));
            }
            Ok(Ok(gone.into_iter().map(|(_, uid)| uid).collect()))
        })
        .await
    }

    async fn until_goes(&self, uid: &str, patience: Duration) -> Result<()> {
        let what = format!("pod {uid} goes");
        wait::until(&what, patience, async || {
            let gone = self.gone();
            let goes = gone.iter().any(|(_, gone)| gone == uid);
            Ok(goes.then_some(()).ok_or_else(|| format!("{gone:?}")))
        })
        .await
    }

    /// How often the container of each pod was restarted.
    fn restarts(&self) -> BTreeMap<String, i32> {
        let mut restarts = BTreeMap::new();
        for pod in self.history.since(0) {
            let count = restart_count(&pod);
            restarts
                .entry(pod.uid().unwrap_or_default())
                .and_modify(|most: &mut i32| *most = count.max(*most))
                .or_insert(count);
        }
        restarts
    }

    async fn until_restarted(&self, count: i32, patience: Duration) -> Result<()> {
        let what = format!("{count} restarts");
        wait::until(&what, patience, async || {
            let restarts = self.restarts();
            let reached = restarts.values().any(|it| *it >= count);
            Ok(reached.then_some(()).ok_or_else(|| format!("{restarts:?}")))
        })
        .await
    }

    /// The cooldown was kept between any two that went.
    fn keeps_the_cooldown(&self) -> Result<()> {
        for pair in self.gone().windows(2) {
            let gap = pair[1].0.duration_since(pair[0].0);
            // The API tells whole seconds, and the deletion follows what was granted at once, or seconds later.
            let gap = gap.unsigned_abs() + Duration::from_secs(5);
            ensure!(gap >= COOLDOWN, "{:?}", self.gone());
        }
        Ok(())
    }

    fn must_stay(&self) -> Result<()> {
        ensure!(self.gone().is_empty(), "{:?} went", self.gone());
        Ok(())
    }
}

fn restart_count(pod: &Pod) -> i32 {
    let status = pod.status.as_ref();
    let statuses = status.and_then(|status| status.container_statuses.as_ref());
    let statuses = statuses.into_iter().flatten();
    statuses.map(|it| it.restart_count).max().unwrap_or(0)
}

/// Events of ours with that reason on objects of that kind whose names begin so.
async fn events(stage: &Stage, kind: &str, name: &str, reason: &str) -> Result<Vec<Event>> {
    let fields = format!("involvedObject.kind={kind},reason={reason}");
    let events = stage.node.events();
    let list = events.list(&ListParams::default().fields(&fields)).await?;
    let ours = list.items.into_iter().filter(|event: &Event| {
        let of = event.involved_object.name.as_deref();
        of.is_some_and(|of| of.starts_with(name))
    });
    Ok(ours.collect())
}

/// The first of them.
async fn until_event(
    stage: &Stage,
    kind: &str,
    name: &str,
    reason: &str,
    patience: Duration,
) -> Result<Event> {
    let what = format!("event {reason} on a {kind}");
    wait::until(&what, patience, async || {
        let events = events(stage, kind, name, reason).await?.into_iter();
        let first = events.min_by_key(|event| event.metadata.creation_timestamp.clone());
        Ok(first.ok_or_else(|| "none".to_owned()))
    })
    .await
}

async fn until_told(
    stage: &Stage,
    kind: &str,
    name: &str,
    reason: &str,
    patience: Duration,
) -> Result<String> {
    let event = until_event(stage, kind, name, reason, patience).await?;
    Ok(event.message.unwrap_or_default())
}

async fn deployments_pods_that_crash_for_ever_are_replaced_one_after_another(
    stage: Stage,
) -> Result<()> {
    with(&stage, json!({}), async |stage| {
        let live = Live::of(stage, 2, &crashing()).await?;
        let first = live.until_gone(1, CRASHES).await?;
        let counts = live.restarts();
        ensure!(counts[&first[0]] >= MOST, "it went too soon: {counts:?}");
        let event = until_event(stage, "Pod", &live.name, "HardResetDeferred", CRASHES).await?;
        let (told, waits) = (event.message, event.involved_object.uid);
        let told = told.unwrap_or_default();
        ensure!(told.contains("another pod of its owner"), "{told}");
        ensure!(live.gone().len() == 1, "{:?}", live.gone());
        // Deferred is not dropped.
        let waits = waits.context("the event is on no pod")?;
        live.until_goes(&waits, 2 * COOLDOWN + CRASHES).await?;
        live.keeps_the_cooldown()?;
        // What it was is told of on its owner, and kept.
        let name = &live.name;
        let on_owner = until_told(stage, "Deployment", name, "HardReset", PATIENCE).await?;
        for needle in [
            "evicting pod default/",
            "so that Deployment",
            "container trainer ended ",
            "exit code 1 (Error)",
            "no lock on /data",
        ] {
            ensure!(
                on_owner.contains(needle),
                "{needle:?} is not in {on_owner:?}"
            );
        }
        until_told(stage, "Pod", name, "HardReset", PATIENCE).await?;
        for (_, uid) in live.gone() {
            says_why(&evidence_of(stage, &uid)?)?;
        }
        Ok(())
    })
    .await
}

fn evidence_of(stage: &Stage, uid: &str) -> Result<Value> {
    let path = stage.plugin.state_dir().join("hard-resets");
    let path = path.join(format!("{uid}.json"));
    let kept = fs::read(&path).with_context(|| format!("nothing is kept at {}", path.display()))?;
    Ok(serde_json::from_slice(&kept)?)
}

fn says_why(kept: &Value) -> Result<()> {
    let exits = kept["history"]["trainer"].as_array().map_or(0, Vec::len);
    ensure!(exits >= 8, "{kept}");
    let log = kept["logs"]["trainer"].to_string();
    ensure!(log.contains("no lock on /data"), "{kept}");
    let status = &kept["status"]["containerStatuses"][0];
    ensure!(status["name"] == "trainer", "{kept}");
    Ok(())
}

async fn pods_that_do_not_say_are_reset_where_that_is_the_default(stage: Stage) -> Result<()> {
    let terms = json!({"default": "DeletePod", "maxRestartsOnNode": 2});
    with(&stage, terms, async |stage| {
        let silent = crashing().without_annotations();
        let stays = silent.clone().annotation(POLICY, "action: None");
        let stays = Live::of(stage, 1, &stays).await?;
        let live = Live::of(stage, 1, &silent).await?;
        live.until_gone(1, CRASHES).await?;
        stays.until_restarted(4, CRASHES).await?;
        sleep(SOON).await;
        stays.must_stay()
    })
    .await
}

async fn plain_deletion_heeds_no_budget_where_that_is_configured_and_allowed(
    stage: Stage,
) -> Result<()> {
    let terms = json!({"method": "Delete", "maxRestartsOnNode": 2});
    with(&stage, terms, async |stage| {
        let live = Live::of(stage, 1, &crashing()).await?;
        forbid_disruption(stage, &live.name).await?;
        let told = until_told(stage, "Pod", &live.name, "HardResetDenied", CRASHES).await?;
        ensure!(told.contains("delete pods"), "{told}");
        live.must_stay()?;
        let roles = stage.node.objects_of_cluster::<ClusterRole>();
        let role = serde_json::from_value(json!({
            "metadata": {"name": DELETION},
            "rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": ["delete"]}],
        }))?;
        roles.create(&PostParams::default(), &role).await?;
        let bindings = stage.node.objects_of_cluster::<ClusterRoleBinding>();
        let mut binding = bindings.get(ROLE).await?;
        binding.metadata = serde_json::from_value(json!({"name": DELETION}))?;
        DELETION.clone_into(&mut binding.role_ref.name);
        bindings.create(&PostParams::default(), &binding).await?;
        let gone = live.until_gone(1, PATIENCE).await;
        roles.delete(DELETION, &DeleteParams::default()).await?;
        bindings.delete(DELETION, &DeleteParams::default()).await?;
        gone.map(drop)
    })
    .await
}

/// It counts the crashes of a pod of that Deployment that has not gone: it takes part.
fn knows_of_a_pod_of(state: &Path, live: &Live) -> Result<()> {
    let text = fs::read_to_string(state.join("hard-resets.json"))
        .with_context(|| format!("{} remembers nothing", state.display()))?;
    let memory: Value = serde_json::from_str(&text)?;
    let pods = memory["pods"].as_object().context("no pods")?;
    let restarts = live.restarts();
    let known = pods.keys().any(|uid| restarts.contains_key(uid));
    ensure!(
        known,
        "{} does not know {restarts:?}: {text}",
        state.display()
    );
    Ok(())
}

/// They know each other only by what is in the cluster.
async fn two_plugins_keep_one_cooldown(stage: Stage) -> Result<()> {
    let terms = json!({"maxRestartsOnNode": 2, "maxResetsPerOwner": 100});
    with(&stage, terms, async |stage| {
        let dir = tempfile::tempdir()?;
        let mut sockets = Sockets::of(&stage.node);
        sockets.config = Some(stage.plugin.config_file());
        let mut second = stage.plugin.command(dir.path(), &sockets);
        second.args(["--nri-index", "20"]).stderr(Stdio::null());
        let mut second = second.spawn()?;
        let raced = async {
            let live = Live::of(stage, 3, &crashing()).await?;
            live.until_gone(4, 5 * COOLDOWN).await?;
            live.keeps_the_cooldown()?;
            let states = [dir.path().join("state"), stage.plugin.state_dir()];
            for state in &states {
                knows_of_a_pod_of(state, &live)?;
            }
            // Those that went are known to whoever did it.
            for (_, uid) in live.gone() {
                let file = format!("hard-resets/{uid}.json");
                let kept = states.iter().any(|state| state.join(&file).exists());
                ensure!(kept, "nothing is kept of {uid}");
            }
            Ok(())
        };
        let raced = raced.await;
        second.kill()?;
        second.wait()?;
        raced
    })
    .await
}

async fn two_hundred_races_for_a_reset_have_one_winner_each(stage: Stage) -> Result<()> {
    const NODES: usize = 4;
    stage.node.kubectl(&["apply"], RIGHTS).await?;
    let client = stage.node.client_of_plugin().await?;
    // Of a cluster that is so large that its budget does not matter.
    let terms = Terms {
        max_resets_per_hour: 10_000,
        ..Terms::default()
    };
    clear_ledger(&stage).await?;
    for round in 0..200 {
        let race = (0..NODES).map(|node| {
            let reservations = Reservations::new(client.clone(), &format!("node-{node}"));
            let terms = terms.clone();
            let claim = Claim {
                owner: format!("owner-{round}"),
                namespace: "default".to_owned(),
                pod: format!("pod-{round}-{node}"),
            };
            tokio::spawn(async move { reservations.ask(&claim, &terms).await })
        });
        let mut winners = 0;
        for asked in futures::future::join_all(race).await {
            match asked?.context("a node has no answer")? {
                Verdict::Granted { .. } => winners += 1,
                Verdict::Wait { wait, .. } => {
                    ensure!(wait <= Duration::from_secs(121), "{wait:?}");
                }
                given_up @ Verdict::GivenUp { .. } => anyhow::bail!("{given_up:?}"),
            }
        }
        ensure!(winners == 1, "round {round} has {winners} winners");
    }
    clear_ledger(&stage).await
}

/// A budget of disruption for the pods of that label, which has no room.
async fn forbid_disruption(stage: &Stage, app: &str) -> Result<String> {
    let name = stage.name();
    stage
        .create::<PodDisruptionBudget>(json!({
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": {"name": name},
            "spec": {"maxUnavailable": 0, "selector": {"matchLabels": {"app": app}}},
        }))
        .await?;
    Ok(name)
}

async fn budget_of_disruption_forbids_a_reset_until_it_allows_it(stage: Stage) -> Result<()> {
    with(&stage, json!({"maxRestartsOnNode": 2}), async |stage| {
        let live = Live::of(stage, 1, &crashing()).await?;
        let name = forbid_disruption(stage, &live.name).await?;
        let told = until_told(stage, "Pod", &live.name, "HardResetRefused", CRASHES).await?;
        ensure!(
            told.contains("disruption budget") && told.contains(&name),
            "{told}"
        );
        live.until_restarted(6, CRASHES).await?;
        live.must_stay()?;
        let budgets = stage.node.objects::<PodDisruptionBudget>();
        // To allow one more that is unavailable is not enough: none of them is available.
        let allowed = json!({"spec": {"unhealthyPodEvictionPolicy": "AlwaysAllow"}});
        let params = PatchParams::default();
        budgets
            .patch(&name, &params, &Patch::Merge(allowed))
            .await?;
        // By then it may be tried once in 80 s.
        live.until_gone(1, CRASHES).await?;
        Ok(())
    })
    .await
}

async fn pod_that_was_ready_is_not_reset(stage: Stage) -> Result<()> {
    let terms = json!({"maxRestartsOnNode": 2, "notReadySeconds": 30});
    with(&stage, terms, async |stage| {
        // Ready whenever it runs, as there is no probe.
        let shape = Shape::always()
            .regular("trainer")
            .at_first("sleep 2; exit 1\n");
        let live = Live::of(stage, 1, &shape.annotation(POLICY, "action: DeletePod")).await?;
        live.until_restarted(8, CRASHES).await?;
        sleep(SOON).await;
        live.must_stay()
    })
    .await
}

/// The kubelet tells of the first few only: of one pod it publishes 25 events, and then one in five minutes.
async fn restarts_by_a_probe_do_not_count(stage: Stage) -> Result<()> {
    with(&stage, json!({"maxRestartsOnNode": 2}), async |stage| {
        let probe = json!({
            "exec": {"command": ["/bin/false"]},
            "initialDelaySeconds": 1, "periodSeconds": 1, "failureThreshold": 2,
        });
        // As if it had crashed by itself.
        let shape = Shape::always().regular("trainer").on_term("exit 3");
        let shape = never_ready(shape).field("livenessProbe", probe);
        let live = Live::of(stage, 1, &shape.annotation(POLICY, "action: DeletePod")).await?;
        live.until_restarted(14, 2 * CRASHES).await?;
        sleep(SOON).await;
        live.must_stay()
    })
    .await
}

async fn pod_without_a_controller_stays_and_is_told_so(stage: Stage) -> Result<()> {
    with(&stage, json!({"maxRestartsOnNode": 2}), async |stage| {
        let pod = stage.pod(crashing()).await?;
        let told = until_told(stage, "Pod", &pod.name, "HardResetImpossible", PATIENCE).await?;
        ensure!(told.contains("no controller"), "{told}");
        let pods = stage.node.pods();
        wait::until("it crashes often", CRASHES, async || {
            let seen = pods.get(&pod.name).await?;
            let count = restart_count(&seen);
            Ok((count >= 5).then_some(()).ok_or_else(|| count.to_string()))
        })
        .await?;
        sleep(SOON).await;
        let seen = pods.get(&pod.name).await?;
        ensure!(seen.uid().as_ref() == Some(&pod.uid), "it is another one");
        ensure!(seen.metadata.deletion_timestamp.is_none(), "it went");
        Ok(())
    })
    .await
}

async fn pods_of_a_daemon_set_and_of_a_protected_namespace_stay_and_are_told_so(
    stage: Stage,
) -> Result<()> {
    with(&stage, json!({"maxRestartsOnNode": 2}), async |stage| {
        let live = Live::owned_by::<DaemonSet>(stage, 1, &crashing()).await?;
        stays(stage, &live, "DaemonSet").await
    })
    .await?;
    let terms = json!({"maxRestartsOnNode": 2, "protectedNamespaces": ["default"]});
    with(&stage, terms, async |stage| {
        let live = Live::of(stage, 1, &crashing()).await?;
        stays(stage, &live, "namespace default is protected").await
    })
    .await
}

/// Its pod is not reset, and told so, for that reason.
async fn stays(stage: &Stage, live: &Live, why: &str) -> Result<()> {
    let told = until_told(stage, "Pod", &live.name, "HardResetImpossible", PATIENCE).await?;
    ensure!(told.contains(why), "{told}");
    live.until_restarted(5, CRASHES).await?;
    sleep(SOON).await;
    live.must_stay()
}

async fn pod_of_a_stateful_set_is_replaced_under_its_name(stage: Stage) -> Result<()> {
    with(&stage, json!({"maxRestartsOnNode": 2}), async |stage| {
        let live = Live::owned_by::<StatefulSet>(stage, 1, &crashing()).await?;
        let gone = live.until_gone(1, CRASHES).await?;
        let name = format!("{}-0", live.name);
        let pods = stage.node.pods();
        wait::until("its controller makes a new one", PATIENCE, async || {
            let now = pods.get_opt(&name).await?;
            let uid = now.and_then(|pod| pod.uid());
            let is_new = uid.as_ref().is_some_and(|uid| *uid != gone[0]);
            Ok(is_new.then_some(()).ok_or_else(|| format!("{uid:?}")))
        })
        .await
    })
    .await
}

async fn node_that_has_had_as_many_as_it_may_resets_no_more(stage: Stage) -> Result<()> {
    with(&stage, json!({"maxRestartsOnNode": 2}), async |stage| {
        let live = Live::of(stage, 1, &crashing()).await?;
        live.until_gone(1, CRASHES).await?;
        Ok(())
    })
    .await?;
    let terms = json!({"maxRestartsOnNode": 2, "maxResetsPerHourOnNode": 1});
    with(&stage, terms, async |stage| {
        let live = Live::of(stage, 1, &crashing()).await?;
        let told = until_told(stage, "Pod", &live.name, "HardResetDeferred", CRASHES).await?;
        ensure!(told.contains("the node"), "{told}");
        sleep(SOON).await;
        live.must_stay()
    })
    .await
}

async fn owner_whom_resets_do_not_help_is_given_up(stage: Stage) -> Result<()> {
    let terms = json!({"maxRestartsOnNode": 2, "cooldownSeconds": 1, "maxResetsPerOwner": 2, "windowSeconds": 70});
    with(&stage, terms, async |stage| {
        let live = Live::of(stage, 1, &crashing()).await?;
        let name = &live.name;
        live.until_gone(2, CRASHES).await?;
        let told = until_told(stage, "Deployment", name, "HardResetGivenUp", CRASHES).await?;
        ensure!(told.contains("bug of the application"), "{told}");
        until_told(stage, "Pod", name, "HardResetGivenUp", PATIENCE).await?;
        ensure!(live.gone().len() == 2, "{:?}", live.gone());
        // Until the first is out of the window.
        live.until_gone(3, CRASHES).await?;
        let gone = live.gone();
        let gap = gone[2].0.duration_since(gone[0].0).unsigned_abs();
        ensure!(gap >= Duration::from_secs(69), "{gone:?}");
        let uids: BTreeSet<_> = gone.iter().map(|(_, uid)| uid).collect();
        ensure!(uids.len() == 3, "{gone:?}");
        Ok(())
    })
    .await
}

async fn restarts_are_counted_across_the_death_of_plugin_and_api_server(
    stage: Stage,
) -> Result<()> {
    const BEFORE: i32 = 5;
    with(&stage, json!({}), async |stage| {
        let live = Live::of(stage, 1, &crashing()).await?;
        live.until_restarted(BEFORE, CRASHES).await?;
        stage.plugin.kill().await?;
        stage.plugin.start().await?;
        stage.plugin.until_ready(1).await?;
        live.until_restarted(BEFORE + 1, CRASHES).await?;
        stage.node.start_again("apiserver").await?;
        let gone = live.until_gone(1, CRASHES).await?;
        // How many there were by then, as the kubelet went on while nobody reached the API server.
        let kept = evidence_of(stage, &gone[0])?;
        let restarts = kept["status"]["containerStatuses"][0]["restartCount"].as_i64();
        let (counted, restarts) = (kept["exits"].as_i64(), restarts.unwrap_or_default());
        ensure!(restarts >= MOST.into(), "{restarts} restarts");
        ensure!(
            counted >= Some(restarts),
            "{counted:?} of {restarts} were counted"
        );
        Ok(())
    })
    .await
}

async fn nothing_is_reset_without_the_rights(stage: Stage) -> Result<()> {
    with(&stage, json!({"maxRestartsOnNode": 2}), async |stage| {
        let bindings = stage.node.objects_of_cluster::<ClusterRoleBinding>();
        bindings.delete(ROLE, &DeleteParams::default()).await?;
        let live = Live::of(stage, 1, &crashing()).await?;
        let told = until_told(stage, "Pod", &live.name, "HardResetDenied", CRASHES).await?;
        ensure!(told.contains(RIGHTS), "{told}");
        live.until_restarted(5, CRASHES).await?;
        live.must_stay()?;
        stage.node.kubectl(&["apply"], RIGHTS).await?;
        live.until_gone(1, CRASHES).await?;
        Ok(())
    })
    .await
}

async fn nothing_is_reset_that_cannot_be_written_down(stage: Stage) -> Result<()> {
    with(&stage, json!({"maxRestartsOnNode": 2}), async |stage| {
        let file = stage.plugin.state_dir().join("hard-resets.json");
        // No file takes its place.
        let _ = fs::remove_file(&file);
        fs::create_dir(&file)?;
        let live = Live::of(stage, 1, &crashing()).await?;
        live.until_restarted(3, CRASHES).await?;
        let told = until_told(stage, "Pod", &live.name, "HardResetFailed", CRASHES).await?;
        ensure!(told.contains("did not work, again"), "{told}");
        live.must_stay()?;
        fs::remove_dir(&file)?;
        live.until_gone(1, CRASHES).await?;
        Ok(())
    })
    .await
}
