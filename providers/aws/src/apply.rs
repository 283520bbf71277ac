// SPDX-License-Identifier: Apache-2.0
//! Applies the steps of `diff` to AWS, and records in `Resources` what each call changed.

use std::collections::BTreeMap;

use steerage_provider_api::{Error, Owner};

use crate::client::Balancer;
use crate::config::Config;
use crate::desired::Desired;
use crate::diff::{ObservedGroup, ObservedListener, Step, steps};
use crate::observe::Resources;
use crate::provider::{Aws, ServiceState};
use crate::targets::RegisteredIds;
use crate::{annotations, names, reasons, targets};

impl Aws {
    /// Applies the steps. The instances are registered before a listener needs them; the others stay registered. Returns false while
    /// a target group to delete is still in use.
    pub(crate) async fn apply_steps(
        &self,
        owner: &Owner,
        wanted: &Desired,
        instances: &BTreeMap<String, String>,
        resources: &mut Resources,
        entry: &mut ServiceState,
    ) -> Result<bool, Error> {
        let tags = names::tags(&self.config.cluster, owner);
        let balancer = self.balancer(owner, wanted, resources, &tags).await?;
        if let Some(taken) =
            resources.foreign_listeners.iter().find(|f| wanted.listeners.iter().any(|w| w.port == f.port))
        {
            let message = format!(
                "Port {} of the load balancer {} has a listener that Steerage did not create. It is not changed. Delete that listener.",
                taken.port, balancer.name
            );
            return Err(Error::invalid(reasons::OBJECT_NOT_OWNED, message));
        }
        let mut released = true;
        let steps = steps(wanted, &resources.groups, &resources.listeners);
        let (of_groups, others) = steps.split_at(steps.iter().take_while(|step| step.is_of_group()).count());
        for step in of_groups {
            self.step(owner, step.clone(), &balancer, &tags, resources, entry).await?;
        }
        self.register(wanted, instances, resources, entry).await?;
        for step in others {
            released &= self.step(owner, step.clone(), &balancer, &tags, resources, entry).await?;
        }
        Ok(released)
    }

    /// Registers the instances in all wanted target groups.
    async fn register(
        &self,
        wanted: &Desired,
        instances: &BTreeMap<String, String>,
        resources: &Resources,
        entry: &mut ServiceState,
    ) -> Result<(), Error> {
        entry.refused_targets.retain(instances);
        for group in wanted.groups.iter().filter_map(|group| resources.groups.get(&group.name)) {
            let mut known = entry.registered.remove(&group.arn);
            let refused = &mut entry.refused_targets;
            targets::add(&*self.client, &group.arn, &mut known, instances, refused).await?;
            if let Some(known) = known {
                entry.registered.insert(group.arn.clone(), known);
            }
        }
        Ok(())
    }

    async fn balancer(
        &self,
        owner: &Owner,
        wanted: &Desired,
        resources: &mut Resources,
        tags: &BTreeMap<String, String>,
    ) -> Result<Balancer, Error> {
        let Some(balancer) = &resources.balancer else {
            tracing::info!(
                service = %owner.service, name = wanted.name, scheme = wanted.scheme.as_str(),
                "creating load balancer"
            );
            let Config { subnets, .. } = &self.config;
            let made = self.client.create_balancer(&wanted.name, wanted.scheme, subnets, tags).await?;
            resources.balancer = Some(made.clone());
            return Ok(made);
        };
        if balancer.scheme != Some(wanted.scheme) {
            let message = format!(
                "AWS cannot change the scheme of a load balancer to {}. The present scheme is kept. Re-create the Service, or restore the annotation {}.",
                wanted.scheme.as_str(),
                annotations::SCHEME
            );
            return Err(Error::invalid(reasons::SCHEME_IMMUTABLE, message));
        }
        Ok(balancer.clone())
    }

    async fn step(
        &self,
        owner: &Owner,
        step: Step,
        balancer: &Balancer,
        tags: &BTreeMap<String, String>,
        resources: &mut Resources,
        entry: &mut ServiceState,
    ) -> Result<bool, Error> {
        tracing::info!(service = %owner.service, ?step, "changing load balancer");
        let arn_of = |resources: &Resources, group: &str| {
            let group = resources.groups.get(group).map(|g| g.arn.clone());
            group.ok_or_else(|| Error::Conflict("a target group no longer exists".to_owned()))
        };
        match step {
            Step::CreateGroup(group) => {
                let made = self.client.create_group(&group, &self.config.vpc, tags).await?;
                entry.registered.insert(made.arn.clone(), RegisteredIds::of(&[]));
                let health = group.health;
                resources.groups.insert(group.name, ObservedGroup { health, only_200: true, ..made });
            }
            Step::ModifyHealth { arn, health } => {
                self.client.modify_health(&arn, &health).await?;
                if let Some(group) = resources.groups.values_mut().find(|g| g.arn == arn) {
                    (group.health, group.only_200) = (health, true);
                }
            }
            Step::SetAttributes { group, attributes } => {
                self.client.set_attributes(&arn_of(resources, &group)?, &attributes).await?;
                if let Some(group) = resources.groups.get_mut(&group) {
                    group.attributes.extend(attributes.into_iter().map(|(k, v)| (k.to_owned(), v)));
                }
            }
            Step::CreateListener { port, protocol, group } => {
                let group = arn_of(resources, &group)?;
                let made = self.client.create_listener(&balancer.arn, port, protocol, &group, tags).await?;
                let group_arn = Some(group);
                resources.listeners.push(ObservedListener {
                    port,
                    protocol: protocol.to_owned(),
                    group_arn,
                    ..made
                });
            }
            Step::SwitchListener { arn, protocol, group } => {
                let group = arn_of(resources, &group)?;
                self.client.modify_listener(&arn, protocol, &group).await?;
                if let Some(listener) = resources.listeners.iter_mut().find(|f| f.arn == arn) {
                    listener.protocol = protocol.map_or_else(|| listener.protocol.clone(), str::to_owned);
                    listener.group_arn = Some(group);
                }
            }
            Step::DeleteListener { arn } => {
                self.client.delete_listener(&arn).await?;
                resources.listeners.retain(|f| f.arn != arn);
            }
            Step::DeleteGroup { name, arn } => {
                entry.registered.remove(&arn);
                if !self.client.delete_group(&arn).await? {
                    return Ok(false);
                }
                resources.groups.remove(&name);
            }
        }
        Ok(true)
    }
}
