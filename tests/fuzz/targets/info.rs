//! The runtime's verbose answers, which hold what tenants wrote.

pub(super) fn read(input: &[u8]) {
    // gRPC lets no other text through.
    if let Ok(text) = str::from_utf8(input) {
        reprise::fuzzing::verbose_info(text);
    }
}
