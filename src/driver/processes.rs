//! Ends containers past the runtime, where it would tell of an end that is held.

use std::io;
use std::time::Duration;

use nix::sys::signal::Signal;
use tokio::time::{sleep, timeout};

use super::Driver;
use crate::cri::process::Process;
use crate::cri::{CriError, Told};
use crate::ids::ContainerId;
use crate::times::{NOTED_LIMIT, STOP_LIMIT};

/// A container's first process, if it is for us to end.
pub(super) enum Found {
    /// With what asks it to stop, if that is known.
    Runs(Process, Option<Signal>),
    Ended,
    /// It is for the runtime.
    NotAsked,
}

impl Driver {
    /// That of this container. One that cannot be found is the runtime's to end: its exit may be seen too early.
    pub(super) async fn process(&self, id: &ContainerId) -> Found {
        if self.tools.hold.keeper().is_none() {
            return Found::NotAsked;
        }
        // On the heap: what a runtime tells at length is awaited in large futures.
        let told = Box::pin(self.tools.cri.told(id)).await;
        let found = told.map_err(|error| error.to_string()).and_then(|told| {
            let Some(Told {
                pid: Some(pid),
                stop_signal,
                ..
            }) = told
            else {
                return Err("the runtime does not tell its process".into());
            };
            let process = Process::of(id, pid).map_err(|error| error.to_string())?;
            Ok(process.map_or(Found::Ended, |it| Found::Runs(it, stop_signal)))
        });
        found.unwrap_or_else(|error| {
            tracing::warn!(pod = %self.pod.key, container = %id, error, "the runtime is to end a container whose exit may be seen too early by that");
            Found::NotAsked
        })
    }

    /// Ends a placeholder that is to be removed. CRI-O shows it as exited from its end on, of which it is told only when it has
    /// removed it: what it does by itself after an end takes longer than that.
    pub(super) async fn end_unseen(&self, id: &ContainerId) {
        let placeholder = self.instance(id).is_some_and(|it| it.is_placeholder());
        if let Some(keeper) = self.tools.hold.keeper()
            && placeholder
        {
            keeper.hide(id.clone());
            if let Found::Runs(process, _) = self.process(id).await {
                // If it does not end, its removal will tell.
                let _ = end(&process, Signal::SIGKILL, STOP_LIMIT).await;
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
pub(super) async fn end(
    process: &Process,
    signal: Signal,
    limit: Duration,
) -> Result<(), CriError> {
    let failed = |source: io::Error| CriError::Signal { signal, source };
    process.signal(signal).map_err(failed)?;
    match timeout(limit, process.end()).await {
        Ok(ended) => ended.map_err(failed),
        Err(_) => Err(CriError::Deadline {
            call: "the end of a process",
            limit,
        }),
    }
}
