//! The scenarios, by what they are about.

mod always;
mod back_off;
mod bad_input;
mod burst;
mod completed;
mod conditions;
mod cpus;
mod deaths;
mod deletion;
mod devices;
mod ephemeral;
mod inits;
mod jobs;
mod kubelet;
mod late;
mod launched;
mod namespaces;
mod never;
mod on_failure;
mod probes;
mod replay;
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
mod untouched;
mod volumes;

use std::future::Future;
use std::time::Duration;

use anyhow::Result;

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
        triggers::scenarios(),
        restart_pod::scenarios(),
        probes::scenarios(),
        replay::scenarios(),
        volumes::scenarios(),
        devices::scenarios(),
        cpus::scenarios(),
        conditions::scenarios(),
        back_off::scenarios(),
        spec_rules::scenarios(),
        static_pods::scenarios(),
        untouched::scenarios(),
        bad_input::scenarios(),
        namespaces::scenarios(),
        ephemeral::scenarios(),
        runtimes::scenarios(),
        jobs::scenarios(),
        trouble::scenarios(),
        late::scenarios(),
        launched::scenarios(),
        deletion::scenarios(),
        burst::scenarios(),
        deaths::scenarios(),
        runtime_faults::scenarios(),
    ]
    .concat()
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
