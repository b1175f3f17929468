//! What is replayed, and from what.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::attempt::TERMINATION_MESSAGE_PATH;
use super::blocker::NoDevices;
use super::*;
use crate::cri::{ContainerConfig, ContainerStatus, ImageSpec, POD_UID};
use crate::ids::{Attempt as Number, ExitCode};
use crate::kube::{ContainerKind, PodSpec, RestartPolicy};
use crate::node::{REPLAY_ANNOTATION, RESTART_COUNT};
use crate::plan::{Member, Old, RestartId};
use crate::policy::Start;

/// A configuration as containerd tells it, with everything in it that a kubelet can set.
fn sample() -> ContainerConfig {
    let info = include_str!("../cri/config/container.json");
    let info: Value = serde_json::from_str(info).unwrap();
    serde_json::from_value(info["config"].clone()).unwrap()
}

fn restart() -> RestartId {
    RestartId("c1-1".into())
}

fn status(config: &ContainerConfig) -> ContainerStatus {
    ContainerStatus {
        id: "c1".into(),
        name: "app".into(),
        attempt: Number(0),
        state: crate::cri::ContainerState::Running,
        created_at: 0,
        started_at: 0,
        finished_at: 0,
        exit_code: None,
        reason: String::new(),
        log_path: None,
        resources: config.linux.as_ref().and_then(|it| it.resources.clone()),
        image_ref: String::new(),
        image: crate::cri::ImageSpec::default(),
        labels: config.labels.clone(),
        annotations: config.annotations.clone(),
    }
}

#[test]
fn a_container_whose_image_has_changed_since_is_the_kubelets() {
    let spec = |image: Value| {
        let pod = json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"},
            "spec": {"containers": [{"name": "app", "image": image}]}});
        PodSpec::from_pod(&serde_json::from_value(pod).unwrap(), "n").unwrap()
    };
    let mut made = sample();
    let image = made.image.as_mut().unwrap();
    image.user_specified_image = "i:1".to_owned();
    let app = "app".into();
    let changed = Err(ReplayBlocker::ImageChanged("app".into()));
    assert_eq!(has_image(&app, &made, Some(&spec(json!("i:1")))), Ok(()));
    assert_eq!(has_image(&app, &made, Some(&spec(json!("i:2")))), changed);
    assert_eq!(has_image(&app, &made, Some(&spec(json!(null)))), Ok(()));
    assert_eq!(has_image(&app, &made, None), Ok(()));
    made.image.as_mut().unwrap().user_specified_image.clear();
    assert_eq!(has_image(&app, &made, Some(&spec(json!("i:2")))), Ok(()));
}

#[test]
fn a_container_whose_variables_would_be_others_is_the_kubelets() {
    let field = |path: &str| json!({"fieldRef": {"fieldPath": path}});
    let env = json!([
        {"name": "RANK", "valueFrom": field("metadata.labels['rank']")},
        {"name": "JOB", "valueFrom": field("metadata.annotations['example.com/job']")},
        {"name": "POD", "valueFrom": field("metadata.name")},
    ]);
    let spec = |labels: Value, annotations: Value| {
        let pod = json!({
            "metadata": {"name": "p", "namespace": "n", "uid": "u", "labels": labels, "annotations": annotations},
            "spec": {"containers": [{"name": "app", "env": env}, {"name": "other"}]},
        });
        PodSpec::from_pod(&serde_json::from_value(pod).unwrap(), "n").unwrap()
    };
    let made = |envs: Value| ContainerConfig {
        envs: serde_json::from_value(envs).unwrap(),
        ..sample()
    };
    let before = made(json!([
        {"key": "JOB", "value": "a"}, {"key": "POD", "value": "p"}, {"key": "RANK", "value": ""},
    ]));
    let app = "app".into();
    let changed = |variable: &str| {
        let variable = variable.to_owned();
        Err(ReplayBlocker::VariableChanged("app".into(), variable))
    };
    let job = |value: &str| json!({"example.com/job": value, "unrelated": value});
    let same = spec(json!(null), job("a"));
    assert_eq!(has_variables(&app, &before, &same), Ok(()));
    // What is not there is empty.
    let same = spec(json!({"rank": ""}), job("a"));
    assert_eq!(has_variables(&app, &before, &same), Ok(()));
    let other = spec(json!({"rank": "1"}), job("a"));
    assert_eq!(has_variables(&app, &before, &other), changed("RANK"));
    let other = spec(json!(null), job("b"));
    assert_eq!(has_variables(&app, &before, &other), changed("JOB"));
    assert_eq!(has_variables(&"other".into(), &before, &other), Ok(()));
    assert_eq!(has_variables(&"ephemeral".into(), &before, &other), Ok(()));
    assert_eq!(has_variables(&app, &made(json!([])), &same), changed("JOB"));
}

