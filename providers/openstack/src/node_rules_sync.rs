// SPDX-License-Identifier: Apache-2.0
//! Keeps the rules of the nodes' security group in place, if a flag names the group: rules come before what needs them, and go after it.
//! Rules without Steerage's mark are never changed.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use http::Method;
use ipnet::IpNet;
use steerage_model::Key;
use steerage_provider_api::{Error, Owner, call_namespace};

use crate::apply::missing_member_subnet;
use crate::client::{Call, list};
use crate::config::Driver;
use crate::desired::Desired;
use crate::error::CallError;
use crate::insist::insist;
use crate::node_rules::{MemberSubnet, Needed, NodeRule, PresentRule, changes, needed};
use crate::provider::OpenStack;
use crate::state::ServiceState;
use crate::{marks, observe};

/// Rules that one call creates, and that it removes; the next call goes on.
const MAX_REQUESTS: usize = 20;

/// What a Service needs of the rules that all share.
#[derive(Debug)]
struct Need {
    uid: String,
    /// While its load balancer changes, also what it needed before.
    rules: BTreeSet<NodeRule>,
    /// Whether that is all that its load balancer uses: after a start, it may use others until it is complete.
    is_all: bool,
}

/// What each Service needs of the rules that all share.
#[derive(Debug, Default)]
pub(crate) struct SharedNeeds(BTreeMap<Key, Need>);

impl SharedNeeds {
    /// A change begins: pools may need the old rules and the new ones. A Service that is created again replaces the earlier one.
    fn add(&mut self, owner: &Owner, needed: &BTreeSet<NodeRule>) {
        let new = || Need { uid: String::new(), rules: BTreeSet::new(), is_all: false };
        let need = self.0.entry(owner.service.clone()).or_insert_with(new);
        need.uid.clone_from(&owner.uid);
        need.rules.extend(needed.iter().cloned());
    }

    /// The load balancer is complete.
    fn settle(&mut self, owner: &Owner, needed: &BTreeSet<NodeRule>) {
        let need = Need { uid: owner.uid.clone(), rules: needed.clone(), is_all: true };
        self.0.insert(owner.service.clone(), need);
    }

    fn remove(&mut self, owner: &Owner) {
        if self.0.get(&owner.service).is_some_and(|need| need.uid == owner.uid) {
            self.0.remove(&owner.service);
        }
    }

    fn all(&self) -> BTreeSet<NodeRule> {
        self.0.values().flat_map(|need| &need.rules).cloned().collect()
    }

    fn of_others(&self, owner: &Owner) -> BTreeSet<NodeRule> {
        let others = self.0.iter().filter(|(service, _)| **service != owner.service);
        others.flat_map(|(_, need)| &need.rules).cloned().collect()
    }

    /// All needs, if those of all these owners are known.
    fn of_all(&self, owners: &BTreeSet<Owner>) -> Option<BTreeSet<NodeRule>> {
        let is_known = owners.iter().all(|owner| self.0.get(&owner.service).is_some_and(|need| need.is_all));
        is_known.then(|| self.all())
    }
}

/// What is known of a Service's rules.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum RulesState {
    #[default]
    Unknown,
    /// Some of those that it needs are refused.
    Refused(Needed),
    /// Those that it needs exist.
    Open(Needed),
    /// The same, and those that nothing needs any more are gone.
    Complete(Needed),
}

