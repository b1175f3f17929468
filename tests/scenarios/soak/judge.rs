//! What must be true of a pod after a bout.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::bout::{Bout, TRIGGER};
use super::strikes::Struck;
use super::witness::Witness;
use crate::evidence::Deed;
use crate::pod::LivePod;
use crate::recorder::{Seen, Snapshot};
use crate::restarted::{Before, TWO_RELISTS};
use crate::runtime::{Container, State, describe};
use crate::shape::{Kind, RestartPolicy};
use crate::wait;

/// From the end of the last fault until a pod must have settled.
const LIMIT: Duration = Duration::from_mins(1);
/// Plugin and runtime, if they are back by then, find the hooks waiting: they give up after 8 s.
const IN_TIME: Duration = Duration::from_secs(7);

/// Whose starts may be cancelled in the middle.
#[derive(Clone, Copy)]
pub(super) struct Cancelled {
    pub(super) plugins: bool,
    pub(super) kubelets: bool,
    /// Everything that it was doing, then.
    pub(super) runtimes: bool,
}

/// A pod whose trigger exits, and what is known of it.
pub(crate) struct Case {
    pod: Arc<LivePod>,
    before: Before,
    pub(super) witness: Witness,
    cancelled: Cancelled,
}

impl Case {
    pub(super) fn new(
        pod: Arc<LivePod>,
        before: Before,
        witness: Witness,
        cancelled: Cancelled,
    ) -> Self {
        Self {
            pod,
            before,
            witness,
            cancelled,
        }
    }

