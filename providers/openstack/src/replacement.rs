// SPDX-License-Identifier: Apache-2.0
//! Replaces a load balancer that failed, and decides between several of one owner. What serves clients goes last.

use std::net::IpAddr;
use std::time::Duration;

use steerage_provider_api::{Error, LoadBalancer, Outcome, Owner, Progress};

use crate::apply::again;
use crate::desired::{Desired, WantedAddress};
use crate::provider::OpenStack;
use crate::reasons;
use crate::state::{SERVING_REPLACEMENT_WAIT, ServiceState};
use crate::types::{Balancer, FloatingIp, Provisioning};

/// When a load balancer that served and seems not to is looked at again.
const DOUBT_POLL: Duration = Duration::from_secs(5);

impl OpenStack {
    /// Replaces a load balancer in `ERROR`, which Octavia changes no more. The new one comes first where a floating IP can move to it;
    /// else the old one goes, and its address stays if it can.
    pub(crate) async fn replace(
        &self,
        lb: &LoadBalancer,
        wanted: &Desired,
        balancer: &Balancer,
        entry: &mut ServiceState,
    ) -> Result<Outcome, Error> {
        let id = &balancer.id;
        if !self.is_still_chosen(lb, balancer, entry).await? {
            return Ok(again(entry, self));
        }
        let is_serving = balancer.is_serving();
        if is_serving && entry.is_kept(id) {
            return Err(Error::Unavailable(format!(
                "Octavia reports ERROR for the load balancer {id}, and changes it no more, but it still serves. It is kept for {} minutes, and \
                 then replaced. To repair it, as Octavia's administrator: `openstack loadbalancer failover {id}`.",
                SERVING_REPLACEMENT_WAIT.as_secs() / 60
            )));
        }
        if !is_serving && entry.is_doubted(id) {
            entry.forget();
            return Ok(Outcome { progress: Progress::Again(DOUBT_POLL), ..Outcome::done() });
        }
        if !entry.may_replace() {
            self.forgo_replacement(&lb.owner.service);
            return Err(Error::Unavailable(format!(
                "Octavia reports ERROR for the load balancer {id}, which replaced another one a moment ago. Steerage replaces it later. \
                 Look at it, `openstack loadbalancer show {id}`, and at Octavia's logs."
            )));
        }
        if !self.may_replace(&lb.owner.service) {
            return Err(Error::Unavailable(format!(
                "Octavia reports ERROR for the load balancer {id}. Steerage replaces one load balancer after the other, and another new one \
                 is not complete yet. If this lasts for more than 10 minutes, look at Octavia's logs."
            )));
        }
        let (failed, kept) = self.failed_replacements(lb, wanted, entry).await?;
        if let Some(failed) = failed {
            tracing::warn!(service = %lb.owner.service, id = failed.id, "load balancer in ERROR; deleting it");
            entry.changing.get_or_insert_with(tokio::time::Instant::now);
            self.delete_balancer(&failed.id).await?;
            entry.note_replaced();
            entry.sent();
            return Ok(again(entry, self));
        }
        if kept.len() > 1 {
            let ids: Vec<&str> = kept.iter().map(|kept| kept.id.as_str()).collect();
            return Err(Error::Unavailable(format!(
                "Octavia reports ERROR for the load balancer {id}. The Service's others, {}, are in ERROR too, and serve or have its address: \
                 Steerage deletes none of them, and creates no further one. Delete those that no client uses: `openstack loadbalancer \
                 delete --cascade ID`.",
                ids.join(" and ")
            )));
        }
        if !wanted.publishes_vip() {
            tracing::warn!(service = %lb.owner.service, id, "load balancer in ERROR; creating another one");
            match self.create(lb, wanted, entry).await {
                Err(Error::Invalid { reason: reasons::QUOTA_EXCEEDED, .. }) if !is_serving => {}
                result => {
                    entry.note_replaced();
                    return result;
                }
            }
        }
        tracing::warn!(service = %lb.owner.service, id, "load balancer in ERROR; deleting it and creating another one");
        if wanted.publishes_vip() {
            entry.kept_vips = balancer.vips().map(|(vip, _)| vip).collect();
        }
        entry.begin();
        self.delete_balancer(id).await?;
        entry.note_replaced();
        entry.sent();
        Ok(again(entry, self))
    }

