//! Restarts all containers of a Kubernetes pod in place, as an NRI plugin.

pub mod ask;
pub mod back_off;
pub mod check;
pub mod cli;
pub mod clock;
pub(crate) mod columns;
pub mod config;
pub mod cri;
pub mod dirs;
pub mod driver;
pub mod exit_hold;
#[doc(hidden)]
pub mod fuzzing;
pub mod history;
pub mod ids;
pub mod kube;
pub mod log;
pub mod metrics;
pub mod node;
pub mod plan;
pub mod policy;
pub mod records;
pub(crate) mod replay;
pub mod report;
pub mod reset;
pub mod restart;
pub mod supervisor;
pub(crate) mod text;
pub mod times;
pub mod yaml;
