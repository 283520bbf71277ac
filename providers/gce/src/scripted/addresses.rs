// SPDX-License-Identifier: Apache-2.0
//! IPv4 addresses: which are free, who has reserved them, and who uses them.

use serde_json::{Map, Value};

use super::{Answered, SUBNETS, Store, refused, wrong};
use crate::object::{Kind, relative};

/// The place of an address: the subnet, or nothing for external ones.
pub(super) fn subnet(data: &Map<String, Value>) -> Option<&str> {
    let kind = data.get("addressType").or_else(|| data.get("loadBalancingScheme")).and_then(Value::as_str);
    (kind == Some("INTERNAL")).then(|| data.get("subnetwork").and_then(Value::as_str)).flatten().map(relative)
}

fn address(data: &Map<String, Value>) -> Option<&str> {
    data.get("IPAddress").or_else(|| data.get("address")).and_then(Value::as_str)
}

impl Store {
    fn at<'a>(&'a self, kind: Kind, of: &'a Map<String, Value>) -> impl Iterator<Item = &'a String> {
        let is_same =
            move |data: &Map<String, Value>| address(data) == address(of) && subnet(data) == subnet(of);
        let all = self.resources.iter().filter(move |(_, found)| found.kind == kind && is_same(&found.data));
        all.map(|(path, _)| path)
    }

    /// The forwarding rules that clients see at the address of a resource.
    pub(super) fn users_of_address<'a>(
        &'a self,
        of: &'a Map<String, Value>,
    ) -> impl Iterator<Item = &'a String> {
        self.at(Kind::ForwardingRule, of).filter(move |path| self.resources[*path].is_seen())
    }

    /// The forwarding rules at the address of another one.
    pub(super) fn rules_at(&self, rule: &Map<String, Value>) -> Vec<&Map<String, Value>> {
        self.at(Kind::ForwardingRule, rule).map(|path| &self.resources[path].data).collect()
    }

    /// The reservation of the address of a resource.
    pub(super) fn reservation(&self, of: &Map<String, Value>) -> Option<&Map<String, Value>> {
        self.at(Kind::Address, of).next().map(|path| &self.resources[path].data)
    }

    /// A free address. External ones are not used again at once, as a client that still has the old one could be served.
    pub(super) fn free_address(&mut self, subnet: Option<&str>) -> Answered<String> {
        let is_taken = |store: &Self, text: &str| {
            store.resources.values().any(|found| address(&found.data) == Some(text))
                || store.machines.values().any(|address| address == text)
        };
        let Some(subnet) = subnet else {
            for _ in 0..1000 {
                self.external = self.external % 1000 + 1;
                let text = format!("198.18.{}.{}", self.external / 250, self.external % 250 + 1);
                if !is_taken(self, &text) {
                    return Ok(text);
                }
            }
            return Err(wrong("there is no free external address"));
        };
        let (_, prefix) =
            SUBNETS.into_iter().find(|(path, _)| *path == subnet).ok_or_else(|| wrong(subnet))?;
        // VMs have those at the beginning.
        let mut all = (130..250).rev().map(|number| format!("{prefix}.{number}"));
        let free = all.find(|text| !is_taken(self, text));
        free.ok_or_else(|| refused(400, "ipSpaceExhausted", format!("IP space of '{subnet}' is exhausted.")))
    }
}
