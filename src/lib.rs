//! Restarts all containers of a Kubernetes pod in place, as an NRI plugin.

pub mod cri;
pub mod ids;
pub mod kube;
pub mod nri;