/// Why rules are missing: a reason and a message.
pub(crate) type Missing = Option<(&'static str, String)>;

/// How far rules were made.
#[derive(Debug, Default)]
pub(crate) struct Opened {
    /// More are to be made, by the next call.
    pub(crate) is_more: bool,
    pub(crate) missing: Missing,
}

impl OpenStack {
    /// The rules that a Service needs, and the group. `None` if the nodes' groups are not managed.
    async fn rules_of(&self, wanted: &Desired) -> Result<Option<(&str, Needed)>, Error> {
        let Some(group) = self.config.security_group.as_deref() else { return Ok(None) };
        let count = if self.config.driver() == Driver::Ovn { wanted.vips.len() } else { 1 };
        let mut subnets = Vec::new();
        // Members are of the Service's first family that has a VIP.
        let with_vips =
            wanted.families.iter().filter_map(|of| wanted.vips.iter().find(|vip| vip.family == *of));
        for vip in with_vips.take(count) {
            let is_operators =
                wanted.shared.is_some() || vip.member_subnet == self.config.nodes_subnet(vip.family);
            let Some(cidr) = self.subnet_cidr(&vip.member_subnet).await? else {
                // No rule would be needed: those of all Services would go.
                return Err(missing_member_subnet(&vip.member_subnet, "The nodes' rules stay as they are."));
            };
            subnets.push(MemberSubnet { cidr, is_operators });
        }
        Ok(Some((group, needed(wanted, &self.config.node_ports, &subnets))))
    }

    /// The addresses of a subnet, read once.
    async fn subnet_cidr(&self, id: &str) -> Result<Option<IpNet>, Error> {
        if let Some(known) = self.cidrs.lock().await.get(id) {
            return Ok(Some(*known));
        }
        let found = observe::subnet(&*self.calls, id).await?;
        let cidr = found.and_then(|subnet| subnet.cidr.parse().ok());
        if let Some(cidr) = cidr {
            self.cidrs.lock().await.insert(id.to_owned(), cidr);
        }
        Ok(cidr)
    }

    /// Makes the rules that a Service needs, and removes those that admit clients of its ports who are no longer admitted. What fails holds
    /// up nothing of the load balancer.
    pub(crate) async fn open_rules(
        &self,
        owner: &Owner,
        wanted: &Desired,
        entry: &mut ServiceState,
    ) -> Opened {
        match self.try_open(owner, wanted, entry).await {
            Ok(opened) => opened,
            Err(error) => {
                entry.rules = RulesState::Unknown;
                Opened { is_more: false, missing: Some(rules_failed(&error)) }
            }
        }
    }

    async fn try_open(
        &self,
        owner: &Owner,
        wanted: &Desired,
        entry: &mut ServiceState,
    ) -> Result<Opened, Error> {
        let Some((group, needed)) = self.rules_of(wanted).await? else { return Ok(Opened::default()) };
        match &entry.rules {
            RulesState::Open(known) | RulesState::Complete(known) if *known == needed => {
                return Ok(Opened::default());
            }
            _ => {}
        }
        entry.rules = RulesState::Unknown;
        // Before rules are read: who removes some either knows this need, or is done.
        let all = {
            let mut shared = self.shared_needs.lock().await;
            shared.add(owner, &needed.shared);
            // What it needed before goes when it is complete.
            let mut all = shared.of_others(owner);
            all.extend(needed.shared.iter().cloned());
            all
        };
        let cluster = &self.config.cluster;
        let (of_service, of_all) = (marks::floating(cluster, owner), marks::shared_rule(cluster));
        let present = self.present_rules(group).await?;
        let own = changes(&present, &needed.own, &of_service, Some((cluster, owner)));
        let shared = changes(&present, &needed.shared, &of_all, None);
        let created = shared.created.iter().map(|rule| (rule, of_all.as_str()));
        let mut created: VecDeque<(&NodeRule, &str)> =
            created.chain(own.created.iter().map(|rule| (rule, of_service.as_str()))).collect();
        let mut stale = own.stale;
        let mut left = MAX_REQUESTS;
        let mut result = self.create_rules(group, owner, &mut created, &mut stale, &mut left).await;
        let gone: Vec<&String> = own.narrowed.iter().chain(stale.iter().map(|(id, _)| id)).collect();
        for id in gone.iter().take(MAX_REQUESTS) {
            self.delete_rule(id).await?;
        }
        if result.as_ref().is_err_and(CallError::is_refused) && !gone.is_empty() {
            // What was removed may have made room.
            result = self.create_rules(group, owner, &mut created, &mut Vec::new(), &mut left).await;
        }
        if let Err(failure) = result {
            let rule = created.front().map(|(rule, _)| rule.to_string()).unwrap_or_default();
            return match Error::from(failure) {
                Error::Invalid { reason, message } => {
                    entry.rules = RulesState::Refused(needed);
                    let missing = Some((reason, rule_missing(&rule, group, &message)));
                    Ok(Opened { is_more: false, missing })
                }
                other => Err(other),
            };
        }
        if !created.is_empty() || gone.len() > MAX_REQUESTS {
            return Ok(Opened { is_more: true, missing: None });
        }
        let of_others = changes(&present, &all, &of_all, None);
        let is_complete =
            own.unused.is_empty() && of_others.unused.is_empty() && of_others.narrowed.is_empty();
        entry.rules = if is_complete { RulesState::Complete(needed) } else { RulesState::Open(needed) };
        Ok(Opened::default())
    }

    /// Creates rules until one fails, and takes away what exists. A stale one that admits the same goes before.
    async fn create_rules(
        &self,
        group: &str,
        owner: &Owner,
        rules: &mut VecDeque<(&NodeRule, &str)>,
        stale: &mut Vec<(String, NodeRule)>,
        left: &mut usize,
    ) -> Result<(), CallError> {
        while let Some((rule, description)) = rules.front().copied().filter(|_| *left > 0) {
            *left -= 1;
            if let Some(index) = stale.iter().position(|(_, admits)| admits == rule) {
                self.delete_rule(&stale.remove(index).0).await?;
            }
            let create = || self.create_rule(group, rule, description);
            let is_new = insist(CallError::must_wait, create).await?;
            if !is_new && description == marks::floating(&self.config.cluster, owner) {
                // Another Service may have made it a moment ago, when it had the node port.
                let present = self.present_rules(group).await?;
                let needed = BTreeSet::from([rule.clone()]);
                let of = Some((&self.config.cluster, owner));
                let found = changes(&present, &needed, description, of);
                if let Some((id, _)) = found.stale.iter().find(|(_, admits)| admits == rule) {
                    self.delete_rule(id).await?;
                    insist(CallError::must_wait, create).await?;
                }
            }
            rules.pop_front();
        }
        Ok(())
    }

    /// Removes the rules that nothing needs any more, when the load balancer is complete, also if some that it needs are refused. Returns
    /// whether there were some.
    pub(crate) async fn close_rules(&self, owner: &Owner, entry: &mut ServiceState) -> Result<bool, Error> {
        let Some(group) = self.config.security_group.as_deref() else { return Ok(false) };
        let (RulesState::Refused(needed) | RulesState::Open(needed) | RulesState::Complete(needed)) =
            entry.rules.clone()
        else {
            return Ok(false);
        };
        self.shared_needs.lock().await.settle(owner, &needed.shared);
        if matches!(entry.rules, RulesState::Complete(_)) {
            return Ok(false);
        }
        let has_removed = self.remove_unused(group, owner, Some(&needed)).await?;
        if let RulesState::Open(needed) = std::mem::take(&mut entry.rules)
            && !has_removed
        {
            entry.rules = RulesState::Complete(needed);
        }
        Ok(has_removed)
    }

    /// Removes the rules of a Service whose load balancer is gone. If that is denied, they are left over.
    pub(crate) async fn delete_rules(&self, owner: &Owner) -> Result<(), Error> {
        let Some(group) = self.config.security_group.as_deref() else { return Ok(()) };
        self.shared_needs.lock().await.remove(owner);
        match self.remove_unused(group, owner, None).await {
            Err(Error::Denied(error)) => {
                tracing::warn!(service = %owner.service, group, error, "rules of the nodes' security group are left over; delete them");
                Ok(())
            }
            result => result.map(|_| ()),
        }
    }

    /// Without needs, those of an owner that goes.
    async fn remove_unused(
        &self,
        group: &str,
        owner: &Owner,
        needed: Option<&Needed>,
    ) -> Result<bool, Error> {
        let present = self.present_rules(group).await?;
        let none = BTreeSet::new();
        let own = needed.map_or(&none, |needed| &needed.own);
        let gone = changes(&present, own, &marks::floating(&self.config.cluster, owner), None);
        let mut has_removed = false;
        for id in gone.narrowed.iter().chain(&gone.unused) {
            self.delete_rule(id).await?;
            has_removed = true;
        }
        let of_all = marks::shared_rule(&self.config.cluster);
        if !present.iter().any(|rule| rule.description.as_deref() == Some(of_all.as_str())) {
            return Ok(has_removed);
        }
        let all = observe::balancers(&*self.calls, &self.config.cluster, None).await?;
        let owners = all.into_iter().map(|(owner, _)| owner).chain(self.part_owners().await?);
        let owners = owners.filter(|of| of != owner || needed.is_some()).collect();
        for rule in present.iter().filter(|rule| rule.description.as_deref() == Some(of_all.as_str())) {
            // Held for one removal: who needs the rule meanwhile waits, and makes it again.
            let shared = self.shared_needs.lock().await;
            // After a start the needs of others are not known until all were looked at.
            let Some(needs) = shared.of_all(&owners) else { break };
            if rule.rule().is_none_or(|admits| !needs.contains(&admits)) {
                call_namespace::for_all(self.delete_rule(&rule.id)).await?;
                has_removed = true;
            }
        }
        Ok(has_removed)
    }

    /// The owners of rules in the nodes' group.
    pub(crate) async fn rule_owners(&self) -> Result<Vec<Owner>, Error> {
        let Some(group) = self.config.security_group.as_deref() else { return Ok(Vec::new()) };
        let present = match self.present_rules(group).await.map_err(Error::from) {
            Err(Error::Denied(error)) => {
                tracing::warn!(
                    group,
                    error,
                    "rules of the nodes' security group not read; continuing without the owners that they name"
                );
                return Ok(Vec::new());
            }
            result => result?,
        };
        let of =
            |rule: &PresentRule| marks::floating_owner(&self.config.cluster, rule.description.as_deref()?);
        Ok(present.iter().filter_map(of).collect())
    }

    /// Takes away the clients that a Service with OVN no longer admits. Returns the ranges that its rules admit then.
    pub(crate) async fn narrow_rules(
        &self,
        owner: &Owner,
        requested: &[IpNet],
        subnets: &[String],
        entry: &mut ServiceState,
    ) -> Result<Option<BTreeSet<String>>, Error> {
        let Some(group) = self.config.security_group.as_deref() else { return Ok(None) };
        let mut of_checks = Vec::new();
        for subnet in subnets {
            of_checks.extend(self.subnet_cidr(subnet).await?);
        }
        let description = marks::floating(&self.config.cluster, owner);
        let mut admitted = BTreeSet::new();
        for rule in self.present_rules(group).await? {
            let Some(admits) = rule.rule().filter(|_| rule.description.as_deref() == Some(&description))
            else {
                continue;
            };
            let mut kept = BTreeSet::from([admits.clone()]);
            if !requested.is_empty() && !of_checks.contains(&admits.source) {
                kept = admits.narrowed(requested);
                // Members are checked from their subnet, which a wide rule admitted.
                kept.extend(
                    of_checks
                        .iter()
                        .filter(|of| admits.source.contains(*of))
                        .map(|of| NodeRule { source: of.trunc(), ..admits.clone() }),
                );
            }
            if !kept.contains(&admits) {
                entry.rules = RulesState::Unknown;
                for rule in &kept {
                    match self.create_rule(group, rule, &description).await {
                        // Nobody may stay because there is no room.
                        Err(failure) if failure.is_refused() => {}
                        other => {
                            other?;
                        }
                    }
                }
                self.delete_rule(&rule.id).await?;
            }
            admitted.extend(kept.into_iter().map(|rule| rule.source.to_string()));
        }
        Ok(Some(admitted))
    }

    async fn present_rules(&self, group: &str) -> Result<Vec<PresentRule>, CallError> {
        let call = Call::neutron(Method::GET, "GET security-group-rules", "security-group-rules", None);
        list(&*self.calls, call, "security_group_rules", &[("security_group_id", group)]).await
    }

    /// False if the rule exists.
    async fn create_rule(&self, group: &str, rule: &NodeRule, description: &str) -> Result<bool, CallError> {
        let body = Some(rule.body(group, description));
        let call = Call::neutron(Method::POST, "POST security-group-rules", "security-group-rules", body);
        match self.calls.send(call).await {
            Ok(_) => {
                tracing::info!(rule = %rule, group, "rule of the nodes' security group created");
                Ok(true)
            }
            // Somebody made it a moment ago.
            Err(failure) if failure.is_existing_rule() => Ok(false),
            Err(failure) => Err(failure),
        }
    }

    async fn delete_rule(&self, id: &str) -> Result<(), CallError> {
        let path = format!("security-group-rules/{id}");
        let call = Call::neutron(Method::DELETE, "DELETE security-group-rules", &path, None);
        match self.calls.send(call).await {
            Ok(_) => {
                tracing::info!(id, "rule of the nodes' security group deleted");
                Ok(())
            }
            Err(failure) if failure.is_not_found() => Ok(()),
            Err(failure) => Err(failure),
        }
    }
}

/// What failed, and what follows.
pub(crate) fn rules_failed(error: &Error) -> (&'static str, String) {
    let message = format!(
        "The rules of the nodes' security group are not as they should be, or not known: {error} The load balancer is changed nevertheless, \
         and Steerage tries again."
    );
    (error.reason(), message)
}

fn rule_missing(rule: &str, group: &str, why: &str) -> String {
    format!(
        "The security group {group} of the nodes lacks the rule {rule}, without which members may not be reached: {why} The load balancer \
         is in place, and Steerage tries again."
    )
}

#[cfg(test)]
mod tests;
