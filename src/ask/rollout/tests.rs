use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::*;

const LIMIT: Duration = Duration::from_mins(5);

fn fit(name: &str) -> Fit {
    Fit {
        name: name.to_owned(),
        uid: format!("uid-{name}"),
        node: "node-1".to_owned(),
        request: Some("t0".to_owned()),
        answered: None,
        ready: false,
        running: BTreeSet::new(),
        named: false,
    }
}

/// Some pods, and the value that they are asked with.
fn rollout(names: &[&str], most: usize) -> (Rollout, String) {
    let value = "t1".to_owned();
    let pods = names.iter().map(|name| fit(name)).collect();
    (Rollout::new(pods, value.clone(), most, LIMIT), value)
}

/// One pod that has been asked.
fn asked() -> (Rollout, String, Instant) {
    let (mut rollout, token) = rollout(&["a"], 1);
    let now = Instant::now();
    rollout.asked(0, now);
    (rollout, token, now)
}

fn pod(name: &str, request: &str, conditions: &Value) -> Pod {
    serde_json::from_value(json!({
        "metadata": {"name": name, "uid": format!("uid-{name}"), "annotations": {"restart-request.reprise.dev/pod": request}},
        "spec": {"nodeName": "node-1", "containers": []},
        "status": {"phase": "Running", "conditions": conditions},
    }))
    .unwrap()
}

fn last(status: &str, message: &str) -> Value {
    let reason = if status == "True" {
        "Restarted"
    } else {
        "TimedOut"
    };
    json!([{"type": "reprise.dev/LastRestart", "status": status, "reason": reason, "message": message}])
}

fn restarted(name: &str, token: &str) -> Pod {
    pod(
        name,
        token,
        &last(
            "True",
            &format!("Restart 1: requested, restarted; answers request {token}"),
        ),
    )
}

#[test]
fn a_pod_that_was_ready_is_waited_for_until_it_is_again() {
    let mut ready = fit("a");
    ready.ready = true;
    let value = "t1".to_owned();
    let mut rollout = Rollout::new(vec![ready], value.clone(), 1, LIMIT);
    let now = Instant::now();
    rollout.asked(0, now);
    let seen = |ready: &str, phase: &str| {
        let message = format!("Restart 1: requested, restarted; answers request {value}");
        let mut conditions = last("True", &message);
        let conditions = conditions.as_array_mut().unwrap();
        conditions.push(json!({"type": "Ready", "status": ready}));
        let mut pod = pod("a", &value, &json!(conditions));
        pod.status.as_mut().unwrap().phase = Some(phase.to_owned());
        pod
    };
    assert_eq!(rollout.see(&seen("False", "Running")), None);
    // What has done its work is not ready any more.
    let mut other = Rollout::new(vec![rollout.pod(0).clone()], value.clone(), 1, LIMIT);
    other.asked(0, now);
    assert_eq!(other.see(&seen("False", "Succeeded")), Some(0));
    assert_eq!(rollout.expire(now + LIMIT), [0]);
    let Some(Outcome::Late(why)) = rollout.outcome(0) else {
        panic!("it is not late");
    };
    assert!(why.contains("has restarted, and is not ready"), "{why}");
    let mut again = Rollout::new(vec![rollout.pod(0).clone()], value.clone(), 1, LIMIT);
    again.asked(0, now);
    assert_eq!(again.see(&seen("True", "Running")), Some(0));
}

/// A pod with one container, which runs under that ID, and is ready.
fn running(value: &str, id: &str) -> Pod {
    let message = format!("Restart 1: requested, restarted; answers request {value}");
    let mut conditions = last("True", &message);
    let conditions = conditions.as_array_mut().unwrap();
    conditions.push(json!({"type": "Ready", "status": "True"}));
    let mut pod = pod("a", value, &json!(conditions));
    let status = json!([{
        "name": "x", "containerID": id, "image": "", "imageID": "", "ready": true, "restartCount": 0,
        "state": {"running": {}},
    }]);
    pod.status.as_mut().unwrap().container_statuses = serde_json::from_value(status).unwrap();
    pod
}

#[test]
fn a_pod_is_not_taken_for_ready_by_what_ran_before() {
    let (mut rollout, value) = rollout(&["a"], 1);
    assert_eq!(rollout.see(&running("t0", "old")), None);
    rollout.asked(0, Instant::now());
    // The plugin was faster than the kubelet.
    assert_eq!(rollout.see(&running(&value, "old")), None);
    assert_eq!(rollout.see(&running(&value, "new")), Some(0));
}

