// SPDX-License-Identifier: Apache-2.0
//! The requests of a watch, and the lines of its response. Every wait has a timeout.

use std::fmt;
use std::pin::Pin;
use std::time::Duration;

use futures::io::{AsyncBufRead, AsyncBufReadExt};
use http::Request;
use kube::Client;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use tokio::time::timeout;

use super::machine::Failure;
use crate::{Kind, Selectors, chain};

/// Objects a page, as client-go asks for. API servers ignore it for lists from their cache.
const PAGE: u32 = 500;

type Body = Pin<Box<dyn AsyncBufRead + Send>>;

/// Why a call failed, and the error's text.
pub(super) type Failed = (Failure, String);

/// One page of a list, as text.
pub(super) async fn list<K: Kind>(
    client: &Client,
    kind: &K,
    newest: bool,
    token: Option<&str>,
    silence: Duration,
) -> Result<String, Failed> {
    let mut query = selectors(&kind.selectors());
    query.push(("limit", PAGE.to_string()));
    match token {
        // A token carries the version of its list: the API server refuses both together.
        Some(token) => query.push(("continue", token.to_owned())),
        None if newest => {}
        None => query.push(("resourceVersion", "0".to_owned())),
    }
    let mut body = send(client, &kind.path(), &query, silence).await?;
    let mut text = Vec::new();
    loop {
        let chunk = timeout(silence, body.fill_buf()).await.map_err(|_| timed_out())?;
        let chunk = chunk.map_err(|error| (Failure::Cut, error.to_string()))?;
        if chunk.is_empty() {
            return String::from_utf8(text).map_err(|error| (Failure::Malformed, error.to_string()));
        }
        text.extend_from_slice(chunk);
        let taken = chunk.len();
        body.consume_unpin(taken);
    }
}

/// Opens a watch from `version`.
pub(super) async fn watch<K: Kind>(
    client: &Client,
    kind: &K,
    version: &str,
    length: Duration,
    silence: Duration,
) -> Result<Lines, Failed> {
    let mut query = selectors(&kind.selectors());
    query.push(("watch", "1".to_owned()));
    query.push(("allowWatchBookmarks", "true".to_owned()));
    query.push(("resourceVersion", version.to_owned()));
    // Spread: watches that started together, after a restart of the API server, must not all end together.
    let seconds = length.mul_f64(0.8 + fastrand::f64() * 0.2).as_secs().max(1);
    query.push(("timeoutSeconds", seconds.to_string()));
    Ok(Lines { body: send(client, &kind.path(), &query, silence).await? })
}

fn selectors(selectors: &Selectors) -> Vec<(&'static str, String)> {
    let Selectors { labels, fields } = selectors;
    let labels = labels.iter().map(|value| ("labelSelector", value.clone()));
    labels.chain(fields.iter().map(|value| ("fieldSelector", value.clone()))).collect()
}

fn timed_out() -> Failed {
    (Failure::Cut, "no response in time".to_owned())
}

async fn send(
    client: &Client,
    path: &str,
    query: &[(&'static str, String)],
    silence: Duration,
) -> Result<Body, Failed> {
    let query: Vec<_> = query.iter().map(|(name, value)| format!("{name}={}", escape(value))).collect();
    let request = Request::get(format!("{path}?{}", query.join("&")))
        .body(Vec::new())
        .map_err(|error| (Failure::Refused, error.to_string()))?;
    match timeout(silence, client.request_stream(request)).await {
        Ok(Ok(body)) => Ok(Box::pin(body)),
        Ok(Err(kube::Error::Api(status))) => Err(match status.code {
            410 => (Failure::Expired, status.message.clone()),
            404 => (Failure::Missing, status.message.clone()),
            code => (Failure::Refused, format!("{code}: {}", status.message)),
        }),
        Ok(Err(error)) => Err((Failure::Cut, chain(&error))),
        Err(_) => Err(timed_out()),
    }
}

/// Percent-encodes all but the unreserved characters (RFC 3986, section 2.3).
fn escape(value: &str) -> impl fmt::Display {
    utf8_percent_encode(value, RESERVED)
}

const RESERVED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// The lines of an open watch.
pub(super) struct Lines {
    body: Body,
}

/// The result of waiting for a line.
#[derive(Debug)]
pub(super) enum Read {
    /// A whole line.
    Line(Vec<u8>),
    /// The API server closed the watch, perhaps within a line. That line is dropped: the next watch repeats it.
    End,
    /// The connection broke.
    Cut(String),
    /// No data for too long.
    Silence,
}

impl Lines {
    /// The next line. Not cancel safe: dropping the future loses the part of a line that was read.
    pub(super) async fn next(&mut self, silence: Duration) -> Read {
        let mut line = Vec::new();
        match timeout(silence, self.body.read_until(b'\n', &mut line)).await {
            Ok(Ok(_)) if line.last() == Some(&b'\n') => Read::Line(line),
            Ok(Ok(_)) => Read::End,
            Ok(Err(error)) => Read::Cut(chain(&error)),
            Err(_) => Read::Silence,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_are_escaped() {
        assert_eq!(escape("a,!b/c=d e-é").to_string(), "a%2C%21b%2Fc%3Dd%20e-%C3%A9");
    }
}
