// SPDX-License-Identifier: Apache-2.0
//! How objects are listed, and what leads to a new list.

use super::*;

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

#[tokio::test(start_paused = true)]
async fn streamed_list_that_never_completes_becomes_one_response() {
    let half = |end| watch(&[line("ADDED", &node("a", "1"))], end);
    let script = Script::streaming([
        half(End::Close),
        half(End::Break),
        half(End::Eof),
        list("5", "", &[node("b", "2")]),
    ]);
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

/// It is no sign that the API server does not stream: the objects are listed already.
#[tokio::test(start_paused = true)]
async fn invalid_watch_after_a_streamed_list_is_asked_again() {
    let end = bookmark("5", &json!({ "k8s.io/initial-events-end": "true" }));
    let script = Script::streaming([watch(&[line("BOOKMARK", &end)], End::Close), refused(422)]);
    assert_eq!(play(&script).await, ["init", "done"]);
    assert_eq!(script.asked()[1..], ["watch=true resourceVersion=5"; 2]);
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
async fn refused_watches_lead_to_a_consistent_list() {
    let first = list("5", "", &[node("a", "1")]);
    let script =
        Script::new([first].into_iter().chain((0..5).map(|_| refused(500))).chain([list("2", "", &[])]));
    assert_eq!(play(&script).await, ["init", "listed a", "done", "init", "done"]);
    let asked = script.asked();
    assert_eq!(asked[1..6], ["watch=true resourceVersion=5"; 5]);
    assert_eq!(asked[6..], ["", "watch=true resourceVersion=2"]);
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
