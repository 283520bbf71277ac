// SPDX-License-Identifier: Apache-2.0
//! Reads: lists with their filters, VMs, and resources as clients see them.

use http::Method;
use serde_json::{Map, Value, json};

use super::{Answered, NETWORK, PROJECT, SUBNETS, Store, ZONES, expect, wrong};
use crate::client::Call;
use crate::object::{Kind, last, url};

impl Store {
    /// A resource as clients see it.
    pub(super) fn shown(&self, path: &str) -> Value {
        let Some(found) = self.resources.get(path) else { return Value::Null };
        let mut data = found.data.clone();
        match found.kind {
            Kind::Group => drop(data.insert("size".to_owned(), found.endpoints.len().into())),
            Kind::Address => {
                let users: Vec<String> = self.users_of_address(&data).map(|path| url(path)).collect();
                let status = match (found.is_ready, users.is_empty()) {
                    (false, _) => "RESERVING",
                    (true, true) => "RESERVED",
                    (true, false) => "IN_USE",
                };
                data.insert("status".to_owned(), status.into());
                if !users.is_empty() {
                    data.insert("users".to_owned(), users.into());
                }
            }
            _ => {}
        }
        Value::from(data)
    }

    fn of(&self, kind: Kind) -> impl Iterator<Item = &String> {
        self.resources
            .iter()
            .filter(move |(_, found)| found.kind == kind && found.is_seen())
            .map(|(path, _)| path)
    }

    pub(super) fn list(&self, call: &Call, kind: Kind) -> Answered {
        let filter = filter(call, &[])?;
        let all = self.of(kind).filter(|path| path.starts_with(&format!("{}/", call.path)));
        let mut items = Vec::new();
        for found in all.map(|path| self.shown(path)) {
            if passes(filter.as_deref(), &found)? {
                items.push(found);
            }
        }
        Ok(if items.is_empty() { json!({}) } else { json!({ "items": items }) })
    }

    pub(super) fn aggregated(&self, call: &Call, collection: &str) -> Answered {
        let (action, all): (_, Vec<(String, Value)>) = match collection {
            "operations" => ("globalOperations.aggregatedList", self.all_operations().collect()),
            "networkEndpointGroups" => {
                let place = |path: &String| path.rsplitn(3, '/').last().unwrap_or_default().to_owned();
                let groups = self.of(Kind::Group).map(|path| (place(path), self.shown(path)));
                ("networkEndpointGroups.aggregatedList", groups.collect())
            }
            _ => return Err(wrong("there is no such list")),
        };
        expect(call, action, &Method::GET)?;
        let filter = filter(call, &[])?;
        let scopes = ["global".to_owned(), "regions/r".to_owned()].into_iter();
        let scopes = scopes.chain(ZONES.iter().map(|zone| format!("zones/{zone}")));
        let warning =
            json!({ "warning": { "code": "NO_RESULTS_ON_PAGE", "message": "There are no results." } });
        let mut items: Map<String, Value> = scopes.map(|scope| (scope, warning.clone())).collect();
        for (place, item) in all {
            if !passes(filter.as_deref(), &item)? {
                continue;
            }
            let scope = place.strip_prefix("projects/p/").unwrap_or_default();
            let entry = items.entry(scope).or_insert_with(|| json!({}));
            if entry.get(collection).is_none() {
                *entry = json!({ collection: [] });
            }
            entry[collection].as_array_mut().unwrap().push(item);
        }
        Ok(json!({ "items": items }))
    }

    pub(super) fn instances(&self, call: &Call, place: &str) -> Answered {
        expect(call, "instances.list", &Method::GET)?;
        let fields = "items(name,networkInterfaces(network,networkIP,subnetwork),tags/items),nextPageToken";
        if filter(call, &[fields])?.is_some() {
            return Err(wrong("lists of VMs have no filter here"));
        }
        let prefix = format!("{place}/instances/");
        let all = self.machines.iter().filter(|(path, _)| path.starts_with(&prefix));
        let items: Vec<Value> = all
            .map(|(path, address)| {
                let interface =
                    json!({ "network": url(NETWORK), "subnetwork": url(SUBNETS[0].0), "networkIP": address });
                json!({ "name": last(path), "networkInterfaces": [interface], "tags": { "items": ["node"] } })
            })
            .collect();
        Ok(if items.is_empty() { json!({}) } else { json!({ "items": items }) })
    }

