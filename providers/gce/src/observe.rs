// SPDX-License-Identifier: Apache-2.0
//! Reads what exists.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use futures::future::try_join_all;
use http::Method;
use serde_json::Value;
use steerage_model::Key;
use steerage_provider_api::{Error, Owner};

use crate::client::{Call, items, list};
use crate::error::{CallError, Result};
use crate::marks;
use crate::object::{Id, Kind, last};
use crate::provider::Gce;
use crate::step::{Endpoint, get, list as list_action};
use crate::tree::Tree;

/// Resources with what they are.
pub(crate) type Found = Vec<(Id, Value)>;

impl Gce {
    /// All resources of a kind that have the marks of the cluster, or of a Service of it.
    pub(crate) async fn list_kind(&self, kind: Kind, service: Option<&Key>) -> Result<Found> {
        let config = &self.config;
        let filter = marks::filter(&config.cluster, service);
        let path = match kind {
            Kind::Group => format!("projects/{}/aggregated/networkEndpointGroups", config.project),
            kind => Id::new(kind, "").collection(config),
        };
        let call = Call::get(list_action(kind), path).with_filter(filter);
        let found = list(&*self.calls, call, if kind == Kind::Group { zonal } else { items }).await?;
        let named = found.into_iter().filter_map(|resource| {
            let name = resource.get("name")?.as_str()?.to_owned();
            let zone = resource.get("zone").and_then(Value::as_str).map(|url| last(url).to_owned());
            let zone = zone.filter(|_| kind == Kind::Group);
            Some((Id { kind, zone, name }, resource))
        });
        Ok(named.collect())
    }

    /// The same of all kinds. Firewall rules that may not be read count as none.
    pub(crate) async fn list_all(&self, service: Option<&Key>) -> Result<Found> {
        let all = Kind::ALL.map(|kind| async move {
            match self.list_kind(kind, service).await {
                Err(failure)
                    if kind == Kind::Firewall && self.config.is_shared_vpc() && failure.is_denied() =>
                {
                    Ok(Found::new())
                }
                other => other,
            }
        });
        Ok(try_join_all(all).await?.into_iter().flatten().collect())
    }

    /// The resources of the Services of this name, by owner. With `first_look`, from a list that serves the first look at all, otherwise
    /// from one that is made now, for those who ask at once.
    pub(crate) async fn read_owners(
        &self,
        service: &Key,
        first_look: bool,
    ) -> Result<BTreeMap<Owner, Tree>, Error> {
        let found = if first_look {
            let read = async { Ok::<_, Error>(Arc::new(self.list_all(None).await?)) };
            let all = self.inventory.get(steerage_provider_cloud::AfterFailure::Retry, read).await?;
            self.of_service(&all, service)
        } else {
            let (one, all) = (self.list_all(Some(service)), self.list_all(None));
            self.joined.read(one, all, |all| Some(self.of_service(all, service))).await?
        };
        let mut owners: BTreeMap<Owner, Tree> = BTreeMap::new();
        for (id, resource) in found {
            if let Some(owner) = self.owner(&resource).filter(|owner| owner.service == *service) {
                owners.entry(owner).or_default().own.insert(id, resource);
            }
        }
        Ok(owners)
    }

    fn of_service(&self, all: &[(Id, Value)], service: &Key) -> Found {
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

/// The groups of all zones in an answer, each with its zone.
fn zonal(mut answer: Value) -> Vec<Value> {
    let Some(Value::Object(scopes)) = answer.get_mut("items").map(Value::take) else { return Vec::new() };
    let mut all = Vec::new();
    for (scope, mut found) in scopes {
        let groups = found.get_mut("networkEndpointGroups").map(Value::take);
        let Some(Value::Array(groups)) = groups else { continue };
        for mut group in groups {
            group["zone"] = scope.clone().into();
            all.push(group);
        }
    }
    all
}
