//! `action: RestartPod`: containers get time to stop.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::json;

use super::under;
use crate::evidence::{Deed, Entry};
use crate::pod::LivePod;
use crate::scenario::{Scenario, scenarios};
use crate::shape::RestartPolicy::{Always, Never};
use crate::shape::{Shape, rule};
use crate::stage::Stage;

const CLEAN_END: &str = r#"say "note asked"; sleep 1; say "note stopped"; exit 0"#;

pub(crate) fn scenarios() -> Vec<Scenario> {
    [
        under(
            &[Never, Always],
            "gives_its_containers_time_to_stop",
            gives_time_to_stop,
        ),
        under(
            &[Never, Always],
            "kills_what_ignores_sigterm_when_the_time_is_up",
            kills_when_the_time_is_up,
        ),
        under(
            &[Never, Always],
            "gives_its_containers_time_to_stop_when_a_sidecar_says_so",
            sidecar_says_so,
        ),
        under(
            &[Never, Always],
            "gives_its_containers_time_to_stop_when_an_init_container_says_so",
            init_container_says_so,
        ),
        scenarios![Shared:
            a_grace_period_of_a_minute_is_cut_to_four_seconds,
            restart_all_containers_gives_no_time_to_stop,
        ],
    ]
    .concat()
}

/// The scenario's own grace period is the pod's at deletion, and nothing here.
fn graceful(shape: Shape, action: &str) -> Shape {
    shape
        .init("fetch")
        .sidecar("proxy")
        .on_term(CLEAN_END)
        .regular("trainer")
        .regular("logger")
        .on_term(CLEAN_END)
        .with_pre_stop()
        .rules("trainer", &json!([rule(action, "In", &[42])]))
        .options(&json!({"gracePeriodSeconds": 3}))
        .grace_period_seconds(3600)
}

/// What was written from the trigger's exit to the end of the restart.
async fn restarted(stage: &Stage, shape: Shape) -> Result<Vec<Entry>> {
    let pod = stage.running(shape).await?;
    let before = pod.restarted("trainer", 42).await?;
    pod.evidence_since(&before)
}

fn at(entries: &[Entry], container: &str, deed: &Deed) -> Result<Duration> {
    let entry = entries
        .iter()
        .find(|entry| entry.container == container && entry.deed == *deed)
        .with_context(|| format!("{deed:?} of {container} is not in {entries:?}"))?;
    Ok(entry.at)
}

/// From the exit that asked for the restart.
fn until_began(entries: &[Entry], container: &str) -> Result<Duration> {
    let exit = at(entries, "trainer", &Deed::Exited(42))?;
    let began = at(entries, container, &Deed::Began)?;
    began.checked_sub(exit).context("it began before the exit")
}

fn noted(word: &str) -> Deed {
    Deed::Noted(word.to_owned())
}

/// All at once.
async fn gives_time_to_stop(stage: Stage, shape: Shape) -> Result<()> {
    let entries = restarted(&stage, graceful(shape, "RestartPod")).await?;
    let fetched = at(&entries, "fetch", &Deed::Began)?;
    for (container, other) in [("proxy", "logger"), ("logger", "proxy")] {
        let (asked, end) = (
            at(&entries, container, &noted("asked"))?,
            at(&entries, container, &noted("stopped"))?,
        );
        ensure!(end < fetched, "{container} had not stopped: {entries:?}");
        let others_end = at(&entries, other, &noted("stopped"))?;
        ensure!(
            asked < others_end,
            "{container} was asked after the end of {other}: {entries:?}"
        );
    }
    Ok(())
}

/// Lets `trigger` ask for it with 42. `other`, which ran, has stopped before `first` begins again.
async fn other_stops_before(pod: &LivePod, trigger: &str, other: &str, first: &str) -> Result<()> {
    let before = pod.restarted(trigger, 42).await?;
    let entries = pod.evidence_since(&before)?;
    let end = at(&entries, other, &noted("stopped"))?;
    let began = at(&entries, first, &Deed::Began)?;
    ensure!(end < began, "{other} had not stopped: {entries:?}");
    Ok(())
}

async fn sidecar_says_so(stage: Stage, shape: Shape) -> Result<()> {
    let shape = shape
        .init("fetch")
        .sidecar("proxy")
        .regular("logger")
        .on_term(CLEAN_END)
        .rules("proxy", &json!([rule("RestartPod", "In", &[42])]));
    let pod = stage.running(shape).await?;
    other_stops_before(&pod, "proxy", "logger", "fetch").await
}

/// Nothing but a sidecar runs beside one.
async fn init_container_says_so(stage: Stage, shape: Shape) -> Result<()> {
    let shape = shape
        .sidecar("proxy")
        .on_term(CLEAN_END)
        .waiting_init("prepare")
        .regular("trainer")
        .rules("prepare", &json!([rule("RestartPod", "In", &[42])]));
    let pod = stage.pod(shape).await?;
    pod.until_container_runs("prepare").await?;
    other_stops_before(&pod, "prepare", "proxy", "proxy").await
}

async fn kills_when_the_time_is_up(stage: Stage, shape: Shape) -> Result<()> {
    let shape = graceful(shape, "RestartPod").regular("server").on_term("");
    let entries = restarted(&stage, shape).await?;
    at(&entries, "logger", &noted("stopped"))?;
    let took = until_began(&entries, "fetch")?;
    ensure!(took >= Duration::from_secs(3), "its time was {took:?}");
    Ok(())
}

async fn a_grace_period_of_a_minute_is_cut_to_four_seconds(stage: Stage) -> Result<()> {
    let shape = Shape::never()
        .regular("trainer")
        .regular("server")
        .on_term("")
        .rules("trainer", &json!([rule("RestartPod", "In", &[42])]))
        .options(&json!({"gracePeriodSeconds": 60}))
        .grace_period_seconds(3600);
    let entries = restarted(&stage, shape).await?;
    let took = until_began(&entries, "server")?;
    let (shortest, longest) = (Duration::from_secs(4), Duration::from_mins(1));
    ensure!(took >= shortest && took < longest, "its time was {took:?}");
    Ok(())
}

async fn restart_all_containers_gives_no_time_to_stop(stage: Stage) -> Result<()> {
    let shape = graceful(Shape::never(), "RestartAllContainers");
    let entries = restarted(&stage, shape).await?;
    let mut entries = entries.iter();
    let noted = entries.find(|entry| matches!(entry.deed, Deed::Noted(_)));
    ensure!(noted.is_none(), "it was asked to stop: {noted:?}");
    Ok(())
}
