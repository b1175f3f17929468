//! Restarts that somebody asks for.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};
use serde_json::json;

use super::conditions::{LAST_RESTART, all_containers, condition};
use super::probes::probe;
use super::under;
use crate::plugin::Phase;
use crate::pod::LivePod;
use crate::restarted::Before;
use crate::runtime::{Container, describe};
use crate::scenario::{Scenario, scenarios};
use crate::shape::{Kind, RestartPolicy, Shape};
use crate::stage::Stage;
use crate::under_way::UnderWay;
use crate::wait::{self, PATIENCE};

/// Longer than the exits before it are held: only then the status says that containers wait.
const BACK_OFF: Duration = Duration::from_secs(40);
/// For how long nothing is to happen.
const WHILE: Duration = Duration::from_secs(3);

pub(crate) fn scenarios() -> Vec<Scenario> {
    use RestartPolicy::{Always, Never, OnFailure};
    let mut scenarios = under(
        &[Never, OnFailure, Always],
        "restarts_once_for_each_request",
        restarts_once_for_each,
    );
    scenarios.extend(under(
        &[Never, OnFailure, Always],
        "with_rules_for_grace_stops_its_containers_when_asked",
        stops_its_containers,
    ));
    scenarios.extend(scenarios![Shared:
        always_pod_without_rules_restarts_when_asked,
        request_in_a_back_off_waits_unless_it_is_urgent,
        request_that_cannot_be_shown_is_told_and_restarts_nothing,
        pod_that_was_made_with_a_request_restarts_at_the_next,
        request_while_nothing_but_a_sidecar_runs_waits_for_the_others,
        requests_at_once_and_in_the_middle_are_one_restart,
    ]);
    scenarios.extend(scenarios![Alone:
        request_is_answered_once_whatever_dies_in_the_middle,
        request_while_the_plugin_is_away_is_answered_once,
        answer_that_the_api_server_was_never_told_is_told_by_the_next_plugin,
        pods_that_are_asked_for_by_their_label_restart_in_turns,
    ]);
    scenarios
}

/// Writes the annotation, as `kubectl annotate` does.
pub(super) async fn ask(pod: &LivePod, value: &str) -> Result<()> {
    let annotations = json!({"restart-request.reprise.dev/pod": value});
    pod.patch(&json!({"metadata": {"annotations": annotations}}))
        .await
}

/// Waits until the condition that stays begins and ends so, and says that all runs, and until all that runs has begun.
async fn until_answered(pod: &LivePod, begin: &str, end: &str) -> Result<()> {
    wait::until("the request is answered", PATIENCE, async || {
        let last = condition(pod, LAST_RESTART).await?;
        let answers = last.as_ref().is_some_and(|it| {
            let message = it.message.as_deref().unwrap_or_default();
            let worded = message.starts_with(begin) && message.ends_with(end);
            it.status == "True" && it.reason.as_deref() == Some("Restarted") && worded
        });
        Ok(answers.then_some(()).ok_or_else(|| format!("{last:?}")))
    })
    .await?;
    for container in pod.shape.of_kind(Kind::Regular) {
        pod.until_listening(container.name).await?;
    }
    Ok(())
}

/// The same of a restart that was begun for that request.
async fn until_request_answered(pod: &LivePod, number: u32, value: &str) -> Result<()> {
    let begin = format!("Restart {number}: requested, restarted in ");
    until_answered(pod, &begin, &format!("; answers request {value}")).await
}

/// Nothing of the pod is started for a while.
async fn nothing_happens(pod: &LivePod) -> Result<()> {
    let evidence = pod.evidence()?.len();
    tokio::time::sleep(WHILE).await;
    ensure!(pod.evidence()?.len() == evidence, "something happened");
    Ok(())
}

