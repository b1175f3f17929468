//! Ends containers, and learns of ends that nobody has told.

use std::sync::Arc;
use std::time::Duration;

use nix::sys::signal::Signal;
use tokio::time::{Instant, sleep, timeout};

use super::{Driver, State};
use crate::cri::{ContainerState, CriError};
use crate::exit_hold;
use crate::ids::{ContainerId, ExitCode};
use crate::node::InstanceState;
use crate::restart::machine::Event;
use crate::restart::pod::Task;
use crate::times::{
    EVENT_LIMIT, HOOK_INTERVAL, HOOK_LIMIT, OOM_INTERVAL, OOM_LIMIT, RETRY_INTERVAL, STOP_LIMIT,
};

/// How a container ends whose first process gets SIGKILL, from whomever.
const KILLED: InstanceState = InstanceState::Ended(Some(ExitCode::KILLED));

impl Driver {
    pub(super) fn begin_kill(self: &Arc<Self>, state: &mut State, id: &ContainerId) {
        state.end(id, Instant::now(), || {
            tokio::spawn(Arc::clone(self).kill(id.clone()))
        });
    }

    /// At once, whatever it is doing.
    pub(super) async fn kill(self: Arc<Self>, id: ContainerId) {
        // A pod that was deleted meanwhile has time to stop.
        while self.wants(Task::Kill(&id)) {
            let result = self.bounds.kill(self.kill_once(&id)).await;
            let event = match result {
                // The runtime stops nothing that it has not started (containerd `stopContainer`), and starts it then.
                Ok(()) if self.is_yet_to_end(&id).await => None,
                Ok(()) => Some(Event::Exited(id.clone())),
                Err(CriError::Gone { .. }) => Some(Event::Gone(id.clone())),
                Err(error) => {
                    tracing::warn!(pod = %self.pod.key, container = %id, %error, "could not stop a container, trying again");
                    None
                }
            };
            let Some(event) = event else {
                // Even when its exit can no longer be held: it cannot start again before it has ended.
                sleep(RETRY_INTERVAL).await;
                continue;
            };
            return self.with(|state, now| {
                state.kills.remove(&id);
                state.pod.feed(event, now);
            });
        }
        self.lock().kills.remove(&id);
    }

    async fn kill_once(&self, id: &ContainerId) -> Result<(), CriError> {
        let until = Instant::now() + STOP_LIMIT;
        let ended = self.end_past_runtime(id, Some(Signal::SIGKILL), until);
        if let Some(ended) = ended.await {
            return ended;
        }
        let cri = &self.tools.cri;
        cri.stop_container(id, Duration::ZERO, STOP_LIMIT).await
    }

    /// Asks the runtime only about a container of which no end has been heard.
    async fn is_yet_to_end(&self, id: &ContainerId) -> bool {
        if !self.wants(Task::End(id)) {
            return false;
        }
        match self.tools.cri.container_status(id).await {
            Ok(status) => status.state != ContainerState::Exited,
            Err(CriError::Gone { .. }) => false,
            Err(_) => true,
        }
    }

    /// The hook of a container that has exited is missing. While the runtime shows that it runs, nobody has seen the exit
    /// and the hook may yet come.
    pub(super) async fn await_hook(self: Arc<Self>, id: ContainerId) {
        let until = Instant::now() + exit_hold::LIMIT;
        sleep(HOOK_LIMIT).await;
        while Instant::now() < until
            && !self.wants(Task::Hold(&id))
            && self.shows_running(&id).await
        {
            sleep(HOOK_INTERVAL).await;
        }
        self.tell(|pod, now| pod.hook_is_missing(&id, now));
    }

    async fn shows_running(&self, id: &ContainerId) -> bool {
        let status = self.tools.cri.container_status(id).await;
        status.is_ok_and(|status| status.state == ContainerState::Running)
    }

    /// The exit event of a container is missing: asks the runtime, for as long as anybody needs the code. The exit of one whose
    /// hook waits is released if the runtime does not know either. After a success, for one, the kubelet may not start again
    /// what ended by itself in a restart.
    pub(super) async fn learn_code(self: Arc<Self>, id: ContainerId) {
        let until = Instant::now() + EVENT_LIMIT + HOOK_LIMIT;
        loop {
            sleep(EVENT_LIMIT).await;
            if !self.wants(Task::Code(&id)) {
                return;
            }
            let code = match self.code_from_task(&id).await {
                None => self.code_from_status(&id).await,
                code => code,
            };
            if code.is_some() {
                return self.ended(&id, code);
            }
            if Instant::now() >= until && self.tell(|pod, _| pod.code_is_unknown(&id)) {
                tracing::warn!(pod = %self.pod.key, container = %id, "nobody knows the exit code: let the exit go");
            }
        }
    }

    /// Asks the runtime whether this container, which has ended, was out of memory: once, or for as long as the news may be
    /// under way where its first process may be the one that was killed for it.
    pub(super) async fn learn_oom(self: Arc<Self>, id: ContainerId) {
        let may_come = self.instance(&id).is_some_and(|it| it.state == KILLED);
        let asking = async {
            while self.wants(Task::Oom(&id)) {
                if self.is_oom_killed(&id).await {
                    return true;
                }
                if !may_come {
                    break;
                }
                sleep(OOM_INTERVAL).await;
            }
            false
        };
        let killed = timeout(OOM_LIMIT, asking).await.unwrap_or(false);
        self.tell(|pod, now| pod.oom_told(&id, killed, now));
    }

    async fn is_oom_killed(&self, id: &ContainerId) -> bool {
        let status = self.tools.cri.container_status(id).await;
        status.is_ok_and(|status| status.is_oom_killed())
    }

    async fn code_from_status(&self, id: &ContainerId) -> Option<ExitCode> {
        let status = self.tools.cri.container_status(id).await;
        status.ok()?.exit_code
    }

    async fn code_from_task(&self, id: &ContainerId) -> Option<ExitCode> {
        let containerd = self.tools.containerd.as_ref()?;
        // The shim may not answer while its hook runs: then nobody knows, which is said by who asked.
        containerd.task_exit_code(id).await.ok().flatten()
    }

    /// Asks the runtime about a container of whose start, end or removal nobody may have told: it may have fallen between two
    /// plugins.
    pub(super) async fn verify(self: Arc<Self>, id: ContainerId) {
        match self.tools.cri.container_status(&id).await {
            Ok(status) if status.state == ContainerState::Exited => {
                self.ended(&id, status.exit_code);
            }
            Ok(status) if status.state == ContainerState::Running => self.started(&id),
            Err(CriError::Gone { .. }) => self.removed(&id),
            // The runtime is away and nothing will be created anyway.
            Ok(_) | Err(_) => {}
        }
    }
}
