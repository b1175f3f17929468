//! The holder: asks about exits where the runtime runs no hook before they are seen.
//!
//! CRI-O hears of an exit by a file in a directory of its own, which the container's conmon puts there: it writes
//! `<container id>.XXXXXX` and renames it (`do_main` in `conmon.c` 2.1, `g_file_set_contents`), or from version 3 on
//! `.<container id>.PID.tmp` (`write_file_atomic`, `src/exit.rs`). The holder has the kernel ask
//! before such a file is opened (fanotify(7), `FAN_OPEN_PERM`), and asks the plugin in its turn, as a hook does. What the
//! container exited with is on the disk by then.
//!
//! It is a process of its own, because conmon waits for ever for whoever is to answer the kernel and does not: a plugin that is
//! stopped, busy or dead keeps nobody waiting. All that the holder holds is let go when it ends. Which containers it asks about it
//! is told by the plugin, a word a line: `hold ID MARKER`, `forget ID`; to `ping` it answers `pong`. Those of `hide ID` are told to
//! nobody before `show ID`. All other exits are let go at once.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File, Metadata};
use std::io::{self, BufRead, Read, Write};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use nix::errno::Errno;
use nix::sys::fanotify::{
    EventFFlags, Fanotify, FanotifyEvent, FanotifyResponse, InitFlags, MarkFlags, MaskFlags,
    Response,
};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CapabilitySet, capabilities};

use super::LIMIT;
use super::hook::{self, HookArgs};
use crate::ids::{Exit, ExitCode};

/// What it says when it holds exits, and what it answers.
pub(super) const READY: &str = "ready";
pub(super) const PONG: &str = "pong";

/// Between two looks whether anything is still held, hidden or to be tidied away.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);
/// In which conmon has told of an exit that it may tell of.
const TELLING_LIMIT: Duration = Duration::from_secs(2);
/// What a held exit takes of the descriptors: conmon's file, the socket, and what is read before.
const DESCRIPTORS_EACH: u64 = 3;
/// What is left for the kernel to tell of others: if it has none for an event, conmon's file is not opened at all.
const SPARE_DESCRIPTORS: u64 = 512;
/// An exit code has three digits.
const CODE_LIMIT: u64 = 16;
/// What asks about one exit needs no more.
const STACK_SIZE: usize = 256 * 1024;

/// Where exits are told, and who is asked about them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HolderArgs {
    /// CRI-O's `container_exits_dir`.
    pub exits: PathBuf,
    /// The socket of [`super::Server`].
    pub socket: PathBuf,
}

impl HolderArgs {
    /// The arguments of the process.
    pub(super) fn to_args(&self) -> [OsString; 3] {
        let Self { exits, socket } = self.clone();
        ["hold".into(), exits.into(), socket.into()]
    }

    /// Reads what [`Self::to_args`] wrote, without its first word.
    #[must_use]
    pub fn parse(args: &[OsString]) -> Option<Self> {
        let [exits, socket] = args else {
            return None;
        };
        Some(Self {
            exits: exits.into(),
            socket: socket.into(),
        })
    }
}

/// Why no exit can be held.
#[derive(Debug, thiserror::Error)]
pub enum HolderError {
    /// There is no such directory, or it cannot be marked.
    #[error(
        "{path}, in which CRI-O is told of exits, cannot be watched{}: {source}",
        hint(source)
    )]
    Directory {
        /// The directory.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// No file can be made in it, or the kernel cannot show one to this process: it would keep conmon from opening it as well.
    #[error(
        "files in {path}, in which CRI-O is told of exits, cannot be opened{}: {source}",
        hint(source)
    )]
    Files {
        /// The directory.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The kernel lets nobody without `CAP_SYS_ADMIN` answer for it.
    #[error(
        "only a process with CAP_SYS_ADMIN can hold exits on CRI-O: give the plugin that capability"
    )]
    NotPermitted,
    /// Somebody else forbids it.
    #[error(
        "fanotify is refused to a process that has CAP_SYS_ADMIN, by seccomp (SystemCallFilter), SELinux or a user namespace perhaps: {0}"
    )]
    Refused(Errno),
    /// The kernel has too little of something.
    #[error("fanotify cannot be had (fs.fanotify.max_user_groups, if that are too many): {0}")]
    Lacks(Errno),
    /// A hold takes some of them, and so does every other exit of the node.
    #[error(
        "exits can only be held by a process that may open more than {SPARE_DESCRIPTORS} files (LimitNOFILE)"
    )]
    Descriptors,
    /// There is nobody to answer the kernel.
    #[error("nobody can answer the kernel: {0}")]
    Thread(io::Error),
    /// The kernel has no such thing.
    #[error(
        "the kernel asks nobody before files are opened (fanotify, CONFIG_FANOTIFY_ACCESS_PERMISSIONS): {0}"
    )]
    NotThere(Errno),
}

