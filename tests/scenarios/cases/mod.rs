//! The scenarios, by what they are about.

mod always;
mod bad_input;
mod kubelet;
mod launched;
mod never;
mod on_failure;
mod plugin_death;
mod rules;
mod single;
mod trouble;
mod untouched;

use crate::scenario::Scenario;

pub(crate) fn all() -> Vec<Scenario> {
    [
        kubelet::scenarios(),
        never::scenarios(),
        always::scenarios(),
        on_failure::scenarios(),
        single::scenarios(),
        rules::scenarios(),
        untouched::scenarios(),
        bad_input::scenarios(),
        trouble::scenarios(),
        launched::scenarios(),
        plugin_death::scenarios(),
    ]
    .concat()
}
