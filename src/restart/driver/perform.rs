//! Does what the machine wants done, in tasks that hold no lock while they wait.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{sleep, sleep_until};

use super::state::State;
use super::{Driver, HOOK_LIMIT, Job, unix_ms};
use crate::cri::CriError;
use crate::ids::{ContainerId, ContainerName, ExitCode};
use crate::node::InstanceState;
use crate::report::Story;
use crate::restart::machine::{Effect, Event, Machine, Outcome, Phase};
use crate::restart::plan::{Plan, Way};
use crate::restart::record::Record;

/// The exit event is sent before the hook runs; one that is this late was lost, or came before this process.
const EVENT_LIMIT: Duration = Duration::from_millis(300);
/// Between two tries of a call that failed.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);
/// The runtime's answer to a stop, beyond the grace period.
const STOP_LIMIT: Duration = Duration::from_secs(10);
/// How long one removal is tried before it is tried afresh.
const REMOVE_LIMIT: Duration = Duration::from_secs(30);

impl Driver {
    pub(super) async fn work(self: Arc<Self>, mut queue: mpsc::UnboundedReceiver<Job>) {
        loop {
            let deadline = self.lock().machine.as_ref().and_then(Machine::deadline);
            let tick = async {
                match deadline {
                    Some(at) => sleep_until(at.into()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                job = queue.recv() => match job {
                    Some(Job::Do(effect)) => self.perform(effect),
                    Some(Job::Close) | None => return,
                },
                () = tick => self.feed(&mut self.lock(), Event::Tick),
            }
        }
    }

    pub(super) fn perform(self: &Arc<Self>, effect: Effect) {
        match effect {
            Effect::Save => self.save(),
            Effect::Kill(id) => {
                let mut state = self.lock();
                let task = tokio::spawn(Arc::clone(self).kill(id.clone()));
                state.kills.insert(id, task.abort_handle());
            }
            Effect::MakePlaceholder(name, like) => {
                tokio::spawn(Arc::clone(self).make_placeholder(name, like));
            }
            Effect::Remove(id) => self.sweep(id),
            Effect::Finish(outcome) => self.finish(outcome),
            // Done at once in `apply`.
            Effect::Release(_) | Effect::Again => {}
        }
    }

    pub(super) fn save(&self) {
        let record = self.lock().machine.as_ref().map(|machine| Record {
            phase: machine.phase(),
            plan: machine.plan().clone(),
        });
        if let Some(record) = record
            && let Err(error) = self.tools.records.save(&record)
        {
            tracing::warn!(pod = %self.pod.key, %error, "could not write down the restart: it goes on, but not beyond this process");
        }
    }

    async fn kill(self: Arc<Self>, id: ContainerId) {
        let grace = Duration::from_millis(
            self.lock()
                .machine
                .as_ref()
                .map_or(0, |machine| machine.plan().grace_ms),
        );
        loop {
            let result = self
                .tools
                .cri
                .stop_container(&id, grace, grace + STOP_LIMIT)
                .await;
            let event = match result {
                Ok(()) => Event::Exited(id.clone()),
                Err(CriError::Gone { .. }) => Event::Gone(id.clone()),
                Err(error) => {
                    tracing::warn!(pod = %self.pod.key, container = %id, %error, "could not stop a container, trying again");
                    sleep(RETRY_INTERVAL).await;
                    if self.still_holds(&id) {
                        continue;
                    }
                    return;
                }
            };
            let mut state = self.lock();
            state.kills.remove(&id);
            self.feed(&mut state, event);
            return;
        }
    }

    async fn make_placeholder(self: Arc<Self>, name: ContainerName, like: ContainerId) {
        let round = |state: &State| {
            let machine = state.machine.as_ref()?;
            Some((machine.plan().id.clone(), machine.plan().again))
        };
        let Some((restart, again)) = round(&self.lock()) else {
            return;
        };
        loop {
            match self
                .placeholders
                .make(&self.tools.cri, &name, &like, &restart)
                .await
            {
                Ok(id) => {
                    let mut state = self.lock();
                    if round(&state) == Some((restart, again)) {
                        self.feed(&mut state, Event::PlaceholderMade(name, id));
                    } else {
                        // The restart that wanted it is over: the pod was deleted, for one.
                        self.sweep(id);
                    }
                    return;
                }
                Err(CriError::Gone { .. }) => {
                    self.feed(&mut self.lock(), Event::Gone(like));
                    return;
                }
                Err(error) => {
                    tracing::warn!(pod = %self.pod.key, container = %name, %error, "could not make a placeholder, trying again");
                    sleep(RETRY_INTERVAL).await;
                    if !self.still_holds(&like) {
                        return;
                    }
                }
            }
        }
    }

    pub(super) fn sweep(self: &Arc<Self>, id: ContainerId) {
        let driver = Arc::clone(self);
        tokio::spawn(async move {
            while let Err(error) = driver
                .tools
                .cri
                .remove_when_exited(&id, tokio::time::Instant::now() + REMOVE_LIMIT)
                .await
            {
                tracing::warn!(pod = %driver.pod.key, container = %id, %error, "could not remove a container, trying again");
                if driver.jobs.is_closed() {
                    return;
                }
                sleep(RETRY_INTERVAL).await;
            }
            driver.removed(&id);
        });
    }

    pub(super) fn finish(&self, outcome: Outcome) {
        let over = {
            let mut state = self.lock();
            // Another restart may have taken its place meanwhile: the record is that one's.
            state
                .machine
                .take_if(|machine| machine.phase() == Phase::Over)
        };
        let Some(machine) = over else { return };
        if let Err(error) = self.tools.records.forget(&self.pod.sandbox) {
            tracing::warn!(pod = %self.pod.key, %error, "could not remove the record of a restart that is over");
        }
        let took = Duration::from_millis(unix_ms().saturating_sub(machine.plan().decided_at_ms));
        let (reporter, story) = (&self.tools.reporter, story(machine.plan()));
        match outcome {
            Outcome::Completed => reporter.restarted(&story, took),
            Outcome::InitFailed => reporter.init_failed(&story, took),
            Outcome::Deleted => reporter.deleted_meanwhile(&story, took),
            Outcome::TimedOut => reporter.gave_up(&story, took, &machine.waiting_for()),
        }
    }

    fn still_holds(&self, id: &ContainerId) -> bool {
        self.lock()
            .machine
            .as_ref()
            .is_some_and(|machine| machine.holds(id))
    }

    /// The exit event of a container whose hook waits is missing: asks the runtime, and lets go if it does not
    /// know either.
    pub(super) fn ask_for_code(self: &Arc<Self>, id: &ContainerId) {
        let driver = Arc::clone(self);
        let id = id.clone();
        tokio::spawn(async move {
            sleep(EVENT_LIMIT).await;
            if !driver.waits_for_code(&id) {
                return;
            }
            if let Some(code) = driver.code_from_task(&id).await {
                driver.ended(&id, Some(code));
                return;
            }
            sleep(HOOK_LIMIT).await;
            if driver.waits_for_code(&id) {
                tracing::warn!(pod = %driver.pod.key, container = %id, "nobody knows the exit code: let the exit go");
                driver.lock().holds.remove(&id);
            }
        });
    }

    async fn code_from_task(&self, id: &ContainerId) -> Option<ExitCode> {
        let containerd = self.tools.containerd.as_ref()?;
        // The shim may not answer while its hook runs: then nobody knows, which is said by who asked.
        containerd.task_exit_code(id).await.ok().flatten()
    }

    fn waits_for_code(&self, id: &ContainerId) -> bool {
        let state = self.lock();
        let unknown = state
            .instances
            .get(id)
            .is_some_and(|instance| instance.state == InstanceState::Ended(None));
        let replaced = state
            .machine
            .as_ref()
            .is_some_and(|machine| machine.replaces(id));
        unknown && !replaced && state.holds.contains_key(id)
    }

    pub(super) fn later(
        self: &Arc<Self>,
        after: Duration,
        id: &ContainerId,
        then: impl FnOnce(&Arc<Self>, &mut State, &ContainerId) + Send + 'static,
    ) {
        let driver = Arc::clone(self);
        let id = id.clone();
        tokio::spawn(async move {
            sleep(after).await;
            let mut state = driver.lock();
            then(&driver, &mut state, &id);
        });
    }
}

pub(super) fn story(plan: &Plan) -> Story<'_> {
    Story {
        pod: &plan.pod,
        restart: &plan.id.0,
        container: &plan.trigger.name,
        code: plan.trigger.code,
        whole_pod: plan.whole_pod,
        way: match plan.way {
            Way::Kept => "by the pod's restart policy",
            Way::Shielded => "behind placeholders",
            Way::Cleared => "from the first init container",
        },
    }
}
