//! The pod's `/etc/hosts`: a file of the kubelet's in every container, which it writes anew before it makes one
//! (`makeHostsMount`, `pkg/kubelet/kubelet_pods.go`).

use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::OFlags;
use tokio::task::spawn_blocking;

use crate::cri::{ContainerConfig, ContainerStatus};
use crate::node::Maker;
use crate::restart::replay::ReplayBlocker;

/// Where it is in a container.
const INSIDE: &str = "/etc/hosts";
/// How it is called on the node (`getEtcHostsPath`).
const ON_NODE: &str = "etc-hosts";
/// Of a larger one, what the kubelet has written is not kept.
const LONGEST: u64 = 64 * 1024;

/// As the kubelet has written it.
#[derive(Debug, Clone)]
pub(super) struct Hosts {
    path: PathBuf,
    text: Arc<[u8]>,
}

impl Hosts {
    /// That of a pod with these containers, before they are made anew; `None`: it has none, or it cannot be read. Fails if
    /// somebody has written to it since the kubelet did: nobody knows what that has written.
    pub(super) async fn of(
        containers: &[(ContainerStatus, ContainerConfig)],
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
        let written_by = written_by(statuses);
        let read = spawn_blocking(move || Self::read(path, written_by)).await;
        match read.map_err(io::Error::other).flatten() {
            Ok(hosts) => hosts.map(Some),
            Err(error) => {
                tracing::debug!(%error, "a pod's /etc/hosts cannot be read");
                Ok(None)
            }
        }
    }

    fn read(path: PathBuf, written_by: i64) -> io::Result<Result<Self, ReplayBlocker>> {
        let mut text = Vec::new();
        let file = open(&path, OFlags::RDONLY)?;
        let meta = file.metadata()?;
        file.take(LONGEST).read_to_end(&mut text)?;
        let is_whole = meta.len() < LONGEST;
        let untouched = is_whole && nanoseconds(&meta)? <= written_by;
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
fn written_by<'a>(statuses: impl Iterator<Item = &'a ContainerStatus>) -> i64 {
    let (mut kubelet, mut replay) = (None, None);
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

fn nanoseconds(meta: &fs::Metadata) -> io::Result<i64> {
    let since = meta.modified()?.duration_since(std::time::UNIX_EPOCH);
    let since = since.map_err(io::Error::other)?;
    i64::try_from(since.as_nanos()).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_containers_write_is_taken_away_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(ON_NODE);
        fs::write(&path, "clean\n").unwrap();
        let written = nanoseconds(&fs::metadata(&path).unwrap()).unwrap();
        let hosts = Hosts::read(path.clone(), written).unwrap().unwrap();
        hosts.write().unwrap();
        assert_eq!(nanoseconds(&fs::metadata(&path).unwrap()).unwrap(), written);
        for touched in ["clean\nmore\n", "clean", "", "other\n"] {
            fs::write(&path, touched).unwrap();
            hosts.write().unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), "clean\n");
        }
    }

    #[test]
    fn one_that_was_written_to_or_is_large_is_the_kubelets() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(ON_NODE);
        fs::write(&path, "clean\n").unwrap();
        let written = nanoseconds(&fs::metadata(&path).unwrap()).unwrap();
        let touched = |by| Hosts::read(path.clone(), by).unwrap().err();
        assert_eq!(touched(written), None);
        assert_eq!(touched(written - 1), Some(ReplayBlocker::HostsTouched));
        fs::write(&path, vec![b'x'; 70_000]).unwrap();
        assert_eq!(touched(i64::MAX), Some(ReplayBlocker::HostsTouched));
    }

    #[test]
    fn a_link_is_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(ON_NODE);
        std::os::unix::fs::symlink("/etc/passwd", &path).unwrap();
        assert!(Hosts::read(path, i64::MAX).is_err());
    }
}
