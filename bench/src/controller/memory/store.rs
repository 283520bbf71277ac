// SPDX-License-Identifier: Apache-2.0
//! The objects of the API server in memory, as their JSON, with versions, watches, and the patches that the controllers send. Pure but
//! for the channels of the watches.

use std::collections::{BTreeMap, VecDeque};
use std::time::Instant;

use bytes::Bytes;
use futures::StreamExt as _;
use futures::stream::BoxStream;
use http::StatusCode;
use serde_json::{Value, json};
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};

/// Changes that a watch may begin with: it opens shortly after the list that it continues.
const REMEMBERED: usize = 2000;

type Failed = (StatusCode, &'static str);

/// All objects. Those of a resource are in one namespace, or in none.
#[derive(Default)]
pub(super) struct Store {
    version: u64,
    collections: BTreeMap<String, Collection>,
    last_list: Option<Instant>,
}

#[derive(Default)]
struct Collection {
    /// By name.
    objects: BTreeMap<String, Bytes>,
    /// The last changes, as the lines of watches.
    changes: VecDeque<(u64, Bytes)>,
    watches: Vec<UnboundedSender<Bytes>>,
    /// Changes by requests.
    writes: u32,
}

impl Collection {
    fn change(&mut self, version: u64, kind: &str, object: &[u8]) {
        let line = line(kind, object);
        self.watches.retain(|watch| watch.send(line.clone()).is_ok());
        self.changes.push_back((version, line));
        if self.changes.len() > REMEMBERED {
            self.changes.pop_front();
        }
    }
}

impl Store {
    /// Creates or replaces an object, with the next version.
    pub(super) fn put(&mut self, resource: &str, name: &str, mut object: Value) -> Bytes {
        self.version += 1;
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        let bytes = Bytes::from(object.to_string());
        let collection = self.collections.entry(resource.to_owned()).or_default();
        let is_new = collection.objects.insert(name.to_owned(), bytes.clone()).is_none();
        collection.change(self.version, if is_new { "ADDED" } else { "MODIFIED" }, &bytes);
        bytes
    }

    pub(super) fn delete(&mut self, resource: &str, name: &str) {
        self.version += 1;
        let Some(collection) = self.collections.get_mut(resource) else { return };
        let Some(mut object) = collection.objects.remove(name).map(|bytes| parse(&bytes)) else { return };
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        collection.change(self.version, "DELETED", object.to_string().as_bytes());
    }

    pub(super) fn count(&self, resource: &str) -> usize {
        self.collections.get(resource).map_or(0, |collection| collection.objects.len())
    }

    pub(super) fn writes(&self, resource: &str) -> u32 {
        self.collections.get(resource).map_or(0, |collection| collection.writes)
    }

    pub(super) fn last_list(&self) -> Option<Instant> {
        self.last_list
    }

    pub(super) fn read(&self, resource: &str, name: &str) -> Result<Bytes, Failed> {
        let found = self.collections.get(resource).and_then(|collection| collection.objects.get(name));
        found.cloned().ok_or((StatusCode::NOT_FOUND, "NotFound"))
    }

    pub(super) fn create(&mut self, resource: &str, name: &str, mut object: Value) -> Result<Bytes, Failed> {
        if self.read(resource, name).is_ok() {
            return Err((StatusCode::CONFLICT, "AlreadyExists"));
        }
        object["metadata"]["uid"] = json!(format!("{resource}-{}", self.version + 1));
        Ok(self.write(resource, name, object))
    }

    pub(super) fn replace(&mut self, resource: &str, name: &str, object: Value) -> Result<Bytes, Failed> {
        let old = parse(&self.read(resource, name)?);
        if old["metadata"]["resourceVersion"] != object["metadata"]["resourceVersion"] {
            return Err((StatusCode::CONFLICT, "Conflict"));
        }
        Ok(self.write(resource, name, object))
    }

    /// Applies a patch of the controller, merge or strategic.
    pub(super) fn patch(&mut self, resource: &str, name: &str, patch: &Value) -> Result<Bytes, Failed> {
        let mut object = parse(&self.read(resource, name)?);
        let is_other = |field: &str| {
            patch["metadata"].get(field).is_some_and(|wanted| *wanted != object["metadata"][field])
        };
        if is_other("uid") || is_other("resourceVersion") {
            return Err((StatusCode::CONFLICT, "Conflict"));
        }
        merge(&mut object, patch);
        Ok(self.write(resource, name, object))
    }

    fn write(&mut self, resource: &str, name: &str, object: Value) -> Bytes {
        self.count_write(resource);
        self.put(resource, name, object)
    }

    /// Counts a request that changes an object, without the change.
    pub(super) fn count_write(&mut self, resource: &str) {
        self.collections.entry(resource.to_owned()).or_default().writes += 1;
    }

    /// A list, or a page of it.
    pub(super) fn list(&mut self, resource: &str, limit: Option<usize>, from: usize) -> Bytes {
        self.last_list = Some(Instant::now());
        let all = self.collections.entry(resource.to_owned()).or_default().objects.values();
        let end = limit.map_or(all.len(), |limit| all.len().min(from + limit));
        let mut metadata = json!({"resourceVersion": self.version.to_string()});
        if end < all.len() {
            metadata["continue"] = json!(end.to_string());
        }
        let mut text = format!(
            "{{\"kind\":\"{}List\",\"apiVersion\":\"v1\",\"metadata\":{metadata},\"items\":[",
            kind(resource)
        )
        .into_bytes();
        for (index, object) in all.skip(from).take(end - from).enumerate() {
            if index > 0 {
                text.push(b',');
            }
            text.extend_from_slice(object);
        }
        text.extend_from_slice(b"]}");
        text.into()
    }

    /// The lines of a watch from a version on, or with all objects first.
    pub(super) fn watch(
        &mut self,
        resource: &str,
        from: u64,
        with_objects: bool,
    ) -> BoxStream<'static, Bytes> {
        let (sender, receiver) = unbounded_channel();
        let collection = self.collections.entry(resource.to_owned()).or_default();
        let mut first: Vec<Bytes> = Vec::new();
        if with_objects {
            self.last_list = Some(Instant::now());
            first.extend(collection.objects.values().map(|object| line("ADDED", object)));
            let end = json!({"kind": kind(resource), "apiVersion": "v1", "metadata": {
                "resourceVersion": self.version.to_string(), "annotations": {"k8s.io/initial-events-end": "true"},
            }});
            first.push(line("BOOKMARK", end.to_string().as_bytes()));
        } else {
            let later = collection.changes.iter().filter(|(version, _)| *version > from);
            first.extend(later.map(|(_, line)| line.clone()));
        }
        collection.watches.push(sender);
        let later =
            futures::stream::unfold(receiver, |mut lines| async { Some((lines.recv().await?, lines)) });
        futures::stream::iter(first).chain(later).boxed()
    }
}

