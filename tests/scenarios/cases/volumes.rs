//! Volumes outlive a restart, and what runs then has them as before.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::ResourceExt;
use kube::api::{DeleteParams, ObjectMeta, PostParams};
use serde_json::json;

use super::under;
use crate::scenario::Scenario;
use crate::shape::RestartPolicy::{Always, Never};
use crate::shape::Shape;
use crate::stage::Stage;

/// Of the emptyDir it says what the run before has left there.
const USE_ALL: &str = r#"
say "note config:$(cat /config/word)"
echo run >>/host/runs
say "note host:$(grep -c run /host/runs)"
echo run >>/scratch/runs
say "note scratch:$(grep -c run /scratch/runs)"
"#;

pub(crate) fn scenarios() -> Vec<Scenario> {
    under(&[Never, Always], "keeps_its_volumes", keeps_its_volumes)
}

async fn keeps_its_volumes(stage: Stage, shape: Shape) -> Result<()> {
    let config = ConfigMap {
        metadata: ObjectMeta {
            generate_name: Some("reprise-scenario-".to_owned()),
            ..ObjectMeta::default()
        },
        data: Some(BTreeMap::from([("word".to_owned(), "hello".to_owned())])),
        ..ConfigMap::default()
    };
    let configs = stage.node.config_maps();
    let config = configs.create(&PostParams::default(), &config).await?;
    let name = config.name_any();
    let kept = are_kept(&stage, shape, &name).await;
    configs.delete(&name, &DeleteParams::default()).await?;
    kept
}

async fn are_kept(stage: &Stage, shape: Shape, config: &str) -> Result<()> {
    let host = tempfile::tempdir()?;
    let shape = shape
        .volume("config", json!({"configMap": {"name": config}}))
        .volume(
            "host",
            json!({"hostPath": {"path": host.path(), "type": "Directory"}}),
        )
        .volume("scratch", json!({"emptyDir": {}}))
        .init("fetch")
        .regular("trainer")
        .at_first(USE_ALL)
        .regular("logger")
        .restarts_all("trainer", 42);
    let pod = stage.running(shape).await?;
    let before = pod.restarted("trainer", 42).await?;
    let notes = pod.notes_since(&before)?;
    ensure!(
        notes == ["config:hello", "host:2", "scratch:2"],
        "the second run saw {notes:?}"
    );
    let runs = std::fs::read_to_string(host.path().join("runs"))
        .context("nothing was written to the host's directory")?;
    ensure!(runs == "run\nrun\n", "the host's directory has {runs:?}");
    Ok(())
}
