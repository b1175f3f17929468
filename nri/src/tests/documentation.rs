//! What the generated code says of itself.

/// What [`crate::api`] has.
const FOR_PLUGINS: [&str; 14] = [
    "Container",
    "ContainerAdjustment",
    "ContainerState",
    "FailurePolicy",
    "Hook",
    "Hooks",
    "Image",
    "KeyValue",
    "LinuxContainer",
    "LinuxPodSandbox",
    "Mount",
    "OptionalInt",
    "PodSandbox",
    "User",
];

#[test]
fn whatever_a_plugin_sees_of_a_message_is_documented() {
    let code = include_str!(concat!(env!("OUT_DIR"), "/nri.rs"));
    let mut seen = Vec::new();
    for (above, line) in code.lines().zip(code.lines().skip(1)) {
        let Some((kind, name)) = marker(line) else {
            continue;
        };
        let message = name.split('.').next().unwrap();
        if kind != "special_field" && FOR_PLUGINS.contains(&message) {
            assert!(above.trim().starts_with("///"), "{name} has no comment");
            seen.push(name);
        }
    }
    for name in FOR_PLUGINS {
        assert!(seen.contains(&name), "{name} is not in the code");
    }
}

/// What kind of thing the generator marks in this line, and its name.
fn marker(line: &str) -> Option<(&str, &str)> {
    let marker = line.trim().strip_prefix("// @@protoc_insertion_point(")?;
    marker
        .strip_suffix(')')?
        .split_once(":nri.pkg.api.v1alpha1.")
}
