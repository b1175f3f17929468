//! What is kept of a pod that is reset: its last state is gone with it, and with that the reason.

use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use k8s_openapi::api::core::v1::{ContainerStateTerminated, ContainerStatus, Pod};
use rustix::fs::OFlags;
use serde::Serialize;
use serde_json::Value;

use super::pods::Task;
use crate::cri::POD_UID;
use crate::ids::{ContainerId, PodUid};
use crate::kube::{Owner, container_id, statuses};

/// Of how many containers logs are kept.
const LOGS: usize = 8;
/// How much of a log is looked at, in bytes.
const TAIL: u64 = 32 * 1024;
/// How many of its last lines are kept.
const LINES: usize = 20;
/// How many of those an event has room for.
const LINES_TOLD: usize = 3;

/// All that is kept.
#[derive(Debug, Clone, Default, Serialize)]
pub(super) struct Evidence {
    pub(super) pod: String,
    pub(super) uid: String,
    pub(super) node: String,
    pub(super) owner: String,
    /// RFC 3339.
    pub(super) at: String,
    /// The container that ended most often, and how often.
    container: String,
    exits: u32,
    /// The last exits of each container, and which of them count.
    history: Value,
    /// As the API server told of it last.
    status: Value,
    /// The last lines of each container's last attempt.
    logs: BTreeMap<String, Vec<String>>,
    /// In a sentence.
    #[serde(skip)]
    last_exit: String,
}

impl Evidence {
    pub(super) fn new(
        task: &Task,
        pod: &Pod,
        owner: &Owner,
        node: &str,
        at: String,
        logs: BTreeMap<String, Vec<String>>,
    ) -> Self {
        let container = task.container.as_str();
        let status = pod
            .status
            .iter()
            .flat_map(statuses)
            .find(|status| status.name == container);
        // What cannot be written as JSON is left out: the deletion of a pod is not delayed for that.
        let value = |it: Result<Value, serde_json::Error>| it.unwrap_or_default();
        Self {
            pod: task.seen.key.to_string(),
            uid: task.seen.uid.to_string(),
            node: node.to_owned(),
            owner: owner.to_string(),
            at,
            container: container.to_owned(),
            exits: task.exits,
            history: value(serde_json::to_value(task.record.histories())),
            status: value(serde_json::to_value(&pod.status)),
            logs,
            last_exit: status.and_then(last_exit).unwrap_or_default(),
        }
    }

    /// For an event, on the pod or its owner.
    pub(super) fn summary(&self, doing: &str) -> String {
        let Self {
            pod,
            node,
            owner,
            container,
            exits,
            last_exit,
            ..
        } = self;
        let lines = self.logs.get(container).map(Vec::as_slice);
        let lines = lines.unwrap_or_default();
        let lines = lines[lines.len().saturating_sub(LINES_TOLD)..].join(" | ");
        let said = if lines.is_empty() {
            String::new()
        } else {
            format!("; it said last: {lines}")
        };
        format!(
            "{doing} pod {pod}, so that {owner} makes a new one: container {container} ended {exits} times on node {node}{last_exit}{said}"
        )
    }
}

/// Containers whose last attempts may have said why they ended, and the runtime's names for those, newest first, behind which
/// comes one that ran when the status was written: those that had ended may be gone by now, and then it has ended as well. The
/// container that matters most comes first.
pub(super) fn attempts(pod: &Pod, first: &str) -> Vec<(String, Vec<ContainerId>)> {
    let ended = |status: &ContainerStatus| {
        let ended = exits(status).filter_map(|exit| container_id(exit.container_id.as_deref()?));
        let mut ids: Vec<_> = ended.collect();
        if ids.is_empty() {
            return None;
        }
        let ran = status.container_id.as_deref().and_then(container_id);
        ids.extend(ran.filter(|id| !ids.contains(id)));
        Some((status.name.clone(), ids))
    };
    let statuses = pod.status.iter().flat_map(statuses);
    let mut found: Vec<_> = statuses.filter_map(ended).collect();
    found.sort_by_key(|(name, _)| name != first);
    found.truncate(LOGS);
    found
}

/// Newest first.
fn exits(status: &ContainerStatus) -> impl Iterator<Item = &ContainerStateTerminated> {
    let both = [status.state.as_ref(), status.last_state.as_ref()];
    let both = both.into_iter().flatten();
    both.filter_map(|it| it.terminated.as_ref())
}

fn last_exit(status: &ContainerStatus) -> Option<String> {
    let exit = exits(status).next()?;
    let reason = exit.reason.as_deref().unwrap_or("no reason");
    Some(format!(
        ", last with exit code {} ({reason})",
        exit.exit_code
    ))
}

