//! Restarts of one pod: what is decided about it ([`pod`]), the [`plan`] of a restart, and the [`machine`] that carries it
//! out. News go in, with the moment at which they came, and what is wanted comes out: nothing here does I/O.

pub mod back_off;
pub mod machine;
pub mod plan;
pub mod pod;
pub(crate) mod replay;
#[cfg(test)]
mod sim;
pub mod times;
