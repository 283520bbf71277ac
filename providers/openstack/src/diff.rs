// SPDX-License-Identifier: Apache-2.0
//! The changes that turn the load balancer in place into the wanted one, in an order that serves clients after each. Pure.

use ipnet::IpNet;
use serde_json::{Map, Value, json};
use steerage_provider_api::{Error, Owner};
use steerage_provider_cloud::shared::port_in_use;

use crate::adoption::is_part;
use crate::desired::{Desired, Members, WantedListener, WantedPool, set_limits};
use crate::marks;
use crate::pools::{has_old_checks, renewed};
use crate::reasons;
use crate::state::Tree;
use crate::step::Step;
use crate::types::{Limits, Listener, Member, Monitor, Pool, Provisioning};

/// All changes that can be told from what is in place. What is created first shows more: after each change, they are computed again.
///
/// Clients that are no longer admitted go first. Then members of all pools, so that no port waits for another one: first the pool after
/// `last`, whose members changed last. Then the rest.
pub(crate) fn diff(
    owner: &Owner,
    tree: &Tree,
    wanted: &Desired,
    last: Option<&str>,
) -> Result<Vec<Step>, Error> {
    for listener in &wanted.listeners {
        let present = listener_of(tree, listener);
        if let Some(foreign) =
            present.filter(|present| !is_part(owner, &tree.balancer, &present.name, &present.tags))
        {
            return Err(match &wanted.shared {
                Some(shared) if marks::is_of_some_service(&foreign.tags, &tree.balancer.tags) => {
                    port_in_use(shared, foreign.protocol_port)
                }
                _ => not_owned(foreign),
            });
        }
    }
    let mut steps: Vec<Step> = wanted
        .listeners
        .iter()
        .filter_map(|listener| {
            narrowing(
                listener_of(tree, listener).filter(|present| present.protocol == listener.protocol)?,
                listener,
            )
        })
        .collect();
    let mut rest = Vec::new();
    let mut changes = Map::new();
    if let Some(tags) = marks::merged(&tree.balancer.tags, &wanted.tags) {
        changes.insert("tags".to_owned(), tags.into());
    }
    if !tree.balancer.admin_state_up {
        changes.insert("admin_state_up".to_owned(), true.into());
    }
    if !changes.is_empty() {
        rest.push(Step::UpdateBalancer { id: tree.balancer.id.clone(), changes: changes.into() });
    }
    for listener in after(&wanted.listeners, last, |listener| &listener.pool.name) {
        let Some(pool) = pool_of(owner, tree, listener) else { continue };
        let of_pool = pool_steps(pool, &listener.pool, &wanted.part_tags);
        let has_members = of_pool.iter().any(|step| matches!(step, Step::SetMembers { .. }));
        if has_members { steps.extend(of_pool) } else { rest.extend(of_pool) }
    }
    for listener in &wanted.listeners {
        let Some(pool) = pool_of(owner, tree, listener) else {
            let mut body = listener.pool.body();
            body["loadbalancer_id"] = tree.balancer.id.clone().into();
            rest.push(Step::CreatePool { name: listener.pool.name.clone(), body });
            continue;
        };
        match listener_of(tree, listener) {
            // It has Steerage's tag, and another protocol, which Octavia cannot change: it goes first.
            Some(present) if present.protocol != listener.protocol => {}
            None => {
                let mut body = listener.body(&wanted.part_tags);
                body["loadbalancer_id"] = tree.balancer.id.clone().into();
                body["default_pool_id"] = pool.id.clone().into();
                rest.push(Step::CreateListener { port: port(&listener.protocol, listener.port), body });
            }
            Some(present) => {
                let changes = listener_changes(present, listener, pool, &wanted.part_tags);
                if !changes.is_empty() {
                    rest.push(Step::UpdateListener {
                        id: present.id.clone(),
                        port: port(&listener.protocol, listener.port),
                        changes: changes.into(),
                    });
                }
            }
        }
    }
    steps.extend(rest);
    steps.extend(removals(owner, tree, wanted));
    Ok(steps)
}

/// The items in their order, beginning after the one with this name.
pub(crate) fn after<'a, T>(
    items: &'a [T],
    last: Option<&str>,
    name: impl Fn(&'a T) -> &'a String,
) -> impl Iterator<Item = &'a T> {
    let is_last = |item| last.is_some_and(|last| name(item) == last);
    let start = items.iter().position(is_last).map_or(0, |index| index + 1);
    let (before, from) = items.split_at(start);
    from.iter().chain(before)
}

