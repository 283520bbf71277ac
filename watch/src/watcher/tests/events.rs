// SPDX-License-Identifier: Apache-2.0
//! What the lines of a watch become.

use super::*;

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
