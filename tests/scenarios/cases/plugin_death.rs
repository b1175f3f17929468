//! The plugin is killed with -9 in the middle of a restart and started again: the pod runs at the
//! end, and nothing is left behind.

use std::time::Duration;

use anyhow::{Result, bail};
use tokio::time::{Instant, sleep};

use crate::plugin::Phase;
use crate::pod::LivePod;
use crate::restarted::Before;
use crate::scenario::{Company, Scenario};
use crate::shape::Shape;
use crate::stage::Stage;
use crate::wait::{self, PATIENCE};

/// A phase may be over before it is seen, or between the look and the kill.
const TRIES: usize = 4;

/// What it is called, what it is, and the phases that its restart goes through.
type Pod = (&'static str, fn() -> Shape, &'static [Phase]);

pub(crate) fn scenarios() -> Vec<Scenario> {
    use Phase::{Clear, Down, Shielded, Up};
    let pods: [Pod; 3] = [
        ("never_pod", never, &[Down, Up]),
        (
            "never_pod_with_inits",
            never_with_inits,
            &[Down, Shielded, Clear, Up],
        ),
        (
            "always_pod_with_inits",
            always_with_inits,
            &[Down, Clear, Up],
        ),
    ];
    let mut scenarios = Vec::new();
    for (pod, shape, phases) in pods {
        for &phase in phases {
            for (when, away) in [
                ("at_once", Duration::ZERO),
                ("after_1s", Duration::from_secs(1)),
            ] {
                let name = format!(
                    "{pod}_survives_a_kill_while_{}_and_a_start_{when}",
                    format!("{phase:?}").to_lowercase()
                );
                scenarios.push(Scenario::new(name, Company::Alone, move |stage| {
                    survives(stage, shape(), phase, away)
                }));
            }
        }
    }
    scenarios
}

fn never() -> Shape {
    Shape::never()
        .regular("trainer")
        .regular("logger")
        .regular("server")
        .restarts_all("trainer", 42)
}

fn never_with_inits() -> Shape {
    Shape::never()
        .init("fetch")
        .sidecar("proxy")
        .regular("trainer")
        .regular("logger")
        .restarts_all("trainer", 42)
}

fn always_with_inits() -> Shape {
    Shape::always()
        .init("fetch")
        .sidecar("proxy")
        .regular("trainer")
        .regular("logger")
        .restarts_all("trainer", 42)
}

/// `away` is how long there is no plugin.
async fn survives(stage: Stage, shape: Shape, phase: Phase, away: Duration) -> Result<()> {
    let pod = stage.running(shape).await?;
    for _ in 0..TRIES {
        let before = Before::of(&pod).await?;
        pod.exit("trainer", 42).await?;
        let died_in = kill_in(&stage, &pod, &before, phase).await?;
        sleep(away).await;
        if stage.plugin.start().await? {
            stage.plugin.until_ready(1).await?;
        }
        // What the kubelet started meanwhile may run, and yet not last: the plugin finishes what it began.
        let record = stage.plugin.record_file(&before.sandbox);
        wait::until("the restart is over", PATIENCE, async || {
            Ok(if record.exists() {
                Err(pod.recorder.current().to_string())
            } else {
                Ok(())
            })
        })
        .await?;
        pod.has_recovered(&before).await?;
        if died_in == Some(phase) {
            return Ok(());
        }
    }
    bail!("the plugin could not be caught {phase:?} in {TRIES} restarts")
}

/// Kills the plugin as soon as the restart is in that phase. Returns the phase on record at its
/// death; none if the restart was over first.
async fn kill_in(
    stage: &Stage,
    pod: &LivePod,
    before: &Before,
    phase: Phase,
) -> Result<Option<Phase>> {
    let deadline = Instant::now() + PATIENCE;
    let mut begun = false;
    loop {
        match stage.plugin.phase_of(&before.sandbox) {
            Some(now) if now == phase => {
                stage.plugin.kill().await?;
                return Ok(stage.plugin.phase_of(&before.sandbox));
            }
            Some(_) => begun = true,
            None if begun && !stage.plugin.record_file(&before.sandbox).exists() => {
                return Ok(None);
            }
            None if Instant::now() > deadline => {
                bail!("no restart began: {}", pod.recorder.current())
            }
            None => {}
        }
        sleep(Duration::from_millis(1)).await;
    }
}
