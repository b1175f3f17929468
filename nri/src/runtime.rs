//! Who is at the other end: the runtime, its version, and the version of NRI in it.

use std::fmt;
use std::time::Duration;

use crate::wire::nri::ConfigureRequest;

/// How long runtimes wait unless they say otherwise (`pkg/api/timeouts.go`, v0.12.5).
const REGISTRATION_TIMEOUT: Duration = Duration::from_secs(5);
pub(crate) const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);

/// What the runtime says of itself when it configures the plugin.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct RuntimeInfo {
    /// `containerd` or `cri-o`.
    pub name: String,
    /// As the runtime writes it, mostly with a leading `v`.
    pub version: String,
    /// The version of NRI in the runtime: as it says (since 0.12), else inferred from the runtime's
    /// name and version, else unknown.
    pub nri_version: Option<NriVersion>,
    /// How long a plugin may take from connecting to registering.
    pub registration_timeout: Duration,
    /// How long a plugin may take to handle an event; past it, the runtime drops the plugin.
    pub request_timeout: Duration,
}

impl RuntimeInfo {
    pub(crate) fn from_wire(request: &ConfigureRequest) -> Self {
        Self {
            nri_version: NriVersion::parse(&request.NRI_version)
                .or_else(|| NriVersion::infer(&request.runtime_name, &request.runtime_version)),
            name: request.runtime_name.clone(),
            version: request.runtime_version.clone(),
            registration_timeout: milliseconds(request.registration_timeout)
                .unwrap_or(REGISTRATION_TIMEOUT),
            request_timeout: milliseconds(request.request_timeout).unwrap_or(REQUEST_TIMEOUT),
        }
    }
}

/// Nothing before NRI 0.7, where the field is zero.
fn milliseconds(field: i64) -> Option<Duration> {
    u64::try_from(field)
        .ok()
        .filter(|ms| *ms > 0)
        .map(Duration::from_millis)
}

/// A version of NRI. Patches do not change the protocol.
///
/// ```
/// use nri::NriVersion;
///
/// assert!(NriVersion::new(0, 9) < NriVersion::new(0, 12));
/// assert_eq!(NriVersion::new(0, 12).to_string(), "0.12");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NriVersion {
    major: u32,
    minor: u32,
}

type Release = (u32, u32, u32);

/// The release of containerd from which on it has which minor version of NRI 0
/// (`runtimeVersionMap`, `pkg/api/version.go`, v0.12.5; later releases say it themselves).
const CONTAINERD: &[(Release, u32)] = &[
    ((1, 7, 0), 3),
    ((1, 7, 7), 4),
    ((1, 7, 14), 6),
    ((1, 7, 26), 8),
    ((2, 0, 0), 8),
    ((2, 2, 0), 10),
    ((2, 2, 1), 11),
    ((2, 3, 0), 12),
];

/// The same for CRI-O.
const CRI_O: &[(Release, u32)] = &[
    ((1, 26, 0), 2),
    ((1, 26, 2), 3),
    ((1, 29, 0), 5),
    ((1, 29, 2), 6),
    ((1, 32, 0), 9),
    ((1, 34, 0), 10),
    ((1, 35, 0), 11),
];

impl NriVersion {
    /// The version `major.minor`.
    #[must_use]
    pub const fn new(major: u32, minor: u32) -> Self {
        Self { major, minor }
    }

    /// Reads `v0.12.0` and the like; nothing for the `unknown` or `(devel)` of private builds.
    fn parse(text: &str) -> Option<Self> {
        release(text).map(|(major, minor, _)| Self { major, minor })
    }

    fn infer(runtime: &str, version: &str) -> Option<Self> {
        let table = match runtime {
            "containerd" => CONTAINERD,
            "cri-o" => CRI_O,
            _ => return None,
        };
        let version = release(version)?;
        let (_, minor) = table.iter().rev().find(|(first, _)| *first <= version)?;
        Some(Self::new(0, *minor))
    }
}

impl fmt::Display for NriVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// Reads `major.minor.patch` with an optional `v` before and anything after it, as distributions
/// and pre-releases have it (`v2.3.0-rc.1`, `1.7.28~ds1`).
fn release(text: &str) -> Option<Release> {
    let mut parts = text.strip_prefix('v').unwrap_or(text).splitn(3, '.');
    let major = parts.next()?.parse().ok()?;
    let minor = leading_number(parts.next()?)?;
    let patch = parts.next().and_then(leading_number).unwrap_or(0);
    Some((major, minor, patch))
}

fn leading_number(text: &str) -> Option<u32> {
    let end = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    text[..end].parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nri_of(name: &str, version: &str, nri: &str) -> Option<String> {
        let mut request = ConfigureRequest::new();
        request.runtime_name = name.into();
        request.runtime_version = version.into();
        request.NRI_version = nri.into();
        RuntimeInfo::from_wire(&request)
            .nri_version
            .map(|version| version.to_string())
    }

    #[test]
    fn a_version_that_the_runtime_states_is_taken() {
        assert_eq!(nri_of("containerd", "v2.3.7", "v0.12.2").unwrap(), "0.12");
        assert_eq!(nri_of("other", "7", "v0.13.0-rc.1").unwrap(), "0.13");
    }

    #[test]
    fn a_version_that_is_not_stated_is_inferred_from_the_runtime() {
        for (name, version, nri) in [
            ("containerd", "v1.7.0", "0.3"),
            ("containerd", "v1.7.25", "0.6"),
            ("containerd", "1.7.28~ds1", "0.8"),
            ("containerd", "v2.1.5", "0.8"),
            ("containerd", "v2.2.0", "0.10"),
            ("containerd", "v2.2.9", "0.11"),
            ("containerd", "v2.3.0-rc.1", "0.12"),
            ("cri-o", "1.28.4", "0.3"),
            ("cri-o", "1.33.1", "0.9"),
            ("cri-o", "1.34.0", "0.10"),
            ("cri-o", "1.36.2", "0.11"),
        ] {
            assert_eq!(
                nri_of(name, version, "").as_deref(),
                Some(nri),
                "{name} {version}"
            );
            assert_eq!(
                nri_of(name, version, "(devel)").as_deref(),
                Some(nri),
                "{name} {version}"
            );
        }
    }

    #[test]
    fn a_version_that_cannot_be_told_is_unknown() {
        assert_eq!(nri_of("containerd", "v1.6.30", ""), None);
        assert_eq!(nri_of("containerd", "main", "unknown"), None);
        assert_eq!(nri_of("other", "v2.0.0", ""), None);
    }

    #[test]
    fn timeouts_that_an_old_runtime_does_not_send_are_the_defaults() {
        let mut request = ConfigureRequest::new();
        let old = RuntimeInfo::from_wire(&request);
        assert_eq!(old.registration_timeout, Duration::from_secs(5));
        assert_eq!(old.request_timeout, Duration::from_secs(2));

        request.registration_timeout = 9000;
        request.request_timeout = 800;
        let new = RuntimeInfo::from_wire(&request);
        assert_eq!(new.registration_timeout, Duration::from_secs(9));
        assert_eq!(new.request_timeout, Duration::from_millis(800));
    }
}
