//! The API server: pods of this node, their events and conditions.
