//! The command line: which command was asked for, and its help.

use std::ffi::OsString;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use clap::{ArgGroup, Args, CommandFactory, Parser, Subcommand, ValueEnum};

use crate::ask::{PodName, Selector, Target, Timeout};
use crate::check::CheckArgs;
use crate::config::RunArgs;
use crate::history::HistoryArgs;

/// Restarts all containers of a Kubernetes pod in place, as an NRI plugin
///
/// A container of a pod that carries restart rules exits with a code that asks for it, and all
/// containers of the pod start again: same sandbox, UID, IP, devices and volumes, init containers
/// included. Nothing in the kubelet or the runtime is patched.
#[derive(Debug, Parser)]
#[command(
    name = "reprise",
    version,
    subcommand_required = true,
    arg_required_else_help = true
)]
#[command(after_long_help = "\
Exit codes: 0 done, 1 failed or problems found, 2 wrong usage.

Example: a pod whose container asks for a restart of all by exiting with 42
  metadata:
    annotations:
      restart-rules.reprise.dev: |
        [{action: RestartAllContainers, exitCodes: {operator: In, values: [42]}}]")]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the plugin
    ///
    /// Connects to the container runtime over NRI and restarts pods until it is told to stop. It
    /// is also what this executable does when the runtime starts it, as
    /// /opt/nri/plugins/10-reprise.
    ///
    /// Every flag can be set in the environment as REPRISE_<NAME> and in the config file under its
    /// long name; a flag goes before the environment, which goes before the file, which goes before
    /// what NRI hands over from /etc/nri/conf.d.
    #[command(after_long_help = "\
Example: with a config file that holds `log-level: debug`
  reprise run --config /etc/reprise/config.yaml --log-format json")]
    Run(Box<RunArgs>),

    /// Hold a container's exit; the container runtime runs this as an OCI hook, nobody else does
    Hook,

    /// Validate the annotations of manifests and say what each exit does
    ///
    /// Reads pods, and everything with a pod template in it (deployments, jobs, cron jobs, job sets, leader worker sets, …),
    /// from YAML or JSON with any number of documents. For every container it says which exit codes lead to what. It is an
    /// error if an annotation is wrong, names a container that is not in the pod, or stands where it has no effect. It
    /// warns of rules that match 137 or 143, with which a container also ends that somebody else kills, and of what keeps a
    /// pod from being replayed, as far as the spec tells. It needs no cluster.
    #[command(after_long_help = "\
Exit codes: 0 all is well, or there are only warnings; 1 something is wrong or cannot be read; 2 wrong usage.

Examples:
  reprise check deployment.yaml
  reprise check --kubelet 1.36 --output json manifests/
  kubectl kustomize . | reprise check -")]
    Check(CheckArgs),

    /// Show what this node's plugin did, the newest first
    ///
    /// A line for each restart, and for each that is under way: what set it off and by which rule, what became of it, how
    /// long it waited in a back-off, and after how long what ran had been killed, the first container ran again, and all did.
    /// It reads the files of the plugin, which need not run, and which are root's. The last 1000 restarts are kept.
    #[command(after_long_help = "\
Exit codes: 0 done, 1 there is no state directory, it cannot be read, or no restart is as asked for, 2 wrong usage.

Examples:
  reprise history
  reprise history web-0 -n prod
  reprise history --watch --output json
  kubectl -n kube-system exec reprise-x7k2p -- /reprise history")]
    History(HistoryArgs),

    /// Remove what the plugin has left on a node that is to be without it
    ///
    /// That is: containers that a restart made and did not start, the conditions of pods and of the node, copies of the
    /// hook, and all files. It takes the settings of `reprise run`, and the plugin must have ended. Containers that were
    /// made with the hook go on as they are. Where a `DaemonSet` runs the plugin, its deletion does this on each node
    /// (`reprise run --daemonset`). It exits with 1 if something stays, and with 3 if a plugin is at work.
    #[command(after_long_help = "\
Examples:
  systemctl disable --now reprise && reprise cleanup
  reprise cleanup --all-nodes --daemonset kube-system/reprise")]
    Cleanup(Box<CleanupArgs>),

    /// What users ask for.
    #[command(flatten)]
    Ask(AskCommand),

    /// Print the version
    Version,
}

/// The commands that go through the API server, by the rights of whoever calls, from anywhere.
#[derive(Debug, Subcommand)]
pub enum AskCommand {
    /// Restart pods in place
    ///
    /// Asks the plugin on each pod's node for it, with a new value of the pod's annotation
    /// restart-request.reprise.dev/pod. That takes the rights to get, list and patch pods, to watch them if it is to wait,
    /// and to get the deployment, stateful set or daemon set that is named.
    ///
    /// A pod that restarts already does so once, for all who ask. One that is backing off waits until that is over, unless it
    /// is asked with --now. With --max-unavailable no further pod is asked after one that has not restarted.
    #[command(after_long_help = "\
Exit codes: 0 all have restarted (or, without --wait, are asked to), 1 some have not or something is wrong, 2 wrong usage,
4 some did not answer in time, 130 interrupted while waiting.

Examples:
  reprise restart web-0 --wait
  reprise restart job/training --wait --timeout 10m
  reprise restart deployment/web --max-unavailable 1
  kubectl reprise restart -n prod -l app=web --dry-run")]
    Restart(RestartArgs),

