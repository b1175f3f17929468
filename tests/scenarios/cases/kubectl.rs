//! `kubectl reprise`, as somebody uses it who has just installed it.

use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead, BufReader};
use std::iter;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::task::spawn_blocking;

use super::conditions::condition;
use super::probes::probe;
use crate::recorder::Snapshot;
use crate::restarted::Before;
use crate::scenario::{Scenario, scenarios};
use crate::shape::Shape;
use crate::stage::Stage;
use crate::wait::{self, PATIENCE};

pub(crate) fn scenarios() -> Vec<Scenario> {
    [
        scenarios![Shared:
            kubectl_restarts_a_pod_and_tells_of_it,
            kubectl_waits_until_what_runs_now_is_ready,
            kubectl_proposes_names_of_pods,
            kubectl_draws_a_bar_on_a_terminal,
        ],
        scenarios![Alone:
            kubectl_that_waits_in_vain_says_so_and_the_request_stands,
        ],
    ]
    .concat()
}

/// The plugin by the names by which kubectl looks for it.
struct Installed<'s> {
    stage: &'s Stage,
    dir: TempDir,
}

impl<'s> Installed<'s> {
    fn on(stage: &'s Stage) -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let plugin = "kubectl-reprise";
        symlink(&stage.plugin.binary, dir.path().join(plugin))?;
        // A script that is shipped.
        let completion = "kubectl_complete-reprise";
        let deploy = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy");
        symlink(deploy.join(completion), dir.path().join(completion))?;
        Ok(Self { stage, dir })
    }

