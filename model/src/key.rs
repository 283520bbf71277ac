// SPDX-License-Identifier: Apache-2.0
//! The name of a namespaced object.

use std::fmt;
use std::sync::Arc;

/// Namespace and name of an object, displayed as `namespace/name`. Clones share the text: an index holds many keys of each
/// object.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key(Arc<str>);

/// Valid in neither part.
const SEPARATOR: char = '/';

impl Key {
    /// A key from its two parts.
    pub fn new(namespace: impl AsRef<str>, name: impl AsRef<str>) -> Self {
        let (namespace, name) = (namespace.as_ref(), name.as_ref());
        let mut text = String::with_capacity(namespace.len() + name.len() + SEPARATOR.len_utf8());
        text.push_str(namespace);
        text.push(SEPARATOR);
        text.push_str(name);
        Self(text.into())
    }

    /// The namespace.
    pub fn namespace(&self) -> &str {
        self.parts().0
    }

    /// The name within the namespace.
    pub fn name(&self) -> &str {
        self.parts().1
    }

    fn parts(&self) -> (&str, &str) {
        self.0.split_once(SEPARATOR).unwrap_or_default()
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn key_returns_its_parts() {
        for (namespace, name) in [("a", "b"), ("", "b"), ("kube-system", "kube-dns"), ("a", "")] {
            let key = Key::new(namespace, name);
            assert_eq!((key.namespace(), key.name()), (namespace, name));
            assert_eq!(key.to_string(), format!("{namespace}/{name}"));
        }
    }

    #[test]
    fn keys_with_the_same_letters_differ() {
        assert_ne!(Key::new("ab", "c"), Key::new("a", "bc"));
    }
}
