//! What annotations mean, as users write them.

use nix::sys::signal::Signal;
use proptest::prelude::*;

use super::rules::tests::{any_action, any_rule};
use super::*;

const OWN: &str = "restart-rules.reprise.dev/container.trainer";
const POD: &str = "restart-rules.reprise.dev/pod";

fn policy(annotations: &[(&str, &str)]) -> Policy {
    Policy::from_annotations(annotations.iter().copied())
        .unwrap()
        .unwrap()
}

fn error(annotations: &[(&str, &str)]) -> String {
    Policy::from_annotations(annotations.iter().copied())
        .unwrap_err()
        .to_string()
}

/// A list with one rule: `action` on `code`.
fn list(action: Action, code: i32) -> String {
    format!(
        "[{{action: {}, exitCodes: {{operator: In, values: [{code}]}}}}]",
        action.name()
    )
}

#[test]
fn a_rule_as_the_documentation_writes_it() {
    let policy = policy(&[(
        RULES_KEY,
        "[{action: RestartAllContainers, exitCodes: {operator: In, values: [42]}}]",
    )]);
    assert_eq!(
        policy.action("trainer", 42),
        Some(Action::RestartAllContainers)
    );
    assert_eq!(policy.action("trainer", 1), None);
    assert!(policy.covers("trainer"));
    assert_eq!(policy.options(), &Options::default());
}

#[test]
fn a_rule_as_the_kep_writes_it() {
    let text = "
- action: RestartPod
  onExit:
    exitCodes:
      operator: NotIn
      values: [0, 1]
";
    let policy = policy(&[(RULES_KEY, text)]);
    assert_eq!(policy.action("a", 88), Some(Action::RestartPod));
    assert_eq!(policy.action("a", 0), None);
}

#[test]
fn a_mapping_names_containers_and_leaves_the_others_to_the_plain_key() {
    let mapping = format!("trainer: {}\nquiet: []", list(Action::Restart, 1));
    let plain = list(Action::RestartPod, 1);
    let policy = policy(&[(POD, &mapping), (RULES_KEY, &plain)]);
    assert_eq!(policy.action("trainer", 1), Some(Action::Restart));
    assert_eq!(policy.action("other", 1), Some(Action::RestartPod));
    assert!(!policy.covers("quiet"));
}

#[test]
fn a_pod_without_rules_has_no_policy() {
    assert_eq!(Policy::from_annotations([]), Ok(None));
    assert_eq!(
        Policy::from_annotations([("app", "x"), (RULES_KEY, "[]"), (POD, "{a: []}")]),
        Ok(None)
    );
}

#[test]
fn rules_of_the_spec_apply_where_no_annotation_does() {
    let spec = || {
        let rule = Rule::on_codes(Action::Restart, Operator::In, vec![3]);
        ["trainer", "other"].map(|name| (name.to_owned(), Rules::from(vec![rule.clone()])))
    };
    let own = list(Action::RestartPod, 3);
    let unable = Some(KubeletFeatures::default());
    let both = Policy::from_pod([(OWN, own.as_str())], spec(), unable)
        .unwrap()
        .unwrap();
    assert_eq!(both.action("trainer", 3), Some(Action::RestartPod));
    assert_eq!(both.action("other", 3), Some(Action::Restart));
    assert!(
        Policy::from_pod([], spec(), unable)
            .unwrap()
            .unwrap()
            .covers("trainer")
    );
}

