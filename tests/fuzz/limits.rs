//! What one input may cost.

use std::collections::BTreeMap;
use std::hint::black_box;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::sleep;
use std::time::Duration;

use peak_alloc::PeakAlloc;
use rustix::time::{ClockId, clock_gettime};

/// The most that may be allocated at any moment beyond what was before, in bytes.
const MEMORY: usize = 16 << 20;
/// The longest that it may take, in time of a processor such as the one that the figures of docs/security.md are of. An
/// unoptimised build says nothing about that.
const TIME: Duration = Duration::from_millis(if cfg!(fuzzing) { 50 } else { 2000 });

/// How long the yardstick ([`slowness`]) takes on the machine that [`TIME`] is for.
const YARDSTICK: Duration = Duration::from_millis(8);
const YARDSTICK_NAMES: u32 = 20_000;
/// No machine is slower. An unoptimised build has a limit of its own.
const SLOWEST: f64 = if cfg!(fuzzing) { 4.0 } else { 1.0 };

#[global_allocator]
static ALLOCATED: PeakAlloc = PeakAlloc;

/// Panics anywhere, also in tasks and threads that survive them.
static PANICS: AtomicUsize = AtomicUsize::new(0);

/// What an input cost.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cost {
    pub(crate) bytes: usize,
    pub(crate) time: Duration,
}

/// Runs a target with an input. The error says which limit was passed.
pub(crate) fn judge(run: fn(&[u8]), input: &[u8]) -> Result<Cost, String> {
    count_panics();
    let panics = PANICS.load(Ordering::Relaxed);
    let mut cost = measure(run, input)?;
    // The system may have been in the way, a virtual machine's host for a while; what is slow is slow every time. And the
    // limit is for a machine of a certain speed.
    for pause in (1..=5).map(|it| it * TIME) {
        if cost.time > TIME {
            sleep(pause);
            let again = measure(run, input)?;
            cost.time = cost.time.min(again.time.div_f64(slowness()));
        }
    }
    if PANICS.load(Ordering::Relaxed) > panics {
        return Err("a panic, see above".into());
    }
    if cost.bytes > MEMORY {
        let kib = cost.bytes >> 10;
        return Err(format!(
            "{} bytes of input allocated {kib} KiB",
            input.len()
        ));
    }
    if cost.time > TIME {
        let time = cost.time;
        return Err(format!("{} bytes of input took {time:?}", input.len()));
    }
    Ok(cost)
}

fn measure(run: fn(&[u8]), input: &[u8]) -> Result<Cost, String> {
    ALLOCATED.reset_peak_usage();
    let (before, began) = (ALLOCATED.current_usage(), processor_time());
    catch_unwind(AssertUnwindSafe(|| run(input))).map_err(|_| "a panic, see above")?;
    Ok(Cost {
        bytes: ALLOCATED.peak_usage().saturating_sub(before),
        time: processor_time().saturating_sub(began),
    })
}

/// How much slower this machine is just now than the one that the limit is for: at least 1.
fn slowness() -> f64 {
    let began = processor_time();
    // What takes the time of a reader: many small things that are allocated, compared and given back.
    let names: BTreeMap<String, Vec<u32>> = (0..YARDSTICK_NAMES)
        .map(|it| (it.wrapping_mul(2_654_435_761).to_string(), vec![it]))
        .collect();
    drop(black_box(names));
    let took = processor_time().saturating_sub(began);
    took.div_duration_f64(YARDSTICK).clamp(1.0, SLOWEST)
}

fn processor_time() -> Duration {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    Duration::try_from(now).unwrap_or_default()
}

fn count_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            PANICS.fetch_add(1, Ordering::Relaxed);
            before(panic);
        }));
    });
}
