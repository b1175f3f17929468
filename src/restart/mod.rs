//! Restarts of one pod: the [`plan`], the pure [`machine`] that carries it out, and the [`driver`] that acts.

pub mod back_off;
mod disk;
pub mod driver;
pub mod machine;
mod placeholder;
pub mod plan;
pub mod record;
pub(crate) mod replay;
