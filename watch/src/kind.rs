// SPDX-License-Identifier: Apache-2.0
//! The resources that can be watched: their paths, and the projection of their JSON to objects of the model. Pure.

use steerage_model::Key;

use crate::Object;

mod json;
mod node;
mod pod;
mod service;
mod service_cidr;
mod slice;

pub use node::Nodes;
pub use pod::Pods;
pub use service::Services;
pub use service_cidr::ServiceCidrs;
pub use slice::EndpointSlices;

/// A resource to watch.
pub trait Kind: Send + Sync + 'static {
    /// The projection.
    type Object: Object<Key: Send> + Clone + Send + 'static;

    /// The plural, as in `kubectl get`; for logs, metrics and [`crate::Staleness`].
    fn name(&self) -> &'static str;

    /// The path of the collection, such as `/api/v1/services`.
    fn path(&self) -> String;

    /// Selects a part of the collection.
    fn selectors(&self) -> Selectors {
        Selectors::default()
    }

    /// Whether every list must contain all writes that succeeded before [`crate::Event::Init`] was taken from the stream: where the
    /// program stores the responses to its own writes too, or where an old list costs traffic. Otherwise the first list may come
    /// from the API server's cache, which is cheaper, and may be older than what an earlier process has seen.
    fn consistent(&self) -> bool {
        false
    }

    /// Whether older API servers do not serve it. A missing resource is then no failure, and is retried rarely.
    fn may_be_missing(&self) -> bool {
        false
    }

    /// The store's key of the object with this namespace (empty for cluster-scoped kinds) and name.
    fn key(&self, key: Key) -> <Self::Object as Object>::Key;

    /// Projects an object. `None`: Steerage does not use it. Problems of fields that can be left out go to `notes`.
    fn project(json: &str, notes: &mut Vec<String>) -> Result<Option<Self::Object>, Malformed>;
}

/// Selectors in the API's own syntax; `None` selects all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selectors {
    /// `labelSelector`.
    pub labels: Option<String>,
    /// `fieldSelector`.
    pub fields: Option<String>,
}

/// Why an object is unreadable.
#[derive(Debug, thiserror::Error)]
pub enum Malformed {
    /// Not the JSON of its kind.
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    /// A field that the whole object depends on has an unknown value.
    #[error("{field}: unknown value `{value}`")]
    Unknown {
        /// The path of the field.
        field: &'static str,
        /// Its value.
        value: String,
    },
}
