//! Watches one pod from before its creation and keeps every state that the API server published.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Result, bail};
use futures::StreamExt;
use k8s_openapi::api::core::v1::{ContainerState, ContainerStatus, Pod};
use kube::runtime::watcher::{self, Event};
use kube::runtime::{WatchStreamExt, watcher as watch_pods};
use kube::{Api, ResourceExt};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};

use crate::wait::stretched;

/// A container as the pod's status tells it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Seen {
    pub(crate) id: String,
    pub(crate) restarts: i32,
    pub(crate) state: String,
    pub(crate) last_state: String,
    /// Why it waits.
    pub(crate) message: String,
    pub(crate) ready: bool,
    pub(crate) is_running: bool,
}

impl From<&ContainerStatus> for Seen {
    fn from(status: &ContainerStatus) -> Self {
        let state = status.state.as_ref();
        Self {
            id: status.container_id.clone().unwrap_or_default(),
            restarts: status.restart_count,
            state: in_words(state),
            last_state: in_words(status.last_state.as_ref()),
            message: state
                .and_then(|state| state.waiting.as_ref()?.message.clone())
                .unwrap_or_default(),
            ready: status.ready,
            is_running: state.is_some_and(|state| state.running.is_some()),
        }
    }
}

fn in_words(state: Option<&ContainerState>) -> String {
    let Some(state) = state else {
        return "-".to_owned();
    };
    if let Some(terminated) = &state.terminated {
        let reason = terminated.reason.as_deref().unwrap_or("no reason");
        return format!("exit {} ({reason})", terminated.exit_code);
    }
    if let Some(waiting) = &state.waiting {
        let reason = waiting.reason.as_deref().unwrap_or("no reason");
        return format!("waiting ({reason})");
    }
    match state.running {
        Some(_) => "running".to_owned(),
        None => "-".to_owned(),
    }
}

/// The part of a pod's status that scenarios talk about.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Snapshot {
    pub(crate) uid: String,
    pub(crate) ip: String,
    pub(crate) phase: String,
    pub(crate) ready: bool,
    pub(crate) containers: BTreeMap<String, Seen>,
    pub(crate) ephemeral: BTreeMap<String, Seen>,
    /// Conditions that say that the pod restarts in place, by type.
    pub(crate) restarting: BTreeMap<String, Told>,
}

/// A condition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Told {
    pub(crate) status: bool,
    pub(crate) reason: String,
    pub(crate) message: String,
}

impl Snapshot {
    /// Controllers act on one single such update, and the kubelet never takes it back.
    pub(crate) fn is_over(&self) -> bool {
        self.phase == "Failed" || self.phase == "Succeeded"
    }
}

impl From<&Pod> for Snapshot {
    fn from(pod: &Pod) -> Self {
        let status = pod.status.clone().unwrap_or_default();
        let containers = seen(
            status
                .init_container_statuses
                .iter()
                .chain(&status.container_statuses),
        );
        let ephemeral = seen(status.ephemeral_container_statuses.iter());
        Self {
            uid: pod.uid().unwrap_or_default(),
            ip: status.pod_ip.unwrap_or_default(),
            phase: status.phase.unwrap_or_default(),
            ready: status
                .conditions
                .iter()
                .flatten()
                .any(|condition| condition.type_ == "Ready" && condition.status == "True"),
            containers,
            restarting: status
                .conditions
                .iter()
                .flatten()
                .filter(|condition| condition.type_.ends_with("Restarting"))
                .map(|condition| {
                    let told = Told {
                        status: condition.status == "True",
                        reason: condition.reason.clone().unwrap_or_default(),
                        message: condition.message.clone().unwrap_or_default(),
                    };
                    (condition.type_.clone(), told)
                })
                .collect(),
            ephemeral,
        }
    }
}

fn seen<'a>(statuses: impl Iterator<Item = &'a Vec<ContainerStatus>>) -> BTreeMap<String, Seen> {
    statuses
        .flatten()
        .map(|status| (status.name.clone(), Seen::from(status)))
        .collect()
}

impl fmt::Display for Snapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ready = if self.ready { " ready" } else { "" };
        write!(f, "{}{ready} {}", self.phase, self.ip)?;
        for (kind, told) in &self.restarting {
            write!(f, "; {kind}={}", told.status)?;
        }
        for (name, seen) in self.containers.iter().chain(&self.ephemeral) {
            let id = seen.id.rsplit('/').next().unwrap_or_default();
            write!(
                f,
                "; {name}: {} restarts {} last {} {}",
                seen.state,
                seen.restarts,
                seen.last_state,
                id.get(..12).unwrap_or(id),
            )?;
        }
        Ok(())
    }
}

/// One entry of the history: a state that differed from the one before it.
#[derive(Clone, Debug)]
pub(crate) struct Moment {
    pub(crate) at: Instant,
    /// The same since the epoch, to compare with what the containers write.
    pub(crate) clock: Duration,
    pub(crate) snapshot: Snapshot,
}

pub(crate) struct Recorder {
    current: watch::Receiver<Option<Snapshot>>,
    history: Arc<Mutex<Vec<Moment>>>,
    task: JoinHandle<()>,
}

