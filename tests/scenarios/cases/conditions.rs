//! The pod conditions of KEP-5532 and its draft, for whoever watches the pod.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::api::core::v1::PodCondition;
use k8s_openapi::jiff::Timestamp;
use rustix::process::Signal;
use serde_json::json;
use tokio::time::{Instant, sleep};

use super::probes::probe;
use super::under;
use crate::evidence::{Deed, Entry};
use crate::node::NATIVE;
use crate::pod::LivePod;
use crate::recorder::{Snapshot, Told};
use crate::restarted::Before;
use crate::scenario::{Scenario, scenarios};
use crate::shape::{RestartPolicy, Shape};
use crate::stage::Stage;
use crate::under_way::UnderWay;
use crate::wait::{self, PATIENCE};

/// The type of the one that stays.
pub(super) const LAST_RESTART: &str = "reprise.dev/LastRestart";

/// For how long the kills wait for the API server, and less: a replay would be over by then.
const WAITED_FOR: Duration = Duration::from_millis(150);
const STOPPED: Duration = Duration::from_millis(120);
/// What was killed is not made and started again in so little time.
const LOOK: Duration = Duration::from_millis(2);
/// What the second restart in a row waits for.
const FIRST_BACK_OFF: Duration = Duration::from_secs(30);
/// On a busy node a moment is longer.
const TRIES: usize = 4;

/// The kubelet tries an API server that went away again and again, at growing intervals.
const RECONNECTED: Duration = Duration::from_mins(3);

pub(crate) fn scenarios() -> Vec<Scenario> {
    let policies = [RestartPolicy::Never, RestartPolicy::Always];
    let mut scenarios = under(
        &policies,
        "says_that_it_restarts_until_all_is_dead",
        says_so_until_all_is_dead,
    );
    scenarios.extend(under(
        &policies,
        "that_restarts_with_grace_says_so_until_all_runs",
        says_so_until_all_runs,
    ));
    scenarios.extend(under(
        &policies,
        "that_restarts_with_grace_says_so_until_its_startup_probes_have_passed",
        says_so_until_it_has_started,
    ));
    scenarios.extend(scenarios![Shared: condition_says_until_when_a_pod_backs_off]);
    scenarios.extend(scenarios![Alone:
        condition_is_true_before_anything_is_killed,
        conditions_are_caught_up_when_the_api_server_was_away,
    ]);
    scenarios
}

/// The type that is the plugin's on this node.
pub(super) async fn all_containers(stage: &Stage) -> Result<&'static str> {
    Ok(if stage.node.declares(NATIVE).await? {
        "reprise.dev/AllContainersRestarting"
    } else {
        "AllContainersRestarting"
    })
}

/// Checks that it was True and then False, and why, and returns when each was seen.
pub(super) fn true_then_false(told: &[(Duration, Told)]) -> Result<(Duration, Duration)> {
    let [(began, first), (ended, last)] = told else {
        anyhow::bail!("the condition was seen as {told:?}");
    };
    ensure!(
        first.status && !last.status,
        "first {first:?}, then {last:?}"
    );
    for told in [first, last] {
        let message = "Container trainer exited with code 42, triggering pod restart (rule 1)";
        ensure!(told.message == message, "{told:?}");
        ensure!(told.reason == "ContainerExited", "{told:?}");
    }
    Ok((*began, *ended))
}

fn begun(evidence: &[Entry]) -> impl DoubleEndedIterator<Item = Duration> {
    let began = evidence.iter().filter(|entry| entry.deed == Deed::Began);
    began.map(|entry| entry.at)
}

async fn says_so_until_all_is_dead(stage: Stage, shape: Shape) -> Result<()> {
    let kind = all_containers(&stage).await?;
    let shape = shape
        .init("fetch")
        .regular("trainer")
        .regular("logger")
        .restarts_all("trainer", 42);
    let pod = stage.running(shape).await?;
    let before = pod.restarted("trainer", 42).await?;
    let (began, _) = true_then_false(&pod.told_since(&before, kind))?;
    let first = begun(&pod.evidence_since(&before)?).next();
    let first = first.context("nothing has begun again")?;
    ensure!(began < first, "True was seen when containers began again");
    // When the killed one died only the plugin knows: nobody else saw its exit.
    let log = stage.plugin.log_lines(&pod.name)?;
    let line = |what: &str| {
        let found = log.iter().position(|line| line.contains(what));
        found.with_context(|| format!("the plugin's log has no {what}"))
    };
    ensure!(
        line("event=Announced")? < line("effect=Kill")?,
        "killed first"
    );
    ensure!(
        line("event=Held")? < line("effect=Announce(false)")?,
        "not yet dead"
    );
    Ok(())
}