/// The kind of the peer's objects, whose client checks it.
fn kind(resource: &str) -> &'static str {
    match resource {
        "services" => "Service",
        "nodes" => "Node",
        _ => "",
    }
}

/// The type comes first, as a real API server writes it.
fn line(kind: &str, object: &[u8]) -> Bytes {
    let mut text = format!("{{\"type\":\"{kind}\",\"object\":").into_bytes();
    text.extend_from_slice(object);
    text.extend_from_slice(b"}\n");
    text.into()
}

fn parse(object: &[u8]) -> Value {
    serde_json::from_slice(object).unwrap_or_default()
}

/// A merge patch (RFC 7396), and the two lists that strategic patches of the controllers merge.
fn merge(object: &mut Value, patch: &Value) {
    let Value::Object(changes) = patch else {
        *object = patch.clone();
        return;
    };
    for (key, change) in changes {
        match (key.as_str(), change) {
            // Preconditions, which the caller has checked.
            ("uid" | "resourceVersion", _) => {}
            // The order of a list of a strategic patch.
            (directive, _) if directive.starts_with('$') => {}
            (_, Value::Null) => {
                object.as_object_mut().map(|fields| fields.remove(key));
            }
            ("finalizers", Value::Array(added)) => merge_list(&mut object[key], added, |old, new| old == new),
            ("conditions", Value::Array(added)) => {
                merge_list(&mut object[key], added, |old, new| old["type"] == new["type"]);
            }
            (_, Value::Object(_)) => {
                if !object[key].is_object() {
                    object[key] = json!({});
                }
                merge(&mut object[key], change);
            }
            _ => object[key] = change.clone(),
        }
    }
}