/// What else to look at.
fn hint(error: &io::Error) -> &'static str {
    if error.kind() == io::ErrorKind::PermissionDenied {
        " (where SELinux is enforced, the chart's seLinuxOptions)"
    } else {
        ""
    }
}

/// The whole process: says on `answers` that it holds exits, or why it cannot, and goes by the `words` of the plugin until that
/// is gone; what the plugin has been told of by then is still its own for as long as a hook would wait.
pub fn main(args: &[OsString], words: impl BufRead, mut answers: impl Write) {
    let Some(args) = HolderArgs::parse(args) else {
        return;
    };
    match Holder::begin(args) {
        Ok(holder) => holder.follow(words, answers),
        // Whoever reads it has ended otherwise.
        Err(error) => drop(writeln!(answers, "{error}")),
    }
}

/// What becomes of a container's exit.
#[derive(Debug, Clone)]
enum Watched {
    /// The plugin says; its marker, if the plugin is away.
    Ask(PathBuf),
    /// Nobody hears of it.
    Hide,
}

impl Watched {
    fn is_asked_about(&self) -> bool {
        matches!(self, Self::Ask(_))
    }

    fn is_hidden(&self) -> bool {
        matches!(self, Self::Hide)
    }
}

#[derive(Debug)]
struct Holder {
    args: HolderArgs,
    group: Fanotify,
    /// The directory of exits, by which a new one of that name is told apart.
    dir: File,
    /// A file without a name that was made in there. The kernel asks before it is opened as well.
    canary: File,
    /// The containers that are not to be let go at once.
    watched: Mutex<HashMap<String, Watched>>,
    held: AtomicUsize,
    most: usize,
}

impl Holder {
    /// Nobody waits for it before it can answer.
    fn begin(args: HolderArgs) -> Result<Arc<Self>, HolderError> {
        let path = args.exits.clone();
        let directory = |source| HolderError::Directory {
            path: path.clone(),
            source,
        };
        let files = |source| HolderError::Files {
            path: path.clone(),
            source,
        };
        let dir = File::open(&args.exits).map_err(directory)?;
        let most = most_held();
        if most == 0 {
            return Err(HolderError::Descriptors);
        }
        let canary = canary(&args.exits).map_err(files)?;
        let flags = InitFlags::FAN_CLASS_CONTENT | InitFlags::FAN_CLOEXEC;
        let opened = EventFFlags::O_RDONLY | EventFFlags::O_CLOEXEC;
        let group = Fanotify::init(flags, opened).map_err(|errno| match errno {
            Errno::EPERM if !is_sys_admin() => HolderError::NotPermitted,
            Errno::EPERM => HolderError::Refused(errno),
            Errno::EMFILE | Errno::ENOMEM => HolderError::Lacks(errno),
            errno => HolderError::NotThere(errno),
        })?;
        let marked = |errno| match errno {
            Errno::EINVAL => HolderError::NotThere(errno),
            errno => directory(errno.into()),
        };
        let flags = MarkFlags::FAN_MARK_ADD;
        let mask = MaskFlags::FAN_OPEN_PERM;
        group
            .mark(flags, mask, &canary, None::<&Path>)
            .map_err(marked)?;
        let holder = Arc::new(Self {
            args,
            group,
            dir,
            canary,
            watched: Mutex::default(),
            held: AtomicUsize::new(0),
            most,
        });
        let answering = Arc::clone(&holder);
        thread::Builder::new()
            .spawn(move || answering.answer_all())
            .map_err(HolderError::Thread)?;
        holder.open_canary().map_err(files)?;
        let flags = flags | MarkFlags::FAN_MARK_ONLYDIR;
        let mask = mask | MaskFlags::FAN_EVENT_ON_CHILD;
        holder
            .group
            .mark(flags, mask, &holder.dir, None::<&Path>)
            .map_err(marked)?;
        Ok(holder)
    }

