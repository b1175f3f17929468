//! The binary as users meet it: exit codes and messages.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Output, Stdio};

const POD: &str = "
apiVersion: v1
kind: Pod
metadata:
  name: trainer
  annotations:
    restart-rules.reprise.dev: |
      [{action: RestartAllContainers, exitCodes: {operator: In, values: [42]}}]
spec:
  restartPolicy: Never
  containers: [{name: main}]
";

fn reprise(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_reprise"));
    command.args(arguments).env_clear();
    command
}

fn run(arguments: &[&str]) -> (Option<i32>, String, String) {
    said(&reprise(arguments).output().unwrap())
}

fn said(output: &Output) -> (Option<i32>, String, String) {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    (
        output.status.code(),
        text(&output.stdout),
        text(&output.stderr),
    )
}

#[test]
fn help_and_version_succeed() {
    for arguments in [
        &["--help"][..],
        &["help", "run"],
        &["help", "hook"],
        &["check", "-h"],
        &["history", "-h"],
    ] {
        let (code, out, _) = run(arguments);
        assert_eq!(code, Some(0), "{arguments:?}");
        assert!(out.contains("Usage: reprise"), "{out}");
    }
    for arguments in [["version"], ["--version"]] {
        let expected = format!("reprise {}\n", env!("CARGO_PKG_VERSION"));
        assert_eq!(run(&arguments), (Some(0), expected, String::new()));
    }
}

#[test]
fn wrong_usage_exits_with_2_and_says_what_is_wrong() {
    let cases: &[(&[&str], &str)] = &[
        (&[], "Usage: reprise"),
        (
            &["run", "--nri-sockt", "/x"],
            "unexpected argument '--nri-sockt'",
        ),
        (
            &["run", "--log-level", "loud"],
            "possible values: error, warn, info, debug, trace",
        ),
        (&["run", "--nri-index", "7"], "an NRI index is two digits"),
        (
            &["run", "--cri-endpoint", "tcp://x"],
            "a CRI endpoint is unix://",
        ),
        (&["check"], "<FILE>..."),
        (
            &["check", "--kubelet", "latest", "-"],
            "not a version of Kubernetes: it must be as in 1.36",
        ),
        (
            &["check", "--output", "yaml", "-"],
            "possible values: text, json",
        ),
    ];
    for (arguments, expected) in cases {
        let (code, _, error) = run(arguments);
        assert_eq!(code, Some(2), "{arguments:?}: {error}");
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn the_environment_is_read_and_checked_as_flags_are() {
    let (code, _, error) = said(
        &reprise(&["run"])
            .env("REPRISE_LOG_FORMAT", "xml")
            .output()
            .unwrap(),
    );
    assert_eq!(code, Some(2));
    assert!(error.contains("possible values: text, json"), "{error}");
}

#[test]
fn a_config_file_that_cannot_be_used_is_named() {
    let (code, _, error) = run(&["run", "--config", "/nonexistent.yaml"]);
    assert_eq!(code, Some(1));
    assert!(
        error.starts_with("reprise: cannot read the config file /nonexistent.yaml"),
        "{error}"
    );

    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), "log-levle: debug\n").unwrap();
    let (code, _, error) = run(&["run", "--config", file.path().to_str().unwrap()]);
    assert_eq!(code, Some(1));
    assert!(error.contains("unknown field `log-levle`"), "{error}");
}

#[test]
fn check_explains_a_pod() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("pod.yaml");
    fs::write(&path, POD).unwrap();
    let (code, out, error) = run(&["check", path.to_str().unwrap()]);
    assert_eq!((code, error.as_str()), (Some(0), ""));
    assert!(
        out.contains("main (regular): exit 42 → restart all containers in place; "),
        "{out}"
    );
}