#[test]
fn the_rule_that_matches_is_told_by_its_number_and_place() {
    let second = |action, code| {
        let other = list(Action::Restart, 1);
        format!(
            "[{},{}",
            &other[1..other.len() - 1],
            &list(action, code)[1..]
        )
    };
    let (own, mapping) = (second(Action::RestartPod, 3), second(Action::RestartPod, 4));
    let mapping = format!("{{mapped: {mapping}}}");
    let plain = list(Action::RestartPod, 5);
    let annotations = [(OWN, own.as_str()), (POD, &mapping), (RULES_KEY, &plain)];
    let policy = policy(&annotations);
    for (container, code, number, source) in [
        ("trainer", 3, 2, OWN),
        ("mapped", 4, 2, POD),
        ("other", 5, 1, RULES_KEY),
    ] {
        let source = source.to_owned();
        let by = MatchedBy::ExitCodes;
        let rule = Some(MatchedRule { number, source, by });
        let matched = policy.matched(container, code);
        assert_eq!(matched, Some((Action::RestartPod, rule)));
    }
    assert_eq!(policy.matched("trainer", 5), None);

    let rule = Rule::on_codes(Action::RestartAllContainers, Operator::In, vec![3]);
    let rules = Rules::from(vec![rule]).then(crate::kube::RestartPolicy::OnFailure);
    let unable = Some(KubeletFeatures::default());
    let spec = [("trainer".to_owned(), rules)];
    let policy = Policy::from_pod([], spec, unable).unwrap().unwrap();
    let (_, rule) = policy.matched("trainer", 3).unwrap();
    let source = "restartPolicyRules".to_owned();
    let by = MatchedBy::ExitCodes;
    let first = MatchedRule {
        number: 1,
        source,
        by,
    };
    assert_eq!(rule, Some(first));
    // Its own policy starts it again.
    let by_policy = Some((Action::Restart, None));
    assert_eq!(policy.matched("trainer", 1), by_policy);
}

#[test]
fn what_the_kubelet_does_by_itself_is_left_to_it() {
    let rules = |action| {
        let rule = Rule::on_codes(action, Operator::In, vec![3]);
        [("trainer".to_owned(), Rules::from(vec![rule]))]
    };
    let able = Some(KubeletFeatures {
        container_rules: true,
        restart_all: false,
        exited_initialises: false,
    });
    assert_eq!(Policy::from_pod([], rules(Action::Restart), able), Ok(None));
    let all = Policy::from_pod([], rules(Action::RestartAllContainers), able);
    let all = all.unwrap().unwrap();
    assert_eq!(all.action("trainer", 3), Some(Action::RestartAllContainers));
    let own = list(Action::Restart, 3);
    let annotations = [(OWN, own.as_str())];
    let twice = Policy::from_pod(annotations, rules(Action::Restart), able).unwrap_err();
    assert_eq!(twice.problems()[0].fault, Fault::KubeletActs);
    let beside = Policy::from_pod(annotations, rules(Action::RestartPod), able);
    let beside = beside.unwrap().unwrap();
    assert_eq!(beside.action("trainer", 3), Some(Action::Restart));
    // As long as nobody knows what the kubelet does.
    let alone = Policy::from_pod(annotations, [], None).unwrap().unwrap();
    assert_eq!(alone.action("trainer", 3), Some(Action::Restart));
    let rules = || rules(Action::RestartAllContainers);
    assert_eq!(Policy::from_pod([], rules(), None), Ok(None));
    assert_eq!(Policy::from_pod(annotations, rules(), None), Ok(None));
}

#[test]
fn a_condition_is_read_in_every_spelling_and_with_every_code_that_the_api_takes() {
    let condition = "exitCodes: {operator: In, values: [-7, 256, 2147483647]}";
    for spelled in [
        condition.to_owned(),
        format!("when: {{{condition}}}"),
        format!("onExit: {{{condition}}}"),
    ] {
        let policy = policy(&[(OWN, &format!("[{{action: Restart, {spelled}}}]"))]);
        for code in [-7, 256, i32::MAX] {
            assert_eq!(
                policy.action("trainer", code),
                Some(Action::Restart),
                "{spelled}"
            );
        }
        assert_eq!(policy.action("trainer", 7), None);
    }
}

