//! What the watch on this node's pods hears, until somebody looks at it: of each pod the latest only, so that a disk that stalls
//! leaves no more behind than there are pods.

use std::collections::{BTreeMap, BTreeSet};
use std::mem::take;
use std::sync::{Arc, Mutex, PoisonError};

use k8s_openapi::api::core::v1::Pod;
use kube::runtime::watcher::Event;
use tokio::sync::mpsc::{Receiver, Sender, channel};

use super::sighting::{Sighting, uid};
use super::terms::Terms;
use crate::ids::PodUid;

/// One of them; in this order.
#[derive(Debug, PartialEq)]
pub(super) enum News {
    /// There are no others than these.
    Listed(BTreeSet<PodUid>),
    /// A pod that may be reset some day.
    Seen(Box<Sighting>),
    /// A pod that is gone, or is none of those.
    Gone(PodUid),
}

/// Where news come out.
#[derive(Debug)]
pub(crate) struct Inbox {
    unread: Arc<Mutex<Unread>>,
    bell: Receiver<()>,
}

/// Where they go in.
struct Slot {
    terms: Terms,
    unread: Arc<Mutex<Unread>>,
    bell: Sender<()>,
    /// Those that were listed so far, while all are.
    listing: Option<BTreeSet<PodUid>>,
}

#[derive(Debug, Default)]
struct Unread {
    listed: Option<BTreeSet<PodUid>>,
    /// Since then, if there was one.
    latest: BTreeMap<PodUid, Option<Box<Sighting>>>,
}

/// Who watches is to call the first of these; the second ends with it.
pub(crate) fn news(terms: Terms) -> (impl FnMut(&Event<Pod>) + Send, Inbox) {
    let (sender, bell) = channel(1);
    let unread = Arc::<Mutex<Unread>>::default();
    let mut slot = Slot {
        terms,
        unread: Arc::clone(&unread),
        bell: sender,
        listing: None,
    };
    (
        move |event: &Event<Pod>| slot.put(event),
        Inbox { unread, bell },
    )
}

impl Slot {
    fn put(&mut self, event: &Event<Pod>) {
        match event {
            Event::Init => self.listing = Some(BTreeSet::new()),
            Event::InitDone => {
                if let Some(listed) = self.listing.take() {
                    let mut unread = lock(&self.unread);
                    unread.latest.retain(|uid, _| listed.contains(uid));
                    unread.listed = Some(listed);
                }
            }
            Event::Delete(pod) => self.note(pod, None),
            Event::InitApply(pod) | Event::Apply(pod) => {
                self.note(pod, Sighting::of(pod, &self.terms));
            }
        }
        // One ring is enough for all that is unread; nobody listens any more only when everything ends.
        let _ = self.bell.try_send(());
    }

    fn note(&mut self, pod: &Pod, sighting: Option<Sighting>) {
        let Some(uid) = uid(pod) else {
            return;
        };
        if let Some(listing) = self.listing.as_mut().filter(|_| sighting.is_some()) {
            listing.insert(uid.clone());
        }
        let latest = sighting.map(Box::new);
        lock(&self.unread).latest.insert(uid, latest);
    }
}

impl Inbox {
    /// All that is unread, once there is something; `None`: nobody watches any more.
    pub(super) async fn read(&mut self) -> Option<Vec<News>> {
        loop {
            let Unread { listed, latest } = take(&mut *lock(&self.unread));
            let pods = latest.into_iter().map(|(uid, latest)| match latest {
                Some(sighting) => News::Seen(sighting),
                None => News::Gone(uid),
            });
            let news: Vec<News> = listed.map(News::Listed).into_iter().chain(pods).collect();
            if !news.is_empty() {
                return Some(news);
            }
            self.bell.recv().await?;
        }
    }
}

fn lock(unread: &Mutex<Unread>) -> impl std::ops::DerefMut<Target = Unread> + '_ {
    unread.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod(uid: &str, exits: i32) -> Pod {
        serde_json::from_value(json!({
            "metadata": {
                "name": uid, "namespace": "n", "uid": uid,
                "annotations": {"failure-policy.reprise.dev": "action: DeletePod"},
            },
            "spec": {"containers": [{"name": "a"}]},
            "status": {"containerStatuses": [{
                "name": "a", "restartCount": exits, "image": "", "imageID": "", "ready": false,
            }]},
        }))
        .unwrap()
    }

    fn seen(uid: &str, exits: i32) -> News {
        let sighting = Sighting::of(&pod(uid, exits), &Terms::default());
        News::Seen(Box::new(sighting.unwrap()))
    }

    #[tokio::test]
    async fn of_each_pod_only_the_latest_is_told() {
        let (mut put, mut inbox) = news(Terms::default());
        for exits in 0..100 {
            put(&Event::Apply(pod("u", exits)));
            put(&Event::Apply(pod("v", exits)));
        }
        put(&Event::Delete(pod("v", 100)));
        let told = inbox.read().await.unwrap();
        assert_eq!(told, [seen("u", 99), News::Gone("v".into())]);
        // A pod that nobody wants reset is as good as gone.
        let mut silent = pod("u", 100);
        silent.metadata.annotations = None;
        put(&Event::Apply(silent));
        assert_eq!(inbox.read().await.unwrap(), [News::Gone("u".into())]);
        put(&Event::Apply(pod("u", 1)));
        drop(put);
        assert_eq!(inbox.read().await.unwrap(), [seen("u", 1)]);
        assert_eq!(inbox.read().await, None);
    }

    #[tokio::test]
    async fn a_list_says_who_is_gone_and_what_comes_after_it_is_told_after_it() {
        let (mut put, mut inbox) = news(Terms::default());
        put(&Event::Apply(pod("old", 1)));
        put(&Event::Init);
        put(&Event::InitApply(pod("lost", 1)));
        // It begins anew.
        put(&Event::Init);
        put(&Event::InitApply(pod("u", 1)));
        put(&Event::InitDone);
        put(&Event::Apply(pod("new", 1)));
        let listed = News::Listed(["u".into()].into());
        let told = inbox.read().await.unwrap();
        assert_eq!(told, [listed, seen("new", 1), seen("u", 1)]);
    }
}