#[test]
fn a_variable_is_named_so_that_it_can_be_read() {
    let said = |variable: &str| {
        ReplayBlocker::VariableChanged("app".into(), variable.to_owned()).to_string()
    };
    assert_eq!(said("RANK"), "app has another value of RANK by now");
    assert_eq!(said("a\nb"), "app has another value of a\\nb by now");
    assert!(said(&"x".repeat(1 << 20)).len() < 100);
}

#[test]
fn a_pod_has_room_for_configurations_of_a_mebibyte() {
    let mut large = sample();
    large.args = vec!["x".repeat(MOST_BYTES / 3)];
    let room = Room::default();
    room.take(&large).unwrap();
    room.take(&large).unwrap();
    assert_eq!(room.take(&large), Err(ReplayBlocker::Large));
    room.take(&sample()).unwrap();
}

#[test]
fn images_are_looked_for_by_the_names_that_the_spec_has_but_for_those_that_are_pulled() {
    let spec = |policy: &str| {
        let pod = json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"},
            "spec": {"containers": [{"name": "app", "image": "i:1", "imagePullPolicy": policy}]}});
        PodSpec::from_pod(&serde_json::from_value(pod).unwrap(), "n").unwrap()
    };
    let mut made = sample();
    let image = |id: &str, name: &str| ImageSpec {
        image: id.into(),
        user_specified_image: name.into(),
        image_ref: id.into(),
        ..ImageSpec::default()
    };
    made.image = Some(image("sha256:a", "i:1"));
    made.mounts[0].image = Some(image("sha256:b", "files:1"));
    let looked_for = |made: &ContainerConfig, spec: Option<&PodSpec>| {
        let name = "app".into();
        let images = images(&name, made, spec);
        let both = images.map(|(made, wanted)| (made.image.clone(), wanted.image));
        both.collect::<Vec<_>>()
    };
    let both = [("sha256:a", "i:1"), ("sha256:b", "files:1")];
    let both = both.map(|(id, name)| (id.to_owned(), name.to_owned()));
    assert_eq!(looked_for(&made, Some(&spec("IfNotPresent"))), both);
    assert_eq!(looked_for(&made, None), both);
    assert_eq!(looked_for(&made, Some(&spec("Always"))), []);
    // Older kubelets do not tell.
    made.image = Some(image("sha256:a", ""));
    assert_eq!(looked_for(&made, None), both[1..]);
}

#[test]
fn a_device_is_asked_for_unless_the_node_says_that_it_need_not_be() {
    let pod = json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"}, "spec": {"containers": [
        {"name": "app", "resources": {"limits": {"cpu": 1, "example.com/gpu": 1, "hugepages-2Mi": "2Mi"}}},
    ]}});
    let pod = PodSpec::from_pod(&serde_json::from_value(pod).unwrap(), "n").unwrap();
    let app = member("app", ContainerKind::Regular);
    let why = |exempt: &[&str]| {
        let exempt: Vec<Devices> = exempt.iter().map(|it| it.parse().unwrap()).collect();
        blocker(Start::Replay, Some(&pod), &[&app], &exempt)
    };
    let declined = ReplayBlocker::Device("app".into(), "example.com/gpu".into());
    assert_eq!(why(&[]), Some(declined.clone()));
    assert_eq!(why(&["example.com/gpus", "example.co/*"]), Some(declined));
    assert_eq!(why(&["example.com/gpu"]), None);
    assert_eq!(why(&["other.com/x", "example.com/*"]), None);
    for wrong in ["", "gpu", "/gpu", "example.com/", "*"] {
        assert_eq!(wrong.parse::<Devices>(), Err(NoDevices), "{wrong}");
    }
}

#[test]
fn what_has_ended_may_only_have_the_cpus_that_what_runs_has() {
    let on = |cpus: &str, finished_at| {
        let mut config = sample();
        let resources = config.linux.as_mut().unwrap().resources.as_mut().unwrap();
        resources.cpuset_cpus = cpus.into();
        let status = ContainerStatus {
            finished_at,
            ..status(&config)
        };
        (status, config)
    };
    let moved = Err(ReplayBlocker::Cpus("app".into()));
    assert_eq!(have_their_cpus(&[on("0-3", 0), on("4", 0)], false), Ok(()));
    assert_eq!(
        have_their_cpus(&[on("0-3", 9), on("0-3", 0)], false),
        Ok(())
    );
    assert_eq!(have_their_cpus(&[on("0-3", 9), on("0-2", 0)], false), moved);
    assert_eq!(have_their_cpus(&[on("0-3", 0)], true), moved);
    // There is no CPU manager.
    assert_eq!(have_their_cpus(&[on("", 9), on("", 0)], true), Ok(()));
}

