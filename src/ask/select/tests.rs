use serde_json::{Value, json};

use super::super::testing::{Call, Server, pod};
use super::*;

/// What comes of a command line, where the API server answers so to each request.
async fn found(
    targets: &[&str],
    selector: Option<&str>,
    answers: Vec<Box<dyn FnOnce(Call)>>,
) -> Result<Selection, AskError> {
    let (client, mut server) = Server::new();
    let targets: Vec<Target> = targets.iter().map(|it| it.parse().unwrap()).collect();
    let selector = selector.map(|it| it.parse().unwrap());
    let serve = async {
        for answer in answers {
            answer(server.next().await);
        }
    };
    tokio::join!(find(&client, "n", &targets, selector.as_ref()), serve).0
}

fn names(selection: &Selection) -> Vec<&str> {
    selection.pods.iter().map(|pod| pod.name.as_str()).collect()
}

fn lists(query: &'static str, pods: Vec<Value>) -> Box<dyn FnOnce(Call)> {
    Box::new(move |call| {
        assert_eq!(call.path, "/api/v1/namespaces/n/pods");
        assert!(call.query.contains(query), "{}", call.query);
        call.list(&pods);
    })
}

fn ended(name: &str) -> Value {
    let mut pod = pod(name);
    pod["status"]["phase"] = json!("Succeeded");
    pod
}

#[tokio::test]
async fn pods_are_looked_for_by_name_and_jobs_by_their_label() {
    let get = |name: &'static str| -> Box<dyn FnOnce(Call)> {
        Box::new(move |call: Call| {
            assert_eq!(call.path, format!("/api/v1/namespaces/n/pods/{name}"));
            call.ok(&pod(name));
        })
    };
    let one = found(&["b"], None, vec![get("b")]).await.unwrap();
    assert_eq!(names(&one), ["b"]);
    assert_eq!(one.watch.field_selector.as_deref(), Some("metadata.name=b"));

    let label = "labelSelector=batch.kubernetes.io%2Fjob-name%3Dj";
    let of_job = || lists(label, vec![pod("a"), pod("b")]);
    let job = found(&["job/j"], None, vec![of_job()]).await.unwrap();
    assert_eq!(names(&job), ["a", "b"]);
    let watched = job.watch.label_selector.as_deref();
    assert_eq!(watched, Some("batch.kubernetes.io/job-name=j"));

    // Each of them once, and all of the namespace is watched.
    let both = found(&["b", "job/j"], None, vec![get("b"), of_job()]).await;
    let both = both.unwrap();
    assert_eq!(names(&both), ["a", "b"]);
    let watched = (&both.watch.label_selector, &both.watch.field_selector);
    assert_eq!(watched, (&None, &None));
}

#[tokio::test]
async fn a_deployment_says_which_pods_it_has() {
    let deployment = |selector: Value| -> Box<dyn FnOnce(Call)> {
        Box::new(move |call: Call| {
            assert_eq!(call.path, "/apis/apps/v1/namespaces/n/deployments/web");
            call.ok(&json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "web"}, "spec": {"selector": selector}}));
        })
    };
    let selector = json!({"matchLabels": {"app": "web"}, "matchExpressions": [{"key": "old", "operator": "DoesNotExist"}]});
    let answers = vec![
        deployment(selector),
        lists("labelSelector=app%3Dweb%2C%21old", vec![pod("a")]),
    ];
    let selection = found(&["deployment/web"], None, answers).await.unwrap();
    assert_eq!(names(&selection), ["a"]);
    // All pods of the namespace are never meant.
    let error = found(&["deployment/web"], None, vec![deployment(json!({}))]).await;
    assert!(matches!(error, Err(AskError::NoMatch { .. })), "{error:?}");
    let missing: Box<dyn FnOnce(Call)> = Box::new(|call| call.fails(404, "no"));
    let error = found(&["deployment/web"], None, vec![missing]).await;
    let error = error.unwrap_err().to_string();
    assert_eq!(error, "there is no deployment/web in namespace n");
}

#[tokio::test]
async fn of_selected_pods_those_that_cannot_restart_are_left_alone() {
    let pods = || vec![pod("a"), ended("b")];
    let selection = found(&[], Some("app=web"), vec![lists("app%3Dweb", pods())]).await;
    let selection = selection.unwrap();
    assert_eq!(names(&selection), ["a"]);
    let left = ("b".to_owned(), "has ended (Succeeded)".to_owned());
    assert_eq!(selection.left_alone, [left]);
    let none = vec![lists("app%3Dweb", vec![ended("b")])];
    let error = found(&[], Some("app=web"), none).await.unwrap_err();
    assert_eq!(
        error.to_string(),
        "none of the pods that match -l app=web can be restarted: b has ended (Succeeded)"
    );
}

#[tokio::test]
async fn what_is_not_there_is_said() {
    for (targets, selector, what) in [
        (&["job/j"][..], None, "job/j"),
        (&[], Some("app=web"), "-l app=web"),
    ] {
        let error = found(targets, selector, vec![lists("", Vec::new())]).await;
        let error = error.unwrap_err().to_string();
        assert_eq!(error, format!("no pods in namespace n match {what}"));
    }
    let get = |answer: fn(Call)| found(&["b"], None, vec![Box::new(answer)]);
    let error = get(|call| call.fails(404, "no")).await.unwrap_err();
    assert_eq!(error.to_string(), "there is no pod b in namespace n");
    let error = get(|call| call.ok(&ended("b"))).await.unwrap_err();
    assert_eq!(
        error.to_string(),
        "pod b cannot be restarted: it has ended (Succeeded)"
    );
}

#[tokio::test]
async fn a_missing_right_and_a_bad_selector_are_told_apart() {
    let list = |answer: fn(Call)| found(&[], Some("a=="), vec![Box::new(answer)]);
    let denied = list(|call| {
        call.fails(
            403,
            "pods is forbidden: User \"u\" cannot list resource \"pods\"",
        );
    });
    let denied = denied.await.unwrap_err().to_string();
    assert!(
        denied.starts_with("you may not list pods in namespace n: "),
        "{denied}"
    );
    let bad = list(|call| call.fails(400, "unable to parse requirement"));
    let bad = bad.await.unwrap_err().to_string();
    assert_eq!(
        bad,
        "the API server refuses to list pods in namespace n: unable to parse requirement"
    );
}

#[tokio::test]
async fn long_lists_are_read_to_their_end() {
    let page =
        |more: &'static str, name: &'static str, query: &'static str| -> Box<dyn FnOnce(Call)> {
            Box::new(move |call: Call| {
                assert!(call.query.contains(query), "{}", call.query);
                call.ok(
                &json!({"kind": "PodList", "metadata": {"continue": more}, "items": [pod(name)]}),
            );
            })
        };
    let pages = vec![
        page("next", "a", "limit=500"),
        page("", "b", "continue=next"),
    ];
    let selection = found(&[], Some("x"), pages).await.unwrap();
    assert_eq!(names(&selection), ["a", "b"]);
}
