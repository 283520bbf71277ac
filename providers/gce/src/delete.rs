// SPDX-License-Identifier: Apache-2.0
//! Deletes everything of an owner: forwarding rules, the backend service, then what it used, and the addresses that Steerage reserved.
//!
//! Before the groups are deleted, a list that began after all other changes shows that nothing else is left. That the groups are gone
//! says each deletion's operation. So what Services share is deleted beside the groups, by the same list.

use steerage_provider_api::{Error, Owner, Progress};
use tokio::time::Instant;

use crate::diff::Diff;
use crate::firewall_command;
use crate::object::Kind;
use crate::provider::Gce;
use crate::state::ServiceState;
use crate::step::Step;
use crate::tree::Tree;

/// Rounds of changes whose operations end at once.
const MAX_ROUNDS: usize = 12;

impl Gce {
    pub(crate) async fn delete_all(
        &self,
        owner: &Owner,
        entry: &mut ServiceState,
    ) -> Result<Progress, Error> {
        let again = |entry: &ServiceState| Ok(Progress::Again(self.poll(entry)));
        let is_present = |entry: &ServiceState| entry.tree.as_ref().is_none_or(|(of, _)| of == owner);
        if is_present(entry) {
            self.rule_quota().note_deletion(&owner.service);
        }
        if !self.settle(entry).await? {
            return again(entry);
        }
        entry.denied.expire();
        if !is_present(entry) {
            return self.delete_earlier(owner, entry).await;
        }
        entry.note_deletion(owner);
        for _ in 0..MAX_ROUNDS {
            let Some(tree) = self.left(owner, entry).await? else { return again(entry) };
            let (steps, left) = self.steps_away(&tree, entry);
            let mut is_settled = true;
            if !steps.is_empty() {
                is_settled = self.send_all(owner, &steps, entry).await?;
            } else if !tree.own.is_empty() {
                if !left.is_empty() {
                    return Self::firewalls_left(&left, entry);
                }
                // What is left waits for what was deleted.
                entry.forget();
                return again(entry);
            }
            let Some(list) = entry.last_look.clone() else {
                if is_settled {
                    continue;
                }
                return again(entry);
            };
            let is_clean = self.shared.clean(self, Some(&list)).await?;
            if !is_settled || !is_clean {
                return again(entry);
            }
            if steps.is_empty() {
                entry.forget();
                return Ok(Progress::Done);
            }
        }
        again(entry)
    }

    /// What is left of the owner. Read again when only groups seem to be left, after the changes before that. `None` if the list has to
    /// be waited for.
    async fn left(&self, owner: &Owner, entry: &mut ServiceState) -> Result<Option<Tree>, Error> {
        let known = entry.known(owner);
        if let Some(tree) = known.filter(|tree| !has_only_groups(tree) || entry.last_look.is_some()) {
            return Ok(Some(tree.clone()));
        }
        let is_known = known.is_some();
        if entry.unverified_since.is_none() {
            if is_known {
                // Nothing of it refers to what Services share.
                self.shared.end_use(&owner.service).await;
            }
            entry.unverified_since = Some(Instant::now());
        }
        let since = entry.unverified_since.unwrap_or_else(Instant::now);
        let needs_all = is_known && self.shared.is_dirty().await;
        let Some(list) = self.list_since(&owner.service, since, needs_all).await? else { return Ok(None) };
        let found = self.of_service(&list.found, &owner.service);
        let tree = self.by_owner(found, &owner.service).remove(owner).unwrap_or_default();
        entry.note_read(owner, tree.clone(), Vec::new());
        if has_only_groups(&tree) {
            if !is_known {
                self.shared.end_use(&owner.service).await;
            }
            entry.last_look = Some(list);
        }
        Ok(Some(tree))
    }

    /// Deletes what is left of an owner, beside a later Service of the name.
    async fn delete_earlier(&self, owner: &Owner, entry: &mut ServiceState) -> Result<Progress, Error> {
        for _ in 0..MAX_ROUNDS {
            let mut owners = self.read_owners(&owner.service, false).await?;
            let Some(tree) = owners.remove(owner) else {
                self.shared.end_earlier().await;
                let is_clean = self.shared.clean(self, None).await?;
                return Ok(if is_clean { Progress::Done } else { Progress::Again(self.poll(entry)) });
            };
            let (steps, left) = self.steps_away(&tree, entry);
            if steps.is_empty() {
                if !left.is_empty() {
                    return Self::firewalls_left(&left, entry);
                }
                entry.forget();
                break;
            }
            if !self.send_all(owner, &steps, entry).await? {
                break;
            }
        }
        Ok(Progress::Again(self.poll(entry)))
    }

    /// The changes that can be tried, and those that are left to others.
    fn steps_away(&self, tree: &Tree, entry: &ServiceState) -> (Vec<Step>, Vec<Step>) {
        let diff = Diff { config: &self.config, tree, denied: &entry.denied, published: &[] };
        entry.denied.split(diff.away())
    }

    /// Rules that somebody else has to delete. It is an error once after each refusal: the controller logs each error.
    fn firewalls_left(left: &[Step], entry: &mut ServiceState) -> Result<Progress, Error> {
        if !entry.denied.report() {
            return Ok(Progress::Again(entry.denied.due_in()));
        }
        Err(Error::Denied(format!(
            "Firewall rules of the network are left, and the credentials may not delete them. The deletion waits for that; Steerage \
             retries. {}: {}",
            firewall_command::GRANT,
            entry.denied.commands_of(left)
        )))
    }
}

fn has_only_groups(tree: &Tree) -> bool {
    tree.own.keys().all(|id| id.kind == Kind::Group)
}
