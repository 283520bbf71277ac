// SPDX-License-Identifier: Apache-2.0
//! What a provider tells users by an event, besides the results of calls.

use crate::Owner;

/// An event to write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProviderNotice {
    /// The object that it is about.
    pub subject: NoticeSubject,
    /// Stable, in `CamelCase`.
    pub reason: &'static str,
    /// What is wrong, what happens now, and what to do.
    pub note: String,
}

/// The object that a notice is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NoticeSubject {
    /// A Service.
    Service(Owner),
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
