//! The plugin's end of the [holder](super::holder): starts it, tells it whose exits may be held, and starts another when it ends.

use std::collections::HashMap;
use std::io;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::select;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until, timeout};

use super::holder::{HolderArgs, PONG, READY};
use crate::ids::ContainerId;
use crate::metrics::Metrics;

/// How long it may take until it says whether it can hold exits.
const START_LIMIT: Duration = Duration::from_secs(5);
/// Between two questions whether it is alive, and how long the answer may take: conmon waits for one that hangs.
const PING_INTERVAL: Duration = Duration::from_secs(1);
const PONG_LIMIT: Duration = Duration::from_secs(4);
/// Before another one is started.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);

/// Keeps a holder, for as long as there is a clone of this.
#[derive(Debug, Clone)]
pub struct Keeper {
    news: mpsc::UnboundedSender<News>,
    /// `None`: it has not been tried yet.
    holds: watch::Receiver<Option<bool>>,
}

#[derive(Debug)]
enum News {
    /// The exit of this container may be held. The marker says whether it is while no plugin is there.
    Hold(ContainerId, PathBuf),
    /// Nobody is to hear of the exit of this one.
    Hide(ContainerId),
    Show(ContainerId),
    Forget(ContainerId),
}

impl News {
    fn word(&self) -> String {
        match self {
            Self::Hold(id, marker) => format!("hold {id} {}\n", marker.display()),
            Self::Hide(id) => format!("hide {id}\n"),
            Self::Show(id) => format!("show {id}\n"),
            Self::Forget(id) => format!("forget {id}\n"),
        }
    }
}

/// Whose exits may be held.
type Known = HashMap<ContainerId, PathBuf>;

/// Why there is no holder.
#[derive(Debug, thiserror::Error)]
enum KeeperError {
    #[error("cannot start the process that holds them: {0}")]
    Start(io::Error),
    #[error("{0}")]
    Said(String),
    #[error("the process that holds them has ended")]
    Ended,
    #[error("the process that holds them did not answer")]
    Hangs,
}

impl Keeper {
    /// Starts a holder, and waits until it holds exits or has failed to, which is said; it is tried again. Must be called on the
    /// async runtime.
    pub async fn start(args: HolderArgs, metrics: Arc<Metrics>) -> Self {
        let (news, told) = mpsc::unbounded_channel();
        let (up, mut holds) = watch::channel(None);
        tokio::spawn(keep(args, told, up, metrics));
        // Fails only if the task is gone, which has nothing to say then.
        let _ = holds.wait_for(Option::is_some).await;
        Self { news, holds }
    }

    /// Whether exits are held.
    #[must_use]
    pub fn holds(&self) -> bool {
        *self.holds.borrow() == Some(true)
    }

    /// Waits until exits are held that were not, or are not any more. Returns whether that may happen again.
    pub async fn changed(&mut self) -> bool {
        self.holds.changed().await.is_ok()
    }

    /// The exit of this container may be held from now on.
    pub fn hold(&self, id: ContainerId, marker: PathBuf) {
        // The task ends with the last sender.
        let _ = self.news.send(News::Hold(id, marker));
    }

    /// The exit of this container, which is being removed, is told to nobody: until it is shown, but not for longer than any.
    pub fn hide(&self, id: ContainerId) {
        let _ = self.news.send(News::Hide(id));
    }

    /// It has been removed.
    pub fn show(&self, id: ContainerId) {
        let _ = self.news.send(News::Show(id));
    }

    /// This container is gone.
    pub fn forget(&self, id: ContainerId) {
        let _ = self.news.send(News::Forget(id));
    }
}