/// Whether these are the labels of a container of that pod: whoever may write a pod's status may name any.
pub(super) fn is_of(labels: &BTreeMap<String, String>, pod: &PodUid) -> bool {
    labels.get(POD_UID).is_some_and(|uid| *uid == pod.as_str())
}

/// The last lines of a log as the runtime writes it (`pkg/kubelet/kuberuntime/logs`: time, stream, whether the line is whole,
/// and the line); of one that is longer than what is looked at, its end. Blocks.
pub(super) fn tail(log: &Path) -> io::Result<Vec<String>> {
    // What stands there may have been put there by anybody.
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits();
    let flags = i32::try_from(flags).map_err(io::Error::other)?;
    let mut options = OpenOptions::new();
    let mut file = options.read(true).custom_flags(flags).open(log)?;
    let meta = file.metadata()?;
    if !meta.is_file() {
        return Err(io::Error::other("it is no regular file"));
    }
    let length = meta.len();
    file.seek(SeekFrom::Start(length.saturating_sub(TAIL)))?;
    let mut text = Vec::new();
    file.take(TAIL).read_to_end(&mut text)?;
    let text = String::from_utf8_lossy(&text);
    // The first may have been cut.
    let lines = text.lines().skip(usize::from(length > TAIL));
    let mut lines: Vec<String> = lines.filter_map(line).collect();
    if lines.is_empty() && length > TAIL {
        lines.extend(text.lines().last().map(str::to_owned));
    }
    Ok(lines.split_off(lines.len().saturating_sub(LINES)))
}

fn line(text: &str) -> Option<String> {
    text.splitn(4, ' ').nth(3).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use std::fmt::Write;

    use serde_json::json;

    use super::*;

    #[test]
    fn the_last_lines_of_a_log_are_read_however_long_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("0.log");
        let mut text = String::new();
        for number in 0..2000 {
            let stamp = "2026-01-01T00:00:00.000000000Z stdout F";
            writeln!(text, "{stamp} line {number} of it").unwrap();
        }
        std::fs::write(&log, &text).unwrap();
        let lines = tail(&log).unwrap();
        assert_eq!(lines.len(), LINES);
        assert_eq!(lines[LINES - 1], "line 1999 of it");
        std::fs::write(&log, "t stderr F \nnothing\nt stderr F a  b\n").unwrap();
        assert_eq!(tail(&log).unwrap(), ["", "a  b"]);
        assert!(tail(&dir.path().join("none")).is_err());
    }

    #[test]
    fn of_a_last_line_without_end_the_end_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("0.log");
        let text = format!("t stdout F first\nt stdout F {}end\n", "x".repeat(40_000));
        std::fs::write(&log, text).unwrap();
        let lines = tail(&log).unwrap();
        let [line] = lines.as_slice() else {
            panic!("{lines:?}")
        };
        assert!(line.ends_with("xxend") && line.len() < 32 * 1024);
    }

    #[test]
    fn only_a_file_is_read_as_a_log() {
        let dir = tempfile::tempdir().unwrap();
        let (log, link, pipe) = (
            dir.path().join("0.log"),
            dir.path().join("1.log"),
            dir.path().join("2.log"),
        );
        std::fs::write(&log, "t stdout F line\n").unwrap();
        std::os::unix::fs::symlink(&log, &link).unwrap();
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        assert_eq!(tail(&log).unwrap(), ["line"]);
        for other in [&link, &pipe, &dir.path().to_owned()] {
            assert!(tail(other).is_err(), "{}", other.display());
        }
    }

    #[test]
    fn a_container_of_another_pod_is_none_of_this_one() {
        let labels = |uid: &str| [(POD_UID.to_owned(), uid.to_owned())].into();
        assert!(is_of(&labels("u1"), &"u1".into()));
        assert!(!is_of(&labels("u2"), &"u1".into()));
        assert!(!is_of(&BTreeMap::new(), &"u1".into()));
    }

    #[test]
    fn the_container_that_matters_comes_first_and_what_has_not_ended_said_nothing() {
        let exit = |id: &str| json!({"terminated": {"exitCode": 1, "containerID": id}});
        let status = |name: &str, id: &str, last: Value| {
            json!({
                "name": name, "containerID": id, "lastState": last, "image": "", "imageID": "", "ready": false, "restartCount": 1,
            })
        };
        let pod: Pod =
            serde_json::from_value(json!({"metadata": {}, "status": {"containerStatuses": [
                status("a", "containerd://1", exit("containerd://1")),
                status("b", "containerd://2", json!({})),
                status("c", "containerd://4", exit("containerd://3")),
            ]}}))
            .unwrap();
        let expected = [
            ("c".to_owned(), vec!["3".into(), "4".into()]),
            ("a".to_owned(), vec!["1".into()]),
        ];
        assert_eq!(attempts(&pod, "c"), expected);
    }
}