/// The change of a listener that admits clients who are no longer admitted.
fn narrowing(present: &Listener, wanted: &WantedListener) -> Option<Step> {
    is_narrowed(present, wanted).then(|| Step::UpdateListener {
        id: present.id.clone(),
        port: port(&wanted.protocol, wanted.port),
        changes: json!({ "allowed_cidrs": wanted.allowed_cidrs }),
    })
}

fn is_narrowed(present: &Listener, wanted: &WantedListener) -> bool {
    let nets = |texts: &[String]| texts.iter().filter_map(|text| text.parse().ok()).collect::<Vec<IpNet>>();
    let admitted = nets(present.allowed_cidrs.as_deref().unwrap_or_default());
    let wanted = nets(&wanted.allowed_cidrs);
    let is_covered = |range: &IpNet| wanted.iter().any(|wide| wide.contains(range));
    !wanted.is_empty() && (admitted.is_empty() || !admitted.iter().all(is_covered))
}

fn port(protocol: &impl std::fmt::Display, port: u16) -> String {
    format!("{protocol} {port}")
}

fn listener_of<'a>(tree: &'a Tree, wanted: &WantedListener) -> Option<&'a Listener> {
    tree.listeners
        .iter()
        .find(|listener| l4(&listener.protocol) == wanted.protocol && listener.protocol_port == wanted.port)
}

/// The protocol of the port that a listener takes: an HTTP listener takes a TCP port.
pub(crate) fn l4(protocol: &str) -> &str {
    match protocol {
        "HTTP" | "HTTPS" | "TERMINATED_HTTPS" | "PROMETHEUS" => "TCP",
        other => other,
    }
}

/// The pool that a listener has, or gets; `None` if one must be created. While checks move to another port, there are two of the name.
fn pool_of<'a>(owner: &Owner, tree: &'a Tree, wanted: &WantedListener) -> Option<&'a Pool> {
    let used = listener_of(tree, wanted).and_then(|listener| listener.default_pool_id.as_ref());
    let fits = |pool: &&Pool| {
        pool.name == wanted.pool.name
            && is_part(owner, &tree.balancer, &pool.name, &pool.tags)
            && (wanted.pool.keeps_pool || !has_old_checks(pool, &wanted.pool.members))
    };
    let fitting = || tree.pools.iter().filter(fits);
    fitting().find(|pool| used == Some(&pool.id)).or_else(|| fitting().next())
}

fn not_owned(listener: &Listener) -> Error {
    let message = format!(
        "The load balancer has a listener on {} (ID {}) without Steerage's tag. It is not changed, and no other port of the Service is \
         changed. Delete the listener, or use another port.",
        port(&listener.protocol, listener.protocol_port),
        listener.id
    );
    Error::invalid(reasons::OBJECT_NOT_OWNED, message)
}

/// Changes of one pool. Its monitor is right before members that it has to judge are added.
fn pool_steps(pool: &Pool, wanted: &WantedPool, part_tags: &[String]) -> Vec<Step> {
    let mut steps = Vec::new();
    let mut changes = Map::new();
    if pool.lb_algorithm != wanted.algorithm || pool.provisioning_status == Provisioning::Error {
        changes.insert("lb_algorithm".to_owned(), wanted.algorithm.into());
    }
    if pool.session_persistence != wanted.persistence {
        let persistence = wanted.persistence.as_ref().map(crate::types::Persistence::body);
        changes.insert("session_persistence".to_owned(), persistence.into());
    }
    if !pool.admin_state_up {
        changes.insert("admin_state_up".to_owned(), true.into());
    }
    if let Some(tags) = marks::merged(&pool.tags, &wanted.tags) {
        changes.insert("tags".to_owned(), tags.into());
    }
    if !changes.is_empty() {
        let (id, name) = (pool.id.clone(), pool.name.clone());
        steps.push(Step::UpdatePool { id, name, changes: changes.into() });
    }
    match &pool.monitor {
        // Octavia cannot change the type.
        Some(monitor) if monitor.check.r#type != wanted.check.r#type => {
            steps.push(Step::DeleteMonitor { id: monitor.id.clone(), pool: pool.name.clone() });
        }
        Some(monitor) => {
            let changes = monitor_changes(monitor, wanted, part_tags);
            if !changes.is_empty() {
                let (id, pool) = (monitor.id.clone(), pool.name.clone());
                steps.push(Step::UpdateMonitor { id, pool, changes: changes.into() });
            }
        }
        None => {
            let mut body = wanted.monitor_body(part_tags);
            body["pool_id"] = pool.id.clone().into();
            steps.push(Step::CreateMonitor { pool: pool.name.clone(), body });
        }
    }
    steps.extend(member_step(pool, &wanted.members));
    steps
}

