// SPDX-License-Identifier: Apache-2.0
//! Watches against a scripted API server, over the client's own HTTP path, in paused time.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use futures::{Stream, StreamExt, stream};
use http_body_util::StreamBody;
use http_body_util::combinators::UnsyncBoxBody;
use kube::client::Body;
use prometheus_client::encoding::text::encode;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::*;
use crate::{Object, Store};

/// How an answer ends once its text is sent.
#[derive(Clone, Copy)]
enum End {
    Close,
    Break,
    /// The connection ends within a chunk: kube takes it for the normal end of a watch.
    Eof,
    Hang,
}

type Answer = (u16, Vec<String>, End);

/// Answers requests one by one; when it is through, with a stream on which nothing comes.
#[derive(Clone, Default)]
struct Script {
    /// Whether the API server streams lists.
    streams: bool,
    answers: Arc<Mutex<VecDeque<Answer>>>,
    asked: Arc<Mutex<Vec<(String, Instant)>>>,
}

impl Script {
    fn new(answers: impl IntoIterator<Item = Answer>) -> Self {
        let answers = Arc::new(Mutex::new(answers.into_iter().collect()));
        Self { streams: false, answers, asked: Arc::default() }
    }

    fn streaming(answers: impl IntoIterator<Item = Answer>) -> Self {
        Self { streams: true, ..Self::new(answers) }
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
                    script.answers.lock().expect("lock").pop_front()
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

    fn times(&self) -> Vec<Instant> {
        self.asked.lock().expect("lock").iter().map(|(_, at)| *at).collect()
    }
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

#[tokio::test(start_paused = true)]
async fn list_pages_precede_events() {
    let script = Script::new([
        list("5", "more", &[node("a", "1"), node("b", "2")]),
        list("5", "", &[node("c", "3")]),
        watch(
            &[
                line("ADDED", &node("d", "6")),
                line("MODIFIED", &zoned("a", "7", "z")),
                line("DELETED", &node("b", "8")),
            ],
            End::Hang,
        ),
    ]);
    let want = ["init", "listed a", "listed b", "listed c", "done", "apply d", "apply a@z", "delete b"];
    assert_eq!(play(&script).await, want);
    assert_eq!(script.asked(), ["resourceVersion=0", "continue=more", "watch=true resourceVersion=5"]);
}

#[tokio::test(start_paused = true)]
async fn list_is_streamed_where_the_api_server_can() {
    let end = bookmark("5", &json!({ "k8s.io/initial-events-end": "true" }));
    let script = Script::streaming([
        watch(
            &[line("ADDED", &node("a", "1")), line("BOOKMARK", &end), line("ADDED", &node("b", "6"))],
            End::Close,
        ),
        watch(&[], End::Hang),
    ]);
    assert_eq!(play(&script).await, ["init", "listed a", "done", "apply b"]);
    let asked = script.asked();
    assert!(
        asked[0].contains("sendInitialEvents=true") && asked[0].ends_with("resourceVersion=0"),
        "{asked:?}"
    );
    assert_eq!(asked[1..], ["watch=true resourceVersion=6"]);
}

/// A relist from a cache might go back in time.
#[tokio::test(start_paused = true)]
async fn list_after_a_stream_is_consistent() {
    let end = bookmark("5", &json!({ "k8s.io/initial-events-end": "true" }));
    let gone = json!({ "kind": "Status", "code": 410, "reason": "Expired", "message": "too old" });
    let script = Script::streaming([
        watch(&[line("ADDED", &node("a", "1")), line("BOOKMARK", &end), line("ERROR", &gone)], End::Close),
        list("9", "", &[node("b", "2")]),
    ]);
    assert_eq!(play(&script).await, ["init", "listed a", "done", "init", "listed b", "done"]);
    assert_eq!(script.asked()[1..], ["", "watch=true resourceVersion=9"]);
}

#[tokio::test(start_paused = true)]
async fn interrupted_list_starts_again_and_is_done_once() {
    let script = Script::new([
        (200, vec!["{\"metadata\":{\"resourceVersion\"".into()], End::Break),
        list("5", "more", &[node("a", "1")]),
        refused(500),
        list("5", "", &[node("a", "1"), node("b", "2")]),
    ]);
    assert_eq!(play(&script).await, ["init", "init", "listed a", "init", "listed a", "listed b", "done"]);
    let first = "resourceVersion=0";
    assert_eq!(script.asked(), [first, first, "continue=more", first, "watch=true resourceVersion=5"]);
}

/// After a restore of etcd the API server may never reach the version that the watch asks for.
#[tokio::test(start_paused = true)]
async fn refused_watches_lead_to_a_consistent_list() {
    let first = list("5", "", &[node("a", "1")]);
    let script =
        Script::new([first].into_iter().chain((0..5).map(|_| refused(500))).chain([list("2", "", &[])]));
    assert_eq!(play(&script).await, ["init", "listed a", "done", "init", "done"]);
    let asked = script.asked();
    assert_eq!(asked[1..6], ["watch=true resourceVersion=5"; 5]);
    assert_eq!(asked[6..], ["", "watch=true resourceVersion=2"]);
}

/// Neither a proxy that ends every watch nor one that ends the connection may be asked in a loop.
#[tokio::test(start_paused = true)]
async fn watches_without_data_are_reopened_with_growing_delays() {
    for (end, reason) in [(End::Close, "empty"), (End::Break, "cut"), (End::Eof, "cut")] {
        let script = Script::new([list("5", "", &[])].into_iter().chain((0..100).map(|_| watch(&[], end))));
        let mut registry = Registry::default();
        let watches = Watches::new(script.client(), &mut registry);
        let mut nodes = watches.nodes();
        let _ =
            tokio::time::timeout(Duration::from_mins(10), async { while nodes.next().await.is_some() {} })
                .await;
        let asked = script.asked();
        assert!(asked[1..].iter().all(|query| query == "watch=true resourceVersion=5"), "{asked:?}");
        // A delay of 5 s to 10 s, after a few shorter ones.
        assert!((60..130).contains(&asked.len()), "{}", asked.len());
        assert!(metrics(&registry).contains(&format!("kind=\"nodes\",reason=\"{reason}\"}}")));
    }
}

fn failed(code: u16) -> String {
    line("ERROR", &json!({ "kind": "Status", "code": code, "reason": "x", "message": "no" }))
}

#[tokio::test(start_paused = true)]
async fn watches_that_end_in_an_error_lead_to_a_consistent_list() {
    let first = list("5", "", &[node("a", "1")]);
    let errors = (0..5).map(|_| watch(&[failed(500)], End::Close));
    let script = Script::new([first].into_iter().chain(errors).chain([list("2", "", &[])]));
    assert_eq!(play(&script).await, ["init", "listed a", "done", "init", "done"]);
    assert_eq!(script.asked()[6], "");
}

/// Otherwise an overload would make all agents list from etcd.
#[tokio::test(start_paused = true)]
async fn only_lasting_refusals_in_a_row_lead_to_a_list() {
    let mark = watch(&[line("BOOKMARK", &bookmark("6", &json!({})))], End::Close);
    let busy = |code| (0..6).map(move |_| refused(code));
    let first = list("5", "", &[]);
    let refusals = || (0..4).map(|_| refused(500));
    let script = Script::new(
        [first]
            .into_iter()
            .chain(busy(503))
            .chain(busy(403))
            .chain(refusals())
            .chain([mark])
            .chain(refusals()),
    );
    let watches = Watches::new(script.client(), &mut Registry::default());
    said(&mut watches.nodes(), Duration::from_mins(3)).await;
    let asked = script.asked();
    assert!(asked.len() > 22 && asked[1..].iter().all(|query| query.starts_with("watch=true")), "{asked:?}");
}

#[tokio::test(start_paused = true)]
async fn error_responses_are_no_data() {
    let script = Script::new([list("5", "", &[])].into_iter().chain((0..40).map(|_| refused(403))));
    let watches = Watches::new(script.client(), &mut Registry::default());
    said(&mut watches.nodes(), Duration::from_mins(2)).await;
    let (_, silent) = watches.staleness().longest().expect("a watch");
    assert!(silent >= Duration::from_secs(115), "{silent:?}");
}

#[tokio::test(start_paused = true)]
async fn empty_error_response_keeps_its_status() {
    let script = Script::new([list("5", "", &[]), (410, Vec::new(), End::Close), list("9", "", &[])]);
    assert_eq!(play(&script).await, ["init", "done", "init", "done"]);
}

#[tokio::test(start_paused = true)]
async fn streamed_list_that_never_completes_becomes_one_response() {
    let half = || watch(&[line("ADDED", &node("a", "1"))], End::Close);
    let script = Script::streaming([half(), half(), half(), list("5", "", &[node("b", "2")])]);
    let words = play(&script).await;
    assert_eq!(words[words.len() - 3..], ["init", "listed b", "done"], "{words:?}");
    let asked = script.asked();
    assert!(asked[..3].iter().all(|query| query.contains("sendInitialEvents=true")), "{asked:?}");
    assert_eq!(asked[3..], ["resourceVersion=0", "watch=true resourceVersion=5"]);
    let times = script.times();
    assert!(times.windows(2).take(3).all(|pair| pair[1] > pair[0]), "without a delay");
}

/// Its capacity comes back: the list in one response costs it more.
#[tokio::test(start_paused = true)]
async fn busy_api_server_is_asked_for_the_same_streamed_list() {
    let end = bookmark("5", &json!({ "k8s.io/initial-events-end": "true" }));
    let whole = watch(&[line("ADDED", &node("a", "1")), line("BOOKMARK", &end)], End::Hang);
    let script = Script::streaming((0..8).map(|_| refused(503)).chain([whole]));
    let words = play(&script).await;
    println!("{words:?} {:?} {:?}", script.asked(), script.times());
    assert_eq!(words[words.len() - 3..], ["init", "listed a", "done"], "{words:?}");
    let asked = script.asked();
    assert!(
        asked.len() == 9 && asked.iter().all(|query| query.contains("sendInitialEvents=true")),
        "{asked:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn silent_streamed_list_is_given_up_and_a_quiet_watch_after_it_is_not() {
    let begun = Instant::now();
    let end = bookmark("5", &json!({ "k8s.io/initial-events-end": "true" }));
    let script = Script::streaming([
        watch(&[line("ADDED", &node("a", "1"))], End::Hang),
        watch(&[line("BOOKMARK", &end)], End::Hang),
    ]);
    let watches = Watches::new(script.client(), &mut Registry::default());
    said(&mut watches.nodes(), Duration::from_secs(100)).await;
    let times = script.times();
    assert_eq!(times.len(), 2, "{:?}", script.asked());
    let waited = times[1] - begun;
    assert!(waited >= Timing::default().call && waited < Timing::default().call * 2, "{waited:?}");
}

/// It is no sign that the API server does not stream: the objects are listed already.
#[tokio::test(start_paused = true)]
async fn invalid_watch_after_a_streamed_list_is_asked_again() {
    let end = bookmark("5", &json!({ "k8s.io/initial-events-end": "true" }));
    let script = Script::streaming([watch(&[line("BOOKMARK", &end)], End::Close), refused(422)]);
    assert_eq!(play(&script).await, ["init", "done"]);
    assert_eq!(script.asked()[1..], ["watch=true resourceVersion=5"; 2]);
}

#[tokio::test(start_paused = true)]
async fn silent_list_is_given_up() {
    let begun = Instant::now();
    let half = (200, vec!["{\"metadata\":".to_owned()], End::Hang);
    let script = Script::new([half, list("5", "", &[node("a", "1")])]);
    assert_eq!(play(&script).await, ["init", "init", "listed a", "done"]);
    let Timing { call, min_backoff, .. } = Timing::default();
    let waited = script.times()[1] - begun;
    assert!(waited >= call && waited <= call + min_backoff + Duration::from_millis(5), "{waited:?}");
}

#[tokio::test(start_paused = true)]
async fn a_list_whose_token_expired_begins_again() {
    let script =
        Script::new([list("5", "more", &[node("a", "1")]), refused(410), list("9", "", &[node("b", "2")])]);
    assert_eq!(play(&script).await, ["init", "listed a", "init", "listed b", "done"]);
    assert_eq!(script.asked(), ["resourceVersion=0", "continue=more", "", "watch=true resourceVersion=9"]);
}

#[tokio::test(start_paused = true)]
async fn a_version_that_is_gone_leads_to_a_new_list() {
    let gone = json!({ "kind": "Status", "code": 410, "reason": "Expired", "message": "too old" });
    for how in [refused(410), watch(&[line("ERROR", &gone)], End::Close)] {
        let script = Script::new([
            list("5", "", &[node("a", "1"), node("b", "2")]),
            how,
            list("9", "", &[node("b", "2")]),
            watch(&[line("ADDED", &node("c", "10"))], End::Hang),
        ]);
        let want = ["init", "listed a", "listed b", "done", "init", "listed b", "done", "apply c"];
        assert_eq!(play(&script).await, want);
        assert_eq!(script.asked()[2..], ["", "watch=true resourceVersion=9"]);
    }
}

#[tokio::test(start_paused = true)]
async fn watch_cut_within_a_line_resumes_after_the_last_whole_line() {
    let whole = line("ADDED", &node("b", "6"));
    let half = line("ADDED", &node("c", "7"))[..20].to_owned();
    for end in [End::Close, End::Break, End::Eof] {
        let script = Script::new([
            list("5", "", &[node("a", "1")]),
            watch(&[whole.clone(), half.clone()], end),
            watch(&[line("ADDED", &node("c", "7"))], End::Hang),
        ]);
        assert_eq!(play(&script).await, ["init", "listed a", "done", "apply b", "apply c"]);
        assert_eq!(script.asked()[1..], ["watch=true resourceVersion=5", "watch=true resourceVersion=6"]);
    }
}

#[tokio::test(start_paused = true)]
async fn split_lines_are_joined() {
    let text = line("ADDED", &node("b", "6")) + &line("ADDED", &node("c", "7"));
    let pieces: Vec<_> =
        text.as_bytes().chunks(7).map(|piece| String::from_utf8_lossy(piece).into_owned()).collect();
    let script = Script::new([list("5", "", &[]), watch(&pieces, End::Hang)]);
    assert_eq!(play(&script).await, ["init", "done", "apply b", "apply c"]);
}

#[tokio::test(start_paused = true)]
async fn bookmarks_only_advance_the_version() {
    let script = Script::new([
        list("5", "", &[]),
        watch(&[line("BOOKMARK", &bookmark("40", &json!({})))], End::Close),
    ]);
    assert_eq!(play(&script).await, ["init", "done"]);
    assert_eq!(script.asked()[2], "watch=true resourceVersion=40");
}

/// Late and repeated events: the store ends up equal to the cluster.
#[tokio::test(start_paused = true)]
async fn late_and_repeated_events_leave_a_correct_store() {
    let events = [
        line("DELETED", &node("x", "6")),
        line("MODIFIED", &zoned("b", "7", "z")),
        line("ADDED", &zoned("b", "7", "z")),
        line("DELETED", &node("a", "8")),
        line("DELETED", &node("a", "8")),
    ];
    let script = Script::new([list("5", "", &[node("a", "1")]), watch(&events, End::Hang)]);
    let watches = Watches::new(script.client(), &mut Registry::default());
    let mut nodes = watches.nodes();
    let (mut store, mut changes) = (Store::default(), 0);
    while let Ok(Some(event)) = tokio::time::timeout(QUIET, nodes.next()).await {
        store.apply(event, |_, _| changes += 1);
    }
    assert_eq!(store.iter().map(|node| node.name.as_str()).collect::<Vec<_>>(), ["b"]);
    assert_eq!(changes, 3, "a came, b came, a went");
}

#[tokio::test(start_paused = true)]
async fn malformed_object_is_counted_and_skipped() {
    let bad = |version: &str| json!({ "metadata": { "name": "bad", "resourceVersion": version }, "spec": { "taints": 7 } });
    let script = Script::new([
        list("5", "", &[bad("1"), node("a", "2")]),
        watch(
            &[line("MODIFIED", &bad("6")), line("ADDED", &node("b", "7")), line("DELETED", &bad("8"))],
            End::Close,
        ),
    ]);
    let mut registry = Registry::default();
    let watches = Watches::new(script.client(), &mut registry);
    assert_eq!(
        said(&mut watches.nodes(), QUIET).await,
        ["init", "keep bad", "listed a", "done", "apply b", "delete bad"]
    );
    assert_eq!(script.asked()[2], "watch=true resourceVersion=8", "its version counts all the same");
    let text = metrics(&registry);
    assert!(text.contains("malformed_objects_total{kind=\"nodes\"} 2\n"), "{text}");
}

#[tokio::test(start_paused = true)]
async fn malformed_stream_leads_to_a_relist() {
    for nonsense in [
        "<html>\n".to_owned(),
        line("TELEPORTED", &node("a", "6")),
        line("ADDED", &json!({ "metadata": {} })),
    ] {
        let script = Script::new([
            list("5", "", &[]),
            watch(&[nonsense], End::Hang),
            list("9", "", &[node("a", "8")]),
        ]);
        assert_eq!(play(&script).await, ["init", "done", "init", "listed a", "done"]);
    }
}

#[tokio::test(start_paused = true)]
async fn silence_is_measured_and_reopens_the_watch() {
    let script = Script::new([
        list("5", "", &[]),
        watch(&[], End::Hang),
        watch(&[line("ADDED", &node("a", "6"))], End::Hang),
    ]);
    let mut registry = Registry::default();
    let watches = Watches::new(script.client(), &mut registry);
    let mut nodes = watches.nodes();
    assert_eq!(said(&mut nodes, QUIET).await, ["init", "done"]);
    let (kind, silent) = watches.staleness().longest().expect("a watch");
    assert!(kind == "nodes" && silent >= QUIET, "{kind} {silent:?}");
    assert_eq!(said(&mut nodes, Timing::default().idle).await, ["apply a"]);
    assert_eq!(script.asked()[2], "watch=true resourceVersion=5");
    assert!(metrics(&registry).contains("reason=\"idle\"} "));
}

#[tokio::test(start_paused = true)]
async fn bookmarks_reset_staleness() {
    let mark = line("BOOKMARK", &bookmark("6", &json!({})));
    let script = Script::new([list("5", "", &[]), watch(&[mark], End::Hang)]);
    let watches = Watches::new(script.client(), &mut Registry::default());
    let begun = Instant::now();
    tokio::time::advance(QUIET).await;
    said(&mut watches.nodes(), QUIET).await;
    let heard = watches.staleness().last_data("nodes").expect("a watch");
    assert_eq!(heard - begun, QUIET);
}

#[tokio::test(start_paused = true)]
async fn failures_are_retried_with_growing_delays() {
    // Together less than `QUIET`, whatever the jitter.
    let script = Script::new((0..9).map(|_| refused(503)).chain([list("5", "", &[node("a", "1")])]));
    let words = play(&script).await;
    assert_eq!(words[9..], ["init", "listed a", "done"], "{words:?}");
    let times = script.times();
    let waits: Vec<_> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
    let Timing { min_backoff, max_backoff, .. } = Timing::default();
    assert!(waits[0] <= min_backoff + Duration::from_millis(5), "{waits:?}");
    assert!(waits[..9].iter().all(|wait| *wait >= min_backoff / 2), "{waits:?}");
    assert!(waits[8] >= max_backoff / 2 && waits[8] <= max_backoff + Duration::from_millis(5), "{waits:?}");
}

#[tokio::test(start_paused = true)]
async fn missing_optional_kind_is_retried_rarely_and_never_stale() {
    let networks =
        json!({ "metadata": { "name": "a", "resourceVersion": "1" }, "spec": { "cidrs": ["10.96.0.0/16"] } });
    let script = Script::new([refused(404), refused(404), list("5", "", &[networks])]);
    let watches = Watches::new(script.client(), &mut Registry::default());
    let mut events = watches.dispensable().watch(crate::ServiceCidrs);
    let found = loop {
        match events.next().await {
            Some(Event::Init) => {}
            Some(Event::InitApply(found)) => break found,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(found.name, "a");
    let times = script.times();
    let Timing { missing, max_backoff, .. } = Timing::default();
    for pair in times.windows(2) {
        let wait = pair[1] - pair[0];
        assert!(wait > missing / 2 && wait < missing * 2, "{wait:?}");
    }
    assert_eq!(watches.staleness().longest(), None);
    // Of what has to be there, a 404 is a failure like others.
    let script = Script::new([refused(404), list("5", "", &[node("a", "1")])]);
    assert_eq!(play(&script).await, ["init", "init", "listed a", "done"]);
    assert!(script.times()[1] - script.times()[0] <= max_backoff);
}

#[tokio::test(start_paused = true)]
async fn watch_that_ends_normally_is_reopened_at_once() {
    let script = Script::new([
        list("5", "", &[]),
        watch(&[line("ADDED", &node("a", "6"))], End::Close),
        watch(&[], End::Hang),
    ]);
    play(&script).await;
    let times = script.times();
    assert_eq!(times[2] - times[1], Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn selectors_are_sent_with_every_request() {
    let script = Script::new([list("5", "", &[])]);
    let watches = Watches::new(script.client(), &mut Registry::default());
    said(&mut watches.node("n1"), QUIET).await;
    let field = "fieldSelector=metadata.name%3Dn1";
    assert_eq!(
        script.asked(),
        [format!("{field} resourceVersion=0"), format!("watch=true {field} resourceVersion=5")]
    );
}

/// Nodes whose store also takes objects from elsewhere.
struct WrittenNodes;

#[derive(Clone, Debug, PartialEq, Eq)]
struct WrittenNode {
    name: String,
    version: String,
}

impl Object for WrittenNode {
    type Key = String;

    fn key(&self) -> String {
        self.name.clone()
    }

    fn version(&self) -> Option<&str> {
        Some(&self.version)
    }
}

impl Kind for WrittenNodes {
    type Object = WrittenNode;

    fn name(&self) -> &'static str {
        "nodes"
    }

    fn path(&self) -> String {
        "/api/v1/nodes".to_owned()
    }

    fn consistent(&self) -> bool {
        true
    }

    fn key(&self, key: Key) -> String {
        key.name().to_owned()
    }

    fn project(json: &str, _: &mut Vec<String>) -> Result<Option<WrittenNode>, crate::Malformed> {
        let json: Value = serde_json::from_str(json)?;
        let text = |field: &str| json["metadata"][field].as_str().unwrap_or_default().to_owned();
        Ok(Some(written(&text("name"), &text("resourceVersion"))))
    }
}

fn written(name: &str, version: &str) -> WrittenNode {
    WrittenNode { name: name.to_owned(), version: version.to_owned() }
}

/// What is stored after `Init` may be missing in the list, and what was stored before it may not.
#[tokio::test(start_paused = true)]
async fn init_precedes_the_request_of_the_list() {
    let script = Script::new([list("5", "", &[node("a", "1")]), refused(410), list("9", "", &[])]);
    let watches = Watches::new(script.client(), &mut Registry::default());
    let mut nodes = watches.watch(WrittenNodes);
    assert_eq!(nodes.next().await, Some(Event::Init));
    assert_eq!(script.asked(), [""; 0]);
    for event in [Event::InitApply(written("a", "1")), Event::InitDone, Event::Init] {
        assert_eq!(nodes.next().await, Some(event));
    }
    assert_eq!(script.asked(), ["", "watch=true resourceVersion=5"]);
    assert_eq!(nodes.next().await, Some(Event::InitDone));
    assert_eq!(script.asked()[2..], [""], "consistent, like the first");
}

#[tokio::test(start_paused = true)]
async fn write_during_a_relist_survives_it() {
    let script = Script::new([
        list("5", "", &[node("a", "1")]),
        refused(410),
        list("9", "", &[node("a", "1"), node("b", "8")]),
        watch(
            &[
                line("MODIFIED", &node("b", "8")),
                line("ADDED", &node("c", "10")),
                line("DELETED", &node("c", "11")),
            ],
            End::Hang,
        ),
    ]);
    let watches = Watches::new(script.client(), &mut Registry::default());
    let mut nodes = watches.watch(WrittenNodes);
    let mut store = Store::default();
    let (mut inits, mut names) = (0, Vec::new());
    while let Ok(Some(event)) = tokio::time::timeout(QUIET, nodes.next()).await {
        let is_init = event == Event::Init;
        inits += usize::from(is_init);
        store.apply(event, |_, _| {});
        if is_init && inits == 2 {
            // The list contains `b` as it was before this change, and lacks `c` and `d`.
            for write in [written("b", "12"), written("c", "10"), written("d", "13")] {
                store.apply(Event::Apply(write), |_, _| {});
            }
        }
        names.push(store.iter().map(|node| format!("{}@{}", node.name, node.version)).collect::<Vec<_>>());
    }
    assert_eq!(inits, 2);
    assert_eq!(names.last().expect("events")[..], ["a@1", "b@12", "d@13"]);
    let after_init = names.iter().skip_while(|names| !names.contains(&"b@12".to_owned()));
    assert!(after_init.into_iter().all(|names| names.contains(&"d@13".to_owned())), "{names:?}");
}
