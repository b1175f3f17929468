//! Values of settings that are more than text.

use std::fmt;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::ValueEnum;
use serde::Deserialize;

/// Where the runtime serves the CRI: a unix socket with an absolute path.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct CriEndpoint(PathBuf);

impl CriEndpoint {
    pub(super) fn at(socket: &str) -> Self {
        Self(socket.into())
    }

    /// The path of the socket.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.0
    }
}

impl FromStr for CriEndpoint {
    type Err = BadValue;

    fn from_str(text: &str) -> Result<Self, BadValue> {
        let path = text.strip_prefix("unix://").unwrap_or(text);
        if path.starts_with('/') {
            Ok(Self::at(path))
        } else {
            Err(BadValue::CriEndpoint)
        }
    }
}

impl fmt::Display for CriEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "unix://{}", self.0.display())
    }
}

/// The place of a plugin among others: two digits, lower ones are asked first.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct NriIndex(String);

impl NriIndex {
    /// The two digits.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Default for NriIndex {
    fn default() -> Self {
        Self("10".to_owned())
    }
}

impl FromStr for NriIndex {
    type Err = BadValue;

    fn from_str(text: &str) -> Result<Self, BadValue> {
        let digits = text.len() == 2 && text.bytes().all(|byte| byte.is_ascii_digit());
        if digits {
            Ok(Self(text.to_owned()))
        } else {
            Err(BadValue::NriIndex)
        }
    }
}

/// Where metrics and health can be asked for, if they can.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Listen(pub(super) Option<SocketAddr>);

impl Default for Listen {
    fn default() -> Self {
        Self(Some((Ipv4Addr::LOCALHOST, 9808).into()))
    }
}

impl FromStr for Listen {
    type Err = BadValue;

    fn from_str(text: &str) -> Result<Self, BadValue> {
        if text.is_empty() {
            return Ok(Self(None));
        }
        let address = text.parse().map_err(|_| BadValue::Listen)?;
        Ok(Self(Some(address)))
    }
}

impl TryFrom<String> for Listen {
    type Error = BadValue;

    fn try_from(text: String) -> Result<Self, BadValue> {
        text.parse()
    }
}

/// Names one `DaemonSet`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct DaemonSetName {
    /// Its namespace.
    pub namespace: String,
    /// Its name there.
    pub name: String,
}

impl FromStr for DaemonSetName {
    type Err = BadValue;

    fn from_str(text: &str) -> Result<Self, BadValue> {
        let is_name = |text: &str| !text.is_empty() && !text.contains('/');
        match text.split_once('/') {
            Some((namespace, name)) if is_name(namespace) && is_name(name) => Ok(Self {
                namespace: namespace.to_owned(),
                name: name.to_owned(),
            }),
            _ => Err(BadValue::DaemonSetName),
        }
    }
}

impl fmt::Display for DaemonSetName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

impl TryFrom<String> for DaemonSetName {
    type Error = BadValue;

    fn try_from(text: String) -> Result<Self, BadValue> {
        text.parse()
    }
}

/// A value that means nothing for its setting.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BadValue {
    /// Not a unix socket.
    #[error("a CRI endpoint is unix:// and an absolute path, as in unix:///run/crio/crio.sock")]
    CriEndpoint,
    /// Not an index.
    #[error("an NRI index is two digits, as in 10")]
    NriIndex,
    /// Not an address.
    #[error("an address to listen on is IP:PORT, as in 127.0.0.1:9808 or [::]:9808, or nothing")]
    Listen,
    /// Not a namespace and a name.
    #[error("a DaemonSet is a namespace and a name, as in kube-system/reprise")]
    DaemonSetName,
}

impl TryFrom<String> for CriEndpoint {
    type Error = BadValue;

    fn try_from(text: String) -> Result<Self, BadValue> {
        text.parse()
    }
}

impl TryFrom<String> for NriIndex {
    type Error = BadValue;

    fn try_from(text: String) -> Result<Self, BadValue> {
        text.parse()
    }
}

/// How log lines are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One object a line.
    Json,
}

/// The least important lines that are logged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogLevel {
    /// Only what failed.
    Error,
    /// And what may need a person.
    Warn,
    /// And one line for each decision.
    #[default]
    Info,
    /// And what led to it.
    Debug,
    /// And every message of the runtime.
    Trace,
}

impl From<LogLevel> for tracing::Level {
    fn from(level: LogLevel) -> Self {
        match level {
            LogLevel::Error => Self::ERROR,
            LogLevel::Warn => Self::WARN,
            LogLevel::Info => Self::INFO,
            LogLevel::Debug => Self::DEBUG,
            LogLevel::Trace => Self::TRACE,
        }
    }
}
