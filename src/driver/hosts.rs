//! The pod's `/etc/hosts`: a file of the kubelet's in every container, which it writes anew before it makes one
//! (`makeHostsMount`, `pkg/kubelet/kubelet_pods.go`).

use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::OFlags;
use tokio::task::spawn_blocking;

use crate::cri::{ContainerConfig, ContainerStatus};
use crate::node::{Maker, now_ns, unix_ns};
use crate::replay::ReplayBlocker;

/// Where it is in a container.
const INSIDE: &str = "/etc/hosts";
/// How it is called on the node (`getEtcHostsPath`).
const ON_NODE: &str = "etc-hosts";
/// Of a larger one, what the kubelet has written is not kept.
const LONGEST: u64 = 64 * 1024;

/// What is known of one pod's.
#[derive(Debug, Default)]
pub(super) struct Known(Mutex<Seen>);

#[derive(Debug, Default, Clone)]
struct Seen {
    /// When the kubelet asked for a container last, admitted or not: nanoseconds since the Unix epoch.
    asked_at: Option<i64>,
    /// How it was when nobody else had written to it.
    text: Option<Arc<[u8]>>,
}

impl Known {
    /// The kubelet asks for a container: it has just written the file.
    pub(super) fn is_written(&self) {
        self.seen().asked_at = Some(now_ns());
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// As the kubelet has written it.
#[derive(Debug, Clone)]
pub(super) struct Hosts {
    path: PathBuf,
    text: Arc<[u8]>,
}

impl Hosts {
    /// That of a pod with these containers, before they are made anew; `None`: it has none, or it cannot be read. Fails if
    /// somebody has written to it since the kubelet did, and nobody knows what that had written.
    pub(super) async fn of(
        containers: &[(ContainerStatus, ContainerConfig)],
        known: &Known,
    ) -> Result<Option<Self>, ReplayBlocker> {
        let mut mounts = containers.iter().flat_map(|(_, config)| &config.mounts);
        let path = mounts.find_map(|mount| {
            let path = Path::new(&mount.host_path);
            (mount.container_path == INSIDE && path.ends_with(ON_NODE)).then(|| path.to_owned())
        });
        let Some(path) = path else {
            return Ok(None);
        };
        let statuses = containers.iter().map(|(status, _)| status);
        let seen = known.seen().clone();
        let written_by = written_by(statuses, seen.asked_at);
        let read = spawn_blocking(move || Self::read(path, written_by, seen.text.as_deref())).await;
        match read.map_err(io::Error::other).flatten() {
            Ok(hosts) => {
                let hosts = hosts?;
                known.seen().text = Some(Arc::clone(&hosts.text));
                Ok(Some(hosts))
            }
            Err(error) => {
                tracing::debug!(%error, "a pod's /etc/hosts cannot be read");
                Ok(None)
            }
        }
    }

    fn read(
        path: PathBuf,
        written_by: i64,
        known: Option<&[u8]>,
    ) -> io::Result<Result<Self, ReplayBlocker>> {
        let mut text = Vec::new();
        let file = open(&path, OFlags::RDONLY)?;
        let meta = file.metadata()?;
        file.take(LONGEST).read_to_end(&mut text)?;
        let is_whole = meta.len() < LONGEST;
        let is_known = known == Some(&*text) || unix_ns(meta.modified()?) <= written_by;
        let untouched = is_whole && is_known;
        let text = text.into();
        Ok(untouched
            .then_some(Self { path, text })
            .ok_or(ReplayBlocker::HostsTouched))
    }

    /// Takes away what containers have written meanwhile.
    pub(super) async fn restore(self) {
        let restored = spawn_blocking(move || self.write()).await;
        if let Err(error) = restored.map_err(io::Error::other).flatten() {
            tracing::debug!(%error, "a pod's /etc/hosts cannot be written");
        }
    }

    /// Into the same file, which is mounted.
    fn write(&self) -> io::Result<()> {
        let mut text = Vec::new();
        let limit = u64::try_from(self.text.len()).unwrap_or(LONGEST) + 1;
        open(&self.path, OFlags::RDONLY)?
            .take(limit)
            .read_to_end(&mut text)?;
        if *text != *self.text {
            let mut file = open(&self.path, OFlags::WRONLY | OFlags::TRUNC)?;
            io::Write::write_all(&mut file, &self.text)?;
        }
        Ok(())
    }
}

/// When the kubelet wrote it for the last time, or what is made next would have found it written to: nanoseconds since the
/// Unix epoch.
fn written_by<'a>(
    statuses: impl Iterator<Item = &'a ContainerStatus>,
    asked_at: Option<i64>,
) -> i64 {
    let (mut kubelet, mut replay) = (asked_at, None);
    for status in statuses {
        let made = status.created_at;
        if Maker::of(&status.annotations) == Maker::Kubelet {
            kubelet = kubelet.max(Some(made));
        } else {
            replay = Some(replay.map_or(made, |first: i64| first.min(made)));
        }
    }
    kubelet.or(replay).unwrap_or_default()
}

fn open(path: &Path, flags: OFlags) -> io::Result<fs::File> {
    let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, rustix::fs::Mode::empty())?;
    Ok(file.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use tempfile::TempDir;

    /// As the kubelet has just written it, where, and when.
    fn clean() -> (TempDir, PathBuf, i64) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(ON_NODE);
        fs::write(&path, "clean\n").unwrap();
        let written = modified(&path);
        (dir, path, written)
    }

    fn modified(path: &Path) -> i64 {
        unix_ns(fs::metadata(path).unwrap().modified().unwrap())
    }

    #[test]
    fn what_containers_write_is_taken_away_again() {
        let (_dir, path, written) = clean();
        let hosts = Hosts::read(path.clone(), written, None).unwrap().unwrap();
        hosts.write().unwrap();
        assert_eq!(modified(&path), written);
        for touched in ["clean\nmore\n", "clean", "", "other\n"] {
            fs::write(&path, touched).unwrap();
            hosts.write().unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), "clean\n");
        }
    }

    #[test]
    fn one_that_was_written_to_or_is_large_is_the_kubelets() {
        let (_dir, path, written) = clean();
        let touched = |by, known: Option<&str>| {
            let hosts = Hosts::read(path.clone(), by, known.map(str::as_bytes));
            hosts.unwrap().err()
        };
        let is_touched = Some(ReplayBlocker::HostsTouched);
        assert_eq!(touched(written, None), None);
        assert_eq!(touched(written - 1, None), is_touched);
        // A kubelet that was refused has written it once more.
        assert_eq!(touched(written - 1, Some("clean\n")), None);
        assert_eq!(touched(written - 1, Some("other\n")), is_touched);
        fs::write(&path, vec![b'x'; 70_000]).unwrap();
        assert_eq!(touched(i64::MAX, None), is_touched);
    }

    #[test]
    fn a_link_is_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(ON_NODE);
        std::os::unix::fs::symlink("/etc/passwd", &path).unwrap();
        assert!(Hosts::read(path, i64::MAX, None).is_err());
    }
}
