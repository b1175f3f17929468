//! Between the plugin and the runtime's NRI: passes bytes on until it is told to cut the connection, or to stay shut.

use std::path::PathBuf;

use anyhow::Result;
use tempfile::TempDir;
use tokio::io::copy_bidirectional;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};

pub(crate) struct Relay {
    pub(crate) socket: PathBuf,
    shut: watch::Sender<bool>,
    task: JoinHandle<()>,
    _dir: TempDir,
}

impl Relay {
    /// Listens until dropped, for connections that go on to `target`.
    pub(crate) fn start(target: PathBuf) -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let socket = dir.path().join("nri.sock");
        let listener = UnixListener::bind(&socket)?;
        let (shut, is_shut) = watch::channel(false);
        Ok(Self {
            socket,
            shut,
            task: tokio::spawn(serve(listener, target, is_shut)),
            _dir: dir,
        })
    }

    /// Ends the connections that there are; new ones are welcome.
    pub(crate) fn cut(&self) {
        self.shut(true);
        self.shut(false);
    }

    /// Ends the connections that there are, and new ones at once, until it is opened again.
    pub(crate) fn shut(&self, shut: bool) {
        self.shut.send_replace(shut);
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn serve(listener: UnixListener, target: PathBuf, is_shut: watch::Receiver<bool>) {
    // Ends with this task.
    let mut connections = JoinSet::new();
    while let Ok((plugin, _)) = listener.accept().await {
        let (target, mut is_shut) = (target.clone(), is_shut.clone());
        if *is_shut.borrow_and_update() {
            continue;
        }
        connections.spawn(async move {
            tokio::select! {
                // However it ends, both sides see it end.
                _ = relay(plugin, target) => {}
                _ = is_shut.changed() => {}
            }
        });
    }
}

async fn relay(mut plugin: UnixStream, target: PathBuf) -> std::io::Result<()> {
    let mut runtime = UnixStream::connect(target).await?;
    copy_bidirectional(&mut plugin, &mut runtime).await?;
    Ok(())
}
