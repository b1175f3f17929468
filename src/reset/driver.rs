//! Carries out what [`Pods`] decides, and tells it what came of that. It decides nothing.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use kube::Client;
use kube::runtime::watcher::Event;
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
use tokio::task::{JoinError, JoinHandle, spawn_blocking};
use tokio::time::sleep;

use super::count::ProbeKill;
use super::evidence::{self, Evidence};
use super::ledger::{Claim, Verdict};
use super::pods::{Deed, Outcome, Pods, Task};
use super::reservation::{ReservationError, Reservations};
use super::sighting::{News, Sighting, controller};
use super::store::Store;
use super::terms::{Method, Terms};
use super::voice::Voice;
use crate::clock::Clock;
use crate::cri;
use crate::ids::{ContainerId, PodUid};
use crate::kube::{
    Endings, Events, Evicted, Evictions, LeaseError, Owner, OwnerError, Version, owner_of,
};

/// Between two looks for evidence that is too old.
const CLEARED_EVERY: Duration = Duration::from_hours(1);

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
    /// What was written last could be.
    disk_is_well: AtomicBool,
}

/// The API server, in all ways that it is needed.
struct Kube {
    client: Client,
    endings: Endings,
    evictions: Evictions,
    reservations: Reservations,
}

/// A reset that needs only to be done.
#[derive(Debug)]
struct Prepared {
    task: Task,
    version: Version,
    owner: Owner,
    evidence: Evidence,
}

/// What a task of ours has come to.
type Answer = (Outcome, Option<Prepared>);
/// One that is under way, and for which pod.
type UnderWay = Option<(PodUid, JoinHandle<Answer>)>;

