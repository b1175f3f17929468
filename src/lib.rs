//! Restarts all containers of a Kubernetes pod in place, as an NRI plugin.

pub mod check;
pub mod cli;
pub mod config;
pub mod cri;
pub mod nri;
pub mod policy;
pub mod yaml;