    fn kubectl(&self, args: &[&str]) -> Command {
        let mut command = self.stage.node.kubectl_with_plugin(self.dir.path(), args);
        command.stdin(Stdio::null());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Of somebody whose token the API server does not know.
    async fn kubeconfig_of_a_stranger(&self) -> Result<String> {
        let (_, config) = run(self.kubectl(&["config", "view", "--raw", "-o", "json"])).await?;
        let mut config: Value = serde_json::from_str(&config)?;
        config["users"][0]["user"] = json!({"token": "of-yesterday"});
        let path = self.dir.path().join("stranger.yaml");
        fs::write(&path, config.to_string())?;
        Ok(path.to_string_lossy().into_owned())
    }

    fn reprise(&self, args: &[&str]) -> Command {
        self.kubectl(&[&["reprise"], args, &["--namespace", "default"]].concat())
    }
}

/// The same where somebody sits at it, by util-linux's script(1). No word in it is one that a shell would split.
fn on_a_terminal(command: &Command) -> Command {
    let words = iter::once(command.get_program()).chain(command.get_args());
    let words: Vec<_> = words.map(OsStr::to_string_lossy).collect();
    let mut terminal = Command::new("script");
    terminal.args(["--quiet", "--return", "--command", &words.join(" ")]);
    terminal.arg("/dev/null").stdin(Stdio::null());
    terminal.envs(command.get_envs().filter_map(|(key, it)| Some((key, it?))));
    terminal
}

/// Its exit code, and all that it says.
async fn run(mut command: Command) -> Result<(Option<i32>, String)> {
    Ok(said(&spawn_blocking(move || command.output()).await??))
}

fn said(output: &Output) -> (Option<i32>, String) {
    let said = [&*output.stdout, &*output.stderr].concat();
    let said = String::from_utf8_lossy(&said).into_owned();
    (output.status.code(), said)
}

/// Somebody presses Ctrl-C when it has said that it has asked.
fn interrupted_when_it_waits(mut child: Child) -> Result<(Option<i32>, String)> {
    let pid = Pid::from_raw(child.id().try_into()?);
    let mut lines = BufReader::new(child.stdout.take().context("it says nothing")?);
    let mut asked = String::new();
    lines.read_line(&mut asked)?;
    // kubectl has become the plugin.
    kill(pid, Signal::SIGINT)?;
    let (code, told) = said(&child.wait_with_output()?);
    Ok((code, asked + &told))
}

fn shape() -> Shape {
    let shape = Shape::never().regular("trainer");
    shape.restarts_all("trainer", 42)
}

async fn kubectl_restarts_a_pod_and_tells_of_it(stage: Stage) -> Result<()> {
    let pod = stage.running(shape()).await?;
    let installed = Installed::on(&stage)?;
    let before = Before::of(&pod).await?;
    let restart = installed.reprise(&["restart", &pod.name, "--wait"]);
    let (code, said) = run(restart).await?;
    let line = said
        .lines()
        .any(|it| it.contains(&pod.name) && it.contains("restarted"));
    ensure!(code == Some(0) && line, "{code:?}: {said}");
    pod.has_restarted(&before).await?;
    let (code, said) = run(installed.reprise(&["status", &pod.name])).await?;
    let row = said
        .lines()
        .any(|it| it.starts_with(&pod.name) && it.contains("Restart 1: "));
    ensure!(code == Some(0) && row, "{code:?}: {said}");
    let stranger = installed.kubeconfig_of_a_stranger().await?;
    for (args, exits_with, why) in [
        (&["restart", "nobody"][..], 1, "nobody"),
        (&["restart", "job/nobody"], 1, "nobody"),
        (&["restart", "-l", "asked=no"], 1, "asked=no"),
        (&["restart", "-l", "a=b=c"], 1, "found '='"),
        (&["restart"], 2, "Usage"),
        (&["status", "-l", "asked=no"], 1, "asked=no"),
        (&["status", "nobody"], 1, "nobody"),
        (&["restart", &pod.name, "--kubeconfig", &stranger], 1, "401"),
    ] {
        let (code, said) = run(installed.reprise(args)).await?;
        let clear = said.contains(why) && !said.contains("panicked");
        ensure!(
            code == Some(exits_with) && clear,
            "{args:?}: {code:?}: {said}"
        );
    }
    // The kubelet's own rights on this node do not reach so far.
    let theirs = stage.node.plugin_kubeconfig.to_string_lossy().into_owned();
    let restart = installed.reprise(&["restart", &pod.name, "--kubeconfig", &theirs]);
    let (code, said) = run(restart).await?;
    let denied = said.contains("forbidden") || said.contains("may not");
    ensure!(code == Some(1) && denied, "{code:?}: {said}");
    Ok(())
}

/// The plugin is done long before the kubelet has looked.
async fn kubectl_waits_until_what_runs_now_is_ready(stage: Stage) -> Result<()> {
    let probe = probe("true", json!({"initialDelaySeconds": 3}));
    let shape = shape().field("readinessProbe", probe).started_by("Replay");
    let pod = stage.running(shape).await?;
    let ready = |now: &Snapshot| (!now.ready).then(|| "it is not".to_owned());
    pod.recorder.until("it is ready", PATIENCE, ready).await?;
    let before = Before::of(&pod).await?;
    let installed = Installed::on(&stage)?;
    let restart = installed.reprise(&["restart", &pod.name, "--wait"]);
    let (code, said) = run(restart).await?;
    let is_ready = condition(&pod, "Ready").await?.map(|it| it.status);
    let (_, seen) = run(installed.kubectl(&["get", "pod", &pod.name, "-o", "json"])).await?;
    let seen: Value = serde_json::from_str(&seen)?;
    let restarts = &seen["status"]["containerStatuses"][0]["restartCount"];
    ensure!(
        code == Some(0) && is_ready.as_deref() == Some("True") && *restarts == json!(1),
        "{code:?}: {said}; ready: {is_ready:?}, restarts: {restarts}"
    );
    pod.has_restarted(&before).await
}

/// As a shell asks it when somebody presses Tab.
async fn kubectl_proposes_names_of_pods(stage: Stage) -> Result<()> {
    let pod = stage.running(shape()).await?;
    let installed = Installed::on(&stage)?;
    let begun = &pod.name[..pod.name.len() - 1];
    for (line, proposed) in [
        (&["restart", begun][..], Some(&*pod.name)),
        (&["status", "-n", "default", begun], Some(&pod.name)),
        (&["restart", "-n", "kube-system", begun], None),
        (&["rest"], Some("restart")),
        (&["restart", "--max-un"], Some("--max-unavailable")),
    ] {
        let line = [&["__complete", "reprise"], line].concat();
        // An API server that is slow is not waited for for long.
        wait::until("the right word is proposed", PATIENCE, async || {
            let (code, said) = run(installed.kubectl(&line)).await?;
            let mut words = said.lines().take_while(|word| !word.starts_with(':'));
            let right = match proposed {
                Some(word) => words.any(|it| it == word),
                None => words.next().is_none(),
            };
            let right = right && code == Some(0);
            Ok(right
                .then_some(())
                .ok_or_else(|| format!("{line:?}: {code:?}: {said}")))
        })
        .await?;
    }
    Ok(())
}

async fn kubectl_draws_a_bar_on_a_terminal(stage: Stage) -> Result<()> {
    // The kubelet has a back-off of its own for what exits twice. A second is long enough for each state to be drawn.
    let shape = || {
        let shape = Shape::never().init("fetch").at_first("sleep 1");
        let shape = shape.regular("trainer").restarts_all("trainer", 42);
        // A request waits for nothing.
        shape.started_by("Replay").backs_off(120)
    };
    let pods = [stage.running(shape()).await?, stage.running(shape()).await?];
    let [first, second] = pods.each_ref().map(|pod| &*pod.name);
    let before = [Before::of(&pods[0]).await?, Before::of(&pods[1]).await?];
    let installed = Installed::on(&stage)?;
    let (code, said) = run(installed.reprise(&["restart", first, second, "--dry-run"])).await?;
    let both =
        [first, second].map(|name| format!("pod/{name} would be asked to restart (dry run)"));
    let both = both.iter().all(|line| said.contains(line));
    ensure!(code == Some(0) && both, "{code:?}: {said}");
    let in_turns = ["restart", first, second, "--max-unavailable", "1"];
    let (code, said) = run(on_a_terminal(&installed.reprise(&in_turns))).await?;
    let bars = [
        "\r\u{1b}[K[--------------------] 0 of 2 restarted, 1 under way, 0:0",
        "\r\u{1b}[K[##########----------] 1 of 2 restarted, 1 under way, 0:",
        "\r\u{1b}[K[####################] 2 of 2 restarted, 0:",
    ];
    let drawn = bars.iter().all(|bar| said.contains(bar)) && !said.contains("pod/");
    ensure!(code == Some(0) && drawn, "{code:?}: {said:?}");
    // By the dry run nobody has.
    for (pod, before) in pods.iter().zip(&before) {
        pod.has_restarted_or_begun_anew(before).await?;
    }
    let before = Before::of(&pods[1]).await?;
    let asked = SystemTime::now().duration_since(UNIX_EPOCH)?;
    let (code, said) = run(installed.reprise(&["restart", second, "--now", "--wait"])).await?;
    ensure!(code == Some(0), "{code:?}: {said}");
    pods[1].has_restarted_or_begun_anew(&before).await?;
    pods[1].ran_soon_after(asked, &before, PATIENCE)
}

async fn kubectl_that_waits_in_vain_says_so_and_the_request_stands(stage: Stage) -> Result<()> {
    let pod = stage.running(shape()).await?;
    let installed = Installed::on(&stage)?;
    let before = Before::of(&pod).await?;
    stage.plugin.kill().await?;
    let waits = ["restart", &pod.name, "--wait"];
    let late = installed.reprise(&[&waits[..], &["--timeout", "2s"]].concat());
    let (code, told) = run(late).await?;
    ensure!(
        code == Some(4) && told.contains(&pod.name),
        "{code:?}: {told}"
    );
    let child = installed.reprise(&waits).spawn()?;
    let (code, told) = spawn_blocking(|| interrupted_when_it_waits(child)).await??;
    ensure!(
        code == Some(130) && told.contains(&pod.name),
        "{code:?}: {told}"
    );
    stage.plugin.start().await?;
    pod.has_restarted(&before).await
}
