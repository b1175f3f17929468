//! Carries out what [`Pods`] decides, and tells it what came of that. It decides nothing.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use kube::Client;
use tokio::task::{JoinError, JoinHandle, spawn_blocking};
use tokio::time::{sleep, timeout};

use super::disk::{Disk, limited};
use super::evidence::{self, Evidence};
use super::inbox::{Inbox, News};
use super::ledger::{Claim, Verdict};
use super::pods::{Deed, Outcome, Pods, Task};
use super::reservation::{ReservationError, Reservations};
use super::sighting::{Sighting, controller};
use super::store::Store;
use super::terms::{Method, Terms};
use super::voice::Voice;
use crate::clock::Clock;
use crate::cri;
use crate::ids::{ContainerId, PodUid};
use crate::kube::{Events, Evicted, Evictions, LeaseError, Owner, OwnerError, Version, owner_of};

/// Between two looks for evidence that is too old.
const CLEARED_EVERY: Duration = Duration::from_hours(1);
/// How long the API server may take over one step of a reset in all: nothing is done for another pod meanwhile.
const LIMIT: Duration = Duration::from_mins(1);
/// How often a pod is looked at that changes between the look and its end.
const MOST_LOOKS: usize = 5;
/// How long the runtime and a disk may take over one log.
const LOG_LIMIT: Duration = Duration::from_secs(2);

/// What hard resets are made with.
#[derive(Debug)]
pub(crate) struct Resets {
    terms: Terms,
    node: String,
    kube: Kube,
    cri: cri::Client,
    store: Store,
    voice: Voice,
    clock: Clock,
}

/// The API server, in all ways that it is needed.
struct Kube {
    client: Client,
    evictions: Evictions,
    reservations: Reservations,
}

/// A reset that needs only to be done.
#[derive(Debug)]
struct Prepared {
    task: Task,
    version: Version,
    owner: Owner,
    /// Of the reservation.
    stamp: i64,
    evidence: Evidence,
}

/// What a task of ours has come to.
type Answer = (Outcome, Option<Prepared>);
/// One that is under way, and for which pod.
type UnderWay = Option<(PodUid, JoinHandle<Answer>)>;

impl Resets {
    /// Nothing is done yet.
    pub(crate) fn new(
        client: Client,
        cri: cri::Client,
        events: Events,
        terms: Terms,
        node: &str,
        state_dir: &Path,
    ) -> Self {
        Self {
            terms,
            node: node.to_owned(),
            kube: Kube::new(client, node),
            cri,
            store: Store::new(state_dir),
            voice: Voice::new(events),
            clock: Clock::default(),
        }
    }

    /// Goes on for as long as there may be news. What it has begun when that ends is left as it is: the next one finds the pod
    /// as it is then.
    pub(crate) async fn run(self: Arc<Self>, mut news: Inbox) {
        let mut disk = Disk::new(self.store.clone());
        let memory = disk.load().await;
        let mut pods = Pods::new(self.terms.clone(), memory, &self.clock.moment());
        let mut under_way: UnderWay = None;
        let mut prepared = None;
        let mut clearing = tokio::time::interval(CLEARED_EVERY);
        loop {
            let deeds = pods.poll(&self.clock.moment());
            self.perform(&mut pods, deeds, &mut disk, &mut prepared, &mut under_way)
                .await;
            let wake = pods.wake(&self.clock.moment());
            let deeds = tokio::select! {
                heard = news.read() => match heard {
                    Some(heard) => self.hear(&mut pods, heard),
                    None => return,
                },
                (uid, answer) = answered(&mut under_way) => {
                    under_way = None;
                    let (outcome, ready) = answer.unwrap_or_else(|error| {
                        (Outcome::Unanswered(error.to_string()), None)
                    });
                    prepared = ready;
                    pods.outcome(&uid, outcome, &self.clock.moment())
                }
                () = self.until(wake) => Vec::new(),
                _ = clearing.tick() => {
                    self.clear().await;
                    Vec::new()
                }
            };
            self.perform(&mut pods, deeds, &mut disk, &mut prepared, &mut under_way)
                .await;
        }
    }

