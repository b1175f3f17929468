//! A pod's annotations, from the tenant to what people read.
//!
//! An input is a key in a line and its value in the lines after it, for each annotation, with a line `%%` between them.

use std::collections::BTreeMap;

use reprise::ids::Exit;
use reprise::policy::{FailurePolicy, Policy, PolicyError};

use super::parts;

const CONTAINERS: [&str; 3] = ["trainer", "metrics", "fetch"];

pub(super) fn read(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    let annotations = parts(&text).filter_map(|it| it.split_once('\n'));
    // Each key once, as in any pod.
    let annotations: BTreeMap<&str, &str> = annotations.filter(|(key, _)| is_key(key)).collect();
    if let Err(error) = FailurePolicy::from_annotations(annotations.clone()) {
        tell(&error);
    }
    match Policy::from_annotations(annotations) {
        Ok(None) => {}
        Ok(Some(policy)) => {
            if let Err(error) = policy.check_names(&CONTAINERS) {
                tell(&error);
            }
            for container in CONTAINERS {
                let covered = policy.covers(container);
                for code in -1..=256 {
                    let killed = Exit {
                        oom_killed: true,
                        ..Exit::from(code)
                    };
                    let asked = [Exit::from(code), killed].map(|it| policy.action(container, it));
                    assert!(covered || asked == [None, None]);
                }
            }
        }
        Err(error) => tell(&error),
    }
}

/// What ends up in an event and in the log must be one line, whatever tenants wrote.
fn tell(error: &PolicyError) {
    let text = error.to_string();
    assert!(!text.contains(char::is_control), "{text:?}");
}

/// The API server lets no other key through (`IsQualifiedName`, `apimachinery/pkg/util/validation`).
fn is_key(key: &str) -> bool {
    key.len() <= 253 + 1 + 63
        && key
            .bytes()
            .all(|it| it.is_ascii_alphanumeric() || b"-_./".contains(&it))
}
