// SPDX-License-Identifier: Apache-2.0
//! The steps that AWS may refuse for one port: its target group, and its listener. The other ports follow all the same. `apply` calls it,
//! and `refused_listeners` keeps the refusals.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use steerage_provider_api::{Error, Owner};
use tokio::time::Instant;

use crate::client::{Balancer, Tags};
use crate::desired::Desired;
use crate::diff::{ObservedGroup, ObservedListener, Step, steps};
use crate::ip_address_type::IpAddressType;
use crate::observe::Resources;
use crate::provider::Aws;
use crate::put_back::{LeftListeners, Room, before_removal, is_refused};
use crate::refused_answers::Asked;
use crate::refused_listeners::{RefusedListeners, has_port};
use crate::source_nat_sync::{self, brings_udp};
use crate::state::ServiceState;
use crate::wanted_targets::WantedTargets;
use crate::{finish, reasons};

/// After so many new listeners that AWS did not take without refusing them, a try leaves the others to the next one.
const MAX_OPEN: usize = 3;
/// The same where less than this time is left.
const TIME_FOR_LISTENER: Duration = Duration::from_secs(5);

/// The ports whose listeners would switch from a group with targets to one without, with that group.
fn emptied<'a>(
    steps: &[Step],
    resources: &'a Resources,
    entry: &ServiceState,
) -> Vec<(u16, &'a String, &'a ObservedGroup)> {
    let has_targets = |arn: &str| entry.registered.get(arn).is_none_or(|known| !known.is_empty());
    let found = steps.iter().filter_map(|step| {
        let Step::SwitchListener { arn, group, .. } = step else { return None };
        let (name, next) = resources.groups.get_key_value(group)?;
        let listener = resources.listeners.iter().find(|listener| listener.arn == *arn)?;
        let present = listener.group_arn.as_deref().filter(|present| *present != next.arn)?;
        (has_targets(present) && !has_targets(&next.arn)).then_some((listener.port, name, next))
    });
    found.collect()
}

/// Holds the listeners that would lose their last target.
pub(crate) fn hold_emptied(
    steps: &[Step],
    targets: &WantedTargets,
    resources: &Resources,
    entry: &ServiceState,
    refused: &mut RefusedListeners,
) -> Result<(), Error> {
    for (port, name, group) in emptied(steps, resources, entry) {
        let wanted = targets.of(name, group);
        // Slices may lack a changed port of pods for a moment. Where no node is wanted, none will come.
        if !group.has_pods && wanted.is_none_or(BTreeMap::is_empty) {
            continue;
        }
        let mut refusals =
            wanted.into_iter().flatten().filter_map(|(id, _)| Some((id, entry.refused_targets.reason(id)?)));
        let Some((id, why)) = refusals.next() else {
            refused.wait_for_targets(port);
            continue;
        };
        let message = format!(
            "AWS refuses all new targets. The load balancer keeps its present ones. {}",
            finish::refusal(id, why)
        );
        refused.note_targets(port, Error::invalid(reasons::ALL_TARGETS_REFUSED, message))?;
    }
    Ok(())
}

/// Keeps why a listener could not come back. Any other error is returned.
fn note_back(back: Result<(), Error>, not_put_back: &mut Option<Error>) -> Result<(), Error> {
    let is_refused = is_refused(&back);
    match back {
        Err(error) if is_refused => *not_put_back = Some(error),
        back => back?,
    }
    Ok(())
}

/// The steps of listeners in order. Those with which AWS failed last go last.
fn in_turn<'s>(
    others: &'s [Step],
    wanted: &Desired,
    balancer: &Balancer,
    open: &BTreeSet<u16>,
) -> impl Iterator<Item = &'s Step> {
    let is_of_listeners = |step: &&Step| !matches!(step, Step::DeleteGroup { .. });
    let was_open = |step: &&Step| matches!(step, Step::CreateListener { port, .. } if open.contains(port));
    let in_order = source_nat_sync::in_order(others, wanted, balancer).filter(is_of_listeners);
    let (last, first): (Vec<&Step>, Vec<&Step>) = in_order.partition(was_open);
    first.into_iter().chain(last)
}

impl Aws {
    /// Creates the target groups that are missing, as far as AWS accepts them.
    pub(crate) async fn create_groups(
        &self,
        owner: &Owner,
        wanted: &Desired,
        (balancer, tags): (&Balancer, &Tags),
        resources: &mut Resources,
        entry: &mut ServiceState,
        refused: &mut RefusedListeners,
    ) -> Result<(), Error> {
        for step in steps(wanted, &resources.groups, &resources.listeners, resources.foreign_listeners.len())
        {
            let Step::CreateGroup(group) = &step else { continue };
            let (name, asked) = (group.name.clone(), Asked::Group);
            let done = if let Some(error) = entry.refused_answers.expected(&asked) {
                Err(error)
            } else {
                let done = self.step(owner, step, balancer, tags, resources, entry).await;
                done.inspect_err(|error| entry.refused_answers.note(asked, error))
            };
            if let Err(error) = done {
                refused.note_group(&name, wanted, resources, error)?;
            }
        }
        Ok(())
    }

