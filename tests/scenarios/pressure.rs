//! How busy the machine is. What is measured in seconds fails on one that has no processor left for it: a replay that takes
//! too long is left to the kubelet, as it is to be.

use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// In the last ten seconds, the share of time in which something waited for a processor (`Documentation/accounting/psi.rst`
/// of Linux), in percent.
const CPU: &str = "/proc/pressure/cpu";
/// From this on nothing more is begun, for a while.
const BUSY: f64 = 60.0;
const LIMIT: Duration = Duration::from_secs(10);
/// Between two that begin on one machine, and between two looks.
const INTERVAL: Duration = Duration::from_millis(500);

/// Waits until one more scenario may begin, with those of all other runs on this machine in a row. Blocks.
pub(crate) fn until_it_is_bearable(lock: &Path) -> io::Result<()> {
    let turn = File::create(lock)?;
    turn.lock()?;
    let began = Instant::now();
    sleep(INTERVAL);
    while began.elapsed() < LIMIT && waiting().is_some_and(|share| share > BUSY) {
        sleep(INTERVAL);
    }
    Ok(())
}

/// `None`: the kernel does not tell.
fn waiting() -> Option<f64> {
    let text = fs::read_to_string(CPU).ok()?;
    let some = text.lines().find_map(|line| line.strip_prefix("some "))?;
    let shares = some.split(' ');
    let mut share = shares.filter_map(|it| it.strip_prefix("avg10="));
    share.next()?.parse().ok()
}
