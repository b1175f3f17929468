//! Whether the plugin is at work, and whether it is worth being started again.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::time::timeout;

use super::Metrics;
use crate::clock;
use crate::cri;
use crate::restart::pod::Gate;

/// For how long the runtime's last answer stands, whoever asks.
const ANSWER_STANDS: Duration = Duration::from_secs(2);
/// How long it may take: whoever asks has little more time.
const ANSWER_LIMIT: Duration = Duration::from_secs(1);
/// How long a handler may take, unless the runtime says otherwise (`DefaultPluginRequestTimeout`, `pkg/adaptation` of NRI).
const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);

/// How far the plugin is, and what has happened to it since.
#[derive(Debug)]
pub struct Health {
    metrics: Arc<Metrics>,
    gate: Arc<Gate>,
    state: Mutex<State>,
    /// When the runtime was asked last, and whether it has answered.
    answer: tokio::sync::Mutex<Option<(Instant, bool)>>,
}

#[derive(Debug)]
struct State {
    /// Another plugin is at work, for whose end this one waits.
    waits: bool,
    /// The runtime, once it is known.
    cri: Option<cri::Client>,
    /// What was there has been compared with the runtime's lists.
    synchronised: bool,
    hooks: Socket,
    /// How long the runtime waits for a handler.
    request_timeout: Duration,
}

/// Where hooks ask.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Socket {
    NotYet,
    There,
    Gone,
}

impl Health {
    /// Nothing is there yet. `gate`: whether the runtime asks the plugin.
    #[must_use]
    pub fn new(metrics: Arc<Metrics>, gate: Arc<Gate>) -> Self {
        let state = State {
            waits: false,
            cri: None,
            synchronised: false,
            hooks: Socket::NotYet,
            request_timeout: REQUEST_TIMEOUT,
        };
        Self {
            metrics,
            gate,
            state: Mutex::new(state),
            answer: tokio::sync::Mutex::default(),
        }
    }

    /// What is counted and measured.
    #[must_use]
    pub fn metrics(&self) -> &Arc<Metrics> {
        &self.metrics
    }

    /// Another plugin is at work, for whose end this one waits.
    pub(crate) fn waits(&self) {
        self.state().waits = true;
    }

    /// It does not, or no longer.
    pub(crate) fn is_alone(&self) {
        self.state().waits = false;
    }

    /// The runtime is known.
    pub(crate) fn found(&self, cri: cri::Client) {
        self.state().cri = Some(cri);
    }

    /// The runtime has said how long it waits for a handler.
    pub(crate) fn has_time(&self, request_timeout: Duration) {
        self.state().request_timeout = request_timeout;
    }

    /// What was there has been compared with the runtime's lists.
    pub(crate) fn synchronised(&self) {
        self.state().synchronised = true;
    }

    /// Hooks find their socket, or no longer.
    pub(crate) fn hooks_are_heard(&self, there: bool) {
        self.state().hooks = if there { Socket::There } else { Socket::Gone };
    }

    /// Whether pods are looked after, with a word on it; or what lacks.
    ///
    /// One that waits for another's end is as ready as it can be, and the node is looked after: a `DaemonSet` that replaces one
    /// with the other ends the old one when the new one is ready (`maxSurge`).
    pub(super) async fn ready(&self) -> Result<&'static str, Vec<&'static str>> {
        let (waits, cri, synchronised, hooks) = {
            let state = self.state();
            let State { waits, hooks, .. } = *state;
            (waits, state.cri.clone(), state.synchronised, hooks)
        };
        if waits {
            return Ok("ok: waiting for the end of another plugin, which is at work");
        }
        let answers = self.answers(cri).await;
        let lacks = [
            (!self.gate.is_there()).then_some("not registered with NRI"),
            (!answers).then_some("the runtime does not answer on its CRI socket"),
            (!synchronised).then_some("not yet compared with the runtime's lists"),
            (hooks != Socket::There).then_some("the hooks' socket is not there"),
        ];
        let lacks: Vec<_> = lacks.into_iter().flatten().collect();
        if lacks.is_empty() {
            Ok("ok")
        } else {
            Err(lacks)
        }
    }

