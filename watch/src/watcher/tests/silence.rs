// SPDX-License-Identifier: Apache-2.0
//! Deadlines without data, and staleness.

use super::*;

#[tokio::test(start_paused = true)]
async fn error_responses_are_no_data() {
    let script = Script::new([list("5", "", &[])].into_iter().chain((0..40).map(|_| refused(403))));
    let watches = Watches::new(script.client(), &mut Registry::default());
    said(&mut watches.nodes(), Duration::from_mins(2)).await;
    let (_, silent) = watches.staleness().longest().expect("a watch");
    assert!(silent >= Duration::from_secs(115), "{silent:?}");
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

/// After a restore of etcd the API server accepts a watch from a version that it has not reached yet, and sends nothing.
#[tokio::test(start_paused = true)]
async fn watches_that_stay_silent_lead_to_a_list() {
    let script = Script::new([
        list("1200", "", &[node("a", "1100")]),
        watch(&[], End::Hang),
        watch(&[], End::Hang),
        list("1001", "", &[node("b", "900")]),
    ]);
    let watches = Watches::new(script.client(), &mut Registry::default());
    let words: Vec<_> = watches.nodes().take(6).map(|event| word(&event)).collect().await;
    assert_eq!(words, ["init", "listed a", "done", "init", "listed b", "done"]);
    assert_eq!(
        script.asked()[1..4],
        ["watch=true resourceVersion=1200", "watch=true resourceVersion=1200", "resourceVersion=0"]
    );
}

/// The same behind a proxy that cuts silent connections, after as long.
#[tokio::test(start_paused = true)]
async fn silent_watches_that_a_proxy_ends_lead_to_a_list() {
    let idle = Timing::default().idle;
    for end in [End::CloseAfter(idle / 6), End::BreakAfter(idle / 6)] {
        let (first, second) = (list("1200", "", &[node("a", "1100")]), list("1001", "", &[node("b", "900")]));
        let script = Script::cutting([first, second], end);
        let watches = Watches::new(script.client(), &mut Registry::default());
        let words: Vec<_> = watches.nodes().take(6).map(|event| word(&event)).collect().await;
        assert_eq!(words, ["init", "listed a", "done", "init", "listed b", "done"]);
        assert_eq!(script.asked().last().map(String::as_str), Some("resourceVersion=0"));
        assert!((13..=15).contains(&script.asked().len()), "12 cuts or one more: {:?}", script.asked());
    }
}

/// The least limit on staleness that the programs accept.
const MIN_LIMIT: Duration = Duration::from_mins(5);

async fn run(events: &mut (impl Stream<Item = Event<Node>> + Unpin), time: Duration) {
    let _ = tokio::time::timeout(time, async { while events.next().await.is_some() {} }).await;
}

#[test]
fn list_after_silence_begins_before_any_limit_on_staleness() {
    let Timing { idle, max_backoff, .. } = Timing::default();
    let longest = MAX_SILENT * idle.mul_f64(1.0 + SILENCE_SPREAD) + max_backoff;
    assert!(longest + Duration::from_secs(10) < MIN_LIMIT, "{longest:?}");
}

/// A quiet resource behind a proxy that cuts silent connections sooner than a bookmark comes.
#[tokio::test(start_paused = true)]
async fn cut_watches_are_never_stale_and_leave_no_gap_before_the_list() {
    let Timing { min_backoff, max_backoff, .. } = Timing::default();
    for seconds in [1, 7, 15, 35, 59, 120] {
        let cut = Duration::from_secs(seconds);
        let lists = (0..100).map(|_| list("5", "", &[]));
        let script = Script::cutting(lists, End::CloseAfter(cut));
        let watches = Watches::new(script.client(), &mut Registry::default());
        run(&mut watches.nodes(), Duration::from_hours(1)).await;
        let lists = script.lists();
        assert!((11..=14).contains(&lists.len()), "cuts after {seconds} s: {} lists", lists.len());
        for pair in lists.windows(2) {
            let age = pair[1].0 - pair[0].0;
            assert!(age + Duration::from_secs(10) < MIN_LIMIT, "cuts after {seconds} s: list after {age:?}");
            // Frequent failures are followed by growing delays.
            let longest = if cut > 2 * max_backoff { min_backoff } else { max_backoff };
            let since_watch = pair[1].0 - pair[1].1.expect("a watch");
            let gap = since_watch.saturating_sub(cut);
            assert!(
                gap <= longest + Duration::from_millis(5),
                "cuts after {seconds} s: no watch for {gap:?}"
            );
        }
    }
}

#[tokio::test(start_paused = true)]
async fn watches_that_become_silent_together_do_not_list_together() {
    let idle = Timing::default().idle;
    let mut waits = Vec::new();
    for _ in 0..10 {
        let begun = Instant::now();
        let script = Script::new([list("5", "", &[]), watch(&[], End::Hang), watch(&[], End::Hang)]);
        let watches = Watches::new(script.client(), &mut Registry::default());
        run(&mut watches.nodes(), Duration::from_secs(290)).await;
        waits.push(script.lists()[1].0 - begun);
    }
    let (first, last) = (waits.iter().min().expect("one"), waits.iter().max().expect("one"));
    assert!(*first >= MAX_SILENT * idle && *last > *first + Duration::from_secs(1), "{waits:?}");
}

/// A silent list says nothing about the watch: the next list must not come from a cache.
#[tokio::test(start_paused = true)]
async fn silent_lists_do_not_count_as_silence_of_the_watch() {
    let silent = || (200, Vec::new(), End::Hang);
    let answers = [list("5", "", &[]), watch(&[failed(410)], End::Close)];
    let script = Script::new(answers.into_iter().chain((0..20).map(|_| silent())));
    let watches = Watches::new(script.client(), &mut Registry::default());
    run(&mut watches.nodes(), Duration::from_mins(8)).await;
    let asked = script.asked();
    assert!(asked.len() > 14 && asked[2..].iter().all(String::is_empty), "{asked:?}");
}

/// An API server that accepts watches but sends nothing must not look current.
#[tokio::test(start_paused = true)]
async fn silent_responses_do_not_reset_staleness() {
    let script = Script::new([list("5", "", &[])].into_iter().chain((0..3).map(|_| watch(&[], End::Hang))));
    let watches = Watches::new(script.client(), &mut Registry::default());
    let mut nodes = watches.nodes();
    said(&mut nodes, QUIET).await;
    let idle = Timing::default().idle;
    tokio::time::timeout(idle + QUIET, nodes.next()).await.expect_err("nothing arrives");
    assert!(script.asked().len() > 2, "a second watch has started");
    let (_, silent) = watches.staleness().longest().expect("a watch");
    assert!(silent > idle, "{silent:?}");
}
