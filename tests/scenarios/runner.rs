//! Plays scenarios and says how they went. libtest has neither a teardown for the plugin they share
//! nor a way to run some of them alone.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, anyhow, bail};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use crate::node::Node;
use crate::options::Options;
use crate::plugin::Plugin;
use crate::scenario::{Company, Scenario, Skipped};
use crate::stage::Stage;

/// For a scenario's own steps; each wait in it has a shorter limit of its own.
const LIMIT: Duration = Duration::from_mins(4);

#[derive(Default)]
pub(crate) struct Tally {
    pub(crate) passed: usize,
    pub(crate) skipped: usize,
    /// Failures by scenario.
    pub(crate) failed: BTreeMap<String, usize>,
}

impl Tally {
    pub(crate) fn failures(&self) -> usize {
        self.failed.values().sum()
    }

    fn take(&mut self, outcome: &Outcome) {
        match &outcome.result {
            Ok(()) => self.passed += 1,
            Err(error) if error.is::<Skipped>() => self.skipped += 1,
            Err(_) => *self.failed.entry(outcome.name.clone()).or_default() += 1,
        }
    }
}

struct Outcome {
    name: String,
    took: Duration,
    result: Result<()>,
    report: String,
}

impl Outcome {
    fn print(&self) {
        let seconds = self.took.as_secs_f64();
        match &self.result {
            Ok(()) => println!("ok      {seconds:6.1} s  {}", self.name),
            Err(error) if error.is::<Skipped>() => {
                println!("skipped           {}: {error}", self.name);
            }
            Err(error) => {
                println!("FAILED  {seconds:6.1} s  {}", self.name);
                println!("  {error:#}\n{}", self.report);
            }
        }
    }
}

pub(crate) struct Runner {
    node: Arc<Node>,
    plugin: Arc<Plugin>,
    with_plugin: bool,
    jobs: Arc<Semaphore>,
}

impl Runner {
    pub(crate) fn new(node: Arc<Node>, options: &Options) -> Result<Self> {
        Ok(Self {
            plugin: Arc::new(Plugin::new(options.plugin.clone(), Arc::clone(&node))?),
            node,
            with_plugin: !options.without_plugin,
            jobs: Arc::new(Semaphore::new(options.jobs.max(1))),
        })
    }

    /// Everything `repeat` times: those that can share the node first, then the others one by one.
    /// What a pod leaves in the runtime is awaited in the background and charged to its scenario.
    pub(crate) async fn run(&self, scenarios: &[Scenario], options: &Options) -> Result<Tally> {
        let mut tally = Tally::default();
        for round in 1..=options.repeat {
            if options.repeat > 1 {
                println!("round {round} of {}", options.repeat);
            }
            let mut playing = JoinSet::new();
            self.plugin_must_run().await?;
            for scenario in with(scenarios, Company::Shared) {
                let jobs = Arc::clone(&self.jobs);
                let stage = self.stage(scenario);
                let scenario = scenario.clone();
                playing.spawn(async move {
                    let turn = jobs.acquire_owned().await;
                    let outcome = play(&scenario, &stage).await;
                    drop(turn);
                    aftermath(outcome, &stage).await
                });
            }
            while let Some(outcome) = playing.join_next().await {
                tally.take(&outcome?);
            }
            for scenario in with(scenarios, Company::Alone) {
                self.plugin_must_run().await?;
                let stage = self.stage(scenario);
                let outcome = play(scenario, &stage).await;
                playing.spawn(async move { aftermath(outcome, &stage).await });
                while let Some(outcome) = playing.try_join_next() {
                    tally.take(&outcome?);
                }
            }
            while let Some(outcome) = playing.join_next().await {
                tally.take(&outcome?);
            }
        }
        let end = Outcome {
            name: "the_plugin_ends_well".to_owned(),
            took: Duration::ZERO,
            result: self.end().await,
            report: String::new(),
        };
        if self.with_plugin {
            end.print();
            tally.take(&end);
        }
        if let Some(target) = &options.plugin_log {
            self.plugin.keep_log(target)?;
        }
        Ok(tally)
    }

    async fn end(&self) -> Result<()> {
        self.plugin.must_be_well().await?;
        self.plugin.stop().await
    }

    /// A scenario that failed may have left it dead.
    async fn plugin_must_run(&self) -> Result<()> {
        if self.with_plugin && self.plugin.start().await? {
            self.plugin.until_ready(1).await?;
        }
        Ok(())
    }

    fn stage(&self, scenario: &Scenario) -> Stage {
        Stage::new(
            Arc::clone(&self.node),
            Arc::clone(&self.plugin),
            &scenario.name,
        )
    }
}

fn with(scenarios: &[Scenario], company: Company) -> impl Iterator<Item = &Scenario> {
    scenarios
        .iter()
        .filter(move |scenario| scenario.company == company)
}

/// The scenario's own steps, and the deletion of its pods.
async fn play(scenario: &Scenario, stage: &Stage) -> Outcome {
    let began = Instant::now();
    // A task of its own, so that a panic is this scenario's failure and no other's.
    let mut task = tokio::spawn(scenario.play(stage.clone()));
    let result = match timeout(LIMIT, &mut task).await {
        Ok(Ok(result)) => result,
        Ok(Err(error)) => Err(anyhow!("panicked: {error}")),
        Err(_) => {
            task.abort();
            Err(anyhow!("not done within {} s", LIMIT.as_secs()))
        }
    };
    let report = match &result {
        Ok(()) => String::new(),
        Err(error) if error.is::<Skipped>() => String::new(),
        Err(_) => stage.report().await,
    };
    let deleted = stage.delete_pods().await;
    let outcome = Outcome {
        name: scenario.name.clone(),
        took: began.elapsed(),
        result: both(result, deleted),
        report,
    };
    outcome.print();
    outcome
}

/// Comes up to a minute after the scenario's own steps, which have been told of by then.
async fn aftermath(mut outcome: Outcome, stage: &Stage) -> Outcome {
    if let Err(error) = stage.until_nothing_is_left().await {
        let late = Outcome {
            name: outcome.name.clone(),
            took: outcome.took,
            result: Err(error.context("its pods were deleted, but not without a trace")),
            report: stage.report().await,
        };
        late.print();
        outcome.result = both(outcome.result, late.result);
    }
    outcome
}

/// The failure, or the failure and what went wrong while clearing up after it.
fn both(result: Result<()>, clearing: Result<()>) -> Result<()> {
    match (result, clearing) {
        (Ok(()), clearing) => clearing,
        (Err(error), Ok(())) => Err(error),
        (Err(error), Err(also)) => bail!("{error:#}\n  and while clearing up: {also:#}"),
    }
}