#[test]
fn a_rule_may_name_signals_and_the_lack_of_memory() {
    let policy = policy(&[(
        OWN,
        "[{action: Restart, onSignal: [SIGSEGV, 'SIGBUS']}, {action: RestartAllContainers, onOOMKilled: {}}]",
    )]);
    let out_of_memory = |code| Exit {
        oom_killed: true,
        ..Exit::from(code)
    };
    for (exit, action) in [
        (Exit::from(139), Some(Action::Restart)),
        (Exit::from(135), Some(Action::Restart)),
        (Exit::from(137), None),
        (Exit::from(0), None),
        (out_of_memory(139), Some(Action::Restart)),
        (out_of_memory(137), Some(Action::RestartAllContainers)),
        (out_of_memory(0), Some(Action::RestartAllContainers)),
    ] {
        assert_eq!(policy.action("trainer", exit), action, "{exit:?}");
    }
    let number = |exit| policy.matched("trainer", exit)?.1.map(|rule| rule.number);
    assert_eq!(number(Exit::from(135)), Some(1));
    assert_eq!(number(out_of_memory(139)), Some(1));
    assert_eq!(number(out_of_memory(137)), Some(2));
    assert!(policy.covers("trainer"));
    assert!(kills_that_restart(policy.actions("trainer")).is_empty());
}

#[test]
fn signals_by_which_anybody_may_kill_are_told_of_as_their_codes_are() {
    for (rule, kills) in [
        ("onSignal: [SIGKILL, SIGTERM]", vec![137, 143]),
        ("onSignal: [SIGTERM, SIGABRT]", vec![143]),
        ("onOOMKilled: {}, onSignal: [SIGSEGV]", vec![]),
    ] {
        let rules = format!("[{{action: RestartAllContainers, {rule}}}]");
        let policy = policy(&[(OWN, &rules)]);
        assert_eq!(
            kills_that_restart(policy.actions("trainer")),
            kills,
            "{rule}"
        );
    }
}

#[test]
fn what_the_api_does_not_have_is_refused_in_a_spec() {
    let rules = serde_json::json!([{"action": "Restart", "onOOMKilled": {}}]);
    let error = spec_rules("restartPolicyRules of a", &rules).unwrap_err();
    let expected = "restartPolicyRules of a: onOOMKilled and onSignal are for annotations: a pod's spec has exitCodes alone";
    assert_eq!(error.to_string(), expected);
}

#[test]
fn the_keys_alone_tell_whether_there_may_be_rules() {
    for key in [RULES_KEY, POD, OWN] {
        assert!(has_rules(["a", key]), "{key}");
    }
    for key in [
        "restart-rules.reprise.developer",
        "restart-rules.reprise.dev/",
        "x/restart-rules.reprise.dev",
    ] {
        assert!(!has_rules([key]), "{key}");
    }
}

#[test]
fn keys_of_our_domain_that_mean_nothing_are_known() {
    for key in [
        "restart-rule.reprise.dev",
        "restartrules.reprise.dev/pod",
        "reprise.dev/restart-rules",
        "restart-request.reprise.dev/container.a",
        "failure-policies.reprise.dev",
    ] {
        assert!(is_unknown_key(key), "{key}");
    }
    for key in [
        RULES_KEY,
        POD,
        OPTIONS_KEY,
        FAILURE_KEY,
        REQUEST_KEY,
        "restart-request.reprise.dev/pod",
        "enreprise.dev/x",
        "kubectl.kubernetes.io/x",
    ] {
        assert!(!is_unknown_key(key), "{key}");
    }
}

#[test]
fn containers_that_are_not_in_the_pod_are_named() {
    let rules = list(Action::Restart, 1);
    let mapping = format!("{{worker: {rules}, init: {rules}}}");
    let policy = policy(&[(OWN, &rules), (POD, &mapping)]);
    assert_eq!(policy.check_names(&["init", "trainer", "worker"]), Ok(()));
    assert_eq!(
        policy.check_names(&["init"]).unwrap_err().to_string(),
        "restart-rules.reprise.dev/container.trainer: the pod has no container \"trainer\"; \
         restart-rules.reprise.dev/pod: the pod has no container \"worker\""
    );
}

