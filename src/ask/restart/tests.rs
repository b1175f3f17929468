use std::future::{pending, ready};

use http::Method;
use serde_json::{Value, json};

use super::super::testing::{Call, Server, pod};
use super::*;
use crate::cli::{AskCommand, Cli, Command};

fn args(line: &str) -> RestartArgs {
    let words = format!("reprise restart {line}");
    let words = words.split_whitespace().map(Into::into);
    match Cli::from_arguments(words, false).unwrap().command {
        Command::Ask(AskCommand::Restart(args)) => args,
        other => panic!("{other:?}"),
    }
}

struct Said {
    end: Result<End, AskError>,
    out: String,
    err: String,
}

/// Runs a command line against an API server that does that.
async fn said<T>(
    line: &str,
    interrupted: impl Future<Output = ()>,
    serve: impl AsyncFnOnce(&mut Server) -> T,
) -> Said {
    let (client, mut server) = Server::new();
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let mut screen = Screen {
        out: &mut out,
        err: &mut err,
        bar: false,
        lines: true,
    };
    let args = args(line);
    let restart = run(&client, "n", &args, &mut screen, interrupted);
    let serve = async {
        let _unanswered = serve(&mut server).await;
        // Whatever else is asked for gets no answer either.
        pending::<()>().await;
    };
    let end = tokio::select! {
        end = restart => end,
        () = serve => unreachable!(),
    };
    let [out, err] = [out, err].map(|bytes| String::from_utf8(bytes).unwrap());
    Said { end, out, err }
}

/// Shows all pods, twice: as somebody sees who would watch them, and to who does.
async fn shows(server: &mut Server, pods: &[Value]) -> String {
    let call = server.next().await;
    let first = json!({"type": "ADDED", "object": pods[0]});
    let query = call.query.clone();
    assert!(query.contains("watch=true"), "{query}");
    call.events(&[first]);
    let call = server.next().await;
    let query = call.query.clone();
    call.list(pods);
    query
}

/// Takes a request, and returns its value.
async fn takes(server: &mut Server, name: &str) -> String {
    let call = server.next().await;
    let value = requested(&call, name);
    call.ok(&pod(name));
    value
}

fn requested(call: &Call, name: &str) -> String {
    assert_eq!(call.method, Method::PATCH);
    assert_eq!(call.path, format!("/api/v1/namespaces/n/pods/{name}"));
    assert_eq!(call.body["metadata"]["uid"], format!("uid-{name}"));
    let value = &call.body["metadata"]["annotations"][POD_REQUEST_KEY];
    value.as_str().unwrap().to_owned()
}

fn answered(name: &str, status: &str, token: &str) -> Value {
    let mut pod = pod(name);
    pod["metadata"]["annotations"] = json!({POD_REQUEST_KEY: token});
    pod["metadata"]["resourceVersion"] = json!("2");
    pod["status"]["conditions"] = json!([{
        "type": "reprise.dev/LastRestart", "status": status, "reason": "Restarted",
        "message": format!("Restart 1: requested, restarted in 143 ms by replay; answers request {token}"),
    }]);
    pod
}

fn changed(pod: &Value) -> Value {
    json!({"type": "MODIFIED", "object": pod})
}

