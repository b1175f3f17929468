//! What is remembered of the pods of a node: it outlives the plugin, and an API server that is away.

use std::collections::{BTreeMap, VecDeque};

use serde::{Deserialize, Serialize};

use super::count::{Count, Told};
use super::sighting::Sighting;
use super::terms::Terms;
use crate::clock::Moment;
use crate::ids::{ContainerName, PodKey, PodUid};

/// Everything.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Memory {
    pub(super) pods: BTreeMap<PodUid, Record>,
    /// The resets of the last hour, oldest first.
    pub(super) spent: Vec<Spent>,
}

/// A reset of this node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Spent {
    pub(super) pod: PodUid,
    pub(super) namespace: String,
    /// See [`crate::clock`].
    pub(super) at_up_ms: u64,
}

/// One pod.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    pub(super) pod: PodKey,
    /// Since when it is known that it was not Ready.
    not_ready_since_up_ms: u64,
    ready: bool,
    ready_changed: i64,
    seen_up_ms: u64,
    counts: BTreeMap<ContainerName, Count>,
}

impl Memory {
    /// A machine that was started anew has been up for less than what was written down before it. Nobody knows how long its
    /// containers ran until then, or what they crashed of: their exits are counted anew. Resets of that time are just now.
    pub(super) fn rebased(mut self, up_ms: u64) -> Self {
        self.pods.retain(|_, record| record.seen_up_ms <= up_ms);
        for spent in &mut self.spent {
            spent.at_up_ms = spent.at_up_ms.min(up_ms);
        }
        self
    }

    /// Takes in what is told of a pod. Returns whether that must be written down.
    pub(super) fn note(&mut self, sighting: &Sighting, terms: &Terms, now: &Moment) -> bool {
        let known = self.pods.get(&sighting.uid).cloned();
        let record = self
            .pods
            .entry(sighting.uid.clone())
            .or_insert_with(|| Record::beginning_with(sighting, now));
        record.note(sighting, terms, now);
        known.is_none_or(|known| !known.is_as(record))
    }

    /// Forgets the pods that are not to be kept; returns whether there were any.
    pub(super) fn keep(&mut self, is_kept: impl Fn(&PodUid) -> bool) -> bool {
        let before = self.pods.len();
        self.pods.retain(|uid, _| is_kept(uid));
        self.pods.len() != before
    }
}

impl Record {
    fn beginning_with(sighting: &Sighting, now: &Moment) -> Self {
        Self {
            pod: sighting.key.clone(),
            // Before that nobody knows.
            not_ready_since_up_ms: now.up_ms,
            ready: false,
            ready_changed: sighting.ready_changed,
            seen_up_ms: now.up_ms,
            counts: BTreeMap::new(),
        }
    }

    fn note(&mut self, sighting: &Sighting, terms: &Terms, now: &Moment) {
        // What was Ready until now, is, or has been in between.
        if self.ready || sighting.ready || self.ready_changed != sighting.ready_changed {
            self.not_ready_since_up_ms = now.up_ms;
        }
        self.ready = sighting.ready;
        self.ready_changed = sighting.ready_changed;
        // In less time no attempt can have run well that began and ended meanwhile.
        let unseen = now.since(self.seen_up_ms) < terms.forgotten_after();
        self.seen_up_ms = now.up_ms;
        for seen in &sighting.containers {
            let count = self.counts.entry(seen.name.clone());
            let count = count.or_insert_with(|| Count::beginning_with(seen));
            count.note(seen, unseen, terms, now);
        }
    }

    /// But for when it was seen.
    fn is_as(&self, other: &Self) -> bool {
        let seen_up_ms = other.seen_up_ms;
        let same = Self {
            seen_up_ms,
            ..self.clone()
        };
        same == *other
    }

    /// How long the machine had been up when it was Ready last, in milliseconds, as far as is known.
    pub(super) fn not_ready_since(&self) -> u64 {
        self.not_ready_since_up_ms
    }

    /// The container that has ended most often, and how often.
    pub(super) fn worst(&self, terms: &Terms, now: &Moment) -> Option<(&ContainerName, u32)> {
        let counts = self.counts.iter();
        let counts = counts.map(|(name, count)| (name, count.value(terms, now)));
        counts.max_by_key(|(_, count)| *count)
    }

    /// The last exits of each container, for people.
    pub(super) fn histories(&self) -> BTreeMap<&ContainerName, &VecDeque<Told>> {
        let counts = self.counts.iter();
        counts
            .map(|(name, count)| (name, count.history()))
            .collect()
    }
}
