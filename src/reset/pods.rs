//! Which pods of this node are to be reset, and when: observations in, deeds out.
//!
//! Pure: it does no I/O, and time comes in with what is told.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;

use super::ledger::{Hindrance, full, seconds};
use super::record::{Memory, Record, Spent};
use super::sighting::Sighting;
use super::terms::{HOUR, Terms, share};
use crate::clock::Moment;
use crate::ids::{ContainerName, PodKey, PodUid};
use crate::kube::{Owner, may_replace};
use crate::policy::FailureAction;

/// Between two tries of what is refused or does not work, the first and the longest.
const FIRST_PAUSE: Duration = Duration::from_secs(5);
const LONGEST_PAUSE: Duration = Duration::from_mins(5);
/// Who has waited for longest goes first, though another one's pause may end so much sooner: the API server tells whole
/// seconds. Less than any pause, so that nobody holds up the others by trying again and again.
const SLACK: Duration = Duration::from_secs(2);
/// What still holds is said again then: the API server forgets an event after an hour.
const SAID_AGAIN: Duration = Duration::from_mins(50);
/// Where nothing changes but by somebody's doing.
const SELDOM: Duration = Duration::from_mins(10);

/// The pods of a node.
#[derive(Debug)]
pub(super) struct Pods {
    terms: Terms,
    /// Outlives the plugin.
    memory: Memory,
    changed: bool,
    looks: BTreeMap<PodUid, Look>,
    /// The pod that is being reset: one at a time.
    busy: Option<PodUid>,
    /// That was granted.
    reserved: bool,
}

/// A pod as it was last seen.
#[derive(Debug)]
struct Look {
    sighting: Sighting,
    /// Nothing is tried before that.
    next_up_ms: u64,
    failures: u32,
    /// What was said last of each kind of thing, and how long the machine had been up then.
    said: BTreeMap<&'static str, (String, u64)>,
}

/// What is to be done.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Deed {
    /// Find out whether the pod may be reset, and reserve that.
    Prepare(Box<Task>),
    /// Write down what must be remembered; if that fails, strike nobody.
    Save,
    /// What was prepared is to be carried out.
    Strike(PodUid),
    /// What was reserved is to be given back.
    Withdraw(PodUid),
    /// People are to know.
    Tell(PodKey, PodUid, Notice),
}

/// A pod to be reset.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Task {
    /// What that goes by.
    pub(super) seen: Sighting,
    /// The container that has ended most often, and how often.
    pub(super) container: ContainerName,
    pub(super) exits: u32,
    /// What is remembered of it.
    pub(super) record: Record,
}

/// What has come of a deed.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Outcome {
    /// It may be carried out, now.
    Reserved,
    /// The pod ends.
    Done,
    /// Not yet.
    Wait(Duration, Hindrance),
    /// Too many have not helped its owner.
    GivenUp(Duration, usize, Owner),
    /// Nobody would make a new one.
    Unreplaced(String),
    /// It is not of a Deployment, and did not ask for it.
    NotMeant,
    /// A budget of disruption forbids it.
    Refused(String),
    /// It is another one by now, or Ready.
    Changed,
    /// Somebody has to grant or make something.
    Denied(String),
    /// It did not work, this time.
    Away(String),
    /// Nobody knows what has come of it.
    Unanswered(String),
}

/// What people are to know.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Notice {
    /// The annotation cannot be read.
    Invalid(String),
    /// Nothing can be done for that pod.
    Unusable(String),
    /// It waits.
    Deferred(Hindrance, Duration),
    /// It is the application.
    GivenUp(Owner, usize, Duration),
    /// A budget of disruption forbids it.
    Refused(String),
    /// A right is missing.
    Denied(String),
    /// It did not work; whether that is so again. The first time is for the log alone.
    Failed(String, bool),
}

/// The kind of what did not work the first time.
const FAILED: &str = "failed";

