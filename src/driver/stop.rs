//! Stops containers that have time for it, as the kubelet does when a pod ends (`killContainer`,
//! `pkg/kubelet/kuberuntime/kuberuntime_container.go`).

use std::sync::Arc;
use std::time::Duration;

use tokio::select;
use tokio::time::{Instant, sleep, sleep_until, timeout, timeout_at};

use super::perform::Question;
use super::{Driver, State, lifecycle};
use crate::cri::CriError;
use crate::ids::{ContainerId, ContainerName};
use crate::kube::{Ending, LifecycleHook, PodSpec};
use crate::policy::LONGEST_GRACE;
use crate::restart::pod::{Pod, Task};
use crate::times::{
    ENDING_INTERVAL, POST_START_LIMIT, RETRY_INTERVAL, SHORTEST_GRACE, SIGNAL_INTERVAL,
    SIGNAL_LIMIT, SPEC_LIMIT,
};

impl Driver {
    /// Stops this container, which has so long for it.
    pub(super) fn begin_stop(
        self: &Arc<Self>,
        state: &mut State,
        id: &ContainerId,
        grace: Duration,
    ) {
        let until = Instant::now() + grace;
        state.end(id, until, || {
            tokio::spawn(Arc::clone(self).stop(id.clone(), until))
        });
    }

    async fn stop(self: Arc<Self>, id: ContainerId, until: Instant) {
        let asked = async {
            self.run_pre_stop(&id, until).await;
            self.ask_to_stop(&id, until).await;
        };
        select! {
            () = asked => self.kill(id).await,
            // Whoever ends the pod by now gives its containers the time that they have.
            () = self.until_unwanted(Task::Kill(&id)) => drop(self.lock().kills.remove(&id)),
        }
    }

    async fn until_unwanted(&self, task: Task<'_>) {
        while self.wants(task) {
            sleep(RETRY_INTERVAL).await;
        }
    }

    async fn run_pre_stop(&self, id: &ContainerId, until: Instant) {
        let Some(name) = self.instance(id).map(|it| it.name) else {
            return;
        };
        let (cri, spec) = (&self.tools.cri, self.spec().await);
        let hook = if let Some(spec) = &spec {
            let container = spec.container(&name);
            container.and_then(|it| it.lifecycle.pre_stop.clone())
        } else {
            let status = cri.container_status(id).await.ok();
            status.and_then(|it| LifecycleHook::pre_stop_in(&it.annotations))
        };
        let limit = until.saturating_duration_since(Instant::now());
        let Some(hook) = hook.filter(|_| !limit.is_zero()) else {
            return;
        };
        let address = spec.as_ref().and_then(|it| it.address.as_deref());
        // A hook that takes all the time has not failed (`executePreStopHook`): its call has longer.
        let run = lifecycle::run(&hook, cri, id, address, limit + SHORTEST_GRACE);
        match timeout_at(until, run).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => self
                .tools
                .reporter
                .pre_stop_failed(&self.pod, &name, &error),
            Err(_) => {
                tracing::info!(pod = %self.pod.key, container = %name, "a preStop hook has taken all the time to stop");
            }
        }
    }

    /// The pod's spec, which a plugin that has just come may not have been told yet.
    async fn spec(&self) -> Option<Arc<PodSpec>> {
        let known = async {
            loop {
                let spec = self.lock().pod.spec();
                match spec {
                    Some(spec) => return spec,
                    None => sleep(RETRY_INTERVAL).await,
                }
            }
        };
        timeout(SPEC_LIMIT, known).await.ok()
    }

    /// Sends the stop signal when the container's turn has come, and returns when it has ended or its time is up.
    async fn ask_to_stop(&self, id: &ContainerId, until: Instant) {
        while Instant::now() < until && !self.wants(Task::Signal(id)) {
            sleep(RETRY_INTERVAL).await;
        }
        let until = until.max(Instant::now() + SHORTEST_GRACE);
        // Whether or not it has heard the signal: when its time is up it is killed.
        if self.end_past_runtime(id, None, until).await.is_some() {
            return;
        }
        // While the runtime waits for a container to stop, no NRI plugin can register (containerd#14083), this one for another.
        // So it is asked again and again: it sends the signal once.
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            let stop = self
                .tools
                .cri
                .stop_container(id, left, left.min(SIGNAL_LIMIT));
            let pause = match self.bounds.kill(stop).await {
                Ok(()) | Err(CriError::Gone { .. }) => return,
                Err(CriError::Deadline { .. }) => SIGNAL_INTERVAL,
                Err(error) => {
                    tracing::warn!(pod = %self.pod.key, container = %id, %error, "could not ask a container to stop, trying again");
                    RETRY_INTERVAL
                }
            };
            sleep_until(until.min(Instant::now() + pause)).await;
        }
    }

    /// While containers stop, for minutes maybe, the kubelet may begin to end the pod.
    pub(super) async fn watch_for_ending(self: Arc<Self>, question: Question) {
        loop {
            sleep(ENDING_INTERVAL).await;
            if !self.wants(Task::Stop) {
                return;
            }
            if question.ask(&self.pod).await == Some(Ending::Pod) {
                return self.tell(Pod::is_ending);
            }
        }
    }

    /// Runs the postStart hook of a container that has just started, for as long as it takes, and returns when it is over or the
    /// next container need wait no longer. If it fails, the container is ended (`startContainer`).
    pub(super) async fn run_post_start(
        self: &Arc<Self>,
        id: &ContainerId,
        name: &ContainerName,
        spec: Arc<PodSpec>,
    ) {
        let (driver, id, name) = (Arc::clone(self), id.clone(), name.clone());
        let running = tokio::spawn(async move {
            let container = spec.container(&name);
            let Some(hook) = container.and_then(|it| it.lifecycle.post_start.as_ref()) else {
                return;
            };
            let (cri, address) = (&driver.tools.cri, spec.address.as_deref());
            let result = select! {
                result = lifecycle::run(hook, cri, &id, address, LONGEST_GRACE) => result,
                () = driver.until_unwanted(Task::End(&id)) => return,
            };
            if let Err(error) = result {
                driver
                    .tools
                    .reporter
                    .post_start_failed(&driver.pod, &name, &error);
                driver.with(|state, _| {
                    if state.pod.hook_failed(&id) {
                        driver.begin_stop(state, &id, spec.grace);
                    }
                });
            }
        });
        let _ = timeout(POST_START_LIMIT, running).await;
    }
}