/// The next change of members, if one is needed: those that will be. If none of them serves yet, all that were come with them first:
/// Octavia's request names all members, and not every driver promises to add before it removes.
pub(crate) fn member_step(pool: &Pool, wanted: &Members) -> Option<Step> {
    if let Some(members) = renewed(pool, wanted) {
        return Some(Step::SetMembers { pool: pool.id.clone(), name: pool.name.clone(), members });
    }
    let is_equal = |member: &Member| wanted.get(&member.key()) == Some(member);
    if pool.members.len() == wanted.len() && pool.members.iter().all(is_equal) {
        return None;
    }
    let mut members: Vec<Member> = wanted.values().cloned().collect();
    let stays = |member: &Member| member.is_usable() && wanted.contains_key(&member.key());
    if !wanted.is_empty() && !pool.members.iter().any(stays) {
        let leaving = pool.members.iter().filter(|member| !wanted.contains_key(&member.key()));
        members.extend(leaving.cloned());
    }
    Some(Step::SetMembers { pool: pool.id.clone(), name: pool.name.clone(), members })
}

fn monitor_changes(monitor: &Monitor, wanted: &WantedPool, tags: &[String]) -> Map<String, Value> {
    let mut changes = Map::new();
    if monitor.check != wanted.check || monitor.provisioning_status == Provisioning::Error {
        if let Ok(Value::Object(check)) = serde_json::to_value(&wanted.check) {
            changes = check;
        }
        changes.remove("type");
    }
    if !monitor.admin_state_up {
        changes.insert("admin_state_up".to_owned(), true.into());
    }
    if let Some(tags) = marks::merged(&monitor.tags, tags) {
        changes.insert("tags".to_owned(), tags.into());
    }
    changes
}

fn listener_changes(
    present: &Listener,
    wanted: &WantedListener,
    pool: &Pool,
    tags: &[String],
) -> Map<String, Value> {
    let mut changes = Map::new();
    let is_failed = present.provisioning_status == Provisioning::Error;
    if present.default_pool_id.as_ref() != Some(&pool.id) || is_failed {
        changes.insert("default_pool_id".to_owned(), pool.id.clone().into());
    }
    let mut allowed = present.allowed_cidrs.clone().unwrap_or_default();
    allowed.sort();
    if allowed != wanted.allowed_cidrs && !is_narrowed(present, wanted) {
        // Octavia takes null for an empty list.
        let all = (!wanted.allowed_cidrs.is_empty()).then(|| wanted.allowed_cidrs.clone());
        changes.insert("allowed_cidrs".to_owned(), json!(all));
    }
    if let Some(limits) = wanted.limits.as_ref().filter(|limits| differ(&present.limits, limits)) {
        let mut all = json!({});
        set_limits(&mut all, limits);
        if let Value::Object(all) = all {
            changes.extend(all);
        }
    }
    if !present.admin_state_up {
        changes.insert("admin_state_up".to_owned(), true.into());
    }
    if let Some(tags) = marks::merged(&present.tags, tags) {
        changes.insert("tags".to_owned(), tags.into());
    }
    changes
}

fn differ(present: &Limits, wanted: &Limits) -> bool {
    present != wanted
}

/// Listeners before the pools that they use. Those of others stay, and the pools that those use.
fn removals(owner: &Owner, tree: &Tree, wanted: &Desired) -> Vec<Step> {
    let is_ours = |name: &str, tags: &[String]| is_part(owner, &tree.balancer, name, tags);
    let is_unwanted = |listener: &&Listener| {
        let mut all = wanted.listeners.iter();
        !all.any(|one| one.protocol == listener.protocol && one.port == listener.protocol_port)
    };
    let (gone, kept): (Vec<&Listener>, Vec<&Listener>) = tree
        .listeners
        .iter()
        .partition(|listener| is_ours(&listener.name, &listener.tags) && is_unwanted(listener));
    let listeners = gone.iter().map(|listener| Step::DeleteListener {
        id: listener.id.clone(),
        port: port(&listener.protocol, listener.protocol_port),
    });
    let chosen = wanted.listeners.iter().filter_map(|listener| pool_of(owner, tree, listener));
    let chosen: Vec<&str> = chosen.map(|pool| pool.id.as_str()).collect();
    let is_unused = |pool: &&Pool| {
        let is_chosen = chosen.contains(&pool.id.as_str());
        let is_used = kept.iter().any(|listener| listener.default_pool_id.as_ref() == Some(&pool.id));
        is_ours(&pool.name, &pool.tags) && !is_chosen && !is_used
    };
    let pools = tree.pools.iter().filter(is_unused);
    let pools = pools.map(|pool| Step::DeletePool { id: pool.id.clone(), name: pool.name.clone() });
    listeners.chain(pools).collect()
}

#[cfg(test)]
mod tests;
