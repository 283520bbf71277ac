// SPDX-License-Identifier: Apache-2.0
//! Reads what exists.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use futures::future::try_join_all;
use http::Method;
use serde_json::Value;
use steerage_model::Key;
use steerage_provider_api::{Error, Owner};
use steerage_provider_cloud::Joined;
use tokio::time::Instant;

use crate::client::{Call, by_scope, items, list};
use crate::error::{CallError, Result};
use crate::marks;
use crate::object::{Id, Kind, last};
use crate::provider::Gce;
use crate::step::{Endpoint, get, list as list_action};
use crate::tree::Tree;

/// Resources with what they are.
pub(crate) type Found = Vec<(Id, Value)>;

/// All that the cluster has, or a Service of it, at one time.
#[derive(Debug)]
pub(crate) struct Inventory {
    /// When it began to be read: it has all that was there before.
    pub(crate) began: Instant,
    /// Whether it has all that Services share, and all that refers to that.
    pub(crate) has_shared: bool,
    pub(crate) found: Found,
}

/// Reads of single resources, by kind.
#[derive(Debug, Default)]
pub(crate) struct JoinedKinds([Joined<(Id, Value), CallError>; Kind::ALL.len()]);

impl JoinedKinds {
    fn of(&self, kind: Kind) -> &Joined<(Id, Value), CallError> {
        &self.0[kind as usize]
    }
}

impl Gce {
    /// The items of an aggregated list, each with its place. Fails if a place of the region could not be read: what is there would seem
    /// to be gone.
    pub(crate) async fn list_places(&self, call: Call, field: &str) -> Result<Vec<(String, Value)>> {
        let (action, region) = (call.action, &self.config.region);
        let is_needed = |place: &String| {
            let name = last(place);
            let zone = name.strip_prefix(region.as_str());
            name == "global" || zone.is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
        };
        let of_page = |answer| {
            let page = by_scope(answer, field);
            match page.unreachable.iter().find(|place| is_needed(place)) {
                Some(place) => Err(CallError::unusable(action, format!("GCE cannot read {place}"))),
                None => Ok(page.found),
            }
        };
        list(&*self.calls, call, of_page).await
    }

    /// All resources of a kind that have the marks of the cluster, or of a Service of it.
    pub(crate) async fn list_kind(&self, kind: Kind, service: Option<&Key>) -> Result<Found> {
        let config = &self.config;
        let filter = marks::filter(&config.cluster, service);
        let path = match kind {
            Kind::Group => format!("projects/{}/aggregated/networkEndpointGroups", config.project),
            kind => Id::new(kind, "").collection(config),
        };
        let call = Call::get(list_action(kind), path).with_filter(filter);
        let found: Vec<(Option<String>, Value)> = if kind == Kind::Group {
            let found = self.list_places(call, "networkEndpointGroups").await?;
            found.into_iter().map(|(place, group)| (Some(last(&place).to_owned()), group)).collect()
        } else {
            list(&*self.calls, call, items).await?.into_iter().map(|resource| (None, resource)).collect()
        };
        let named = found.into_iter().filter_map(|(zone, resource)| {
            let name = resource.get("name")?.as_str()?.to_owned();
            Some((Id { kind, zone, name }, resource))
        });
        Ok(named.collect())
    }

    /// The same of all kinds. Firewall rules that may not be read count as none.
    pub(crate) async fn list_all(&self, service: Option<&Key>) -> Result<Found> {
        let all = Kind::ALL.map(|kind| async move {
            let found = self.list_kind(kind, service).await;
            if kind != Kind::Firewall || !self.config.is_shared_vpc() {
                return found;
            }
            let is_denied = found.as_ref().is_err_and(CallError::is_denied);
            if is_denied || found.is_ok() {
                self.lacks_firewalls.store(is_denied, Ordering::Relaxed);
            }
            if is_denied { Ok(Found::new()) } else { found }
        });
        Ok(try_join_all(all).await?.into_iter().flatten().collect())
    }

    /// A list of everything for first looks, which is at most 30s old. Operations of which nothing is remembered have to be settled.
    pub(crate) async fn inventory(&self) -> Result<Arc<Inventory>, Error> {
        let read = async {
            let began = Instant::now();
            Ok::<_, Error>(Arc::new(Inventory { began, has_shared: true, found: self.list_all(None).await? }))
        };
        self.inventory.get(steerage_provider_cloud::AfterFailure::Retry, read).await
    }

    /// The resources of the Services of this name, by owner. With `first_look`, from a list that serves the first look at all, otherwise
    /// from one that is made now, for those who ask at once.
    pub(crate) async fn read_owners(
        &self,
        service: &Key,
        first_look: bool,
    ) -> Result<BTreeMap<Owner, Tree>, Error> {
        let found = if first_look {
            self.of_service(&self.inventory().await?.found, service)
        } else {
            let (one, all) = (self.list_all(Some(service)), self.list_all(None));
            self.joined.read(one, all, |all| Some(self.of_service(all, service))).await?
        };
        Ok(self.by_owner(found, service))
    }

