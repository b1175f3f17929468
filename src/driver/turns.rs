//! Which pods of a node restart at once. What a restart takes is the cores': many at once take as long as one after another,
//! and each of them as long as all, while exits can be held for seconds. So there are as many turns as the node can bear: one
//! more for each that was quick, one less for each that was slow, down to a single one.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::{Instant, timeout};

use crate::times::{EXPOSED_LIMIT, QUICK_TURN, SLOW_TURN};

/// When a burst begins.
const FIRST_PER_CORE: usize = 1;
/// Far below what a burst may ask for.
const MOST_PER_CORE: usize = 8;

/// The turns of a machine.
#[derive(Debug, Clone)]
pub struct Turns(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    free: Arc<Semaphore>,
    /// How many there are, free or not.
    all: Mutex<usize>,
    first: usize,
    most: usize,
    /// How many pods wait for what shields them.
    exposed: watch::Sender<usize>,
}

/// It is this pod's turn, until this is dropped.
#[derive(Debug)]
pub(super) struct Turn {
    turns: Turns,
    permit: Option<OwnedSemaphorePermit>,
    began: Instant,
}

/// What has ended of a pod is held and not shielded yet, until this is dropped.
#[derive(Debug)]
pub(super) struct Exposed(Turns);

impl Turns {
    /// Those of a machine with so many cores.
    #[must_use]
    pub fn of(cores: usize) -> Self {
        let first = FIRST_PER_CORE * cores;
        Self(Arc::new(Inner {
            free: Arc::new(Semaphore::new(first)),
            all: Mutex::new(first),
            first,
            most: MOST_PER_CORE * cores,
            exposed: watch::Sender::default(),
        }))
    }

    /// A turn, if there is one and nobody is in greater need of the runtime.
    pub(super) fn at_once(&self) -> Option<Turn> {
        self.forget_if_idle();
        let free = Arc::clone(&self.0.free);
        let permit = free.try_acquire_owned().ok()?;
        (*self.0.exposed.borrow() == 0).then(|| self.begin(permit))
    }

    /// Waits until it is this pod's turn, first come, first served, and for a while until every pod that waits is shielded.
    pub(super) async fn turn(&self) -> Turn {
        let permit = Arc::clone(&self.0.free).acquire_owned().await;
        let permit = permit.expect("nobody closes it");
        let mut exposed = self.0.exposed.subscribe();
        // A runtime that makes nothing must not keep everybody waiting.
        let _ = timeout(EXPOSED_LIMIT, exposed.wait_for(|count| *count == 0)).await;
        self.begin(permit)
    }

    fn begin(&self, permit: OwnedSemaphorePermit) -> Turn {
        Turn {
            turns: self.clone(),
            permit: Some(permit),
            began: Instant::now(),
        }
    }

    /// What the node bore in the last burst says nothing of the next one.
    fn forget_if_idle(&self) {
        let (mut all, first) = (self.all(), self.0.first);
        if self.0.free.available_permits() < *all {
            return;
        }
        *all -= self.0.free.forget_permits(all.saturating_sub(first));
        let more = first.saturating_sub(*all);
        *all += more;
        self.0.free.add_permits(more);
    }

    fn all(&self) -> MutexGuard<'_, usize> {
        self.0.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn expose(&self) -> Exposed {
        self.0.exposed.send_modify(|count| *count += 1);
        Exposed(self.clone())
    }

    /// Gives a turn back, and learns from it.
    fn end(&self, turn: OwnedSemaphorePermit, quick: bool, slow: bool) {
        let mut all = self.all();
        if quick && *all < self.0.most {
            *all += 1;
            self.0.free.add_permits(1);
        } else if slow && *all > 1 {
            *all -= 1;
            turn.forget();
        }
    }
}

impl Turn {
    /// It was not needed.
    pub(super) fn give_back(mut self) {
        self.permit = None;
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if let Some(permit) = self.permit.take() {
            let took = self.began.elapsed();
            self.turns.end(permit, took < QUICK_TURN, took > SLOW_TURN);
        }
    }
}

impl Drop for Exposed {
    fn drop(&mut self) {
        self.0.0.exposed.send_modify(|count| *count -= 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;
    use tokio::time::advance;

    /// How many there are at a time.
    fn at_once(turns: &Turns) -> usize {
        let taken: Vec<Turn> = std::iter::from_fn(|| turns.at_once()).collect();
        let count = taken.len();
        taken.into_iter().for_each(Turn::give_back);
        count
    }

    #[tokio::test(start_paused = true)]
    async fn each_core_has_its_turn_and_others_wait_for_it() {
        let turns = Turns::of(2);
        let first = turns.at_once().unwrap();
        let _second = turns.turn().now_or_never().unwrap();
        assert!(turns.at_once().is_none());
        let mut third = Box::pin(turns.turn());
        assert!(third.as_mut().now_or_never().is_none());
        drop(first);
        assert!(third.now_or_never().is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn there_are_more_turns_while_they_are_quick_and_fewer_when_they_are_slow() {
        let turns = Turns::of(2);
        let burst = turns.at_once();
        for others in 1..20 {
            assert_eq!(at_once(&turns), others.min(2 * MOST_PER_CORE - 1));
            drop(turns.at_once());
        }
        for others in (1..2 * MOST_PER_CORE).rev() {
            assert_eq!(at_once(&turns), others);
            let turn = turns.at_once();
            advance(SLOW_TURN * 2).await;
            drop(turn);
        }
        assert_eq!(at_once(&turns), 0, "a single one is left");
        burst.unwrap().give_back();
        assert_eq!(at_once(&turns), 2, "nobody has a turn");
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_has_a_turn_before_what_waits_is_shielded_but_for_a_while() {
        let turns = Turns::of(1);
        let exposed = turns.expose();
        assert!(turns.at_once().is_none());
        let mut turn = Box::pin(turns.turn());
        assert!(turn.as_mut().now_or_never().is_none());
        drop(exposed);
        assert!(turn.now_or_never().is_some());
        let _exposed = turns.expose();
        turns.turn().await;
    }
}
