//! Ends containers past the runtime, where it would tell of an end that is held.

use std::io;

use nix::sys::signal::Signal;
use tokio::time::{Instant, sleep, timeout_at};

use super::Driver;
use crate::cri::CriError;
use crate::cri::process::Process;
use crate::ids::ContainerId;
use crate::times::{NOTED_LIMIT, STOP_LIMIT};

impl Driver {
    /// Sends this container's first process that signal, or the one that asks it to stop, and waits for its end until then.
    /// `None`: the runtime is to end it.
    pub(super) async fn end_past_runtime(
        &self,
        id: &ContainerId,
        signal: Option<Signal>,
        until: Instant,
    ) -> Option<Result<(), CriError>> {
        self.tools.hold.keeper()?;
        let for_the_runtime = |error: &str| {
            tracing::warn!(pod = %self.pod.key, container = %id, error, "the runtime is to end a container whose exit may be seen too early by that");
        };
        // On the heap: what a runtime tells at length is awaited in large futures.
        let told = match Box::pin(self.tools.cri.told(id)).await {
            Ok(told) => told,
            Err(error) => {
                for_the_runtime(&error.to_string());
                return None;
            }
        };
        let Some((pid, stop_signal)) = told.and_then(|it| Some((it.pid?, it.stop_signal))) else {
            for_the_runtime("it does not tell its process");
            return None;
        };
        let process = match Process::of(id, pid) {
            Ok(Some(process)) => process,
            Ok(None) => return Some(Ok(())),
            Err(error) => {
                for_the_runtime(&error.to_string());
                return None;
            }
        };
        let ended = end(&process, signal.or(stop_signal)?, until).await;
        if let Err(CriError::Signal { source, .. }) = &ended
            && source.kind() == io::ErrorKind::PermissionDenied
        {
            for_the_runtime(&format!(
                "the plugin may not end it (CAP_KILL, SELinux): {source}"
            ));
            return None;
        }
        Some(ended)
    }

    /// Ends a placeholder that is to be removed. CRI-O shows it as exited from its end on, of which it is told only when it has
    /// removed it: what it does by itself after an end takes longer than that.
    pub(super) async fn end_unseen(&self, id: &ContainerId) {
        // What is swept is not known any more.
        let placeholder = self.instance(id).is_none_or(|it| it.is_placeholder());
        if let Some(keeper) = self.tools.hold.keeper()
            && placeholder
        {
            keeper.hide(id.clone());
            let until = Instant::now() + STOP_LIMIT;
            let ended = self.end_past_runtime(id, Some(Signal::SIGKILL), until);
            // If it does not end, its removal will tell.
            if ended.await.is_some() {
                sleep(NOTED_LIMIT).await;
            }
        }
    }

    /// It has been removed: whoever hears of its end knows nothing of it.
    pub(super) fn end_is_over(&self, id: &ContainerId) {
        if let Some(keeper) = self.tools.hold.keeper() {
            keeper.show(id.clone());
        }
    }
}

/// Sends that signal and waits for the end.
async fn end(process: &Process, signal: Signal, until: Instant) -> Result<(), CriError> {
    let failed = |source: io::Error| CriError::Signal { signal, source };
    process.signal(signal).map_err(failed)?;
    let limit = until.saturating_duration_since(Instant::now());
    match timeout_at(until, process.end()).await {
        Ok(ended) => ended.map_err(failed),
        Err(_) => Err(CriError::Deadline {
            call: "the end of a process",
            limit,
        }),
    }
}
