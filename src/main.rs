//! Starts the command that was asked for, nothing else.
fn main() {}
