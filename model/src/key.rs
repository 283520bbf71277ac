// SPDX-License-Identifier: Apache-2.0
//! The name of a namespaced object.

use std::fmt;

/// Namespace and name of an object; displayed as `namespace/name`, as `kubectl` does.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    /// The namespace.
    pub namespace: String,
    /// The name within the namespace.
    pub name: String,
}

impl Key {
    /// A key from its two parts.
    pub fn new(namespace: impl Into<String>, name: impl Into<String>) -> Self {
        Self { namespace: namespace.into(), name: name.into() }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}