#[test]
fn check_fails_on_a_bad_annotation_from_standard_input() {
    let mut child = reprise(&["check", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let text = POD.replace("RestartAllContainers", "RestartEverything");
    child
        .stdin
        .take()
        .unwrap()
        .write_all(text.as_bytes())
        .unwrap();
    let (code, out, _) = said(&child.wait_with_output().unwrap());
    assert_eq!(code, Some(1));
    assert!(
        out.contains("rule 1: action is \"RestartEverything\", allowed are Restart, "),
        "{out}"
    );
}

#[test]
fn check_fails_on_a_missing_file_and_still_checks_the_others() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("pod.yaml");
    fs::write(&path, POD).unwrap();
    let (code, out, _) = run(&["check", "/nonexistent.yaml", path.to_str().unwrap()]);
    assert_eq!(code, Some(1));
    assert!(
        out.starts_with("/nonexistent.yaml: error: No such file or directory"),
        "{out}"
    );
    assert!(out.contains("Pod trainer"), "{out}");
}

#[test]
fn check_reads_directories_and_says_it_in_json() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_str().unwrap();
    let (code, out, _) = run(&["check", path]);
    assert_eq!(code, Some(1));
    assert!(out.contains(": error: no manifests in it"), "{out}");

    fs::create_dir(directory.path().join("jobs")).unwrap();
    fs::write(directory.path().join("jobs/pod.yaml"), POD).unwrap();
    let (code, out, _) = run(&["check", "--output", "json", "--kubelet", "1.36", path]);
    assert_eq!(code, Some(0));
    let said: serde_json::Value = serde_json::from_str(&out).unwrap();
    let file = format!("{path}/jobs/pod.yaml");
    assert_eq!(said[0]["file"], file);
    assert_eq!(said[0]["containers"][0]["exits"][0]["by"], "Reprise");
    assert_eq!(said[0]["problems"], serde_json::json!([]));

    fs::write(directory.path().join("values.yaml"), "{{ .Values }}: [").unwrap();
    let (code, out, _) = run(&["check", path]);
    assert_eq!(code, Some(1));
    assert!(out.contains("pod.yaml:2: Pod trainer\n"), "{out}");
    assert!(out.contains("values.yaml:1: error: "), "{out}");
}

/// The same executable under the name that kubectl looks for, with a kubeconfig that leads nowhere.
struct KubectlPlugin(tempfile::TempDir);

impl KubectlPlugin {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let link = dir.path().join("kubectl-reprise");
        std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_reprise"), link).unwrap();
        let kubeconfig = "
current-context: c
clusters: [{name: c, cluster: {server: 'http://127.0.0.1:1'}}]
contexts: [{name: c, context: {cluster: c, user: u}}]
";
        fs::write(dir.path().join("kubeconfig"), kubeconfig).unwrap();
        Self(dir)
    }

    fn run(&self, arguments: &[&str]) -> (Option<i32>, String, String) {
        let mut command = Command::new(self.0.path().join("kubectl-reprise"));
        command.args(arguments).env_clear();
        command.env("KUBECONFIG", self.0.path().join("kubeconfig"));
        said(&command.output().unwrap())
    }
}

#[test]
fn kubectl_users_are_told_what_is_wrong() {
    let plugin = KubectlPlugin::new();
    let (code, out, _) = plugin.run(&["--help"]);
    assert_eq!(code, Some(0));
    assert!(out.contains("Usage: kubectl reprise"), "{out}");
    for (arguments, code, expected) in [
        (&["run"][..], 2, "unrecognized subcommand 'run'"),
        (&["restart"], 2, "<POD|TYPE/NAME|--selector <LABELS>>"),
        (
            &["restart", "-l", ""],
            2,
            "an empty selector would be for all pods",
        ),
        (&["restart", "node/a"], 2, "use -l with labels of its pods"),
        (
            &["restart", "a", "--context", "d"],
            1,
            "current context: d; see --kubeconfig",
        ),
        (&["restart", "a"], 1, "the API server does not answer: "),
        (&["status"], 1, "the API server does not answer: "),
    ] {
        let (ended, out, error) = plugin.run(arguments);
        assert_eq!((ended, out.as_str()), (Some(code), ""), "{error}");
        assert!(error.contains(expected), "{arguments:?}: {error}");
    }
}

