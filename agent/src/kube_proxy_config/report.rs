// SPDX-License-Identifier: Apache-2.0
//! Collects what becomes of each field.

use std::fmt::Display;
use std::time::Duration;

use super::{ConfigError, Difference, Treatment};

/// The report, in the order of the file's fields.
#[derive(Debug, Default)]
pub(super) struct Report(pub(super) Vec<Difference>);

impl Report {
    pub(super) fn add(
        &mut self,
        treatment: Treatment,
        field: impl Into<String>,
        value: impl Display,
        text: impl Into<String>,
    ) {
        let value = match value.to_string() {
            empty if empty.is_empty() => "\"\"".to_owned(),
            value => value,
        };
        self.0.push(Difference { treatment, field: field.into(), value, text: text.into() });
    }

    /// Reports a field that has no meaning here, if it says something.
    pub(super) fn unused<T: Display>(&mut self, field: &str, value: Option<T>, why: &str) {
        if let Some(value) = value.map(|value| value.to_string()).filter(|value| says_something(value)) {
            self.add(Treatment::Unused, field, value, why);
        }
    }

    /// Reports a field that the agent cannot follow, if it says something.
    pub(super) fn differs<T: Display>(&mut self, field: &str, value: Option<T>, instead: &str) {
        if let Some(value) = value.map(|value| value.to_string()).filter(|value| says_something(value)) {
            self.add(Treatment::Differs, field, value, instead);
        }
    }
}

/// kubeadm writes fields that nobody set as empty, zero, false or null.
fn says_something(value: &str) -> bool {
    !["", "0", "0s", "false", "null", "[]", "{}"].contains(&value)
}

pub(super) fn invalid(field: &'static str, value: &str, problem: &'static str) -> ConfigError {
    ConfigError::Invalid { field, value: value.to_owned(), problem }
}

/// Reads a duration as Kubernetes writes it.
pub(super) fn duration(field: &'static str, text: &str) -> Result<Duration, ConfigError> {
    steerage_process::duration::parse(text)
        .map_err(|_| invalid(field, text, "not a duration such as 30s, or longer than a year"))
}
