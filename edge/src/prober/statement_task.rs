// SPDX-License-Identifier: Apache-2.0
//! The task that asks one node for its statements, again and again, each time on a new connection. The node holds a request until
//! something changes. It reports every result to `Prober`, and decides nothing about health.

use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use steerage_model::{MAX_STATEMENT_WAIT, STATEMENT_PATH, Statement};
use steerage_process::duration;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

use super::http;
use super::node_statement::StatementResult;
use super::spread;
use super::statement_schedule::StatementSchedule;

/// 65,535 ports at 18 bytes each, and what is beside them.
const MAX_BODY: usize = 2 << 20;
const MAX_REVISION: usize = 128;
const MIN_INTERVAL: Duration = Duration::from_millis(100);
/// Bounds of the time beyond `wait`. A tenant chooses the timeouts of its checks, and the requests serve all.
const MIN_TIMEOUT: Duration = Duration::from_millis(500);
const MAX_TIMEOUT: Duration = Duration::from_secs(10);
/// Probes wait for the first answer: a node whose packets to this port are dropped must not delay them for long.
const FIRST_TIMEOUT: Duration = Duration::from_secs(1);
/// The first requests to all nodes begin within this time.
const FIRST_SPREAD: Duration = Duration::from_millis(250);

/// How a node is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RequestSettings {
    pub(super) source: Option<IpAddr>,
    /// How long the node may hold a request.
    interval: Duration,
    /// The time for an answer beyond that.
    timeout: Duration,
}

impl RequestSettings {
    /// `interval` and `timeout` are the smallest of the node's checks.
    pub(super) fn new(source: Option<IpAddr>, interval: Duration, timeout: Duration) -> Self {
        let interval = interval.clamp(MIN_INTERVAL, Duration::from_millis(MAX_STATEMENT_WAIT));
        Self { source, interval, timeout: timeout.clamp(MIN_TIMEOUT, MAX_TIMEOUT) }
    }
}

/// A request of the task with this number has ended.
#[derive(Debug)]
pub(crate) struct StatementReport {
    pub(super) address: IpAddr,
    pub(super) task: u64,
    pub(super) result: StatementResult,
    /// When the request began.
    pub(super) begun: Instant,
}

#[derive(Debug)]
pub(super) struct StatementTask {
    pub(super) number: u64,
    handle: JoinHandle<()>,
    settings: watch::Sender<RequestSettings>,
}

impl Drop for StatementTask {
    fn drop(&mut self) {
        self.handle.abort();
    }
}

impl StatementTask {
    pub(super) fn spawn(
        number: u64,
        to: SocketAddr,
        settings: RequestSettings,
        reports: mpsc::Sender<StatementReport>,
    ) -> Self {
        let (sender, receiver) = watch::channel(settings);
        let handle = tokio::spawn(run(number, to, receiver, reports));
        Self { number, handle, settings: sender }
    }

    /// From the next request on.
    pub(super) fn set(&self, settings: RequestSettings) {
        self.settings.send_if_modified(|current| std::mem::replace(current, settings) != settings);
    }
}

async fn run(
    number: u64,
    to: SocketAddr,
    settings: watch::Receiver<RequestSettings>,
    reports: mpsc::Sender<StatementReport>,
) {
    let mut schedule = StatementSchedule::default();
    let mut timeout_limit = FIRST_TIMEOUT;
    tokio::time::sleep(FIRST_SPREAD.mul_f64(spread(to))).await;
    loop {
        let RequestSettings { source, interval, timeout } = *settings.borrow();
        let wait = schedule.wait(interval);
        let limit = wait + timeout.min(timeout_limit);
        timeout_limit = MAX_TIMEOUT;
        let begun = Instant::now();
        let request = ask(to, source, schedule.after(), wait);
        let result = tokio::time::timeout(limit, request).await.unwrap_or_else(|_| {
            StatementResult::Unanswered(format!("no response within {}", duration::display(limit)))
        });
        let due = schedule.record(&result, interval, begun, Instant::now());
        let report = StatementReport { address: to.ip(), task: number, result, begun };
        // The next request waits until the engine takes this result.
        if reports.send(report).await.is_err() {
            return;
        }
        tokio::time::sleep_until(due.into()).await;
    }
}

async fn ask(to: SocketAddr, source: Option<IpAddr>, after: Option<&str>, wait: Duration) -> StatementResult {
    match request(to, source, after, wait).await {
        Ok(result) => result,
        Err(error) if is_silence(error.kind()) => StatementResult::Unanswered(error.to_string()),
        Err(error) => StatementResult::NotStated(error.to_string()),
    }
}

/// Whether an error says nothing but that no packet came back.
fn is_silence(kind: ErrorKind) -> bool {
    matches!(
        kind,
        ErrorKind::TimedOut
            | ErrorKind::HostUnreachable
            | ErrorKind::NetworkUnreachable
            | ErrorKind::NetworkDown
    )
}

