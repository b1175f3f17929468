//! What the plugin tells of itself by HTTP.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::plugin::Plugin;

/// What the plugin logs of it when it was started on any port.
const ADDRESS: &str = "can be asked for address=";

/// An answer: its status and its text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) text: String,
}

/// What was counted and measured: values, by series.
#[derive(Debug)]
pub(crate) struct Metrics(BTreeMap<String, String>);

impl Plugin {
    /// What the plugin that was started last answers.
    pub(crate) async fn get(&self, path: &str) -> Result<Answer> {
        let line = self.log_lines(ADDRESS)?.pop();
        let line = line.context("the plugin does not say where it can be asked")?;
        let address = line.rsplit(ADDRESS).next().unwrap_or_default();
        let mut stream = TcpStream::connect(address.trim()).await?;
        let question = format!("GET {path} HTTP/1.1\r\nHost: reprise\r\n\r\n");
        stream.write_all(question.as_bytes()).await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        let (head, text) = answer.split_once("\r\n\r\n").context("no end of headers")?;
        let status = head.split(' ').nth(1).context("no status")?.parse()?;
        let text = text.to_owned();
        Ok(Answer { status, text })
    }

    pub(crate) async fn metrics(&self) -> Result<Metrics> {
        let Answer { status, text } = self.get("/metrics").await?;
        ensure!(
            status == 200 && text.ends_with("# EOF\n"),
            "{status}: {text}"
        );
        let samples = text.lines().filter(|line| !line.starts_with('#'));
        let samples = samples.map(|line| {
            let (series, value) = line.rsplit_once(' ').context("no value")?;
            Ok((series.to_owned(), value.to_owned()))
        });
        Ok(Metrics(samples.collect::<Result<_>>()?))
    }
}

impl Metrics {
    /// All series of that name with these labels, as they are written, together.
    pub(crate) fn count(&self, name: &str, labels: &[&str]) -> Result<u64> {
        let of = |series: &str| {
            let rest = series.strip_prefix(name);
            let rest = rest.filter(|rest| rest.is_empty() || rest.starts_with('{'));
            rest.is_some_and(|rest| labels.iter().all(|label| rest.contains(label)))
        };
        let values = self.0.iter().filter(|(series, _)| of(series));
        let counts = values.map(|(series, value)| {
            let count: u64 = value.parse().with_context(|| format!("{series} {value}"))?;
            Ok(count)
        });
        counts.sum()
    }
}
