// SPDX-License-Identifier: Apache-2.0
//! Writes a request: an action, and its parameters by name. Lists count from 1.

use form_urlencoded::Serializer;

/// The version of EC2's API.
const VERSION: &str = "2016-11-15";

/// A request as a form.
pub(crate) struct Form {
    pub(crate) action: &'static str,
    parameters: Vec<(String, String)>,
}

impl Form {
    /// A request without parameters.
    pub(crate) fn new(action: &'static str) -> Self {
        let mut form = Self { action, parameters: Vec::new() };
        form.put("Action", action);
        form.put("Version", VERSION);
        form
    }

    pub(crate) fn put(&mut self, name: impl Into<String>, value: &str) {
        self.parameters.push((name.into(), value.to_owned()));
    }

    pub(crate) fn put_option(&mut self, name: impl Into<String>, value: Option<&str>) {
        if let Some(value) = value {
            self.put(name, value);
        }
    }

    pub(crate) fn put_list<T: AsRef<str>>(&mut self, name: &str, values: &[T]) {
        for (index, value) in (1..).zip(values) {
            self.put(format!("{name}.{index}"), value.as_ref());
        }
    }

    /// The body to post.
    pub(crate) fn finish(self) -> String {
        Serializer::new(String::new()).extend_pairs(self.parameters).finish()
    }
}