fn merge_list(list: &mut Value, added: &[Value], is_same: impl Fn(&Value, &Value) -> bool) {
    if !list.is_array() {
        *list = json!([]);
    }
    let Some(list) = list.as_array_mut() else { return };
    for new in added {
        match list.iter_mut().find(|old| is_same(old, new)) {
            Some(old) => merge(old, new),
            None => list.push(new.clone()),
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    fn names(list: &[u8]) -> Vec<String> {
        let items = parse(list)["items"].as_array().cloned().unwrap_or_default();
        items.iter().map(|item| item["metadata"]["name"].as_str().unwrap_or_default().to_owned()).collect()
    }

    fn object(name: &str) -> Value {
        json!({"metadata": {"name": name, "uid": "u"}})
    }

    #[test]
    fn pages_are_the_whole_list() {
        let mut store = Store::default();
        for name in ["a", "b", "c"] {
            store.put("nodes", name, object(name));
        }
        let first = store.list("nodes", Some(2), 0);
        assert_eq!(
            (names(&first), &parse(&first)["metadata"]["continue"]),
            (vec!["a".into(), "b".into()], &json!("2"))
        );
        let last = store.list("nodes", Some(2), 2);
        assert_eq!((names(&last), parse(&last)["metadata"].get("continue")), (vec!["c".into()], None));
    }

    #[test]
    fn watch_continues_after_its_list() {
        let mut store = Store::default();
        store.put("nodes", "a", object("a"));
        store.put("nodes", "b", object("b"));
        let mut watch = store.watch("nodes", 1, false);
        store.delete("nodes", "a");
        let kinds = std::iter::from_fn(|| watch.next().now_or_never()?).map(|line| {
            let line = parse(&line);
            format!("{} {}", line["type"], line["object"]["metadata"]["name"])
        });
        assert_eq!(kinds.collect::<Vec<_>>(), [r#""ADDED" "b""#, r#""DELETED" "a""#]);
    }

    #[test]
    fn objects_of_a_watch_end_with_a_bookmark_of_their_kind() {
        let mut store = Store::default();
        let kinds = |watch: &mut BoxStream<'static, Bytes>| {
            let lines = std::iter::from_fn(|| watch.next().now_or_never()?).map(|line| parse(&line));
            lines.map(|line| format!("{} {}", line["type"], line["object"]["kind"])).collect::<Vec<_>>()
        };
        assert_eq!(kinds(&mut store.watch("services", 0, true)), [r#""BOOKMARK" "Service""#]);
        store.put("nodes", "a", json!({"kind": "Node", "metadata": {"name": "a"}}));
        assert_eq!(kinds(&mut store.watch("nodes", 0, true)), [r#""ADDED" "Node""#, r#""BOOKMARK" "Node""#]);
    }

    #[test]
    fn patches_merge_lists_and_check_versions() {
        let mut store = Store::default();
        store.put("services", "a", object("a"));
        let patch =
            |store: &mut Store, patch: Value| store.patch("services", "a", &patch).map(|bytes| parse(&bytes));
        let first = json!({"metadata": {"uid": "u", "finalizers": ["f"]}, "status": {"conditions": [{"type": "A", "status": "False"}]}});
        patch(&mut store, first).unwrap();
        let second = json!({
            "metadata": {"$setElementOrder/finalizers": ["f", "g"], "finalizers": ["f", "g"]},
            "status": {"conditions": [{"type": "A", "status": "True"}]},
        });
        let found = patch(&mut store, second).unwrap();
        assert_eq!(found["metadata"].get("$setElementOrder/finalizers"), None);
        assert_eq!(found["metadata"]["finalizers"], json!(["f", "g"]));
        assert_eq!(found["status"]["conditions"], json!([{"type": "A", "status": "True"}]));
        let stale = json!({"metadata": {"resourceVersion": "1"}});
        assert_eq!(patch(&mut store, stale).unwrap_err(), (StatusCode::CONFLICT, "Conflict"));
    }
}
