//! Restarts of one pod: what is decided about it ([`pod`]), the [`plan`] of a restart, the [`machine`] that carries it out,
//! all of them pure, and the [`driver`] that acts.

pub mod back_off;
mod disk;
pub mod driver;
pub mod machine;
mod placeholder;
pub mod plan;
pub mod pod;
pub mod record;
pub(crate) mod replay;
#[cfg(test)]
mod sim;
pub mod times;
pub mod turns;
