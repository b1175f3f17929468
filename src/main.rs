//! Starts the command that was asked for, nothing else.

use std::io::{self, Write};
use std::process::ExitCode;

use reprise::check;
use reprise::cli::{Cli, Command};
use reprise::config::Config;

fn main() -> ExitCode {
    let launched_by_nri = std::env::var_os("NRI_PLUGIN_NAME").is_some();
    let cli = Cli::from_arguments(std::env::args_os(), launched_by_nri)
        .unwrap_or_else(|error| error.exit());
    start(cli.command).unwrap_or_else(|error| {
        eprintln!("reprise: {error:#}");
        ExitCode::FAILURE
    })
}

fn start(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Run(args) => {
            Config::load(*args)?;
            anyhow::bail!("this build cannot run as a plugin")
        }
        Command::Hook => anyhow::bail!("the hook is run by the container runtime only"),
        Command::Check(args) => {
            let all_well = check::run(&args.files, io::stdin(), &mut io::stdout().lock())?;
            Ok(if all_well {
                ExitCode::SUCCESS
            } else {
                ExitCode::FAILURE
            })
        }
        Command::Version => {
            writeln!(io::stdout(), "reprise {}", env!("CARGO_PKG_VERSION"))?;
            Ok(ExitCode::SUCCESS)
        }
    }
}
