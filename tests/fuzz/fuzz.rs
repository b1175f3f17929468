//! What strangers write, read by the real code: no input may make it panic, allocate more than 16 MiB, or take more
//! than 50 ms.
//!
//! As a test, every input in `corpus/` is read once; files as arguments instead, to see one input fail again. Built with
//! `--cfg fuzzing` (`make fuzz`), it is libFuzzer, with one target, which the variable `REPRISE_FUZZ` names.

#![cfg_attr(fuzzing, no_main)]

#[cfg(fuzzing)]
mod engine;
mod limits;
#[cfg(fuzzing)]
mod mutation;
mod targets;

#[cfg(not(fuzzing))]
fn main() -> std::process::ExitCode {
    replay::main()
}

#[cfg(not(fuzzing))]
mod replay {
    use std::env;
    use std::fs;
    use std::io;
    use std::path::{Path, PathBuf};
    use std::process::ExitCode;

    use crate::limits;
    use crate::targets::{self, Target};

    pub(crate) fn main() -> ExitCode {
        let mut files: Vec<PathBuf> = env::args_os().skip(1).map(PathBuf::from).collect();
        // Cargo's own arguments, and names of other tests, are none of ours.
        files.retain(|it| it.is_file());
        if files.is_empty() {
            files = corpus().expect("the corpus can be listed");
        }
        let dir = tempfile::tempdir().expect("a directory to work in");
        targets::work_in(dir.path().to_owned());
        let mut failed = 0;
        for file in &files {
            let Some(target) = target_of(file) else {
                eprintln!("{}: its directory is named after no target", file.display());
                failed += 1;
                continue;
            };
            let input = fs::read(file).expect("an input can be read");
            if let Err(why) = limits::judge(target.run, &input) {
                eprintln!("{}: {why}", file.display());
                failed += 1;
            }
        }
        println!("{} passed, {failed} failed", files.len() - failed);
        if failed == 0 {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        }
    }

    /// An input lies in a directory that is named after its target.
    fn target_of(file: &Path) -> Option<&'static Target> {
        targets::named(file.parent()?.file_name()?.to_str()?)
    }

    fn corpus() -> io::Result<Vec<PathBuf>> {
        let mut files = Vec::new();
        for target in targets::ALL {
            let dir = Path::new(env!("CARGO_MANIFEST_DIR"))
                .join("corpus")
                .join(target.name);
            for entry in fs::read_dir(dir)? {
                files.push(entry?.path());
            }
        }
        files.sort();
        Ok(files)
    }
}