    /// Whether this is still the one of the owner's load balancers that stays. The choice may be older than the failure: a replacement is
    /// chosen while it is being created, and the old one that serves is better than one that failed.
    async fn is_still_chosen(
        &self,
        lb: &LoadBalancer,
        balancer: &Balancer,
        entry: &mut ServiceState,
    ) -> Result<bool, Error> {
        if entry.is_listed && entry.spare.is_empty() {
            return Ok(true);
        }
        let all = self.balancers_of(&lb.owner.service).await?;
        let mine = all.into_iter().filter(|(of, _)| *of == lb.owner).map(|(_, found)| found).collect();
        let mut mine = self.by_preference(&lb.owner, mine, &lb.published, entry).await?;
        if mine.first().is_none_or(|first| first.id != balancer.id) {
            entry.forget();
            return Ok(false);
        }
        mine.remove(0);
        (entry.spare, entry.is_listed) = (mine, true);
        Ok(true)
    }

    /// The owner's load balancers, the one that stays first.
    pub(crate) async fn by_preference(
        &self,
        owner: &Owner,
        mut mine: Vec<Balancer>,
        published: &[IpAddr],
        entry: &ServiceState,
    ) -> Result<Vec<Balancer>, Error> {
        // Those that Services share are in order.
        if mine.len() > 1 && entry.shared().is_none() {
            let ours = self.own_floating_ips(&self.floating_mark(owner, None)).await?;
            let published = entry.known_addresses(owner, published);
            mine.sort_by_key(|balancer| preference(balancer, &published, &ours));
        }
        Ok(mine)
    }

    /// One that replaced the owner's load balancer before, and failed; and those beside it that serve or have an address that clients know,
    /// which are never deleted for it.
    async fn failed_replacements(
        &self,
        lb: &LoadBalancer,
        wanted: &Desired,
        entry: &ServiceState,
    ) -> Result<(Option<Balancer>, Vec<Balancer>), Error> {
        let present = |spare: &&Balancer| spare.provisioning_status != Provisioning::Deleting;
        let spares: Vec<Balancer> = entry.spare.iter().filter(present).cloned().collect();
        if spares.is_empty() {
            return Ok((None, spares));
        }
        let mut floating = self.own_floating_ips(&self.floating_mark(&lb.owner, None)).await?;
        let published = entry.known_addresses(&lb.owner, &lb.published);
        if let WantedAddress::Given(address) = wanted.address {
            floating.extend(self.floating_ips(&[("floating_ip_address", &address.to_string())]).await?);
        }
        let is_needed =
            |spare: &Balancer| spare.is_serving() || has_known_address(spare, &published, &floating);
        let (kept, failed): (Vec<_>, Vec<_>) = spares.into_iter().partition(is_needed);
        Ok((failed.into_iter().next(), kept))
    }

    /// Looks once for other load balancers of the owner, or of the name: the answer to a creation may have been lost.
    pub(crate) async fn look_for_others(
        &self,
        owner: &Owner,
        balancer: &Balancer,
        entry: &mut ServiceState,
    ) -> Result<(), Error> {
        if entry.is_listed {
            return Ok(());
        }
        let mut all: Vec<Balancer> = if let Some(shared) = entry.shared() {
            self.shared_balancers(Some(shared)).await?
        } else {
            let all = self.balancers_of(&owner.service).await?;
            all.into_iter().filter(|(of, _)| of == owner).map(|(_, found)| found).collect()
        };
        all.retain(|found| found.id != balancer.id);
        (entry.spare, entry.is_listed) = (all, true);
        Ok(())
    }

    /// Deletes the owner's other load balancers. One that cannot be deleted now goes at a later resync.
    pub(crate) async fn remove_others(&self, owner: &Owner, entry: &mut ServiceState) -> Result<(), Error> {
        for other in std::mem::take(&mut entry.spare) {
            self.remove(owner, &other, false).await?;
        }
        Ok(())
    }
}

/// Whether it has a floating IP of these, or a VIP that is published.
fn has_known_address(balancer: &Balancer, published: &[IpAddr], floating: &[FloatingIp]) -> bool {
    let is_on = |ip: &FloatingIp| ip.port_id.as_deref().is_some_and(|port| balancer.floating_port() == port);
    floating.iter().any(is_on) || balancer.vips().any(|(vip, _)| published.contains(&vip))
}

