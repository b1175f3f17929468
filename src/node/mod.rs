//! What is known of one pod with restart rules: its containers, merged from NRI, CRI and the event stream.
//!
//! Pure bookkeeping: whoever owns a [`Pod`] tells it what it heard. Containers of other pods are never kept.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::clock;
use crate::ids::{Attempt, ContainerId, ContainerName, ExitCode};

/// On every container that the kubelet makes: which attempt it is, which it also gives to the CRI
/// (`pkg/kubelet/kuberuntime/labels.go`).
pub(crate) const RESTART_COUNT: &str = "io.kubernetes.container.restartCount";

/// The annotation by which a placeholder is known: its value is the restart that made it.
pub const PLACEHOLDER_ANNOTATION: &str = "reprise.dev/placeholder";

/// The same of an attempt that a replay made.
pub const REPLAY_ANNOTATION: &str = "reprise.dev/replay";

/// For how long a list of the runtime may have been under way when it is read. That long it is remembered what has been
/// removed.
pub const OLDEST_LIST: Duration = Duration::from_mins(5);
/// NRI may tell of a container a little before the runtime lists it.
const LIST_SLACK: Duration = Duration::from_secs(2);

/// Who made a container. What the kubelet made, it is about to start; what we made and did not start is ours to remove.
/// Later ones count: what we make has the annotations of the attempt before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Maker {
    /// The kubelet.
    Kubelet,
    /// A replay, as the next attempt.
    Replay,
    /// A restart, as a placeholder, which never runs.
    Placeholder,
}

impl Maker {
    /// The maker of a container with these annotations.
    #[must_use]
    pub fn of<'a>(annotations: impl IntoIterator<Item = (&'a String, &'a String)>) -> Self {
        let makers = annotations.into_iter().map(|(key, _)| match key.as_str() {
            PLACEHOLDER_ANNOTATION => Self::Placeholder,
            REPLAY_ANNOTATION => Self::Replay,
            _ => Self::Kubelet,
        });
        makers.max().unwrap_or(Self::Kubelet)
    }
}

/// How far a container's process is, which is sooner than what the CRI shows; in the order in which it happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum InstanceState {
    /// Created, not started.
    Created,
    /// Its process runs.
    Running,
    /// Its process has ended; the code may come later than the news.
    Ended(Option<ExitCode>),
}

/// One container in the runtime: an attempt, or a placeholder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Instance {
    /// The name it has in the pod.
    pub name: ContainerName,
    /// How far it is.
    pub state: InstanceState,
    /// Who made it.
    pub maker: Maker,
    /// Which attempt of that name it is.
    pub attempt: Attempt,
    /// When it was created: nanoseconds since the Unix epoch, by a clock that may have been set since. The kubelet goes by
    /// it, and so does who wants to know what it sees.
    pub created_at: i64,
    /// When it was first heard of.
    pub heard_at: Instant,
    /// When its process was started, if that was told.
    pub started_at: Option<Instant>,
    /// Whether the runtime has listed it. One that NRI alone has told of may not be in a list yet.
    pub listed: bool,
    /// Whether it was made with our hook, so that its exit can be held; `None`: nobody has looked.
    pub hooked: Option<bool>,
}

impl Instance {
    /// Whether it is one of our placeholders.
    #[must_use]
    pub fn is_placeholder(&self) -> bool {
        self.maker == Maker::Placeholder
    }

    /// One that was made a moment ago, with these annotations.
    #[must_use]
    pub fn just_made<'a>(
        name: ContainerName,
        annotations: impl IntoIterator<Item = (&'a String, &'a String)> + Clone,
        hooked: Option<bool>,
    ) -> Self {
        Self {
            name,
            state: InstanceState::Created,
            maker: Maker::of(annotations.clone()),
            attempt: attempt(annotations),
            created_at: now_ns(),
            heard_at: clock::now(),
            started_at: None,
            listed: false,
            hooked,
        }
    }

    /// One that the kubelet made with our hook, and that runs.
    #[cfg(test)]
    pub(crate) fn running(name: &str) -> Self {
        Self {
            name: name.into(),
            state: InstanceState::Running,
            maker: Maker::Kubelet,
            attempt: Attempt(0),
            created_at: 1,
            heard_at: Instant::now(),
            started_at: None,
            listed: false,
            hooked: Some(true),
        }
    }

    /// The attempts of a container in the order in which they were made, whatever the clock on the wall was set to meanwhile.
    pub(crate) fn order(&self) -> (Attempt, i64) {
        (self.attempt, self.created_at)
    }

    /// Whether a restart made it that did not start it. Without that restart nobody will.
    #[must_use]
    pub fn is_unstarted_of_ours(&self) -> bool {
        let unstarted = self.state == InstanceState::Created;
        self.is_placeholder() || (self.maker == Maker::Replay && unstarted)
    }
}