async fn restarts_once_for_each(stage: Stage, shape: Shape) -> Result<()> {
    let kind = all_containers(&stage).await?;
    let shape = shape
        .init("fetch")
        .regular("trainer")
        .regular("logger")
        .restarts_all("trainer", 42);
    let pod = stage.running(shape).await?;
    for (number, value) in [(1, "first"), (2, "second, of the kind: that has spaces")] {
        let before = Before::of(&pod).await?;
        ask(&pod, value).await?;
        pod.has_restarted(&before).await?;
        let told = pod.told_since(&before, kind);
        let wanted = format!("Restart requested with value {value}, triggering pod restart");
        let said = told
            .iter()
            .all(|(_, it)| it.message == wanted && it.reason == "RestartRequested");
        ensure!(
            told.len() == 2 && said,
            "the condition was seen as {told:?}"
        );
        until_request_answered(&pod, number, value).await?;
    }
    // The same value again is no request.
    ask(&pod, "second, of the kind: that has spaces").await?;
    nothing_happens(&pod).await?;
    // What was asked for is no crash: the pod waits for nothing.
    pod.restarted("trainer", 42).await?;
    let waited = stage.plugin.log_lines(&pod.name)?;
    let waited = waited.iter().find(|it| it.contains("backing off"));
    ensure!(waited.is_none(), "it has backed off: {waited:?}");
    until_answered(&pod, "Restart 3: container trainer exited with code 42", "").await
}

async fn stops_its_containers(stage: Stage, shape: Shape) -> Result<()> {
    let shape = shape
        .regular("trainer")
        .regular("logger")
        .with_pre_stop()
        .grace_period_seconds(10)
        .restarts_pod("trainer", 42);
    let pod = stage.running(shape).await?;
    let before = Before::of(&pod).await?;
    ask(&pod, "a").await?;
    pod.has_restarted(&before).await?;
    let warned = pod.evidence_since(&before)?;
    let warned = warned
        .iter()
        .filter(|it| it.deed == crate::evidence::Deed::Warned);
    ensure!(warned.count() == 2, "not all preStop hooks ran");
    until_request_answered(&pod, 1, "a").await
}

async fn always_pod_without_rules_restarts_when_asked(stage: Stage) -> Result<()> {
    let shape = Shape::always()
        .init("fetch")
        .regular("trainer")
        .regular("logger");
    let pod = stage.running(shape).await?;
    let before = Before::of(&pod).await?;
    ask(&pod, "a").await?;
    pod.has_restarted(&before).await?;
    until_request_answered(&pod, 1, "a").await
}

async fn request_in_a_back_off_waits_unless_it_is_urgent(stage: Stage) -> Result<()> {
    let shape = Shape::never()
        .regular("trainer")
        .regular("logger")
        .restarts_all("trainer", 42)
        .started_by("Auto")
        .backs_off(BACK_OFF.as_secs());
    for (value, waits) in [("patient", true), ("urgent!", false)] {
        let pod = stage.running(shape.clone()).await?;
        let before = Before::of(&pod).await?;
        pod.exit("trainer", 42).await?;
        pod.has_restarted(&before).await?;
        let before = Before::of(&pod).await?;
        pod.exit("trainer", 42).await?;
        pod.until_state("logger", "waiting").await?;
        let asked = SystemTime::now().duration_since(UNIX_EPOCH)?;
        ask(&pod, value).await?;
        pod.has_restarted(&before).await?;
        let begin = "Restart 2: container trainer exited with code 42 (rule 1), restarted in ";
        until_answered(&pod, begin, &format!("; answers request {value}")).await?;
        if waits {
            let evidence = pod.evidence_since(&before)?;
            let (first, last) = evidence
                .first()
                .zip(evidence.last())
                .context("no evidence")?;
            let gap = last.at.saturating_sub(first.at);
            ensure!(gap > BACK_OFF / 4, "{value} has not waited: {evidence:?}");
        } else {
            pod.ran_soon_after(asked, &before, BACK_OFF / 2)
                .context(value)?;
        }
    }
    Ok(())
}

