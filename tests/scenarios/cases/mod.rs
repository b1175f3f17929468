//! The scenarios, by what they are about.

mod always;
mod back_off;
mod bad_input;
mod burst;
mod causes;
mod completed;
mod conditions;
mod cpus;
mod credentials;
mod crio;
mod deaths;
mod declared;
mod deletion;
mod devices;
mod disks;
mod endings;
mod ephemeral;
mod gates;
mod groups;
mod hard_reset;
mod hooks;
mod inits;
mod jobs;
mod kubectl;
mod kubelet;
mod late;
mod launched;
mod likeness;
mod many_containers;
mod metrics;
mod namespaces;
mod never;
mod on_failure;
mod past;
mod probes;
mod relists;
mod removal;
mod replay;
mod requests;
mod restart_pod;
mod rules;
mod runtime_faults;
mod runtimes;
mod single;
mod spec_rules;
mod static_pods;
mod three_kinds;
mod triggers;
mod trouble;
mod two_plugins;
mod untouched;
mod volumes;

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;

use crate::pod::LivePod;
use crate::proxy::Proxy;
use crate::scenario::{Company, Scenario};
use crate::shape::{RestartPolicy, Shape};
use crate::stage::Stage;

/// A hook that waits for a plugin lets go of its exit after that long.
const HOOKS_GIVE_UP: Duration = Duration::from_secs(8);

pub(crate) fn all() -> Vec<Scenario> {
    [
        kubelet::scenarios(),
        never::scenarios(),
        always::scenarios(),
        on_failure::scenarios(),
        completed::scenarios(),
        inits::scenarios(),
        single::scenarios(),
        rules::scenarios(),
        causes::scenarios(),
        triggers::scenarios(),
        requests::scenarios(),
        kubectl::scenarios(),
        restart_pod::scenarios(),
        probes::scenarios(),
        replay::scenarios(),
        likeness::scenarios(),
        relists::scenarios(),
        volumes::scenarios(),
        devices::scenarios(),
        cpus::scenarios(),
        conditions::scenarios(),
        past::scenarios(),
        credentials::scenarios(),
        back_off::scenarios(),
        spec_rules::scenarios(),
        declared::scenarios(),
        gates::scenarios(),
        static_pods::scenarios(),
        untouched::scenarios(),
        bad_input::scenarios(),
        namespaces::scenarios(),
        ephemeral::scenarios(),
        runtimes::scenarios(),
        hooks::scenarios(),
        many_containers::scenarios(),
        jobs::scenarios(),
        groups::scenarios(),
        hard_reset::scenarios(),
        trouble::scenarios(),
        late::scenarios(),
        crio::scenarios(),
        launched::scenarios(),
        disks::scenarios(),
        two_plugins::scenarios(),
        metrics::scenarios(),
        removal::scenarios(),
        deletion::scenarios(),
        endings::scenarios(),
        burst::scenarios(),
        deaths::scenarios(),
        runtime_faults::scenarios(),
    ]
    .concat()
}

/// From now on the plugin reaches the runtime through a proxy.
async fn through_proxy(stage: &Stage) -> Result<Proxy> {
    let proxy = Proxy::start(stage.node.runtime.channel())?;
    let endpoint = proxy.endpoint.clone();
    let plugin = &stage.plugin;
    plugin
        .detour(|sockets| sockets.cri_endpoint = endpoint)
        .await?;
    Ok(proxy)
}

/// A pod of that shape and two containers, `trainer` and `logger`, each of which has restarted it once.
async fn restarted_by_both(stage: &Stage, shape: Shape) -> Result<Arc<LivePod>> {
    let shape = shape
        .regular("trainer")
        .regular("logger")
        .restarts_all("trainer", 42)
        .restarts_all("logger", 43);
    let pod = stage.running(shape).await?;
    pod.restarts_all("trainer", 42).await?;
    pod.restarts_all("logger", 43).await?;
    Ok(pod)
}

/// The same for pods of several policies: `WHAT` becomes `never_pod_WHAT` and so on.
fn under<F>(policies: &[RestartPolicy], what: &str, play: fn(Stage, Shape) -> F) -> Vec<Scenario>
where
    F: Future<Output = Result<()>> + Send + 'static,
{
    let scenario = |policy: &RestartPolicy| {
        let name = match policy {
            RestartPolicy::Always => "always",
            RestartPolicy::OnFailure => "on_failure",
            RestartPolicy::Never => "never",
        };
        let shape = Shape::new(*policy);
        Scenario::new(
            format!("{name}_pod_{what}"),
            Company::Shared,
            move |stage| play(stage, shape.clone()),
        )
    };
    policies.iter().map(scenario).collect()
}
