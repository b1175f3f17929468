//! The exits that containerd tells of, from before there is anybody who knows their pods.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures::stream;
use tokio::sync::{Notify, oneshot};
use tokio::time::{Duration, Instant, sleep, timeout};
use tokio_stream::StreamExt;

use super::{Registry, Runtime, cri_endpoint, runtime};
use crate::config::Config;
use crate::cri::{self, Containerd, ExitFeed};
use crate::exit_hold::{self, Successor};

/// Exits in [`exit_hold::LIMIT`] on a node that is flooded with them.
const MOST_KEPT: usize = 10_000;

/// How long a successor is expected by hooks after the end of the other, whatever keeps it from listening, and once it listens:
/// one may have found nobody a moment before.
const EXPECTED_LIMIT: Duration = exit_hold::LIMIT;
const LINGER: Duration = Duration::from_secs(1);
/// In which those that wait have asked.
const ASKING: Duration = Duration::from_millis(100);

/// Where to tell who knows the pods, and who is to look when exits may have been missed.
type Known = (Arc<Registry>, Arc<Notify>);

/// What a successor does for exits while the other plugin is at work, and nothing for who has not waited. For a moment nobody
/// answers hooks; it must have heard by then what the containers exited with: a shim does not answer while its hook runs.
#[derive(Debug, Default)]
pub(super) struct Waited {
    /// Who follows exits is told by this who knows the pods. The last exits are kept until then: as many as a hook may still
    /// wait for.
    exits: Option<oneshot::Sender<Known>>,
    /// Whether exits are heard of by now.
    hears: Arc<AtomicBool>,
    successor: Option<Successor>,
}

impl Waited {
    /// Exits are followed from now on, unless they are already.
    pub(super) fn follow(&mut self, containerd: Option<Containerd>) {
        if let Some(containerd) = containerd.filter(|_| !self.follows()) {
            let (exits, known) = oneshot::channel();
            let hears = Arc::clone(&self.hears);
            tokio::spawn(async move { follow(containerd, known, &hears).await });
            self.exits = Some(exits);
        }
    }

    /// Whether exits are followed, or will be as soon as the runtime answers.
    fn follows(&self) -> bool {
        self.exits.as_ref().is_some_and(|it| !it.is_closed())
    }

    /// Their pods are known by now.
    pub(super) fn tell(&mut self, registry: Arc<Registry>, missed: Arc<Notify>) {
        if let Some(exits) = self.exits.take() {
            // Whoever follows them ends only after this.
            let _ = exits.send((registry, missed));
        }
    }

    /// It waits. Hooks are told of it as soon as it hears of exits.
    pub(super) fn goes_on(&mut self, config: &Config) {
        if !self.follows() && !self.hears.load(Ordering::Relaxed) {
            let (exits, known) = oneshot::channel();
            self.exits = Some(exits);
            let (endpoints, hears) = (config.cri_endpoints.clone(), Arc::clone(&self.hears));
            tokio::spawn(async move {
                let endpoint = cri_endpoint(&endpoints, false).await.ok()?;
                let cri = cri::Client::connect(&endpoint.to_string()).ok()?;
                match runtime(&cri).await {
                    Runtime::Containerd(containerd) => follow(*containerd, known, &hears).await,
                    // Whoever holds exits there knows what the containers exited with.
                    Runtime::Crio | Runtime::Other => hears.store(true, Ordering::Relaxed),
                }
                Some(())
            });
        }
        if self.successor.is_none() && self.hears.load(Ordering::Relaxed) {
            self.successor = Successor::announce(&config.run_dir).ok();
        }
    }

    /// The other plugin has ended: hooks wait until what is returned is dropped, but not for long.
    pub(super) fn takes_over(&mut self) -> Option<Listens> {
        let successor = self.successor.take()?;
        let (listens, listened) = oneshot::channel::<Infallible>();
        tokio::spawn(async move {
            // Nothing is ever sent.
            let _ = timeout(EXPECTED_LIMIT, listened).await;
            sleep(LINGER).await;
            drop(successor);
        });
        Some(Listens { _until: listens })
    }
}

/// A successor that does not listen yet, until this is dropped.
pub(super) struct Listens {
    _until: oneshot::Sender<Infallible>,
}

impl Listens {
    /// It does: waits until those have asked that have waited for it. What they hold is released before the runtime is to take
    /// this plugin in.
    pub(super) async fn by_now(self) {
        drop(self);
        sleep(ASKING).await;
    }
}

async fn follow(containerd: Containerd, mut known: oneshot::Receiver<Known>, hears: &AtomicBool) {
    let mut exits = containerd.exits();
    let mut kept = VecDeque::new();
    let (registry, missed) = loop {
        tokio::select! {
            known = &mut known => match known {
                Ok(known) => break known,
                Err(_) => return,
            },
            Some(news) = exits.next() => {
                if matches!(news, ExitFeed::Connected) {
                    hears.store(true, Ordering::Relaxed);
                }
                kept.push_back((Instant::now(), news));
                while kept.len() > MOST_KEPT || kept.front().is_some_and(is_old) {
                    kept.pop_front();
                }
            }
        }
    };
    kept.retain(|it| !is_old(it));
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

/// No hook waits for it any more.
fn is_old((at, _): &(Instant, ExitFeed)) -> bool {
    at.elapsed() > exit_hold::LIMIT
}