#[test]
fn every_mistake_says_what_is_wrong_and_where() {
    let many_values = format!("[{}]", vec!["1"; 256].join(","));
    let many_rules = format!(
        "[{}]",
        vec!["{action: Restart, exitCodes: {operator: In, values: [1]}}"; 21].join(",")
    );
    let third = format!(
        "{{a: [{0}, {0}, {{action: Restart, exitCodes: {{operator: In, values: {many_values}}}}}]}}",
        "{action: Restart, exitCodes: {operator: In, values: [1]}}"
    );
    let condition = "exitCodes: {operator: In, values: [1]}";
    let cases: &[(&str, &str, &str)] = &[
        (
            POD,
            &third,
            "container \"a\": rule 3: exitCodes.values has 256 entries, at most 255 are allowed",
        ),
        (
            POD,
            &many_rules,
            "the list has 21 rules, at most 20 are allowed",
        ),
        (
            POD,
            "42",
            "the value is 42, expected a list of rules, or a mapping from container names to such lists",
        ),
        (
            OWN,
            "{a: []}",
            "the value is a mapping, expected a list of rules",
        ),
        (
            RULES_KEY,
            "",
            "the value is empty, expected a list of rules",
        ),
        (
            RULES_KEY,
            "[x]",
            "rule 1: the rule is \"x\", expected a mapping",
        ),
        (
            RULES_KEY,
            "[{}]",
            "rule 1: action is missing; \
             restart-rules.reprise.dev: rule 1: exitCodes, onOOMKilled or onSignal is missing",
        ),
        (
            RULES_KEY,
            &format!("[{{action: restart, {condition}}}]"),
            "rule 1: action is \"restart\", allowed are Restart, RestartAllContainers, RestartPod",
        ),
        (
            RULES_KEY,
            &format!("[{{action: Restart, exitcodes: 1, {condition}}}]"),
            "rule 1: unknown field \"exitcodes\", allowed are action, exitCodes, when, onExit, onSignal, onOOMKilled",
        ),
        (
            RULES_KEY,
            &format!("[{{action: Restart, onExit: {{{condition}}}, {condition}}}]"),
            "rule 1: of exitCodes, when and onExit only one is allowed",
        ),
        (
            RULES_KEY,
            "[{action: Restart, exitCodes: {operator: in, values: [2147483648, \"7\", 1.5]}}]",
            "rule 1: exitCodes.operator is \"in\", allowed are In, NotIn; \
             restart-rules.reprise.dev: rule 1: exitCodes.values has 2147483648, allowed are whole numbers of 32 bits; \
             restart-rules.reprise.dev: rule 1: exitCodes.values has \"7\", allowed are whole numbers of 32 bits; \
             restart-rules.reprise.dev: rule 1: exitCodes.values has 1.5, allowed are whole numbers of 32 bits",
        ),
        (
            RULES_KEY,
            "[{action: Restart, exitCodes: {operator: In, values: []}}]",
            "rule 1: exitCodes.values is empty, so that operator In never matches",
        ),
        (
            RULES_KEY,
            "[{action: Restart, onExit: {}}]",
            "rule 1: onExit.exitCodes is missing",
        ),
        (
            "restart-rules.reprise.dev/trainer",
            "[]",
            "unknown place, allowed are restart-rules.reprise.dev, restart-rules.reprise.dev/pod, \
             restart-rules.reprise.dev/container.<name>",
        ),
    ];
    for (key, text, expected) in cases {
        assert_eq!(error(&[(key, text)]), format!("{key}: {expected}"));
    }
    assert!(error(&[(RULES_KEY, "[{")]).starts_with("restart-rules.reprise.dev: not valid YAML: "));
}

