// SPDX-License-Identifier: Apache-2.0
//! Watches against a scripted API server, over the client's own HTTP path, in paused time.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use futures::{Stream, StreamExt, future, stream};
use http_body_util::StreamBody;
use http_body_util::combinators::UnsyncBoxBody;
use kube::client::Body;
use prometheus_client::encoding::text::encode;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::*;
use crate::{Object, Store};

mod events;
mod failures;
mod lists;
mod silence;
mod writes;

/// How an answer ends once its text is sent.
#[derive(Clone, Copy)]
enum End {
    Close,
    Break,
    /// The connection ends within a chunk: kube takes it for the normal end of a watch.
    Eof,
    Hang,
    /// Close and break after a while.
    CloseAfter(Duration),
    BreakAfter(Duration),
}

type Answer = (u16, Vec<String>, End);

/// Answers requests one by one; when it is through, with a stream on which nothing comes.
#[derive(Clone, Default)]
struct Script {
    /// Whether the API server streams lists.
    streams: bool,
    /// How every watch ends, without data. The answers are then for lists alone.
    cut: Option<End>,
    answers: Arc<Mutex<VecDeque<Answer>>>,
    asked: Arc<Mutex<Vec<(String, Instant)>>>,
}

impl Script {
    fn new(answers: impl IntoIterator<Item = Answer>) -> Self {
        let answers = Arc::new(Mutex::new(answers.into_iter().collect()));
        Self { streams: false, cut: None, answers, asked: Arc::default() }
    }

    fn streaming(answers: impl IntoIterator<Item = Answer>) -> Self {
        Self { streams: true, ..Self::new(answers) }
    }

    /// A proxy cuts all watches.
    fn cutting(lists: impl IntoIterator<Item = Answer>, end: End) -> Self {
        Self { cut: Some(end), ..Self::new(lists) }
    }

    fn client(&self) -> Client {
        let script = self.clone();
        let service = tower::service_fn(move |request: http::Request<Body>| {
            let script = script.clone();
            async move {
                let is_refused = !script.streams && request.uri().to_string().contains("sendInitialEvents");
                let answer = if is_refused {
                    Some(refused(422))
                } else {
                    script.asked.lock().expect("lock").push((request.uri().to_string(), Instant::now()));
                    let cut = script.cut.filter(|_| request.uri().to_string().contains("watch=true"));
                    cut.map(|end| watch(&[], end))
                        .or_else(|| script.answers.lock().expect("lock").pop_front())
                };
                let (status, chunks, end) = answer.unwrap_or((200, Vec::new(), End::Hang));
                let frames = chunks.into_iter().map(|text| Ok(http_body::Frame::data(Bytes::from(text))));
                let rest = match end {
                    End::Close => stream::empty().boxed(),
                    End::Break => stream::iter([Err(io::Error::other("reset"))]).boxed(),
                    End::Eof => stream::iter([Err(io::Error::new(
                        io::ErrorKind::UnexpectedEof,
                        "unexpected EOF during chunk size line",
                    ))])
                    .boxed(),
                    End::Hang => stream::pending().boxed(),
                    End::CloseAfter(delay) => after(delay, None).boxed(),
                    End::BreakAfter(delay) => after(delay, Some(io::Error::other("reset"))).boxed(),
                };
                let body = UnsyncBoxBody::new(StreamBody::new(stream::iter(frames).chain(rest)));
                let response = http::Response::builder().status(status).body(body);
                Ok::<_, io::Error>(response.expect("response"))
            }
        });
        Client::new(service, "default")
    }

    /// What was asked, without the path and what is random.
    fn asked(&self) -> Vec<String> {
        let asked = self.asked.lock().expect("lock");
        let query = |uri: &str| {
            let (_, query) = uri.split_once('?').expect("query");
            let rest = query.split('&').filter(|part| {
                let fixed =
                    ["timeoutSeconds=", "limit=", "resourceVersionMatch=", "allowWatchBookmarks=true"];
                !part.is_empty() && !fixed.iter().any(|prefix| part.starts_with(prefix))
            });
            rest.collect::<Vec<_>>().join(" ")
        };
        asked.iter().map(|(uri, _)| query(uri)).collect()
    }

