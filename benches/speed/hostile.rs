//! Pods that mean harm: what the plugin reads of them is to cost it as much as possible.

use std::sync::Arc;

use anyhow::Result;
use futures::future::try_join_all;
use serde::Serialize;
use serde_json::{Value, json};

use crate::costs::{Resident, peak_kib, resident};
use crate::node::Node;
use crate::plugin::Plugin;
use crate::pod::LivePod;
use crate::runtime::State;
use crate::say;
use crate::shape::Shape;
use crate::stage::Stage;
use crate::wait::{self, PATIENCE};

/// All made at once.
const PODS: u32 = 50;

/// Where rules for all containers are.
pub(crate) const RULES: &str = "restart-rules.reprise.dev/pod";

#[derive(Serialize)]
pub(crate) struct Memory {
    pub(crate) pods: u32,
    /// The most that it ever was, since a start without such pods.
    pub(crate) peak_kib: u64,
    /// The most that it was at a start with them.
    pub(crate) peak_kib_at_start: u64,
    pub(crate) in_the_end: Resident,
}

/// The memory of the plugin, which runs, with such pods on a real node. It is stopped in the end.
pub(crate) async fn memory(node: &Arc<Node>, plugin: &Arc<Plugin>) -> Result<Memory> {
    let stage = Stage::new(Arc::clone(node), Arc::clone(plugin), "hostile");
    say(&format!(
        "{PODS} pods with hostile annotations and environments"
    ));
    let measured = with_pods(&stage).await;
    say("deleting them");
    stage.delete_pods().await?;
    measured
}

async fn with_pods(stage: &Stage) -> Result<Memory> {
    let pods = try_join_all((0..PODS).map(|number| stage.pod(shape(number)))).await?;
    try_join_all(pods.iter().map(|pod| until_tried(pod))).await?;
    let plugin = &stage.plugin;
    let peak = peak_kib(plugin.pid().await?)?;
    plugin.must_be_well().await?;
    plugin.stop().await?;
    plugin.start().await?;
    plugin.until_ready(1).await?;
    let pid = plugin.pid().await?;
    let (at_start, in_the_end) = (peak_kib(pid)?, resident(pid)?);
    plugin.must_be_well().await?;
    plugin.stop().await?;
    Ok(Memory {
        pods: PODS,
        peak_kib: peak,
        peak_kib_at_start: at_start,
        in_the_end,
    })
}

/// Waits until the kubelet has started the pod's container, or failed to.
async fn until_tried(pod: &LivePod) -> Result<()> {
    wait::until(
        "a hostile pod's container is tried",
        4 * PATIENCE,
        async || {
            let containers = pod.containers().await?;
            let tried = containers.iter().any(|it| it.state() != State::Created);
            Ok(tried.then_some(()).ok_or_else(|| format!("{containers:?}")))
        },
    )
    .await
}

fn shape(number: u32) -> Shape {
    let shape = Shape::never().regular("app");
    let environment = match number % 4 {
        0 | 2 => return shape.annotation(RULES, annotation(number / 2)),
        1 => startable_environment(),
        _ => unstartable_environment(),
    };
    shape.field("env", environment).restarts_all("app", 42)
}

/// Rules that are to keep the plugin busy.
pub(crate) fn annotation(number: u32) -> String {
    let times = |text: &str, bytes: usize| text.repeat(bytes / text.len());
    match number % 4 {
        // Many problems, each with a long word in it.
        0 => format!("{{? {} : [{}]}}", times("x", 8000), times("[],", 240_000)),
        // The most that is read at all.
        1 => format!("[{}]", times("[],", 65_000)),
        2 => format!("[{}]", times("{a: 1},", 65_000)),
        // Aliases of aliases.
        _ => ('b'..='z').fold("a: &a [x, x]".to_owned(), |text, to| {
            let from = char::from_u32(u32::from(to) - 1).unwrap_or('a');
            format!("{text}\n{to}: &{to} [*{from}, *{from}]")
        }),
    }
}

/// 1.7 MiB: the kernel takes 2 MiB, 128 KiB in each variable (`fs/exec.c`).
fn startable_environment() -> Value {
    let copies = (1..=15).map(|number| json!({"name": format!("B{number}"), "value": "$(A8)"}));
    doubled(8).chain(copies).collect()
}

/// Three MiB, half of it in one variable. Of more, NRI could not tell its plugins: the runtime refuses such a container.
fn unstartable_environment() -> Value {
    doubled(12).collect()
}

/// Variables of which each is twice as long as the one before, from 375 bytes on, in a short text.
fn doubled(times: u32) -> impl Iterator<Item = Value> {
    let first = json!({"name": "A0", "value": "x".repeat(375)});
    let others = (1..=times).map(|number| {
        let before = format!("$(A{})", number - 1);
        json!({"name": format!("A{number}"), "value": before.repeat(2)})
    });
    std::iter::once(first).chain(others)
}
