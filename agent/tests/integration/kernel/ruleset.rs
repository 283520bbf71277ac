// SPDX-License-Identifier: Apache-2.0
//! The output of `nft` for the agent's tables, as text and JSON.

use std::collections::BTreeMap;
use std::process::Command;
use std::time::Duration;

use serde_json::Value;

/// Elements by family, and by the name of their set.
pub(crate) type Counts = BTreeMap<(String, String), usize>;

pub(crate) fn nft(arguments: &[&str]) -> String {
    let output = Command::new("nft").args(arguments).output().expect("the nft command is installed");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "nft {arguments:?}: {} {error}", output.status);
    String::from_utf8(output.stdout).unwrap()
}

/// The whole ruleset as JSON, one line an object, with nothing in it that depends on how it came about: no handles, sets and
/// elements in order, and so the endpoints of each long list.
///
/// A list has several messages. If the kernel enlarges a hash table between them, its elements change places, and the list lacks some.
/// So it is read until two lists in a row are equal.
pub(crate) fn ruleset() -> Vec<String> {
    settled(listed)
}

/// What two lists in a row agree on.
fn settled<T: PartialEq>(mut list: impl FnMut() -> T) -> T {
    let mut last = list();
    for _ in 0..200 {
        let next = list();
        if next == last {
            break;
        }
        last = next;
        std::thread::sleep(Duration::from_millis(50));
    }
    last
}

fn listed() -> Vec<String> {
    let mut lines: Vec<_> = objects()
        .into_iter()
        .map(|mut object| {
            forget_handles(&mut object);
            let kind = object.as_object().unwrap().keys().next().unwrap().clone();
            // Rules stand in the order in which they run; their place among the objects says it, so the chain goes first.
            let is_lists = object[&kind]["name"] == "endpoints";
            if let Some(elements) = object[&kind]["elem"].as_array_mut() {
                if is_lists {
                    order_lists(elements);
                }
                elements.sort_by_key(Value::to_string);
            }
            let of = &object[&kind];
            let chain = if kind == "rule" { of["chain"].to_string() } else { of["name"].to_string() };
            ((kind.clone(), of["family"].to_string(), of["table"].to_string(), chain), object.to_string())
        })
        .collect();
    // Stable, so the rules of a chain keep their order.
    lines.sort_by(|(a, _), (b, _)| a.cmp(b));
    lines.into_iter().map(|(_, line)| line).collect()
}

/// Assigns the endpoints of each list to its slots in order. An element is `[{concat: [list, slot]}, {concat: [address, port]}]`.
fn order_lists(elements: &mut [Value]) {
    let mut lists: BTreeMap<String, (Vec<u64>, Vec<String>)> = BTreeMap::new();
    let parts = |element: &Value| {
        let key = &element[0]["concat"];
        (key[0].to_string(), key[1].as_u64().unwrap(), element[1].to_string())
    };
    for (list, slot, endpoint) in elements.iter().map(parts) {
        let (slots, endpoints) = lists.entry(list).or_default();
        slots.push(slot);
        endpoints.push(endpoint);
    }
    let ordered = lists.into_iter().flat_map(|(list, (mut slots, mut endpoints))| {
        slots.sort_unstable();
        endpoints.sort_unstable();
        slots
            .into_iter()
            .zip(endpoints)
            .map(move |(slot, endpoint)| Value::from(format!("{list} {slot} {endpoint}")))
    });
    for (element, text) in elements.iter_mut().zip(ordered.collect::<Vec<_>>()) {
        *element = text;
    }
}

/// Number of elements in `nft -j list ruleset`.
pub(crate) fn counts_in_json() -> Counts {
    let mut counts = Counts::new();
    for object in objects() {
        let Some(set) = object.get("set").or(object.get("map")) else { continue };
        let name = |key: &str| set[key].as_str().unwrap().to_owned();
        counts.insert((name("family"), name("name")), set["elem"].as_array().map_or(0, Vec::len));
    }
    counts
}

/// Number of elements in `nft list ruleset`.
pub(crate) fn counts_in_text() -> Counts {
    let text = nft(&["list", "ruleset"]);
    let mut counts = Counts::new();
    let (mut family, mut set, mut listing) = (String::new(), None, false);
    for line in text.lines().map(str::trim) {
        let words: Vec<_> = line.split_whitespace().collect();
        match words.as_slice() {
            ["table", of, _, "{"] => (*of).clone_into(&mut family),
            ["set" | "map", name, "{"] => {
                set = Some((family.clone(), (*name).to_owned()));
                counts.insert((family.clone(), (*name).to_owned()), 0);
            }
            ["elements", "=", "{", ..] => listing = true,
            _ => {}
        }
        if let Some(count) = set.as_ref().filter(|_| listing).and_then(|set| counts.get_mut(set)) {
            *count += line.matches(',').count() + usize::from(line.ends_with('}'));
            listing = !line.ends_with('}');
        }
    }
    counts
}

fn objects() -> Vec<Value> {
    let listing: Value = serde_json::from_str(&nft(&["-j", "list", "ruleset"])).expect("JSON");
    let objects = listing["nftables"].as_array().expect("objects");
    objects.iter().filter(|object| object.get("metainfo").is_none()).cloned().collect()
}

fn forget_handles(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.remove("handle");
            fields.values_mut().for_each(forget_handles);
        }
        Value::Array(values) => values.iter_mut().for_each(forget_handles),
        _ => {}
    }
}