#[test]
fn a_pod_that_goes_before_its_turn_fails_only_whoever_has_named_it() {
    let goes = |named: bool, goes: fn(&mut Rollout) -> Option<usize>| {
        let (mut rollout, _) = rollout(&["a"], 1);
        rollout.pods[0].0.named = named;
        assert_eq!(goes(&mut rollout), Some(0));
        assert!(rollout.is_over());
        let counts = rollout.counts();
        assert_eq!(counts.not_restarted, usize::from(named));
        assert_eq!(counts.all, usize::from(named));
        let outcome = rollout.outcome(0);
        let left = matches!(outcome, Some(Outcome::LeftAlone(_)));
        assert_eq!(left, !named, "{outcome:?}");
    };
    for named in [true, false] {
        goes(named, |rollout| {
            let mut ended = pod("a", "t0", &json!([]));
            ended.status.as_mut().unwrap().phase = Some("Succeeded".to_owned());
            rollout.see(&ended)
        });
        goes(named, |rollout| {
            let mut other = pod("a", "t0", &json!([]));
            other.metadata.uid = Some("another".to_owned());
            rollout.see(&other)
        });
        goes(named, |rollout| rollout.gone(&pod("a", "t0", &json!([]))));
        goes(named, |rollout| rollout.only(&HashSet::new()).pop());
    }
}

#[test]
fn all_pods_are_asked_at_once_unless_some_must_stay() {
    let (rollout, _) = rollout(&["a", "b", "c"], 3);
    assert_eq!(rollout.next(), [0, 1, 2]);
    assert!(!rollout.is_over());
}

#[test]
fn no_more_than_so_many_are_under_way() {
    let (mut rollout, token) = rollout(&["a", "b", "c"], 2);
    let now = Instant::now();
    assert_eq!(rollout.next(), [0, 1]);
    rollout.asked(0, now);
    rollout.asked(1, now);
    assert!(rollout.next().is_empty() && !rollout.is_over());
    assert_eq!(rollout.see(&restarted("b", &token)), Some(1));
    assert_eq!(rollout.next(), [2]);
    rollout.asked(2, now);
    assert_eq!(rollout.unfinished(), (vec!["a", "c"], vec![]));
    assert_eq!(rollout.see(&restarted("a", &token)), Some(0));
    assert_eq!(rollout.see(&restarted("c", &token)), Some(2));
    assert!(rollout.is_over());
    assert_eq!(rollout.counts().restarted, 3);
}

#[test]
fn nobody_is_asked_after_one_that_has_not_restarted() {
    let (mut rollout, token) = rollout(&["a", "b", "c"], 2);
    let now = Instant::now();
    rollout.asked(0, now);
    rollout.asked(1, now);
    let not = pod(
        "a",
        &token,
        &last(
            "False",
            &format!("Restart 1: requested; answers request {token}"),
        ),
    );
    assert_eq!(rollout.see(&not), Some(0));
    assert!(rollout.next().is_empty());
    // The other is still waited for.
    assert!(!rollout.is_over());
    assert_eq!(rollout.see(&restarted("b", &token)), Some(1));
    assert!(rollout.is_over());
    assert_eq!(rollout.unfinished(), (vec![], vec!["c"]));
}

#[test]
fn an_answer_has_the_value_and_says_how_it_ended() {
    let (mut rollout, token, _) = asked();
    for other in [
        json!([]),
        last(
            "True",
            "Restart 1: requested, restarted; answers request t0",
        ),
        last(
            "True",
            &format!("Restart 1: requested, restarted; answers request {token}x"),
        ),
    ] {
        assert_eq!(rollout.see(&pod("a", &token, &other)), None, "{other}");
    }
    let message = format!("Restart 2: container x exited with code 42; answers request {token}");
    let not = pod("a", &token, &last("False", &message));
    assert_eq!(rollout.see(&not), Some(0));
    let expected = Outcome::NotRestarted(format!("TimedOut: {message}"));
    assert_eq!(rollout.outcome(0), Some(&expected));
    // It is told once.
    assert_eq!(rollout.see(&restarted("a", &token)), None);
}

#[test]
fn whoever_answers_a_later_request_answers_this_one() {
    let (mut rollout, _, _) = asked();
    // The value from before, of which an old answer tells.
    let before = pod(
        "a",
        "t0",
        &last(
            "True",
            "Restart 1: requested, restarted; answers request t0",
        ),
    );
    assert_eq!(rollout.see(&before), None);
    let later = pod(
        "a",
        "t9!",
        &last(
            "True",
            "Restart 1: requested, restarted; answers request t0",
        ),
    );
    assert_eq!(rollout.see(&later), None);
    let later = pod(
        "a",
        "t9!",
        &last(
            "True",
            "Restart 2: requested, restarted; answers request t9!",
        ),
    );
    assert_eq!(rollout.see(&later), Some(0));
}

