//! What becomes of log lines: each is one line whatever strangers' words are in it, and none is waited for.

mod escape;
mod queue;

pub use escape::{EscapedLine, Escaping};
pub use queue::{LastLines, Queue};
