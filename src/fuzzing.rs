//! The doors by which strangers' bytes come in, for the fuzzer (`tests/fuzz`): those that are not public anyway.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use nri::{Plugin, Stub, StubBuilder};
use tokio::sync::Notify;

use crate::cri;
use crate::driver::Tools;
use crate::kube::Pods;
use crate::plan::RestartId;
use crate::replay::Attempt;
use crate::supervisor::{Parts, Registry, Reprise};

/// The plugin as the runtime meets it, without any pod.
#[must_use]
pub fn stub(tools: Tools, run_dir: &Path) -> StubBuilder<impl Plugin> {
    let (plugin, _) = Reprise::new();
    let records = tools.records.clone();
    let registry = Registry::new(Arc::new(tools), Pods::default(), HashMap::new());
    plugin.begin(Parts {
        registry: Arc::new(registry),
        declaration: None,
        records,
        hook: Some("/opt/reprise".into()),
        copies: None,
        hook_socket: run_dir.join("hook.sock"),
        missed: Arc::new(Notify::new()),
    });
    Stub::builder(plugin)
}

/// Reads a text that claims to be the runtime's verbose info, and replays what container is in it.
pub fn verbose_info(text: &str) {
    if let Some((status, config)) = cri::read_verbose_info(text) {
        let _ = Attempt::after(&status, config, &RestartId("c1-1".into()), 0);
    }
}
