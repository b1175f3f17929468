//! Files in the state directory, which another version may have written, or half a disk.

use std::fs;
use std::time::{Duration, Instant};

use reprise::back_off::{BackOff, Past};
use reprise::driver::{Charge, Driver};
use reprise::ids::{Attempt, ContainerId, ContainerName};
use reprise::node::{Instance, InstanceState, Maker};
use reprise::policy::Unread;
use reprise::restart::machine::Record;
use tokio::time::sleep;

use super::{dir, plugin};

pub(super) fn load(input: &[u8]) {
    let records = plugin::records();
    let state = dir().join("state");
    fs::write(state.join("restarts/5a1.json"), input).expect("a file");
    fs::write(state.join("back-off/5a1.json"), input).expect("a file");

    let loaded = records.load();
    let pasts = records.pasts();
    let hour = Duration::from_hours(1);
    let back_off = BackOff::try_new(hour / 60, hour, hour).expect("gaps that grow");
    for mut past in pasts.into_values() {
        for of in [None, Some(ContainerName::from("trainer"))] {
            for now in [0, 1_790_000_000_000, u64::MAX] {
                let wait = past.wait(of.as_ref(), now, &back_off);
                past.begun(of.as_ref(), now, wait, &back_off);
                past.over(of.as_ref(), now);
            }
        }
    }
    for record in loaded {
        resume(record);
    }
}

/// A plugin goes on with a restart only if there is a sandbox of that id.
fn resume(record: Record) {
    let pod = record.plan.pod.clone();
    let is_id = |id: &str| !id.is_empty() && id.bytes().all(|it| it.is_ascii_alphanumeric());
    if !is_id(pod.sandbox.as_str()) {
        return;
    }
    let found: Vec<(ContainerId, Instance)> = record
        .plan
        .members
        .iter()
        .filter_map(|member| {
            let instance = Instance {
                name: member.name.clone(),
                state: InstanceState::Running,
                maker: Maker::Kubelet,
                attempt: Attempt(0),
                created_at: 1,
                heard_at: Instant::now(),
                started_at: None,
                listed: true,
                hooked: Some(true),
            };
            Some((member.old.as_ref()?.id.clone(), instance))
        })
        .collect();
    plugin::runtime().block_on(async {
        let rules = r"[{action: RestartAllContainers, exitCodes: {operator: In, values: [42]}}]";
        let charge = Charge {
            annotations: Unread::of([("restart-rules.reprise.dev", rules)]),
            is_static: false,
            holdable: true,
            native: None,
            spec: None,
            past: Past::default(),
        };
        let driver = Driver::spawn(plugin::tools().into(), pod, charge);
        driver.until_read().await;
        driver.relisted(found, Instant::now(), Some(record), true);
        sleep(Duration::from_millis(5)).await;
        driver.close();
    });
}
