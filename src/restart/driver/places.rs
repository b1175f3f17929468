//! How many pods are replayed at once. Every replay must end while exits can be held, and what it takes is the cores':
//! many at once take as long as one after another, each of them too long.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

/// Thirty pods of three containers take two cores some six seconds.
const PLACES_PER_CORE: usize = 8;
const TURNS_PER_CORE: usize = 2;
/// How long a pod waits for its turn. After that it is left to the kubelet, while there is time for placeholders: a crowd
/// takes seconds to make them.
const LONGEST_WAIT: Duration = Duration::from_millis(2500);

/// The places of a machine.
#[derive(Debug)]
pub struct Places {
    places: Arc<Semaphore>,
    turns: Arc<Semaphore>,
}

/// A pod may be replayed, and gives its place to another when it has been.
#[derive(Debug)]
pub(super) struct Place {
    turns: Arc<Semaphore>,
    _place: OwnedSemaphorePermit,
}

/// It is this pod's turn, until this is dropped.
#[derive(Debug)]
pub(super) struct Turn {
    _turn: OwnedSemaphorePermit,
}

impl Places {
    /// Those of a machine with so many cores.
    #[must_use]
    pub fn of(cores: usize) -> Self {
        Self {
            places: Arc::new(Semaphore::new(PLACES_PER_CORE * cores)),
            turns: Arc::new(Semaphore::new(TURNS_PER_CORE * cores)),
        }
    }

    /// `None`: so many pods restart already that this one is better left to the kubelet.
    pub(super) fn take(&self) -> Option<Place> {
        Some(Place {
            turns: Arc::clone(&self.turns),
            _place: Arc::clone(&self.places).try_acquire_owned().ok()?,
        })
    }
}

impl Place {
    /// Waits until it is this pod's turn, first come, first served. `None`: it would come too late.
    pub(super) fn turn(&self) -> impl Future<Output = Option<Turn>> + use<> {
        let turn = timeout(LONGEST_WAIT, Arc::clone(&self.turns).acquire_owned());
        async {
            let turn = turn.await.ok()?;
            Some(Turn {
                _turn: turn.expect("nobody closes it"),
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;

    #[tokio::test(start_paused = true)]
    async fn two_pods_a_core_have_their_turn_and_others_wait_for_it() {
        let places = Places::of(1);
        let place = places.take().unwrap();
        let first = place.turn().now_or_never().unwrap();
        let second = place.turn().now_or_never().unwrap();
        assert!(first.is_some() && second.is_some());
        let mut third = Box::pin(place.turn());
        assert!(third.as_mut().now_or_never().is_none());
        drop(first);
        assert!(third.now_or_never().unwrap().is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn a_turn_that_would_come_too_late_is_none() {
        let places = Places::of(1);
        let place = places.take().unwrap();
        let _turns = [place.turn().await, place.turn().await];
        assert!(place.turn().await.is_none());
    }

    #[test]
    fn eight_pods_a_core_find_a_place() {
        let places = Places::of(2);
        let mut taken: Vec<Place> = std::iter::from_fn(|| places.take()).collect();
        assert_eq!(taken.len(), 16);
        taken.pop();
        assert!(places.take().is_some());
    }
}
