//! What CRI-O tells of a container at length: what it runs, and as which process.

use std::collections::BTreeMap;
use std::str::FromStr;

use nix::sys::signal::Signal;
use rustix::process::Pid;
use serde::Deserialize;

use super::error::CriError;

/// Where an image's stop signal is (`StopSignal`, `pkg/annotations/v2`, CRI-O 1.36).
const STOP_SIGNAL: &str = "org.opencontainers.image.stopSignal";

/// `containerInfo` (`server/container_status.go`, CRI-O 1.36), or what is read of it: the rest may be megabytes that the pod's
/// author wrote.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Info {
    pid: i32,
    runtime_spec: RuntimeSpec,
}

#[derive(Deserialize)]
struct RuntimeSpec {
    process: Process,
    annotations: Option<BTreeMap<String, String>>,
}

#[derive(Deserialize)]
struct Process {
    args: Vec<String>,
}

/// What is running in a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Told {
    /// Its first process, as the runtime sees it. It may have ended.
    pub pid: Option<Pid>,
    /// The command and its arguments.
    pub args: Vec<String>,
    /// What asks it to stop; `None`: a signal that is not known here.
    pub stop_signal: Option<Signal>,
}

pub(super) fn read(info: &str) -> Result<Told, CriError> {
    let info: Info = serde_json::from_str(info)
        .map_err(|error| CriError::malformed_info("ContainerStatus", &error))?;
    let RuntimeSpec {
        process,
        annotations,
    } = info.runtime_spec;
    let stop_signal = annotations.and_then(|mut it| it.remove(STOP_SIGNAL));
    Ok(Told {
        // 0 and less stand for groups of processes, 1 for none of a container.
        pid: Some(info.pid)
            .filter(|pid| *pid > 1)
            .and_then(Pid::from_raw),
        args: process.args,
        stop_signal: stop_signal.map_or(Some(Signal::SIGTERM), |name| signal(&name)),
    })
}

/// By name or number, as images have it.
fn signal(name: &str) -> Option<Signal> {
    if let Ok(number) = name.parse::<i32>() {
        return Signal::try_from(number).ok();
    }
    let name = name.strip_prefix("SIG").unwrap_or(name);
    Signal::from_str(&format!("SIG{name}")).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(pid: i32, annotations: &str) -> Told {
        let info = format!(
            r#"{{"sandboxID": "s", "pid": {pid}, "privileged": false, "runtimeSpec": {{
                "process": {{"args": ["sh", "-c", "true"], "cwd": "/"}}, "annotations": {annotations}}}}}"#
        );
        read(&info).unwrap()
    }

    #[test]
    fn a_container_has_a_process_and_a_command() {
        let told = told(42, "null");
        assert_eq!(told.pid, Pid::from_raw(42));
        assert_eq!(told.args, ["sh", "-c", "true"]);
        assert_eq!(told.stop_signal, Some(Signal::SIGTERM));
    }

    #[test]
    fn an_image_names_its_stop_signal_in_one_way_or_another() {
        for (name, signal) in [
            ("SIGQUIT", Some(Signal::SIGQUIT)),
            ("USR1", Some(Signal::SIGUSR1)),
            ("9", Some(Signal::SIGKILL)),
            ("SIGRTMIN+3", None),
            ("", None),
        ] {
            let annotations = format!(r#"{{"{STOP_SIGNAL}": "{name}"}}"#);
            assert_eq!(told(42, &annotations).stop_signal, signal, "{name}");
        }
    }

    #[test]
    fn no_number_stands_for_more_than_one_process() {
        for pid in [-1, 0, 1] {
            assert_eq!(told(pid, "{}").pid, None);
        }
    }
}
