//! Between the plugin and the runtime's NRI: passes bytes on until it is told to cut the connection.

use std::path::PathBuf;

use anyhow::Result;
use tempfile::TempDir;
use tokio::io::copy_bidirectional;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};

pub(crate) struct Relay {
    pub(crate) socket: PathBuf,
    cut: watch::Sender<()>,
    task: JoinHandle<()>,
    _dir: TempDir,
}

impl Relay {
    /// Listens until dropped, for connections that go on to `target`.
    pub(crate) fn start(target: PathBuf) -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let socket = dir.path().join("nri.sock");
        let listener = UnixListener::bind(&socket)?;
        let (cut, cuts) = watch::channel(());
        Ok(Self {
            socket,
            cut,
            task: tokio::spawn(serve(listener, target, cuts)),
            _dir: dir,
        })
    }

    /// Ends the connections that there are; new ones are welcome.
    pub(crate) fn cut(&self) {
        self.cut.send_replace(());
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn serve(listener: UnixListener, target: PathBuf, cuts: watch::Receiver<()>) {
    // Ends with this task.
    let mut connections = JoinSet::new();
    while let Ok((plugin, _)) = listener.accept().await {
        let (target, mut cuts) = (target.clone(), cuts.clone());
        cuts.mark_unchanged();
        connections.spawn(async move {
            tokio::select! {
                // However it ends, both sides see it end.
                _ = relay(plugin, target) => {}
                _ = cuts.changed() => {}
            }
        });
    }
}

async fn relay(mut plugin: UnixStream, target: PathBuf) -> std::io::Result<()> {
    let mut runtime = UnixStream::connect(target).await?;
    copy_bidirectional(&mut plugin, &mut runtime).await?;
    Ok(())
}