    async fn until(&self, up_ms: Option<u64>) {
        match up_ms {
            Some(up_ms) => {
                let left = up_ms.saturating_sub(self.clock.moment().up_ms);
                sleep(Duration::from_millis(left)).await;
            }
            None => std::future::pending().await,
        }
    }

    fn hear(&self, pods: &mut Pods, heard: Vec<News>) -> Vec<Deed> {
        let mut deeds = Vec::new();
        for news in heard {
            match news {
                News::Listed(uids) => pods.listed(&uids),
                News::Gone(uid) => pods.gone(&uid),
                News::Seen(sighting) => deeds.extend(pods.seen(*sighting, &self.clock.moment())),
            }
        }
        deeds
    }

    async fn perform(
        self: &Arc<Self>,
        pods: &mut Pods,
        deeds: Vec<Deed>,
        disk: &mut Disk,
        prepared: &mut Option<Prepared>,
        under_way: &mut UnderWay,
    ) {
        let mut saved = true;
        for deed in deeds {
            let this = Arc::clone(self);
            match deed {
                Deed::Save => {
                    saved = disk.save(pods.memory()).await;
                    if !saved {
                        pods.not_saved();
                    }
                }
                Deed::Tell(pod, uid, notice) => self.voice.tell(&pod, &uid, &notice),
                Deed::Prepare(task) => {
                    let uid = task.seen.uid.clone();
                    let task = tokio::spawn(async move {
                        if saved {
                            this.prepare(*task).await
                        } else {
                            (not_saved(), None)
                        }
                    });
                    *under_way = Some((uid, task));
                }
                Deed::Strike(uid) => {
                    let ready = prepared.take().filter(|it| it.task.seen.uid == uid);
                    let task = tokio::spawn(async move {
                        let outcome = match ready {
                            Some(ready) => this.carry_out(ready, saved).await,
                            None => Outcome::Unanswered("nothing is prepared".to_owned()),
                        };
                        (outcome, None)
                    });
                    *under_way = Some((uid, task));
                }
                Deed::Withdraw(uid) => {
                    let ready = prepared.take().filter(|it| it.task.seen.uid == uid);
                    let task = tokio::spawn(async move {
                        if let Some(ready) = ready {
                            this.kube.give_back(&ready.task.seen, ready.stamp).await;
                        }
                        (Outcome::Changed, None)
                    });
                    *under_way = Some((uid, task));
                }
            }
        }
    }

    async fn clear(&self) {
        let (store, kept) = (self.store.clone(), self.terms.keep_evidence());
        let mut cleared = spawn_blocking(move || store.clear(kept));
        if let Err(error) = limited(&mut cleared).await {
            tracing::warn!(%error, "old files about hard resets cannot be removed");
        }
    }

    /// What comes to nothing gives back what was reserved.
    async fn carry_out(&self, ready: Prepared, saved: bool) -> Outcome {
        let (seen, stamp) = (ready.task.seen.clone(), ready.stamp);
        let outcome = if saved {
            self.strike(ready).await
        } else {
            not_saved()
        };
        if !matches!(outcome, Outcome::Done | Outcome::Unanswered(_)) {
            self.kube.give_back(&seen, stamp).await;
        }
        outcome
    }

    /// Finds out whether the pod may go, what there is to know of it, and reserves that.
    async fn prepare(&self, task: Task) -> Answer {
        let (pod, owner, version, stamp) = match timeout(LIMIT, self.reserve(&task)).await {
            Ok(Ok(reserved)) => reserved,
            Ok(Err(outcome)) => return (outcome, None),
            Err(_) => return (Outcome::Away(late()), None),
        };
        let logs = self.logs(&pod, &task).await;
        let at = Timestamp::now().to_string();
        let evidence = Evidence::new(&task, &pod, &owner, &self.node, at, logs);
        let prepared = Prepared {
            task,
            version,
            owner,
            stamp,
            evidence,
        };
        (Outcome::Reserved, Some(prepared))
    }

