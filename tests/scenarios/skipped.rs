//! Why a scenario is not played.

use std::fmt;

/// Returned as an error by a scenario that this node cannot play.
#[derive(Debug)]
pub(crate) struct Skipped(pub(crate) &'static str);

impl fmt::Display for Skipped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

impl std::error::Error for Skipped {}
