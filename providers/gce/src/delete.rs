// SPDX-License-Identifier: Apache-2.0
//! Deletes everything of an owner: forwarding rules, the backend service, then what it used, and the addresses that Steerage reserved.

use steerage_provider_api::{Error, Owner, Progress};

use crate::diff::Diff;
use crate::provider::Gce;
use crate::state::ServiceState;
use crate::tree::Tree;

/// Rounds of changes whose operations end at once.
const MAX_ROUNDS: usize = 12;

impl Gce {
    pub(crate) async fn delete_all(
        &self,
        owner: &Owner,
        entry: &mut ServiceState,
    ) -> Result<Progress, Error> {
        let again = |entry: &ServiceState| Ok(Progress::Again(entry.poll(self.config.poll)));
        if !self.settle(entry).await? {
            return again(entry);
        }
        entry.expire_denied();
        let is_present = entry.tree.as_ref().is_none_or(|(of, _)| of == owner);
        for _ in 0..MAX_ROUNDS {
            let known = entry.known(owner).filter(|tree| !tree.own.is_empty()).cloned();
            let tree = if let Some(tree) = known {
                tree
            } else {
                // Also to be sure that nothing is left.
                let mut owners = self.read_owners(&owner.service, false).await?;
                let Some(tree) = owners.remove(owner) else {
                    if is_present {
                        entry.forget();
                        self.shared.end_use(&owner.service).await;
                    }
                    return if self.shared.clean(self).await? { Ok(Progress::Done) } else { again(entry) };
                };
                if is_present {
                    entry.note_read(owner, tree.clone(), Vec::new());
                }
                tree
            };
            let steps = self.steps_away(&tree, entry);
            if steps.is_empty() {
                if !tree.own.is_empty() && entry.leaves_firewalls() {
                    return Err(Self::firewalls_left(entry));
                }
                // What is left waits for what was deleted.
                entry.forget();
                return again(entry);
            }
            if !self.send_all(owner, &steps, entry).await? {
                return again(entry);
            }
        }
        again(entry)
    }

    fn steps_away(&self, tree: &Tree, entry: &ServiceState) -> Vec<crate::step::Step> {
        Diff { config: &self.config, tree, leaves_firewalls: entry.leaves_firewalls() }.away()
    }

    /// Rules that somebody else has to delete.
    fn firewalls_left(entry: &ServiceState) -> Error {
        let commands = entry.denied.iter().flat_map(|(_, commands)| commands.values());
        let commands: Vec<&str> = commands.map(String::as_str).collect();
        Error::denied(format!("firewall rules of the network are left. Run: {}", commands.join(" && ")))
    }
}
