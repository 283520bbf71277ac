// SPDX-License-Identifier: Apache-2.0
//! Delivers load balancers and node sets to `engine`: from the API server's watches, or from a directory of JSON files for an
//! edge without a cluster. It decides nothing. While the source is unavailable it delivers nothing, and the engine keeps what it has.

use std::marker::PhantomData;
use std::time::Duration;

use futures::StreamExt as _;
use kube::{Resource, ResourceExt as _};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use steerage_edge_api::{EdgeLoadBalancer, EdgeNodeSet};
use steerage_model::Key;
use steerage_watch::{Event, Kind, Malformed, Object, Watches};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::index::{IndexEvent, LoadBalancer, NodeSet};

mod directory;

pub(crate) use directory::watch_directory;

/// The longest wait before the API server is asked again. Short: edge hosts are few, and what they miss is traffic.
pub(crate) const MAX_BACKOFF: Duration = Duration::from_secs(5);

/// The form in which the edge uses the objects of one type.
trait Projection: Object<Key = String> + Clone + Send + 'static {
    type Resource: Resource<DynamicType = ()> + DeserializeOwned;
    /// The plural of the type.
    const NAME: &'static str;

    fn project(object: Self::Resource) -> Self;
}

impl Projection for LoadBalancer {
    type Resource = EdgeLoadBalancer;
    const NAME: &'static str = "edgeloadbalancers";

    fn project(mut object: EdgeLoadBalancer) -> Self {
        let endpoint_nodes = object.spec.endpoint_nodes.take().map(|mut nodes| {
            nodes.sort_unstable();
            nodes.dedup();
            nodes.into()
        });
        Self {
            name: object.name_any(),
            uid: object.uid().unwrap_or_default(),
            generation: object.metadata.generation.unwrap_or_default(),
            created: object.metadata.creation_timestamp.as_ref().map_or(0, |time| time.0.as_second()),
            // One that is being deleted is served until it is gone: the controller decides when.
            spec: object.spec.into(),
            endpoint_nodes,
        }
    }
}

impl Projection for NodeSet {
    type Resource = EdgeNodeSet;
    const NAME: &'static str = "edgenodesets";

    fn project(object: EdgeNodeSet) -> Self {
        Self {
            name: object.name_any(),
            uid: object.uid().unwrap_or_default().into(),
            spec: object.spec.into(),
        }
    }
}

/// The objects of one type in a namespace.
struct Objects<T> {
    namespace: String,
    projection: PhantomData<fn() -> T>,
}

impl<T> Objects<T> {
    fn new(namespace: &str) -> Self {
        Self { namespace: namespace.to_owned(), projection: PhantomData }
    }
}

impl<T: Projection> Kind for Objects<T> {
    type Object = T;

    fn name(&self) -> &'static str {
        T::NAME
    }

    fn path(&self) -> String {
        T::Resource::url_path(&(), Some(&self.namespace))
    }

    /// An old list would take VIPs and listeners away.
    fn consistent(&self) -> bool {
        true
    }

    fn key(&self, key: Key) -> String {
        key.name().to_owned()
    }

    fn project(json: &str, _: &mut Vec<String>) -> Result<Option<T>, Malformed> {
        Ok(Some(T::project(serde_json::from_str(json)?)))
    }
}

#[derive(Deserialize)]
struct Head {
    #[serde(default)]
    kind: String,
    metadata: HeadMeta,
}

#[derive(Deserialize)]
struct HeadMeta {
    name: String,
}

/// Watches both kinds in a namespace until shutdown.
pub(crate) async fn watch(
    watches: Watches,
    namespace: String,
    events: mpsc::Sender<IndexEvent>,
    shutdown: CancellationToken,
) -> anyhow::Result<()> {
    let load_balancers = watches.watch(Objects::new(&namespace));
    let node_sets = watches.watch(Objects::new(&namespace));
    let mut stream = futures::stream::select(
        load_balancers.map(IndexEvent::LoadBalancer),
        node_sets.map(IndexEvent::NodeSet),
    );
    while let Some(Some(event)) = shutdown.run_until_cancelled(stream.next()).await {
        if events.send(event).await.is_err() {
            break;
        }
    }
    Ok(())
}

/// Fails only where not even the object's name can be read.
fn parse(text: &str) -> Result<IndexEvent, Malformed> {
    let Head { kind, metadata: HeadMeta { name } } = serde_json::from_str(text)?;
    Ok(if kind == "EdgeNodeSet" {
        IndexEvent::NodeSet(listed(&name, text))
    } else {
        IndexEvent::LoadBalancer(listed(&name, text))
    })
}

fn listed<T: Projection>(name: &str, text: &str) -> Event<T> {
    match serde_json::from_str(text) {
        Ok(object) => Event::InitApply(T::project(object)),
        Err(error) => {
            let kind = T::NAME;
            tracing::warn!(kind, object = name, %error, "object is unreadable; keeping its last readable form");
            Event::InitKeep(name.to_owned())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_listed_in_their_namespace() {
        assert_eq!(
            Objects::<LoadBalancer>::new("steerage-system").path(),
            "/apis/steerage.dev/v1alpha1/namespaces/steerage-system/edgeloadbalancers"
        );
        assert_eq!(
            Objects::<NodeSet>::new("steerage-system").path(),
            "/apis/steerage.dev/v1alpha1/namespaces/steerage-system/edgenodesets"
        );
    }

    #[test]
    fn unreadable_object_keeps_its_last_readable_form() {
        let text = r#"{"kind": "EdgeNodeSet", "metadata": {"name": "a"}, "spec": {"targets": 7}}"#;
        assert!(matches!(parse(text), Ok(IndexEvent::NodeSet(Event::InitKeep(name))) if name == "a"));
    }
}