impl Notice {
    fn kind(&self) -> &'static str {
        match self {
            Self::Invalid(_) => "invalid",
            Self::Unusable(_) => "unusable",
            Self::Deferred(..) => "deferred",
            Self::GivenUp(..) => "given up",
            Self::Refused(_) => "refused",
            Self::Denied(_) => "denied",
            Self::Failed(_, false) => FAILED,
            Self::Failed(_, true) => "failed again",
        }
    }

    /// What makes it news.
    pub(super) fn essence(&self) -> String {
        match self {
            Self::Invalid(text)
            | Self::Unusable(text)
            | Self::Refused(text)
            | Self::Denied(text)
            | Self::Failed(text, _) => text.clone(),
            Self::Deferred(why, _) => format!("{why:?}"),
            Self::GivenUp(owner, ..) => owner.uid.clone(),
        }
    }
}

/// A pod that waits to be reset; the first in order is the one that has waited for longest.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Next<'p> {
    /// Since when it is due.
    from: u64,
    uid: &'p PodUid,
    /// When it may be tried.
    at: u64,
}

/// What is wanted for a pod.
enum Wish {
    Leave,
    Reset,
    Unusable(Notice),
}

impl Pods {
    /// Goes on from what a predecessor remembered.
    pub(super) fn new(terms: Terms, memory: Memory, now: &Moment) -> Self {
        Self {
            terms,
            memory: memory.rebased(now.up_ms),
            changed: false,
            looks: BTreeMap::new(),
            busy: None,
            reserved: false,
        }
    }

    /// There are no others than these.
    pub(super) fn listed(&mut self, listed: &BTreeSet<PodUid>) {
        self.looks.retain(|uid, _| listed.contains(uid));
        self.changed |= self.memory.keep(|uid| listed.contains(uid));
    }

    /// The pod is gone, or of no interest any more.
    pub(super) fn gone(&mut self, uid: &PodUid) {
        self.looks.remove(uid);
        self.changed |= self.memory.keep(|known| known != uid);
    }

    /// The API server tells of a pod.
    pub(super) fn seen(&mut self, sighting: Sighting, now: &Moment) -> Vec<Deed> {
        let uid = sighting.uid.clone();
        self.changed |= self.memory.note(&sighting, &self.terms, now);
        let wish = self.wish(&sighting);
        if let Some(look) = self.looks.get_mut(&uid) {
            if sighting.ready {
                look.failures = 0;
            }
            look.sighting = sighting;
        } else {
            let look = Look {
                sighting,
                next_up_ms: 0,
                failures: 0,
                said: BTreeMap::new(),
            };
            self.looks.insert(uid.clone(), look);
        }
        match wish {
            Wish::Unusable(notice) => self.tell(&uid, notice, now).into_iter().collect(),
            Wish::Leave | Wish::Reset => Vec::new(),
        }
    }

    /// What is to be done by now.
    pub(super) fn poll(&mut self, now: &Moment) -> Vec<Deed> {
        let mut deeds = Vec::new();
        while self.busy.is_none()
            && let Some(next) = self.next(now).filter(|next| next.at <= now.up_ms)
        {
            let uid = next.uid.clone();
            let Some(look) = self.looks.get(&uid) else {
                break;
            };
            let namespace = look.sighting.key.namespace.clone();
            if let Some(wait) = self.node_budget(&uid, &namespace, now) {
                self.postpone(&uid, wait, now);
                deeds.extend(self.tell(&uid, Notice::Deferred(Hindrance::NodeBudget, wait), now));
                continue;
            }
            let Some(task) = self.task(&uid, now) else {
                break;
            };
            self.busy = Some(uid);
            deeds.push(Deed::Prepare(Box::new(task)));
        }
        if std::mem::take(&mut self.changed) {
            deeds.insert(0, Deed::Save);
        }
        deeds
    }

    /// When to poll again, if nothing is heard until then: how long the machine will have been up, in milliseconds.
    pub(super) fn wake(&self, now: &Moment) -> Option<u64> {
        if self.busy.is_some() {
            return None;
        }
        self.next(now).map(|next| next.at)
    }

    /// What is remembered, to be written down.
    pub(super) fn memory(&self) -> &Memory {
        &self.memory
    }

    /// That did not work: it is yet to be done.
    pub(super) fn not_saved(&mut self) {
        self.changed = true;
    }

