//! Plays scenarios and says how they went. libtest has neither a teardown for the plugin they share
//! nor a way to run some of them alone.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::ErrorKind;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use k8s_openapi::jiff::Timestamp;
use tokio::sync::Semaphore;
use tokio::task::{JoinSet, spawn_blocking};
use tokio::time::{Instant, timeout};

use crate::node::Node;
use crate::options::Options;
use crate::plugin::Plugin;
use crate::pressure;
use crate::scenario::{Company, Scenario, Skipped};
use crate::stage::Stage;
use crate::wait::stretched;

/// For a scenario's own steps; each wait in it has a shorter limit of its own.
const LIMIT: Duration = Duration::from_mins(4);

/// After so many failures the node, or the plugin, is not worth another hour.
const MOST_FAILURES: usize = 12;

#[derive(Default)]
pub(crate) struct Tally {
    pub(crate) passed: usize,
    pub(crate) skipped: usize,
    /// What went wrong, by scenario.
    pub(crate) failed: BTreeMap<String, Vec<String>>,
}

impl Tally {
    pub(crate) fn failures(&self) -> usize {
        self.failed.values().map(Vec::len).sum()
    }

    pub(crate) fn fail(&mut self, name: String, why: String) {
        self.failed.entry(name).or_default().push(why);
    }