async fn request_that_cannot_be_shown_is_told_and_restarts_nothing(stage: Stage) -> Result<()> {
    let pod = Shape::never()
        .regular("trainer")
        .restarts_all("trainer", 42);
    let pod = stage.running(pod).await?;
    let long = "x".repeat(129);
    for (value, why) in [
        ("", "is empty"),
        (&*long, "has 129 bytes"),
        ("a\nb", "line breaks"),
    ] {
        ask(&pod, value).await?;
        pod.until_told("InvalidRestartRequest", why).await?;
    }
    nothing_happens(&pod).await
}

async fn pod_that_was_made_with_a_request_restarts_at_the_next(stage: Stage) -> Result<()> {
    let shape = Shape::never()
        .regular("trainer")
        .restarts_all("trainer", 42)
        .annotation("restart-request.reprise.dev/pod", "of-the-template");
    let pod = stage.running(shape).await?;
    nothing_happens(&pod).await?;
    let before = Before::of(&pod).await?;
    ask(&pod, "next").await?;
    pod.has_restarted(&before).await
}

/// It starts already: whatever begins by then, begins anew with it.
async fn request_while_nothing_but_a_sidecar_runs_waits_for_the_others(stage: Stage) -> Result<()> {
    let shape = Shape::never()
        .sidecar("proxy")
        .at_first("(sleep 8; touch /up) &")
        .field(
            "startupProbe",
            probe("test -e /up", json!({"failureThreshold": 30})),
        )
        .regular("trainer")
        .restarts_all("trainer", 42);
    let pod = stage.pod(shape).await?;
    pod.until_listening("proxy").await?;
    ask(&pod, "early").await?;
    nothing_happens(&pod).await?;
    until_request_answered(&pod, 1, "early").await?;
    // The trainer may have been ended before it said anything, but not before it was started.
    let containers = pod.containers().await?;
    let attempts = ["proxy", "trainer"].map(|name| {
        let of_name = containers.iter().filter(|it| it.name() == name);
        of_name.map(Container::attempt).max()
    });
    let again = attempts.iter().all(|it| *it >= Some(1));
    ensure!(again, "{}", describe(&containers));
    nothing_happens(&pod).await
}

