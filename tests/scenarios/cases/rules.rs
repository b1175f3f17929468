//! Which exit means what.

use anyhow::{Result, ensure};
use serde_json::{Value, json};

use crate::scenario::{Scenario, scenarios};
use crate::shape::{Shape, restart_all_on, rule};
use crate::stage::Stage;

pub(crate) fn scenarios() -> Vec<Scenario> {
    scenarios![Shared:
        never_pod_is_the_kubelets_when_no_rule_matches,
        always_pod_is_the_kubelets_when_no_rule_matches,
        not_in_matches_all_other_codes,
        first_matching_rule_wins,
        a_containers_own_rules_hide_those_of_the_pod,
        rules_of_the_pod_hold_for_each_container,
        rules_may_be_a_mapping_of_container_names,
        rules_may_be_yaml_in_the_form_of_the_kep,
        twenty_rules_of_255_values_are_not_too_many,
        rules_that_match_kills_are_told_of_once,
    ]
}

/// Plays the same exits in a pod with rules and in its twin without, and compares what is published.
async fn is_as_without_rules(stage: Stage, shape: Shape, exits: &[(&str, i32)]) -> Result<()> {
    let mut published = Vec::new();
    for shape in [shape.without_annotations(), shape] {
        let pod = stage.running(shape).await?;
        for (container, code) in exits {
            let before = pod.recorder.current();
            pod.exit(container, *code).await?;
            pod.recorder
                .until(
                    "the exit is published",
                    crate::wait::PATIENCE,
                    |now| match (
                        now.containers.get(*container),
                        before.containers.get(*container),
                    ) {
                        (Some(now), Some(then)) if now.state != then.state || now.id != then.id => {
                            None
                        }
                        _ => Some(format!("{container} is as before")),
                    },
                )
                .await?;
        }
        if pod.shape.policy == crate::shape::RestartPolicy::Always {
            pod.until_running().await?;
        }
        let now = pod.recorder.current();
        published.push(now);
    }
    let [without, with] = &published[..] else {
        anyhow::bail!("not two pods");
    };
    // Once a minute the kubelet collects what has exited, and with it the last state.
    let last = |then: &str, now: &str| then == now || then == "-" || now == "-";
    let same = without.containers.iter().all(|(name, then)| {
        let now = with.containers.get(name);
        now.is_some_and(|now| {
            (&then.state, then.restarts) == (&now.state, now.restarts)
                && last(&then.last_state, &now.last_state)
        })
    });
    ensure!(
        without.phase == with.phase && same,
        "the kubelet's own behaviour is {without}, with rules it is {with}"
    );
    Ok(())
}

async fn never_pod_is_the_kubelets_when_no_rule_matches(stage: Stage) -> Result<()> {
    let shape = Shape::never()
        .init("fetch")
        .regular("trainer")
        .regular("logger")
        .restarts_all("trainer", 42)
        .restarts_all("logger", 42);
    is_as_without_rules(stage, shape, &[("trainer", 7), ("logger", 0)]).await
}

async fn always_pod_is_the_kubelets_when_no_rule_matches(stage: Stage) -> Result<()> {
    let shape = Shape::always()
        .init("fetch")
        .regular("trainer")
        .regular("logger")
        .restarts_all("trainer", 42);
    is_as_without_rules(stage, shape, &[("trainer", 7)]).await
}

async fn not_in_matches_all_other_codes(stage: Stage) -> Result<()> {
    let rules = json!([rule("RestartAllContainers", "NotIn", &[0, 7])]);
    let shape = Shape::never()
        .regular("trainer")
        .regular("logger")
        .rules("trainer", &rules);
    let pod = stage.running(shape).await?;
    pod.restarts_all("trainer", 42).await?;
    pod.stays_down("trainer", 7).await
}

async fn first_matching_rule_wins(stage: Stage) -> Result<()> {
    let rules = json!([
        rule("Restart", "In", &[41, 42]),
        restart_all_on(&[42, 43]),
        rule("Restart", "In", &[43]),
    ]);
    let shape = Shape::never()
        .regular("trainer")
        .regular("logger")
        .rules("trainer", &rules);
    let pod = stage.running(shape).await?;
    pod.restarts_alone("trainer", 42).await?;
    pod.restarts_all("trainer", 43).await
}

async fn a_containers_own_rules_hide_those_of_the_pod(stage: Stage) -> Result<()> {
    let shape = Shape::never()
        .regular("trainer")
        .regular("logger")
        .regular("server")
        .restarts_all("trainer", 43)
        .annotation(
            "restart-rules.reprise.dev/pod",
            json!([restart_all_on(&[42])]).to_string(),
        );
    let pod = stage.running(shape).await?;
    pod.restarts_all("logger", 42).await?;
    pod.restarts_all("trainer", 43).await?;
    pod.stays_down("trainer", 42).await
}

async fn rules_of_the_pod_hold_for_each_container(stage: Stage) -> Result<()> {
    let rules: Value = json!([restart_all_on(&[42])]);
    let shape = Shape::never()
        .regular("trainer")
        .regular("logger")
        .annotation("restart-rules.reprise.dev", rules.to_string());
    let pod = stage.running(shape).await?;
    pod.restarts_all("trainer", 42).await?;
    pod.restarts_all("logger", 42).await
}

async fn rules_may_be_a_mapping_of_container_names(stage: Stage) -> Result<()> {
    let rules = json!({"trainer": [restart_all_on(&[42])], "logger": [restart_all_on(&[43])]});
    let shape = Shape::never()
        .regular("trainer")
        .regular("logger")
        .annotation("restart-rules.reprise.dev/pod", rules.to_string());
    let pod = stage.running(shape).await?;
    pod.restarts_all("logger", 43).await?;
    pod.stays_down("logger", 42).await
}

/// Its examples put `exitCodes` into `when` or `onExit`, and its API into neither.
async fn rules_may_be_yaml_in_the_form_of_the_kep(stage: Stage) -> Result<()> {
    for around in ["when", "onExit"] {
        let yaml = format!(
            "
- action: RestartAllContainers
  {around}:
    exitCodes:
      operator: In
      values: [42]
"
        );
        let shape = Shape::never()
            .regular("trainer")
            .regular("logger")
            .annotation("restart-rules.reprise.dev/container.trainer", &yaml);
        let pod = stage.running(shape).await?;
        pod.restarts_all("trainer", 42).await?;
    }
    Ok(())
}

async fn twenty_rules_of_255_values_are_not_too_many(stage: Stage) -> Result<()> {
    let mut rules = vec![restart_all_on(&[255]); 19];
    let values: Vec<i32> = (1..=255).collect();
    rules.push(restart_all_on(&values));
    let shape = Shape::never()
        .regular("trainer")
        .regular("logger")
        .rules("trainer", &json!(rules));
    stage
        .running(shape)
        .await?
        .restarts_all("trainer", 42)
        .await
}

async fn rules_that_match_kills_are_told_of_once(stage: Stage) -> Result<()> {
    let rules = json!([rule("RestartAllContainers", "NotIn", &[0])]);
    let shape = Shape::never()
        .regular("trainer")
        .rules("trainer", &rules)
        .regular("logger")
        .restarts_all("logger", 42);
    let pod = stage.running(shape).await?;
    pod.restarts_all("trainer", 3).await?;
    let told = pod.events("RulesMatchKills").await?;
    let messages: Vec<_> = told.iter().map(|it| (&it.message, it.count)).collect();
    let [(Some(message), None | Some(1))] = messages[..] else {
        anyhow::bail!("events: {messages:?}");
    };
    ensure!(message.starts_with("Rules of trainer match"), "{message}");
    Ok(())
}
