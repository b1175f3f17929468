//! Restarts of one pod: what is decided about it ([`pod`]), and the [`machine`] that carries out a [plan](crate::plan). News go
//! in, with the moment at which they came, and what is wanted comes out: nothing here does I/O.

pub mod machine;
pub mod pod;
mod refused;
#[cfg(test)]
mod sim;

pub(crate) use refused::Refused;
