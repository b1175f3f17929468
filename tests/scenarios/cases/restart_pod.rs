//! `action: RestartPod`: containers get time to stop.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::json;

use super::under;
use crate::evidence::{Deed, Entry};
use crate::scenario::{Scenario, scenarios};
use crate::shape::RestartPolicy::{Always, Never};
use crate::shape::{Shape, rule};
use crate::stage::Stage;

const CLEAN_END: &str = r#"sleep 1; say "note stopped"; exit 0"#;

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

async fn gives_time_to_stop(stage: Stage, shape: Shape) -> Result<()> {
    let entries = restarted(&stage, graceful(shape, "RestartPod")).await?;
    let stopped = Deed::Noted("stopped".to_owned());
    for container in ["proxy", "logger"] {
        let end = at(&entries, container, &stopped)?;
        let fetched = at(&entries, "fetch", &Deed::Began)?;
        ensure!(end < fetched, "{container} had not stopped: {entries:?}");
    }
    Ok(())
}

async fn kills_when_the_time_is_up(stage: Stage, shape: Shape) -> Result<()> {
    let shape = graceful(shape, "RestartPod").regular("server").on_term("");
    let entries = restarted(&stage, shape).await?;
    let stopped = Deed::Noted("stopped".to_owned());
    at(&entries, "logger", &stopped)?;
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
    let stopped = Deed::Noted("stopped".to_owned());
    let found = entries.iter().find(|entry| entry.deed == stopped);
    ensure!(found.is_none(), "it took its time: {entries:?}");
    Ok(())
}