/// The containers of one pod.
#[derive(Debug, Default)]
pub struct Instances {
    by_id: BTreeMap<ContainerId, Instance>,
    /// Those that are gone, and since when; `None`: as good as gone, and being removed. A list that was asked for before may
    /// still have them.
    gone: HashMap<ContainerId, Option<Instant>>,
}

impl Instances {
    /// Takes note of a container that is new, or known better than before. News may come out of order: what a
    /// container has reached is never taken back, and one that is gone stays so. Returns whether it is new, or has come
    /// further.
    pub fn insert(&mut self, id: ContainerId, instance: Instance) -> bool {
        if self.is_gone(&id) {
            return false;
        }
        match self.by_id.entry(id) {
            Entry::Vacant(entry) => {
                entry.insert(instance);
                true
            }
            Entry::Occupied(entry) => {
                let known = entry.into_mut();
                let news = known.state < instance.state;
                known.state = known.state.max(instance.state);
                known.created_at = known.created_at.min(instance.created_at);
                known.heard_at = known.heard_at.min(instance.heard_at);
                known.started_at = known.started_at.or(instance.started_at);
                known.listed |= instance.listed;
                // What holds exits for all containers may end, and be there again.
                known.hooked = instance.hooked.or(known.hooked);
                news
            }
        }
    }

    /// Its process runs. Returns its name unless it is unknown or has ended already.
    pub fn started(&mut self, id: &ContainerId, at: Instant) -> Option<ContainerName> {
        let instance = self.by_id.get_mut(id)?;
        instance.started_at.get_or_insert(at);
        if matches!(instance.state, InstanceState::Ended(_)) {
            return None;
        }
        instance.state = InstanceState::Running;
        Some(instance.name.clone())
    }

    /// Its process has ended; a code once known stays. Returns whether this was news.
    pub fn ended(&mut self, id: &ContainerId, code: Option<ExitCode>) -> bool {
        let Some(instance) = self.by_id.get_mut(id) else {
            return false;
        };
        let known = match instance.state {
            InstanceState::Ended(known) => known,
            InstanceState::Created | InstanceState::Running => {
                instance.state = InstanceState::Ended(code);
                return true;
            }
        };
        if known.is_none() && code.is_some() {
            instance.state = InstanceState::Ended(code);
            return true;
        }
        false
    }

    /// It is no longer in the runtime.
    pub fn removed(&mut self, id: &ContainerId, now: Instant) {
        self.by_id.remove(id);
        self.gone
            .retain(|_, at| at.is_none_or(|at| now.saturating_duration_since(at) <= OLDEST_LIST));
        self.gone.insert(id.clone(), Some(now));
    }

    /// It is being removed: whatever is heard of it until it is gone is of no account.
    pub fn given_up(&mut self, id: &ContainerId) {
        self.by_id.remove(id);
        self.gone.insert(id.clone(), None);
    }

    /// Those that are not in a list that was asked for at that time. What was made meanwhile cannot be in it.
    pub(crate) fn missing_from(
        &self,
        list: &[(ContainerId, Instance)],
        asked: Instant,
    ) -> Vec<ContainerId> {
        let known = self.by_id.iter();
        let known = known.filter(|(_, it)| it.listed || it.heard_at + LIST_SLACK < asked);
        let missing = known.filter(|(id, _)| !list.iter().any(|(seen, _)| seen == *id));
        missing.map(|(id, _)| id.clone()).collect()
    }

    /// Whether it is gone, or as good as gone.
    #[must_use]
    pub fn is_gone(&self, id: &ContainerId) -> bool {
        self.gone.contains_key(id)
    }

