//! How far the restarts of several pods are: which is to be asked next, and what has become of the others. Does no I/O.

use std::collections::HashSet;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use tokio::time::Instant;

use super::pod::{self, Fit, Last, UnderWay};

/// What has become of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Outcome {
    /// All containers run again; in the plugin's words.
    Restarted(String),
    /// They do not, and why.
    NotRestarted(String),
    /// It was not over in time, and what is known.
    Late(String),
    /// It was selected, and could not be asked any more when its turn came.
    LeftAlone(String),
}

#[derive(Debug)]
enum State {
    /// It has not been asked yet.
    Waiting,
    /// It has, and has not answered. `message`: a restart is under way, whoever asked for it.
    Asked {
        since: Instant,
        message: Option<String>,
    },
    Over(Outcome),
}

/// How many pods are how far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Counts {
    pub(super) all: usize,
    pub(super) waiting: usize,
    pub(super) asked: usize,
    pub(super) restarted: usize,
    pub(super) not_restarted: usize,
    pub(super) late: usize,
}

/// The pods that are to restart, in order.
#[derive(Debug)]
pub(super) struct Rollout {
    pods: Vec<(Fit, State)>,
    /// What they are asked with.
    value: String,
    /// So many at a time, at most.
    most: usize,
    /// For each pod.
    limit: Duration,
}

impl Rollout {
    pub(super) fn new(pods: Vec<Fit>, value: String, most: usize, limit: Duration) -> Self {
        let pods = pods.into_iter().map(|pod| (pod, State::Waiting));
        Self {
            pods: pods.collect(),
            value,
            most,
            limit,
        }
    }

    pub(super) fn pod(&self, index: usize) -> &Fit {
        &self.pods[index].0
    }

    pub(super) fn outcome(&self, index: usize) -> Option<&Outcome> {
        match &self.pods[index].1 {
            State::Over(outcome) => Some(outcome),
            State::Waiting | State::Asked { .. } => None,
        }
    }

    /// Which pods are to be asked now. None after one that has not restarted: what keeps it from it may keep the others, too.
    pub(super) fn next(&self) -> Vec<usize> {
        let counts = self.counts();
        if counts.not_restarted + counts.late > 0 {
            return Vec::new();
        }
        let free = self.most.saturating_sub(counts.asked);
        let waiting = self.indices(|state| matches!(state, State::Waiting));
        waiting.take(free).collect()
    }

    /// Whether nothing more will come.
    pub(super) fn is_over(&self) -> bool {
        self.counts().asked == 0 && self.next().is_empty()
    }

    /// The request is on its way.
    pub(super) fn asked(&mut self, index: usize, now: Instant) {
        self.pods[index].1 = State::Asked {
            since: now,
            message: None,
        };
    }

    /// The API server has taken none of it: the right is missing.
    pub(super) fn not_asked(&mut self, index: usize) {
        self.pods[index].1 = State::Waiting;
    }

    /// The API server has taken it, and this is the pod. What that has answered by now is none to us.
    pub(super) fn taken(&mut self, index: usize, pod: &Pod, now: Instant) {
        self.asked(index, now);
        let answered = Last::of(pod).and_then(|last| last.answered().map(str::to_owned));
        self.pods[index].0.answered = answered;
    }

    /// It has not.
    pub(super) fn refused(&mut self, index: usize, why: String) {
        self.pods[index].1 = State::Over(Outcome::NotRestarted(why));
    }

    /// The pod as it is now. Returns which one it is, if that ends the wait for it.
    pub(super) fn see(&mut self, seen: &Pod) -> Option<usize> {
        let index = self.named(seen.metadata.name.as_deref())?;
        let value = self.value.as_str();
        let (fit, state) = &mut self.pods[index];
        let same = seen.metadata.uid.as_ref() == Some(&fit.uid);
        match state {
            State::Waiting => {
                let now = if same {
                    Fit::from_pod(seen, fit.named)
                } else {
                    Err("has been replaced".to_owned())
                };
                let Err(why) = now.map(|now| *fit = now) else {
                    return None;
                };
                self.lose(index, format!("it {why}"));
                Some(index)
            }
            State::Over(_) => None,
            State::Asked { message, .. } => {
                let outcome = if same {
                    *message = UnderWay::of(seen, Timestamp::now()).map(|it| it.message);
                    let outcome = outcome(fit, value, seen);
                    let restarted = matches!(outcome, Some(Outcome::Restarted(_)));
                    if restarted && is_yet_to_be_ready(fit, seen) {
                        *message = Some("it has restarted, and is not ready".to_owned());
                        return None;
                    }
                    outcome
                } else {
                    Some(Outcome::NotRestarted("it has been replaced".to_owned()))
                };
                let outcome = outcome?;
                *state = State::Over(outcome);
                Some(index)
            }
        }
    }

