//! The file: a line of JSON for each restart that is over, the newest last.

use std::fs;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use super::Entry;
use crate::dirs;

/// In the state directory: the file, and what is to replace it.
pub(crate) const FILES: [&str; 2] = ["history.jsonl", "history.new"];
/// As many restarts are kept, or fewer that have so many bytes. The file grows to twice that before it is cut.
pub(super) const MOST: usize = 1000;
const MOST_BYTES: u64 = 512 * 1024;

/// Where it is.
#[derive(Debug)]
pub(crate) struct File {
    path: PathBuf,
    in_trouble: AtomicBool,
}

/// What is in it.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Kept {
    /// The newest last.
    pub(super) entries: Vec<Entry>,
    /// Lines that are none: the disk was full, for one.
    pub(super) unreadable: usize,
}

/// What changes with every change of it.
pub(super) type Mark = (u64, u64, i64, i64);

impl File {
    pub(crate) fn in_dir(state_dir: &Path) -> Self {
        Self {
            path: state_dir.join(FILES[0]),
            in_trouble: AtomicBool::new(false),
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Adds a line, and says once if that does not work: nothing else depends on it.
    pub(crate) fn note(&self, entry: &Entry) {
        let noted = self.append(entry);
        let was = self.in_trouble.swap(noted.is_err(), Ordering::Relaxed);
        if let Err(error) = noted.as_ref()
            && !was
        {
            let path = self.path.display();
            tracing::warn!(%path, %error, "restarts are missing in the history: it cannot be written");
        }
    }

    fn append(&self, entry: &Entry) -> io::Result<()> {
        let mut line = serde_json::to_vec(entry)?;
        line.push(b'\n');
        let dir = self.path.parent().unwrap_or(&self.path);
        dirs::within(dir, || self.append_line(&line))
    }

    fn append_line(&self, line: &[u8]) -> io::Result<()> {
        if self.open()?.metadata()?.len() + line.len() as u64 > 2 * MOST_BYTES {
            self.cut()?;
        }
        let mut file = self.open()?;
        // Where the line before was torn, it is to cost no other.
        let begin: &[u8] = if is_torn(&file)? { b"\n" } else { b"" };
        file.write_all(&[begin, line].concat())
    }

    fn open(&self) -> io::Result<fs::File> {
        let mut options = fs::OpenOptions::new();
        let options = options.read(true).append(true).create(true).mode(0o600);
        options.open(&self.path)
    }

    /// Puts one with the newest lines in its place.
    fn cut(&self) -> io::Result<()> {
        let text = newest(&mut self.open()?, MOST_BYTES)?;
        let new = self.path.with_file_name(FILES[1]);
        let mut options = fs::OpenOptions::new();
        let options = options.write(true).create(true).truncate(true).mode(0o600);
        options.open(&new)?.write_all(&text)?;
        fs::rename(&new, &self.path)
    }

    /// What is kept. One that is not there keeps nothing.
    pub(super) fn read(&self) -> io::Result<Kept> {
        let Some(mut file) = found(fs::File::open(&self.path))? else {
            return Ok(Kept::default());
        };
        let text = newest(&mut file, 2 * MOST_BYTES)?;
        let mut kept = Kept::default();
        let lines = text.split(|byte| *byte == b'\n');
        for line in lines.filter(|line| !line.is_empty()) {
            match serde_json::from_slice(line) {
                Ok(entry) => kept.entries.push(entry),
                Err(_) => kept.unreadable += 1,
            }
        }
        Ok(kept)
    }

    /// `None`: it is not there.
    pub(super) fn mark(&self) -> io::Result<Option<Mark>> {
        let meta = found(fs::metadata(&self.path))?;
        Ok(meta.map(|it| (it.ino(), it.len(), it.mtime(), it.mtime_nsec())))
    }
}

fn found<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

fn is_torn(file: &fs::File) -> io::Result<bool> {
    let Some(last) = file.metadata()?.len().checked_sub(1) else {
        return Ok(false);
    };
    let mut byte = [0];
    file.read_exact_at(&mut byte, last)?;
    Ok(byte != *b"\n")
}

/// The last lines, as many as are kept, of the last bytes, as many as that.
fn newest(file: &mut fs::File, most: u64) -> io::Result<Vec<u8>> {
    let left_out = file.metadata()?.len().saturating_sub(most);
    file.seek(SeekFrom::Start(left_out))?;
    let mut text = Vec::new();
    file.take(most).read_to_end(&mut text)?;
    let mut ends = (0..text.len()).filter(|at| text[*at] == b'\n');
    // It may begin in the middle of a line.
    let whole = match left_out {
        0 => 0,
        _ => ends.next().map_or(text.len(), |at| at + 1),
    };
    let more = ends.rev().nth(MOST).map_or(0, |at| at + 1);
    text.drain(..whole.max(more));
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::tests::exited;

    struct Place {
        dir: tempfile::TempDir,
        file: File,
    }

    impl Place {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let file = File::in_dir(dir.path());
            Self { dir, file }
        }

        fn len(&self) -> u64 {
            fs::metadata(&self.file.path).unwrap().len()
        }

        /// The pods whose restarts are kept.
        fn pods(&self) -> Vec<String> {
            let entries = self.file.read().unwrap().entries.into_iter();
            entries.map(|entry| entry.pod).collect()
        }

        fn write(&self, text: &str) {
            let mut file = self.file.open().unwrap();
            file.write_all(text.as_bytes()).unwrap();
        }
    }

    #[test]
    fn what_was_noted_is_read_in_that_order_by_other_processes_too() {
        let place = Place::new();
        assert_eq!(place.file.read().unwrap(), Kept::default());
        assert_eq!(place.file.mark().unwrap(), None);
        for pod in ["a", "b"] {
            place.file.note(&exited(pod));
        }
        assert_eq!(
            File::in_dir(place.dir.path()).read().unwrap().entries[1],
            exited("b")
        );
        assert_eq!(place.pods(), ["a", "b"]);
        assert_eq!(
            fs::metadata(&place.file.path).unwrap().mode() & 0o777,
            0o600
        );
    }

    #[test]
    fn a_line_that_was_torn_costs_no_other() {
        let place = Place::new();
        place.file.note(&exited("a"));
        place.write("{\"at\": \"2026");
        place.file.note(&exited("b"));
        place.write("\u{0}\u{1b}[31m\n[1, 2]\n\n{}\n");
        place.file.note(&exited("c"));
        assert_eq!(place.pods(), ["a", "b", "c"]);
        assert_eq!(place.file.read().unwrap().unreadable, 4);
    }

    #[test]
    fn the_newest_are_kept_and_the_file_does_not_grow_for_ever() {
        let place = Place::new();
        let mut longest = 0;
        for number in 0..6000 {
            place.file.note(&exited(&number.to_string()));
            longest = place.len().max(longest);
        }
        assert!(
            longest > MOST_BYTES && longest <= 2 * MOST_BYTES,
            "{longest}"
        );
        let pods = place.pods();
        assert_eq!(pods.len(), MOST);
        assert_eq!(
            (pods[0].as_str(), pods[MOST - 1].as_str()),
            ("5000", "5999")
        );
        let left = fs::read_dir(place.dir.path()).unwrap();
        assert_eq!(left.count(), 1);
    }

    #[test]
    fn of_a_file_that_somebody_has_filled_only_the_end_is_read() {
        let place = Place::new();
        place.write(&"x".repeat(3 << 20));
        place.file.note(&exited("a"));
        assert_eq!(place.pods(), ["a"]);
        assert!(place.len() < MOST_BYTES, "{}", place.len());
    }

    #[test]
    fn a_file_that_cannot_be_written_ends_nothing() {
        let place = Place::new();
        fs::create_dir(&place.file.path).unwrap();
        place.file.note(&exited("a"));
        assert!(place.file.in_trouble.load(Ordering::Relaxed));
        assert!(place.file.read().is_err());
        fs::remove_dir(&place.file.path).unwrap();
        fs::remove_dir(place.dir.path()).unwrap();
        place.file.note(&exited("b"));
        assert!(!place.file.in_trouble.load(Ordering::Relaxed));
        assert_eq!(place.pods(), ["b"]);
    }
}