async fn request(
    to: SocketAddr,
    source: Option<IpAddr>,
    after: Option<&str>,
    wait: Duration,
) -> io::Result<StatementResult> {
    let mut stream = http::connect(to, source).await?;
    let wait = wait.as_millis();
    let path = match after {
        Some(after) => format!("{STATEMENT_PATH}?after={after}&wait={wait}"),
        None => format!("{STATEMENT_PATH}?wait={wait}"),
    };
    let response = http::get(&mut stream, to, &path).await?;
    if response.status() != Some("200") {
        return Ok(StatementResult::NotStated(response.why_not()));
    }
    Ok(parse(&response.body(&mut stream, MAX_BODY).await?, after.is_some()))
}

/// Reads the answer to a request that asked for changes, or for all.
fn parse(body: &[u8], asked_for_changes: bool) -> StatementResult {
    let reason = match serde_json::from_slice::<Statement>(body) {
        Err(error) => format!("not a statement: {error}"),
        Ok(statement) if !statement.complete && !asked_for_changes => {
            "not a statement: changes without what they change".to_owned()
        }
        // It becomes part of the next request.
        Ok(statement) if !is_revision(&statement.revision) => {
            "not a statement: its revision is unusable".to_owned()
        }
        Ok(statement) => return StatementResult::Stated(statement),
    };
    StatementResult::NotStated(reason)
}

fn is_revision(text: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~:".contains(&byte);
    !text.is_empty() && text.len() <= MAX_REVISION && text.bytes().all(is_plain)
}

#[cfg(test)]
mod tests {
    use super::super::test_node::server;
    use super::*;

    #[test]
    fn answers_are_classified() {
        let whole = r#"{"revision":"a1:7","complete":true,"healthy":true,"ports":{"30001":2,"30002":null}}"#;
        let StatementResult::Stated(statement) = parse(whole.as_bytes(), false) else {
            panic!("a statement")
        };
        assert_eq!(statement.ports, [(30_001, Some(2)), (30_002, None)].into());
        let changes = whole.replace("\"complete\":true", "\"complete\":false");
        assert!(matches!(parse(changes.as_bytes(), true), StatementResult::Stated(_)));
        for body in [
            changes,
            String::new(),
            "{}".to_owned(),
            whole.replace("30002", "70000"),
            whole.replace("a1:7", ""),
            whole.replace("a1:7", "a 1"),
            whole.replace("a1:7", "1&wait=0"),
            whole.replace("a1:7", &"7".repeat(MAX_REVISION + 1)),
        ] {
            assert!(matches!(parse(body.as_bytes(), false), StatementResult::NotStated(_)), "{body}");
        }
    }

    #[tokio::test]
    async fn body_is_bounded_and_whole() {
        const BODY: &str = r#"{"revision":"1","complete":true,"healthy":true,"ports":{}}"#;
        let length = BODY.len();
        for (head, body, is_stated) in [
            (format!("200 OK\r\ncontent-length: {length}"), BODY, true),
            (format!("200 OK\r\nContent-Length:{length}"), &*format!("{BODY}more"), true),
            ("200 OK".to_owned(), BODY, true),
            (format!("200 OK\r\ncontent-length: {}", length + 1), BODY, false),
            (format!("200 OK\r\ncontent-length: {}", MAX_BODY + 1), BODY, false),
            ("200 OK\r\ncontent-length: many".to_owned(), BODY, false),
            ("200 OK".to_owned(), &" ".repeat(MAX_BODY + 1), false),
            ("200 OK\r\ntransfer-encoding: chunked".to_owned(), BODY, false),
            ("503 Service Unavailable".to_owned(), BODY, false),
        ] {
            let answer: &'static str = Box::leak(format!("HTTP/1.1 {head}\r\n\r\n{body}").into_boxed_str());
            let address = server(vec![answer]).await;
            let result = ask(address, None, None, Duration::ZERO).await;
            let got_statement = matches!(result, StatementResult::Stated(_));
            assert_eq!(got_statement, is_stated, "{head}: {result:?}");
            assert!(!matches!(result, StatementResult::Unanswered(_)), "{result:?}");
        }
    }

    #[test]
    fn settings_are_bounded_whatever_the_checks_say() {
        let milliseconds = Duration::from_millis;
        for (interval, timeout, expected) in
            [(0, 0, (100, 500)), (1000, 800, (1000, 800)), (3_600_000, 3_600_000, (10_000, 10_000))]
        {
            let settings = RequestSettings::new(None, milliseconds(interval), milliseconds(timeout));
            let (interval, timeout) = expected;
            assert_eq!(
                (settings.interval, settings.timeout),
                (milliseconds(interval), milliseconds(timeout))
            );
        }
    }
}
