//! Asks pods to restart, and waits until they have.

use std::collections::{BTreeSet, HashSet};
use std::pin::{Pin, pin};

use backon::{BackoffBuilder, ExponentialBuilder};
use futures::{Stream, StreamExt, stream};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Patch, PatchParams, WatchParams};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client};
use serde_json::json;
use tokio::time::{Duration, Instant, interval, sleep, sleep_until};

use super::End;
use super::error::{AskError, LIMIT, Right};
use super::pod::Fit;
use super::rollout::Rollout;
use super::screen::Screen;
use super::select;
use super::time::Timeout;
use super::token::Token;
use crate::cli::RestartArgs;
use crate::kube::{ApiError, is_gone};
use crate::policy::POD_REQUEST_KEY;

/// How many pods are asked at once.
const AT_ONCE: usize = 32;
/// How often a server that is busy is asked again, and how soon the first time.
const RETRIES: usize = 3;
const FIRST_PAUSE: Duration = Duration::from_millis(500);
/// How often the bar shows the time.
const TICK: Duration = Duration::from_millis(500);

/// Restarts the pods that `args` name. It is `interrupted` only while it waits for them.
pub(super) async fn run(
    client: &Client,
    namespace: &str,
    args: &RestartArgs,
    screen: &mut Screen<'_>,
    interrupted: impl Future<Output = ()>,
) -> Result<End, AskError> {
    let selection = select::find(client, namespace, &args.targets, args.selector.as_ref()).await?;
    for (pod, why) in &selection.left_alone {
        screen.note(&format!("pod/{pod} is left alone: it {why}"))?;
    }
    let all = selection.pods.len();
    let turns = args.max_unavailable.filter(|_| !args.dry_run);
    let most = turns.map_or(all, usize::from);
    let token = Token::new();
    let value = token.value(args.now);
    let mut restart = Restart {
        api: Api::namespaced(client.clone(), namespace),
        namespace: namespace.to_owned(),
        value: value.clone(),
        token,
        dry_run: args.dry_run,
        limit: args.timeout,
        began: Instant::now(),
        rollout: Rollout::new(selection.pods, value, most, args.timeout.get()),
        screen,
    };
    if args.dry_run || !(args.wait || most < all) {
        restart.ask().await?;
        return Ok(restart.end());
    }
    // Before anybody is asked: the first list says nothing of that right.
    let watch = Right::pods("watch", namespace);
    watch
        .used(may_watch(&restart.api, &selection.watch))
        .await?;
    restart.screen.wait();
    let changes = watcher(restart.api.clone(), selection.watch).default_backoff();
    let end = restart.follow(pin!(changes), pin!(interrupted)).await;
    restart.leave()?;
    end
}

struct Restart<'s, 't> {
    api: Api<Pod>,
    namespace: String,
    token: Token,
    /// What the pods are asked with.
    value: String,
    dry_run: bool,
    limit: Timeout,
    began: Instant,
    rollout: Rollout,
    screen: &'s mut Screen<'t>,
}

impl Restart<'_, '_> {
    /// Asks whose turn it is, as soon as it is known how the pods are.
    async fn follow(
        &mut self,
        mut changes: Pin<&mut impl Stream<Item = watcher::Result<Event<Pod>>>>,
        mut interrupted: Pin<&mut impl Future<Output = ()>>,
    ) -> Result<End, AskError> {
        let mut ticks = interval(TICK);
        let mut listed = HashSet::new();
        let mut told = false;
        let mut away = false;
        let told_by = Instant::now() + LIMIT;
        loop {
            if told {
                tokio::select! {
                    asked = self.ask() => asked?,
                    () = &mut interrupted => return Ok(End::Interrupted),
                }
                if self.rollout.is_over() {
                    break;
                }
            }
            let deadline = self.rollout.deadline();
            tokio::select! {
                biased;
                () = &mut interrupted => return Ok(End::Interrupted),
                // What has been answered by now is not late.
                change = changes.next() => match change {
                    Some(Ok(change)) => {
                        told |= matches!(change, Event::InitDone);
                        away = false;
                        self.note(change, &mut listed)?;
                    }
                    Some(Err(error)) => {
                        let fault = self.fault(&error);
                        let lasts = matches!(fault, AskError::Denied { .. } | AskError::Unauthorized(_));
                        if !told || lasts {
                            return Err(fault);
                        }
                        if !std::mem::replace(&mut away, true) {
                            self.screen.note(&format!("{fault}; still waiting"))?;
                        }
                    }
                    // A watcher has no end.
                    None => break,
                },
                () = sleep_until(deadline.unwrap_or_else(Instant::now)), if deadline.is_some() => {
                    for index in self.rollout.expire(Instant::now()) {
                        self.tell(index)?;
                    }
                }
                () = sleep_until(told_by), if !told => return Err(AskError::not_within(LIMIT)),
                _ = ticks.tick() => self.screen.draw(self.rollout.counts(), self.began.elapsed())?,
            }
        }
        Ok(self.end())
    }

