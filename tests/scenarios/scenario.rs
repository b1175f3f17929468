//! A scenario: a name that is a sentence, and what happens.

use std::future::Future;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::pin::Pin;
use std::sync::Arc;

use anyhow::Result;

pub(crate) use crate::skipped::Skipped;
use crate::stage::Stage;

type Running = Pin<Box<dyn Future<Output = Result<()>> + Send>>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Company {
    /// Beside others, on the same node with the same plugin.
    Shared,
    /// Alone: it ends the plugin or a part of the node.
    Alone,
    /// Alone on the whole machine, whatever other nodes there are: it takes all that its cores have.
    Undisturbed,
}

/// One of `of` kinds of nodes, from 0.
#[derive(Clone, Copy)]
pub(crate) struct Deal {
    pub(crate) index: u64,
    pub(crate) of: u64,
    pub(crate) seed: u64,
}

#[derive(Clone)]
pub(crate) struct Scenario {
    pub(crate) name: String,
    pub(crate) company: Company,
    /// It says something else, or nothing, on another kubelet or runtime: it is played on nodes of every kind. No other may be
    /// skipped.
    pub(crate) tells_nodes_apart: bool,
    /// Why it is played on containerd alone.
    pub(crate) of_containerd: Option<&'static str>,
    /// It is not dealt out: it waits for long, or is one of many that are alike. `make test-all` plays it.
    takes_long: bool,
    play: Arc<dyn Fn(Stage) -> Running + Send + Sync>,
}

impl Scenario {
    pub(crate) fn new<F, Fut>(name: impl Into<String>, company: Company, play: F) -> Self
    where
        F: Fn(Stage) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<()>> + Send + 'static,
    {
        Self {
            name: name.into(),
            company,
            tells_nodes_apart: false,
            of_containerd: None,
            takes_long: false,
            play: Arc::new(move |stage| Box::pin(play(stage))),
        }
    }

    /// Whether it falls to the nodes of that kind when scenarios are dealt out among them.
    pub(crate) fn falls_to(&self, kind: Deal) -> bool {
        let mut hasher = DefaultHasher::new();
        (kind.seed, &self.name).hash(&mut hasher);
        !self.takes_long && (self.tells_nodes_apart || hasher.finish() % kind.of == kind.index)
    }

    pub(crate) fn play(&self, stage: Stage) -> Running {
        (self.play)(stage)
    }
}

/// The same scenarios, which tell nodes apart.
pub(crate) fn telling_nodes_apart(mut scenarios: Vec<Scenario>) -> Vec<Scenario> {
    for scenario in &mut scenarios {
        scenario.tells_nodes_apart = true;
    }
    scenarios
}

/// The same scenarios, which are about what other runtimes do not have.
pub(crate) fn of_containerd(why: &'static str, mut scenarios: Vec<Scenario>) -> Vec<Scenario> {
    for scenario in &mut scenarios {
        scenario.of_containerd = Some(why);
    }
    scenarios
}

/// The same scenarios, which measure times that a busy machine does not keep.
pub(crate) fn undisturbed(mut scenarios: Vec<Scenario>) -> Vec<Scenario> {
    for scenario in &mut scenarios {
        scenario.company = Company::Undisturbed;
    }
    scenarios
}

/// The same scenarios, which take long.
pub(crate) fn taking_long(mut scenarios: Vec<Scenario>) -> Vec<Scenario> {
    for scenario in &mut scenarios {
        scenario.takes_long = true;
    }
    scenarios
}

/// Scenarios from functions, each named as its function.
macro_rules! scenarios {
    ($company:ident: $($function:ident),+ $(,)?) => {
        vec![$($crate::scenario::Scenario::new(
            stringify!($function),
            $crate::scenario::Company::$company,
            $function,
        )),+]
    };
}
pub(crate) use scenarios;
