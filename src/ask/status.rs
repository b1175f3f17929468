//! Which pods restart, or have: a table for people, JSON for others.

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use kube::Client;
use serde_json::{Value, json};

use super::error::AskError;
use super::pod::{Last, UnderWay};
use super::select;
use super::target::Selector;
use super::time::age;
use crate::cli::StatusArgs;
use crate::columns::Columns;
use crate::text;

/// A pod, as far as restarts are concerned.
pub(super) struct Row {
    namespace: String,
    pod: String,
    node: Option<String>,
    under_way: Option<UnderWay>,
    last: Option<Last>,
}

impl Row {
    fn of(pod: &Pod, now: Timestamp) -> Self {
        Self {
            namespace: pod.metadata.namespace.clone().unwrap_or_default(),
            pod: pod.metadata.name.clone().unwrap_or_default(),
            node: pod.spec.as_ref().and_then(|spec| spec.node_name.clone()),
            under_way: UnderWay::of(pod, now),
            last: Last::of(pod),
        }
    }
}

/// Pods that are named, or those that restart, or have.
pub(super) async fn find(
    client: &Client,
    namespace: &str,
    args: &StatusArgs,
) -> Result<Vec<Row>, AskError> {
    let (mut rows, now) = (Vec::new(), Timestamp::now());
    for pod in &args.pods {
        let pod = select::get(client, namespace, pod.as_str()).await?;
        rows.push(Row::of(&pod, now));
    }
    if args.pods.is_empty() {
        let namespace = (!args.all_namespaces).then_some(namespace);
        let labels = args.selector.as_ref().map(Selector::as_str);
        let pods = select::list(client, namespace, labels).await?;
        if let Some(labels) = labels.filter(|_| pods.is_empty()) {
            let what = format!("-l {labels}");
            return Err(select::no_match(what, namespace));
        }
        let concerned = |row: &Row| row.under_way.is_some() || row.last.is_some();
        rows.extend(pods.iter().map(|pod| Row::of(pod, now)).filter(concerned));
    }
    Ok(rows)
}

/// A list with an object for each pod.
pub(super) fn json(rows: &[Row]) -> Value {
    let time = |time: Option<Timestamp>| time.map(|time| time.to_string());
    rows.iter()
        .map(|row| {
            json!({
                "namespace": row.namespace,
                "pod": row.pod,
                "node": row.node,
                "underWay": row.under_way.as_ref().map(|it| json!({
                    "type": it.kind,
                    "since": time(it.since),
                    "backOffUntil": time(it.back_off_until()),
                    "message": it.message,
                })),
                "last": row.last.as_ref().map(|it| json!({
                    "restarted": it.restarted,
                    "reason": it.reason,
                    "at": time(it.at),
                    "message": it.message,
                })),
                "restarts": row.last.as_ref().and_then(Last::count),
            })
        })
        .collect()
}

/// A line for each pod below a line of headings.
pub(super) fn table(rows: &[Row], with_namespace: bool, now: Timestamp) -> String {
    let mut lines = vec![
        [
            "NAMESPACE",
            "POD",
            "UNDER WAY",
            "SINCE",
            "BACK-OFF UNTIL",
            "RESTARTS",
            "LAST",
            "OUTCOME",
            "MESSAGE",
        ]
        .map(str::to_owned),
    ];
    lines.extend(rows.iter().map(|row| cells(row, now)));
    let hidden = usize::from(!with_namespace);
    let shown = || lines.iter().map(|line| &line[hidden..]);
    let columns = Columns::of(shown());
    shown().map(|line| columns.line(line) + "\n").collect()
}

fn cells(row: &Row, now: Timestamp) -> [String; 9] {
    let ago = |time: Option<Timestamp>| time.map(|time| age(now.as_second() - time.as_second()));
    let (under_way, last) = (row.under_way.as_ref(), row.last.as_ref());
    let message = under_way
        .map(|it| &it.message)
        .or(last.map(|it| &it.message));
    [
        Some(row.namespace.clone()),
        Some(row.pod.clone()),
        // Ours and the kubelet's say the same.
        under_way.map(|it| it.kind.trim_start_matches("reprise.dev/").to_owned()),
        under_way.and_then(|it| ago(it.since)),
        under_way.and_then(|it| it.back_off_until().map(|time| time.to_string())),
        last.and_then(|it| it.count().map(|count| count.to_string())),
        last.and_then(|it| ago(it.at)),
        last.map(|it| it.reason.clone()),
        message.cloned(),
    ]
    .map(|cell| cell.filter(|cell| !cell.is_empty()))
    .map(|cell| {
        cell.map_or_else(
            || "-".to_owned(),
            |cell| text::printable(&cell).into_owned(),
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows() -> Vec<Row> {
        let pods = json!([
            {"metadata": {"namespace": "n", "name": "web-0"}, "spec": {"nodeName": "node-1", "containers": []},
             "status": {"conditions": [
                {"type": "reprise.dev/AllContainersRestarting", "status": "True", "reason": "RestartRequested",
                 "lastTransitionTime": "2026-11-26T10:53:26Z",
                 "message": "Restart requested with value t, triggering pod restart; back-off until 2026-11-26T10:55:00Z"},
                {"type": "reprise.dev/LastRestart", "status": "True", "reason": "Restarted",
                 "lastTransitionTime": "2026-11-26T08:53:26Z",
                 "message": "Restart 12: requested, restarted in 143 ms by replay; answers request s"}]}},
            {"metadata": {"namespace": "n", "name": "other"}},
        ]);
        let pods: Vec<Pod> = serde_json::from_value(pods).unwrap();
        let now = "2026-11-26T10:53:00Z".parse().unwrap();
        pods.iter().map(|pod| Row::of(pod, now)).collect()
    }

    #[test]
    fn a_table_says_what_is_under_way_and_what_was() {
        let now = "2026-11-26T10:54:00Z".parse().unwrap();
        let expected = "\
POD     UNDER WAY                 SINCE   BACK-OFF UNTIL         RESTARTS   LAST   OUTCOME     MESSAGE
web-0   AllContainersRestarting   34s     2026-11-26T10:55:00Z   12         2h     Restarted   Restart requested with value t, triggering pod restart; back-off until 2026-11-26T10:55:00Z
other   -                         -       -                      -          -      -           -
";
        assert_eq!(table(&rows(), false, now), expected);
        let wide = table(&rows(), true, now);
        assert!(wide.starts_with("NAMESPACE   POD"), "{wide}");
        assert!(wide.contains("\nn           web-0"), "{wide}");
    }

    #[test]
    fn json_has_the_same_as_fields() {
        let value = json(&rows());
        let [web, other] = value.as_array().unwrap().as_slice() else {
            panic!("{value}")
        };
        assert_eq!(web["node"], "node-1");
        assert_eq!(web["restarts"], 12);
        assert_eq!(
            web["underWay"]["type"],
            "reprise.dev/AllContainersRestarting"
        );
        assert_eq!(web["underWay"]["backOffUntil"], "2026-11-26T10:55:00Z");
        assert_eq!(web["last"]["restarted"], true);
        assert_eq!(web["last"]["at"], "2026-11-26T08:53:26Z");
        assert_eq!(
            (&other["underWay"], &other["last"]),
            (&Value::Null, &Value::Null)
        );
    }
}
