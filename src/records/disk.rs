//! A thread that writes, in the order in which it is asked to: a disk that stalls holds up nobody but itself.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

use tokio::sync::oneshot;
use tokio::time::timeout;

use crate::times::DISK_LIMIT;

/// How much may wait for a disk that has stalled: some hundred restarts.
const BACKLOG: usize = 1024;

/// What is done to the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Something is written: if that works, all is well.
    Write,
    /// Something is removed, which a disk that is full can do.
    Remove,
}

/// The thread's queue. The thread ends with the last clone.
#[derive(Debug, Clone)]
pub(super) struct Disk {
    queue: SyncSender<Job>,
    trouble: Trouble,
}

struct Job {
    kind: Kind,
    work: Box<dyn FnOnce() -> io::Result<()> + Send>,
    done: oneshot::Sender<()>,
}

/// Whether the disk is in trouble, which is said when it begins and when it is over.
#[derive(Debug, Clone, Default)]
pub(super) struct Trouble(Arc<AtomicBool>);

impl Disk {
    pub(super) fn start() -> io::Result<Self> {
        let (queue, jobs) = sync_channel(BACKLOG);
        let trouble = Trouble::default();
        let seen = trouble.clone();
        thread::Builder::new()
            .name("disk".into())
            .spawn(move || work(&jobs, &seen))?;
        Ok(Self { queue, trouble })
    }

    /// Has `work` done and waits for it, but neither long nor for a disk in trouble: restarts go on without their records.
    pub(super) async fn perform(
        &self,
        kind: Kind,
        work: impl FnOnce() -> io::Result<()> + Send + 'static,
    ) {
        let (done, is_done) = oneshot::channel();
        let work = Box::new(work);
        if self.queue.try_send(Job { kind, work, done }).is_err() {
            self.trouble.begins("too much waits for the disk");
        } else if !self.trouble.is_there() && timeout(DISK_LIMIT, is_done).await.is_err() {
            self.trouble.begins("the disk does not answer");
        }
    }

    pub(super) fn trouble(&self) -> &Trouble {
        &self.trouble
    }
}

impl Trouble {
    pub(super) fn is_there(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    pub(super) fn begins(&self, why: &str) {
        if !self.0.swap(true, Ordering::Relaxed) {
            tracing::error!(
                why,
                "restarts cannot be written down: they go on, but not beyond this process, and back-offs end with it; \
                 look at the disks of --state-dir and --run-dir"
            );
        }
    }

    fn ends(&self) {
        if self.0.swap(false, Ordering::Relaxed) {
            tracing::info!("restarts can be written down again");
        }
    }
}

fn work(jobs: &Receiver<Job>, trouble: &Trouble) {
    for Job { kind, work, done } in jobs {
        match (work(), kind) {
            (Err(error), _) => trouble.begins(&error.to_string()),
            (Ok(()), Kind::Write) => trouble.ends(),
            (Ok(()), Kind::Remove) => {}
        }
        // Whoever asked may have stopped waiting.
        let _ = done.send(());
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Instant;

    use super::*;

    #[tokio::test]
    async fn a_disk_that_stalls_is_waited_for_once_and_what_is_written_stays_in_order() {
        let disk = Disk::start().unwrap();
        let (mend, mended) = mpsc::channel::<()>();
        let (write, written) = mpsc::channel();
        let stalled = write.clone();
        let began = Instant::now();
        disk.perform(Kind::Write, move || {
            mended.recv().unwrap();
            stalled.send(1).unwrap();
            Ok(())
        })
        .await;
        assert!(began.elapsed() < 3 * DISK_LIMIT);
        assert!(disk.trouble().is_there());
        let began = Instant::now();
        disk.perform(Kind::Write, move || {
            write.send(2).unwrap();
            Ok(())
        })
        .await;
        assert!(began.elapsed() < DISK_LIMIT / 2);
        mend.send(()).unwrap();
        assert_eq!(written.iter().collect::<Vec<_>>(), [1, 2]);
        disk.perform(Kind::Remove, || Ok(())).await;
        while disk.trouble().is_there() {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn a_disk_is_well_when_it_can_be_written_to_not_when_something_can_be_removed() {
        let disk = Disk::start().unwrap();
        let full = || Err(io::ErrorKind::StorageFull.into());
        disk.perform(Kind::Write, full).await;
        assert!(disk.trouble().is_there());
        let (done, is_done) = mpsc::channel();
        disk.perform(Kind::Remove, move || {
            done.send(()).map_err(io::Error::other)
        })
        .await;
        is_done.recv().unwrap();
        assert!(disk.trouble().is_there());
        disk.perform(Kind::Write, || Ok(())).await;
        while disk.trouble().is_there() {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn what_a_stalled_disk_has_yet_to_do_is_bounded() {
        let disk = Disk::start().unwrap();
        let (mend, mended) = mpsc::channel::<()>();
        disk.perform(Kind::Write, move || mended.recv().map_err(io::Error::other))
            .await;
        for _ in 0..BACKLOG + 10 {
            disk.perform(Kind::Write, || Ok(())).await;
        }
        mend.send(()).unwrap();
    }
}
