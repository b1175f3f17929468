//! Times as kubectl reads and writes them.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// A time that is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a time is like 90s, 5m or 1h30m, and longer than nothing")]
pub struct BadTime;

/// How long something is waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timeout(Duration);

impl Timeout {
    pub(super) fn get(self) -> Duration {
        self.0
    }
}

impl FromStr for Timeout {
    type Err = BadTime;

    /// Numbers with units, as Go writes durations.
    fn from_str(text: &str) -> Result<Self, BadTime> {
        let mut seconds = 0_u64;
        let mut rest = text;
        while let Some(end) = rest.find(|char: char| !char.is_ascii_digit()) {
            let number: u64 = rest[..end].parse().map_err(|_| BadTime)?;
            let factor = match rest.as_bytes()[end] {
                b'h' => 3600,
                b'm' => 60,
                b's' => 1,
                _ => return Err(BadTime),
            };
            let part = number.checked_mul(factor).ok_or(BadTime)?;
            seconds = seconds.checked_add(part).ok_or(BadTime)?;
            rest = &rest[end + 1..];
        }
        // No clock counts further than that.
        let well = rest.is_empty() && (1..=u64::from(u32::MAX)).contains(&seconds);
        if well {
            Ok(Self(Duration::from_secs(seconds)))
        } else {
            Err(BadTime)
        }
    }
}

impl fmt::Display for Timeout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.0.as_secs();
        for (unit, count) in [
            ("h", seconds / 3600),
            ("m", seconds / 60 % 60),
            ("s", seconds % 60),
        ] {
            if count > 0 {
                write!(f, "{count}{unit}")?;
            }
        }
        Ok(())
    }
}

/// How long ago something was, in one number.
pub(super) fn age(seconds: i64) -> String {
    const MINUTE: i64 = 60;
    const HOUR: i64 = 60 * MINUTE;
    const DAY: i64 = 24 * HOUR;
    match seconds.max(0) {
        seconds if seconds < 2 * MINUTE => format!("{seconds}s"),
        seconds if seconds < 2 * HOUR => format!("{}m", seconds / MINUTE),
        seconds if seconds < 2 * DAY => format!("{}h", seconds / HOUR),
        seconds => format!("{}d", seconds / DAY),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_as_they_are_written() {
        for (text, seconds) in [("90s", 90), ("5m", 300), ("1h30m", 5400), ("1m1m", 120)] {
            let timeout = text.parse::<Timeout>().unwrap();
            assert_eq!(timeout.get().as_secs(), seconds, "{text}");
            assert_eq!(timeout.to_string().parse(), Ok(timeout), "{timeout}");
        }
        for bad in [
            "",
            "5",
            "m",
            "0s",
            "-1s",
            "5 m",
            "1d",
            "99999999999999999999s",
            "9999999999h",
        ] {
            assert_eq!(bad.parse::<Timeout>(), Err(BadTime), "{bad}");
        }
    }

    #[test]
    fn an_age_is_one_number() {
        let ages = [-5, 119, 120, 7199, 7200, 172_799, 172_800].map(age);
        assert_eq!(ages, ["0s", "119s", "2m", "119m", "2h", "47h", "2d"]);
    }
}
