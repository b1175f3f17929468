//! `reprise restart` and `reprise status`: what users ask of pods, through the API server and by their own rights.

pub mod complete;
mod error;
mod pod;
mod restart;
mod rollout;
mod screen;
mod select;
mod status;
mod target;
#[cfg(test)]
mod testing;
mod time;
mod token;

use std::io::{self, Write};

use k8s_openapi::jiff::Timestamp;
use kube::Client;
use tokio::signal::ctrl_c;

use crate::cli::{AskCommand, ClusterArgs, RestartArgs, StatusArgs};
use crate::kube::{KubeError, connect_as_user};
use crate::text;

pub use error::{AskError, Right};
use screen::Screen;
pub use target::{BadTarget, PodName, Selector, Target};
pub use time::{BadTime, Timeout};

/// How it ended, as the exit code tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// Everything was done.
    Well,
    /// Some pods have not restarted.
    Failed,
    /// Some have not in time.
    Late,
    /// The user did not want to wait any longer.
    Interrupted,
}

impl End {
    /// The exit code.
    #[must_use]
    pub fn code(self) -> u8 {
        match self {
            Self::Well => 0,
            Self::Failed => 1,
            Self::Late => 4,
            // As a shell says it of who was ended by SIGINT.
            Self::Interrupted => 130,
        }
    }
}

/// Does what a user asks for, and says so on standard output and standard error.
pub async fn run(command: &AskCommand) -> Result<End, AskError> {
    match command {
        AskCommand::Restart(args) => restart(args).await,
        AskCommand::Status(args) => status(args).await,
    }
}

async fn restart(args: &RestartArgs) -> Result<End, AskError> {
    let (client, namespace) = connect(&args.cluster).await?;
    let (mut out, mut err) = (io::stdout(), io::stderr());
    let mut screen = Screen::new(&mut out, &mut err);
    let interrupted = async {
        if ctrl_c().await.is_err() {
            // It ends this process, then.
            std::future::pending::<()>().await;
        }
    };
    restart::run(&client, &namespace, args, &mut screen, interrupted).await
}

async fn status(args: &StatusArgs) -> Result<End, AskError> {
    let (client, namespace) = connect(&args.cluster).await?;
    let rows = status::find(&client, &namespace, args).await?;
    let mut out = io::stdout();
    if args.output.is_some() {
        let json = format!("{:#}", status::json(&rows));
        for line in json.lines() {
            writeln!(out, "{}", text::printable_json(line))?;
        }
    } else if rows.is_empty() {
        writeln!(io::stderr(), "No pod restarts in place, or has.")?;
    } else {
        let table = status::table(&rows, args.all_namespaces, Timestamp::now());
        out.write_all(table.as_bytes())?;
    }
    Ok(End::Well)
}

/// The API server, and the namespace that is meant.
async fn connect(cluster: &ClusterArgs) -> Result<(Client, String), KubeError> {
    let client = connect_as_user(cluster.kubeconfig.as_deref(), cluster.context.as_deref()).await?;
    let namespace = cluster.namespace.clone();
    let namespace = namespace.unwrap_or_else(|| client.default_namespace().to_owned());
    Ok((client, namespace))
}
