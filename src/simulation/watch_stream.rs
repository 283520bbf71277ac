// SPDX-License-Identifier: Apache-2.0
//! Watches of the simulated API server: streams that lag, are cut, expire, or start with an old list.

use std::collections::BTreeMap;
use std::future::pending;
use std::pin::Pin;

use bytes::Bytes;
use futures::{Stream, StreamExt as _};
use http::{Response, StatusCode};
use http_body::Frame;
use http_body_util::StreamBody;
use serde_json::{Value, json};
use tokio::sync::futures::OwnedNotified;
use tokio::time::{Duration, Instant, sleep_until, timeout_at};

use super::api_server;
use super::link::{self, Link};
use super::objects::Resource;
use super::world::{ProcessId, SharedWorld, World};

type Frames = Pin<Box<dyn Stream<Item = Result<Frame<Bytes>, std::io::Error>> + Send>>;
pub(super) type ResponseBody = StreamBody<Frames>;

/// Time between two bookmarks.
const BOOKMARKS: Duration = Duration::from_mins(1);

/// The longest lag of a watch.
pub(super) const MAX_LAG: Duration = Duration::from_secs(90);

/// A complete body.
pub(super) fn whole(text: String) -> ResponseBody {
    StreamBody::new(futures::stream::iter([Ok(Frame::data(Bytes::from(text)))]).boxed())
}

/// The version that a list shows: the newest, or an older one where the API server may answer from a cache.
pub(super) fn list_version(world: &mut World, is_cached: bool) -> u64 {
    let newest = world.api.version();
    let chance = world.faults.old_list;
    if !is_cached || !world.chance(chance) {
        return newest;
    }
    world.record("old list", "");
    let oldest = world.api.compacted.max(newest.saturating_sub(40));
    world.rng.u64(oldest..=newest)
}

struct Watch {
    world: SharedWorld,
    process: ProcessId,
    resource: Resource,
    /// What was sent.
    version: u64,
    lag: Duration,
    opened: Instant,
    ends: Instant,
    bookmark: Instant,
}

/// Opens a watch, with all objects first if the request asks for them.
pub(super) fn open(
    shared: &SharedWorld,
    process: ProcessId,
    path: &str,
    query: &BTreeMap<String, String>,
) -> Response<ResponseBody> {
    let Some((resource, ..)) = Resource::of_path(path) else {
        return api_server::status(StatusCode::NOT_FOUND, "NotFound");
    };
    let mut world = shared.lock();
    let is_listing = query.get("sendInitialEvents").is_some_and(|value| value == "true");
    let mut first = String::new();
    let version = if is_listing {
        let is_cached = query.get("resourceVersion").is_some_and(|version| version == "0");
        let version = list_version(&mut world, is_cached);
        for object in world.api.list_at(resource, version) {
            first.push_str(&line("ADDED", &object));
        }
        first.push_str(&bookmark(resource, version, true));
        version
    } else {
        let version = query.get("resourceVersion").and_then(|version| version.parse().ok()).unwrap_or(0);
        if version < world.api.compacted {
            world.record("watch expired", "");
            let gone = api_server::status_json(StatusCode::GONE, "Expired");
            if world.rng.bool() {
                return api_server::status(StatusCode::GONE, "Expired");
            }
            return Response::new(whole(line("ERROR", &gone)));
        }
        version
    };
    let seconds = query.get("timeoutSeconds").and_then(|seconds| seconds.parse().ok()).unwrap_or(300);
    let chance = world.faults.lag;
    let lag = match world.chance(chance) {
        false => world.millis(1..20),
        true if world.rng.u8(0..4) > 0 => world.millis(100..10_000),
        true => world.millis(10_000..MAX_LAG.as_secs() * 1000),
    };
    drop(world);
    let now = Instant::now();
    let watch = Watch {
        world: shared.clone(),
        process,
        resource,
        version,
        lag,
        opened: now,
        ends: now + Duration::from_secs(seconds),
        bookmark: now + BOOKMARKS,
    };
    let first = futures::stream::iter((!first.is_empty()).then(|| Ok(Frame::data(Bytes::from(first)))));
    let rest = futures::stream::unfold(watch, |mut watch| async move {
        let text = watch.next().await?;
        Some((text.map(|text| Frame::data(Bytes::from(text))), watch))
    });
    Response::new(StreamBody::new(first.chain(rest).boxed()))
}

/// What a watch does next.
enum Step {
    Send(String),
    Cut,
    Sleep(Instant),
    Wait(OwnedNotified),
}

impl Watch {
    /// The next line; `None` at the end.
    async fn next(&mut self) -> Option<Result<String, std::io::Error>> {
        loop {
            if !link::is_reachable(&self.world, self.process, Link::Api).await {
                return pending().await;
            }
            if Instant::now() >= self.ends {
                return None;
            }
            match self.step() {
                Step::Send(line) => return Some(Ok(line)),
                Step::Cut => {
                    self.ends = Instant::now();
                    return Some(Err(std::io::Error::other("connection reset")));
                }
                Step::Sleep(due) => sleep_until(due).await,
                Step::Wait(changed) => {
                    let _ = timeout_at(self.ends.min(self.bookmark), changed).await;
                }
            }
        }
    }

    fn step(&mut self) -> Step {
        let (mut world, now) = (self.world.lock(), Instant::now());
        if self.opened < world.processes[self.process].watches_cut {
            world.record("watch cut", "");
            return Step::Cut;
        }
        if let Some(change) = world.api.change_after(self.resource, self.version) {
            let due = change.at + self.lag;
            if due > now {
                return Step::Sleep(due);
            }
            self.version = change.version;
            return Step::Send(line(change.kind, &change.object));
        }
        if now >= self.bookmark {
            self.bookmark = now + BOOKMARKS;
            self.version = world.api.version();
            return Step::Send(bookmark(self.resource, self.version, false));
        }
        Step::Wait(world.api.changed(self.resource))
    }
}

/// The type comes first: the watcher projects the object while it is parsed.
fn line(kind: &str, object: &Value) -> String {
    format!("{{\"type\":\"{kind}\",\"object\":{object}}}\n")
}

fn bookmark(resource: Resource, version: u64, ends_list: bool) -> String {
    let (api_version, kind) = resource.kind();
    let mut metadata = json!({"resourceVersion": version.to_string()});
    if ends_list {
        metadata["annotations"] = json!({"k8s.io/initial-events-end": "true"});
    }
    line("BOOKMARK", &json!({"apiVersion": api_version, "kind": kind, "metadata": metadata}))
}
