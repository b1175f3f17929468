//! Two plugins with the same directories, and when a plugin may register with NRI.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use kube::api::DeleteParams;
use tokio::task::spawn_blocking;
use tokio::time::{sleep, timeout};

use super::three_kinds::NEVER_WITH_INITS;
use crate::plugin::Phase;
use crate::restarted::Before;
use crate::scenario::{Scenario, scenarios};
use crate::shape::Shape;
use crate::stage::Stage;
use crate::under_way::UnderWay;
use crate::wait::{self, PATIENCE};

/// A phase may be over before it is seen.
const TRIES: usize = 4;
/// What a container does that is stopped, and how long it may.
const LINGERS: &str = r#"say "note stopping"; sleep 600"#;
const GRACE: i64 = 55;
/// From the moment when a successor waits.
const HEARS: Duration = Duration::from_secs(2);
/// In which time another one is started meanwhile.
const SOON: Duration = Duration::from_secs(45);

pub(crate) fn scenarios() -> Vec<Scenario> {
    let mut scenarios = scenarios![Alone:
        second_plugin_says_who_is_there_and_the_first_works_on,
        plugin_that_waits_takes_over_when_the_other_ends,
        plugin_that_waits_takes_over_in_the_middle_of_a_restart,
        plugin_that_comes_while_a_container_is_being_stopped_freezes_no_node,
    ];
    // It takes over within the time for which an exit can be held.
    scenarios.extend(scenarios![Undisturbed:
        plugin_that_waits_takes_over_an_exit_that_nobody_was_there_for,
    ]);
    scenarios
}

fn never() -> Shape {
    Shape::never()
        .regular("trainer")
        .regular("logger")
        .restarts_all("trainer", 42)
}

async fn second_plugin_says_who_is_there_and_the_first_works_on(stage: Stage) -> Result<()> {
    let pod = stage.running(never()).await?;
    let mut second = stage.plugin.another();
    let output = spawn_blocking(move || second.output()).await??;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.code() == Some(1), "{}: {said}", output.status);
    let there = format!("(pid {}, since ", stage.plugin.pid().await?);
    ensure!(
        said.contains("another plugin is at work") && said.contains(&there),
        "{said}"
    );
    stage.plugin.must_be_well().await?;
    pod.restarts_all("trainer", 42).await
}

async fn plugin_that_waits_takes_over_when_the_other_ends(stage: Stage) -> Result<()> {
    let pod = stage.running(never()).await?;
    stage.plugin.have_successor().await?;
    stage.plugin.stop().await?;
    stage.plugin.succeed().await?;
    pod.restarts_all("trainer", 42).await
}

async fn plugin_that_waits_takes_over_in_the_middle_of_a_restart(stage: Stage) -> Result<()> {
    for _ in 0..TRIES {
        stage.plugin.have_successor().await?;
        let restart = UnderWay::begin(&stage, (NEVER_WITH_INITS.shape)()).await?;
        let caught = restart.reaches(Phase::Down).await?;
        stage.plugin.kill().await?;
        let struck_in = restart.phase();
        stage.plugin.succeed().await?;
        restart.until_over().await?;
        restart.pod.has_recovered(&restart.before).await?;
        if caught && struck_in == Some(Phase::Down) {
            return Ok(());
        }
    }
    bail!("no restart could be caught in {TRIES} tries")
}

/// Each time at another moment after the end of the first.
async fn plugin_that_waits_takes_over_an_exit_that_nobody_was_there_for(
    stage: Stage,
) -> Result<()> {
    for pause in [0, 20, 50, 100, 200] {
        let pod = stage.running(never()).await?;
        let before = Before::of(&pod).await?;
        stage.plugin.have_successor().await?;
        // By then it hears of exits: nobody ends a plugin before.
        sleep(HEARS).await;
        stage.plugin.kill().await?;
        sleep(Duration::from_millis(pause)).await;
        pod.exit("trainer", 42).await?;
        stage.plugin.succeed().await?;
        // For a moment the runtime does not ask the new one: what starts by then may begin anew.
        pod.has_recovered(&before)
            .await
            .with_context(|| format!("it exited {pause} ms after the plugin's end"))?;
    }
    Ok(())
}

/// A runtime that takes in a plugin waits for the stop, and keeps everybody else waiting.
async fn plugin_that_comes_while_a_container_is_being_stopped_freezes_no_node(
    stage: Stage,
) -> Result<()> {
    let slow = Shape::never().regular("slow").on_term(LINGERS);
    let slow = stage.running(slow.grace_period_seconds(GRACE)).await?;
    stage.plugin.stop().await?;
    let pods = stage.node.pods();
    pods.delete(&slow.name, &DeleteParams::default())
        .await
        .context("cannot delete the slow pod")?;
    // From now on the kubelet's call lasts.
    slow.notes().await?;
    stage.plugin.start().await?;
    // It waits, or the runtime has begun to take it in.
    let waits = || {
        let said = stage.plugin.log_lines("containers are being stopped")?;
        anyhow::Ok(said.iter().any(|line| line.contains(&slow.name)))
    };
    wait::until("the plugin has come", PATIENCE, async || {
        let there = waits()? || stage.plugin.times_ready()? > 0;
        Ok(there.then_some(()).ok_or_else(|| "not yet".to_owned()))
    })
    .await?;
    let other = timeout(SOON, stage.running(never())).await;
    other.context("no container could be started meanwhile")??;
    let slow_runs = !slow.containers().await?.is_empty();
    ensure!(slow_runs, "the slow pod was gone too soon to tell anything");
    ensure!(
        waits()? && stage.plugin.times_ready()? == 0,
        "the plugin did not wait"
    );
    stage.plugin.until_ready(1).await?;
    let pod = stage.running(never()).await?;
    pod.restarts_all("trainer", 42).await
}