async fn keep(
    args: HolderArgs,
    mut told: mpsc::UnboundedReceiver<News>,
    up: watch::Sender<Option<bool>>,
    metrics: Arc<Metrics>,
) {
    let is_up = |held: bool| {
        metrics.exits_are_held(held);
        up.send_replace(Some(held));
    };
    let mut known = Known::new();
    let mut said = String::new();
    loop {
        // One that has worked for a while is followed by the next at once.
        let retry = Instant::now() + RETRY_INTERVAL;
        let (error, ended) = match Holder::start(&args).await {
            Ok(mut holder) => {
                tracing::info!(dir = %args.exits.display(), "exits are held");
                said.clear();
                is_up(true);
                match holder.follow(&mut known, &mut told).await {
                    Ok(()) => return,
                    Err(error) => (error, Some(holder)),
                }
            }
            Err(error) => (error, None),
        };
        is_up(false);
        if let Some(mut holder) = ended {
            // What it holds is let go with it, unless a disk keeps it from ending.
            let _ = timeout(PONG_LIMIT, holder.process.kill()).await;
        }
        let why = error.to_string();
        if said != why {
            tracing::warn!(%error, "exits are not held, trying until they can be: pods with restartPolicy Never may fail before they are restarted");
            said = why;
        }
        loop {
            select! {
                () = sleep_until(retry) => break,
                news = told.recv() => match news {
                    Some(news) => note(&mut known, news),
                    None => return,
                }
            }
        }
    }
}

fn note(known: &mut Known, news: News) {
    match news {
        News::Hold(id, marker) => drop(known.insert(id, marker)),
        // Another holder would come too late.
        News::Hide(_) | News::Show(_) => {}
        News::Forget(id) => drop(known.remove(&id)),
    }
}

struct Holder {
    process: Child,
    words: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
}

impl Holder {
    /// It outlives this process for as long as a hook would.
    async fn start(args: &HolderArgs) -> Result<Self, KeeperError> {
        let mut process = Command::new("/proc/self/exe")
            .args(args.to_args())
            .env_clear()
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // What a terminal sends is for the plugin.
            .process_group(0)
            .spawn()
            .map_err(KeeperError::Start)?;
        let pipes = process.stdin.take().zip(process.stdout.take());
        let (words, answers) = pipes.ok_or(KeeperError::Ended)?;
        let mut holder = Self {
            process,
            words,
            answers: BufReader::new(answers).lines(),
        };
        let said = timeout(START_LIMIT, holder.answers.next_line()).await;
        match said {
            Ok(Ok(Some(said))) if said == READY => Ok(holder),
            Ok(Ok(Some(said))) => Err(KeeperError::Said(said)),
            Ok(_) => Err(KeeperError::Ended),
            Err(_) => {
                let _ = holder.process.kill().await;
                Err(KeeperError::Hangs)
            }
        }
    }

    /// Tells it what is to be told, until nobody is left who would tell.
    async fn follow(
        &mut self,
        known: &mut Known,
        told: &mut mpsc::UnboundedReceiver<News>,
    ) -> Result<(), KeeperError> {
        for (id, marker) in &*known {
            let news = News::Hold(id.clone(), marker.clone());
            self.say(&news.word()).await?;
        }
        let mut ping = interval(PING_INTERVAL);
        ping.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut asked: Option<Instant> = None;
        loop {
            select! {
                // After this process was stopped for a while, the answer is there.
                biased;
                answer = self.answers.next_line() => match answer {
                    Ok(Some(answer)) if answer == PONG => asked = None,
                    _ => return Err(KeeperError::Ended),
                },
                _ = ping.tick() => match asked {
                    Some(at) if at.elapsed() > PONG_LIMIT => return Err(KeeperError::Hangs),
                    Some(_) => {}
                    None => {
                        self.say("ping\n").await?;
                        asked = Some(Instant::now());
                    }
                },
                news = told.recv() => {
                    let Some(news) = news else { return Ok(()) };
                    let word = news.word();
                    // Should this one have ended, the next is told.
                    note(known, news);
                    self.say(&word).await?;
                }
            }
        }
    }

    async fn say(&mut self, line: &str) -> Result<(), KeeperError> {
        match timeout(PONG_LIMIT, self.words.write_all(line.as_bytes())).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) => Err(KeeperError::Ended),
            Err(_) => Err(KeeperError::Hangs),
        }
    }
}