#[test]
fn every_mistake_in_signals_and_the_lack_of_memory_says_what_is_wrong() {
    let many_signals = format!(
        "[{{action: Restart, onSignal: [{}]}}]",
        vec!["SIGBUS"; 65].join(",")
    );
    let cases: &[(&str, &str)] = &[
        (
            "[{action: Restart, when: {onOOMKilled: {}}}]",
            "rule 1: unknown field \"onOOMKilled\", allowed are exitCodes; \
             restart-rules.reprise.dev: rule 1: when.exitCodes is missing",
        ),
        (
            "[{action: Restart, onOOMKilled: true, onSignal: SIGSEGV}]",
            "rule 1: onSignal is \"SIGSEGV\", expected a list of names of signals; \
             restart-rules.reprise.dev: rule 1: onOOMKilled is true, expected an empty mapping, {}",
        ),
        (
            "[{action: Restart, onOOMKilled: {limit: 1Gi}, onSignal: []}]",
            "rule 1: onSignal is empty, so that it never matches; \
             restart-rules.reprise.dev: rule 1: onOOMKilled is a mapping, expected an empty mapping, {}",
        ),
        (
            "[{action: Restart, onOOMKilled: , onSignal: [SIGSEGV, segv, SIGsegv, \"11\", 11, SIGRTMIN]}]",
            "rule 1: onSignal has \"segv\", allowed are names of Linux's signals, such as SIGSEGV; \
             restart-rules.reprise.dev: rule 1: onSignal has \"SIGsegv\", allowed are names of Linux's signals, such as SIGSEGV; \
             restart-rules.reprise.dev: rule 1: onSignal has \"11\", allowed are names of Linux's signals, such as SIGSEGV; \
             restart-rules.reprise.dev: rule 1: onSignal has 11, allowed are names of Linux's signals, such as SIGSEGV; \
             restart-rules.reprise.dev: rule 1: onSignal has \"SIGRTMIN\", allowed are names of Linux's signals, such as SIGSEGV; \
             restart-rules.reprise.dev: rule 1: onOOMKilled is empty, expected an empty mapping, {}",
        ),
        (
            &many_signals,
            "rule 1: onSignal has 65 entries, at most 64 are allowed",
        ),
    ];
    for (text, expected) in cases {
        assert_eq!(
            error(&[(RULES_KEY, text)]),
            format!("{RULES_KEY}: {expected}")
        );
    }
}

#[test]
fn all_mistakes_of_a_pod_come_in_one_line_and_a_flood_is_cut() {
    let rules = list(Action::Restart, 1);
    assert_eq!(
        error(&[
            (RULES_KEY, &rules),
            (POD, "1x"),
            (OPTIONS_KEY, "start: Never")
        ]),
        "restart-options.reprise.dev: start is \"Never\", allowed are Auto, Kubelet, Replay; \
         restart-rules.reprise.dev/pod: the value is \"1x\", expected a list of rules, or a mapping from container \
         names to such lists"
    );
    let flood = error(&[(RULES_KEY, &format!("[{}]", vec!["{}"; 20].join(",")))]);
    assert!(flood.ends_with("; and 32 more"), "{flood}");
}

#[test]
fn the_largest_value_that_is_allowed_is_read_however_it_is_written() {
    let codes = Condition::ExitCodes(Operator::NotIn, (0..255).collect());
    let signals = Condition::Signals(vec![Signal::SIGSEGV; MAX_SIGNALS]);
    let rule = |conditions| Rule {
        action: Action::RestartAllContainers,
        conditions,
    };
    let rules = vec![rule(vec![codes.clone()]); MAX_RULES];
    let with_signals = vec![rule(vec![codes, Condition::OomKilled, signals]); MAX_RULES];
    for text in [json(&rules), block_yaml(&rules), json(&with_signals)] {
        assert!(policy(&[(RULES_KEY, &text)]).action("a", 255).is_some());
    }
}