    /// The container of that id.
    #[must_use]
    pub fn get(&self, id: &ContainerId) -> Option<&Instance> {
        self.by_id.get(id)
    }

    /// The newest attempt of that name, placeholders aside.
    #[must_use]
    pub fn newest(&self, name: &ContainerName) -> Option<(&ContainerId, &Instance)> {
        self.by_id
            .iter()
            .filter(|(_, instance)| instance.name == *name && !instance.is_placeholder())
            .max_by_key(|(_, instance)| instance.order())
    }

    /// The attempts of that name before the newest, placeholders aside.
    #[must_use]
    pub fn older(&self, name: &ContainerName) -> Vec<ContainerId> {
        let newest = self.newest(name).map(|(id, _)| id);
        let attempts = self
            .by_id
            .iter()
            .filter(|(_, instance)| instance.name == *name && !instance.is_placeholder());
        attempts
            .map(|(id, _)| id)
            .filter(|id| Some(*id) != newest)
            .cloned()
            .collect()
    }

    /// Whether an attempt of the same container after that one has started.
    pub(crate) fn is_followed(&self, it: &Instance) -> bool {
        let newest = self.newest(&it.name).map(|(_, newest)| newest);
        newest.is_some_and(|newest| {
            newest.state != InstanceState::Created && it.order() < newest.order()
        })
    }

    /// The attempt of that name whose process runs.
    #[must_use]
    pub fn running(&self, name: &ContainerName) -> Option<&ContainerId> {
        let mut running = self.all_running();
        running.find(|(_, it)| it.name == *name).map(|(id, _)| id)
    }

    /// Attempts whose processes run although those of a newer one do: the kubelet looks after the newest alone.
    #[must_use]
    pub fn twins(&self) -> Vec<ContainerId> {
        let mut running: Vec<_> = self.all_running().collect();
        running.sort_by_key(|(_, it)| (&it.name, it.order()));
        let pairs = running.windows(2);
        let pairs = pairs.filter(|pair| pair[0].1.name == pair[1].1.name);
        pairs.map(|pair| pair[0].0.clone()).collect()
    }

    fn all_running(&self) -> impl Iterator<Item = (&ContainerId, &Instance)> {
        let attempts = self.by_id.iter().filter(|(_, it)| !it.is_placeholder());
        attempts.filter(|(_, it)| it.state == InstanceState::Running)
    }

    /// All containers.
    pub fn iter(&self) -> impl Iterator<Item = (&ContainerId, &Instance)> {
        self.by_id.iter()
    }

    /// The names of all containers, in the order in which each was first created.
    #[must_use]
    pub fn names_by_creation(&self) -> Vec<ContainerName> {
        let mut first: BTreeMap<&ContainerName, i64> = BTreeMap::new();
        for instance in self
            .by_id
            .values()
            .filter(|instance| !instance.is_placeholder())
        {
            let at = first.entry(&instance.name).or_insert(i64::MAX);
            *at = (*at).min(instance.created_at);
        }
        let mut names: Vec<_> = first.into_iter().collect();
        names.sort_by_key(|&(_, at)| at);
        names.into_iter().map(|(name, _)| name.clone()).collect()
    }
}

/// Which attempt a container is, by its annotations; the first, if they do not tell.
#[must_use]
pub fn attempt<'a>(annotations: impl IntoIterator<Item = (&'a String, &'a String)>) -> Attempt {
    let mut annotations = annotations.into_iter();
    let count = annotations.find(|(key, _)| *key == RESTART_COUNT);
    Attempt(count.and_then(|(_, count)| count.parse().ok()).unwrap_or(0))
}

/// Now, in nanoseconds since the Unix epoch, as in CRI and NRI.
#[must_use]
pub fn now_ns() -> i64 {
    unix_ns(SystemTime::now())
}

