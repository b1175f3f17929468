//! A restart under way, and how far it is.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, bail};
use tokio::time::{Instant, sleep};

use crate::plugin::Phase;
use crate::pod::LivePod;
use crate::restarted::Before;
use crate::shape::Shape;
use crate::stage::Stage;
use crate::wait::{self, PATIENCE};

/// Some phases take but a few milliseconds.
const POLL: Duration = Duration::from_millis(1);

pub(crate) struct UnderWay {
    pub(crate) pod: Arc<LivePod>,
    pub(crate) before: Before,
}

impl UnderWay {
    /// The same with a fresh pod.
    pub(crate) async fn begin(stage: &Stage, shape: Shape) -> Result<Self> {
        Self::of(stage.running(shape).await?).await
    }

    /// The restart of a pod whose `trainer` exits with 42.
    pub(crate) async fn of(pod: Arc<LivePod>) -> Result<Self> {
        let before = Before::of(&pod).await?;
        pod.exit("trainer", 42).await?;
        Ok(Self { pod, before })
    }

    /// The phase on record, if there is one.
    pub(crate) fn phase(&self) -> Option<Phase> {
        self.pod.plugin.phase_of(&self.before.sandbox)
    }

    /// Waits for a phase. `false`: the restart was over before it was seen in it.
    pub(crate) async fn reaches(&self, phase: Phase) -> Result<bool> {
        let record = self.pod.plugin.record_file(&self.before.sandbox);
        let deadline = Instant::now() + PATIENCE;
        let mut begun = false;
        loop {
            match self.phase() {
                Some(now) if now == phase => return Ok(true),
                Some(_) => begun = true,
                None if begun && !record.exists() => return Ok(false),
                None => {}
            }
            if Instant::now() > deadline {
                let now = self.pod.recorder.current();
                bail!("the restart does not get to {phase:?}: {now}");
            }
            sleep(POLL).await;
        }
    }

    /// Waits until the plugin has nothing on record any more.
    pub(crate) async fn until_over(&self) -> Result<()> {
        let record = self.pod.plugin.record_file(&self.before.sandbox);
        wait::until("the restart is over", PATIENCE, async || {
            Ok(if record.exists() {
                Err(self.pod.recorder.current().to_string())
            } else {
                Ok(())
            })
        })
        .await
    }
}