/// The paths of what differs.
fn differences(a: &Value, b: &Value, path: &str, found: &mut BTreeSet<String>) {
    match (a, b) {
        (Value::Object(a), Value::Object(b)) => {
            for name in a.keys().chain(b.keys()) {
                let (a, b) = (a.get(name), b.get(name));
                let path = format!("{path}.{name}");
                differences(
                    a.unwrap_or(&Value::Null),
                    b.unwrap_or(&Value::Null),
                    &path,
                    found,
                );
            }
        }
        (Value::Array(a), Value::Array(b)) if a.len() == b.len() => {
            for (at, (a, b)) in a.iter().zip(b).enumerate() {
                differences(a, b, &format!("{path}[{at}]"), found);
            }
        }
        _ if a == b => {}
        _ => drop(found.insert(path.to_owned())),
    }
}

proptest! {
    #[test]
    fn the_next_attempt_differs_in_nothing_but_its_number(
        attempt in 0u32..1000,
        restarts in 0u32..1000,
        unique: u32,
        envs in prop::collection::vec(("[A-Z]{1,8}", "\\PC{0,12}"), 0..5),
        mounts in prop::collection::vec("/[a-z]{1,8}", 0..4),
        message in prop::option::of("/dev/[a-z]{3,9}"),
        args in prop::collection::vec("\\PC{0,12}", 0..4),
        shares in 2i64..10_000,
    ) {
        let mut config = sample();
        config.metadata.as_mut().unwrap().attempt = attempt;
        config.annotations.insert(RESTART_COUNT.into(), restarts.to_string());
        config.log_path = format!("app/{restarts}.log");
        config.args = args;
        let env = |(key, value): (String, String)| json!({"key": key, "value": value});
        let envs: Vec<Value> = envs.into_iter().map(env).collect();
        config.envs = serde_json::from_value(json!(envs)).unwrap();
        config.labels.insert(POD_UID.into(), "u1".into());
        let mut mounts: Vec<(&str, String)> = mounts
            .iter()
            .enumerate()
            .map(|(at, inside)| (inside.as_str(), format!("/pods/u1/volumes/{at}")))
            .collect();
        if let Some(message) = &message {
            // A volume at the same place is none.
            mounts.push((message, "/pods/u1/volumes/v".into()));
            mounts.push((message, "/kubelet/pods/u1/containers/app/0123abcd".into()));
        }
        let inside = mounts.len();
        let mounts: Vec<Value> = mounts
            .into_iter()
            .map(|(inside, host)| json!({"container_path": inside, "host_path": host}))
            .collect();
        config.mounts = serde_json::from_value(json!(mounts)).unwrap();
        config.annotations.remove(TERMINATION_MESSAGE_PATH);
        if let Some(message) = &message {
            config.annotations.insert(TERMINATION_MESSAGE_PATH.into(), message.clone());
        }
        config.linux.as_mut().unwrap().resources.as_mut().unwrap().cpu_shares = shares;

        let next = Attempt::after(&status(&config), config.clone(), &restart(), unique).unwrap();
        let mut found = BTreeSet::new();
        let value = |config| serde_json::to_value(config).unwrap();
        differences(&value(&config), &value(&next.config), "", &mut found);
        let mut expected: BTreeSet<String> = [
            ".metadata.attempt".into(),
            format!(".annotations.{RESTART_COUNT}"),
            format!(".annotations.{REPLAY_ANNOTATION}"),
            ".log_path".into(),
        ].into();
        if message.is_some() {
            expected.insert(format!(".mounts[{}].host_path", inside - 1));
        }
        prop_assert_eq!(found, expected);
        prop_assert_eq!(next.config.metadata.unwrap().attempt, attempt + 1);
        prop_assert_eq!(next.config.log_path, format!("app/{}.log", restarts + 1));
        let file = message.map(|_| PathBuf::from(format!("/kubelet/pods/u1/containers/app/{unique:08x}")));
        prop_assert_eq!(next.termination_message, file);
    }
}

