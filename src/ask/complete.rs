//! What may follow on a command line of `kubectl reprise`, as kubectl asks `kubectl_complete-reprise`.
//!
//! It is answered as programs made with Cobra do: a line for each word that may be meant, then `:` and a number that says what else
//! the shell may propose (`ShellCompDirective`, `github.com/spf13/cobra/completions.go`).

use std::ffi::OsString;
use std::io::{self, Write};
use std::time::Duration;

use clap::{Arg, Command, FromArgMatches};
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::ListParams;
use tokio::time::timeout;

use crate::cli::{ClusterArgs, kubectl_plugin};

/// How long anybody waits for it.
const LIMIT: Duration = Duration::from_secs(3);
/// What is proposed at most.
const MOST: u32 = 500;

/// What may stand in the place of the last word.
#[derive(Debug, PartialEq, Eq)]
enum Proposal {
    Words(Vec<String>),
    /// Pods, but for those that are there already.
    Pods(Vec<String>),
    Files,
}

/// Proposes words for the last of `line`, which has what follows `kubectl reprise`. Whatever goes wrong, nothing is proposed.
pub async fn run(line: &[OsString], out: &mut impl Write) -> io::Result<()> {
    let line: Vec<_> = line
        .iter()
        .map(|word| word.to_string_lossy().into_owned())
        .collect();
    let (words, directive) = match proposal(&line) {
        Proposal::Words(words) => (words, "4"),
        Proposal::Files => (Vec::new(), "0"),
        Proposal::Pods(there) => {
            let names = timeout(LIMIT, pods(&line)).await.ok().flatten();
            let names = names
                .into_iter()
                .flatten()
                .filter(|name| !there.contains(name));
            (names.collect(), "4")
        }
    };
    let begun = line.last().map_or("", String::as_str);
    for word in words.iter().filter(|word| word.starts_with(begun)) {
        writeln!(out, "{word}")?;
    }
    writeln!(out, ":{directive}")
}

fn proposal(line: &[String]) -> Proposal {
    let plugin = kubectl_plugin();
    let [command, rest @ .., last] = line else {
        let commands = plugin.get_subcommands().map(|it| it.get_name().to_owned());
        return Proposal::Words(commands.collect());
    };
    let Some(command) = plugin.find_subcommand(command) else {
        return Proposal::Words(Vec::new());
    };
    if let Some(flag) = rest
        .last()
        .and_then(|word| flag(command, word))
        .filter(|it| takes_value(it))
    {
        return match flag.get_id().as_str() {
            "kubeconfig" => Proposal::Files,
            _ => Proposal::Words(values(flag)),
        };
    }
    if last.starts_with('-') {
        let flags = command.get_arguments().filter_map(Arg::get_long);
        return Proposal::Words(flags.map(|flag| format!("--{flag}")).collect());
    }
    Proposal::Pods(rest.to_vec())
}

/// The flag that a word is, without a value of its own.
fn flag<'c>(command: &'c Command, word: &str) -> Option<&'c Arg> {
    command.get_arguments().find(|flag| {
        let long = flag.get_long().map(|long| format!("--{long}"));
        let short = flag.get_short().map(|short| format!("-{short}"));
        [long, short].iter().flatten().any(|it| it == word)
    })
}

fn takes_value(flag: &Arg) -> bool {
    flag.get_action().takes_values()
}

fn values(flag: &Arg) -> Vec<String> {
    let values = flag.get_possible_values();
    values
        .iter()
        .map(|value| value.get_name().to_owned())
        .collect()
}

/// The pods of the cluster and the namespace that the line says.
async fn pods(line: &[String]) -> Option<Vec<String>> {
    let (client, namespace) = super::connect(&cluster(line)?).await.ok()?;
    let params = ListParams::default().limit(MOST);
    let pods = Api::<Pod>::namespaced(client, &namespace);
    let found = pods.list_metadata(&params).await.ok()?;
    Some(
        found
            .items
            .into_iter()
            .filter_map(|pod| pod.metadata.name)
            .collect(),
    )
}

fn cluster(line: &[String]) -> Option<ClusterArgs> {
    let words = ["kubectl-reprise"]
        .into_iter()
        .chain(line.iter().map(String::as_str));
    // It need not be whole yet.
    let matches = kubectl_plugin()
        .ignore_errors(true)
        .try_get_matches_from(words)
        .ok()?;
    let (_, of_command) = matches.subcommand()?;
    ClusterArgs::from_arg_matches(of_command).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(text: &str) -> Vec<String> {
        text.split(' ').map(str::to_owned).collect()
    }

    fn words(text: &str) -> Vec<String> {
        match proposal(&line(text)) {
            Proposal::Words(words) => words,
            other => panic!("{text}: {other:?}"),
        }
    }

    #[test]
    fn a_command_comes_first_and_then_pods_or_flags() {
        assert_eq!(words("r"), ["restart", "status"]);
        assert_eq!(words("nothing "), [""; 0]);
        for command in ["restart", "status"] {
            let pods = |rest: &str| proposal(&line(&format!("{command} {rest}")));
            assert_eq!(pods("we"), Proposal::Pods(Vec::new()));
            assert_eq!(pods("web-0 "), Proposal::Pods(line("web-0")));
            assert_eq!(
                pods("-n prod --context=c "),
                Proposal::Pods(line("-n prod --context=c"))
            );
            assert_eq!(pods("--kubeconfig "), Proposal::Files);
            assert_eq!(words(&format!("{command} -n ")), [""; 0]);
            assert!(words(&format!("{command} -")).contains(&"--namespace".to_owned()));
        }
        assert_eq!(
            proposal(&line("restart --wait ")),
            Proposal::Pods(line("--wait"))
        );
        assert_eq!(words("status -o "), ["json"]);
    }

    #[test]
    fn the_cluster_is_the_one_of_a_line_that_is_not_whole() {
        let of = |text: &str| cluster(&line(text)).unwrap();
        for text in [
            "restart -n prod --context=c --kubeconfig k ",
            "restart web --wait -n prod --context c --kubeconfig k --max-unavailable x ",
            "status --namespace prod --context c --kubeconfig k we",
        ] {
            let cluster = of(text);
            assert_eq!(cluster.namespace.as_deref(), Some("prod"), "{text}");
            assert_eq!(cluster.context.as_deref(), Some("c"), "{text}");
            assert_eq!(cluster.kubeconfig.unwrap().to_str(), Some("k"), "{text}");
        }
        assert_eq!(of("restart ").namespace, None);
    }

    #[tokio::test]
    async fn words_are_written_as_cobra_writes_them() {
        let mut out = Vec::new();
        run(&["st".into()], &mut out).await.unwrap();
        assert_eq!(out, b"status\n:4\n");
        let nowhere = ["restart", "--kubeconfig", "/nowhere", ""].map(OsString::from);
        let mut out = Vec::new();
        run(&nowhere, &mut out).await.unwrap();
        assert_eq!(out, b":4\n");
    }
}