#[test]
fn kubectl_is_told_what_may_follow() {
    let plugin = KubectlPlugin::new();
    let complete = |words: &[&str]| plugin.run(&[&["__complete"], words].concat());
    let expected = |out: &str| (Some(0), out.to_owned(), String::new());
    assert_eq!(complete(&["re"]), expected("restart\n:4\n"));
    assert_eq!(complete(&["restart", "--wa"]), expected("--wait\n:4\n"));
    // No API server answers.
    assert_eq!(complete(&["restart", "--wait", "a"]), expected(":4\n"));
}

#[test]
fn history_is_shown_or_said_why_not() {
    let directory = tempfile::tempdir().unwrap();
    let state = directory.path().join("state");
    let state = state.to_str().unwrap();
    let (code, out, error) = run(&["history", "--state-dir", state]);
    assert_eq!((code, out.as_str()), (Some(1), ""));
    let expected = format!("reprise: no history: there is no {state}; has the plugin run");
    assert!(error.starts_with(&expected), "{error}");
    fs::create_dir(state).unwrap();
    let none = (Some(0), String::new(), "no restart so far\n".to_owned());
    assert_eq!(run(&["history", "--state-dir", state]), none);
    let config = directory.path().join("config.yaml");
    fs::write(&config, format!("state-dir: {state}\n")).unwrap();
    let config = config.to_str().unwrap();
    let json = ["history", "-o", "json", "--config", config];
    let (code, out, _) = run(&json);
    assert_eq!((code, out.as_str()), (Some(0), "[\n]\n"));
    let (code, _, error) = run(&[&json[..], &["web-0"]].concat());
    let expected = "reprise: no restart of web-0 is in the history of this node\n";
    assert_eq!((code, error.as_str()), (Some(1), expected));
}

fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

#[test]
fn examples_in_the_documents_are_well_and_quoted_as_they_are() {
    let cookbook = fs::read_to_string(repository("docs/use.md")).unwrap();
    for entry in fs::read_dir(repository("docs/examples")).unwrap() {
        let path = entry.unwrap().path();
        let (code, out, error) = run(&["check", path.to_str().unwrap()]);
        assert_eq!((code, error.as_str()), (Some(0), ""), "{out}");
        assert!(out.contains("→ restart all containers in place"), "{out}");
        let quoted = format!("```yaml\n{}```\n", fs::read_to_string(&path).unwrap());
        assert!(cookbook.contains(&quoted), "{}", path.display());
    }
}

#[test]
fn every_flag_is_in_the_documents() {
    let documents = fs::read_to_string(repository("docs/install.md")).unwrap();
    let (_, help, _) = run(&["help", "run"]);
    let lines = help.lines().map(str::trim_start);
    for flag in lines.filter(|line| line.starts_with("--")) {
        let name = flag.split([' ', '[']).next().unwrap();
        let row = [format!("| `{name}`"), format!("| `{name} ")];
        assert!(row.iter().any(|row| documents.contains(row)), "{name}");
    }
}

/// A plugin beside a runtime that does not answer, so that it does nothing but be there.
struct Plugin {
    process: Child,
    log: BufReader<ChildStderr>,
}

impl Plugin {
    fn command(dir: &Path) -> Command {
        let mut command = reprise(&["run", "--node-name", "node", "--log-level", "info"]);
        for (flag, name) in [
            ("--run-dir", "run"),
            ("--state-dir", "state"),
            ("--cri-endpoint", "runtime.sock"),
            ("--nri-socket", "nri.sock"),
        ] {
            command.arg(flag).arg(dir.join(name));
        }
        command.stderr(Stdio::piped());
        command
    }