async fn says_so_until_all_runs(stage: Stage, shape: Shape) -> Result<()> {
    let shape = shape
        .init("fetch")
        .regular("trainer")
        .regular("logger")
        .restarts_pod("trainer", 42);
    let pod = stage.running(shape).await?;
    let before = pod.restarted("trainer", 42).await?;
    let (began, ended) = true_then_false(&pod.told_since(&before, "PodRestarting"))?;
    let evidence = pod.evidence_since(&before)?;
    let first = begun(&evidence).next().context("nothing has begun again")?;
    ensure!(began < first, "True was seen when containers began again");
    // A container's first line comes a moment after its start.
    let moment = Duration::from_millis(500);
    let last = begun(&evidence).next_back().unwrap_or(first);
    ensure!(last < ended + moment, "False was seen before all ran again");
    Ok(())
}

/// The earlier draft of KEP-5532, "Startup Phase".
async fn says_so_until_it_has_started(stage: Stage, shape: Shape) -> Result<()> {
    let probe = probe("test -e /up", json!({"failureThreshold": 60}));
    let shape = shape
        .regular("trainer")
        .at_first(r#"(sleep 4; say "note up"; touch /up) &"#)
        .field("startupProbe", probe)
        .regular("logger")
        .restarts_pod("trainer", 42);
    let pod = stage.running(shape).await?;
    let before = pod.restarted("trainer", 42).await?;
    let (_, ended) = true_then_false(&pod.told_since(&before, "PodRestarting"))?;
    let evidence = pod.evidence_since(&before)?;
    let up = Deed::Noted("up".to_owned());
    let up = evidence.iter().find(|it| it.deed == up);
    let up = up.context("it is not up")?.at;
    ensure!(up < ended, "False was seen before its probe had passed");
    Ok(())
}

/// Waits until the condition that tells of the pod's last restart begins so.
pub(super) async fn until_last_restart(pod: &LivePod, beginning: &str) -> Result<()> {
    wait::until("the condition tells of the restart", PATIENCE, async || {
        let told = message(pod, LAST_RESTART).await?;
        let begins = told.starts_with(beginning);
        Ok(begins.then_some(()).ok_or(told))
    })
    .await
}

/// As it is in the pod's status.
pub(super) async fn condition(pod: &LivePod, kind: &str) -> Result<Option<PodCondition>> {
    let status = pod.node.pods().get_status(&pod.name).await?.status;
    let conditions = status.and_then(|it| it.conditions).unwrap_or_default();
    Ok(conditions.into_iter().find(|it| it.type_ == kind))
}

async fn message(pod: &LivePod, kind: &str) -> Result<String> {
    let condition = condition(pod, kind).await?;
    Ok(condition.and_then(|it| it.message).unwrap_or_default())
}

/// All is dead by then, so that it is False.
async fn condition_says_until_when_a_pod_backs_off(stage: Stage) -> Result<()> {
    let kind = all_containers(&stage).await?;
    let shape = Shape::never()
        .regular("trainer")
        .regular("logger")
        .restarts_all("trainer", 42)
        .backs_off(FIRST_BACK_OFF.as_secs());
    let pod = stage.running(shape).await?;
    pod.restarts_all("trainer", 42).await?;
    let before = Before::of(&pod).await?;
    pod.exit("trainer", 42).await?;
    let until = wait::until("the condition names a time", PATIENCE, async || {
        let told = message(&pod, kind).await?;
        let cause = "Container trainer exited with code 42, triggering pod restart (rule 1)";
        let time = told.strip_prefix(&format!("{cause}; back-off until "));
        Ok(time.map(str::to_owned).ok_or(told))
    })
    .await?;
    let until: Timestamp = until.parse()?;
    let left = until.duration_since(Timestamp::now());
    ensure!(
        left.is_positive() && left.unsigned_abs() <= FIRST_BACK_OFF,
        "{left}"
    );
    pod.has_restarted(&before).await?;
    let told = pod.told_since(&before, kind);
    let statuses: Vec<bool> = told.iter().map(|(_, told)| told.status).collect();
    ensure!(statuses == [true, false], "{told:?}");
    let last = "Restart 2: container trainer exited with code 42 (rule 1), restarted in ";
    until_last_restart(&pod, last).await
}

/// The API server has stopped for a moment: what it has not heard of has not begun.
async fn condition_is_true_before_anything_is_killed(stage: Stage) -> Result<()> {
    let kind = all_containers(&stage).await?;
    let shape = Shape::never()
        .regular("trainer")
        .regular("logger")
        .restarts_all("trainer", 42);
    for _ in 0..TRIES {
        let pod = stage.running(shape.clone()).await?;
        let before = Before::of(&pod).await?;
        stage.node.signal("apiserver", Signal::STOP)?;
        let restart = UnderWay { pod, before };
        let stopped = decided_and_nobody_told(&restart).await;
        stage.node.signal("apiserver", Signal::CONT)?;
        let (unkilled, stopped) = stopped?;
        let UnderWay { pod, before } = &restart;
        if stopped > WAITED_FOR {
            pod.has_restarted(before).await?;
            continue;
        }
        ensure!(unkilled, "killed before anybody could know");
        wait::until_every(LOOK, "logger is killed", PATIENCE, async || {
            let lives = lives_on(&restart, "logger")?;
            Ok((!lives).then_some(()).ok_or_else(|| "it lives".to_owned()))
        })
        .await?;
        let now = stage.node.pods().get_status(&pod.name).await?;
        // It may have become False since.
        let told = Snapshot::from(&now).restarting;
        ensure!(told.contains_key(kind), "killed with conditions {told:?}");
        pod.has_restarted(before).await?;
        true_then_false(&pod.told_since(before, kind))?;
        return Ok(());
    }
    bail!("the API server could not be stopped for less than {WAITED_FOR:?} in {TRIES} tries")
}

/// What has begun again since has been killed before.
fn lives_on(restart: &UnderWay, container: &str) -> Result<bool> {
    let UnderWay { pod, before } = restart;
    let again = begun(&pod.evidence_since(before)?).next().is_some();
    Ok(!again && pod.listening(container)?.is_ok())
}

/// Whether another container lives a while after the restart was decided, and how long that while was.
async fn decided_and_nobody_told(restart: &UnderWay) -> Result<(bool, Duration)> {
    restart.pod.exit("trainer", 42).await?;
    wait::until_every(LOOK, "the restart is decided", PATIENCE, async || {
        let decided = restart.phase().map(|_| ());
        Ok(decided.ok_or_else(|| "it is not".to_owned()))
    })
    .await?;
    let began = Instant::now();
    sleep(STOPPED).await;
    Ok((lives_on(restart, "logger")?, began.elapsed()))
}

async fn conditions_are_caught_up_when_the_api_server_was_away(stage: Stage) -> Result<()> {
    let kind = all_containers(&stage).await?;
    let shape = Shape::never()
        .regular("trainer")
        .regular("logger")
        .restarts_all("trainer", 42);
    let pod = stage.running(shape).await?;
    let before = Before::of(&pod).await?;
    stage.node.script("kill", "apiserver").await?;
    let restarted = async {
        pod.exit("trainer", 42).await?;
        pod.until_begun_again(&before).await
    };
    let restarted = restarted.await;
    stage.node.script("start", "apiserver").await?;
    restarted?;
    pod.recorder
        .until("the condition is told", RECONNECTED, |now| {
            now.restarting.is_empty().then(|| kind.to_owned())
        })
        .await?;
    pod.has_restarted(&before).await?;
    let told = pod.told_since(&before, kind);
    let last = told.last().map(|(_, told)| told.status);
    ensure!(last == Some(false), "{told:?}");
    Ok(())
}