    /// The pod as it is, who would make a new one, and the stamp of what was reserved.
    async fn reserve(&self, task: &Task) -> Result<(Pod, Owner, Version, i64), Outcome> {
        for _ in 0..MOST_LOOKS {
            match self.try_reserve(task).await {
                // One that crashes changes by the second.
                Err(Outcome::Changed) => {}
                answer => return answer,
            }
        }
        Err(Outcome::Changed)
    }

    async fn try_reserve(&self, task: &Task) -> Result<(Pod, Owner, Version, i64), Outcome> {
        let pod = self.look(task).await?;
        let owners = pod.metadata.owner_references.as_deref();
        let controller = controller(owners).ok_or(Outcome::Changed)?;
        let owner = owner_of(&self.kube.client, &pod, controller).await?;
        if task.seen.is_silent() && !owner.is_deployment() {
            return Err(Outcome::NotMeant);
        }
        let version = version_of(task, &pod);
        match self.end(&version, true).await {
            Evicted::Done => {}
            refused => return Err(outcome(refused)),
        }
        let claim = Claim {
            owner: owner.uid.clone(),
            namespace: task.seen.key.namespace.clone(),
            pod: task.seen.uid.to_string(),
        };
        match self.kube.reservations.ask(&claim, &self.terms).await? {
            Verdict::Granted { stamp } => Ok((pod, owner, version, stamp)),
            Verdict::Wait { wait, why } => Err(Outcome::Wait(wait, why)),
            Verdict::GivenUp { wait, resets } => Err(Outcome::GivenUp(wait, resets, owner)),
        }
    }

    /// The last lines of what has ended. What cannot be read is left out, and all that would follow if it takes too long.
    async fn logs(&self, pod: &Pod, task: &Task) -> BTreeMap<String, Vec<String>> {
        let mut logs = BTreeMap::new();
        for (name, ids) in evidence::attempts(pod, task.container.as_str()) {
            match timeout(LOG_LIMIT, self.log(&ids, &task.seen.uid)).await {
                Ok(Some(lines)) => {
                    logs.insert(name, lines);
                }
                Ok(None) => {
                    tracing::debug!(pod = %task.seen.key, container = name, "its log cannot be read");
                }
                Err(_) => break,
            }
        }
        logs
    }

    /// Of the first of these containers that there is, and that is that pod's.
    async fn log(&self, ids: &[ContainerId], uid: &PodUid) -> Option<Vec<String>> {
        for id in ids {
            let status = self.cri.container_status(id).await.ok();
            let Some(status) = status.filter(|it| evidence::is_of(&it.labels, uid)) else {
                continue;
            };
            let path = status.log_path?;
            let read = spawn_blocking(move || evidence::tail(Path::new(&path)));
            return read.await.ok()?.ok();
        }
        None
    }

    async fn strike(&self, prepared: Prepared) -> Outcome {
        match timeout(LIMIT, self.try_strike(prepared)).await {
            Ok(outcome) => outcome,
            Err(_) => Outcome::Unanswered(late()),
        }
    }

    async fn try_strike(&self, prepared: Prepared) -> Outcome {
        let Prepared {
            task,
            mut version,
            owner,
            evidence,
            ..
        } = prepared;
        let (pod, uid) = (&task.seen.key, &task.seen.uid);
        match self.keep(evidence.clone()).await {
            Ok(path) => {
                tracing::info!(%pod, path = %path.display(), "kept what is known of the pod");
            }
            Err(error) => return Outcome::Away(format!("its evidence cannot be kept: {error}")),
        }
        self.voice
            .resets(pod, uid, &owner, self.terms.method, &evidence)
            .await;
        for _ in 0..MOST_LOOKS {
            match self.end(&version, false).await {
                Evicted::Away(why) => return Outcome::Unanswered(why),
                // One that crashes changes by the second.
                Evicted::Changed => match self.look(&task).await {
                    Ok(pod) => version = version_of(&task, &pod),
                    Err(outcome) => return outcome,
                },
                ending => return outcome(ending),
            }
        }
        Outcome::Changed
    }

    /// That pod, if it is as bad as it was.
    async fn look(&self, task: &Task) -> Result<Pod, Outcome> {
        let pod = self.kube.evictions.look(&task.seen.key).await;
        let pod = pod.map_err(outcome)?;
        let pod = pod.filter(|pod| is_still(pod, task, &self.terms));
        pod.ok_or(Outcome::Changed)
    }