#[test]
fn what_others_asked_before_it_was_its_turn_is_no_later_request() {
    let (mut rollout, _) = rollout(&["a"], 1);
    let answer = last(
        "True",
        "Restart 2: requested, restarted; answers request t5",
    );
    assert_eq!(rollout.see(&pod("a", "t5", &answer)), None);
    rollout.asked(0, Instant::now());
    assert_eq!(rollout.see(&pod("a", "t5", &answer)), None);
}

#[test]
fn what_had_been_answered_when_the_request_was_taken_is_no_answer_to_it() {
    let (mut rollout, value, _) = asked();
    let answered = last(
        "True",
        "Restart 2: requested, restarted; answers request t5",
    );
    rollout.taken(0, &pod("a", &value, &answered), Instant::now());
    // Of a moment before.
    assert_eq!(rollout.see(&pod("a", "t5", &answered)), None);
    assert_eq!(rollout.see(&restarted("a", &value)), Some(0));
}

#[test]
fn a_pod_that_ends_or_goes_is_not_waited_for() {
    let why = |outcome: Option<&Outcome>| match outcome {
        Some(Outcome::NotRestarted(why)) => why.clone(),
        other => panic!("{other:?}"),
    };
    let (mut rollout, token, _) = asked();
    let mut ended = pod("a", &token, &json!([]));
    ended.status.as_mut().unwrap().phase = Some("Failed".to_owned());
    assert_eq!(rollout.see(&ended), Some(0));
    assert_eq!(why(rollout.outcome(0)), "it has ended (Failed)");

    let (mut rollout, token, _) = asked();
    let mut other = pod("a", &token, &last("True", &format!("Restart 1: {token}")));
    other.metadata.uid = Some("another".to_owned());
    assert_eq!(rollout.gone(&other), None);
    assert_eq!(rollout.see(&other), Some(0));
    assert_eq!(why(rollout.outcome(0)), "it has been replaced");

    let (mut rollout, token, _) = asked();
    assert_eq!(rollout.gone(&pod("b", &token, &json!([]))), None);
    assert_eq!(rollout.gone(&pod("a", &token, &json!([]))), Some(0));
    assert_eq!(why(rollout.outcome(0)), "it was deleted");

    let (mut rollout, ..) = asked();
    assert!(rollout.only(&HashSet::from(["a".to_owned()])).is_empty());
    assert_eq!(rollout.only(&HashSet::new()), [0]);
    assert_eq!(why(rollout.outcome(0)), "it was deleted");
}

#[test]
fn an_end_does_not_hide_an_answer() {
    let (mut rollout, token, _) = asked();
    let mut ended = restarted("a", &token);
    ended.status.as_mut().unwrap().phase = Some("Succeeded".to_owned());
    assert_eq!(rollout.see(&ended), Some(0));
    assert!(matches!(rollout.outcome(0), Some(Outcome::Restarted(_))));
}

#[test]
fn each_pod_has_its_own_time() {
    let (mut rollout, token) = rollout(&["a", "b", "c"], 3);
    let now = Instant::now();
    assert_eq!(rollout.deadline(), None);
    for (index, seconds) in [(0, 0), (1, 10), (2, 20)] {
        rollout.asked(index, now + Duration::from_secs(seconds));
    }
    assert_eq!(rollout.deadline(), Some(now + LIMIT));
    assert!(
        rollout
            .expire(now + LIMIT - Duration::from_secs(1))
            .is_empty()
    );
    let message = "Restart requested with value t, triggering pod restart";
    let under_way = json!([{"type": "PodRestarting", "status": "True", "message": message}]);
    assert_eq!(rollout.see(&pod("b", &token, &under_way)), None);
    assert_eq!(rollout.see(&restarted("c", &token)), Some(2));
    assert_eq!(
        rollout.expire(now + LIMIT + Duration::from_secs(15)),
        [0, 1]
    );
    let late = |index| match rollout.outcome(index) {
        Some(Outcome::Late(why)) => why.clone(),
        other => panic!("{other:?}"),
    };
    assert_eq!(
        late(0),
        "no answer: its node node-1 may be without the plugin"
    );
    assert_eq!(late(1), format!("it is still under way: {message}"));
    assert!(rollout.is_over());
    assert_eq!(rollout.deadline(), None);
}
