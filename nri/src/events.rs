//! The set of events that a plugin subscribes to.

use std::fmt;
use std::ops::{BitAnd, BitOr};

use crate::runtime::NriVersion;
use crate::wire::nri::Event;

/// A set of events, as NRI's `EventMask` (`pkg/api/event.go`, v0.12.5).
///
/// Runtimes take an empty mask for a subscription to everything, and drop a plugin that subscribes
/// to what they do not know; the stub sees to both.
///
/// ```
/// use nri::EventMask;
///
/// let events = EventMask::CREATE_CONTAINER | EventMask::STOP_CONTAINER;
/// assert!(events.contains(EventMask::STOP_CONTAINER));
/// assert!((events & EventMask::RUN_POD_SANDBOX).is_empty());
/// assert!(EventMask::ALL.contains(events));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct EventMask(i32);

impl EventMask {
    /// No event.
    pub const NONE: Self = Self(0);
    /// Every event that is named here. It is worth to name those that are needed instead: the node
    /// waits for each.
    pub const ALL: Self = Self(0x3fff);
    /// A pod's sandbox is created, before its containers.
    pub const RUN_POD_SANDBOX: Self = Self::of(Event::RUN_POD_SANDBOX);
    /// A pod's sandbox is stopped.
    pub const STOP_POD_SANDBOX: Self = Self::of(Event::STOP_POD_SANDBOX);
    /// A pod's sandbox is removed.
    pub const REMOVE_POD_SANDBOX: Self = Self::of(Event::REMOVE_POD_SANDBOX);
    /// A container is about to be created, and can be adjusted or refused.
    pub const CREATE_CONTAINER: Self = Self::of(Event::CREATE_CONTAINER);
    /// A container was created.
    pub const POST_CREATE_CONTAINER: Self = Self::of(Event::POST_CREATE_CONTAINER);
    /// A container is about to be started.
    pub const START_CONTAINER: Self = Self::of(Event::START_CONTAINER);
    /// A container was started.
    pub const POST_START_CONTAINER: Self = Self::of(Event::POST_START_CONTAINER);
    /// A container's resources are about to be changed.
    pub const UPDATE_CONTAINER: Self = Self::of(Event::UPDATE_CONTAINER);
    /// A container's resources were changed.
    pub const POST_UPDATE_CONTAINER: Self = Self::of(Event::POST_UPDATE_CONTAINER);
    /// A container is stopped, or exited by itself.
    pub const STOP_CONTAINER: Self = Self::of(Event::STOP_CONTAINER);
    /// A container is removed.
    pub const REMOVE_CONTAINER: Self = Self::of(Event::REMOVE_CONTAINER);
    /// A pod's resources are about to be changed. Since NRI 0.10.
    pub const UPDATE_POD_SANDBOX: Self = Self::of(Event::UPDATE_POD_SANDBOX);
    /// A pod's resources were changed. Since NRI 0.10.
    pub const POST_UPDATE_POD_SANDBOX: Self = Self::of(Event::POST_UPDATE_POD_SANDBOX);
    /// All plugins have adjusted a container, and the result can be refused. Since NRI 0.10.
    pub const VALIDATE_CONTAINER_ADJUSTMENT: Self = Self::of(Event::VALIDATE_CONTAINER_ADJUSTMENT);

    /// What runtimes know before NRI 0.10.
    const CLASSIC: Self = Self(0x7ff);

    const fn of(event: Event) -> Self {
        Self(1 << (event as i32 - 1))
    }

    /// Whether no event is in the set.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Whether all events of `other` are in the set.
    #[must_use]
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// The mask as the wire has it: the bit of an event is its number less one.
    #[must_use]
    pub const fn bits(self) -> i32 {
        self.0
    }

    /// The events that a runtime with this version of NRI knows: it refuses a plugin that subscribes
    /// to others (`configure`, `pkg/adaptation/plugin.go`). An unknown version counts as an old one.
    pub(crate) fn known_to(self, version: Option<NriVersion>) -> Self {
        let known = match version {
            Some(version) if version >= NriVersion::new(0, 10) => Self::ALL,
            _ => Self::CLASSIC,
        };
        self & known
    }
}

impl BitOr for EventMask {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl BitAnd for EventMask {
    type Output = Self;

    fn bitand(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }
}

impl fmt::Debug for EventMask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "EventMask({:#x})", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bit_of_an_event_is_its_number_less_one() {
        assert_eq!(EventMask::RUN_POD_SANDBOX.bits(), 1);
        assert_eq!(EventMask::CREATE_CONTAINER.bits(), 1 << 3);
        assert_eq!(EventMask::REMOVE_CONTAINER.bits(), 0x400);
        assert_eq!(EventMask::VALIDATE_CONTAINER_ADJUSTMENT.bits(), 0x2000);
    }

    #[test]
    fn all_events_are_those_that_plugins_know() {
        for bit in 0..31 {
            let known = bit < Event::LAST as i32 - 1;
            assert_eq!(EventMask::ALL.contains(EventMask(1 << bit)), known, "{bit}");
        }
    }

    #[test]
    fn runtimes_are_only_asked_for_events_that_they_know() {
        let wanted = EventMask::STOP_CONTAINER | EventMask::UPDATE_POD_SANDBOX;
        let version = |minor| Some(NriVersion::new(0, minor));

        assert_eq!(wanted.known_to(None), EventMask::STOP_CONTAINER);
        assert_eq!(wanted.known_to(version(9)), EventMask::STOP_CONTAINER);
        assert_eq!(wanted.known_to(version(10)), wanted);
        assert_eq!(wanted.known_to(version(12)), wanted);
    }
}