    fn take(&mut self, outcome: &Outcome) {
        match &outcome.result {
            Ok(()) => self.passed += 1,
            Err(error) if error.is::<Skipped>() => self.skipped += 1,
            Err(error) => {
                self.fail(outcome.name.clone(), format!("{error:#}"));
            }
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
    shares: Shares,
}

/// What several runs share out among them.
#[derive(Clone)]
struct Shares(Option<PathBuf>);

impl Shares {
    /// Whether this run is the first that comes to it.
    fn take(&self, round: usize, scenario: &Scenario) -> Result<bool> {
        let Some(dir) = &self.0 else { return Ok(true) };
        let taken = dir.join(format!("{round}-{}", scenario.name));
        match File::create_new(&taken) {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(false),
            Err(error) => Err(error).with_context(|| taken.display().to_string()),
        }
    }
}

impl Runner {
    pub(crate) fn new(node: Arc<Node>, options: &Options) -> Result<Self> {
        Ok(Self {
            plugin: Arc::new(Plugin::new(
                options.plugin.clone(),
                options.start.clone(),
                Arc::clone(&node),
            )?),
            node,
            with_plugin: !options.without_plugin,
            jobs: Arc::new(Semaphore::new(options.jobs.max(1))),
            shares: Shares(options.share_out.clone()),
        })
    }

    /// Everything `repeat` times: those that can share the node, the others one by one, and at the end those that
    /// want the whole machine.
    pub(crate) async fn run(&self, scenarios: &[Scenario], options: &Options) -> Result<Tally> {
        let mut tally = Tally::default();
        // Read by hack/conformance.sh.
        println!(
            "played on {}: {}, start by {}",
            Timestamp::now().strftime("%F"),
            self.node.versions().await?,
            options.start
        );
        for round in 1..=options.repeat {
            if options.repeat > 1 {
                println!("round {round} of {}", options.repeat);
            }
            if options.alone_first {
                self.one_by_one(round, scenarios, Company::Alone, &mut tally)
                    .await?;
                self.together(round, scenarios, &mut tally).await?;
            } else {
                self.together(round, scenarios, &mut tally).await?;
                self.one_by_one(round, scenarios, Company::Alone, &mut tally)
                    .await?;
            }
            self.one_by_one(round, scenarios, Company::Undisturbed, &mut tally)
                .await?;
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

    async fn together(
        &self,
        round: usize,
        scenarios: &[Scenario],
        tally: &mut Tally,
    ) -> Result<()> {
        self.plugin_must_run().await?;
        let mut playing = JoinSet::new();
        for scenario in with(scenarios, Company::Shared) {
            let jobs = Arc::clone(&self.jobs);
            let shares = self.shares.clone();
            let stage = self.stage(scenario);
            let scenario = scenario.clone();
            playing.spawn(async move {
                let turn = jobs.acquire_owned().await;
                if !shares.take(round, &scenario)? {
                    return Ok(None);
                }
                let Ok(turn) = turn else {
                    return Ok(Some(not_played(&scenario)));
                };
                let outcome = play(&scenario, &stage).await;
                drop(turn);
                anyhow::Ok(Some(aftermath(outcome, &stage).await))
            });
        }
        while let Some(outcome) = playing.join_next().await {
            let Some(outcome) = outcome?? else { continue };
            tally.take(&outcome);
            if tally.failures() >= MOST_FAILURES {
                self.jobs.close();
            }
        }
        Ok(())
    }

    /// While one scenario is played, the pods of those before it go.
    async fn one_by_one(
        &self,
        round: usize,
        scenarios: &[Scenario],
        company: Company,
        tally: &mut Tally,
    ) -> Result<()> {
        let mut going = JoinSet::new();
        for scenario in with(scenarios, company) {
            if !self.shares.take(round, scenario)? {
                continue;
            }
            if tally.failures() >= MOST_FAILURES {
                tally.take(&not_played(scenario));
                continue;
            }
            self.plugin_must_run().await?;
            let stage = self.stage(scenario);
            let mut outcome = play(scenario, &stage).await;
            if let Err(error) = self.node.must_be_well().await {
                println!(
                    "FAILED            {} left the node ill\n  {error:#}",
                    outcome.name
                );
                outcome.result = both(outcome.result, Err(error));
            }
            going.spawn(async move { aftermath(outcome, &stage).await });
            while let Some(outcome) = going.try_join_next() {
                tally.take(&outcome?);
            }
        }
        while let Some(outcome) = going.join_next().await {
            tally.take(&outcome?);
        }
        Ok(())
    }

    async fn end(&self) -> Result<()> {
        self.plugin.must_be_well().await?;
        self.plugin.stop().await
    }

    /// A scenario that failed may have left it dead.
    async fn plugin_must_run(&self) -> Result<()> {
        if !self.with_plugin {
            return Ok(());
        }
        if self.plugin.start().await? {
            self.plugin.until_ready(1).await?;
        }
        self.plugin.until_told().await
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

/// What the nodes of a machine share: the lock's holder plays with all others, or with none.
fn part_of_machine(company: Company) -> Result<File> {
    let dir = std::env::temp_dir();
    let file = File::create(dir.join("reprise-scenarios.lock"))?;
    match company {
        Company::Shared | Company::Alone => {
            pressure::until_it_is_bearable(&dir.join("reprise-scenarios-begin.lock"))?;
            file.lock_shared()?;
        }
        Company::Undisturbed => file.lock()?,
    }
    Ok(file)
}

fn not_played(scenario: &Scenario) -> Outcome {
    let outcome = Outcome {
        name: scenario.name.clone(),
        took: Duration::ZERO,
        result: Err(anyhow!("not played: {MOST_FAILURES} failed before")),
        report: String::new(),
    };
    outcome.print();
    outcome
}

/// The scenario's own steps, what is checked after all of them, and the begin of its pods' deletion.
async fn play(scenario: &Scenario, stage: &Stage) -> Outcome {
    let company = scenario.company;
    let part = spawn_blocking(move || part_of_machine(company)).await;
    let began = Instant::now();
    // A task of its own, so that a panic is this scenario's failure and no other's.
    let why_not = scenario.of_containerd.filter(|_| stage.node.is_crio());
    let mut task = tokio::spawn(match why_not {
        Some(why) => Box::pin(async move { bail!(Skipped(why)) }),
        None => scenario.play(stage.clone()),
    });
    let part = part.map_err(Into::into).flatten();
    let played = match timeout(stretched(LIMIT), &mut task).await {
        Ok(Ok(result)) => result,
        Ok(Err(error)) => Err(anyhow!("panicked: {error}")),
        Err(_) => {
            task.abort();
            Err(anyhow!("not done within {} s", stretched(LIMIT).as_secs()))
        }
    };
    let played = match played {
        // Of CRI-O many know nothing.
        Err(error)
            if error.is::<Skipped>() && !scenario.tells_nodes_apart && !stage.node.is_crio() =>
        {
            Err(anyhow!("skipped ({error}), though it tells no nodes apart"))
        }
        played => played,
    };
    let result = both(played, stage.no_container_ran_twice_at_once());
    let report = match &result {
        Ok(()) => String::new(),
        Err(error) if error.is::<Skipped>() => String::new(),
        Err(_) => stage.report().await,
    };
    let result = both(result, stage.plugin.go_straight().await);
    let deleted = match company {
        Company::Shared | Company::Alone => stage.begin_delete().await,
        Company::Undisturbed => stage.delete_pods().await,
    };
    let outcome = Outcome {
        name: scenario.name.clone(),
        took: began.elapsed(),
        result: both(both(result, deleted), part.map(drop)),
        report,
    };
    outcome.print();
    outcome
}

/// What a pod leaves in the runtime is awaited up to minutes after the scenario's own steps, which have been told of by
/// then, and charged to them.
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