    /// What has come of what was to be done with that pod.
    pub(super) fn outcome(&mut self, uid: &PodUid, outcome: Outcome, now: &Moment) -> Vec<Deed> {
        if outcome == Outcome::Reserved {
            return self.reserved(uid, now);
        }
        self.busy = None;
        let was_reserved = std::mem::take(&mut self.reserved);
        let stays = self.looks.get(uid).is_some_and(|it| !it.sighting.ending);
        if was_reserved && stays && !matches!(outcome, Outcome::Done | Outcome::Unanswered(_)) {
            // It has cost nothing.
            let before = self.memory.spent.len();
            self.memory.spent.retain(|spent| spent.pod != *uid);
            self.changed |= self.memory.spent.len() != before;
        }
        let (pause, notice) = match outcome {
            Outcome::Reserved | Outcome::Done => (LONGEST_PAUSE, None),
            Outcome::Wait(wait, why) => (wait, Some(Notice::Deferred(why, wait))),
            Outcome::GivenUp(wait, resets, owner) => {
                (wait, Some(Notice::GivenUp(owner, resets, wait)))
            }
            Outcome::Unreplaced(why) => (SELDOM, Some(Notice::Unusable(why))),
            Outcome::NotMeant => (SELDOM, None),
            // Whoever changes it all the time must not hold up the others, or have something reserved, all the time.
            Outcome::Changed => (self.back_off(uid), None),
            Outcome::Refused(why) => (self.back_off(uid), Some(Notice::Refused(why))),
            Outcome::Denied(what) => (self.back_off(uid), Some(Notice::Denied(what))),
            Outcome::Away(why) | Outcome::Unanswered(why) => {
                let look = self.looks.get(uid);
                let again = look.is_some_and(|it| it.said.contains_key(FAILED));
                (self.back_off(uid), Some(Notice::Failed(why, again)))
            }
        };
        self.postpone(uid, pause, now);
        let told = notice.and_then(|notice| self.tell(uid, notice, now));
        told.into_iter().collect()
    }

    /// It is granted; but the pod may have recovered while that was asked.
    fn reserved(&mut self, uid: &PodUid, now: &Moment) -> Vec<Deed> {
        let due = self.looks.get(uid).and_then(|look| {
            let from = self.due_from(uid, look, now)?;
            (from <= now.up_ms).then(|| look.sighting.key.namespace.clone())
        });
        self.reserved = true;
        let Some(namespace) = due else {
            return vec![Deed::Withdraw(uid.clone())];
        };
        self.memory.spent.retain(|spent| spent.pod != *uid);
        self.memory.spent.push(Spent {
            pod: uid.clone(),
            namespace,
            at_up_ms: now.up_ms,
        });
        self.changed = false;
        vec![Deed::Save, Deed::Strike(uid.clone())]
    }

    fn wish(&self, sighting: &Sighting) -> Wish {
        let action = match &sighting.policy {
            Err(error) => return Wish::Unusable(Notice::Invalid(error.to_string())),
            Ok(policy) => policy.as_ref().map_or(self.terms.default, |it| it.action),
        };
        if action == FailureAction::None {
            return Wish::Leave;
        }
        match self.obstacle(sighting) {
            None => Wish::Reset,
            Some(_) if sighting.is_silent() => Wish::Leave,
            Some(why) => Wish::Unusable(Notice::Unusable(why)),
        }
    }

    /// Why that pod is never reset.
    fn obstacle(&self, sighting: &Sighting) -> Option<String> {
        let namespace = &sighting.key.namespace;
        let controller = sighting.controller.as_ref();
        if self.terms.is_protected(namespace) {
            return Some(format!("namespace {namespace} is protected"));
        }
        if sighting.is_static {
            return Some("it is a static pod".to_owned());
        }
        match controller {
            None => Some("it has no controller that would make a new one".to_owned()),
            Some(OwnerReference { kind, .. }) if kind == "DaemonSet" => {
                Some("a DaemonSet would make the new one on the same node".to_owned())
            }
            Some(owner) if !may_replace(owner) => Some(format!(
                "its controller is a {}, which may not make a new one: only a ReplicaSet and a StatefulSet are known to",
                owner.kind
            )),
            Some(_) => None,
        }
    }

