// SPDX-License-Identifier: Apache-2.0
//! One request for a statement, on a connection of its own, and what its end says of the node. Called by `statement_task`, which asks
//! again and again.

use std::future::Future;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr};
use std::pin::pin;
use std::time::Duration;

use steerage_model::{STATEMENT_PATH, Statement};
use tokio::net::TcpStream;
use tokio::sync::{Semaphore, SemaphorePermit};

use super::http::Response;
use super::node_statement::StatementResult;
use super::{http, no_response};

/// 65,535 ports at 18 bytes each, and what is beside them.
const MAX_BODY: usize = 2 << 20;
const MAX_REVISION: usize = 128;

/// Complete statements that are read or wait for the engine at a time, of all nodes.
pub(super) const COMPLETE_AT_ONCE: usize = 32;

/// The turn of one node's task to read a complete statement. It ends when this is dropped.
#[derive(Debug)]
pub(super) struct Turn<'t> {
    turns: &'t Semaphore,
    permit: Option<SemaphorePermit<'t>>,
}

impl<'t> Turn<'t> {
    pub(super) fn new(turns: &'t Semaphore) -> Self {
        Self { turns, permit: None }
    }

    async fn take(&mut self) {
        // It is never closed.
        self.permit = self.turns.acquire().await.ok();
    }
}

/// The result of the request, unless it is silence of one port alone: then the node has answered, only not with a statement. `None`
/// if this host could not ask, which says nothing of the node.
pub(super) async fn unless_another_port_answers(
    request: impl Future<Output = Option<StatementResult>>,
    other: SocketAddr,
    source: Option<IpAddr>,
    wait: Duration,
    timeout: Duration,
) -> Option<StatementResult> {
    // Tried while the answer is overdue, so that a node that is gone is known as soon as without it.
    let trial = async {
        tokio::time::sleep(wait + timeout / 2).await;
        tokio::time::timeout(timeout / 2, answers(other, source)).await.unwrap_or(false)
    };
    let (mut request, mut trial) = (pin!(request), pin!(trial));
    let mut is_answered = None;
    let result = loop {
        tokio::select! {
            biased;
            result = &mut request => break result,
            answer = &mut trial, if is_answered.is_none() => is_answered = Some(answer),
        }
    };
    let Some(StatementResult::Unanswered(reason)) = result else { return result };
    let is_answered = match is_answered {
        Some(is_answered) => is_answered,
        None => trial.await,
    };
    Some(if is_answered {
        StatementResult::NotStated(format!("{reason}, but port {} of the node answers", other.port()))
    } else {
        StatementResult::Unanswered(reason)
    })
}

/// Whether a packet comes back from the port.
async fn answers(other: SocketAddr, source: Option<IpAddr>) -> bool {
    match http::connect(other, source).await {
        Ok(_) => true,
        Err(error) => matches!(error.kind(), ErrorKind::ConnectionRefused | ErrorKind::ConnectionReset),
    }
}

/// `None` if this host could not ask. A request that is cut without a word is repeated once: the agent makes room for other clients
/// so, and a node's statements must not depend on them. A complete statement is read while `turn` is held: it may be long, and after a
/// start all nodes answer with one.
pub(super) async fn ask(
    to: SocketAddr,
    source: Option<IpAddr>,
    after: Option<&str>,
    wait: Duration,
    timeout: Duration,
    turn: &mut Turn<'_>,
) -> Option<StatementResult> {
    let limit = wait + timeout;
    let requests = async {
        match request(to, source, after, wait).await {
            Err(error) if is_cut(error.kind()) => request(to, source, after, Duration::ZERO).await,
            result => result,
        }
    };
    let read = match tokio::time::timeout(limit, requests).await {
        Err(_) => Ok(Err(no_response(limit))),
        Ok(Err(error)) => Err(error),
        Ok(Ok((response, mut stream))) if response.status() == Some("200") => {
            if after.is_none() {
                turn.take().await;
            }
            // The node has answered: the time to read the rest begins when it is read.
            match tokio::time::timeout(limit, response.body(&mut stream, MAX_BODY)).await {
                Err(_) => Ok(Err(no_response(limit))),
                Ok(body) => body.map(|body| Ok(parse(&body, after.is_some()))),
            }
        }
        Ok(Ok((response, _))) => Ok(Ok(StatementResult::NotStated(response.why_not()))),
    };
    match read {
        Ok(Err(reason)) => Some(StatementResult::Unanswered(reason)),
        Ok(Ok(result)) => Some(result),
        Err(error) if is_local(&error) => {
            tracing::debug!(node_address = %to.ip(), %error, "this host cannot ask the node for a statement; retrying");
            None
        }
        Err(error) if is_silence(error.kind()) => Some(StatementResult::Unanswered(error.to_string())),
        Err(error) => Some(StatementResult::NotStated(error.to_string())),
    }
}

