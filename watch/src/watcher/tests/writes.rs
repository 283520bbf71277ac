// SPDX-License-Identifier: Apache-2.0
//! A store that also takes the responses to the program's own writes.

use super::*;

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