#[test]
fn a_value_that_is_longer_than_any_that_is_allowed_is_not_read() {
    let long = format!("[]{}", " ".repeat(64 * 1024));
    let expected = "the value has 65538 bytes: all annotations of Reprise together may have 65536";
    assert_eq!(
        error(&[(RULES_KEY, &long)]),
        format!("{RULES_KEY}: {expected}")
    );
    // Nor are many that are not.
    let half = format!("[]{}", " ".repeat(40 * 1024));
    let own = |name: char| format!("{RULES_KEY}/container.{name}");
    let error = error(&[(&own('a'), &half), (&own('b'), &half), (&own('c'), "[]")]);
    assert!(
        error.starts_with(&format!("{}: the value has 40962 bytes", own('b'))),
        "{error}"
    );
    assert!(!error.contains(';'), "{error}");
}

#[test]
fn all_annotations_of_a_pod_share_one_budget() {
    let many = format!("[{}]", vec!["1"; 6_000].join(","));
    let own = |name: char| format!("{RULES_KEY}/container.{name}");
    let error = error(&[(&own('a'), &many), (&own('b'), &many)]);
    assert!(error.contains("a: the list has 6000 rules"), "{error}");
    let problems =
        Policy::from_annotations([(own('a').as_str(), many.as_str()), (&own('b'), &many)])
            .unwrap_err();
    let last = Policy::from_annotations([(own('b').as_str(), many.as_str())]).unwrap_err();
    // Each rule that is none of them is noted, as far as they are looked at, and then that b's are too many.
    assert_eq!(problems.problems().len() + problems.more(), 22);
    assert_eq!(last.problems().len() + last.more(), 21);
}

#[test]
fn what_a_pod_was_made_with_is_known_whatever_else_it_says() {
    let whole_budget = format!("{{}} #{}", "x".repeat(64 * 1024 - 4));
    let unread = Unread::of([(OPTIONS_KEY, whole_budget.as_str()), (REQUEST_KEY, "v1")]);
    let request = Written::read(&unread).request().cloned();
    assert_eq!(request.unwrap().as_str(), "v1");
}

#[test]
fn a_container_with_a_name_that_none_can_have_is_refused() {
    let name = "x".repeat(64);
    let expected = "a container's name has 64 characters, at most 63 are allowed";
    let key = format!("{RULES_KEY}/container.{name}");
    assert_eq!(error(&[(&key, "what?")]), format!("{key}: {expected}"));
    let mapping = format!("{{{name}: [{{}}]}}");
    let place = format!("{POD}: container \"{}\"…", &name[1..]);
    assert_eq!(error(&[(POD, &mapping)]), format!("{place}: {expected}"));
}

#[test]
fn nothing_is_kept_of_a_flood_but_its_beginning_and_its_size() {
    let word = "x".repeat(8000);
    let values = vec![format!("\"{word}\""); 6].join(",");
    let value =
        format!("[{{{word}: 1, action: {word}, exitCodes: {{operator: In, values: [{values}]}}}}]");
    let Err(error) = Policy::from_annotations([(RULES_KEY, value.as_str())]) else {
        panic!("no rule")
    };
    for problem in error.problems() {
        assert!(format!("{problem:?}").len() < 512, "{problem:?}");
    }
    let rules = format!(
        "[{}]",
        vec![
            format!(
                "{{action: x, exitCodes: {{operator: In, values: [{}]}}}}",
                "z,".repeat(280)
            );
            20
        ]
        .join(",")
    );
    let Err(error) = Policy::from_annotations([(POD, rules.as_str())]) else {
        panic!("no rules")
    };
    assert_eq!(error.problems().len(), 32);
    assert_eq!(error.more(), 20 * (1 + 1 + 255) - 32);
    assert!(error.to_string().ends_with("; and 5132 more"), "{error}");
}

fn operator(operator: Operator) -> &'static str {
    match operator {
        Operator::In => "In",
        Operator::NotIn => "NotIn",
    }
}

