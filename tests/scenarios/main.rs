//! Scenarios of Reprise on a real node: real kubelet, real containerd, the real plugin.
//! `cargo test --test scenarios -- --help` tells how to choose among them.

mod cases;
mod device_plugin;
mod evidence;
mod history;
mod jobset;
mod logind;
mod node;
mod options;
mod plugin;
mod pod;
mod pressure;
mod proxy;
mod recorder;
mod relay;
mod restarted;
mod runner;
mod runtime;
mod scenario;
mod scrape;
mod shape;
mod skipped;
mod slow;
mod soak;
mod stage;
mod under_way;
mod wait;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Result;
use clap::Parser;

use node::Node;
use options::Options;
use runner::{Runner, Tally};

#[tokio::main]
async fn main() -> ExitCode {
    let options = Options::parse();
    match run(&options).await {
        Ok(tally) => {
            for (name, failures) in &tally.failed {
                println!("failed {} of {}: {name}", failures.len(), options.repeat);
                for failure in failures {
                    println!("  {}", failure.lines().next().unwrap_or_default());
                }
            }
            println!(
                "{} passed, {} failed, {} skipped",
                tally.passed,
                tally.failures(),
                tally.skipped
            );
            ExitCode::from(u8::from(tally.failures() > 0))
        }
        Err(error) => {
            println!("FAILED: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run(options: &Options) -> Result<Tally> {
    let mut scenarios = cases::all();
    scenarios.retain(|scenario| options.wants(scenario));
    if options.list {
        for scenario in &scenarios {
            println!("{} ({:?})", scenario.name, scenario.company);
        }
        return Ok(Tally::default());
    }
    let Some(env_file) = &options.node_env else {
        println!("skipped: no node to run on; REPRISE_NODE_ENV names none (see hack/test.sh)");
        return Ok(Tally {
            skipped: scenarios.len(),
            ..Tally::default()
        });
    };
    let node = Arc::new(Node::read(env_file).await?);
    if let Some(minutes) = options.soak {
        let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
        let time = Duration::from_mins(minutes);
        return soak::run(node, options, time, options.seed.unwrap_or(now)).await;
    }
    Runner::new(node, options)?.run(&scenarios, options).await
}
