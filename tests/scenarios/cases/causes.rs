//! Rules that go by more than the exit code: by the signal that has ended a container, and by its lack of memory.

use std::path::Path;

use anyhow::{Result, bail, ensure};
use serde_json::{Value, json};

use super::under;
use crate::pod::LivePod;
use crate::scenario::{Scenario, Skipped, scenarios, telling_nodes_apart};
use crate::shape::RestartPolicy::{Always, Never};
use crate::shape::Shape;
use crate::stage::Stage;

/// A container that is to end with such a code is ended by the signal. What does not heed it, as the first process of a process
/// namespace, ends otherwise. (Of two `$` in a row the kubelet makes one.)
const BY_SIGNAL: &str =
    r#"trap '[ "$code" -lt 128 ] || { kill -$((code - 128)) ${$}; exit 1; }' EXIT"#;

/// A shell ends as the process does that it has waited for.
const BY_SIGNAL_OF_CHILD: &str = r#"
trap '[ "$code" != 139 ] || { sh -c "kill -SEGV \${\$}"; exit $?; }' EXIT
"#;

/// Its first process takes all the memory that there is, and does not end otherwise.
const OUT_OF_MEMORY: &str = r#"trap '[ "$code" != 137 ] || exec tail /dev/zero' EXIT"#;

/// Another process of it does, first. With cgroup v2 the kubelet has the kernel kill all of them.
const CHILD_OUT_OF_MEMORY: &str = "trap 'tail /dev/zero' EXIT";

/// As soon as it begins. It goes on.
const ONCE_OUT_OF_MEMORY: &str = r#"
[ -e /ev/once ] || { : >/ev/once; tail /dev/zero; say "note $?"; }
"#;

pub(crate) fn scenarios() -> Vec<Scenario> {
    [
        under(
            &[Never, Always],
            "restarts_when_a_signal_has_ended_a_container",
            by_signal,
        ),
        under(
            &[Never, Always],
            "restarts_when_a_container_is_out_of_memory",
            out_of_memory,
        ),
        scenarios![Shared:
            a_shell_that_ends_as_a_signal_has_ended_its_child_restarts_the_pod,
            rules_for_signals_and_memory_leave_other_exits_to_the_kubelet,
            never_pod_restarts_when_an_init_container_is_out_of_memory,
            never_pod_restarts_when_a_process_of_a_container_is_out_of_memory,
            never_pod_restarts_one_container_that_is_out_of_memory,
            first_rule_that_matches_wins_whatever_it_goes_by,
        ],
        telling_nodes_apart(scenarios![Alone:
            a_plugin_that_comes_later_knows_that_a_container_was_out_of_memory,
        ]),
    ]
    .concat()
}

fn when(action: &str, field: &str, value: &Value) -> Value {
    json!({"action": action, field: value})
}

fn all_when_out_of_memory() -> Value {
    when("RestartAllContainers", "onOOMKilled", &json!({}))
}

/// A container that may have 32 MiB.
fn limited(shape: Shape) -> Shape {
    let memory = json!({"limits": {"memory": "32Mi"}, "requests": {"memory": "16Mi"}});
    shape.field("resources", memory)
}

fn has_cgroup_v2() -> bool {
    Path::new("/sys/fs/cgroup/cgroup.controllers").exists()
}

/// Unless the kubelet has collected what the status has it from, as it does once a minute.
fn exit_is_shown(pod: &LivePod, container: &str, exit: &str) -> Result<()> {
    let now = pod.recorder.current();
    let shown = &now.containers[container].last_state;
    ensure!(
        shown == exit || shown == "-",
        "its exit is shown as {shown}"
    );
    Ok(())
}

async fn by_signal(stage: Stage, shape: Shape) -> Result<()> {
    let signals = json!(["SIGSEGV", "SIGABRT"]);
    let rules = json!([when("RestartAllContainers", "onSignal", &signals)]);
    let shape = shape
        .share_process_namespace()
        .regular("trainer")
        .at_first(BY_SIGNAL)
        .rules("trainer", &rules)
        .regular("logger");
    let pod = stage.running(shape).await?;
    pod.restarts_all("trainer", 139).await?;
    pod.until_told("RestartingAllContainers", "(rule 1, onSignal)")
        .await?;
    exit_is_shown(&pod, "trainer", "exit 139 (Error)")
}

