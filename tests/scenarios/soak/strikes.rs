//! Ends what a bout says, and brings it back.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use futures::future::join_all;
use rustix::process::{Pid, Signal, kill_process};
use tokio::time::{Instant, sleep, sleep_until};

use super::bout::{Fault, Strike};
use super::judge::Case;
use crate::node::Node;
use crate::plugin::Plugin;
use crate::relay::Relay;

/// From a plugin's end to a look at who waits for it.
const SILENCE: Duration = Duration::from_millis(150);
/// As long as a hook waits for an answer of a plugin that is frozen (`ANSWER_LIMIT`, `src/exit_hold/hook.rs`).
const UNANSWERED: Duration = Duration::from_secs(2);

pub(crate) struct Strikes {
    node: Arc<Node>,
    plugin: Arc<Plugin>,
    relay: Relay,
}

/// What the pods went through.
pub(crate) struct Struck {
    /// When plugin and runtime were there again for good, since the pods were told to exit.
    pub(super) back: Duration,
}

impl Strikes {
    /// The plugin's way to NRI is to be cut.
    pub(super) async fn prepare(node: &Arc<Node>, plugin: &Arc<Plugin>) -> Result<Self> {
        let relay = Relay::start(node.nri_socket.clone())?;
        let socket = relay.socket.clone();
        plugin.detour(|sockets| sockets.nri = socket).await?;
        Ok(Self {
            node: Arc::clone(node),
            plugin: Arc::clone(plugin),
            relay,
        })
    }

    pub(super) async fn carry_out(
        &self,
        strikes: &[Strike],
        asked: Instant,
        cases: &[Case],
    ) -> Result<Struck> {
        let mut back = Duration::ZERO;
        let mut since = asked;
        for strike in strikes {
            sleep_until(since + strike.after).await;
            let struck = Instant::now();
            self.begin(strike.what).await?;
            if strike.what.silences_plugin() {
                let frozen = strike.what == Fault::PluginFrozen;
                let silence = SILENCE + if frozen { UNANSWERED } else { Duration::ZERO };
                // Of one that is frozen for less, hooks may yet have an answer.
                if !frozen || silence < strike.away {
                    sleep(silence).await;
                    join_all(cases.iter().map(|it| it.witness.look_for_hooks())).await;
                }
            }
            sleep_until(struck + strike.away).await;
            self.end(strike.what).await?;
            since = Instant::now();
            if strike.what.halts_restarts() {
                back = since - asked;
            }
        }
        // It ends where it finds no runtime, and whoever runs it starts it again.
        if self.plugin.start().await? {
            back = asked.elapsed();
        }
        Ok(Struck { back })
    }

    async fn begin(&self, fault: Fault) -> Result<()> {
        match fault {
            Fault::PluginKilled => self.plugin.kill().await,
            Fault::PluginTerminated => self.plugin.stop().await,
            Fault::PluginFrozen => self.signal_plugin(Signal::STOP).await,
            Fault::KubeletKilled => self.node.signal("kubelet", Signal::KILL),
            Fault::KubeletTerminated => self.node.signal("kubelet", Signal::TERM),
            Fault::RuntimeKilled => self.node.signal(&self.node.runtime_name, Signal::KILL),
            Fault::RuntimeTerminated => self.node.signal(&self.node.runtime_name, Signal::TERM),
            Fault::NriCut => {
                self.relay.shut(true);
                Ok(())
            }
        }
    }

    async fn end(&self, fault: Fault) -> Result<()> {
        match fault {
            Fault::PluginKilled | Fault::PluginTerminated => self.plugin.start().await.map(drop),
            Fault::PluginFrozen => self.signal_plugin(Signal::CONT).await,
            Fault::KubeletKilled | Fault::KubeletTerminated => {
                self.node.start_again("kubelet").await
            }
            Fault::RuntimeKilled | Fault::RuntimeTerminated => {
                self.node.start_again(&self.node.runtime_name).await
            }
            Fault::NriCut => {
                self.relay.shut(false);
                Ok(())
            }
        }
    }

    async fn signal_plugin(&self, signal: Signal) -> Result<()> {
        let pid = i32::try_from(self.plugin.pid().await?)?;
        if let Some(pid) = Pid::from_raw(pid) {
            kill_process(pid, signal)?;
        }
        Ok(())
    }
}
