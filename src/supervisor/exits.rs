//! The exits that containerd tells of, from before there is anybody who knows their pods.

use std::collections::VecDeque;
use std::sync::Arc;

use futures::stream;
use tokio::sync::{Notify, oneshot};
use tokio::time::{Duration, Instant, sleep, timeout};
use tokio_stream::StreamExt;

use super::{Registry, Runtime, cri_endpoint, runtime};
use crate::config::Config;
use crate::cri::{self, Containerd, ExitFeed};
use crate::exit_hold::{self, Successor};
use crate::restart::pod::Gate;

/// Exits in [`exit_hold::LIMIT`] on a node that is flooded with them.
const MOST_KEPT: usize = 10_000;

/// How long hooks wait for the runtime to take in the successor, and between two looks.
const GATE_LIMIT: Duration = Duration::from_secs(2);
const GATE_INTERVAL: Duration = Duration::from_millis(10);

/// Where to tell who knows the pods, and who is to look when exits may have been missed.
type Known = (Arc<Registry>, Arc<Notify>);

/// What a successor does for exits while the other plugin is at work, and nothing for who has not waited. For a moment nobody
/// answers hooks; it must have heard by then what the containers exited with: a shim does not answer while its hook runs.
#[derive(Debug, Default)]
pub(super) struct Waited {
    /// Who follows exits is told by this who knows the pods. The last exits are kept until then: as many as a hook may still
    /// wait for.
    exits: Option<oneshot::Sender<Known>>,
    successor: Option<Successor>,
}

impl Waited {
    /// Exits are followed from now on, unless they are already.
    pub(super) fn follow(&mut self, containerd: Option<Containerd>) {
        let followed = self.exits.as_ref().is_some_and(|it| !it.is_closed());
        if let Some(containerd) = containerd.filter(|_| !followed) {
            let (exits, known) = oneshot::channel();
            tokio::spawn(follow(containerd, known));
            self.exits = Some(exits);
        }
    }

    /// Their pods are known by now.
    pub(super) fn tell(&mut self, registry: Arc<Registry>, missed: Arc<Notify>) {
        if let Some(exits) = self.exits.take() {
            // Whoever follows them ends only after this.
            let _ = exits.send((registry, missed));
        }
    }

    /// Hooks wait for a moment more until the runtime asks this plugin: as long as it does not, the kubelet starts what it likes.
    pub(super) async fn until_asked(&self, gate: &Gate) {
        let asked = async {
            while !gate.is_there() {
                sleep(GATE_INTERVAL).await;
            }
        };
        if self.successor.is_some() {
            // While a container stops, the runtime may take in no plugin.
            let _ = timeout(GATE_LIMIT, asked).await;
        }
    }

    /// It waits.
    pub(super) fn goes_on(&mut self, config: &Config) {
        if self.exits.is_none() {
            let (exits, known) = oneshot::channel();
            self.exits = Some(exits);
            let endpoints = config.cri_endpoints.clone();
            tokio::spawn(async move {
                let endpoint = cri_endpoint(&endpoints, false).await.ok()?;
                let cri = cri::Client::connect(&endpoint.to_string()).ok()?;
                if let Runtime::Containerd(containerd) = runtime(&cri).await {
                    follow(*containerd, known).await;
                }
                Some(())
            });
        }
        if self.successor.is_none() {
            self.successor = Successor::announce(&config.run_dir).ok();
        }
    }
}

async fn follow(containerd: Containerd, mut known: oneshot::Receiver<Known>) {
    let mut exits = containerd.exits();
    let mut kept = VecDeque::new();
    let (registry, missed) = loop {
        tokio::select! {
            known = &mut known => match known {
                Ok(known) => break known,
                Err(_) => return,
            },
            Some(news) = exits.next() => {
                kept.push_back((Instant::now(), news));
                let is_old = |(at, _): &(Instant, ExitFeed)| at.elapsed() > exit_hold::LIMIT;
                while kept.len() > MOST_KEPT || kept.front().is_some_and(is_old) {
                    kept.pop_front();
                }
            }
        }
    };
    let mut exits = stream::iter(kept).map(|(_, news)| news).chain(exits);
    while let Some(news) = exits.next().await {
        match news {
            ExitFeed::Exit(exit) => registry.ended(&exit.container, Some(exit.code)),
            ExitFeed::OomKilled(container) => registry.oom_killed(&container),
            ExitFeed::Connected => missed.notify_one(),
            ExitFeed::Lost(error) => tracing::debug!(%error, "the stream of exits broke"),
        }
    }
}