    /// Asks the pods whose turn it is.
    async fn ask(&mut self) -> Result<(), AskError> {
        let mut batch: BTreeSet<usize> = self.rollout.next().into_iter().collect();
        let requests: Vec<_> = batch
            .iter()
            .map(|&index| {
                let pod = self.rollout.pod(index).clone();
                let (api, value, dry_run) = (self.api.clone(), self.value.clone(), self.dry_run);
                let right = Right::pods("patch", &self.namespace);
                // From now on it may be taken, whatever becomes of us.
                self.rollout.asked(index, Instant::now());
                async move { (index, request(&api, &pod, &value, dry_run, &right).await) }
            })
            .collect();
        let mut answers = stream::iter(requests).buffer_unordered(AT_ONCE);
        while let Some((index, answer)) = answers.next().await {
            let pod = self.rollout.pod(index).name.clone();
            match answer {
                Ok(taken) => {
                    self.rollout.taken(index, &taken, Instant::now());
                    if self.dry_run {
                        self.screen.would_be_asked(&pod)?;
                    } else {
                        self.screen.asked(&pod, self.token.as_str())?;
                    }
                }
                // It is the same for all of them.
                Err(error @ (AskError::Denied { .. } | AskError::Unauthorized(_))) => {
                    for index in batch {
                        self.rollout.not_asked(index);
                    }
                    return Err(error);
                }
                Err(error) => {
                    self.rollout.refused(index, error.to_string());
                    self.tell(index)?;
                }
            }
            batch.remove(&index);
        }
        Ok(())
    }

    fn note(&mut self, change: Event<Pod>, listed: &mut HashSet<String>) -> Result<(), AskError> {
        match change {
            Event::Init => listed.clear(),
            Event::InitApply(pod) => {
                let over = self.rollout.see(&pod);
                listed.extend(pod.metadata.name);
                self.tell_all(over)?;
            }
            Event::InitDone => {
                let gone = self.rollout.only(listed);
                self.tell_all(gone)?;
            }
            Event::Apply(pod) => {
                let over = self.rollout.see(&pod);
                self.tell_all(over)?;
            }
            Event::Delete(pod) => {
                let gone = self.rollout.gone(&pod);
                self.tell_all(gone)?;
            }
        }
        Ok(())
    }

    fn tell_all(&mut self, over: impl IntoIterator<Item = usize>) -> Result<(), AskError> {
        over.into_iter().try_for_each(|index| self.tell(index))
    }

    /// Says what has become of a pod.
    fn tell(&mut self, index: usize) -> Result<(), AskError> {
        if let Some(outcome) = self.rollout.outcome(index) {
            let pod = &self.rollout.pod(index).name;
            self.screen.over(pod, outcome, self.limit)?;
        }
        Ok(())
    }

    /// Says what has not come to its end.
    fn leave(&mut self) -> Result<(), AskError> {
        let counts = self.rollout.counts();
        self.screen.leave(counts, self.began.elapsed())?;
        let (under_way, waiting) = self.rollout.unfinished();
        for (what, pods) in [
            ("still under way (nothing stops that)", under_way),
            ("not asked", waiting),
        ] {
            if !pods.is_empty() {
                let pods = pods.join(", ");
                self.screen.note(&format!("{what}: {pods}"))?;
            }
        }
        Ok(())
    }

    fn end(&self) -> End {
        let counts = self.rollout.counts();
        match (counts.not_restarted, counts.late) {
            // All are left alone: nothing was done.
            (0, 0) if counts.all == 0 => End::Failed,
            (0, 0) => End::Well,
            (0, _) => End::Late,
            _ => End::Failed,
        }
    }

    fn fault(&self, error: &watcher::Error) -> AskError {
        let (verb, error) = match error {
            watcher::Error::InitialListFailed(error) => ("list", error),
            watcher::Error::WatchStartFailed(error) | watcher::Error::WatchFailed(error) => {
                ("watch", error)
            }
            other => return AskError::Away(other.to_string()),
        };
        Right::pods(verb, &self.namespace).fault(error)
    }
}

/// The error is the API server's first answer.
async fn may_watch(api: &Api<Pod>, selection: &watcher::Config) -> Result<(), ApiError> {
    let params = WatchParams {
        label_selector: selection.label_selector.clone(),
        field_selector: selection.field_selector.clone(),
        ..WatchParams::default()
    };
    // Whatever it has: there are pods to tell of at once.
    let mut changes = pin!(api.watch(&params, "0").await?);
    changes.next().await.transpose().map(drop)
}

/// Asks that very pod, with the UID. A server that is busy is asked again: the same value asks for nothing more.
async fn request(
    api: &Api<Pod>,
    pod: &Fit,
    value: &str,
    dry_run: bool,
    right: &Right,
) -> Result<Pod, AskError> {
    let patch = json!({"metadata": {"uid": pod.uid, "annotations": {POD_REQUEST_KEY: value}}});
    let params = PatchParams {
        dry_run,
        ..PatchParams::default()
    };
    let patch = Patch::Merge(patch);
    let pauses = ExponentialBuilder::default().with_min_delay(FIRST_PAUSE);
    let mut pauses = pauses.with_max_times(RETRIES).build();
    let taken = loop {
        let sent = async {
            match api.patch(&pod.name, &params, &patch).await {
                Ok(pod) => Ok(Some(pod)),
                Err(error) if is_gone(&error) => Ok(None),
                Err(error) => Err::<_, ApiError>(error),
            }
        };
        let answer = right.used(sent).await;
        let is_busy = matches!(answer, Err(AskError::Away(_)));
        match pauses.next().filter(|_| is_busy) {
            Some(pause) => sleep(pause).await,
            None => break answer?,
        }
    };
    taken.ok_or_else(|| AskError::Unfit {
        pod: pod.name.clone(),
        why: "was deleted".to_owned(),
    })
}

#[cfg(test)]
mod tests;
