// SPDX-License-Identifier: Apache-2.0
//! What a provider tells users by an event, besides the results of calls.

use crate::Owner;

/// An event to write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProviderNotice {
    /// The object that it is about.
    pub subject: NoticeSubject,
    /// Whether something is wrong. Otherwise it is what users wait for.
    pub is_warning: bool,
    /// What the provider did: machine-readable, in `CamelCase`.
    pub action: &'static str,
    /// Stable, in `CamelCase`.
    pub reason: &'static str,
    /// What is wrong or has happened, what happens now, and what to do.
    pub note: String,
}

/// The object that a notice is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NoticeSubject {
    /// A Service.
    Service(Owner),
    /// A node, by name.
    Node(String),
    /// An object of a kind that only the provider knows.
    Object {
        /// Such as `steerage.dev/v1alpha1`.
        api_version: &'static str,
        /// Such as `AddressPool`.
        kind: &'static str,
        /// Its namespace.
        namespace: String,
        /// Its name.
        name: String,
        /// Its UID.
        uid: String,
    },
}