/// Whether the connection was open, and ended before a whole answer.
fn is_cut(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::ConnectionReset | ErrorKind::ConnectionAborted | ErrorKind::UnexpectedEof)
}

/// Whether an error is this host's own: a source address that is gone, or no free port, descriptor or memory.
fn is_local(error: &io::Error) -> bool {
    use libc::{EADDRINUSE, EADDRNOTAVAIL, EMFILE, ENFILE, ENOBUFS, ENOMEM};
    let errors = [EADDRINUSE, EADDRNOTAVAIL, EMFILE, ENFILE, ENOBUFS, ENOMEM];
    error.raw_os_error().is_some_and(|number| errors.contains(&number))
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

/// The head of the answer, and where its body comes from.
async fn request(
    to: SocketAddr,
    source: Option<IpAddr>,
    after: Option<&str>,
    wait: Duration,
) -> io::Result<(Response, TcpStream)> {
    let mut stream = http::connect(to, source).await?;
    let wait = wait.as_millis();
    let path = match after {
        Some(after) => format!("{STATEMENT_PATH}?after={after}&wait={wait}"),
        None => format!("{STATEMENT_PATH}?wait={wait}"),
    };
    let response = http::get(&mut stream, to, &path).await?;
    if response.is_empty() {
        return Err(io::Error::new(ErrorKind::UnexpectedEof, response.why_not()));
    }
    Ok((response, stream))
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
    use steerage_model::TunnelReceiver;

    use super::super::test_node::{closed, dropping, server};
    use super::*;

    const BODY: &str = r#"{"revision":"1","complete":true,"healthy":true,"ports":{}}"#;
    const LONG: Duration = Duration::from_secs(30);

    async fn ask_now(address: SocketAddr) -> StatementResult {
        let turns = Semaphore::new(1);
        ask(address, None, None, Duration::ZERO, LONG, &mut Turn::new(&turns))
            .await
            .expect("this host can ask")
    }

    #[test]
    fn ends_of_the_tunnel_of_all_versions_are_understood() {
        let receives = TunnelReceiver::Receives { vni: 7, port: 10_361 };
        for (said, receiver) in [
            ("", None),
            (r#","edgeTunnel":null"#, None),
            (r#","edgeTunnel":{"state":"receives","vni":7,"port":10361}"#, Some(receives)),
            (r#","edgeTunnel":{"state":"receives","vni":7,"port":10361,"more":[1]}"#, Some(receives)),
            (r#","edgeTunnel":{"state":"off"}"#, Some(TunnelReceiver::Off)),
            (r#","edgeTunnel":{"state":"edgeHost"}"#, Some(TunnelReceiver::EdgeHost)),
            (r#","edgeTunnel":{"state":"failed"}"#, Some(TunnelReceiver::Failed)),
            (r#","edgeTunnel":{"state":"later","why":"x"}"#, Some(TunnelReceiver::Unknown)),
            (
                r#","edgeTunnel":{"state":"receives","vnis":[7,8],"port":10361}"#,
                Some(TunnelReceiver::Unknown),
            ),
            (r#","edgeTunnel":{"state":"receives","vni":7,"port":"any"}"#, Some(TunnelReceiver::Unknown)),
            (r#","edgeTunnel":[{"state":"off"}]"#, Some(TunnelReceiver::Unknown)),
            (r#","edgeTunnel":"off""#, Some(TunnelReceiver::Unknown)),
            (r#","edgeTunnel":{}"#, Some(TunnelReceiver::Unknown)),
        ] {
            let body = BODY.replace("{}}", &format!("{{}}{said}}}"));
            let StatementResult::Stated(statement) = parse(body.as_bytes(), false) else { panic!("{body}") };
            assert_eq!(statement.edge_tunnel, receiver, "{body}");
            let written = serde_json::to_vec(&statement).expect("JSON");
            assert_eq!(parse(&written, false), StatementResult::Stated(statement), "{body}");
        }
    }

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
            let result = ask_now(address).await;
            let got_statement = matches!(result, StatementResult::Stated(_));
            assert_eq!(got_statement, is_stated, "{head}: {result:?}");
            assert!(!matches!(result, StatementResult::Unanswered(_)), "{result:?}");
        }
    }

    /// This host is busy with the statements of others, and the node has answered.
    #[tokio::test]
    async fn wait_for_a_turn_is_no_silence() {
        let whole: &'static str = Box::leak(format!("HTTP/1.1 200 OK\r\n\r\n{BODY}").into_boxed_str());
        let (address, turns, timeout) =
            (server(vec![whole]).await, Semaphore::new(1), Duration::from_millis(500));
        let (mut other, mut turn) = (Turn::new(&turns), Turn::new(&turns));
        other.take().await;
        let release = async {
            tokio::time::sleep(3 * timeout).await;
            drop(other);
        };
        let request = ask(address, None, None, Duration::ZERO, timeout, &mut turn);
        let (result, ()) = tokio::join!(request, release);
        assert!(matches!(result, Some(StatementResult::Stated(_))), "{result:?}");
        assert_eq!(turns.available_permits(), 0, "until the engine has taken the statement");
        drop(turn);
        assert_eq!(turns.available_permits(), 1);
    }

    #[tokio::test]
    async fn cut_request_is_repeated_once() {
        let whole: &'static str = Box::leak(format!("HTTP/1.1 200 OK\r\n\r\n{BODY}").into_boxed_str());
        assert!(matches!(ask_now(server(vec!["", whole]).await).await, StatementResult::Stated(_)));
        assert!(matches!(ask_now(server(vec!["", "", whole]).await).await, StatementResult::NotStated(_)));
    }

    #[tokio::test]
    async fn silence_of_one_port_is_no_silence_of_the_node() {
        let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("bind");
        let (open, (_socket, refused)) = (server(vec![""]).await, closed());
        let ask_both = async |other| {
            let (wait, timeout) = (Duration::ZERO, Duration::from_millis(400));
            let turns = Semaphore::new(1);
            let mut turn = Turn::new(&turns);
            let request = ask(silent.local_addr().expect("address"), None, None, wait, timeout, &mut turn);
            unless_another_port_answers(request, other, None, wait, timeout).await
        };
        for other in [open, refused] {
            let result = ask_both(other).await;
            let Some(StatementResult::NotStated(reason)) = result else { panic!("{result:?}") };
            assert!(reason.contains(&format!("port {} of the node answers", other.port())), "{reason}");
        }
        let (_listener, _queue, dropping) = dropping().await;
        let result = ask_both(dropping).await;
        assert!(matches!(result, Some(StatementResult::Unanswered(_))), "{result:?}");
    }

    #[tokio::test]
    async fn source_address_that_is_gone_says_nothing_of_the_node() {
        let address = server(vec!["HTTP/1.1 200 OK\r\n\r\n"]).await;
        let gone = Some([192, 0, 2, 1].into());
        let turns = Semaphore::new(1);
        assert_eq!(ask(address, gone, None, Duration::ZERO, LONG, &mut Turn::new(&turns)).await, None);
    }
}
