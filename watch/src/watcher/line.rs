// SPDX-License-Identifier: Apache-2.0
//! One line of a watch, parsed as far as the watch itself needs. Pure.

use std::borrow::Cow;

use serde::Deserialize;
use serde_json::value::RawValue;
use steerage_model::Key;

/// A watch event. Objects stay text.
#[derive(Debug)]
pub(super) enum Line<'a> {
    /// An object was added or changed.
    Applied(&'a str),
    /// An object was deleted, or no longer matches the selectors.
    Deleted(&'a str),
    /// No event up to this version is outstanding.
    Bookmark(&'a str),
    /// The API server ends the watch.
    Error {
        /// The HTTP status code.
        code: u16,
        /// The message for users.
        message: String,
    },
}

/// Why a line is unreadable.
#[derive(Debug, thiserror::Error)]
pub(super) enum LineError {
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    #[error("unknown type of event `{0}`")]
    Type(String),
}

#[derive(Deserialize)]
struct Envelope<'a> {
    #[serde(rename = "type", borrow)]
    kind: Cow<'a, str>,
    #[serde(borrow)]
    object: &'a RawValue,
}

#[derive(Deserialize)]
struct Status {
    #[serde(default)]
    code: u16,
    #[serde(default)]
    message: String,
}

impl<'a> Line<'a> {
    pub(super) fn read(line: &'a [u8]) -> Result<Self, LineError> {
        let Envelope { kind, object } = serde_json::from_slice(line)?;
        match kind.as_ref() {
            "ADDED" | "MODIFIED" => Ok(Self::Applied(object.get())),
            "DELETED" => Ok(Self::Deleted(object.get())),
            "BOOKMARK" => Ok(Self::Bookmark(object.get())),
            "ERROR" => {
                let Status { code, message } = serde_json::from_str(object.get())?;
                Ok(Self::Error { code, message })
            }
            other => Err(LineError::Type(other.to_owned())),
        }
    }
}

/// Name and version of an object.
#[derive(Debug, Default, Deserialize)]
pub(super) struct Head {
    metadata: HeadMeta,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct HeadMeta {
    namespace: String,
    name: String,
    resource_version: String,
}

impl Head {
    pub(super) fn read(json: &str) -> Result<Self, serde_json::Error> {
        serde_json::from_str(json)
    }

    pub(super) fn key(&self) -> Key {
        Key::new(&self.metadata.namespace, &self.metadata.name)
    }

    pub(super) fn version(&self) -> &str {
        &self.metadata.resource_version
    }
}