    fn start(mut command: Command) -> Self {
        let mut process = command.spawn().unwrap();
        let log = BufReader::new(process.stderr.take().unwrap());
        Self { process, log }
    }

    /// Waits for a line of its log.
    fn says(&mut self, what: &str) {
        let mut line = String::new();
        while !line.contains(what) {
            line.clear();
            assert!(self.log.read_line(&mut line).unwrap() > 0, "it ended");
        }
    }

    fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

impl Drop for Plugin {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn what_the_nri_stub_has_to_say_is_in_the_log() {
    let dir = tempfile::tempdir().unwrap();
    let (runtime, ours) = UnixStream::pair().unwrap();
    let plugin = Plugin::command(dir.path());
    // A runtime that launches a plugin gives it the connection as descriptor 3.
    let mut command = Command::new("/bin/sh");
    command
        .args(["-c", "exec \"$@\" 3<&0", "sh"])
        .arg(plugin.get_program())
        .args(plugin.get_args())
        .env_clear()
        .envs([("NRI_PLUGIN_NAME", "reprise"), ("NRI_PLUGIN_IDX", "10")])
        .env("NRI_PLUGIN_SOCKET", "3")
        .stdin(OwnedFd::from(ours))
        .stderr(Stdio::piped());
    let mut plugin = Plugin::start(command);
    drop(runtime);
    plugin.says("the connection to the runtime that launched this plugin ended");
}

#[test]
fn a_second_plugin_says_who_is_there_and_one_that_waits_takes_over() {
    let dir = tempfile::tempdir().unwrap();
    let _runtime = UnixListener::bind(dir.path().join("runtime.sock")).unwrap();
    let mut first = Plugin::start(Plugin::command(dir.path()));
    first.says("the runtime does not answer");
    let locked = fs::read_to_string(dir.path().join("run/reprise.lock")).unwrap();
    let (code, _, error) = said(&Plugin::command(dir.path()).output().unwrap());
    assert_eq!(code, Some(1), "{error}");
    let there = format!("(pid {}, since 20", first.process.id());
    assert!(error.contains("another plugin is at work with"), "{error}");
    assert!(error.contains(&there), "{error}");
    // It has touched nothing.
    let now = fs::read_to_string(dir.path().join("run/reprise.lock")).unwrap();
    assert_eq!(now, locked);

    let mut command = Plugin::command(dir.path());
    command.env("REPRISE_WAIT", "yes");
    let mut second = Plugin::start(command);
    second.says("another plugin is at work: waiting for its end");
    let mut third = Plugin::command(dir.path());
    third.arg("--wait=false");
    assert_eq!(said(&third.output().unwrap()).0, Some(1));
    first.kill();
    second.says("the other plugin has ended: taking over");
    second.says("the runtime does not answer");
}

#[test]
fn a_state_directory_that_cannot_be_made_costs_one_line() {
    let dir = tempfile::tempdir().unwrap();
    let _runtime = UnixListener::bind(dir.path().join("runtime.sock")).unwrap();
    fs::write(dir.path().join("state"), "").unwrap();
    let mut plugin = Plugin::start(Plugin::command(dir.path()));
    plugin.says("restarts cannot be written down");
    plugin.says("the runtime does not answer");
}

#[test]
fn a_directory_that_others_write_to_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let _runtime = UnixListener::bind(dir.path().join("runtime.sock")).unwrap();
    let mut command = Plugin::command(dir.path());
    let config = dir.path().join("config.yaml");
    fs::write(&config, "wait: false\n").unwrap();
    command.arg("--config").arg(config);
    let shared = dir.path().join("run");
    fs::create_dir(&shared).unwrap();
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o1777);
    fs::set_permissions(&shared, open).unwrap();
    let (code, _, error) = said(&command.output().unwrap());
    assert_eq!(code, Some(1));
    assert!(
        error.contains("others than root may write there"),
        "{error}"
    );
}
