//! Restarts in the middle of which something ends, at random instants: bouts, one after another, each of which is drawn
//! from a number that is printed with it.

mod bout;
mod judge;
mod strikes;
mod witness;

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use futures::future::{join_all, try_join_all};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use crate::node::Node;
use crate::options::Options;
use crate::plugin::Plugin;
use crate::pod::LivePod;
use crate::restarted::Before;
use crate::runner::Tally;
use crate::stage::Stage;
use bout::{Bout, TRIGGER};
use judge::{Cancelled, Case};
use strikes::Strikes;
use witness::Witness;

/// After so many violations another hour shows nothing new.
const MOST_VIOLATIONS: usize = 12;

/// Plays bouts for so long, the first one drawn from `seed`, each other one from the number after it.
pub(crate) async fn run(
    node: Arc<Node>,
    options: &Options,
    time: Duration,
    seed: u64,
) -> Result<Tally> {
    let plugin = Arc::new(Plugin::new(
        options.plugin.clone(),
        options.start.clone(),
        Arc::clone(&node),
    )?);
    let strikes = Strikes::prepare(&node, &plugin).await?;
    let mut tally = Tally::default();
    let mut faults = 0;
    let mut going = JoinSet::new();
    let end = Instant::now() + time;
    let mut seed = seed;
    while Instant::now() < end && tally.failures() < MOST_VIOLATIONS {
        let bout = Bout::drawn_from(seed);
        let name = format!("seed {seed}: {bout}");
        let stage = Stage::new(Arc::clone(&node), Arc::clone(&plugin), "soak");
        let began = Instant::now();
        let played = play(&bout, &stage, &strikes).await;
        faults += bout.strikes.len();
        let seconds = began.elapsed().as_secs_f64();
        match &played {
            Ok(outcomes) => println!("ok      {seconds:6.1} s  {name}: {outcomes}"),
            Err(error) => {
                println!("FAILED  {seconds:6.1} s  {name}\n  {error:#}");
                println!("{}", stage.report().await);
            }
        }
        match played {
            Ok(_) => tally.passed += 1,
            Err(error) => tally.fail(name, format!("{error:#}")),
        }
        if let Err(error) = node.must_be_well().await {
            tally.fail(format!("seed {seed}: the node"), format!("{error:#}"));
        }
        stage.begin_delete().await?;
        going.spawn(async move { (seed, stage.until_nothing_is_left().await) });
        seed += 1;
    }
    while let Some(gone) = going.join_next().await {
        if let (seed, Err(error)) = gone? {
            let name = format!("seed {seed}: its pods were deleted, but not without a trace");
            println!("FAILED            {name}\n  {error:#}");
            tally.fail(name, format!("{error:#}"));
        }
    }
    println!(
        "{faults} faults in {} bouts",
        tally.passed + tally.failures()
    );
    plugin.stop().await?;
    Ok(tally)
}

/// What became of the pods, in words.
async fn play(bout: &Bout, stage: &Stage, strikes: &Strikes) -> Result<String> {
    let plugin = &stage.plugin;
    if plugin.start().await? {
        plugin.until_ready(1).await?;
    }
    let pods: Vec<Arc<LivePod>> =
        try_join_all(bout.pods.iter().map(|it| stage.running(it.shape()))).await?;
    let mut cases = Vec::new();
    for (pod, drawn) in pods.iter().zip(&bout.pods) {
        let before = Before::of(pod).await?;
        let witness = Witness::of(plugin, &before.sandbox);
        let cancelled = Cancelled {
            plugins: drawn.is_replayed() && bout.kills_plugin(),
            kubelets: bout.kills_kubelet() || bout.ends_runtime(),
            runtimes: bout.ends_runtime(),
        };
        cases.push(Case::new(Arc::clone(pod), before, witness, cancelled));
    }
    let asked = Instant::now();
    let exits = bout.pods.iter().zip(&pods).map(async |(drawn, pod)| {
        sleep(drawn.after).await;
        pod.exit(TRIGGER, 42).await
    });
    let (exited, struck) = tokio::join!(
        join_all(exits),
        strikes.carry_out(&bout.strikes, asked, &cases)
    );
    exited.into_iter().collect::<Result<Vec<()>>>()?;
    let struck = struck.context("the fault could not be had")?;
    let outcomes = join_all(cases.iter().map(|case| case.is_settled(bout, &struck))).await;
    let words: Result<Vec<&str>> = outcomes.into_iter().collect();
    let mut words = words?.join(", ");
    match stage.no_container_ran_twice_at_once() {
        // What is killed behind its shield, nobody kept the kubelet from starting again (see docs/compatibility.md).
        Err(_) if bout.takes_gate_away() => words += "; one ran twice for a moment",
        once => once?,
    }
    Ok(words)
}
