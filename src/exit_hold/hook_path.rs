//! Whether the runtime can run the hook: a container whose hook cannot be run ends as if it had none, and nobody says so.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{
    FileType, Mode, OFlags, ResolveFlags, StatVfsMountFlags, fstat, fstatvfs, open, openat2,
};
use rustix::io::Errno;
use tokio::net::UnixStream;

/// Why the runtime cannot run the hook.
#[derive(Debug, thiserror::Error)]
#[error(
    "the container runtime cannot run {path} as a hook: {defect}; put the executable where the runtime finds it, and say where that is with --hook-path"
)]
pub struct HookPathError {
    path: PathBuf,
    defect: Defect,
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
enum Defect {
    #[error("it is not an absolute path")]
    Relative,
    #[error("{0}")]
    Unreachable(Errno),
    #[error("it is not a file")]
    NoFile,
    #[error("it is not executable")]
    NotExecutable,
    #[error("its file system is mounted noexec")]
    NoExec,
}

/// Looks at `path` with the eyes of the runtime that listens on `socket`. A plugin in a container, which sees other files,
/// can do so only among the host's processes; otherwise it says that it cannot tell.
pub async fn check(path: &Path, socket: &Path) -> Result<(), HookPathError> {
    let defect = match root_of(socket).await {
        Some(root) => look(root.as_fd(), path),
        None if path.is_relative() => Err(Defect::Relative),
        None => {
            tracing::warn!(path = %path.display(), "cannot tell whether the runtime finds the hook there: its file system is not to be seen from here");
            Ok(())
        }
    };
    defect.map_err(|defect| HookPathError {
        path: path.to_owned(),
        defect,
    })
}

/// Looks at a copy in a directory that the runtime sees under the same path: what is true of it here is true there.
pub fn check_copy(path: &Path) -> Result<(), HookPathError> {
    let root = open("/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
    let root = root.map_err(Defect::Unreachable);
    root.and_then(|root| look(root, path))
        .map_err(|defect| HookPathError {
            path: path.to_owned(),
            defect,
        })
}

/// The root directory of the process that listens on `socket`.
async fn root_of(socket: &Path) -> Option<OwnedFd> {
    let peer = UnixStream::connect(socket).await.ok()?.peer_cred().ok()?;
    // 0: none of our process namespace.
    let pid = peer.pid().filter(|pid| *pid > 0)?;
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    open(format!("/proc/{pid}/root"), flags, Mode::empty()).ok()
}

fn look(root: impl AsFd, path: &Path) -> Result<(), Defect> {
    if path.is_relative() {
        return Err(Defect::Relative);
    }
    // Links lead where they lead the runtime.
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let file = openat2(root, path, flags, Mode::empty(), ResolveFlags::IN_ROOT);
    let file = file.map_err(Defect::Unreachable)?;
    let mode = fstat(&file).map_err(Defect::Unreachable)?.st_mode;
    let mount = fstatvfs(&file).map_err(Defect::Unreachable)?.f_flag;
    judge(mode, mount)
}

fn judge(mode: u32, mount: StatVfsMountFlags) -> Result<(), Defect> {
    if FileType::from_raw_mode(mode) != FileType::RegularFile {
        Err(Defect::NoFile)
    } else if !Mode::from_raw_mode(mode).intersects(Mode::XUSR | Mode::XGRP | Mode::XOTH) {
        Err(Defect::NotExecutable)
    } else if mount.contains(StatVfsMountFlags::NOEXEC) {
        Err(Defect::NoExec)
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};
    use tokio::net::UnixListener;

    #[tokio::test]
    async fn it_is_looked_for_where_the_runtime_is() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("runtime.sock");
        let _runtime = UnixListener::bind(&socket).unwrap();
        let own = std::env::current_exe().unwrap();
        check(&own, &socket).await.unwrap();
        let missing = dir.path().join("reprise");
        let error = check(&missing, &socket).await.unwrap_err().to_string();
        assert!(error.contains(missing.to_str().unwrap()), "{error}");
        assert!(error.contains("--hook-path"), "{error}");
        // Nobody tells.
        check(&missing, &dir.path().join("none.sock"))
            .await
            .unwrap();
    }

    #[test]
    fn links_are_followed_as_the_runtime_follows_them() {
        let root = tempfile::tempdir().unwrap();
        let file = root.path().join("bin/reprise");
        fs::create_dir(root.path().join("bin")).unwrap();
        fs::write(&file, "").unwrap();
        symlink("/bin", root.path().join("opt")).unwrap();
        let eyes = || fs::File::open(root.path()).unwrap();
        let find = |path: &str| look(eyes(), Path::new(path));
        assert_eq!(find("/opt/reprise"), Err(Defect::NotExecutable));
        fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
        assert_eq!(find("/opt/reprise"), Ok(()));
        assert_eq!(find("/opt"), Err(Defect::NoFile));
        assert_eq!(find("/opt/other"), Err(Defect::Unreachable(Errno::NOENT)));
        assert_eq!(find("opt/reprise"), Err(Defect::Relative));
    }

    #[test]
    fn a_file_system_without_executables_is_said_to_be() {
        let mode = 0o100_755;
        let noexec = StatVfsMountFlags::NOSUID | StatVfsMountFlags::NOEXEC;
        assert_eq!(judge(mode, noexec), Err(Defect::NoExec));
        assert_eq!(judge(mode, StatVfsMountFlags::NOSUID), Ok(()));
    }
}
