// SPDX-License-Identifier: Apache-2.0
//! Endpoints of groups: attached all or none, when the operation ends.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::operations::Effect;
use super::{Answered, Store, not_found, not_ready, refused, wrong};
use crate::client::Call;
use crate::object::Kind;
use crate::object::last;

/// Endpoints of one request.
const AT_ONCE: usize = 500;

impl Store {
    /// The address of a VM as an endpoint of a group.
    pub(super) fn check_endpoint(
        &self,
        group: &str,
        name: &str,
        address: Option<&String>,
    ) -> Answered<String> {
        let zone = group.rsplitn(3, '/').last().unwrap_or_default();
        let path = format!("{zone}/instances/{name}");
        let own = self.machines.get(&path).ok_or_else(|| not_found(&path))?;
        match address {
            Some(other) if other != own => {
                let why = format!("Specified IP address {other} doesn't belong to the instance {name}.");
                Err(refused(
                    400,
                    "invalid",
                    format!("Invalid value for field 'resource.ipAddress': '{other}'. {why}"),
                ))
            }
            _ => Ok(own.clone()),
        }
    }

    pub(super) fn attach(&mut self, call: &Call, path: &str) -> Answered {
        let id = self.usable(path)?;
        let mut endpoints = BTreeMap::new();
        for (name, address) in requested(call)? {
            let address = self.check_endpoint(path, &name, address.as_ref())?;
            endpoints.insert(name, address);
        }
        let takes = self.next_time(Kind::Group);
        Ok(self.begin("attachNetworkEndpoints", path, takes, Effect::Attach(id, endpoints)))
    }

    pub(super) fn detach(&mut self, call: &Call, path: &str) -> Answered {
        let id = self.usable(path)?;
        let names: BTreeSet<String> = requested(call)?.into_keys().collect();
        let present = &self.resources[path].endpoints;
        if let Some(missing) = names.iter().find(|name| !present.contains_key(*name)) {
            let why = "Specified network endpoint is not in the network endpoint group.";
            let message = format!("Invalid value for field 'resource.networkEndpoints': '{missing}'. {why}");
            return Err(refused(400, "invalid", message));
        }
        let takes = self.next_time(Kind::Group);
        Ok(self.begin("detachNetworkEndpoints", path, takes, Effect::Detach(id, names)))
    }

    fn usable(&self, path: &str) -> Answered<u64> {
        let found = self.seen(path)?;
        if found.is_leaving || !found.is_ready {
            return Err(not_ready(path));
        }
        Ok(found.id)
    }
}

/// The endpoints of a request: addresses by VM.
fn requested(call: &Call) -> Answered<BTreeMap<String, Option<String>>> {
    let body = call.body.as_ref().and_then(Value::as_object);
    let all = body.filter(|body| body.len() == 1).and_then(|body| body.get("networkEndpoints")?.as_array());
    let all = all.filter(|all| (1..=AT_ONCE).contains(&all.len()));
    let mut found = BTreeMap::new();
    for endpoint in all.ok_or_else(|| wrong("resource.networkEndpoints"))? {
        let mut fields = endpoint.as_object().into_iter().flat_map(|fields| fields.keys());
        if !fields.all(|field| field == "instance" || field == "ipAddress") {
            return Err(wrong(format!("resource.networkEndpoints: {endpoint}")));
        }
        let name = endpoint["instance"].as_str().map(last).unwrap_or_default().to_owned();
        let address = endpoint["ipAddress"].as_str().map(str::to_owned);
        if name.is_empty() || found.insert(name, address).is_some() {
            return Err(wrong(format!("resource.networkEndpoints: {endpoint}")));
        }
    }
    Ok(found)
}