    /// Waits until the pod is as it is to be, and says in a word how that is.
    pub(super) async fn is_settled(&self, bout: &Bout, struck: &Struck) -> Result<&'static str> {
        let pod = &self.pod;
        // A kubelet that asks a runtime which has just come back is told of exits that were held (docs/conformance.md).
        let never = pod.shape.policy == RestartPolicy::Never;
        let told = bout.ends_runtime() && never;
        // Nor can the exit of one be held that was started without a hook while others stopped.
        let unhooked = pod.shape.asks_for("RestartPod") && never && bout.cuts_nri_for_long();
        let seen = told || unhooked;
        let must_restart = self.witness.held() && struck.back < IN_TIME && !seen;
        let settled = wait::until("the pod has settled", LIMIT, async || {
            self.unsettled(must_restart).await
        });
        let outcome = settled.await.with_context(|| {
            let held = if must_restart {
                "its exits were held and "
            } else {
                ""
            };
            format!("{}: {held}the pod has not come to rest", pod.name)
        })?;
        if outcome == CANCELLED {
            return Ok(outcome);
        }
        let lasts = pod.recorder.stays_for(TWO_RELISTS, |now| {
            // What is left alone may have nothing that runs.
            let mut containers = now.containers.values();
            let ended = outcome == LEFT_ALONE && !containers.any(|it| it.is_running);
            let over = now.is_over() && outcome != FAILED && !ended;
            over.then(|| format!("the pod is {}", now.phase))
        });
        lasts
            .await
            .with_context(|| format!("{}: it did not last", pod.name))?;
        let seen = pod.seen_since(&self.before);
        // What a replay was starting when the runtime ended is removed, and its number given again (docs/compatibility.md).
        if !(self.cancelled.runtimes && pod.shape.asks_for("Auto")) {
            counts_only_go_up(&seen).with_context(|| pod.name.clone())?;
        }
        if must_restart {
            let failed = seen.iter().find(|it| it.is_over());
            ensure!(
                failed.is_none(),
                "{}: its exits were held, and it was seen {}",
                pod.name,
                failed.map_or("", |it| &it.phase)
            );
            self.regulars_began_last()
                .with_context(|| pod.name.clone())?;
        }
        Ok(outcome)
    }

    /// How the pod is if it is at rest, or else why it is not.
    async fn unsettled(&self, must_restart: bool) -> Result<Result<&'static str, String>> {
        let pod = &self.pod;
        // The runtime may be just coming back.
        let containers = match pod.containers().await {
            Ok(containers) => containers,
            Err(error) => return Ok(Err(format!("{error:#}"))),
        };
        let now = self.with_forgotten_codes(pod.recorder.current());
        // What the kubelet was starting when the runtime ended stays as it is, made and not started, and the pod fails by it.
        let cut = self.cancelled.runtimes && now.is_over();
        if let Some(problem) = litter(&containers, cut) {
            return Ok(Err(format!("{problem}\n{}", describe(&containers))));
        }
        if pod.plugin.record_file(&self.before.sandbox).exists() {
            return Ok(Err("a restart is on record".to_owned()));
        }
        let unsettled = || format!("{now}\n{}", describe(&containers));
        if let Some((kind, _)) = now.restarting.iter().find(|(_, told)| told.status) {
            return Ok(Err(format!("{kind} is True: {}", unsettled())));
        }
        let ran = containers.iter().any(|it| it.state() == State::Running);
        let mut broken = now.containers.iter();
        let broken = broken.find(|(_, seen)| seen.state.contains("StartError"));
        // The others may go on (see docs/compatibility.md).
        let ended = (now.is_over() && !ran) || self.is_left_alone(&now);
        if ended && self.has_cancelled_start(broken.is_some()) {
            return Ok(Ok(CANCELLED));
        }
        // To the kubelet, a start that was cancelled has ended for good as well.
        let explained = broken.is_none() || self.has_cancelled_start(true);
        if explained && pod.is_stale_since(&self.before) && pod.runs_anew(&self.before, &containers)
        {
            return Ok(Ok("restarted, and its status is stale"));
        }
        // One that has failed, because nobody held its exits any more, has failed by whatever was last.
        if let Some((name, _)) = broken.filter(|_| must_restart || !now.is_over()) {
            return Ok(Err(format!("{name} could not be started: {}", unsettled())));
        }
        let healthy = pod.not_running(&now).is_none();
        Ok(
            if healthy && self.before.untold_of_lasting(pod, &now).is_none() {
                Ok(RESTARTED)
            } else if must_restart {
                Err(unsettled())
            } else if healthy && self.is_renewed(&now) {
                Ok("runs on")
            } else if now.is_over() && !ran {
                Ok(FAILED)
            } else if self.is_left_alone(&now) {
                Ok(LEFT_ALONE)
            } else {
                Err(unsettled())
            },
        )
    }

    /// Whether the runtime was starting a container for somebody who was killed: by its own words. One that ended in the middle
    /// of it says nothing.
    fn has_cancelled_start(&self, broken: bool) -> bool {
        let Cancelled {
            plugins, kubelets, ..
        } = self.cancelled;
        let log = self.pod.node.log(&self.pod.node.runtime_name);
        let created = format!(
            "CreateContainer within sandbox \\\"{}\\\"",
            self.before.sandbox
        );
        let created = log.lines().filter(|line| line.contains(&created));
        let ids = created.filter_map(|line| line.rsplit("\\\"").nth(1));
        let ids: BTreeSet<&str> = ids.collect();
        let mut failures = log
            .lines()
            .filter_map(|line| line.split_once("StartContainer for \\\""))
            .filter(|(_, failure)| failure.contains("context canceled"));
        let cancelled = failures.any(|(_, failure)| ids.iter().any(|id| failure.starts_with(id)));
        (cancelled && (plugins || kubelets)) || (broken && kubelets)
    }

    /// A runtime that ends while it takes note of an exit has forgotten its code. The kubelet needs that of an init container no
    /// longer when what follows it runs.
    fn with_forgotten_codes(&self, mut now: Snapshot) -> Snapshot {
        for init in self.pod.shape.of_kind(Kind::Init) {
            let seen = now.containers.get_mut(init.name);
            let forgotten = |it: &&mut Seen| self.cancelled.runtimes && it.state == FORGOTTEN;
            if let Some(seen) = seen.filter(forgotten) {
                "exit 0 (forgotten)".clone_into(&mut seen.state);
            }
        }
        now
    }

    /// Whether the status tells of the exit: its container was started again, by whomever.
    fn is_renewed(&self, now: &Snapshot) -> bool {
        let trigger = now.containers.get(TRIGGER).map(|it| it.id.as_str());
        trigger != self.before.seen_id(TRIGGER)
    }

    /// As without the plugin: a `Never` pod whose container has exited for good, and whose others run.
    fn is_left_alone(&self, now: &Snapshot) -> bool {
        let shape = &self.pod.shape;
        shape.policy == RestartPolicy::Never
            && shape.containers.iter().all(|it| {
                let seen = now.containers.get(it.name);
                let exited = seen.is_some_and(|seen| seen.state.starts_with("exit "));
                exited || it.unhealthy(now).is_none()
            })
    }

    /// As the containers themselves wrote it down: what runs now began after the init containers were through.
    fn regulars_began_last(&self) -> Result<()> {
        let after = self.pod.evidence_since(&self.before)?;
        let last = |name: &str, deed: &Deed| {
            let mut entries = after.iter();
            entries.rposition(|it| it.container == name && it.deed == *deed)
        };
        let through = self.pod.shape.of_kind(Kind::Init);
        let through = through.map(|it| (it.name, last(it.name, &Deed::Ended)));
        for (init, through) in through {
            let through = through.with_context(|| format!("{init} did not run again"))?;
            for regular in self.pod.shape.of_kind(Kind::Regular) {
                let began = last(regular.name, &Deed::Began);
                ensure!(
                    began.is_some_and(|began| began > through),
                    "{} began before {init} was through",
                    regular.name
                );
            }
        }
        Ok(())
    }
}