    pub(super) fn list_endpoints(&self, path: &str) -> Answered {
        let found = self.seen(path)?;
        let zone = path.rsplitn(3, '/').last().unwrap_or_default();
        let endpoint = |(name, address): (&String, &String)| {
            let instance = url(&format!("{zone}/instances/{name}"));
            json!({ "networkEndpoint": { "instance": instance, "ipAddress": address } })
        };
        let items: Vec<Value> = found.endpoints.iter().map(endpoint).collect();
        Ok(if items.is_empty() { json!({}) } else { json!({ "items": items }) })
    }

    /// The endpoints of a group, each for each forwarding rule.
    pub(super) fn health(&self, call: &Call, path: &str) -> Answered {
        let group = call.body.as_ref().and_then(|body| body["group"].as_str()).unwrap_or_default();
        let found = self.seen(path)?;
        let backends = found.data.get("backends").and_then(Value::as_array).into_iter().flatten();
        let group = self.resolve(group, &[Kind::Group])?;
        if !backends.into_iter().any(|backend| backend["group"] == json!(url(&group))) {
            return Err(super::refused(400, "invalid", "The group is no backend of the backend service."));
        }
        let rules = self.users(path).filter(|user| self.resources[*user].kind == Kind::ForwardingRule);
        let zone = format!("{PROJECT}/zones/{}", group.split('/').nth(3).unwrap_or_default());
        let mut all = Vec::new();
        for rule in rules {
            for (name, address) in &self.resources[&group].endpoints {
                let instance = url(&format!("{zone}/instances/{name}"));
                all.push(json!({
                    "healthState": "HEALTHY", "instance": instance, "ipAddress": address, "forwardingRule": url(rule),
                }));
            }
        }
        Ok(if all.is_empty() { json!({}) } else { json!({ "healthStatus": all }) })
    }
}

/// The filter of a list. No list has other parameters than these values of `fields`.
fn filter(call: &Call, fields: &[&str]) -> Answered<Option<String>> {
    let mut filter = None;
    for (name, value) in &call.query {
        match *name {
            "filter" if filter.is_none() => filter = Some(value.clone()),
            "fields" if fields.contains(&value.as_str()) => {}
            _ => return Err(wrong(format!("the parameter {name}={value}"))),
        }
    }
    Ok(filter)
}

/// Whether an item passes: `FIELD eq 'EXPRESSION'` or `FIELD ne 'EXPRESSION'`, of RE2 only `.*` and `|`.
fn passes(filter: Option<&str>, item: &Value) -> Answered<bool> {
    let Some(filter) = filter else { return Ok(true) };
    let mut words = filter.splitn(3, ' ');
    let (Some(field), Some(operator), Some(value)) = (words.next(), words.next(), words.next()) else {
        return Err(wrong(format!("the filter {filter}")));
    };
    let pattern = value.strip_prefix('\'').and_then(|value| value.strip_suffix('\''));
    let is_known = |letter: char| letter.is_ascii_alphanumeric() || "-./*|".contains(letter);
    let pattern = pattern.filter(|pattern| pattern.chars().all(is_known));
    let (Some(pattern), true) = (pattern, ["description", "name", "status", "address"].contains(&field))
    else {
        return Err(wrong(format!("the filter {filter}")));
    };
    let found = pattern.split('|').any(|one| matches(one, item[field].as_str().unwrap_or_default()));
    match operator {
        "eq" => Ok(found),
        "ne" => Ok(!found),
        _ => Err(wrong(format!("the filter {filter}"))),
    }
}

/// Whether all of the text is what the expression says, in which only `.*` is special.
fn matches(pattern: &str, text: &str) -> bool {
    let mut parts = pattern.split(".*");
    let Some(mut rest) = parts.next().and_then(|first| text.strip_prefix(first)) else { return false };
    let parts: Vec<&str> = parts.collect();
    let Some((end, middle)) = parts.split_last() else { return rest.is_empty() };
    for part in middle {
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
    }
    rest.ends_with(end)
}
