// SPDX-License-Identifier: Apache-2.0
//! Who may connect to the load balancer of a refused Service. What it no longer admits leaves at once, whatever else is refused; what it
//! admits besides comes when it is accepted.

use steerage_model::Service;
use steerage_model::annotations::is_written_by_controller;
use steerage_provider_api::{AdmittedSources, Error, RequestedSources};

use super::{ReconcileError, ReconcileResult, Reconciler};
use crate::applied::AppliedState;
use crate::cluster_index::owner_of;
use crate::request_queue::ReconcileRequest;

impl Reconciler {
    /// Takes away the sources that the refused Service no longer admits. `result` is that of the rest; a failure is retried as one of the
    /// rest is. Also returns what users are told, if there is a load balancer.
    pub(super) async fn restrict_sources(
        &self,
        service: &Service,
        applied: &mut AppliedState,
        request: &ReconcileRequest,
        result: ReconcileResult,
    ) -> (ReconcileResult, Option<String>) {
        let annotations = service.annotations.iter().filter(|(name, _)| !is_written_by_controller(name));
        let requested = RequestedSources {
            ranges: service.source_ranges.clone(),
            annotations: annotations.map(|(name, value)| (name.clone(), value.clone())).collect(),
        };
        if let Some((known, told)) = &applied.restricted
            && *known == requested
            && !request.full
        {
            return (result, told_to_users(told));
        }
        applied.restricted = None;
        let told = match self.provider.restrict_sources(&owner_of(service), &requested).await {
            Ok(admitted) => Ok(admitted),
            Err(Error::Invalid { message, .. }) => Err(message),
            Err(error) => {
                let why = error.to_string();
                let told = format!(
                    "Clients from source ranges that the Service no longer has may still connect: {}. Steerage retries.",
                    why.trim_end_matches('.')
                );
                // Another failure has its own wait, and is retried too.
                let is_settled =
                    matches!(&result, Ok(_) | Err(ReconcileError::Provider(Error::Invalid { .. })));
                return (if is_settled { Err(error.into()) } else { result }, Some(told));
            }
        };
        let shown = told_to_users(&told);
        applied.restricted = Some((requested, told));
        (result, shown)
    }
}

fn told_to_users(told: &Result<Option<AdmittedSources>, String>) -> Option<String> {
    match told {
        Ok(None) => None,
        Ok(Some(admitted @ AdmittedSources::Only(_))) => Some(format!(
            "{admitted}: source ranges that the Service no longer has are removed, and those that it added wait until it is accepted."
        )),
        Ok(Some(admitted)) => Some(format!("{admitted}.")),
        Err(why) => Some(format!("Its source ranges stay as they were: {}.", why.trim_end_matches('.'))),
    }
}

#[cfg(test)]
mod tests;
