//! How many pods are replayed at once. What it takes is the cores': many at once take as long as one after another, and
//! each of them as long as all. Where containers wait for others, it must end while exits can be held.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Thirty pods of three containers take two cores some six seconds.
const PLACES_PER_CORE: usize = 8;
const TURNS_PER_CORE: usize = 2;

/// The places of a machine.
#[derive(Debug)]
pub struct Places {
    places: Arc<Semaphore>,
    turns: Arc<Semaphore>,
}

/// A pod may be replayed, and gives its place to another when it has been.
#[derive(Debug)]
pub(super) struct Place {
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
        let place = Arc::clone(&self.places).try_acquire_owned().ok()?;
        Some(Place { _place: place })
    }

    /// Waits until it is this pod's turn, first come, first served.
    pub(super) async fn turn(&self) -> Turn {
        let turn = Arc::clone(&self.turns).acquire_owned().await;
        Turn {
            _turn: turn.expect("nobody closes it"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;

    #[tokio::test]
    async fn two_pods_a_core_have_their_turn_and_others_wait_for_it() {
        let places = Places::of(1);
        let first = places.turn().now_or_never().unwrap();
        let _second = places.turn().now_or_never().unwrap();
        let mut third = Box::pin(places.turn());
        assert!(third.as_mut().now_or_never().is_none());
        drop(first);
        assert!(third.now_or_never().is_some());
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
