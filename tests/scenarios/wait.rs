//! Waiting on conditions that nobody announces. Those that the API announces are awaited on the
//! pod's watch instead (`recorder`).

use std::future::{Future, ready};
use std::process::{Child, ExitStatus};
use std::sync::LazyLock;
use std::time::Duration;

use anyhow::{Result, bail};
use tokio::time::{Instant, sleep};

/// The kubelet retries a failed start after 10-15 s, and backs off 10 s, then 20 s: what takes three times as
/// long does not come.
pub(crate) const PATIENCE: Duration = Duration::from_mins(1);

/// How many times longer what is awaited may take, in `REPRISE_PATIENCE`: a machine may be slow.
pub(crate) fn stretched(patience: Duration) -> Duration {
    static TIMES: LazyLock<u32> = LazyLock::new(|| {
        let times = std::env::var("REPRISE_PATIENCE").ok();
        times.and_then(|times| times.parse().ok()).unwrap_or(1)
    });
    patience * *TIMES
}

/// Between two looks at the runtime or the file system.
const POLL: Duration = Duration::from_millis(50);

/// Asks until the answer is `Ok(Ok(value))`; `Ok(Err(seen))` says what was there instead and goes
/// into the error when patience ends. An outer error ends it at once.
pub(crate) async fn until<T, F, Fut>(what: &str, patience: Duration, look: F) -> Result<T>
where
    F: FnMut() -> Fut,
    Fut: Future<Output = Result<Result<T, String>>>,
{
    until_every(POLL, what, patience, look).await
}

/// The same with another pause between two looks.
pub(crate) async fn until_every<T, F, Fut>(
    poll: Duration,
    what: &str,
    patience: Duration,
    mut look: F,
) -> Result<T>
where
    F: FnMut() -> Fut,
    Fut: Future<Output = Result<Result<T, String>>>,
{
    let patience = stretched(patience);
    let deadline = Instant::now() + patience;
    loop {
        match look().await? {
            Ok(value) => return Ok(value),
            Err(seen) if Instant::now() >= deadline => {
                bail!(
                    "not within {} s: {what}; instead: {seen}",
                    patience.as_secs()
                )
            }
            Err(_) => sleep(poll).await,
        }
    }
}

/// Waits until a process ends, and kills it when patience does.
pub(crate) async fn until_ended(child: &mut Child, patience: Duration) -> Result<ExitStatus> {
    let ended = until("the process ends by itself", patience, || {
        let status = child.try_wait();
        ready(match status {
            Ok(status) => Ok(status.ok_or_else(|| "it runs".to_owned())),
            Err(error) => Err(error.into()),
        })
    })
    .await;
    if ended.is_err() {
        child.kill()?;
        child.wait()?;
    }
    ended
}