    /// Returns when the kernel has been answered about this file as it is about conmon's.
    fn open_canary(&self) -> io::Result<()> {
        File::open(format!("/proc/self/fd/{}", self.canary.as_raw_fd())).map(drop)
    }

    fn follow(&self, mut words: impl BufRead, mut answers: impl Write) {
        if writeln!(answers, "{READY}").is_err() {
            return;
        }
        let mut line = String::new();
        while words.read_line(&mut line).is_ok_and(|read| read > 0) {
            if line == "ping\n" {
                if !self.is_in_place() || self.open_canary().is_err() {
                    return;
                }
                // A plugin that does not read any more is gone, which its words will tell.
                let _ = writeln!(answers, "{PONG}");
            } else {
                self.note(line.trim_end());
            }
            line.clear();
        }
        // The next plugin has a holder of its own.
        thread::sleep(LIMIT);
        let _ = self.group.mark(
            MarkFlags::FAN_MARK_FLUSH,
            MaskFlags::empty(),
            &self.dir,
            None::<&Path>,
        );
        while self.held.load(Ordering::Relaxed) > 0 {
            thread::sleep(LOOK_INTERVAL);
        }
    }

    /// Whether exits are still told where they were when it began.
    fn is_in_place(&self) -> bool {
        let identity = |it: &Metadata| (it.dev(), it.ino());
        let watched = self.dir.metadata().ok().filter(|it| it.nlink() > 0);
        let there = fs::metadata(&self.args.exits).ok();
        watched.is_some_and(|it| there.is_some_and(|other| identity(&it) == identity(&other)))
    }

    fn note(&self, words: &str) {
        let mut words = words.splitn(3, ' ');
        match (words.next(), words.next(), words.next()) {
            (Some("hold"), Some(id), Some(marker)) => {
                let ask = Watched::Ask(marker.into());
                self.watched().insert(id.to_owned(), ask);
            }
            (Some("hide"), Some(id), None) => {
                self.watched().insert(id.to_owned(), Watched::Hide);
            }
            (Some("forget"), Some(id), None) => self.unwatch(id, Watched::is_asked_about),
            (Some("show"), Some(id), None) => self.unwatch(id, Watched::is_hidden),
            // Of another version.
            _ => {}
        }
    }

    fn watched(&self) -> MutexGuard<'_, HashMap<String, Watched>> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn unwatch(&self, id: &str, is_meant: impl Fn(&Watched) -> bool) {
        let mut watched = self.watched();
        if watched.get(id).is_some_and(is_meant) {
            watched.remove(id);
        }
    }

    /// CRI-O removes what tells of an exit, but not of a container that it does not know any more.
    fn tidy(&self, id: &str) {
        let until = Instant::now() + TELLING_LIMIT;
        while Instant::now() < until && fs::remove_file(self.args.exits.join(id)).is_err() {
            thread::sleep(LOOK_INTERVAL);
        }
    }

    /// Ends with the process.
    fn answer_all(self: Arc<Self>) {
        let _end = EndOfProcess;
        loop {
            match self.group.read_events() {
                Ok(events) => events.into_iter().for_each(|event| self.answer(event)),
                Err(Errno::EINTR) => {}
                Err(_) => return,
            }
        }
    }

    fn answer(self: &Arc<Self>, event: FanotifyEvent) {
        let (Some(fd), true) = (event.fd(), event.check_version()) else {
            // Lost in a queue that was full, which lets it go. Of another version: nobody knows what to answer.
            return;
        };
        let id = container(fd);
        let watched = id.as_ref().and_then(|id| self.watched().get(id).cloned());
        let held = Held::new(Arc::clone(self), event);
        let room = self.held.load(Ordering::Relaxed) <= self.most;
        if let Some((id, watched)) = id.zip(watched).filter(|_| room) {
            let thread = thread::Builder::new().stack_size(STACK_SIZE);
            // If there can be none, it is let go.
            let _ = thread.spawn(move || match watched {
                Watched::Ask(marker) => held.wait(id, marker),
                Watched::Hide => held.hide(&id),
            });
        }
    }
}

