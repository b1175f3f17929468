//! Pods of many containers.

use anyhow::{Result, ensure};

use super::through_proxy;
use crate::runtime::{State, describe};
use crate::scenario::{Scenario, scenarios};
use crate::shape::Shape;
use crate::stage::Stage;
use crate::wait::{self, PATIENCE};

/// Calls of one kind that are under way for one pod.
const AT_ONCE: usize = 8;

pub(crate) fn scenarios() -> Vec<Scenario> {
    scenarios![Undisturbed:
        never_pod_of_twenty_containers_is_replayed_eight_at_a_time,
        on_failure_pod_of_forty_containers_is_the_kubelets,
    ]
}

const NAMES: [&str; 40] = [
    "trainer", "c01", "c02", "c03", "c04", "c05", "c06", "c07", "c08", "c09", "c10", "c11", "c12",
    "c13", "c14", "c15", "c16", "c17", "c18", "c19", "c20", "c21", "c22", "c23", "c24", "c25",
    "c26", "c27", "c28", "c29", "c30", "c31", "c32", "c33", "c34", "c35", "c36", "c37", "c38",
    "c39",
];

fn of(count: usize, shape: Shape) -> Shape {
    let shape = NAMES[..count]
        .iter()
        .fold(shape, |shape, name| shape.regular(name));
    shape.restarts_all("trainer", 42).started_by("Auto")
}

async fn never_pod_of_twenty_containers_is_replayed_eight_at_a_time(stage: Stage) -> Result<()> {
    let proxy = through_proxy(&stage).await?;
    let pod = stage.running(of(20, Shape::never())).await?;
    pod.restarts_all("trainer", 42).await?;
    pod.restart_ended("by replay")?;
    for method in ["CreateContainer", "StartContainer"] {
        let most = proxy.most_at_once(method);
        ensure!(
            (2..=AT_ONCE).contains(&most),
            "{most} calls of {method} at once"
        );
    }
    Ok(())
}

async fn on_failure_pod_of_forty_containers_is_the_kubelets(stage: Stage) -> Result<()> {
    let pod = stage.running(of(40, Shape::on_failure())).await?;
    pod.restarts_all("trainer", 42).await?;
    pod.restart_ended("no replay: 40 containers are too many")?;
    // containerd 2.4 takes minutes for forty that end at once, whoever made them: one after another.
    for (ended, name) in NAMES.iter().enumerate() {
        pod.exit(name, 0).await?;
        wait::until("the runtime shows its end", PATIENCE, async || {
            let containers = pod.containers().await?;
            let running = containers.iter().filter(|it| it.state() == State::Running);
            Ok(if running.count() + ended < NAMES.len() {
                Ok(())
            } else {
                Err(describe(&containers))
            })
        })
        .await?;
    }
    Ok(())
}
