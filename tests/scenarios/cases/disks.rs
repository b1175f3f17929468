//! State directories that cannot be written to.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};

use crate::pod::LivePod;
use crate::scenario::{Scenario, scenarios};
use crate::shape::Shape;
use crate::stage::Stage;
use crate::wait::{self, PATIENCE};

const TROUBLE: &str = "restarts cannot be written down";
const WELL: &str = "restarts can be written down again";

pub(crate) fn scenarios() -> Vec<Scenario> {
    scenarios![Alone:
        full_disk_is_said_to_be_and_pods_restart,
        read_only_disk_is_said_to_be_and_pods_restart,
    ]
}

async fn full_disk_is_said_to_be_and_pods_restart(stage: Stage) -> Result<()> {
    let disk = Disk::begin(&stage, "rw").await?;
    let pod = running(&stage).await?;
    let filler = disk.dir.join("filler");
    // It takes what it can.
    let _ = fs::write(&filler, vec![0; 1 << 20]);
    restarts_in_trouble(&stage, &pod).await?;
    fs::remove_file(&filler)?;
    is_well_again(&stage).await?;
    disk.end(&stage).await
}

async fn read_only_disk_is_said_to_be_and_pods_restart(stage: Stage) -> Result<()> {
    let disk = Disk::begin(&stage, "ro").await?;
    let pod = running(&stage).await?;
    restarts_in_trouble(&stage, &pod).await?;
    disk.mount("remount,rw")?;
    is_well_again(&stage).await?;
    disk.end(&stage).await
}

async fn running(stage: &Stage) -> Result<Arc<LivePod>> {
    let shape = Shape::never()
        .regular("trainer")
        .regular("logger")
        .restarts_all("trainer", 42);
    stage.running(shape).await
}

/// As ever, and one line says so.
async fn restarts_in_trouble(stage: &Stage, pod: &LivePod) -> Result<()> {
    pod.restarts_all("trainer", 42).await?;
    let lines = stage.plugin.new_log_lines(TROUBLE)?;
    ensure!(lines.len() == 1, "the log says of the disk: {lines:#?}");
    Ok(())
}

async fn is_well_again(stage: &Stage) -> Result<()> {
    let pod = running(stage).await?;
    pod.restarts_all("trainer", 42).await?;
    wait::until("the log says that all is well", PATIENCE, async || {
        let said = !stage.plugin.new_log_lines(WELL)?.is_empty();
        Ok(said.then_some(()).ok_or_else(|| "it does not".to_owned()))
    })
    .await
}

/// A small disk, where the plugin's state is until it is unmounted.
struct Disk {
    dir: PathBuf,
}

impl Disk {
    async fn begin(stage: &Stage, mode: &str) -> Result<Self> {
        stage.plugin.stop().await?;
        let dir = stage.plugin.state_dir();
        fs::create_dir_all(&dir)?;
        let disk = Self { dir };
        disk.mount(&format!("{mode},size=64k,mode=700"))?;
        stage.plugin.start().await?;
        stage.plugin.until_ready(1).await?;
        Ok(disk)
    }

    async fn end(self, stage: &Stage) -> Result<()> {
        stage.plugin.stop().await?;
        drop(self);
        stage.plugin.start().await?;
        stage.plugin.until_ready(1).await
    }

    fn mount(&self, options: &str) -> Result<()> {
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", options, "tmpfs"]);
        succeeds(mount.arg(&self.dir), &self.dir)
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let mut unmount = Command::new("umount");
        if let Err(error) = succeeds(unmount.arg("--lazy").arg(&self.dir), &self.dir) {
            println!("{error:#}");
        }
    }
}

fn succeeds(command: &mut Command, dir: &Path) -> Result<()> {
    let status = command.status().with_context(|| format!("{command:?}"))?;
    ensure!(status.success(), "{}: {status}", dir.display());
    Ok(())
}