    /// When lists were asked for, and when the request before each was.
    fn lists(&self) -> Vec<(Instant, Option<Instant>)> {
        let times = self.times();
        let is_list = |(_, query): &(usize, String)| !query.contains("watch=true");
        let asked = self.asked().into_iter().enumerate().filter(is_list);
        asked.map(|(at, _)| (times[at], at.checked_sub(1).map(|before| times[before]))).collect()
    }

    fn times(&self) -> Vec<Instant> {
        self.asked.lock().expect("lock").iter().map(|(_, at)| *at).collect()
    }
}

fn after(
    delay: Duration,
    error: Option<io::Error>,
) -> impl Stream<Item = io::Result<http_body::Frame<Bytes>>> {
    let end = async move {
        tokio::time::sleep(delay).await;
        error.map(Err)
    };
    stream::once(end).filter_map(future::ready)
}

fn node(name: &str, version: &str) -> Value {
    json!({ "metadata": { "name": name, "resourceVersion": version } })
}

fn bookmark(version: &str, annotations: &Value) -> Value {
    json!({ "kind": "Node", "apiVersion": "v1",
        "metadata": { "resourceVersion": version, "annotations": annotations } })
}

fn zoned(name: &str, version: &str, zone: &str) -> Value {
    let labels = json!({ "topology.kubernetes.io/zone": zone });
    json!({ "metadata": { "name": name, "resourceVersion": version, "labels": labels } })
}

fn list(version: &str, token: &str, items: &[Value]) -> Answer {
    let meta = json!({ "resourceVersion": version, "continue": token });
    (200, vec![json!({ "kind": "NodeList", "metadata": meta, "items": items }).to_string()], End::Close)
}

fn line(kind: &str, object: &Value) -> String {
    // In the order of the API server: the library cannot project an object before it knows the type.
    format!("{{\"type\":\"{kind}\",\"object\":{object}}}\n")
}

fn watch(lines: &[String], end: End) -> Answer {
    (200, lines.to_vec(), end)
}

fn refused(code: u16) -> Answer {
    let status =
        json!({ "kind": "Status", "status": "Failure", "code": code, "message": "no", "reason": "x" });
    (code, vec![status.to_string()], End::Close)
}

fn failed(code: u16) -> String {
    line("ERROR", &json!({ "kind": "Status", "code": code, "reason": "x", "message": "no" }))
}

fn word(event: &Event<Node>) -> String {
    let zone = |node: &Node| node.zone.as_ref().map(|zone| format!("@{zone}")).unwrap_or_default();
    match event {
        Event::Init => "init".to_owned(),
        Event::InitApply(node) => format!("listed {}{}", node.name, zone(node)),
        Event::InitKeep(name) => format!("keep {name}"),
        Event::InitDone => "done".to_owned(),
        Event::Apply(node) => format!("apply {}{}", node.name, zone(node)),
        Event::Delete { key, .. } => format!("delete {key}"),
    }
}

/// All that comes until nothing comes for `quiet`.
async fn said(events: &mut (impl Stream<Item = Event<Node>> + Unpin), quiet: Duration) -> Vec<String> {
    let mut words = Vec::new();
    while let Ok(Some(event)) = tokio::time::timeout(quiet, events.next()).await {
        words.push(word(&event));
    }
    words
}

/// Longer than any backoff, shorter than the idle time-out.
const QUIET: Duration = Duration::from_mins(1);

fn metrics(registry: &Registry) -> String {
    let mut text = String::new();
    encode(&mut text, registry).expect("text");
    text
}

async fn play(script: &Script) -> Vec<String> {
    let watches = Watches::new(script.client(), &mut Registry::default());
    said(&mut watches.nodes(), QUIET).await
}