#[test]
fn cpus_go_on_as_they_are_now_and_a_resize_is_the_kubelets() {
    let mut config = sample();
    config.annotations.insert(RESTART_COUNT.into(), "0".into());
    let mut status = status(&config);
    status.resources.as_mut().unwrap().cpuset_cpus = "2-3".into();
    let next = Attempt::after(&status, config.clone(), &restart(), 0).unwrap();
    let resources = next.config.linux.unwrap().resources.unwrap();
    assert_eq!(resources.cpuset_cpus, "2-3");
    status.resources.as_mut().unwrap().cpu_quota += 1;
    let refused = Attempt::after(&status, config.clone(), &restart(), 0);
    assert_eq!(refused, Err(ReplayBlocker::Resized("app".into())));
    config
        .annotations
        .insert(RESTART_COUNT.into(), "many".into());
    assert!(matches!(
        Attempt::after(&status, config, &restart(), 0),
        Err(ReplayBlocker::Lost(..))
    ));
}

fn member(name: &str, kind: ContainerKind) -> Member {
    Member {
        name: name.into(),
        kind,
        restart_policy: RestartPolicy::Never,
        old: Some(Old {
            id: "c1".into(),
            exit: None,
        }),
        unhooked: false,
        at_once: false,
        may_have_succeeded: false,
        runs_unrecorded: false,
        older: Vec::new(),
        startup_probe: false,
        post_start: false,
        is_to_run: true,
        placeholders: 0,
    }
}

#[test]
fn every_blocker_is_seen_and_some_can_be_overruled() {
    let pod = |part: Value| {
        let mut container = json!({"name": "app"});
        let fields = part.as_object().unwrap().clone();
        container.as_object_mut().unwrap().extend(fields);
        let pod = json!({
            "metadata": {"name": "p", "namespace": "n", "uid": "u"},
            "spec": {"containers": [container]},
        });
        PodSpec::from_pod(&serde_json::from_value(pod).unwrap(), "n").unwrap()
    };
    let app = member("app", ContainerKind::Regular);
    let why = |start, part: Value, member: &Member| {
        let found = blocker(start, Some(&pod(part)), &[member], &[]);
        found.map(|blocker| blocker.to_string())
    };
    assert_eq!(why(Start::Auto, json!({}), &app), None);
    assert_eq!(
        why(Start::Kubelet, json!({}), &app).unwrap(),
        "start: Kubelet"
    );
    assert_eq!(
        blocker(Start::Auto, None, &[&app], &[]),
        Some(ReplayBlocker::NoSpec)
    );
    let pull = json!({"imagePullPolicy": "Always"});
    assert_eq!(
        why(Start::Auto, pull.clone(), &app).unwrap(),
        "app has imagePullPolicy Always"
    );
    assert_eq!(why(Start::Replay, pull, &app), None);
    let hook = json!({"lifecycle": {"postStart": {"sleep": {"seconds": 1}}}});
    assert_eq!(why(Start::Auto, hook, &app), None);
    let hook = json!({"lifecycle": {"postStart": {"httpGet": {"port": 80}}}});
    assert_eq!(
        why(Start::Replay, hook, &app).unwrap(),
        "app has a postStart hook"
    );
    let probe = json!({"startupProbe": {"exec": {"command": ["true"]}}});
    assert_eq!(
        why(Start::Auto, probe, &app).unwrap(),
        "app has a startup probe"
    );
    let probe = json!({"livenessProbe": {"exec": {"command": ["true"]}}});
    assert_eq!(
        why(Start::Replay, probe, &app).unwrap(),
        "app has a liveness probe"
    );
    let probe = json!({"readinessProbe": {"exec": {"command": ["true"]}}});
    assert_eq!(why(Start::Auto, probe, &app), None);
    let unhooked = Member {
        unhooked: true,
        ..app.clone()
    };
    assert_eq!(
        why(Start::Auto, json!({}), &unhooked).unwrap(),
        "the exit of app cannot be held"
    );
    let spec = pod(json!({}));
    let of = |count| blocker(Start::Replay, Some(&spec), &vec![&app; count], &[]);
    assert_eq!(of(32), None);
    assert_eq!(of(33), Some(ReplayBlocker::Many(33)));
    let absent = Member { old: None, ..app };
    assert_eq!(
        why(Start::Auto, json!({}), &absent).unwrap(),
        "app was not created yet"
    );
}