/// That time in nanoseconds since the Unix epoch, which no earlier one is before.
#[must_use]
pub fn unix_ns(time: SystemTime) -> i64 {
    let since = time.duration_since(UNIX_EPOCH);
    // Fits until 2262.
    i64::try_from(since.unwrap_or_default().as_nanos()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn instance(name: &str, state: InstanceState, created_at: i64) -> Instance {
        Instance {
            state,
            created_at,
            listed: true,
            ..Instance::running(name)
        }
    }

    #[test]
    fn the_newest_attempt_is_the_one_with_the_highest_number_whatever_the_clock_said() {
        let mut pod = Instances::default();
        for (id, attempt, created_at) in [("c1", 8, 900), ("c2", 9, 5), ("c3", 10, 3)] {
            let number = [(RESTART_COUNT.to_owned(), attempt.to_string())];
            let number = super::attempt(number.iter().map(|(key, value)| (key, value)));
            let made = Instance {
                attempt: number,
                ..instance("a", InstanceState::Running, created_at)
            };
            pod.insert(id.into(), made);
        }
        assert_eq!(pod.newest(&"a".into()).unwrap().0, &"c3".into());
        assert_eq!(pod.older(&"a".into()), ["c1".into(), "c2".into()]);
    }

    #[test]
    fn a_container_that_does_not_say_which_attempt_it_is_is_the_first() {
        let odd = [(RESTART_COUNT.to_owned(), "-1".to_owned())];
        assert_eq!(
            attempt(odd.iter().map(|(key, value)| (key, value))),
            Attempt(0)
        );
        assert_eq!(attempt([]), Attempt(0));
    }

    #[test]
    fn an_end_is_never_taken_back_by_older_news() {
        let mut pod = Instances::default();
        let id = ContainerId::from("c1");
        assert!(pod.insert(id.clone(), instance("a", InstanceState::Running, 1)));
        assert!(pod.ended(&id, None));
        assert!(pod.ended(&id, Some(ExitCode(42))));
        assert!(!pod.ended(&id, Some(ExitCode(0))));
        assert_eq!(pod.started(&id, Instant::now()), None);
        assert!(!pod.insert(id.clone(), instance("a", InstanceState::Running, 1)));
        assert_eq!(
            pod.get(&id).unwrap().state,
            InstanceState::Ended(Some(ExitCode(42)))
        );
    }

    #[test]
    fn who_made_a_container_is_told_by_what_it_has_beside_what_was_copied() {
        let of = |keys: &[&str]| {
            let annotations = keys.iter().map(|key| ((*key).to_owned(), String::new()));
            let annotations: BTreeMap<_, _> = annotations.collect();
            Maker::of(&annotations)
        };
        assert_eq!(of(&[]), Maker::Kubelet);
        assert_eq!(of(&[RESTART_COUNT]), Maker::Kubelet);
        assert_eq!(of(&[RESTART_COUNT, REPLAY_ANNOTATION]), Maker::Replay);
        let both = [PLACEHOLDER_ANNOTATION, REPLAY_ANNOTATION];
        assert_eq!(of(&both), Maker::Placeholder);
    }

    #[test]
    fn placeholders_are_no_attempts() {
        let mut pod = Instances::default();
        pod.insert("c1".into(), instance("a", InstanceState::Running, 1));
        pod.insert(
            "c2".into(),
            Instance {
                maker: Maker::Placeholder,
                ..instance("a", InstanceState::Created, 2)
            },
        );
        assert_eq!(pod.newest(&"a".into()).unwrap().0, &"c1".into());
        assert_eq!(pod.running(&"a".into()), Some(&"c1".into()));
    }

    #[test]
    fn names_come_in_the_order_of_their_first_attempt() {
        let mut pod = Instances::default();
        pod.insert("c3".into(), instance("init", InstanceState::Running, 9));
        pod.insert("c2".into(), instance("main", InstanceState::Running, 5));
        pod.insert("c1".into(), instance("init", InstanceState::Ended(None), 1));
        let names = pod.names_by_creation();
        assert_eq!(names, vec!["init".into(), "main".into()]);
        assert_eq!(pod.newest(&"init".into()).unwrap().0, &"c3".into());
        assert_eq!(pod.older(&"init".into()), ["c1".into()]);
    }

    #[test]
    fn what_is_gone_is_remembered_for_as_long_as_a_list_may_still_have_it() {
        let (mut instances, began) = (Instances::default(), Instant::now());
        for number in 0..2_000 {
            let id = number.to_string().as_str().into();
            instances.removed(&id, began + Duration::from_secs(number));
        }
        assert_eq!(instances.gone.len(), 301);
    }
}
