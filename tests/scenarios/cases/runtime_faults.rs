//! Calls of the plugin to the runtime fail or hang during a restart.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, ensure};
use futures::future::try_join_all;
use k8s_openapi::jiff::Timestamp;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use super::three_kinds::{ALL, ALWAYS_WITH_INITS, NEVER, NEVER_WITH_INITS, PodKind};
use super::through_proxy;
use crate::evidence::Deed;
use crate::plugin::time_of;
use crate::proxy::Fault;
use crate::recorder::Snapshot;
use crate::runtime::{State, describe};
use crate::scenario::{Company, Scenario, scenarios};
use crate::stage::Stage;
use crate::under_way::UnderWay;
use crate::wait::{self, PATIENCE};

/// No exit is held for longer, whatever happens: eight seconds from the hook's question, which comes after the container's last
/// words.
const HOLD_LIMIT: Duration = Duration::from_millis(9500);

/// A fault that lasts outlasts every hold.
const FAULT: Duration = Duration::from_secs(10);

/// An Always pod is not shielded.
const SHIELDED: &[PodKind] = &[NEVER, NEVER_WITH_INITS];

pub(crate) fn scenarios() -> Vec<Scenario> {
    let mut scenarios = Vec::new();
    for (doing, method, kinds) in [
        ("stopping", "StopContainer", &ALL[..]),
        ("creating", "CreateContainer", SHIELDED),
        ("asking", "ContainerStatus", SHIELDED),
        ("removing", "RemoveContainer", &ALL[..]),
    ] {
        let name = format!("pods_restart_although_{doing}_fails_once");
        scenarios.push(Scenario::new(name, Company::Alone, move |stage| {
            survive_a_failure(stage, method, kinds)
        }));
    }
    scenarios.extend(scenarios![Alone:
        a_replay_whose_creating_fails_once_is_the_kubelets,
        pods_restart_once_although_no_answer_is_heard,
    ]);
    for (happens, fault) in [("fails", Fault::Always), ("hangs", Fault::Hang)] {
        for (doing, method) in [
            ("stopping", "StopContainer"),
            ("removing", "RemoveContainer"),
        ] {
            let name = format!("pods_recover_when_{doing}_no_longer_{happens}");
            scenarios.push(Scenario::new(name, Company::Alone, move |stage| {
                outlast(stage, method, fault)
            }));
        }
        let name = format!("a_replay_whose_starting_{happens}_is_the_kubelets");
        scenarios.push(Scenario::new(name, Company::Alone, move |stage| {
            fall_back(stage, "StartContainer", fault)
        }));
        let name = format!("exits_are_let_go_when_creating_{happens}");
        scenarios.push(Scenario::new(name, Company::Alone, move |stage| {
            are_not_shielded(stage, fault)
        }));
    }
    scenarios
}

async fn survive_a_failure(
    stage: Stage,
    method: &'static str,
    kinds: &'static [PodKind],
) -> Result<()> {
    let proxy = through_proxy(&stage).await?;
    let pods = try_join_all(kinds.iter().map(|kind| stage.running((kind.shape)()))).await?;
    let mut restarts = Vec::new();
    for pod in pods {
        proxy.breaks(method, Fault::Once);
        restarts.push(UnderWay::of(pod).await?);
        wait::until("a call has failed", PATIENCE, async || {
            let met = proxy.met(method);
            Ok(if met > 0 {
                Ok(())
            } else {
                Err(format!("nobody called {method}"))
            })
        })
        .await?;
    }
    try_join_all(restarts.iter().map(|it| it.pod.has_restarted(&it.before))).await?;
    Ok(())
}

async fn outlast(stage: Stage, method: &'static str, fault: Fault) -> Result<()> {
    let proxy = through_proxy(&stage).await?;
    let pods = try_join_all(ALL.map(|kind| stage.running((kind.shape)()))).await?;
    proxy.breaks(method, fault);
    let mended = Instant::now() + FAULT;
    let restarts = try_join_all(pods.into_iter().map(UnderWay::of)).await?;
    try_join_all(restarts.iter().map(is_let_go)).await?;
    sleep_until(mended).await;
    ensure!(proxy.mends(method) > 0, "nobody called {method}");
    let recovered = restarts.iter().map(|it| it.pod.has_recovered(&it.before));
    try_join_all(recovered).await?;
    Ok(())
}

async fn a_replay_whose_creating_fails_once_is_the_kubelets(stage: Stage) -> Result<()> {
    fall_back(stage, "CreateContainer", Fault::Once).await
}

/// Nothing is done twice because nobody said that it was done.
async fn pods_restart_once_although_no_answer_is_heard(stage: Stage) -> Result<()> {
    let proxy = through_proxy(&stage).await?;
    let changes = [
        "CreateContainer",
        "StartContainer",
        "StopContainer",
        "RemoveContainer",
    ];
    let mut lost = BTreeMap::<&str, u32>::new();
    for start in ["Kubelet", "Auto"] {
        let shapes = ALL.iter().map(|kind| (kind.shape)().started_by(start));
        let pods = try_join_all(shapes.map(|shape| stage.running(shape))).await?;
        for method in changes {
            proxy.breaks(method, Fault::Lost);
        }
        for pod in pods {
            pod.restarts_all("trainer", 42).await?;
            pod.was_started_again_by(start)?;
        }
        for method in changes {
            *lost.entry(method).or_default() += proxy.mends(method);
        }
    }
    let unlost = lost.iter().find(|(_, count)| **count == 0);
    ensure!(unlost.is_none(), "nobody called {unlost:?}");
    Ok(())
}

