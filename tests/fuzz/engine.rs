//! libFuzzer: gives inputs to one target, and keeps those that reach something new.

use std::env;
use std::fs;
use std::sync::{LazyLock, Mutex};
use std::time::Duration;

use libfuzzer_sys::{fuzz_mutator, fuzz_target, fuzzer_mutate};

use crate::limits::{self, Cost};
use crate::mutation;
use crate::targets::{self, Form, Target};

static TARGET: LazyLock<&'static Target> = LazyLock::new(|| {
    let name = env::var("REPRISE_FUZZ").unwrap_or_default();
    targets::named(&name).unwrap_or_else(|| panic!("REPRISE_FUZZ={name} is no target"))
});

fuzz_target!(init: targets::work_in(env::temp_dir()), |input: &[u8]| {
    match limits::judge(TARGET.run, input) {
        Ok(cost) => note(cost),
        // libFuzzer keeps the input.
        Err(why) => panic!("{}: {why}", TARGET.name),
    }
});

fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| {
    let mut rng = fastrand::Rng::with_seed(seed.into());
    let mutated = match TARGET.form {
        Form::Text if rng.u8(..4) > 0 => mutation::text(&data[..size], max_size, &mut rng),
        Form::Calls if rng.u8(..4) > 0 => mutation::calls(&data[..size], &mut rng, |request| {
            let length = request.len();
            request.resize(2 * length + 16, 0);
            let room = request.len();
            let length = fuzzer_mutate(request, length, room);
            request.truncate(length);
        }),
        Form::Text | Form::Calls | Form::Bytes => return fuzzer_mutate(data, size, max_size),
    };
    let size = mutated.len().min(max_size);
    data[..size].copy_from_slice(&mutated[..size]);
    size
});

/// Leaves the worst costs so far in the file that `REPRISE_FUZZ_COSTS` names: bytes and microseconds.
fn note(cost: Cost) {
    static WORST: Mutex<Cost> = Mutex::new(Cost {
        bytes: 0,
        time: Duration::ZERO,
    });
    let mut worst = WORST.lock().expect("nobody panics with it");
    if cost.bytes > worst.bytes || cost.time > worst.time {
        worst.bytes = worst.bytes.max(cost.bytes);
        worst.time = worst.time.max(cost.time);
        if let Some(file) = env::var_os("REPRISE_FUZZ_COSTS") {
            let line = format!("{} {}\n", worst.bytes, worst.time.as_micros());
            fs::write(file, line).expect("the file of costs");
        }
    }
}
