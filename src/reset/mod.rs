//! Hard reset: a pod that crashes for ever because of something on its node is deleted, so that its controller makes a new
//! one, likely elsewhere (enhancements#5734).
//!
//! [`pods`] decides which pods of this node, and when; [`ledger`] whether the cluster can bear one more. Both are pure.
//! [`driver`] does the rest.

mod count;
mod disk;
mod driver;
mod evidence;
mod inbox;
mod ledger;
mod pods;
mod record;
mod reservation;
mod sighting;
mod store;
mod terms;
mod voice;

pub(crate) use driver::Resets;
pub(crate) use inbox::{Inbox, news};
pub use ledger::{Claim, Hindrance, Verdict};
pub use reservation::{ReservationError, Reservations};
pub(crate) use store::STATE_FILES;
pub use terms::{Method, Terms, TooManyResets};