    /// Show which pods restart, or have
    ///
    /// Of pods that are not named, those that Reprise has restarted, or is restarting. It takes the right to list pods, or to
    /// get them if they are named.
    #[command(after_long_help = "\
Examples:
  reprise status
  kubectl reprise status -A -o json")]
    Status(StatusArgs),
}

/// The command line of `kubectl-reprise`, which kubectl runs as `kubectl reprise`.
#[derive(Debug, Parser)]
#[command(
    name = "kubectl reprise",
    bin_name = "kubectl reprise",
    version,
    about = "Restarts all containers of a pod in place, and shows which pods do",
    subcommand_required = true,
    arg_required_else_help = true
)]
struct KubectlPlugin {
    #[command(subcommand)]
    command: AskCommand,
}

/// The definition of that command line.
pub(crate) fn kubectl_plugin() -> clap::Command {
    KubectlPlugin::command()
}

/// Which cluster, and which namespace of it.
#[derive(Debug, Clone, Args)]
pub struct ClusterArgs {
    /// The namespace; by default the context's
    #[arg(short, long, value_name = "NAME")]
    pub namespace: Option<String>,
    /// Where the API server is; by default what KUBECONFIG says, ~/.kube/config, or the pod's service account
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// The kubeconfig's context; by default its current one
    #[arg(long, value_name = "NAME")]
    pub context: Option<String>,
}

/// The command line of `reprise restart`.
#[derive(Debug, Clone, Args)]
#[command(group(ArgGroup::new("which").required(true).args(["targets", "selector"])))]
pub struct RestartArgs {
    /// Pods, and what has pods: job/NAME, jobset/NAME, deployment/NAME, statefulset/NAME, daemonset/NAME
    #[arg(value_name = "POD|TYPE/NAME")]
    pub targets: Vec<Target>,
    /// Pods with these labels
    #[arg(short = 'l', long, value_name = "LABELS")]
    pub selector: Option<Selector>,
    /// At most so many pods under way at a time; by default all. With fewer than there are it waits
    #[arg(long, value_name = "N")]
    pub max_unavailable: Option<NonZeroUsize>,
    /// Wait until the pods have restarted, and are ready again if they were
    #[arg(long)]
    pub wait: bool,
    /// How long to wait for each pod
    #[arg(long, value_name = "TIME", default_value = "5m")]
    pub timeout: Timeout,
    /// Do not wait for a back-off
    #[arg(long)]
    pub now: bool,
    /// Only have the API server say whether it would take the requests
    #[arg(long)]
    pub dry_run: bool,
    /// Where they are.
    #[command(flatten)]
    pub cluster: ClusterArgs,
}

/// The command line of `reprise status`.
#[derive(Debug, Clone, Args)]
pub struct StatusArgs {
    /// These pods only
    #[arg(value_name = "POD", conflicts_with_all = ["selector", "all_namespaces"])]
    pub pods: Vec<PodName>,
    /// Pods with these labels
    #[arg(short = 'l', long, value_name = "LABELS")]
    pub selector: Option<Selector>,
    /// Pods of all namespaces
    #[arg(short = 'A', long, conflicts_with = "namespace")]
    pub all_namespaces: bool,
    /// How to write it; by default a table
    #[arg(short, long, value_name = "FORMAT")]
    pub output: Option<OutputFormat>,
    /// Where they are.
    #[command(flatten)]
    pub cluster: ClusterArgs,
}

/// How `reprise status` writes, if not as a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum OutputFormat {
    /// A list with an object for each pod.
    Json,
}

/// The command line of `reprise cleanup`.
#[derive(Debug, Args)]
pub struct CleanupArgs {
    /// Delete the `DaemonSet` that runs the plugin, and wait until each of its pods has cleaned up its node.
    #[arg(long)]
    pub all_nodes: bool,
    /// The settings of the plugin.
    #[command(flatten)]
    pub run: RunArgs,
}

