// SPDX-License-Identifier: Apache-2.0
//! The namespace for which a provider is called. The controller sets it for each call of a provider, and the budgets of requests to a cloud
//! read it, because namespaces take turns there. It is local to the task: a provider sends all requests of a call from the task in which it
//! was called. Calls for no Service, such as lists of all, have the empty namespace, which takes turns like any other.

use crate::Owner;

tokio::task_local! {
    static NAMESPACE: String;
}

/// Runs a call that is for this owner.
pub async fn for_owner<T>(owner: &Owner, call: impl Future<Output = T>) -> T {
    NAMESPACE.scope(owner.service.namespace().to_owned(), call).await
}

/// Runs a part of a call that is for all who wait for it, such as a list.
pub async fn for_all<T>(call: impl Future<Output = T>) -> T {
    NAMESPACE.scope(String::new(), call).await
}

/// That of the present call.
pub fn current() -> String {
    NAMESPACE.try_with(Clone::clone).unwrap_or_default()
}