/// `rules` as JSON.
fn json(rules: &[Rule]) -> String {
    let rules = rules.iter().map(|rule| {
        let mut written = serde_json::json!({"action": rule.action.name()});
        for condition in &rule.conditions {
            let (field, value) = match condition {
                Condition::ExitCodes(compared, values) => {
                    let compared = operator(*compared);
                    let codes = serde_json::json!({"operator": compared, "values": values});
                    ("exitCodes", codes)
                }
                Condition::OomKilled => ("onOOMKilled", serde_json::json!({})),
                Condition::Signals(signals) => {
                    let names = signals.iter().map(|it| it.as_str());
                    ("onSignal", names.collect())
                }
            };
            written[field] = value;
        }
        written
    });
    Value::Array(rules.collect()).to_string()
}

/// `rules` as block YAML, exit codes in the KEP's nested form.
fn block_yaml(rules: &[Rule]) -> String {
    let condition = |condition: &Condition| match condition {
        Condition::ExitCodes(compared, values) => {
            let compared = operator(*compared);
            let head = format!("  onExit:\n   exitCodes:\n    operator: {compared}\n    values:\n");
            let values = values.iter().map(|value| format!("    - {value}\n"));
            head + &values.collect::<String>()
        }
        Condition::OomKilled => "  onOOMKilled: {}\n".to_owned(),
        Condition::Signals(signals) => {
            let names = signals.iter().map(|it| format!("  - {it}\n"));
            "  onSignal:\n".to_owned() + &names.collect::<String>()
        }
    };
    let rule = |rule: &Rule| {
        let head = format!("- action: {}\n", rule.action.name());
        head + &rule.conditions.iter().map(condition).collect::<String>()
    };
    rules.iter().map(rule).collect()
}

proptest! {
    #[test]
    fn yaml_and_json_say_the_same(rules in prop::collection::vec(any_rule(), 1..20)) {
        let (json, yaml) = (json(&rules), block_yaml(&rules));
        let written = Written { plain: Some(Rules::from(rules)), ..Written::default() };
        let expected = Policy { written: Arc::new(written), ..Policy::default() };
        prop_assert_eq!(policy(&[(RULES_KEY, &json)]), expected.clone());
        prop_assert_eq!(policy(&[(RULES_KEY, &yaml)]), expected);
    }

    #[test]
    fn no_text_makes_the_reader_panic(text in "\\PC*", place in "[a-z./]{0,12}") {
        let keys = [RULES_KEY.to_owned(), POD.to_owned(), OPTIONS_KEY.to_owned(), format!("{RULES_KEY}/{place}")];
        for key in keys {
            let _ = Policy::from_annotations([(key.as_str(), text.as_str())]);
        }
    }

    #[test]
    fn no_yaml_makes_the_reader_panic(
        text in "[\\[\\]{}:,&*!|>'\"\n -]*((action|exitCodes|In|values|0|[0-9]{1,20})[\\[\\]{}:,&* \n-]{0,3}){0,9}",
    ) {
        let _ = Policy::from_annotations([(RULES_KEY, text.as_str()), (OPTIONS_KEY, text.as_str())]);
    }

    #[test]
    fn an_error_is_one_line(text in "[ -~\n]*") {
        if let Err(error) = Policy::from_annotations([(RULES_KEY, text.as_str())]) {
            prop_assert!(!error.to_string().contains('\n'));
        }
    }

    #[test]
    fn the_closest_place_wins(
        own in prop::option::of(any_action()),
        mapped in prop::option::of(any_action()),
        pod in prop::option::of(any_action()),
        plain in prop::option::of(any_action()),
    ) {
        // `/pod` holds a mapping or a list, never both.
        let on_pod = mapped.map(|action| format!("trainer: {}", list(action, 1))).or(pod.map(|action| list(action, 1)));
        let texts = [(OWN, own.map(|action| list(action, 1))), (POD, on_pod), (RULES_KEY, plain.map(|a| list(a, 1)))];
        let annotations = texts.iter().filter_map(|(key, text)| Some((*key, text.as_deref()?)));
        let policy = Policy::from_annotations(annotations).unwrap();
        let action = policy.and_then(|policy| policy.action("trainer", 1));
        prop_assert_eq!(action, own.or(mapped).or(pod).or(plain));
    }
}
