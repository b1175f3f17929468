//! A device plugin's devices belong to the pod, and the containers that come after a restart have them too.

use anyhow::{Result, ensure};
use serde_json::json;

use super::under;
use crate::device_plugin::DevicePlugin;
use crate::scenario::Scenario;
use crate::shape::RestartPolicy::{Always, Never};
use crate::shape::Shape;
use crate::stage::Stage;
use crate::wait::{self, PATIENCE};

/// Reads of each device, and the variable that comes with one of them.
const USE_BOTH: &str = r#"
say "note $(head -c 4 /dev/reprise | wc -c):$(head -c 4 /dev/reprise-cdi | wc -c):$CDI_WORD"
"#;

/// Its devices may be had by containers that are replayed, see [`crate::plugin::Plugin::command`].
const EXEMPT: &str = "example.com";

pub(crate) fn scenarios() -> Vec<Scenario> {
    let policies = [Never, Always];
    [
        under(&policies, "keeps_its_devices", |stage, shape| {
            keeps_devices(stage, shape, EXEMPT, "Kubelet")
        }),
        under(
            &policies,
            "keeps_its_devices_when_replayed",
            |stage, shape| keeps_devices(stage, shape, EXEMPT, "Auto"),
        ),
        under(
            &policies,
            "whose_device_plugin_may_want_to_be_asked_is_the_kubelets",
            |stage, shape| keeps_devices(stage, shape, "reprise.dev", "Replay"),
        ),
    ]
    .concat()
}

async fn keeps_devices(
    stage: Stage,
    shape: Shape,
    vendor: &'static str,
    start: &'static str,
) -> Result<()> {
    let node = &stage.node;
    // A socket's path has 107 characters at most.
    let name = stage.name();
    let unique: Vec<&str> = name.rsplit('-').take(2).collect();
    let name = format!("device-{}", unique.join("-"));
    let plugin = DevicePlugin::start(&node.kubelet_plugins(), &node.cdi_dir(), vendor, &name)?;
    wait::until("the node has the device", PATIENCE, async || {
        let devices = node.status().await?.allocatable.unwrap_or_default();
        let device = devices.get(&plugin.resource).map(|it| it.0.clone());
        Ok(if device.as_deref() == Some("1") {
            Ok(())
        } else {
            Err(format!("{devices:?}"))
        })
    })
    .await?;
    let mut limits = json!({});
    limits[&plugin.resource] = json!("1");
    let shape = shape
        .init("fetch")
        .regular("trainer")
        .field("resources", json!({"limits": limits}))
        .at_first(USE_BOTH)
        .regular("logger")
        .restarts_all("trainer", 42)
        .started_by(start);
    let pod = stage.running(shape).await?;
    let before = pod.restarts_all_since("trainer", 42).await?;
    let notes = pod.notes_since(&before)?;
    ensure!(notes == ["4:4:hello"], "{notes:?}");
    if vendor == EXEMPT {
        pod.was_started_again_by(start)
    } else {
        pod.restart_ended(&format!("no replay: trainer has {}", plugin.resource))
    }
}
