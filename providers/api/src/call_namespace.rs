// SPDX-License-Identifier: Apache-2.0
//! The namespace for which a provider is called. The controller sets it for each call of a provider, and the budgets of requests to a cloud
//! read it, because namespaces take turns there. It is local to the task: a provider sends all requests of a call from the task in which it
//! was called. Calls for no Service have the empty namespace, and parts of calls for which others wait have [`ALL`]: both take turns as a
//! namespace of their own.

use crate::Owner;

/// The key of requests for which calls of several namespaces wait. It is no valid name of a namespace.
pub const ALL: &str = "*";

tokio::task_local! {
    static NAMESPACE: String;
}

/// Runs a call that is for this owner.
pub async fn for_owner<T>(owner: &Owner, call: impl Future<Output = T>) -> T {
    NAMESPACE.scope(owner.service.namespace().to_owned(), call).await
}

/// Runs a part of a call for which others wait, such as a list: it must not wait for the turn of its own namespace, which may have many
/// requests.
pub async fn for_all<T>(call: impl Future<Output = T>) -> T {
    NAMESPACE.scope(ALL.to_owned(), call).await
}

/// That of the present call.
pub fn current() -> String {
    NAMESPACE.try_with(Clone::clone).unwrap_or_default()
}
