// SPDX-License-Identifier: Apache-2.0
//! All objects that follow from a host's status, kept while the status changes: a change costs as much as has changed. Pure, used by
//! the writer.
//!
//! What all statuses together lead to is the definition. Where a change could concern the objects of others, all are made again.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use super::HostStatus;
use super::objects::{self, ObjectKey, WantedObjects};
use crate::plan::SharedGroup;

/// Objects that may not be as they were.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ChangedKeys {
    All,
    These(BTreeSet<ObjectKey>),
}

impl Default for ChangedKeys {
    fn default() -> Self {
        Self::These(BTreeSet::new())
    }
}

impl ChangedKeys {
    pub(super) fn add(&mut self, other: Self) {
        match (&mut *self, other) {
            (Self::These(keys), Self::These(others)) => keys.extend(others),
            _ => *self = Self::All,
        }
    }
}

/// The groups of one name, and how many load balancers use each. There is more than one where hashes collide.
type Users = Vec<(Arc<SharedGroup>, usize)>;

#[derive(Debug, Default)]
pub(super) struct Wanted {
    pub(super) objects: WantedObjects,
    /// Of which they are.
    status: HostStatus,
    /// By name.
    groups: HashMap<String, Users>,
}

impl Wanted {
    /// All objects of this status; none before the engine has planned.
    pub(super) fn new(status: HostStatus) -> Self {
        let mut wanted = Self { status, ..Self::default() };
        if wanted.status.interface.is_empty() {
            return wanted;
        }
        wanted.objects.insert(ObjectKey::Host, objects::host(&wanted.status));
        for (_, status) in wanted.status.load_balancers.iter() {
            objects::sharable(status).for_each(|group| add(&mut wanted.groups, group));
        }
        let groups = &wanted.groups;
        for (name, status) in wanted.status.load_balancers.iter() {
            let (object, referred) =
                objects::of_load_balancer(name, status, |group| is_shared(groups, group));
            wanted.objects.extend(referred);
            wanted.objects.insert(ObjectKey::LoadBalancer(name.clone()), object);
        }
        wanted
    }

    /// Follows the status. Returns which objects may have changed.
    pub(super) fn update(&mut self, next: HostStatus) -> ChangedKeys {
        if let Some(changed) = self.follow(&next) {
            self.status = next;
            return ChangedKeys::These(changed);
        }
        *self = Self::new(next);
        ChangedKeys::All
    }

    /// `None` if all are to be made again.
    fn follow(&mut self, next: &HostStatus) -> Option<BTreeSet<ObjectKey>> {
        if self.status.interface.is_empty() || next.interface.is_empty() {
            return None;
        }
        let before = &self.status.load_balancers;
        let names = next.load_balancers.differing(before);
        if names.len() > next.load_balancers.len() / 4 + 1 {
            return None;
        }
        let mut touched = HashMap::<String, bool>::new();
        for status in names.iter().filter_map(|name| before.get(name)) {
            for group in objects::sharable(status) {
                touched.entry(group.name.clone()).or_insert_with(|| is_shared(&self.groups, group));
                remove(&mut self.groups, group);
            }
        }
        for status in names.iter().filter_map(|name| next.load_balancers.get(name)) {
            for group in objects::sharable(status) {
                touched.entry(group.name.clone()).or_insert_with(|| is_shared(&self.groups, group));
                add(&mut self.groups, group);
            }
        }
        let has_turned = |(name, was_shared): (&String, &bool)| match self.groups.get(name).map(Vec::as_slice)
        {
            None => *was_shared,
            Some([(_, users)]) => (*users > 1) != *was_shared,
            // Which of them is shared depends on the others.
            Some(_) => true,
        };
        if touched.iter().any(has_turned) {
            return None;
        }
        let mut changed = BTreeSet::from([ObjectKey::Host]);
        self.objects.insert(ObjectKey::Host, objects::host(next));
        for name in names {
            let key = ObjectKey::LoadBalancer(name.to_owned());
            match next.load_balancers.get(name) {
                Some(status) => {
                    let (object, referred) =
                        objects::of_load_balancer(name, status, |group| is_shared(&self.groups, group));
                    changed.extend(referred.iter().map(|(key, _)| key.clone()));
                    self.objects.extend(referred);
                    self.objects.insert(key.clone(), object);
                }
                None => drop(self.objects.remove(&key)),
            }
            changed.insert(key);
        }
        Some(changed)
    }
}

fn add(groups: &mut HashMap<String, Users>, group: &Arc<SharedGroup>) {
    let users = match groups.get_mut(&group.name) {
        Some(users) => users,
        None => groups.entry(group.name.clone()).or_default(),
    };
    match users.iter_mut().find(|(found, _)| found == group) {
        Some((_, number)) => *number += 1,
        None => users.push((Arc::clone(group), 1)),
    }
}

fn remove(groups: &mut HashMap<String, Users>, group: &Arc<SharedGroup>) {
    let Some(users) = groups.get_mut(&group.name) else { return };
    if let Some((_, number)) = users.iter_mut().find(|(found, _)| found == group) {
        *number -= 1;
    }
    users.retain(|(_, number)| *number > 0);
    if users.is_empty() {
        groups.remove(&group.name);
    }
}

/// Whether the group has an object of its own: one load balancer alone needs no other object. Of several groups with the same name it
/// is the one that most load balancers use: the name has a hash of numbers that users choose.
fn is_shared(groups: &HashMap<String, Users>, group: &SharedGroup) -> bool {
    let users = groups.get(&group.name).into_iter().flatten();
    let most = users.max_by_key(|(_, number)| *number);
    most.is_some_and(|(found, number)| *number > 1 && **found == *group)
}