impl Cli {
    /// Reads the command line. The error knows its exit code: 2, or 0 when help was asked for.
    ///
    /// `launched_by_nri`: the runtime started this process as a plugin, without arguments.
    pub fn from_arguments(
        arguments: impl IntoIterator<Item = OsString>,
        launched_by_nri: bool,
    ) -> Result<Self, clap::Error> {
        let mut arguments: Vec<_> = arguments.into_iter().collect();
        let program = arguments.first().map(Path::new).and_then(file_name);
        if program == Some("kubectl-reprise") {
            let KubectlPlugin { command } = KubectlPlugin::try_parse_from(arguments)?;
            return Ok(Self {
                command: Command::Ask(command),
            });
        }
        if arguments.len() == 1 && (launched_by_nri || program.is_some_and(is_plugin)) {
            arguments.push("run".into());
        }
        Self::try_parse_from(arguments)
    }
}

fn file_name(program: &Path) -> Option<&str> {
    program.file_name().and_then(|name| name.to_str())
}

/// Whether an executable of that name is what NRI wants its plugins named: `NN-reprise`.
fn is_plugin(name: &str) -> bool {
    let index = name.strip_suffix("-reprise").unwrap_or_default();
    index.len() == 2 && index.bytes().all(|byte| byte.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(arguments: &[&str], launched_by_nri: bool) -> Result<Command, clap::Error> {
        let arguments = arguments.iter().map(OsString::from);
        Cli::from_arguments(arguments, launched_by_nri).map(|cli| cli.command)
    }

    #[test]
    fn the_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_plugin_runs_when_it_is_started_without_arguments() {
        assert!(matches!(
            parse(&["/opt/nri/plugins/10-reprise"], false),
            Ok(Command::Run(_))
        ));
        assert!(matches!(parse(&["reprise"], true), Ok(Command::Run(_))));
    }

    #[test]
    fn anyone_else_is_shown_the_help() {
        for program in [
            "reprise",
            "1-reprise",
            "100-reprise",
            "xx-reprise",
            "10-other",
        ] {
            assert_eq!(
                parse(&[program], false).unwrap_err().exit_code(),
                2,
                "{program}"
            );
        }
    }

    #[test]
    fn arguments_go_before_the_name() {
        let check = parse(&["10-reprise", "check", "a.yaml", "-"], true).unwrap();
        let Command::Check(check) = check else {
            panic!("{check:?}")
        };
        assert_eq!(check.files, [Path::new("a.yaml"), Path::new("-")]);
    }

    #[test]
    fn every_flag_is_documented_and_has_its_variable() {
        let command = Cli::command();
        let run = command.find_subcommand("run").unwrap();
        for flag in run.get_arguments() {
            let name = flag.get_long().unwrap().to_uppercase().replace('-', "_");
            assert!(flag.get_help().is_some() && !flag.is_hide_set(), "{name}");
            let variable = flag.get_env().unwrap();
            assert_eq!(variable, format!("REPRISE_{name}").as_str());
        }
    }

    #[test]
    fn kubectl_has_the_commands_for_users_alone() {
        let help = parse(&["/usr/bin/kubectl-reprise", "--help"], false).unwrap_err();
        assert_eq!(help.exit_code(), 0);
        let help = help.to_string();
        assert!(help.contains("Usage: kubectl reprise <COMMAND>"), "{help}");
        let commands = help
            .lines()
            .filter_map(|line| line.split_whitespace().next());
        let commands: Vec<_> = commands.collect();
        for command in ["restart", "status"] {
            assert!(commands.contains(&command), "{help}");
        }
        for command in ["run", "hook", "check", "cleanup"] {
            assert!(!commands.contains(&command), "{help}");
            let refused = parse(&["kubectl-reprise", command], false).unwrap_err();
            assert_eq!(refused.exit_code(), 2, "{command}");
        }
        let help = parse(&["kubectl-reprise", "restart", "-h"], false).unwrap_err();
        let help = help.to_string();
        assert!(help.contains("Usage: kubectl reprise restart"), "{help}");
    }

    #[test]
    fn a_restart_is_of_pods_that_are_named_or_selected() {
        for words in [
            "a job/b --wait",
            "-l app=web --max-unavailable 1",
            "a --timeout 1h --now",
        ] {
            let line = format!("kubectl-reprise restart {words} -n prod");
            let command = parse(&line.split(' ').collect::<Vec<_>>(), false);
            assert!(
                matches!(command, Ok(Command::Ask(_))),
                "{words}: {command:?}"
            );
        }
        for words in [
            "",
            "a -l app=web",
            "-l=",
            "node/a",
            "job",
            "a --max-unavailable 0",
            "a --timeout 5",
            "--all",
        ] {
            let line = format!("reprise restart {words}");
            let words: Vec<_> = line.split_whitespace().collect();
            assert_eq!(parse(&words, false).unwrap_err().exit_code(), 2, "{line}");
        }
        for words in ["a -A", "-A -n prod", "a -l app=web", "job/a", "-o yaml"] {
            let line = format!("reprise status {words}");
            let words: Vec<_> = line.split(' ').collect();
            assert_eq!(parse(&words, false).unwrap_err().exit_code(), 2, "{line}");
        }
    }
}