/// As many as there are descriptors for, of which as many are asked for as there may be.
fn most_held() -> usize {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    let all = Rlimit {
        current: maximum,
        maximum,
    };
    let _ = setrlimit(Resource::Nofile, all);
    let there = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let most = there.saturating_sub(SPARE_DESCRIPTORS) / DESCRIPTORS_EACH;
    usize::try_from(most).unwrap_or(usize::MAX)
}

fn is_sys_admin() -> bool {
    capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::SYS_ADMIN))
}

/// CRI-O sees a name come and go that is no container's.
fn canary(exits: &Path) -> io::Result<File> {
    let path = exits.join(format!("reprise-{}", process::id()));
    let made = File::create_new(&path);
    let removed = fs::remove_file(&path);
    made.and_then(|file| removed.map(|()| file))
}

/// Whose exit the file tells of, if it is one that is yet to be renamed.
fn container(file: BorrowedFd<'_>) -> Option<String> {
    let path = fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).ok()?;
    let name = path.file_name()?.to_str()?;
    let (id, _) = name.strip_prefix('.').unwrap_or(name).split_once('.')?;
    Some(id.to_owned())
}

/// Whoever waits for this process is to wait no longer.
struct EndOfProcess;

impl Drop for EndOfProcess {
    fn drop(&mut self) {
        process::exit(1);
    }
}

/// An exit that is let go when this is dropped.
struct Held {
    holder: Arc<Holder>,
    event: FanotifyEvent,
}

impl Held {
    fn new(holder: Arc<Holder>, event: FanotifyEvent) -> Self {
        holder.held.fetch_add(1, Ordering::Relaxed);
        Self { holder, event }
    }

    fn wait(self, id: String, marker: PathBuf) {
        let socket = self.holder.args.socket.clone();
        let (conmon, deadline) = (self.event.pid(), self.deadline());
        hook::bounded(deadline, move || {
            let exit = hook::Exit {
                id,
                known: exit_of(conmon),
                deadline,
            };
            hook::wait(&HookArgs { socket, marker }, &exit);
        });
    }

    fn hide(self, id: &str) {
        let (deadline, holder) = (self.deadline(), Arc::clone(&self.holder));
        while Instant::now() < deadline && holder.watched().contains_key(id) {
            thread::sleep(LOOK_INTERVAL);
        }
        drop(self);
        holder.tidy(id);
    }

    /// From when conmon made the file, whoever may have held it meanwhile.
    fn deadline(&self) -> Instant {
        let made = self.event.fd().and_then(|fd| {
            let file = File::from(fd.try_clone_to_owned().ok()?);
            file.metadata().ok()?.modified().ok()
        });
        let waited = made.and_then(|made| SystemTime::now().duration_since(made).ok());
        Instant::now() + LIMIT.saturating_sub(waited.unwrap_or_default())
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(fd) = self.event.fd() {
            let go = FanotifyResponse::new(fd, Response::FAN_ALLOW);
            // Fails if conmon has been killed.
            let _ = self.holder.group.write_response(go);
        }
        self.holder.held.fetch_sub(1, Ordering::Relaxed);
    }
}

/// How the container of this conmon has ended: conmon has written that elsewhere before, as its command line says. That the
/// container was out of memory it tells by a file without content (`write_oom_files`, `cgroup.c`).
fn exit_of(conmon: i32) -> Option<Exit> {
    let line = fs::read(format!("/proc/{conmon}/cmdline")).ok()?;
    let mut args = line.split(|byte| *byte == 0);
    args.find(|arg| *arg == b"--persist-dir")?;
    let dir = Path::new(OsStr::from_bytes(args.next()?));
    let mut text = String::new();
    let file = File::open(dir.join("exit")).ok()?;
    file.take(CODE_LIMIT).read_to_string(&mut text).ok()?;
    let code = text.trim_end().parse().ok().map(ExitCode)?;
    let oom_killed = dir.join("oom").exists();
    Some(Exit { code, oom_killed })
}
