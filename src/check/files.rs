//! Which files the arguments stand for.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// As kubectl reads them (`pkg/resource/builder.go`, cli-runtime 1.37).
const EXTENSIONS: [&str; 3] = ["json", "yaml", "yml"];

/// What cannot be read.
pub(super) struct Unreadable {
    pub(super) path: PathBuf,
    pub(super) why: String,
}

/// The argument itself, or of a directory the manifests in it and below, ordered by name.
pub(super) fn of(argument: &Path) -> Vec<Result<PathBuf, Unreadable>> {
    if !argument.is_dir() {
        return vec![Ok(argument.to_owned())];
    }
    let mut found = Vec::new();
    search(argument, &mut found);
    if found.is_empty() {
        found.push(Err(Unreadable {
            path: argument.to_owned(),
            why: "no manifests in it: no file is called *.yaml, *.yml or *.json".to_owned(),
        }));
    }
    found
}

fn search(directory: &Path, found: &mut Vec<Result<PathBuf, Unreadable>>) {
    let paths = match listed(directory) {
        Ok(paths) => paths,
        Err(error) => {
            let path = directory.to_owned();
            let why = error.to_string();
            return found.push(Err(Unreadable { path, why }));
        }
    };
    for path in paths {
        // Through a link to a directory nobody goes: it may lead back.
        if path.is_dir() && !path.is_symlink() {
            search(&path, found);
        } else if is_manifest(&path) {
            found.push(Ok(path));
        }
    }
}

fn listed(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = fs::read_dir(directory)?;
    let mut paths = entries
        .map(|entry| entry.map(|entry| entry.path()))
        .collect::<io::Result<Vec<_>>>()?;
    paths.sort_unstable();
    Ok(paths)
}

/// A device or a pipe of that name would never end.
fn is_manifest(path: &Path) -> bool {
    let extension = path.extension().and_then(OsStr::to_str);
    extension.is_some_and(|it| EXTENSIONS.contains(&it)) && !is_endless(path)
}

fn is_endless(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|it| !it.is_file())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn found(directory: &Path) -> Vec<String> {
        let name = |path: &Path| {
            let path = path.strip_prefix(directory).unwrap();
            path.display().to_string()
        };
        let found = of(directory).into_iter();
        found
            .map(|it| match it {
                Ok(path) => name(&path),
                Err(unread) => format!("{}: {}", name(&unread.path), unread.why),
            })
            .collect()
    }

    #[test]
    fn a_directory_is_its_manifests_and_those_below_in_order() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        fs::create_dir_all(at("b/c.yaml")).unwrap();
        for file in ["b/c.yaml/z.json", "b/y.yml", "a.yaml", "README.md", "yaml"] {
            fs::write(at(file), "").unwrap();
        }
        symlink(directory.path(), at("b/loop.yaml")).unwrap();
        symlink("/dev/zero", at("zero.yaml")).unwrap();
        symlink(at("a.yaml"), at("link.yaml")).unwrap();
        symlink("nowhere", at("gone.yaml")).unwrap();
        let expected = [
            "a.yaml",
            "b/c.yaml/z.json",
            "b/y.yml",
            "gone.yaml",
            "link.yaml",
        ];
        assert_eq!(found(directory.path()), expected);
    }

    #[test]
    fn a_directory_without_manifests_is_said_to_be() {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("notes.txt"), "").unwrap();
        let [said] = &found(directory.path())[..] else {
            panic!("one")
        };
        assert!(said.starts_with(": no manifests in it"), "{said}");
    }

    #[test]
    fn a_file_is_itself_whatever_its_name() {
        let file = Path::new("/nonexistent");
        assert!(matches!(&of(file)[..], [Ok(path)] if path == file));
    }
}