    /// It is gone, or has ended. One that was selected, and that nobody has asked yet, is left alone.
    fn lose(&mut self, index: usize, why: String) {
        let (fit, state) = &mut self.pods[index];
        let counts = fit.named || matches!(state, State::Asked { .. });
        *state = State::Over(if counts {
            Outcome::NotRestarted(why)
        } else {
            Outcome::LeftAlone(why)
        });
    }

    /// The pod is gone. Returns which one it is, if that is news.
    pub(super) fn gone(&mut self, gone: &Pod) -> Option<usize> {
        let index = self.named(gone.metadata.name.as_deref())?;
        let (fit, state) = &self.pods[index];
        let same = gone.metadata.uid.as_ref() == Some(&fit.uid);
        (same && !matches!(state, State::Over(_))).then(|| {
            self.lose(index, "it was deleted".to_owned());
            index
        })
    }

    /// The pods with these names are all that there are. Returns which others are gone, if that is news.
    pub(super) fn only(&mut self, names: &HashSet<String>) -> Vec<usize> {
        let open = self.indices(|state| !matches!(state, State::Over(_)));
        let gone: Vec<_> = open
            .filter(|index| !names.contains(&self.pod(*index).name))
            .collect();
        for index in &gone {
            self.lose(*index, "it was deleted".to_owned());
        }
        gone
    }

    /// When the first of the pods that are waited for is late.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let since = self.pods.iter().filter_map(|(_, state)| match state {
            State::Asked { since, .. } => Some(*since),
            State::Waiting | State::Over(_) => None,
        });
        since.min().map(|since| since + self.limit)
    }

    /// Which pods are late now.
    pub(super) fn expire(&mut self, now: Instant) -> Vec<usize> {
        let mut late = Vec::new();
        for (index, (fit, state)) in self.pods.iter_mut().enumerate() {
            if let State::Asked { since, message } = state
                && now >= *since + self.limit
            {
                *state = State::Over(Outcome::Late(match message {
                    Some(message) => format!("it is still under way: {message}"),
                    None => format!("no answer: its node {} may be without the plugin", fit.node),
                }));
                late.push(index);
            }
        }
        late
    }

    pub(super) fn counts(&self) -> Counts {
        let mut counts = Counts {
            all: self.pods.len(),
            ..Counts::default()
        };
        for (_, state) in &self.pods {
            *match state {
                State::Over(Outcome::LeftAlone(_)) => {
                    counts.all -= 1;
                    continue;
                }
                State::Waiting => &mut counts.waiting,
                State::Asked { .. } => &mut counts.asked,
                State::Over(Outcome::Restarted(_)) => &mut counts.restarted,
                State::Over(Outcome::NotRestarted(_)) => &mut counts.not_restarted,
                State::Over(Outcome::Late(_)) => &mut counts.late,
            } += 1;
        }
        counts
    }

    /// The names of the pods that are waited for, and of those that were not asked.
    pub(super) fn unfinished(&self) -> (Vec<&str>, Vec<&str>) {
        let names = |of: fn(&State) -> bool| {
            let indices = self.indices(of);
            indices.map(|index| self.pod(index).name.as_str()).collect()
        };
        (
            names(|state| matches!(state, State::Asked { .. })),
            names(|state| matches!(state, State::Waiting)),
        )
    }

    fn indices(&self, of: fn(&State) -> bool) -> impl Iterator<Item = usize> {
        let pods = self.pods.iter().enumerate();
        pods.filter(move |(_, (_, state))| of(state))
            .map(|(index, _)| index)
    }

    fn named(&self, name: Option<&str>) -> Option<usize> {
        self.pods
            .iter()
            .position(|(fit, _)| Some(fit.name.as_str()) == name)
    }
}

/// Whether it was ready and is not, though it may be again. While the kubelet has yet to say what runs now, it says nothing of
/// that.
fn is_yet_to_be_ready(fit: &Fit, seen: &Pod) -> bool {
    let is_old = pod::running(seen).any(|id| fit.running.contains(id));
    fit.ready && (is_old || !pod::is_ready(seen)) && pod::end(seen).is_none()
}

/// What the pod says of the request. Somebody may have asked after us: whatever answers them has begun later, or was under
/// way then, and answers us too.
fn outcome(fit: &Fit, value: &str, seen: &Pod) -> Option<Outcome> {
    let known = [&fit.request, &fit.answered].map(Option::as_deref);
    let later = pod::request(seen).filter(|value| !known.contains(&Some(value)));
    let answers = |last: &Last| last.answers(value) || later.is_some_and(|it| last.answers(it));
    let last = Last::of(seen).filter(answers);
    match last {
        Some(last) if last.restarted => Some(Outcome::Restarted(last.message)),
        Some(last) => Some(Outcome::NotRestarted(format!(
            "{}: {}",
            last.reason, last.message
        ))),
        None => pod::end(seen).map(|why| Outcome::NotRestarted(format!("it {why}"))),
    }
}

#[cfg(test)]
mod tests;
