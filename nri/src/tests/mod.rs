//! A real plugin, over a real socket, driven by a runtime for tests.

mod connecting;
mod documentation;
mod events;
mod framing;