    /// Deletes a listener for the one of a port.
    async fn make_way(
        &self,
        owner: &Owner,
        (wanted, port, listener): (&Desired, u16, ObservedListener),
        (balancer, tags): (&Balancer, &Tags),
        resources: &mut Resources,
        entry: &mut ServiceState,
    ) -> Result<(), Error> {
        let step = Step::DeleteListener { arn: listener.arn.clone() };
        entry.left.note(wanted, port, listener);
        self.step(owner, step, balancer, tags, resources, entry).await
    }

    /// Makes the steps of listeners, as far as AWS accepts them.
    pub(crate) async fn change_listeners(
        &self,
        owner: &Owner,
        (wanted, others): (&Desired, &[Step]),
        (balancer, tags): (&Balancer, &Tags),
        resources: &mut Resources,
        entry: &mut ServiceState,
        refused: &mut RefusedListeners,
    ) -> Result<(), Error> {
        let mut is_udp_refused = false;
        let room = Room::of(others);
        entry.left_certificates.begin(others, resources);
        // Why a listener that left could not come back. No other one leaves then.
        let mut not_put_back = None;
        let open = std::mem::take(&mut entry.open_listeners);
        for step in in_turn(others, wanted, balancer, &open) {
            if room.holds(step) || refused.holds(step, resources) {
                self.put_back_certificates(step, resources, entry).await?;
                continue;
            }
            if entry.refused_answers.is_removal_in_vain(step, others) {
                continue;
            }
            let asked = Asked::of(step);
            if let Some(error) = asked.as_ref().and_then(|asked| entry.refused_answers.expected(asked)) {
                if let Step::CreateListener { port, .. } = step {
                    let back = self.put_back(owner, *port, (balancer, tags), resources, entry).await;
                    note_back(back, &mut not_put_back)?;
                }
                refused.note(step, resources, Err(error))?;
                continue;
            }
            let mut leaving: Vec<(u16, ObservedListener)> = Vec::new();
            if let (Step::CreateListener { port, .. }, Some(found)) = (step, room.before(step, resources)) {
                leaving.push((*port, found.clone()));
            }
            if let Some(error) = not_put_back.clone().filter(|_| !leaving.is_empty()) {
                refused.note(step, resources, Err(error))?;
                continue;
            }
            // AWS takes IPv6 away only after the last listener whose targets need it.
            let ends_ipv6 = brings_udp(step)
                && wanted.ip_address_type == IpAddressType::Ipv4
                && resources.balancer.as_ref().is_some_and(|f| f.ip_address_type == IpAddressType::DualStack);
            let first = if ends_ipv6 { room.all_before(resources) } else { Vec::new() };
            leaving.retain(|(port, _)| first.iter().all(|(other, _)| other != port));
            // A new Service is published with the ports that AWS serves.
            let may_stay_open = !entry.is_published
                && (&leaving, &first) == (&Vec::new(), &Vec::new())
                && !brings_udp(step)
                && entry.left.is_empty();
            if let (true, Step::CreateListener { port, .. }) = (may_stay_open && refused.open() > 0, step)
                && (refused.open() >= MAX_OPEN || Instant::now() + TIME_FOR_LISTENER > entry.must_end())
            {
                // Not one of those that go last: it was not tried.
                refused.leave_open(*port);
                continue;
            }
            let certificates = before_removal(step, resources);
            let done = async {
                for (port, found) in first {
                    self.make_way(owner, (wanted, port, found), (balancer, tags), resources, entry).await?;
                }
                if brings_udp(step) {
                    self.become_type(owner, wanted.ip_address_type, resources, entry).await?;
                    if wanted.ip_address_type == IpAddressType::DualStack {
                        self.enable_source_nat(owner, wanted, resources, entry).await?;
                    }
                }
                for (port, found) in leaving {
                    self.make_way(owner, (wanted, port, found), (balancer, tags), resources, entry).await?;
                }
                self.step(owner, step.clone(), balancer, tags, resources, entry).await
            };
            let done = done.await;
            entry.left_certificates.note_removed(step, &certificates, &done, others, resources);
            let is_made = matches!(step, Step::CreateListener { port, .. } if has_port(resources, *port));
            if let (Some(asked), Err(error), false) = (asked, &done, is_made) {
                entry.refused_answers.note(asked, error);
            }
            if let (Step::CreateListener { port, .. }, Err(error @ Error::Unavailable(_)), false) =
                (step, &done, is_made || !may_stay_open)
            {
                // The next try reads whether AWS has made it.
                entry.is_read_early = true;
                entry.open_listeners.insert(*port);
                refused.note_open(*port, error.clone());
                continue;
            }
            if is_refused(&done) {
                if let (Step::CreateListener { port, .. }, false) = (step, is_made) {
                    let back = self.put_back(owner, *port, (balancer, tags), resources, entry).await;
                    note_back(back, &mut not_put_back)?;
                }
                self.put_back_certificates(step, resources, entry).await?;
            } else if done.is_ok() {
                entry.left_certificates.note_added(step);
            }
            is_udp_refused |= brings_udp(step) && matches!(done, Err(Error::Invalid { .. }));
            refused.note(step, resources, done)?;
        }
        if refused.lacks_listener() {
            note_back(self.put_back_all(owner, (balancer, tags), resources, entry).await, &mut not_put_back)?;
        } else {
            // Nothing is wanted of those that left for an earlier change.
            entry.left = LeftListeners::default();
        }
        // Somebody may have turned source NAT off.
        entry.source_nat.must_read |= is_udp_refused;
        Ok(())
    }
}