    async fn keep(&self, evidence: Evidence) -> io::Result<PathBuf> {
        let (store, kept) = (self.store.clone(), self.terms.keep_evidence());
        let mut keeping = spawn_blocking(move || store.keep(&evidence, kept));
        limited(&mut keeping).await.flatten()
    }

    async fn end(&self, version: &Version, dry_run: bool) -> Evicted {
        let evictions = &self.kube.evictions;
        match self.terms.method {
            Method::Evict => evictions.evict(version, dry_run).await,
            Method::Delete => evictions.delete(version, dry_run).await,
        }
    }
}

fn not_saved() -> Outcome {
    Outcome::Away("it cannot be written down: look at the disk of --state-dir".to_owned())
}

fn late() -> String {
    "it took too long".to_owned()
}

impl Kube {
    fn new(client: Client, node: &str) -> Self {
        Self {
            evictions: Evictions::new(client.clone()),
            reservations: Reservations::new(client.clone(), node),
            client,
        }
    }

    /// Gives back what was reserved for a pod, unless it ends after all: by an earlier strike of which nothing was heard, say.
    async fn give_back(&self, of: &Sighting, stamp: i64) {
        let (pod, uid) = (&of.key, &of.uid);
        let given_back = async {
            let found = self.evictions.look(pod).await.ok().flatten();
            let meta = found.map(|found| found.metadata);
            let stays = meta.is_some_and(|meta| {
                meta.uid.as_deref() == Some(uid.as_str()) && meta.deletion_timestamp.is_none()
            });
            if stays {
                self.reservations.withdraw(uid, stamp).await
            } else {
                Ok(())
            }
        };
        let given_back = timeout(LIMIT, given_back).await;
        let error = match given_back {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error.to_string(),
            Err(_) => late(),
        };
        tracing::warn!(error, %pod, "a reset that did not happen counts until the window is over");
    }
}

impl std::fmt::Debug for Kube {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Kube").finish_non_exhaustive()
    }
}

/// Never, if nothing is under way.
async fn answered(under_way: &mut UnderWay) -> (PodUid, Result<Answer, JoinError>) {
    match under_way {
        Some((uid, task)) => {
            let answer = task.await;
            (uid.clone(), answer)
        }
        None => std::future::pending().await,
    }
}

fn version_of(task: &Task, pod: &Pod) -> Version {
    Version {
        pod: task.seen.key.clone(),
        uid: task.seen.uid.to_string(),
        seen: pod.metadata.resource_version.clone().unwrap_or_default(),
    }
}

/// Whether it is the pod that was meant, and as bad as it was.
fn is_still(pod: &Pod, task: &Task, terms: &Terms) -> bool {
    Sighting::of(pod, terms).is_some_and(|now| task.seen.holds(&now))
}

fn outcome(ending: Evicted) -> Outcome {
    match ending {
        Evicted::Done => Outcome::Done,
        Evicted::Changed => Outcome::Changed,
        Evicted::Refused(why) => Outcome::Refused(why),
        Evicted::Denied(right, message) => Outcome::Denied(format!(
            "the plugin may not {right} ({message}): apply deploy/kustomize/components/hard-reset/rbac.yaml"
        )),
        Evicted::Away(why) => Outcome::Away(why),
    }
}

impl From<OwnerError> for Outcome {
    fn from(error: OwnerError) -> Self {
        match error {
            OwnerError::None(why) => Self::Unreplaced(why),
            OwnerError::Denied(_) => Self::Denied(error.to_string()),
            OwnerError::Away(why) => Self::Away(why),
        }
    }
}

impl From<ReservationError> for Outcome {
    fn from(error: ReservationError) -> Self {
        match &error {
            ReservationError::Lease(LeaseError::Missing(_) | LeaseError::Denied(_))
            | ReservationError::Unreadable(_) => Self::Denied(error.to_string()),
            ReservationError::Lease(LeaseError::Conflict | LeaseError::Away(..)) => {
                Self::Away(error.to_string())
            }
        }
    }
}

#[cfg(test)]
mod tests;
