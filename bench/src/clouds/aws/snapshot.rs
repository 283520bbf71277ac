// SPDX-License-Identifier: Apache-2.0
//! Reads what moto holds from the text of its state: one line per object, its kind and name, a tab, its content. Pure.

use std::collections::{BTreeMap, BTreeSet};

/// Whether exactly so many listeners exist, all on this port, each with a target group that has exactly these targets.
pub(super) fn serves(text: &str, listeners: u32, port: u16, targets: &[&str]) -> bool {
    let groups = target_groups(text);
    let wanted: BTreeSet<_> = targets.iter().copied().collect();
    let found = of_kind(text, "listener ");
    let good = |(name, content): &(&str, &str)| {
        let is_on_port = name.rsplit_once(':').is_some_and(|(_, of)| of.parse() == Ok(port));
        let mut used = groups.iter().filter(|(group, _)| content.contains(&format!("'{group}'")));
        is_on_port && used.next().is_some_and(|(_, has)| *has == wanted) && used.next().is_none()
    };
    found.len() == listeners as usize && found.iter().all(good)
}

/// The number of target groups that no listener uses.
pub(super) fn unused_target_groups(text: &str) -> usize {
    let listeners = of_kind(text, "listener ");
    let is_used = |group: &str| listeners.iter().any(|(_, content)| content.contains(&format!("'{group}'")));
    target_groups(text).keys().filter(|group| !is_used(group)).count()
}

/// The targets of each target group.
fn target_groups(text: &str) -> BTreeMap<&str, BTreeSet<&str>> {
    of_kind(text, "target group ")
        .into_iter()
        .map(|(name, content)| {
            // A list as Python prints it: every second piece between quotes is a target.
            let list = content.rsplit_once(" targets ").map_or("", |(_, list)| list);
            (name, list.split('\'').skip(1).step_by(2).collect())
        })
        .collect()
}

fn of_kind<'a>(text: &'a str, kind: &str) -> Vec<(&'a str, &'a str)> {
    text.lines().filter_map(|line| line.strip_prefix(kind)?.split_once('\t')).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "target group one\t['TCP', 30080] targets ['i-1', 'i-2']\n\
        target group two\t['TCP', 30081] targets ['i-2', 'i-1']\n\
        target group old\t['TCP', 30082] targets []\n\
        load balancer a\t['network']\n\
        listener a:80\t['TCP', ['one'], []]\n\
        listener b:80\t['TCP', ['two'], []]\n";

    #[test]
    fn all_listeners_need_the_port_and_the_targets() {
        let both = ["i-1", "i-2"];
        assert!(serves(TEXT, 2, 80, &both));
        assert!(!serves(TEXT, 2, 81, &both));
        assert!(!serves(TEXT, 3, 80, &both));
        assert!(!serves(TEXT, 2, 80, &["i-1"]));
        assert!(!serves(&TEXT.replace("['two']", "['nothing']"), 2, 80, &both));
        assert!(serves("target group old\t[] targets []\n", 0, 80, &both));
    }

    #[test]
    fn target_group_without_listener_is_unused() {
        assert_eq!(unused_target_groups(TEXT), 1);
        assert_eq!(unused_target_groups(""), 0);
    }
}
