// SPDX-License-Identifier: Apache-2.0
//! What counts as a failure, and the delays after it.

use super::*;

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

#[tokio::test(start_paused = true)]
async fn empty_error_response_keeps_its_status() {
    let script = Script::new([list("5", "", &[]), (410, Vec::new(), End::Close), list("9", "", &[])]);
    assert_eq!(play(&script).await, ["init", "done", "init", "done"]);
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

/// After a restart of the API server with a compacted etcd, the first answer says that the version is too old.
#[tokio::test(start_paused = true)]
async fn expired_version_is_listed_soon_after_an_outage() {
    let outage = (0..9).map(|_| refused(503));
    let script = Script::new([list("5", "", &[])].into_iter().chain(outage).chain([
        refused(410),
        refused(503),
        list("9", "", &[]),
    ]));
    assert_eq!(play(&script).await, ["init", "done", "init", "init", "done"]);
    let times = script.times();
    let waits: Vec<_> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
    let Timing { min_backoff, max_backoff, .. } = Timing::default();
    assert!(waits[9] >= max_backoff / 2, "the outage: {waits:?}");
    assert!(waits[10] <= Duration::from_millis(1005), "the version is too old: {waits:?}");
    assert!(waits[11] <= min_backoff + Duration::from_millis(5), "the backoff began anew: {waits:?}");
}

#[tokio::test(start_paused = true)]
async fn versions_that_always_expire_are_listed_with_growing_delays() {
    let answers = (0..200).flat_map(|_| [list("5", "", &[]), refused(410)]);
    let script = Script::new(answers);
    let _ = tokio::time::timeout(Duration::from_mins(10), play(&script)).await;
    let lists = script.lists().len();
    assert!((60..130).contains(&lists), "a delay of 5 s to 10 s, after a few shorter ones: {lists}");
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
