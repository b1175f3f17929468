use serde_json::json;

use super::super::api::runtime::v1::{
    self as api, ContainerConfig, Int64Value, NamespaceMode, PodSandboxConfig, Signal,
};
use super::*;

const CONTAINER: &str = include_str!("container.json");
const SANDBOX: &str = include_str!("sandbox.json");

fn container(info: &str) -> Recovered<ContainerConfig> {
    recover("ContainerStatus", info).unwrap().unwrap()
}

/// The container sample with a change made to its configuration.
fn changed(change: impl FnOnce(&mut Value)) -> String {
    let mut info: Value = serde_json::from_str(CONTAINER).unwrap();
    change(&mut info["config"]);
    info.to_string()
}

#[test]
fn a_container_comes_back_whole() {
    let recovered = container(CONTAINER);
    assert_eq!(recovered.lost, Vec::<String>::new());
    let config = recovered.config;
    assert_eq!(config.envs[0].value, b"3");
    assert_eq!(config.envs[1].value, b"");
    assert_eq!(config.envs[2].value, "grüß dich".as_bytes());
    assert_eq!(config.mounts[0].uid_mappings[0].host_id, 65536);
    assert_eq!(config.cdi_devices[0].name, "nvidia.com/gpu=0");
    assert_eq!(config.stop_signal(), Signal::Sigterm);
    assert!(config.stdin && !config.tty);

    let linux = config.linux.unwrap();
    let resources = linux.resources.unwrap();
    assert_eq!(resources.memory_limit_in_bytes, i64::MAX);
    assert_eq!(resources.hugepage_limits[0].limit, u64::MAX);
    assert_eq!(resources.oom_score_adj, -997);
    let security = linux.security_context.unwrap();
    // Root, and no user given, are not the same.
    assert_eq!(security.run_as_user, Some(Int64Value { value: 0 }));
    let default_apparmor = Some(api::SecurityProfile::default());
    assert_eq!(security.apparmor, default_apparmor);
    assert_eq!(security.selinux_options.unwrap().r#type, "container_t");
}

/// As containerd 2.4.2 has told of a container with an image volume.
#[test]
fn an_image_is_mounted_anew_and_not_the_place_where_it_was_mounted() {
    let recovered = as_asked_for(container(include_str!("image_volume.json")));
    assert_eq!(recovered.lost, Vec::<String>::new());
    let mounts = recovered.config.mounts;
    let (images, others): (Vec<_>, Vec<_>) = mounts.iter().partition(|it| it.image.is_some());
    assert_eq!(images.len(), 1);
    assert_eq!(images[0].host_path, "");
    assert!(!others.is_empty() && others.iter().all(|it| !it.host_path.is_empty()));
}

#[test]
fn a_sandbox_comes_back_whole() {
    let recovered = recover::<PodSandboxConfig>("PodSandboxStatus", SANDBOX);
    let recovered = recovered.unwrap().unwrap();
    assert_eq!(recovered.lost, Vec::<String>::new());
    let config = recovered.config;
    assert_eq!(config.metadata.unwrap().uid, "u1");
    assert_eq!(config.labels["app"], "");
    let security = config.linux.unwrap().security_context.unwrap();
    let namespaces = security.namespace_options.unwrap();
    assert_eq!(namespaces.network(), NamespaceMode::Node);
    assert_eq!(namespaces.userns_options.unwrap().uids[0].length, 65536);
}

#[test]
fn fields_that_this_version_does_not_know_are_named() {
    let info = changed(|config| {
        config["brand_new"] = json!("x");
        config["mounts"][1]["deep"] = json!({"er": 1});
        config["windows"] = json!({});
    });
    let recovered = container(&info);
    assert!(!recovered.is_complete());
    let lost = ["brand_new", "mounts[1].deep", "windows"];
    assert_eq!(recovered.lost, lost);
    assert_eq!(recovered.config, container(CONTAINER).config);
}

#[test]
fn an_enum_value_of_a_newer_version_survives() {
    let info = changed(|config| config["stop_signal"] = json!(99));
    let recovered = container(&info);
    assert!(recovered.is_complete());
    assert_eq!(recovered.config.stop_signal, 99);
}

#[test]
fn environment_values_that_were_not_utf8_are_named() {
    let info = changed(|config| config["envs"][0]["value"] = json!("a\u{fffd}b"));
    assert_eq!(container(&info).lost, ["envs[0].value"]);
}

#[test]
fn info_without_a_configuration_is_none_and_a_wrong_type_an_error() {
    let none = recover::<ContainerConfig>("ContainerStatus", r#"{"sandboxID":"s","pid":1}"#);
    assert_eq!(none.unwrap(), None);
    let wrong = changed(|config| config["log_path"] = json!(7));
    let error = recover::<ContainerConfig>("ContainerStatus", &wrong).unwrap_err();
    assert!(matches!(error, CriError::Malformed { .. }), "{error}");
}

#[test]
fn an_error_says_where_it_is_and_not_what_is_there() {
    let secret = "hunter2";
    let wrong_kinds = [
        changed(|config| config["metadata"] = json!(secret)),
        changed(|config| config["linux"]["resources"]["memory_limit_in_bytes"] = json!(secret)),
        changed(|config| config["envs"][0] = json!(secret)),
    ];
    for info in wrong_kinds {
        let error = recover::<ContainerConfig>("ContainerStatus", &info).unwrap_err();
        let error = error.to_string();
        assert!(!error.contains(secret), "{error}");
        let place = error.rsplit_once("column ").unwrap().1;
        assert!(place.parse::<usize>().unwrap() > 0, "{error}");
    }
    let broken = format!("{{\"config\": {{\"envs\": [{{\"key\": {secret}");
    let error = recover::<ContainerConfig>("ContainerStatus", &broken).unwrap_err();
    assert_eq!(
        error.to_string(),
        "ContainerStatus: unusable answer: verbose info: no JSON at line 1, column 30"
    );
}