#[tokio::test(start_paused = true)]
async fn without_wait_the_pods_are_asked_and_that_is_all() {
    let said = said("a b --now", pending(), async |server| {
        for name in ["a", "b"] {
            server.next().await.ok(&pod(name));
        }
        let mut values = Vec::new();
        for _ in 0..2 {
            let call = server.next().await;
            let name = call.path.rsplit('/').next().unwrap().to_owned();
            values.push(requested(&call, &name));
            call.ok(&pod(&name));
        }
        assert!(
            values[0].ends_with('!') && values[0] == values[1],
            "{values:?}"
        );
    });
    let said = said.await;
    assert_eq!(said.end.unwrap(), End::Well);
    assert!(
        said.out.starts_with("pod/a asked to restart, request 20"),
        "{}",
        said.out
    );
    assert_eq!(said.out.lines().count(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_pod_is_waited_for_until_its_answer() {
    let said = said("a --wait", pending(), async |server| {
        server.next().await.ok(&pod("a"));
        let query = shows(server, &[answered("a", "True", "before")]).await;
        assert!(query.contains("metadata.name%3Da"), "{query}");
        let token = takes(server, "a").await;
        let call = server.next().await;
        assert!(call.query.contains("watch=true"), "{}", call.query);
        call.events(&[
            changed(&answered("a", "True", "before")),
            changed(&answered("a", "True", &token)),
        ]);
    });
    let said = said.await;
    assert_eq!(said.end.unwrap(), End::Well);
    let last = said.out.lines().last().unwrap();
    assert!(
        last.starts_with("pod/a restarted: Restart 1: requested, restarted in 143 ms by replay; answers request 20"),
        "{last}"
    );
}

#[tokio::test(start_paused = true)]
async fn pods_take_turns_and_one_that_did_not_restart_is_the_last() {
    let said = said(
        "-l app=web --max-unavailable 1",
        pending(),
        async |server| {
            let pods = ["a", "b", "c"].map(pod);
            server.next().await.list(&pods);
            shows(server, &pods).await;
            let token = takes(server, "a").await;
            server
                .next()
                .await
                .events(&[changed(&answered("a", "True", &token))]);
            takes(server, "b").await;
            server
                .next()
                .await
                .events(&[changed(&answered("b", "False", &token))]);
        },
    );
    let said = said.await;
    assert_eq!(said.end.unwrap(), End::Failed);
    assert_eq!(said.err, "not asked: c\n");
    let lines: Vec<_> = said.out.lines().collect();
    assert_eq!(lines.len(), 4, "{lines:?}");
    assert!(
        lines[1].starts_with("pod/a restarted: ") && lines[3].starts_with("pod/b not restarted: ")
    );
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_never_answers_is_named_with_its_node() {
    let began = Instant::now();
    let said = said("a --wait --timeout 90s", pending(), async |server| {
        server.next().await.ok(&pod("a"));
        shows(server, &[pod("a")]).await;
        takes(server, "a").await;
        server.next().await
    });
    let said = said.await;
    assert_eq!(said.end.unwrap(), End::Late);
    assert_eq!(began.elapsed().as_secs(), 90);
    let last = said.out.lines().last().unwrap();
    assert_eq!(
        last,
        "pod/a not restarted in 1m30s: no answer: its node node-1 may be without the plugin"
    );
}

/// The first of two pods in turns has been asked as far as `asked` lets it, when somebody interrupts.
async fn is_interrupted_when<T>(asked: impl AsyncFnOnce(&mut Server) -> T) {
    let (interrupt, interrupted) = tokio::sync::oneshot::channel();
    let interrupted = async { interrupted.await.unwrap() };
    let said = said(
        "-l app=web --max-unavailable 1",
        interrupted,
        async |server| {
            let pods = ["a", "b"].map(pod);
            server.next().await.list(&pods);
            shows(server, &pods).await;
            let unanswered = asked(server).await;
            interrupt.send(()).unwrap();
            unanswered
        },
    );
    let said = said.await;
    assert_eq!(said.end.unwrap(), End::Interrupted);
    assert_eq!(
        said.err,
        "still under way (nothing stops that): a\nnot asked: b\n"
    );
}

#[tokio::test(start_paused = true)]
async fn who_interrupts_it_hears_what_goes_on() {
    is_interrupted_when(async |server| {
        takes(server, "a").await;
        server.next().await
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn what_is_on_its_way_when_somebody_interrupts_may_have_been_taken() {
    is_interrupted_when(async |server| {
        let call = server.next().await;
        requested(&call, "a");
        call
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn nobody_is_asked_who_could_not_be_waited_for() {
    let said = said("a --wait", pending(), async |server| {
        server.next().await.ok(&pod("a"));
        let message = "pods is forbidden: User \"u\" cannot watch resource \"pods\"";
        server.next().await.fails(403, message);
    });
    let said = said.await;
    let error = said.end.unwrap_err().to_string();
    assert!(
        error.starts_with("you may not watch pods in namespace n: "),
        "{error}"
    );
    assert_eq!((said.out.as_str(), said.err.as_str()), ("", ""));
}

#[tokio::test(start_paused = true)]
async fn nobody_is_asked_while_it_is_not_known_how_the_pods_are() {
    let began = Instant::now();
    let said = said("a --wait", pending(), async |server| {
        server.next().await.ok(&pod("a"));
        let call = server.next().await;
        call.events(&[json!({"type": "ADDED", "object": pod("a")})]);
        server.next().await
    });
    let said = said.await;
    let error = said.end.unwrap_err().to_string();
    assert_eq!(error, "the API server does not answer: not within 30 s");
    assert_eq!(began.elapsed().as_secs(), 30);
    assert_eq!(said.err, "not asked: a\n");
}

#[tokio::test(start_paused = true)]
async fn a_server_that_is_busy_is_asked_again_for_the_same() {
    let for_a_moment = said("a", pending(), async |server| {
        server.next().await.ok(&pod("a"));
        let call = server.next().await;
        let value = requested(&call, "a");
        call.fails(429, "too many requests");
        assert_eq!(takes(server, "a").await, value);
    });
    assert_eq!(for_a_moment.await.end.unwrap(), End::Well);
    let for_ever = said("a", pending(), async |server| {
        server.next().await.ok(&pod("a"));
        for _ in 0..=RETRIES {
            server.next().await.fails(429, "too many requests");
        }
    });
    let said = for_ever.await;
    assert_eq!(said.end.unwrap(), End::Failed);
    assert!(said.out.contains("too many requests"), "{}", said.out);
}

#[tokio::test(start_paused = true)]
async fn a_refusal_is_the_pods_own_but_a_missing_right_is_everybodys() {
    let refusing = async |code: u16, message: &str| {
        let said = said("a", pending(), async |server| {
            server.next().await.ok(&pod("a"));
            server.next().await.fails(code, message);
        });
        said.await
    };
    let gone = refusing(409, "the UID in the precondition").await;
    assert_eq!(gone.end.unwrap(), End::Failed);
    assert_eq!(
        gone.out,
        "pod/a not restarted: pod a cannot be restarted: it was deleted\n"
    );
    let refused = refusing(422, "a policy says no").await;
    assert_eq!(refused.end.unwrap(), End::Failed);
    assert!(refused.out.contains("a policy says no"), "{}", refused.out);
    let denied = refusing(403, "User \"u\" cannot patch resource \"pods\"").await;
    let denied = denied.end.unwrap_err().to_string();
    assert!(
        denied.starts_with("you may not patch pods in namespace n"),
        "{denied}"
    );
}

#[tokio::test(start_paused = true)]
async fn whoever_may_not_ask_has_asked_nobody() {
    let said = said("a --wait", pending(), async |server| {
        server.next().await.ok(&pod("a"));
        shows(server, &[pod("a")]).await;
        let message = "User \"u\" cannot patch resource \"pods\"";
        server.next().await.fails(403, message);
    });
    let said = said.await;
    assert!(matches!(said.end, Err(AskError::Denied { .. })));
    assert_eq!(said.err, "not asked: a\n");
}

#[tokio::test(start_paused = true)]
async fn a_dry_run_asks_the_api_server_alone() {
    let said = said("a --wait --dry-run", ready(()), async |server| {
        server.next().await.ok(&pod("a"));
        let call = server.next().await;
        assert!(call.query.contains("dryRun=All"), "{}", call.query);
        call.ok(&pod("a"));
    });
    let said = said.await;
    assert_eq!(said.end.unwrap(), End::Well);
    assert_eq!(said.out, "pod/a would be asked to restart (dry run)\n");
}

#[tokio::test(start_paused = true)]
async fn an_api_server_that_goes_away_is_waited_for() {
    let said = said("a --wait", pending(), async |server| {
        server.next().await.ok(&pod("a"));
        shows(server, &[pod("a")]).await;
        let token = takes(server, "a").await;
        for _ in 0..2 {
            server.next().await.fails(500, "etcd is away");
        }
        server
            .next()
            .await
            .events(&[changed(&answered("a", "True", &token))]);
    });
    let said = said.await;
    assert_eq!(said.end.unwrap(), End::Well);
    assert_eq!(
        said.err,
        "the API server does not answer: etcd is away; still waiting\n"
    );
}
