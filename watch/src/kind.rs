// SPDX-License-Identifier: Apache-2.0
//! What can be watched: where it is listed, and how its JSON becomes an object of the model. Pure.

use steerage_model::Key;

use crate::Object;

mod json;
mod node;
mod service;
mod service_cidr;
mod slice;

pub use node::Nodes;
pub use service::Services;
pub use service_cidr::ServiceCidrs;
pub use slice::EndpointSlices;

/// A kind of object to watch.
pub trait Kind: Send + Sync + 'static {
    /// What the index takes in.
    type Object: Object<Key: Send> + Send + 'static;

    /// The plural, as in `kubectl get`; for logs, metrics and [`crate::Staleness`].
    fn name(&self) -> &'static str;

    /// The path of the collection, such as `/api/v1/services`.
    fn path(&self) -> String;

    /// Which of the collection to ask for.
    fn selectors(&self) -> Selectors {
        Selectors::default()
    }

    /// Whether older API servers do not have it. Then it is asked for again now and then, and no failure.
    fn may_be_missing(&self) -> bool {
        false
    }

    /// The index's key for the object of this namespace (empty for kinds without) and name.
    fn key(&self, key: Key) -> <Self::Object as Object>::Key;

    /// Reads an object. `None`: it is of no interest. What is wrong with a part that can be left out goes to `notes`.
    fn project(&self, json: &str, notes: &mut Vec<String>) -> Result<Option<Self::Object>, Malformed>;
}

/// Selectors in the API's own syntax; `None` selects all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selectors {
    /// `labelSelector`.
    pub labels: Option<String>,
    /// `fieldSelector`.
    pub fields: Option<String>,
}

/// Why an object cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum Malformed {
    /// Not the JSON that its kind has.
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    /// A field whose value decides over the whole object has one that is not known.
    #[error("{field}: unknown value `{value}`")]
    Unknown {
        /// The path of the field.
        field: &'static str,
        /// Its value.
        value: String,
    },
}
