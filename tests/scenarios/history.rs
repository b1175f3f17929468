//! Every version of an object that the API server published since a scenario began to look.

use std::fmt::Debug;

use anyhow::{Result, bail};
use futures::StreamExt;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Resource};
use serde::de::DeserializeOwned;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::wait::PATIENCE;

pub(crate) struct History<K> {
    versions: watch::Receiver<Vec<K>>,
    task: JoinHandle<()>,
}

impl<K> History<K>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + Sync + 'static,
{
    /// Of the one object that is selected.
    pub(crate) fn start(api: Api<K>, selection: watcher::Config) -> Self {
        let (sender, versions) = watch::channel(Vec::new());
        let task = tokio::spawn(async move {
            let mut events = std::pin::pin!(watcher(api, selection).default_backoff());
            while let Some(event) = events.next().await {
                // After an error the watcher starts again by itself, and lists what is there.
                if let Ok(Event::InitApply(version) | Event::Apply(version)) = event {
                    sender.send_modify(|versions: &mut Vec<K>| versions.push(version));
                }
            }
        });
        Self { versions, task }
    }

    /// How many versions were seen so far: a mark to take the history from.
    pub(crate) fn mark(&self) -> usize {
        self.versions.borrow().len()
    }

    /// Oldest first.
    pub(crate) fn since(&self, mark: usize) -> Vec<K> {
        self.versions.borrow()[mark..].to_vec()
    }

    /// Waits until the newest version is as wanted.
    pub(crate) async fn until(&self, what: &str, wanted: impl Fn(&K) -> bool) -> Result<K> {
        let mut versions = self.versions.clone();
        let arrived = versions.wait_for(|versions| versions.last().is_some_and(&wanted));
        match timeout(PATIENCE, arrived).await {
            Ok(Ok(versions)) => Ok(versions[versions.len() - 1].clone()),
            Ok(Err(_)) => bail!("nobody watches any more; awaited: {what}"),
            Err(_) => bail!(
                "not within {} s: {what}; last seen: {:?}",
                PATIENCE.as_secs(),
                self.versions.borrow().last()
            ),
        }
    }
}

impl<K> Drop for History<K> {
    fn drop(&mut self) {
        self.task.abort();
    }
}