#[test]
fn what_leaves_nothing_to_replay_goes_before_a_container_that_is_the_kubelets() {
    let pod = json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"}, "spec": {
        "initContainers": [{"name": "first"}],
        "containers": [{"name": "app", "livenessProbe": {"exec": {"command": ["true"]}}}, {"name": "last"}],
    }});
    let pod = PodSpec::from_pod(&serde_json::from_value(pod).unwrap(), "n").unwrap();
    let first = member("first", ContainerKind::Init);
    let app = member("app", ContainerKind::Regular);
    let last = member("last", ContainerKind::Regular);
    let why = |last: &Member| blocker(Start::Auto, Some(&pod), &[&first, &app, last], &[]);
    let kubelets = why(&last).unwrap();
    assert_eq!(kubelets.container(), Some(&"app".into()));
    let unhooked = Member {
        unhooked: true,
        ..last
    };
    let nothing = why(&unhooked).unwrap();
    assert_eq!(nothing, ReplayBlocker::NotHeld("last".into()));
    assert_eq!(nothing.container(), None);
}

#[test]
fn a_pod_that_was_still_initialising_is_replayed_as_far_as_there_are_containers() {
    let pod = json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"}, "spec": {"containers": [{"name": "app"}]}});
    let pod = PodSpec::from_pod(&serde_json::from_value(pod).unwrap(), "n").unwrap();
    let why = |members: &[&Member]| blocker(Start::Auto, Some(&pod), members, &[]);
    let there = member("first", ContainerKind::Init);
    let absent = |name, kind| Member {
        old: None,
        ..member(name, kind)
    };
    let second = absent("second", ContainerKind::Init);
    let sidecar = member("sidecar", ContainerKind::Sidecar);
    let app = absent("app", ContainerKind::Regular);
    assert_eq!(why(&[&there, &second, &app]), None);
    // The kubelet has removed it.
    let gone = |name: &str| Some(ReplayBlocker::NeverCreated(name.into()));
    assert_eq!(why(&[&there, &second, &sidecar, &app]), gone("second"));
    // It was about to create all regular containers.
    let begun = member("begun", ContainerKind::Regular);
    assert_eq!(why(&[&there, &begun, &app]), gone("app"));
    assert_eq!(why(&[&begun, &app]), gone("app"));
}

#[test]
fn a_container_that_had_ended_for_good_is_not_replayed_behind_init_containers() {
    let pod = json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"}, "spec": {"containers": [{"name": "app"}]}});
    let pod = PodSpec::from_pod(&serde_json::from_value(pod).unwrap(), "n").unwrap();
    let why = |members: &[&Member]| blocker(Start::Auto, Some(&pod), members, &[]);
    let init = member("init", ContainerKind::Init);
    let mut app = member("app", ContainerKind::Regular);
    assert_eq!(why(&[&init, &app]), None);
    app.old = Some(Old {
        id: "c1".into(),
        exit: Some(ExitCode(0)),
    });
    assert_eq!(
        why(&[&init, &app]),
        Some(ReplayBlocker::Completed("app".into()))
    );
    assert_eq!(why(&[&app]), None);
    app.restart_policy = RestartPolicy::Always;
    assert_eq!(why(&[&init, &app]), None);
}

#[test]
fn init_containers_that_took_long_are_the_kubelets() {
    const LIMIT: Duration = Duration::from_millis(2500);
    let ran = |from_ms: i64, to_ms: i64| ContainerStatus {
        started_at: from_ms * 1_000_000,
        finished_at: to_ms * 1_000_000,
        exit_code: Some(ExitCode(0)),
        ..status(&sample())
    };
    let now = 10_000 * 1_000_000;
    assert_eq!(
        inits_are_quick(&[ran(5, 1000), ran(1000, 2500)], now, LIMIT),
        Ok(())
    );
    let slow = inits_are_quick(&[ran(1, 1501), ran(1000, 2001)], now, LIMIT).unwrap_err();
    assert_eq!(
        slow.to_string(),
        "the init containers took 2501 ms last time"
    );
    // One that has not ended.
    assert!(inits_are_quick(&[ran(9000, 0)], now, LIMIT).is_ok());
    assert!(inits_are_quick(&[ran(1000, 0)], now, LIMIT).is_err());
}

#[test]
fn a_log_is_linked_as_the_kubelet_links_it() {
    let link = log_link("web-0", "prod", &"app".into(), &"c1".into());
    assert_eq!(link, Path::new("/var/log/containers/web-0_prod_app-c1.log"));
    let long = log_link(&"x".repeat(250), "prod", &"app".into(), &"c1".into());
    assert_eq!(long.file_name().unwrap().len(), 255);
}
