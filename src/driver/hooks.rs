//! Which containers of a pod are made with our hook, and whether the runtime makes them so.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::ids::ContainerName;
use crate::report::Unprotected;

/// How long no hook is sent after the runtime made a container without one that it had not made with one. Somebody else
/// may have been the reason.
const REFUSAL_LASTS: Duration = Duration::from_mins(10);

/// What the runtime was told of hooks, on one connection.
///
/// A runtime may refuse every container with a hook (`reject_oci_hook_adjustment`, NRI's
/// `plugins/default-validator/default-validator.go`), and tells only who asked for the container: the kubelet, which asks
/// again. No plugin may keep a container from being made for good, so one that is asked for again is made the other way.
#[derive(Debug, Default)]
pub(super) struct Hooks {
    /// Containers that the runtime is about to make.
    asked: HashMap<ContainerName, Asked>,
    refused: Option<Instant>,
    /// Why the pod's containers are made without.
    without: Option<Unprotected>,
    /// What was said last of containers without.
    said: Option<Unprotected>,
}

#[derive(Debug, Clone, Copy)]
struct Asked {
    hooked: bool,
    /// It was not made with the hook just before.
    instead: bool,
}

impl Hooks {
    /// Nothing was asked yet.
    pub(super) fn new(without: Option<Unprotected>) -> Self {
        Self {
            without,
            ..Self::default()
        }
    }

    /// This may be another runtime, or the same with another configuration.
    pub(super) fn reconnected(&mut self) {
        self.asked.clear();
        self.refused = None;
    }

    /// Whether a container that is about to be made is to have the hook, if one is `wanted`.
    pub(super) fn ask(&mut self, name: &ContainerName, wanted: bool, now: Instant) -> bool {
        let before = self.asked.get(name).map(|before| before.hooked);
        let wanted = wanted && self.without.is_none();
        let hooked = wanted && before.map_or(!self.are_refused(now), |hooked| !hooked);
        let instead = !hooked && before == Some(true);
        self.asked.insert(name.clone(), Asked { hooked, instead });
        hooked
    }

    /// It was made, with the hook or without.
    pub(super) fn made(&mut self, name: &ContainerName, hooked: bool, now: Instant) {
        let asked = self.asked.remove(name);
        if hooked {
            self.refused = None;
        } else if asked.is_some_and(|asked| asked.instead) {
            self.refused = Some(now);
        }
    }

    /// Why containers are without, unless that was said last.
    pub(super) fn why_unprotected(&mut self, now: Instant) -> Option<Unprotected> {
        let why = if let Some(why) = self.without {
            why
        } else if self.are_refused(now) {
            Unprotected::HooksRefused
        } else {
            Unprotected::FromBefore
        };
        (self.said.replace(why) != Some(why)).then_some(why)
    }

    /// Whether the runtime seems to make no containers with hooks.
    fn are_refused(&self, now: Instant) -> bool {
        let since = self.refused.map(|since| now.duration_since(since));
        since.is_some_and(|since| since < REFUSAL_LASTS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name() -> ContainerName {
        "trainer".into()
    }

    #[test]
    fn a_container_that_is_not_made_with_the_hook_is_tried_without_it() {
        let (mut hooks, now) = (Hooks::default(), Instant::now());
        assert!(hooks.ask(&name(), true, now));
        assert!(!hooks.ask(&name(), true, now));
        hooks.made(&name(), false, now);
        assert!(hooks.are_refused(now));
        // Nor are its next attempts, nor the other containers.
        assert!(!hooks.ask(&name(), true, now));
        hooks.made(&name(), false, now);
        assert!(!hooks.ask(&"logger".into(), true, now));
    }

    #[test]
    fn a_container_that_is_made_neither_way_is_tried_both_ways_in_turns() {
        let (mut hooks, now) = (Hooks::default(), Instant::now());
        let tries: Vec<bool> = (0..5).map(|_| hooks.ask(&name(), true, now)).collect();
        assert_eq!(tries, [true, false, true, false, true]);
        hooks.made(&name(), true, now);
        assert!(!hooks.are_refused(now));
    }

    #[test]
    fn what_was_made_is_asked_for_with_the_hook_next_time() {
        let (mut hooks, now) = (Hooks::default(), Instant::now());
        for _ in 0..3 {
            assert!(hooks.ask(&name(), true, now));
            hooks.made(&name(), true, now);
        }
    }

    #[test]
    fn a_refusal_is_put_to_the_test_again() {
        let (mut hooks, began) = (Hooks::default(), Instant::now());
        hooks.ask(&name(), true, began);
        hooks.ask(&name(), true, began);
        hooks.made(&name(), false, began);
        let later = began + REFUSAL_LASTS;
        assert!(!hooks.are_refused(later));
        assert!(hooks.ask(&name(), true, later));
        assert!(!hooks.ask(&name(), true, later));
    }

    #[test]
    fn a_hook_that_nobody_wants_is_refused_by_nobody() {
        let (mut hooks, now) = (Hooks::default(), Instant::now());
        for _ in 0..3 {
            assert!(!hooks.ask(&name(), false, now));
        }
        hooks.made(&name(), false, now);
        assert!(!hooks.are_refused(now));
    }
}