/// All of them while its containers take their time to stop.
async fn requests_at_once_and_in_the_middle_are_one_restart(stage: Stage) -> Result<()> {
    let shape = Shape::never()
        .regular("trainer")
        .regular("logger")
        .on_term(r#"say "note asked"; sleep 3; exit 0"#)
        .grace_period_seconds(10)
        .restarts_pod("trainer", 42);
    let pod = stage.running(shape).await?;
    let before = Before::of(&pod).await?;
    ask(&pod, "a").await?;
    ask(&pod, "b").await?;
    pod.notes().await?;
    ask(&pod, "c").await?;
    pod.has_restarted(&before).await?;
    until_request_answered(&pod, 1, "c").await?;
    nothing_happens(&pod).await
}

/// Told by the record, in as many phases as a pod goes through that the kubelet starts.
async fn request_is_answered_once_whatever_dies_in_the_middle(stage: Stage) -> Result<()> {
    let shape = Shape::never()
        .init("fetch")
        .regular("trainer")
        .regular("logger")
        .restarts_all("trainer", 42)
        .started_by("Kubelet");
    for (phase, kubelet) in [
        (Phase::Down, false),
        (Phase::Shielded, false),
        (Phase::Up, false),
        (Phase::Down, true),
    ] {
        let pod = stage.running(shape.clone()).await?;
        let restart = UnderWay {
            before: Before::of(&pod).await?,
            pod: Arc::clone(&pod),
        };
        ask(&pod, "a").await?;
        restart.reaches(phase).await?;
        if kubelet {
            stage.node.start_again("kubelet").await?;
        } else {
            stage.plugin.kill().await?;
            stage.plugin.start().await?;
        }
        // What starts while nobody is asked may begin anew: it is over when it is answered.
        until_request_answered(&pod, 1, "a").await?;
        pod.has_recovered(&restart.before).await?;
        nothing_happens(&pod).await?;
    }
    Ok(())
}

async fn request_while_the_plugin_is_away_is_answered_once(stage: Stage) -> Result<()> {
    let shape = Shape::always()
        .regular("trainer")
        .regular("logger")
        .restarts_all("trainer", 42);
    let pod = stage.running(shape).await?;
    let before = Before::of(&pod).await?;
    stage.plugin.kill().await?;
    ask(&pod, "a").await?;
    stage.plugin.start().await?;
    pod.has_restarted(&before).await?;
    until_request_answered(&pod, 1, "a").await?;
    stage.plugin.kill().await?;
    stage.plugin.start().await?;
    stage.plugin.until_ready(1).await?;
    nothing_happens(&pod).await
}

/// The answer is all that is lost: the restart was over.
async fn answer_that_the_api_server_was_never_told_is_told_by_the_next_plugin(
    stage: Stage,
) -> Result<()> {
    let shape = Shape::never()
        .regular("trainer")
        .regular("logger")
        .ignoring_term()
        .restarts_pod("trainer", 42)
        .options(&json!({"gracePeriodSeconds": 3}));
    let pod = stage.running(shape).await?;
    let restart = UnderWay {
        before: Before::of(&pod).await?,
        pod: Arc::clone(&pod),
    };
    ask(&pod, "a").await?;
    restart.reaches(Phase::Down).await?;
    stage.node.script("kill", "apiserver").await?;
    let over = async {
        wait::until("the restart is over", PATIENCE, async || {
            let lines = pod.plugin.log_lines(&pod.name)?;
            let over = lines
                .iter()
                .any(|it| it.contains("all containers run again"));
            Ok(over.then_some(()).ok_or_else(|| "it is not".to_owned()))
        })
        .await?;
        stage.plugin.kill().await?;
        stage.plugin.start().await
    };
    let over = over.await;
    stage.node.script("start", "apiserver").await?;
    over?;
    until_request_answered(&pod, 1, "a").await?;
    nothing_happens(&pod).await
}

async fn pods_that_are_asked_for_by_their_label_restart_in_turns(stage: Stage) -> Result<()> {
    let shape = Shape::never()
        .regular("trainer")
        .restarts_all("trainer", 42);
    let mut pods = Vec::new();
    for _ in 0..3 {
        let pod = stage.running(shape.clone()).await?;
        pod.patch(&json!({"metadata": {"labels": {"asked": "yes"}}}))
            .await?;
        pods.push((Before::of(&pod).await?, pod));
    }
    let in_turns = ["--max-unavailable", "1", "-l"];
    let restart = async |labels| {
        stage
            .ask_for_restart(&[&in_turns[..], &[labels]].concat())
            .await
    };
    let nobody = restart("asked=no").await?;
    ensure!(nobody.status.code() == Some(1), "{nobody:?}");
    let done = restart("asked=yes").await?;
    let said =
        String::from_utf8_lossy(&done.stdout).into_owned() + &String::from_utf8_lossy(&done.stderr);
    ensure!(done.status.success(), "{said}");
    for (before, pod) in &pods {
        ensure!(
            said.contains(&pod.name),
            "{} is not named: {said}",
            pod.name
        );
        pod.has_restarted(before).await?;
    }
    let (begins, ends) = ("restarting all containers", "all containers run again");
    let mut log = stage.plugin.log_lines(" in place, ")?;
    log.extend(stage.plugin.log_lines(ends)?);
    log.retain(|line| pods.iter().any(|(_, pod)| line.contains(&pod.name)));
    // Each line begins with its time.
    log.sort_unstable();
    let in_turns = log.chunks(2).all(|turn| {
        let [begin, end] = turn else { return false };
        let mut names = pods.iter().map(|(_, pod)| &pod.name);
        let of_one = names.any(|name| begin.contains(name) && end.contains(name));
        of_one && begin.contains(begins) && end.contains(ends)
    });
    ensure!(in_turns && log.len() == 6, "not in turns: {log:#?}");
    Ok(())
}