const FORGOTTEN: &str = "exit 255 (Unknown)";

const RESTARTED: &str = "restarted";
const FAILED: &str = "failed";
const LEFT_ALONE: &str = "is left alone";
/// Plugin, kubelet or runtime ended while the runtime was starting a container for it (see docs/compatibility.md).
const CANCELLED: &str = "a start was cancelled";

/// What nobody would ever take away, or what must never be. `cut`: a start of the kubelet's may have been.
fn litter(containers: &[Container], cut: bool) -> Option<String> {
    let mut running = BTreeMap::<&str, usize>::new();
    let is_followed = |it: &Container| {
        let mut others = containers.iter();
        others.any(|other| other.name() == it.name() && other.attempt() > it.attempt())
    };
    for container in containers {
        if container.is_placeholder() {
            return Some("a placeholder is there".to_owned());
        }
        match container.state() {
            // The runtime ended between the kubelet's two calls; the kubelet made another, and collects this one.
            State::Created if container.is_the_kubelets() && (cut || is_followed(container)) => {}
            State::Created => return Some(format!("{} was never started", container.name())),
            State::Running => *running.entry(container.name()).or_default() += 1,
            State::Exited | State::Unknown => {}
        }
    }
    let twice = running.into_iter().find(|(_, count)| *count > 1);
    twice.map(|(name, _)| format!("{name} runs twice"))
}

/// `restartCount` of each container, in the order in which the API server told of it.
fn counts_only_go_up(seen: &[Snapshot]) -> Result<()> {
    let mut highest = BTreeMap::<&str, i32>::new();
    // The number of one that was made and never ran is given again.
    let ran = seen.iter().flat_map(|it| &it.containers);
    for (name, now) in ran.filter(|(_, it)| !it.state.starts_with("waiting")) {
        let before = highest.insert(name, now.restarts).unwrap_or(0);
        ensure!(
            now.restarts >= before,
            "restartCount of {name} went from {before} to {}",
            now.restarts
        );
    }
    Ok(())
}
