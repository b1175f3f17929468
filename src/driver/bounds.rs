//! How much of one pod is done at once: each call makes the runtime run processes, and a pod may have hundreds of containers.

use std::pin::pin;
use std::time::Duration;

use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::timeout;

use crate::times::TURN;

/// Calls of one kind.
const AT_ONCE: usize = 8;
/// As many as a pod of three containers needs: where more are under way they delay each other, and the kubelet no longer when
/// they are over.
const USUAL: u32 = 4;

/// The calls of one pod, by kind: none waits for calls that wait for it.
#[derive(Debug)]
pub(super) struct Bounds {
    making: Semaphore,
    killing: Semaphore,
    removing: Semaphore,
}

impl Bounds {
    pub(super) fn new() -> Self {
        let [making, killing, removing] = [(); 3].map(|()| Semaphore::new(AT_ONCE));
        Self {
            making,
            killing,
            removing,
        }
    }

    /// Waits for the turn to ask about, make or start one container, which lasts until this is dropped.
    pub(super) async fn to_make(&self) -> SemaphorePermit<'_> {
        let turn = self.making.acquire().await;
        turn.expect("nobody closes it")
    }

    /// How many are being made.
    pub(super) fn being_made(&self) -> usize {
        AT_ONCE - self.making.available_permits()
    }

    /// What a call that took so long, and has its turn still, says of the node. `then`: how many were under way when it began.
    pub(super) fn of_usual(&self, took: Duration, then: usize) -> Duration {
        let under_way = u32::try_from(self.being_made().max(then)).unwrap_or(USUAL);
        took * USUAL / under_way.max(USUAL)
    }

    pub(super) async fn kill<T>(&self, call: impl Future<Output = T>) -> T {
        in_turn(&self.killing, call).await
    }

    pub(super) async fn remove<T>(&self, call: impl Future<Output = T>) -> T {
        in_turn(&self.removing, call).await
    }
}

/// What does not come to an end keeps nobody waiting.
async fn in_turn<T>(turns: &Semaphore, call: impl Future<Output = T>) -> T {
    let turn = turns.acquire().await;
    let mut call = pin!(call);
    if let Ok(result) = timeout(TURN, &mut call).await {
        return result;
    }
    drop(turn);
    call.await
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::time::Duration;

    use futures::future::join_all;
    use tokio::time::{Instant, sleep};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn eight_calls_of_a_kind_are_under_way_at_once() {
        let (bounds, now, most) = (Bounds::new(), Cell::new(0), Cell::new(0));
        let call = async || {
            now.set(now.get() + 1);
            most.set(most.get().max(now.get()));
            sleep(Duration::from_millis(10)).await;
            now.set(now.get() - 1);
        };
        join_all((0..50).map(|_| bounds.kill(call()))).await;
        assert_eq!(most.replace(0), 8);
        join_all((0..50).map(|_| bounds.remove(call()))).await;
        assert_eq!(most.replace(0), 8);
        join_all((0..50).map(async |_| {
            let _turn = bounds.to_make().await;
            call().await;
        }))
        .await;
        assert_eq!(most.get(), 8);
    }

    #[tokio::test]
    async fn calls_of_one_pod_that_delay_each_other_say_that_of_no_node() {
        let (bounds, took) = (Bounds::new(), Duration::from_millis(160));
        let mut turns = Vec::new();
        for expected in [160, 160, 160, 160, 128, 106, 91, 80] {
            let turn = bounds.to_make().await;
            turns.push((turn, bounds.being_made()));
            assert_eq!(bounds.of_usual(took, 0).as_millis(), expected);
        }
        // They began together, and end one after another.
        while let Some((_turn, then)) = turns.pop() {
            let expected = 640 / then.max(4) as u128;
            assert_eq!(bounds.of_usual(took, then).as_millis(), expected);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn calls_that_wait_for_an_end_keep_no_others_waiting() {
        let (bounds, began) = (Bounds::new(), Instant::now());
        let calls = (0..24).map(|_| bounds.kill(sleep(Duration::from_secs(4))));
        join_all(calls).await;
        let took = began.elapsed();
        assert!(took < Duration::from_secs(5), "{took:?}");
    }
}
