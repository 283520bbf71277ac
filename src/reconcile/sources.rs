// SPDX-License-Identifier: Apache-2.0
//! Who may connect to the load balancer of a refused Service. What it no longer admits leaves at once, whatever else is refused; what it
//! admits besides comes when it is accepted.

use std::collections::BTreeSet;

use ipnet::IpNet;
use steerage_model::Service;
use steerage_provider_api::{AdmittedSources, Error, RequestedSources};

use super::{ReconcileError, ReconcileResult, Reconciler};
use crate::applied::AppliedState;
use crate::cluster_index::owner_of;
use crate::request_queue::ReconcileRequest;

impl Reconciler {
    /// Only what says who may connect: nothing else leads to a further call.
    fn requested_sources(&self, service: &Service) -> RequestedSources {
        let read = self.provider.source_annotations().iter();
        let annotations =
            read.filter_map(|name| Some(((*name).to_owned(), service.annotations.get(*name)?.clone())));
        RequestedSources { ranges: service.source_ranges.clone(), annotations: annotations.collect() }
    }

    /// The Service is not refused. `is_in_place` if its sources are what it requests.
    pub(super) fn note_accepted_sources(
        &self,
        service: &Service,
        applied: &mut AppliedState,
        is_in_place: bool,
    ) {
        (applied.restricted, applied.restriction_failure) = (None, None);
        if is_in_place {
            applied.last_sources = Some(self.requested_sources(service));
        }
    }

    /// Takes away the sources that the refused Service no longer admits. `result` is that of the rest; a failure is retried as one of the
    /// rest is. Also returns what users are told, if there is a load balancer.
    pub(super) async fn restrict_sources(
        &self,
        service: &Service,
        applied: &mut AppliedState,
        request: &ReconcileRequest,
        result: ReconcileResult,
    ) -> (ReconcileResult, Option<String>) {
        let requested = self.requested_sources(service);
        if let Some((known, told)) = &applied.restricted
            && *known == requested
            && !request.full
        {
            return (result, told_to_users(told));
        }
        if let Some((known, _)) = applied.restricted.take() {
            applied.last_sources = Some(known);
        }
        let told = match self.provider.restrict_sources(&owner_of(service), &requested).await {
            Ok(admitted) => Ok(admitted),
            Err(Error::Invalid { message, .. }) => Err(message),
            Err(error) => {
                // The first reason of a row: others would write the status, and publish an event, at every try.
                let reason = *applied.restriction_failure.get_or_insert(error.reason());
                let told = applied.last_sources.as_ref().is_none_or(|last| loses_any(last, &requested)).then(|| {
                    format!(
                        "Clients from source ranges that the Service no longer has may still connect: the provider does not remove \
                         them ({reason}). Steerage retries."
                    )
                });
                // Another failure has its own wait, and is retried too.
                let is_settled =
                    matches!(&result, Ok(_) | Err(ReconcileError::Provider(Error::Invalid { .. })));
                return (if is_settled { Err(error.into()) } else { result }, told);
            }
        };
        applied.restriction_failure = None;
        let shown = told_to_users(&told);
        applied.restricted = Some((requested, told));
        (result, shown)
    }
}

/// Whether clients may lose access by the change, as far as ranges say.
fn loses_any(last: &RequestedSources, requested: &RequestedSources) -> bool {
    let is_open = requested.ranges.is_empty() && requested.annotations.is_empty();
    let has_all = || {
        let ranges: BTreeSet<&IpNet> = requested.ranges.iter().collect();
        !last.ranges.is_empty() && last.ranges.iter().all(|range| ranges.contains(range))
    };
    last != requested && !is_open && !(last.annotations == requested.annotations && has_all())
}

fn told_to_users(told: &Result<Option<AdmittedSources>, String>) -> Option<String> {
    match told {
        Ok(None) => None,
        Ok(Some(admitted @ AdmittedSources::Only(_))) => Some(format!(
            "{admitted}: source ranges that the Service no longer has are removed, and those that it added wait until it is accepted."
        )),
        Ok(Some(admitted @ AdmittedSources::Wider(_))) => Some(format!(
            "{admitted}: the ranges that it requests have no room beside the present ones. Merge source ranges."
        )),
        Ok(Some(admitted)) => Some(format!("{admitted}.")),
        Err(why) => Some(format!("Its source ranges stay as they were: {}.", why.trim_end_matches('.'))),
    }
}

#[cfg(test)]
mod tests;