async fn a_shell_that_ends_as_a_signal_has_ended_its_child_restarts_the_pod(
    stage: Stage,
) -> Result<()> {
    let rules = json!([when(
        "RestartAllContainers",
        "onSignal",
        &json!(["SIGSEGV"])
    )]);
    let shape = Shape::never()
        .regular("trainer")
        .at_first(BY_SIGNAL_OF_CHILD)
        .rules("trainer", &rules)
        .regular("logger");
    let pod = stage.running(shape).await?;
    pod.restarts_all("trainer", 139).await
}

async fn out_of_memory(stage: Stage, shape: Shape) -> Result<()> {
    let shape = limited(shape.regular("trainer"))
        .at_first(OUT_OF_MEMORY)
        .rules("trainer", &json!([all_when_out_of_memory()]))
        .regular("logger");
    let pod = stage.running(shape).await?;
    pod.restarts_all("trainer", 137).await?;
    pod.until_told("RestartingAllContainers", "(rule 1, onOOMKilled)")
        .await?;
    exit_is_shown(&pod, "trainer", "exit 137 (OOMKilled)")
}

/// Killed by somebody, with the same code, and by another signal.
async fn rules_for_signals_and_memory_leave_other_exits_to_the_kubelet(stage: Stage) -> Result<()> {
    let mut rule = all_when_out_of_memory();
    rule["onSignal"] = json!(["SIGSEGV"]);
    let shape = Shape::never().share_process_namespace();
    let mut shape = shape.annotation("restart-rules.reprise.dev", json!([rule]).to_string());
    for name in ["trainer", "logger", "server"] {
        shape = limited(shape.regular(name)).at_first(BY_SIGNAL);
    }
    let pod = stage.running(shape).await?;
    pod.stays_down("trainer", 137).await?;
    pod.stays_down("logger", 134).await?;
    pod.stays_down("server", 11).await
}

async fn never_pod_restarts_when_an_init_container_is_out_of_memory(stage: Stage) -> Result<()> {
    let shape = limited(Shape::never().init("fetch").waiting_init("setup"))
        .at_first(OUT_OF_MEMORY)
        .rules("setup", &json!([all_when_out_of_memory()]))
        .regular("trainer");
    let pod = stage.pod(shape).await?;
    pod.until_container_runs("setup").await?;
    pod.restarts_all("setup", 137).await
}

/// The kubelet shows it as the reason, whatever the first process ends with.
async fn never_pod_restarts_when_a_process_of_a_container_is_out_of_memory(
    stage: Stage,
) -> Result<()> {
    let shape = limited(Shape::never().regular("trainer"))
        .at_first(CHILD_OUT_OF_MEMORY)
        .rules("trainer", &json!([all_when_out_of_memory()]))
        .regular("logger");
    let pod = stage.running(shape).await?;
    let code = if has_cgroup_v2() { 137 } else { 3 };
    pod.restarts_all("trainer", code).await?;
    exit_is_shown(&pod, "trainer", &format!("exit {code} (OOMKilled)"))
}

async fn never_pod_restarts_one_container_that_is_out_of_memory(stage: Stage) -> Result<()> {
    let rules = json!([when("Restart", "onOOMKilled", &json!({}))]);
    out_of_memory_restarts_alone(stage, &rules).await
}

async fn out_of_memory_restarts_alone(stage: Stage, rules: &Value) -> Result<()> {
    let shape = limited(Shape::never().regular("trainer"))
        .at_first(OUT_OF_MEMORY)
        .rules("trainer", rules)
        .regular("logger");
    let pod = stage.running(shape).await?;
    pod.restarts_alone("trainer", 137).await
}

async fn first_rule_that_matches_wins_whatever_it_goes_by(stage: Stage) -> Result<()> {
    let rules = json!([
        when("Restart", "onSignal", &json!(["SIGKILL"])),
        all_when_out_of_memory(),
    ]);
    out_of_memory_restarts_alone(stage, &rules).await
}

/// The runtime keeps it: no event tells of it any more.
async fn a_plugin_that_comes_later_knows_that_a_container_was_out_of_memory(
    stage: Stage,
) -> Result<()> {
    if has_cgroup_v2() {
        bail!(Skipped(
            "with cgroup v2 a container ends with any of its processes"
        ));
    }
    let shape = limited(Shape::never().regular("trainer"))
        .at_first(ONCE_OUT_OF_MEMORY)
        .rules("trainer", &json!([all_when_out_of_memory()]))
        .regular("logger");
    let pod = stage.running(shape).await?;
    let noted = pod.notes().await?;
    ensure!(noted == ["137"], "the process ended with {noted:?}");
    stage.plugin.kill().await?;
    stage.plugin.start().await?;
    stage.plugin.until_ready(1).await?;
    pod.restarts_all("trainer", 3).await
}
