//! The time, from clocks that are handed in: tests set them.

use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

use crate::node::now_ns;

/// Now, by the clock that what is waited for goes by: a test that stops tokio's stops this one with it.
#[must_use]
pub fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

/// Tells how long the machine has been up, by which everything is measured, and what time it is, for people.
///
/// The wall clock may be set at any moment, back or forth. The other one (`CLOCK_BOOTTIME`) is the same in all processes
/// of the machine, goes on while it sleeps, and begins anew only when it starts: no container outlives that, and so
/// nothing that was written down about one is measured across it.
#[derive(Debug, Clone, Default)]
pub struct Clock(Source);

#[derive(Debug, Clone, Default)]
enum Source {
    #[default]
    Machine,
    #[cfg(test)]
    Set(std::sync::Arc<std::sync::Mutex<Times>>),
}

/// What both clocks show, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Times {
    /// Since the machine was started.
    pub(crate) up: u64,
    /// Since the Unix epoch.
    pub(crate) unix: u64,
}

/// When something is heard of, and decided, by all clocks.
#[derive(Debug, Clone, Copy)]
pub struct Moment {
    /// For what is waited for.
    pub at: Instant,
    /// For what is measured across processes: how long the machine had been up, in milliseconds.
    pub up_ms: u64,
    /// For people: milliseconds since the Unix epoch.
    pub unix_ms: u64,
}

impl Moment {
    /// How long before that was, see [`Clock::since`].
    #[must_use]
    pub fn since(&self, up_ms: u64) -> Duration {
        Duration::from_millis(self.up_ms.saturating_sub(up_ms))
    }

    /// What people call that moment before it, by the wall clock of now.
    #[must_use]
    pub fn unix_ms_at(&self, then: Instant) -> u64 {
        let ago = self.at.saturating_duration_since(then).as_millis();
        self.unix_ms
            .saturating_sub(u64::try_from(ago).unwrap_or(u64::MAX))
    }
}

impl Clock {
    /// Now.
    #[must_use]
    pub fn moment(&self) -> Moment {
        let Times { up, unix } = self.read();
        Moment {
            at: now(),
            up_ms: up,
            unix_ms: unix,
        }
    }

    /// How long ago that was, in milliseconds that the machine had been up. A time to come was just now: a wait that begins
    /// then is as long as it was meant to be, and no longer.
    #[must_use]
    pub fn since(&self, up_ms: u64) -> Duration {
        self.moment().since(up_ms)
    }

    fn read(&self) -> Times {
        match &self.0 {
            Source::Machine => Times::now(),
            #[cfg(test)]
            Source::Set(times) => *times.lock().unwrap(),
        }
    }
}

impl Times {
    fn now() -> Self {
        let up = clock_gettime(ClockId::Boottime);
        // Neither is ever negative.
        let millis = u64::try_from(up.tv_nsec / 1_000_000).unwrap_or(0);
        Self {
            up: u64::try_from(up.tv_sec).unwrap_or(0) * 1000 + millis,
            unix: u64::try_from(now_ns() / 1_000_000).unwrap_or(0),
        }
    }
}

#[cfg(test)]
impl Clock {
    /// One that shows what it is set to.
    pub(crate) fn of(times: Times) -> Self {
        Self(Source::Set(std::sync::Arc::new(times.into())))
    }

    /// Lets time pass.
    pub(crate) fn pass(&self, by: Duration) {
        let ms = u64::try_from(by.as_millis()).unwrap();
        self.change(|times| {
            times.up += ms;
            times.unix += ms;
        });
    }

    /// Sets the wall clock.
    pub(crate) fn set_wall(&self, unix: u64) {
        self.change(|times| times.unix = unix);
    }

    fn change(&self, how: impl FnOnce(&mut Times)) {
        let Source::Set(times) = &self.0 else {
            panic!("the machine's clocks are not to be set")
        };
        how(&mut times.lock().unwrap());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_measured_is_not_measured_by_the_wall_clock() {
        let clock = Clock::of(Times {
            up: 5_000,
            unix: 1_000_000,
        });
        let began = clock.moment().up_ms;
        clock.pass(Duration::from_secs(2));
        clock.set_wall(10);
        assert_eq!(clock.since(began), Duration::from_secs(2));
        assert_eq!(clock.moment().unix_ms, 10);
        assert_eq!(clock.since(began + 2_009), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_waited_for_comes_by_the_clock_that_decides() {
        let until = now() + Duration::from_mins(1);
        tokio::time::sleep_until(until.into()).await;
        assert!(Clock::default().moment().at >= until);
    }

    #[test]
    fn the_machines_own_go_on() {
        let clock = Clock::default();
        let began = clock.moment().up_ms;
        assert!(began > 0);
        assert!(clock.since(began) < Duration::from_mins(1));
        assert!(clock.moment().unix_ms > 1_700_000_000_000);
    }
}
