//! Starts the command that was asked for, nothing else.

use std::ffi::OsString;
use std::io::{self, Write};
use std::process::ExitCode;

use anyhow::Context;
use nri::Launched;
use reprise::ask::{self, complete};
use reprise::check;
use reprise::cli::{CleanupArgs, Cli, Command};
use reprise::config::{Config, LogFormat, RunArgs};
use reprise::exit_hold::{holder, hook};
use reprise::history;
use reprise::log::{Escaping, LastLines, Queue};
use reprise::supervisor::{self, End, LockError, RemovalError};
use rustix::thread::disable_transparent_huge_pages;
use tikv_jemallocator::Jemalloc;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

/// `reprise cleanup` cannot begin: a plugin is at work.
const IN_USE: u8 = 3;

#[global_allocator]
static ALLOCATOR: Jemalloc = Jemalloc;

fn main() -> ExitCode {
    // Of huge pages, which many nodes give to whoever does not object (Debian's kernels do), a process as small as this fills
    // little: twice the memory, and the time to clear it. Where there are none, there is nothing to refuse.
    let _ = disable_transparent_huge_pages(true);
    // Before all else: the runtime waits for its hook, and a command line parser is slower than the hook itself. It would also
    // object to arguments, which the runtime would take for a failure of its own.
    let args: Vec<OsString> = std::env::args_os().skip(1).collect();
    if let Some((name, rest)) = args.split_first() {
        if name == "hook" {
            hook::main(rest, io::stdin());
            return ExitCode::SUCCESS;
        }
        // The plugin's own, and nobody else's.
        if name == "hold" {
            holder::main(rest, io::stdin().lock(), io::stdout());
            return ExitCode::SUCCESS;
        }
        // What `kubectl_complete-reprise` asks for: any words may follow.
        if name == "__complete" {
            return ended(block_on(async {
                complete::run(rest, &mut io::stdout()).await?;
                Ok(ExitCode::SUCCESS)
            }));
        }
    }
    let launched_by_nri = std::env::var_os("NRI_PLUGIN_NAME").is_some();
    let cli = Cli::from_arguments(std::env::args_os(), launched_by_nri)
        .unwrap_or_else(|error| error.exit());
    ended(start(cli.command))
}

fn ended(end: anyhow::Result<ExitCode>) -> ExitCode {
    end.unwrap_or_else(|error| {
        eprintln!("reprise: {error:#}");
        ExitCode::FAILURE
    })
}

fn start(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Run(args) => run(*args),
        // Never comes here: see `main`.
        Command::Hook => Ok(ExitCode::SUCCESS),
        Command::Cleanup(args) => clean(*args),
        Command::Check(args) => {
            let all_well = check::run(&args, io::stdin(), &mut io::stdout().lock())?;
            Ok(if all_well {
                ExitCode::SUCCESS
            } else {
                ExitCode::FAILURE
            })
        }
        Command::Ask(command) => {
            let end = block_on(async { Ok(ask::run(&command).await?) })?;
            Ok(ExitCode::from(end.code()))
        }
        Command::History(args) => {
            history::run(&args, &mut io::stdout().lock(), &mut io::stderr())?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Version => {
            writeln!(io::stdout(), "reprise {}", env!("CARGO_PKG_VERSION"))?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn run(args: RunArgs) -> anyhow::Result<ExitCode> {
    let config = Config::load(args)?;
    let _last_lines = log_to_stderr(&config).context("cannot start the log")?;
    let launched = Launched::from_env()?;
    let end = block_on(async {
        let shutdown = asked_to_stop().context("cannot watch for signals")?;
        Ok(Box::pin(supervisor::run(config.clone(), launched, shutdown)).await?)
    })?;
    if end == End::ForGood {
        // Whatever made what is to be removed has ended with its runtime.
        block_on(async { Ok(supervisor::clean_node_for_good(&config).await?) })?;
    }
    Ok(ExitCode::SUCCESS)
}

fn clean(args: CleanupArgs) -> anyhow::Result<ExitCode> {
    let config = Config::load(args.run)?;
    let _last_lines = log_to_stderr(&config).context("cannot start the log")?;
    let cleaned = block_on(async {
        Ok(if args.all_nodes {
            supervisor::clean_all_nodes(&config).await
        } else {
            supervisor::clean_node(&config).await
        })
    })?;
    match cleaned {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(error @ RemovalError::Lock(LockError::Taken { .. })) => {
            eprintln!("reprise: {error:#}");
            Ok(ExitCode::from(IN_USE))
        }
        Err(error) => Err(error.into()),
    }
}

fn block_on<T>(work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("cannot start the async runtime")?;
    runtime.block_on(Box::pin(work))
}

fn asked_to_stop() -> io::Result<impl Future<Output = ()>> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    })
}

/// Lines are lost rather than waited for: whoever reads them must not hold up a node.
fn log_to_stderr(config: &Config) -> io::Result<LastLines> {
    // Libraries have their say only when something is wrong with them; `nri` is one of ours.
    let level = tracing::Level::from(config.log_level);
    let ours = Targets::new()
        .with_default(level.min(tracing::Level::WARN))
        .with_targets([("reprise", level), ("nri", level)]);
    let registry = tracing_subscriber::registry().with(ours);
    let (to_stderr, last) = Queue::to(io::stderr())?;
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(move || to_stderr.clone())
        .with_target(false)
        .with_ansi(false);
    match config.log_format {
        LogFormat::Text => registry.with(lines.map_writer(Escaping)).init(),
        LogFormat::Json => registry.with(lines.json()).init(),
    }
    Ok(last)
}
