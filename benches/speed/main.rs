//! How fast and how small Reprise is, on a real node, beside what else there is. `make bench` runs it.

mod api_server;
mod bursts;
mod costs;
mod hostile;
mod machine;
mod nri;
mod options;
mod plot;
mod report;
mod restarts;
mod stats;

/// The scenarios' own: a pod is made, told to exit and judged here as it is there.
macro_rules! from_scenarios {
    ($($file:literal $name:ident),+ $(,)?) => {
        $(
            #[allow(dead_code, reason = "scenarios need more of it")]
            #[path = $file]
            mod $name;
        )+
    };
}
from_scenarios!(
    "../../tests/scenarios/evidence.rs" evidence,
    "../../tests/scenarios/node.rs" node,
    "../../tests/scenarios/plugin.rs" plugin,
    "../../tests/scenarios/pod.rs" pod,
    "../../tests/scenarios/recorder.rs" recorder,
    "../../tests/scenarios/restarted.rs" restarted,
    "../../tests/scenarios/runtime.rs" runtime,
    "../../tests/scenarios/shape.rs" shape,
    "../../tests/scenarios/skipped.rs" skipped,
    "../../tests/scenarios/stage.rs" stage,
    "../../tests/scenarios/wait.rs" wait,
);

use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use serde::Serialize;

use bursts::{Burst, Group};
use costs::Costs;
use machine::Machine;
use node::{NATIVE, Node};
use options::Options;
use plugin::Plugin;
use restarts::Round;

/// Everything that was measured, as it goes into the JSON file.
#[derive(Serialize)]
pub(crate) struct Results {
    machine: Machine,
    options: Options,
    restarts: Vec<Round>,
    bursts: Vec<Burst>,
    groups: Vec<Group>,
    costs: Costs,
    hostile: hostile::Memory,
}

#[tokio::main]
async fn main() -> ExitCode {
    let options = Options::parse();
    match run(options).await {
        Ok(0) => ExitCode::SUCCESS,
        Ok(failed) => {
            say(&format!("FAILED: {failed} rounds were not measured"));
            ExitCode::FAILURE
        }
        Err(error) => {
            say(&format!("FAILED: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

/// Measures, writes the results, prints the tables, and returns how many rounds failed.
async fn run(options: Options) -> Result<usize> {
    let Some(env_file) = &options.node_env else {
        say("skipped: no node to run on; `make bench` brings one up");
        return Ok(0);
    };
    let node = Arc::new(Node::read(env_file).await?);
    ensure!(
        node.declares(NATIVE).await?,
        "the kubelet of node {} has no restart of all containers to compare with",
        node.name
    );
    let plugin = Arc::new(Plugin::new(
        options.plugin()?,
        "Kubelet".to_owned(),
        Arc::clone(&node),
    )?);
    let measured = measure(&node, &plugin, options).await;
    let (results, target) = match measured {
        Ok(results) => results,
        Err(error) => {
            for line in plugin.log_lines("")?.iter().rev().take(20).rev() {
                say(&format!("plugin: {line}"));
            }
            return Err(error);
        }
    };
    if let Some(directory) = target.parent() {
        std::fs::create_dir_all(directory)?;
    }
    std::fs::write(&target, serde_json::to_vec_pretty(&results)?)
        .with_context(|| format!("cannot write {}", target.display()))?;
    let drawing = target.with_extension("svg");
    std::fs::write(&drawing, plot::svg(&results))
        .with_context(|| format!("cannot write {}", drawing.display()))?;
    print!("{}", report::markdown(&results));
    say(&format!(
        "all rounds: {}, as bars: {}",
        target.display(),
        drawing.display()
    ));
    let alone = results.restarts.iter().filter(|it| it.failed()).count();
    let at_once: usize = results.bursts.iter().map(|it| it.failed).sum();
    Ok(alone + at_once)
}

async fn measure(
    node: &Arc<Node>,
    plugin: &Arc<Plugin>,
    options: Options,
) -> Result<(Results, std::path::PathBuf)> {
    let machine = Machine::of(node, &plugin.binary).await?;
    say(&format!("{machine}"));
    plugin.start().await?;
    plugin.until_ready(1).await?;
    let idle = costs::resident(plugin.pid().await?)?;
    let hostile = hostile::memory(node, plugin).await?;
    plugin.start().await?;
    plugin.until_ready(1).await?;
    let restarts = restarts::measure(node, plugin, &options).await?;
    // Before the bursts, which take their time to be cleared away.
    let groups = bursts::measure_groups(node, plugin, &options).await?;
    let bursts = bursts::measure(node, plugin, &options).await?;
    let costs = costs::measure(node, plugin, &options, idle).await?;
    let target = options.output.clone();
    let results = Results {
        machine,
        options,
        restarts,
        bursts,
        groups,
        costs,
        hostile,
    };
    Ok((results, target))
}

/// Progress, beside the results on standard output.
pub(crate) fn say(line: &str) {
    eprintln!("{line}");
}