    /// From when on that pod is to be reset if nothing changes.
    fn due_from(&self, uid: &PodUid, look: &Look, now: &Moment) -> Option<u64> {
        if !matches!(self.wish(&look.sighting), Wish::Reset) {
            return None;
        }
        if look.sighting.ending || look.sighting.ready {
            return None;
        }
        let record = self.memory.pods.get(uid)?;
        let (_, exits) = record.worst(&self.terms, now)?;
        let from = record
            .not_ready_since()
            .saturating_add(ms(self.terms.not_ready()));
        (exits > self.most(&look.sighting)).then_some(from)
    }

    fn most(&self, sighting: &Sighting) -> u32 {
        let policy = sighting.policy.as_ref().ok().and_then(Option::as_ref);
        let own = policy.and_then(|policy| policy.max_restarts);
        own.unwrap_or(self.terms.max_restarts_on_node)
    }

    /// Whose turn it is, and when.
    fn next(&self, now: &Moment) -> Option<Next<'_>> {
        let waiting = self.looks.iter().filter_map(|(uid, look)| {
            let from = self.due_from(uid, look, now)?;
            Some(Next {
                from,
                uid,
                at: from.max(look.next_up_ms),
            })
        });
        let mut waiting: Vec<Next<'_>> = waiting.collect();
        let soonest = waiting.iter().map(|next| next.at).min()?;
        let latest = soonest.max(now.up_ms).saturating_add(ms(SLACK));
        waiting.retain(|next| next.at <= latest);
        waiting.into_iter().min()
    }

    fn task(&self, uid: &PodUid, now: &Moment) -> Option<Task> {
        let seen = self.looks.get(uid)?.sighting.clone();
        let record = self.memory.pods.get(uid)?.clone();
        let (container, exits) = record.worst(&self.terms, now)?;
        let container = container.clone();
        Some(Task {
            seen,
            container,
            exits,
            record,
        })
    }

    /// How long until this node may reset one more; `None`: now.
    fn node_budget(&mut self, uid: &PodUid, namespace: &str, now: &Moment) -> Option<Duration> {
        let before = self.memory.spent.len();
        let spent = &mut self.memory.spent;
        spent.retain(|spent| now.since(spent.at_up_ms) < HOUR);
        self.changed |= spent.len() != before;
        let others = || spent.iter().filter(|spent| spent.pod != *uid);
        let second = |up_ms: u64| seconds(Duration::from_millis(up_ms));
        let at = |spent: &Spent| second(spent.at_up_ms);
        let most = self.terms.max_resets_per_hour_on_node;
        let neighbours = others().filter(|spent| spent.namespace == namespace);
        let (span, now) = (seconds(HOUR), second(now.up_ms));
        let all = full(others().map(at), most, span, now);
        all.max(full(neighbours.map(at), share(most), span, now))
    }

    fn back_off(&mut self, uid: &PodUid) -> Duration {
        let Some(look) = self.looks.get_mut(uid) else {
            return FIRST_PAUSE;
        };
        let pause = FIRST_PAUSE.saturating_mul(2_u32.saturating_pow(look.failures));
        look.failures = look.failures.saturating_add(1);
        pause.min(LONGEST_PAUSE)
    }

    fn postpone(&mut self, uid: &PodUid, pause: Duration, now: &Moment) {
        if let Some(look) = self.looks.get_mut(uid) {
            look.next_up_ms = now.up_ms.saturating_add(ms(pause));
        }
    }

    /// Unless that was said last, and not long ago.
    fn tell(&mut self, uid: &PodUid, notice: Notice, now: &Moment) -> Option<Deed> {
        let look = self.looks.get_mut(uid)?;
        let essence = notice.essence();
        if let Some((said, at)) = look.said.get(notice.kind())
            && *said == essence
            && now.since(*at) < SAID_AGAIN
        {
            return None;
        }
        look.said.insert(notice.kind(), (essence, now.up_ms));
        Some(Deed::Tell(look.sighting.key.clone(), uid.clone(), notice))
    }
}

fn ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