/// One after another: the hold is too short for all at once to fall back on a runtime that does not answer.
async fn fall_back(stage: Stage, method: &'static str, fault: Fault) -> Result<()> {
    let proxy = through_proxy(&stage).await?;
    let replayed = ALL
        .iter()
        .map(|kind| stage.running((kind.shape)().started_by("Auto")));
    for pod in try_join_all(replayed).await? {
        proxy.breaks(method, fault);
        let restart = UnderWay::of(pod).await?;
        let UnderWay { pod, before } = &restart;
        match fault {
            Fault::Once | Fault::Always | Fault::Lost | Fault::Late(_) => {
                pod.has_restarted(before).await?;
            }
            // In ten seconds the kubelet may collect what it counts restarts by.
            Fault::Hang => pod.has_recovered(before).await?,
        }
        ensure!(proxy.mends(method) > 0, "nobody called {method}");
        pod.restart_ended("(no replay: ")?;
    }
    Ok(())
}

/// Without placeholders a Never pod fails, and as soon as without the plugin. One that still waits for its turn behind others is
/// not killed: its trigger stays as it is, and the others run.
async fn are_not_shielded(stage: Stage, fault: Fault) -> Result<()> {
    let proxy = through_proxy(&stage).await?;
    let shielded = try_join_all(SHIELDED.iter().map(|kind| stage.running((kind.shape)()))).await?;
    let always = stage.running((ALWAYS_WITH_INITS.shape)()).await?;
    proxy.breaks("CreateContainer", fault);
    let shielded = try_join_all(shielded.into_iter().map(UnderWay::of)).await?;
    let always = UnderWay::of(always).await?;
    try_join_all(shielded.iter().map(is_let_go)).await?;
    try_join_all(shielded.iter().map(UnderWay::until_over)).await?;
    for UnderWay { pod, before } in &shielded {
        let is_over = |now: &Snapshot| {
            let old = &before.snapshot.containers;
            let others = now.containers.iter().filter(|(name, _)| *name != "trainer");
            let mut others = others.map(|(name, it)| (&it.id, &it.state, &old[name]));
            let unkilled = others.all(|(id, state, old)| *id == old.id && *state == old.state);
            let ended = now.containers["trainer"].state == "exit 42 (Error)";
            let over = ended && (unkilled || now.phase == "Failed");
            (!over).then(|| now.to_string())
        };
        let over = "the pod has failed, or nothing of it was killed";
        pod.recorder.until(over, PATIENCE, is_over).await?;
        pod.until_told("RestartIncomplete", "Gave up: ").await?;
    }
    always.pod.has_restarted(&always.before).await?;
    ensure!(
        proxy.mends("CreateContainer") > 0,
        "nobody called CreateContainer"
    );
    Ok(())
}

/// From the exit until the plugin has let it go, or to the begin of the last look at the runtime that did not show it yet: the
/// kubelet sees no more, and a busy runtime takes seconds to show what it may.
async fn is_let_go(restart: &UnderWay) -> Result<()> {
    let (pod, before) = (&restart.pod, &restart.before);
    let id = before.snapshot.containers["trainer"].id.as_str();
    let id = id.rsplit('/').next().unwrap_or_default();
    let last = watch::Sender::new(Duration::ZERO);
    wait::until("the exit can be seen", PATIENCE, async || {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?;
        let containers = pod.containers().await?;
        let mut holding = containers.iter().filter(|it| it.id == id);
        Ok(if holding.any(|it| it.state() == State::Running) {
            last.send_replace(now);
            Err(format!("\n{}", describe(&containers)))
        } else {
            Ok(())
        })
    })
    .await?;
    let evidence = pod.evidence()?;
    let mut exits = evidence.iter().filter(|it| it.deed == Deed::Exited(42));
    let exit = exits.next().context("the trainer did not exit")?;
    let unseen = last.borrow().saturating_sub(exit.at);
    let let_go = let_go(restart, id)?.map(|at| at.saturating_sub(exit.at));
    let held = let_go.map_or(unseen, |let_go| let_go.min(unseen));
    ensure!(
        held < HOLD_LIMIT,
        "the exit was held for {held:?}, and not seen for {unseen:?}"
    );
    Ok(())
}

/// When the restart first released this exit, since the epoch, if it did.
fn let_go(restart: &UnderWay, id: &str) -> Result<Option<Duration>> {
    let lines = restart.pod.plugin.log_lines(id)?;
    let mut releases = lines.iter().filter(|it| it.contains("effect=Release("));
    let Some(line) = releases.next() else {
        return Ok(None);
    };
    let at = time_of(line)?;
    Ok(Some(at.duration_since(Timestamp::UNIX_EPOCH).try_into()?))
}