/// Which of several load balancers of an owner is the one: what serves clients, and not an empty one that only came first.
pub(crate) fn preference(
    balancer: &Balancer,
    published: &[IpAddr],
    ours: &[FloatingIp],
) -> (bool, bool, bool, Option<String>, String) {
    (
        balancer.provisioning_status == Provisioning::Deleting,
        balancer.provisioning_status == Provisioning::Error,
        !has_known_address(balancer, published, ours),
        balancer.created_at.clone(),
        balancer.id.clone(),
    )
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use steerage_model::Protocol;
    use steerage_provider_api::{Compare, Provider as _};

    use super::*;
    use crate::desired::tests::planned;
    use crate::scripted::{Scripted, ids, settle};

    const WEB: (Protocol, u16, u16) = (Protocol::Tcp, 80, 30080);

    fn in_error(cloud: &Scripted, id: &str, operating: &str) {
        let changes = json!({ "provisioning_status": "ERROR", "operating_status": operating });
        cloud.set("loadbalancers", ("id", id), &changes);
    }

    #[tokio::test(start_paused = true)]
    async fn load_balancer_in_error_that_serves_is_kept_for_a_while() {
        let cloud = Scripted::new();
        let provider = cloud.provider();
        let lb = planned(&[WEB], &[1]);
        let before = settle(&provider, &lb).await.unwrap();
        let old = ids(&cloud);
        in_error(&cloud, &old[0], "DEGRADED");
        cloud.writes();
        for _ in 0..9 {
            let error = provider.apply(&lb, Compare::InPlace).await.unwrap_err();
            assert!(error.to_string().contains(&old[0]), "{error}");
            tokio::time::advance(Duration::from_mins(1)).await;
        }
        assert!(cloud.writes().is_empty());
        tokio::time::advance(Duration::from_mins(1)).await;
        assert!(matches!(provider.apply(&lb, Compare::InPlace).await.unwrap().progress, Progress::Again(_)));
        assert_eq!(settle(&provider, &lb).await.unwrap().ingress, before.ingress);
        // The address moves before the old one goes.
        assert_eq!(cloud.writes(), ["POST loadbalancers", "PUT floatingips", "DELETE loadbalancers"]);
        assert!(ids(&cloud).len() == 1 && ids(&cloud) != old);
    }

    /// After a partition, the first heartbeats show a wrong state.
    #[tokio::test(start_paused = true)]
    async fn load_balancer_that_seems_not_to_serve_for_a_moment_is_kept() {
        let cloud = Scripted::new();
        let provider = cloud.provider();
        let lb = planned(&[WEB], &[1]);
        settle(&provider, &lb).await.unwrap();
        let old = ids(&cloud)[0].clone();
        in_error(&cloud, &old, "DEGRADED");
        provider.apply(&lb, Compare::InPlace).await.unwrap_err();
        cloud.writes();
        for _ in 0..3 {
            in_error(&cloud, &old, "ERROR");
            for _ in 0..3 {
                let outcome = provider.apply(&lb, Compare::Remembered).await.unwrap();
                assert!(matches!(outcome.progress, Progress::Again(_)));
                tokio::time::advance(Duration::from_secs(4)).await;
            }
            in_error(&cloud, &old, "ONLINE");
            provider.apply(&lb, Compare::Remembered).await.unwrap_err();
        }
        assert!(cloud.writes().is_empty());
        in_error(&cloud, &old, "ERROR");
        settle(&provider, &lb).await.unwrap();
        assert!(ids(&cloud).len() == 1 && ids(&cloud)[0] != old);
    }

    #[tokio::test(start_paused = true)]
    async fn load_balancers_are_replaced_one_after_the_other() {
        let cloud = Scripted::new();
        let provider = cloud.provider();
        let lbs = ["a", "b"].map(|name| {
            let owner = Owner { service: steerage_model::Key::new("shop", name), uid: name.to_owned() };
            LoadBalancer { owner, ..planned(&[WEB], &[1]) }
        });
        for lb in &lbs {
            settle(&provider, lb).await.unwrap();
        }
        for id in ids(&cloud) {
            in_error(&cloud, &id, "OFFLINE");
        }
        cloud.writes();
        provider.apply(&lbs[0], Compare::InPlace).await.unwrap();
        let error = provider.apply(&lbs[1], Compare::InPlace).await.unwrap_err();
        assert!(error.to_string().contains("one load balancer after the other"), "{error}");
        assert_eq!(cloud.writes(), ["POST loadbalancers"]);
        settle(&provider, &lbs[0]).await.unwrap();
        settle(&provider, &lbs[1]).await.unwrap();
    }

    /// The new one fails too: the old one has the address, and stays.
    #[tokio::test(start_paused = true)]
    async fn failed_replacement_is_deleted_and_not_the_one_with_the_address() {
        let cloud = Scripted::new();
        let provider = cloud.provider();
        let lb = planned(&[WEB], &[1]);
        settle(&provider, &lb).await.unwrap();
        let old = ids(&cloud)[0].clone();
        in_error(&cloud, &old, "OFFLINE");
        provider.apply(&lb, Compare::InPlace).await.unwrap();
        let new = ids(&cloud)[1].clone();
        in_error(&cloud, &new, "OFFLINE");
        for _ in 0..3 {
            let _ = provider.apply(&lb, Compare::Remembered).await;
            tokio::time::advance(Duration::from_secs(10)).await;
        }
        assert_eq!(ids(&cloud), [old]);
        tokio::time::advance(Duration::from_mins(1)).await;
        let _ = provider.apply(&lb, Compare::Remembered).await;
        settle(&provider, &lb).await.unwrap();
        assert_eq!(ids(&cloud).len(), 1);
    }

    /// It was chosen while it was being created, after a failed read or a restart.
    #[tokio::test(start_paused = true)]
    async fn replacement_that_fails_later_does_not_cost_the_one_that_serves() {
        for is_restarted in [true, false] {
            let cloud = Scripted::new();
            let mut provider = cloud.provider();
            let lb = planned(&[WEB], &[1]);
            let before = settle(&provider, &lb).await.unwrap();
            let old = ids(&cloud)[0].clone();
            in_error(&cloud, &old, "ONLINE");
            provider.apply(&lb, Compare::InPlace).await.unwrap_err();
            tokio::time::advance(Duration::from_mins(11)).await;
            provider.apply(&lb, Compare::Remembered).await.unwrap();
            let new = ids(&cloud)[1].clone();
            let pending = json!({ "provisioning_status": "PENDING_CREATE", "operating_status": "OFFLINE" });
            cloud.set("loadbalancers", ("id", &new), &pending);
            if is_restarted {
                provider = cloud.provider();
            }
            // Longer than the wait after the first replacement.
            for _ in 0..20 {
                provider.apply(&lb, Compare::Remembered).await.unwrap();
                tokio::time::advance(Duration::from_secs(5)).await;
            }
            in_error(&cloud, &new, "OFFLINE");
            cloud.writes();
            for _ in 0..10 {
                let _ = provider.apply(&lb, Compare::Remembered).await;
                tokio::time::advance(Duration::from_secs(2)).await;
            }
            assert!(ids(&cloud).contains(&old), "{is_restarted}: {:?}", cloud.writes());
            assert!(ids(&cloud).len() <= 2 && cloud.all("floatingips").len() == 1);
            let port = cloud.all("floatingips")[0]["port_id"].clone();
            assert_eq!(port, json!(format!("port-of-{old}")));
            for _ in 0..20 {
                let _ = provider.apply(&lb, Compare::Remembered).await;
                tokio::time::advance(Duration::from_mins(1)).await;
            }
            assert_eq!(settle(&provider, &lb).await.unwrap().ingress, before.ingress);
            assert!(ids(&cloud).len() == 1 && ![&old, &new].contains(&&ids(&cloud)[0]));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn lost_answer_of_a_creation_leaves_one_load_balancer() {
        for is_restarted in [false, true] {
            for annotations in [&[][..], &[(crate::annotations::INTERNAL, "true")]] {
                let cloud = Scripted::new();
                let mut provider = cloud.provider();
                let mut lb = planned(&[WEB], &[1]);
                let pairs = annotations.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
                lb.annotations = pairs.collect();
                cloud.lose("POST loadbalancers");
                cloud.hide("loadbalancers");
                settle(&provider, &lb).await.unwrap_err();
                // The list does not have it yet.
                assert!(matches!(
                    provider.apply(&lb, Compare::Remembered).await.unwrap().progress,
                    Progress::Again(_)
                ));
                let made = ids(&cloud);
                assert_eq!(made.len(), 2);
                cloud.show();
                let first = settle(&provider, &lb).await.unwrap();
                assert_eq!(ids(&cloud), made[1..]);
                // Another one turns up, older than the one that serves.
                let mut lost = cloud.all("loadbalancers")[0].clone();
                for (key, value) in
                    [("id", "old"), ("vip_port_id", "x"), ("vip_address", "10.0.0.9"), ("created_at", "2025")]
                {
                    lost[key] = value.into();
                }
                cloud.add("loadbalancers", &lost);
                if is_restarted {
                    provider = cloud.provider();
                }
                lb.published = vec![first.ingress[0].ip.unwrap()];
                let preview = provider.preview(&lb).await.unwrap().unwrap();
                assert_eq!(preview, ["load balancer old, a second one: deleted"]);
                provider.apply(&lb, Compare::InPlace).await.unwrap();
                assert_eq!(settle(&provider, &lb).await.unwrap().ingress, first.ingress);
                assert_eq!(ids(&cloud), made[1..]);
            }
        }
    }
}
