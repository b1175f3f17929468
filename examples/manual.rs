//! Writes the manual pages, and what shells complete, out of the command line's own help: `cargo run --example manual -- DIR`.

use std::path::PathBuf;
use std::{env, fs, io};

use clap::CommandFactory;
use clap_complete::{Shell, generate_to};
use reprise::cli::Cli;

fn main() -> io::Result<()> {
    let dir = env::args_os().nth(1).map(PathBuf::from);
    let dir = dir.ok_or_else(|| io::Error::other("which directory? manual DIR"))?;
    fs::create_dir_all(&dir)?;
    clap_mangen::generate_to(Cli::command(), &dir)?;
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        generate_to(shell, &mut Cli::command(), "reprise", &dir)?;
    }
    Ok(())
}
