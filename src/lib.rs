//! Restarts all containers of a Kubernetes pod in place, as an NRI plugin.

pub mod check;
pub mod cli;
pub mod config;
pub mod cri;
pub mod exit_hold;
pub mod ids;
pub mod kube;
pub mod node;
pub mod nri;
pub mod policy;
pub mod report;
pub mod restart;
pub mod supervisor;
pub mod yaml;