impl Recorder {
    /// Starts before the pod exists, so that nothing of it is missed.
    pub(crate) fn start(api: Api<Pod>, name: &str) -> Self {
        let (sender, current) = watch::channel(None);
        let history = Arc::new(Mutex::new(Vec::new()));
        let config = watcher::Config::default().fields(&format!("metadata.name={name}"));
        let task = tokio::spawn(record(api, config, sender, Arc::clone(&history)));
        Self {
            current,
            history,
            task,
        }
    }

    pub(crate) fn current(&self) -> Snapshot {
        self.current.borrow().clone().unwrap_or_default()
    }

    /// How many states were seen so far: a mark to take the history from.
    pub(crate) fn mark(&self) -> usize {
        self.moments().len()
    }

    pub(crate) fn since(&self, mark: usize) -> Vec<Moment> {
        self.moments().split_off(mark)
    }

    fn moments(&self) -> Vec<Moment> {
        self.history
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
            .clone()
    }

    /// Waits until `missing` names nothing any more, but only as long as the pod is not over: Failed
    /// and Succeeded are for ever.
    pub(crate) async fn until_alive(
        &self,
        what: &str,
        patience: Duration,
        missing: impl Fn(&Snapshot) -> Option<String>,
    ) -> Result<Snapshot> {
        let mut current = self.current.clone();
        let over = current.wait_for(|now| now.as_ref().is_some_and(Snapshot::is_over));
        tokio::select! {
            result = self.until(what, patience, missing) => result,
            Ok(last) = over => {
                let last = last.clone().unwrap_or_default();
                bail!("the pod is over; awaited: {what}; last seen: {last}")
            }
        }
    }

    /// Waits until `missing` names nothing any more.
    pub(crate) async fn until(
        &self,
        what: &str,
        patience: Duration,
        missing: impl Fn(&Snapshot) -> Option<String>,
    ) -> Result<Snapshot> {
        let patience = stretched(patience);
        let mut current = self.current.clone();
        let arrived = timeout(
            patience,
            current.wait_for(|snapshot| {
                snapshot
                    .as_ref()
                    .is_some_and(|snapshot| missing(snapshot).is_none())
            }),
        )
        .await;
        match arrived {
            Ok(Ok(snapshot)) => Ok(snapshot.clone().unwrap_or_default()),
            Ok(Err(_)) => bail!("the pod is gone; awaited: {what}"),
            Err(_) => {
                let last = self.current();
                let missing = missing(&last).unwrap_or_else(|| "nothing".to_owned());
                bail!(
                    "not within {} s: {what}; missing: {missing}; last seen: {last}",
                    patience.as_secs()
                )
            }
        }
    }

    /// Watches for `period` and fails as soon as `wrong` finds something: for what must not happen.
    pub(crate) async fn stays_for(
        &self,
        period: Duration,
        wrong: impl Fn(&Snapshot) -> Option<String>,
    ) -> Result<()> {
        let mut current = self.current.clone();
        let changed = timeout(
            period,
            current.wait_for(|snapshot| snapshot.as_ref().is_some_and(|s| wrong(s).is_some())),
        )
        .await;
        match changed {
            Err(_) => Ok(()),
            Ok(Err(_)) => bail!("the pod is gone"),
            Ok(Ok(_)) => {
                let last = self.current();
                bail!("{}; seen: {last}", wrong(&last).unwrap_or_default())
            }
        }
    }

    /// Waits until the API server no longer has the pod.
    pub(crate) async fn until_gone(&self, patience: Duration) -> Result<()> {
        let patience = stretched(patience);
        let mut current = self.current.clone();
        match timeout(patience, current.wait_for(Option::is_none)).await {
            Ok(_) => Ok(()),
            Err(_) => bail!(
                "not deleted within {} s; last seen: {}",
                patience.as_secs(),
                self.current()
            ),
        }
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn record(
    api: Api<Pod>,
    config: watcher::Config,
    sender: watch::Sender<Option<Snapshot>>,
    history: Arc<Mutex<Vec<Moment>>>,
) {
    let mut events = std::pin::pin!(watch_pods(api, config).default_backoff());
    let mut listed = false;
    while let Some(event) = events.next().await {
        let snapshot = match event {
            Ok(Event::Init) => {
                listed = false;
                continue;
            }
            Ok(Event::InitApply(pod)) => {
                listed = true;
                Some(Snapshot::from(&pod))
            }
            Ok(Event::InitDone) if listed => continue,
            Ok(Event::Apply(pod)) => Some(Snapshot::from(&pod)),
            Ok(Event::InitDone | Event::Delete(_)) => None,
            // The watcher starts again by itself, which is all that can be done about an error;
            // what it then lists is recorded like the rest.
            Err(_) => continue,
        };
        if *sender.borrow() == snapshot {
            continue;
        }
        if let Some(snapshot) = &snapshot {
            history
                .lock()
                .unwrap_or_else(std::sync::PoisonError::into_inner)
                .push(Moment {
                    at: Instant::now(),
                    clock: SystemTime::now()
                        .duration_since(UNIX_EPOCH)
                        .unwrap_or_default(),
                    snapshot: snapshot.clone(),
                });
        }
        sender.send_replace(snapshot);
    }
}
