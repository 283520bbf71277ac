// SPDX-License-Identifier: Apache-2.0
//! Addresses that a Service requests, and which are the user's. Pure, except for a line in the log.

use serde_json::Value;
use steerage_model::Family;
use steerage_provider_api::Error;

use crate::config::Config;
use crate::desired::{Desired, Frontend, Source};
use crate::object::{Id, Kind, relative};
use crate::options::Tier;
use crate::tree::{Tree, address_of};
use crate::{marks, reasons};

/// The reserved address of this name, or that is this address. `None` if it was not looked for yet, or if Steerage reserves it. What
/// Steerage reserved for another Service, or another cluster, is not the user's, also while no rule has it.
pub(crate) fn check_given<'a>(
    wanted: &Desired,
    frontend: &Frontend,
    key: &str,
    tree: &'a Tree,
    config: &Config,
) -> Result<Option<&'a Value>, Error> {
    let unavailable = |problem: String, advice: &str| {
        let message = format!("{problem} No load balancer is created or changed. {advice}");
        Err(Error::invalid(reasons::ADDRESS_NOT_AVAILABLE, message))
    };
    let found = match tree.given.get(key) {
        None => return Ok(None),
        Some(None) if matches!(frontend.source, Source::Literal(_, Some(_))) => return Ok(None),
        Some(None) => {
            let problem = format!("No address {key} is reserved in the region {}.", config.region);
            let command = reservation(wanted, frontend, key, config);
            return unavailable(problem, &format!("Reserve it by `{command}`, or request another one."));
        }
        Some(Some(found)) => found,
    };
    let text = |field: &str| found.get(field).and_then(Value::as_str).unwrap_or_default();
    if marks::is_of_steerage(found) && marks::owner(&config.cluster, found).as_ref() != Some(&wanted.owner) {
        let problem = format!("Steerage reserved the address {key} for another Service.");
        return unavailable(problem, "Request another address.");
    }
    let kind = if wanted.is_internal { "INTERNAL" } else { "EXTERNAL" };
    if !matches!(text("addressType"), "" | "INTERNAL" | "EXTERNAL") || text("addressType") == opposite(kind) {
        let problem =
            format!("The address {key} is {}, and the load balancer is {kind}.", text("addressType"));
        return unavailable(problem, "Request another address, or change the type of the load balancer.");
    }
    let family = address_of(found).map_or(frontend.family, Family::of);
    if family != frontend.family {
        let problem = format!("The address {key} is {family}, where the Service needs {}.", frontend.family);
        return unavailable(problem, "Request the addresses in the order of spec.ipFamilies.");
    }
    let tier = text("networkTier");
    if !wanted.is_internal && !tier.is_empty() && tier != wanted.tier.as_str() {
        let problem = format!(
            "The address {key} has the network tier {tier}, and the load balancer {}.",
            wanted.tier.as_str()
        );
        return unavailable(problem, "Request an address of the tier, or set cloud.google.com/network-tier.");
    }
    let users = found.get("users").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str);
    // By the whole path: a rule in another region or project may have the name.
    // Also one that is wanted and was deleted a moment ago, as the address may still name it.
    let present = tree.of_kind(Kind::ForwardingRule).map(|(id, _)| id);
    let own: Vec<&Id> = present.chain(wanted.frontends.iter().flat_map(|of| of.rules.keys())).collect();
    let is_own = |user: &&str| own.iter().any(|id| id.path(config) == relative(user));
    if let Some(user) = users.into_iter().find(|user| !is_own(user)) {
        // Another tenant may have it, whose names are not this one's business.
        tracing::info!(service = %wanted.owner.service, address = key, user = relative(user), "requested address is in use");
        let problem = format!("The address {key} is in use by something else than this Service.");
        return unavailable(
            problem,
            "Request another address, or free this one: the controller's log says what uses it.",
        );
    }
    Ok(Some(found))
}

/// The command that reserves an address.
fn reservation(wanted: &Desired, frontend: &Frontend, key: &str, config: &Config) -> String {
    let what = match &frontend.source {
        Source::Literal(address, _) => format!("NAME --addresses={address}"),
        Source::Own(..) | Source::Name(_) => key.to_owned(),
    };
    let (project, region) = (&config.project, &config.region);
    let mut command = format!("gcloud compute addresses create {what} --project={project} --region={region}");
    // External IPv4 addresses are of no subnet.
    let subnet = frontend.rules.values().find_map(|rule| rule.get("subnetwork").and_then(Value::as_str));
    if let Some(subnet) = subnet {
        command.push_str(" --subnet=");
        command.push_str(relative(subnet));
    }
    command.push_str(match (wanted.is_internal, frontend.family) {
        // Rules for TCP and UDP have the same address.
        (true, Family::V4) => " --purpose=SHARED_LOADBALANCER_VIP",
        (true, Family::V6) => " --ip-version=IPV6",
        (false, Family::V4) if wanted.tier == Tier::Standard => " --network-tier=STANDARD",
        (false, Family::V4) => "",
        (false, Family::V6) => " --ip-version=IPV6 --endpoint-type=NETLB",
    });
    command
}

fn opposite(kind: &str) -> &'static str {
    if kind == "INTERNAL" { "EXTERNAL" } else { "INTERNAL" }
}

#[cfg(test)]
mod tests;
