//! One connection to a runtime, from registration to its end.

use std::future::pending;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use futures::stream::{once, pending as never};
use tokio::net::UnixStream;
use tokio::pin;
use tokio::sync::mpsc::unbounded_channel;
use tokio::time::timeout;
use tracing::{debug, info, warn};
use ttrpc::r#async::transport::{Listener, Socket};
use ttrpc::r#async::{Client, Server};
use ttrpc::context::Context;

use crate::mux::{self, Closed};
use crate::plugin::{Plugin, Refusal};
use crate::service::{Progress, Service};
use crate::wire::nri::RegisterPluginRequest;
use crate::wire::nri_ttrpc::{RuntimeClient, create_plugin};

/// The version of NRI that the stub follows, for the runtime's log.
const NRI_VERSION: &str = "v0.12.5";

/// When a runtime that has not answered is worth a word. It is not worth more: runtimes take plugins
/// in one after the other and while nothing else happens, and to try again would only queue behind
/// oneself.
const SILENCE: Duration = Duration::from_secs(10);

/// How long a runtime may take to hang up on a plugin that refused its configuration.
const FAREWELL: Duration = Duration::from_secs(1);

/// Who the plugin is to the runtime.
#[derive(Debug, Clone)]
pub(crate) struct Identity {
    pub(crate) name: String,
    pub(crate) index: String,
}

/// How a session ended.
#[derive(Debug)]
pub(crate) enum Ended {
    /// The runtime refused to register the plugin.
    RegistrationRefused(String),
    /// The plugin refused its configuration.
    ConfigurationRefused(Refusal),
    /// The connection ended, before or after the runtime had synchronised the plugin.
    Closed { why: Closed, synchronized: bool },
}

/// Registers and serves the plugin over `trunk`. Dropping the future ends the session.
pub(crate) async fn run<P: Plugin>(
    trunk: UnixStream,
    identity: &Identity,
    plugin: &Arc<P>,
) -> Ended {
    let (connections, multiplexing) = mux::multiplex(trunk);
    let (progress, mut news) = unbounded_channel();
    let mut synchronized = false;

    // Served before registering: the runtime may configure the plugin before it answers that.
    // The listener never ends, as the server does not survive that, and `Server::shutdown` is not
    // used: to drop the server ends its tasks as well.
    let service = Arc::new(Service::new(Arc::clone(plugin), progress));
    let listener = Listener::new(once(async { io::Result::Ok(connections.plugin) }).chain(never()));
    let mut server = Server::new()
        .register_service(create_plugin(service))
        .add_listener(listener);
    if server.start().await.is_err() {
        return Ended::Closed {
            why: Closed::ByPlugin,
            synchronized,
        };
    }

    // Only ever used for one call: concurrent ones can put their stream ids on the wire out of
    // order, which the runtime takes for a protocol error.
    let client = Client::new(Socket::new(connections.runtime));
    let registration = refusal(&client, identity);

    pin!(multiplexing, registration);
    loop {
        tokio::select! {
            refused = &mut registration => return Ended::RegistrationRefused(refused),
            Some(progress) = news.recv() => match progress {
                Progress::Configured(runtime) => info!(
                    runtime = runtime.name,
                    version = runtime.version,
                    nri = runtime.nri_version.map(tracing::field::display),
                    "registered with the runtime"
                ),
                Progress::Refused(refusal) => {
                    // The runtime hangs up once it has the reason, which it logs.
                    let _ = timeout(FAREWELL, &mut multiplexing).await;
                    return Ended::ConfigurationRefused(refusal);
                }
                Progress::Synchronized => {
                    debug!("synchronised by the runtime");
                    synchronized = true;
                }
            },
            why = &mut multiplexing => return Ended::Closed { why, synchronized },
        }
    }
}

/// Registers, and completes only if the runtime refuses.
async fn refusal(client: &Client, identity: &Identity) -> String {
    let mut request = RegisterPluginRequest::new();
    request.plugin_name.clone_from(&identity.name);
    request.plugin_idx.clone_from(&identity.index);
    request.NRI_version = NRI_VERSION.into();

    let runtime = RuntimeClient::new(client.clone());
    let reply = runtime.register_plugin(Context::default(), &request);
    pin!(reply);
    let reply = if let Ok(reply) = timeout(SILENCE, &mut reply).await {
        reply
    } else {
        warn!("the runtime has not answered for {SILENCE:?}: still waiting to be registered");
        reply.await
    };
    match reply {
        Err(ttrpc::Error::RpcStatus(status)) => status.message,
        // Any other error is the end of the connection, which the session sees for itself.
        Ok(_) | Err(_) => pending().await,
    }
}