    /// The resources in a list that are of the Services of this name, by owner.
    pub(crate) fn by_owner(&self, found: Found, service: &Key) -> BTreeMap<Owner, Tree> {
        let mut owners: BTreeMap<Owner, Tree> = BTreeMap::new();
        for (id, resource) in found {
            if let Some(owner) = self.owner(&resource).filter(|owner| owner.service == *service) {
                owners.entry(owner).or_default().own.insert(id, resource);
            }
        }
        owners
    }

    pub(crate) fn of_service(&self, all: &[(Id, Value)], service: &Key) -> Found {
        let is_its = |found: &Value| self.owner(found).is_some_and(|owner| owner.service == *service);
        all.iter().filter(|(_, found)| is_its(found)).cloned().collect()
    }

    pub(crate) fn owner(&self, resource: &Value) -> Option<Owner> {
        marks::owner(&self.config.cluster, resource)
    }

    /// The endpoints of groups.
    pub(crate) async fn read_members(
        &self,
        groups: impl Iterator<Item = &Id>,
    ) -> Result<BTreeMap<Id, BTreeSet<Endpoint>>> {
        let all = groups.map(|id| async move {
            let path = format!("{}/listNetworkEndpoints", id.path(&self.config));
            let action = "networkEndpointGroups.listNetworkEndpoints";
            let call = Call::new(Method::POST, action, path).with_body(serde_json::json!({}));
            let found = match list(&*self.calls, call, items).await {
                // It is being deleted.
                Err(failure) if failure.is_not_found() => Vec::new(),
                other => other?,
            };
            Ok::<_, CallError>((id.clone(), found.iter().filter_map(endpoint).collect()))
        });
        Ok(try_join_all(all).await?.into_iter().collect())
    }

    /// One resource; `None` if it does not exist.
    pub(crate) async fn read(&self, id: &Id) -> Result<Option<Value>> {
        match self.calls.send(Call::get(get(id.kind), id.path(&self.config))).await {
            Ok(found) => Ok(Some(found)),
            Err(failure) if failure.is_not_found() => Ok(None),
            Err(failure) => Err(failure),
        }
    }

    /// The same for those who ask at once, by one list.
    pub(crate) async fn read_joined(&self, id: &Id) -> Result<Option<Value>> {
        let (one, all) = (self.read(id), self.list_kind(id.kind, None));
        let pick = |all: &[(Id, Value)]| {
            let found = all.iter().find(|(of, _)| of == id);
            found.map(|(_, found)| Some(found.clone()))
        };
        self.joined_kinds.of(id.kind).read(one, all, pick).await
    }

    /// A reserved address of the region, by its name or the address.
    pub(crate) async fn read_address(&self, key: &str) -> Result<Option<Value>> {
        if key.parse::<std::net::IpAddr>().is_err() {
            return self.read(&Id::new(Kind::Address, key)).await;
        }
        let path = Id::new(Kind::Address, "").collection(&self.config);
        let call = Call::get("addresses.list", path).with_filter(format!("address eq '{key}'"));
        let found = list(&*self.calls, call, items).await?;
        let address = crate::compare::address(key);
        Ok(found.into_iter().find(|found| crate::tree::address_of(found) == address))
    }
}

/// A group's endpoint.
fn endpoint(found: &Value) -> Option<Endpoint> {
    let endpoint = found.get("networkEndpoint")?;
    let text = |field: &str| endpoint.get(field).and_then(Value::as_str);
    let address = text("ipAddress").unwrap_or_default().to_owned();
    Some(Endpoint { instance: last(text("instance")?).to_owned(), address })
}

#[cfg(test)]
mod tests {
    use async_trait::async_trait;
    use serde_json::json;

    use super::*;
    use crate::client::Calls;
    use crate::config::tests::config;

    /// Cannot read this place.
    struct Partial(&'static str);

    #[async_trait]
    impl Calls for Partial {
        async fn send(&self, _: Call) -> Result<Value> {
            Ok(json!({ "items": { self.0: { "warning": { "code": "UNREACHABLE" } } } }))
        }
    }

    /// What is in a zone that GCE cannot read is not gone.
    #[tokio::test]
    async fn list_without_a_place_of_the_region_fails() {
        let region = config().region;
        for (place, is_needed) in [
            (format!("zones/{region}-b"), true),
            (format!("regions/{region}"), true),
            ("global".to_owned(), true),
            (format!("zones/{region}x-b"), false),
            ("regions/elsewhere".to_owned(), false),
        ] {
            let gce = Gce::over(config(), Arc::new(Partial(place.clone().leak())));
            let listed = gce.list_kind(Kind::Group, None).await;
            assert_eq!(listed.is_err(), is_needed, "{place}");
        }
    }
}