    /// What only a new process can mend, as far as can be told.
    pub(super) fn ails(&self) -> Vec<String> {
        let state = self.state();
        let limit = 2 * state.request_timeout;
        let gone = state.hooks == Socket::Gone;
        drop(state);
        let longest = self.metrics.handlers().longest();
        let stuck = longest.filter(|longest| *longest > limit).map(|longest| {
            let seconds = longest.as_secs();
            format!("an NRI handler has been running for {seconds} s")
        });
        let gone = gone.then(|| "the hooks' socket is gone".to_owned());
        stuck.into_iter().chain(gone).collect()
    }

    /// Asks the runtime, but not for each who asks.
    async fn answers(&self, cri: Option<cri::Client>) -> bool {
        let Some(cri) = cri else { return false };
        let mut answer = self.answer.lock().await;
        let asked = answer.filter(|(at, _)| clock::now() < *at + ANSWER_STANDS);
        if let Some((_, answers)) = asked {
            return answers;
        }
        let answers = matches!(timeout(ANSWER_LIMIT, cri.version()).await, Ok(Ok(_)));
        *answer = Some((clock::now(), answers));
        answers
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cri::fake::Fake;

    fn health() -> Health {
        Health::new(Arc::default(), Arc::default())
    }

    /// As it is once everything has gone well.
    fn at_work(fake: &Fake) -> Health {
        let health = health();
        health.found(fake.client());
        health.synchronised();
        health.hooks_are_heard(true);
        health.gate.set(true);
        health
    }

    async fn lacks(health: &Health) -> Vec<&'static str> {
        health.ready().await.err().unwrap_or_default()
    }

    #[tokio::test]
    async fn everything_that_lacks_is_named() {
        let health = health();
        assert_eq!(lacks(&health).await.len(), 4);
        let fake = Fake::start();
        let health = at_work(&fake);
        assert_eq!(health.ready().await, Ok("ok"));
        health.gate.set(false);
        assert_eq!(lacks(&health).await, ["not registered with NRI"]);
        health.hooks_are_heard(false);
        let both = ["not registered with NRI", "the hooks' socket is not there"];
        assert_eq!(lacks(&health).await, both);
    }

    #[tokio::test]
    async fn the_runtime_is_asked_once_for_many_who_ask() {
        let mut fake = Fake::start();
        let health = at_work(&fake);
        let all = futures::future::join_all((0..20).map(|_| health.ready()));
        assert!(all.await.iter().all(|it| *it == Ok("ok")));
        let asked = || {
            fake.answers()
                .calls
                .iter()
                .filter(|it| it.contains("Version"))
                .count()
        };
        assert_eq!(asked(), 1);
        fake.stop();
        assert_eq!(health.ready().await, Ok("ok"), "its last answer stands");
        *health.answer.lock().await = None;
        assert_eq!(
            lacks(&health).await,
            ["the runtime does not answer on its CRI socket"]
        );
    }

    #[tokio::test]
    async fn a_runtime_that_is_stuck_is_not_waited_for() {
        let fake = Fake::start();
        let health = at_work(&fake);
        fake.answers().hangs = true;
        let began = Instant::now();
        assert_eq!(
            lacks(&health).await,
            ["the runtime does not answer on its CRI socket"]
        );
        assert!(began.elapsed() < 3 * ANSWER_LIMIT, "{:?}", began.elapsed());
    }

    #[tokio::test]
    async fn one_that_waits_for_anothers_end_is_ready_until_it_is_its_turn() {
        let health = health();
        health.waits();
        assert!(
            health
                .ready()
                .await
                .is_ok_and(|word| word.starts_with("ok: waiting"))
        );
        assert!(health.ails().is_empty());
        health.is_alone();
        assert!(health.ready().await.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn a_handler_that_runs_twice_as_long_as_the_runtime_waits_is_stuck() {
        let health = health();
        let handling = health.metrics.handlers().begin("CreateContainer");
        tokio::time::advance(2 * REQUEST_TIMEOUT).await;
        assert!(health.ails().is_empty());
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(health.ails(), ["an NRI handler has been running for 5 s"]);
        health.has_time(Duration::from_secs(10));
        assert!(health.ails().is_empty());
        health.has_time(REQUEST_TIMEOUT);
        drop(handling);
        assert!(health.ails().is_empty());
    }

    #[tokio::test]
    async fn a_socket_that_was_never_there_is_no_reason_to_start_again() {
        let health = health();
        assert!(health.ails().is_empty());
        health.hooks_are_heard(true);
        assert!(health.ails().is_empty());
        health.hooks_are_heard(false);
        assert_eq!(health.ails(), ["the hooks' socket is gone"]);
    }
}
