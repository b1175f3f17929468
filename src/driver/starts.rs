//! What is being started while this process ends.

use std::mem;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use tokio::sync::RwLock;
use tokio::time::{Instant, sleep_until};

use crate::times::RELIST_INTERVAL;

/// The calls that make and start containers. One that ends with this process leaves a container that never ran, which to the
/// kubelet has failed, or waits.
#[derive(Debug, Default)]
pub struct Starts {
    calls: RwLock<()>,
    last: Mutex<Option<Instant>>,
    ending: AtomicBool,
}

impl Starts {
    /// Makes and starts containers, which nothing interrupts but the death of this process. Nothing is begun any more when it
    /// is about to end.
    pub(super) async fn carry_out<T>(&self, calls: impl Future<Output = T>) -> T {
        let _shared = self.calls.read().await;
        let result = calls.await;
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        result
    }

    /// Whether this process is about to end: whatever is decided now, nobody carries out, and a successor goes on from what is
    /// on the disk.
    pub(super) fn are_ending(&self) -> bool {
        self.ending.load(Ordering::Relaxed)
    }

    /// Waits until what is being started has been, and until the kubelet sees it run: it creates what it has not seen run,
    /// and only a plugin that is there refuses. Nothing else is begun from now on.
    pub async fn end(&self) {
        self.ending.store(true, Ordering::Relaxed);
        mem::forget(self.calls.write().await);
        let last = *self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(last) = last {
            sleep_until(last + RELIST_INTERVAL).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use futures::join;
    use tokio::time::{sleep, timeout};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_end_waits_for_what_is_being_started_and_then_nothing_starts() {
        let (starts, began) = (Starts::default(), Instant::now());
        let second = Duration::from_secs(1);
        join!(
            starts.carry_out(sleep(second)),
            starts.carry_out(sleep(2 * second)),
            starts.end()
        );
        assert_eq!(began.elapsed(), 2 * second + RELIST_INTERVAL);
        let late = timeout(second, starts.carry_out(async {})).await;
        assert!(late.is_err(), "it was started");
    }

    #[tokio::test(start_paused = true)]
    async fn the_end_comes_at_once_where_nothing_was_started() {
        let (starts, began) = (Starts::default(), Instant::now());
        starts.end().await;
        assert_eq!(began.elapsed(), Duration::ZERO);
    }
}
