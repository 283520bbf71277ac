// SPDX-License-Identifier: Apache-2.0
//! For whose Service a provider is called: namespaces take turns in the budgets of calls to a cloud. The controller says it for each call
//! of a provider, and what sends with a budget asks. No task of a provider outlives the call that it is part of, so the task knows.

use crate::Owner;

tokio::task_local! {
    static NAMESPACE: String;
}

/// Runs a call that is for this owner.
pub async fn for_owner<T>(owner: &Owner, call: impl Future<Output = T>) -> T {
    NAMESPACE.scope(owner.service.namespace().to_owned(), call).await
}

/// The namespace of the Service for which the present call is; empty if it is for none in particular, as a list.
pub fn namespace() -> String {
    NAMESPACE.try_with(Clone::clone).unwrap_or_default()
}
