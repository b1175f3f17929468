//! A container's first process, for what the runtime must not do: CRI-O tells of the end of what it stops itself, whether or not
//! it is held (`StopContainer`, `server/container_stop.go` 1.36).

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use nix::sys::signal::Signal;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open, pidfd_send_signal};
use tokio::net::UnixStream;
use tokio::time::sleep;

use crate::ids::ContainerId;

/// Between two looks whether a process has ended: most end at once.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(50);

/// One that runs, or has ended since.
#[derive(Debug)]
pub struct Process(OwnedFd);

impl Process {
    /// The process of that number, if it is this container's; `None`: it has ended.
    pub fn of(container: &ContainerId, pid: Pid) -> io::Result<Option<Self>> {
        let fd = match pidfd_open(pid, PidfdFlags::empty()) {
            Err(Errno::SRCH) => return Ok(None),
            fd => fd?,
        };
        // The number may be another's by now: then this is, or the open one has ended.
        let cgroups = fs::read_to_string(format!("/proc/{}/cgroup", pid.as_raw_nonzero()));
        let is_its = cgroups.is_ok_and(|it| it.contains(container.as_str()));
        Ok(is_its.then_some(Self(fd)))
    }

    /// Sends it a signal. One that has ended gets none.
    pub fn signal(&self, signal: Signal) -> io::Result<()> {
        let signal = rustix::process::Signal::from_named_raw(signal as i32);
        let signal = signal.ok_or(Errno::INVAL)?;
        match pidfd_send_signal(&self.0, signal) {
            Err(Errno::SRCH) => Ok(()),
            sent => Ok(sent?),
        }
    }

    /// Waits until it has ended.
    pub async fn end(&self) -> io::Result<()> {
        let mut pause = FIRST_PAUSE;
        while poll(
            &mut [PollFd::new(&self.0, PollFlags::IN)],
            Some(&Timespec::default()),
        )? == 0
        {
            sleep(pause).await;
            pause = LONGEST_PAUSE.min(pause * 2);
        }
        Ok(())
    }
}

/// Whether processes have the same numbers here as for whoever listens on that socket: in a pod, with `hostPID`.
/// The error says that nobody listens there just now.
pub async fn are_seen(socket: &Path) -> io::Result<bool> {
    let peer = UnixStream::connect(socket).await?.peer_cred()?;
    let numbers = || {
        let pid = peer.pid().filter(|pid| *pid > 0)?;
        let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let mut numbers = status.lines().filter_map(|it| it.strip_prefix("NSpid:"));
        Some(numbers.next()?.split_whitespace().count())
    };
    Ok(numbers() == Some(1))
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use tokio::net::UnixListener;
    use tokio::time::timeout;

    use super::*;

    #[tokio::test]
    async fn the_process_of_another_gets_no_signal() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let pid = Pid::from_child(&child);
        let none = Process::of(&"no-cgroup-is-called-so".into(), pid).unwrap();
        assert!(none.is_none());
        assert!(child.try_wait().unwrap().is_none());
        // Any part of its cgroup's name will do.
        let process = Process::of(&"/".into(), pid).unwrap().unwrap();
        process.signal(Signal::SIGKILL).unwrap();
        timeout(Duration::from_secs(5), process.end())
            .await
            .unwrap()
            .unwrap();
        child.wait().unwrap();
        process.signal(Signal::SIGKILL).unwrap();
        assert!(Process::of(&"/".into(), pid).unwrap().is_none());
    }

    #[tokio::test]
    async fn whoever_is_beside_us_sees_the_same_processes() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("runtime.sock");
        are_seen(&socket).await.unwrap_err();
        let _listener = UnixListener::bind(&socket).unwrap();
        assert!(are_seen(&socket).await.unwrap());
    }
}
