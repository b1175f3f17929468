//! Restarts all containers of a Kubernetes pod in place, as an NRI plugin.

pub mod cri;
pub mod nri;
pub mod policy;
pub mod yaml;