/// Tells [`Resets::run`] of what the watch on this node's pods hears.
pub(crate) fn news(terms: Terms) -> (impl Fn(&Event<Pod>) + Send, UnboundedReceiver<News>) {
    let (sender, receiver): (UnboundedSender<News>, _) = mpsc::unbounded_channel();
    let tell = move |event: &Event<Pod>| {
        if let Some(news) = News::of(event, &terms) {
            // Nobody listens any more only when everything ends.
            let _ = sender.send(news);
        }
    };
    (tell, receiver)
}

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
        let kube = Kube {
            endings: Endings::new(client.clone()),
            evictions: Evictions::new(client.clone()),
            reservations: Reservations::new(client.clone(), node),
            client,
        };
        Self {
            terms,
            node: node.to_owned(),
            kube,
            cri,
            store: Store::new(state_dir),
            voice: Voice::new(events),
            clock: Clock::default(),
            disk_is_well: AtomicBool::new(true),
        }
    }

    /// Goes on for as long as there may be news. What it has begun when that ends is left as it is: the next one finds the pod
    /// as it is then.
    pub(crate) async fn run(self: Arc<Self>, mut news: UnboundedReceiver<News>) {
        let store = self.store.clone();
        let Ok(memory) = spawn_blocking(move || store.load()).await else {
            return;
        };
        let mut pods = Pods::new(self.terms.clone(), memory, &self.clock.moment());
        let mut under_way: UnderWay = None;
        let mut prepared = None;
        let mut clearing = tokio::time::interval(CLEARED_EVERY);
        loop {
            let deeds = pods.poll(&self.clock.moment());
            self.perform(&mut pods, deeds, &mut prepared, &mut under_way)
                .await;
            let wake = pods.wake(&self.clock.moment());
            let deeds = tokio::select! {
                heard = news.recv() => match heard {
                    Some(heard) => self.hear(&mut pods, heard).await,
                    None => return,
                },
                (uid, answer) = answered(&mut under_way) => {
                    under_way = None;
                    let (outcome, ready) = answer.unwrap_or_else(|error| {
                        (Outcome::Away(error.to_string()), None)
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
            self.perform(&mut pods, deeds, &mut prepared, &mut under_way)
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

    async fn hear(&self, pods: &mut Pods, news: News) -> Vec<Deed> {
        match news {
            News::Relisting => pods.relisting(),
            News::Relisted => pods.relisted(),
            News::Gone(uid) => pods.gone(&uid),
            News::Seen(sighting) => {
                let kills = if pods.asks_for_probes(&sighting) {
                    self.probe_kills(&sighting).await
                } else {
                    None
                };
                return pods.seen(*sighting, kills.as_deref(), &self.clock.moment());
            }
        }
        Vec::new()
    }

    async fn probe_kills(&self, sighting: &Sighting) -> Option<Vec<ProbeKill>> {
        let endings = &self.kube.endings;
        let restarted = endings.restarted(&sighting.key, &sighting.uid).await?;
        let kills = restarted.into_iter();
        Some(
            kills
                .map(|(container, at)| ProbeKill { container, at })
                .collect(),
        )
    }

    async fn perform(
        self: &Arc<Self>,
        pods: &mut Pods,
        deeds: Vec<Deed>,
        prepared: &mut Option<Prepared>,
        under_way: &mut UnderWay,
    ) {
        let mut saved = true;
        for deed in deeds {
            match deed {
                Deed::Save => saved = self.save(pods).await,
                Deed::Tell(pod, uid, notice) => self.voice.tell(&pod, &uid, &notice),
                Deed::Prepare(task) => {
                    let (this, uid) = (Arc::clone(self), task.uid.clone());
                    let task = tokio::spawn(async move { this.prepare(task).await });
                    *under_way = Some((uid, task));
                }
                Deed::Strike(uid) => {
                    let this = Arc::clone(self);
                    let ready = prepared.take().filter(|it| saved && it.task.uid == uid);
                    let task = tokio::spawn(async move {
                        let outcome = match ready {
                            Some(ready) => this.strike(ready).await,
                            None => Outcome::Away(
                                "it could not be written down: look at the disk of --state-dir"
                                    .to_owned(),
                            ),
                        };
                        (outcome, None)
                    });
                    *under_way = Some((uid, task));
                }
            }
        }
    }

    async fn save(&self, pods: &Pods) -> bool {
        let (store, memory) = (self.store.clone(), pods.memory().clone());
        let saved = spawn_blocking(move || store.save(&memory)).await;
        let saved = saved.unwrap_or_else(|error| Err(error.into()));
        let was_well = self.disk_is_well.swap(saved.is_ok(), Ordering::Relaxed);
        match &saved {
            Ok(()) if !was_well => {
                tracing::info!("how often pods have crashed can be written down again");
            }
            Err(error) if was_well => {
                tracing::warn!(%error, "how often pods have crashed cannot be written down: no pod is reset meanwhile");
            }
            Ok(()) | Err(_) => {}
        }
        saved.is_ok()
    }

    async fn clear(&self) {
        let (store, kept) = (self.store.clone(), self.terms.keep_evidence_hours);
        let kept = Duration::from_hours(kept.into());
        if let Ok(Err(error)) = spawn_blocking(move || store.clear(kept)).await {
            tracing::warn!(%error, "old files about hard resets cannot be removed");
        }
    }

    /// Finds out whether the pod may go, what there is to know of it, and reserves that.
    async fn prepare(&self, task: Task) -> Answer {
        match self.try_prepare(task).await {
            Ok(prepared) => (Outcome::Reserved, Some(prepared)),
            Err(outcome) => (outcome, None),
        }
    }

    async fn try_prepare(&self, task: Task) -> Result<Prepared, Outcome> {
        let evictions = &self.kube.evictions;
        let pod = evictions.look(&task.pod).await.map_err(outcome)?;
        let pod = pod.filter(|pod| is_still(pod, &task, &self.terms));
        let pod = pod.ok_or(Outcome::Changed)?;
        let meta = &pod.metadata;
        let controller = controller(meta.owner_references.as_deref()).ok_or(Outcome::Changed)?;
        let owner = owner_of(&self.kube.client, &pod, controller).await?;
        if task.by_default && !owner.is_deployment() {
            return Err(Outcome::NotMeant);
        }
        let version = Version {
            pod: task.pod.clone(),
            uid: task.uid.to_string(),
            seen: meta.resource_version.clone().unwrap_or_default(),
        };
        if self.terms.method == Method::Evict {
            match evictions.evict(&version, true).await {
                Evicted::Done => {}
                refused => return Err(outcome(refused)),
            }
        }
        let logs = self.logs(&pod, &task).await;
        let at = Timestamp::now().to_string();
        let evidence = Evidence::new(&task, &pod, &owner, &self.node, at, logs);
        let claim = Claim {
            owner: owner.uid.clone(),
            namespace: task.pod.namespace.clone(),
            pod: task.uid.to_string(),
        };
        match self.kube.reservations.ask(&claim, &self.terms).await? {
            Verdict::Granted => Ok(Prepared {
                task,
                version,
                owner,
                evidence,
            }),
            Verdict::Wait { wait, why } => Err(Outcome::Wait(wait, why)),
            Verdict::GivenUp { wait, resets } => Err(Outcome::GivenUp(wait, resets, owner)),
        }
    }

    /// The last lines of what has ended. What cannot be read is left out.
    async fn logs(&self, pod: &Pod, task: &Task) -> BTreeMap<String, Vec<String>> {
        let mut logs = BTreeMap::new();
        for (name, ids) in evidence::attempts(pod, task.container.as_str()) {
            if let Some(lines) = self.log(&ids).await {
                logs.insert(name, lines);
            } else {
                tracing::debug!(pod = %task.pod, container = name, "its log cannot be read");
            }
        }
        logs
    }

    /// Of the first of these containers that there is.
    async fn log(&self, ids: &[ContainerId]) -> Option<Vec<String>> {
        for id in ids {
            let Ok(status) = self.cri.container_status(id).await else {
                continue;
            };
            let path = status.log_path?;
            let read = spawn_blocking(move || evidence::tail(Path::new(&path)));
            return read.await.ok()?.ok();
        }
        None
    }

    async fn strike(&self, prepared: Prepared) -> Outcome {
        let Prepared {
            task,
            version,
            owner,
            evidence,
        } = prepared;
        let (pod, uid) = (&task.pod, &task.uid);
        let (store, kept) = (self.store.clone(), evidence.clone());
        let seconds = self.clock.moment().unix_ms / 1000;
        match spawn_blocking(move || store.keep(seconds, &kept)).await {
            Ok(Ok(path)) => {
                tracing::info!(%pod, path = %path.display(), "kept what is known of the pod");
            }
            Ok(Err(error)) => {
                return Outcome::Away(format!("its evidence cannot be kept: {error}"));
            }
            Err(error) => return Outcome::Away(error.to_string()),
        }
        self.voice
            .resets(pod, uid, &owner, self.terms.method, &evidence);
        let ending = match self.terms.method {
            Method::Evict => self.kube.evictions.evict(&version, false).await,
            Method::Delete => self.kube.evictions.delete(&version).await,
        };
        outcome(ending)
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

/// Whether it is the pod that was meant, and as bad as it was.
fn is_still(pod: &Pod, task: &Task, terms: &Terms) -> bool {
    Sighting::of(pod, terms).is_some_and(|seen| seen.uid == task.uid && !seen.ready && !seen.ending)
}

fn outcome(ending: Evicted) -> Outcome {
    match ending {
        Evicted::Done => Outcome::Done,
        Evicted::Changed => Outcome::Changed,
        Evicted::Refused(why) => Outcome::Refused(why),
        Evicted::Denied(right) => Outcome::Denied(format!(
            "the plugin may not {right}: apply deploy/hard-reset.yaml"
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
