// SPDX-License-Identifier: Apache-2.0
//! The security groups that an annotation names for a load balancer, instead of Steerage's own one. Pure: `lookup` finds the IDs of
//! names, `named_groups_sync` attaches them. Nothing here changes a rule: these groups belong to others.

use std::collections::BTreeSet;

use steerage_model::shown;
use steerage_provider_api::{Error, LoadBalancer};
use steerage_provider_cloud::annotation;

use crate::annotations::{DISABLE_SECURITY_GROUP, ICMP_FOR_PATH_MTU, SECURITY_GROUPS};
use crate::reasons;
use crate::subnets::NAME_TAG;

/// IDs and names, as the annotation has them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NamedGroups(BTreeSet<String>);

/// A security group's name and ID.
pub(crate) type NameAndId = (String, String);

fn is_id(item: &str) -> bool {
    item.starts_with("sg-")
}

/// What else a Service requests for its security.
#[derive(Clone, Copy)]
pub(crate) struct OtherWishes {
    pub(crate) has_sources: bool,
    pub(crate) is_disabled: bool,
    pub(crate) has_path_mtu: bool,
}

/// Reads the annotation. Beside it, nothing else may say who may connect: Steerage does not change the rules of these groups, and a list
/// of ranges without effect would look like a restriction.
pub(crate) fn read(lb: &LoadBalancer, others: OtherWishes) -> Result<Option<NamedGroups>, Error> {
    let Some(items) = annotation::distinct(&lb.annotations, SECURITY_GROUPS)? else { return Ok(None) };
    let names = format!("Annotation {SECURITY_GROUPS} names the security groups of the load balancer");
    let (problem, advice) = if others.has_sources {
        (
            format!(
                "{names}, whose rules decide who may connect, but the Service has source ranges or prefix lists too, which would have no \
                 effect."
            ),
            "Write the ranges into the rules of these groups and remove them from the Service, or remove the annotation.".to_owned(),
        )
    } else if others.is_disabled {
        (
            format!("{names}, but annotation {DISABLE_SECURITY_GROUP} requests none."),
            "Remove one of them.".to_owned(),
        )
    } else if others.has_path_mtu {
        (
            format!(
                "{names}, whose rules Steerage does not change, but annotation {ICMP_FOR_PATH_MTU} requests a rule."
            ),
            format!("Add the rule to one of these groups and remove {ICMP_FOR_PATH_MTU}."),
        )
    } else {
        return Ok(Some(NamedGroups(items.into_iter().collect())));
    };
    Err(annotation::conflict(&problem, &advice))
}

impl NamedGroups {
    /// These, and one more by its ID.
    pub(crate) fn with(mut self, id: Option<&str>) -> Self {
        self.0.extend(id.map(str::to_owned));
        self
    }

    /// Those whose IDs must be looked up.
    pub(crate) fn names(&self) -> impl Iterator<Item = &String> {
        self.0.iter().filter(|item| !is_id(item))
    }

    /// The IDs of all, with those that were found for the names.
    pub(crate) fn ids(&self, vpc: &str, found: &[NameAndId]) -> Result<BTreeSet<String>, Error> {
        let id = |item: &String| {
            if is_id(item) {
                return Ok(item.clone());
            }
            let shown = shown(item);
            let mut ids = found.iter().filter(|(name, _)| name == item).map(|(_, id)| id);
            let problem = match (ids.next(), ids.next()) {
                (Some(id), None) => return Ok(id.clone()),
                (Some(one), Some(other)) => {
                    format!("{one} and {other} of {vpc} both have the tag {NAME_TAG}=`{shown}`")
                }
                (None, _) => format!("no security group of {vpc} has the tag {NAME_TAG}=`{shown}`"),
            };
            let message = format!(
                "Annotation {SECURITY_GROUPS} names `{shown}`, but {problem}. An existing load balancer keeps its groups, and no new one is \
                 created. Use the name of one group, or its ID."
            );
            Err(Error::invalid(reasons::SECURITY_GROUPS_NOT_FOUND, message))
        };
        self.0.iter().map(id).collect()
    }
}

/// Refuses the load balancer's own group of Steerage, which leaves as soon as others are named.
pub(crate) fn check_own(ids: &BTreeSet<String>, own: Option<&str>) -> Result<(), Error> {
    let Some(own) = own.filter(|own| ids.contains(*own)) else { return Ok(()) };
    let problem = format!("names {own}, the group that Steerage created for this load balancer");
    Err(annotation::invalid(
        SECURITY_GROUPS,
        &problem,
        "Remove the annotation to keep that group, or name others.",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::desired::tests::planned;

    const NOTHING: OtherWishes = OtherWishes { has_sources: false, is_disabled: false, has_path_mtu: false };

    fn of(value: &str, others: OtherWishes) -> Result<Option<NamedGroups>, (&'static str, String)> {
        let mut lb = planned(&[]);
        lb.annotations.insert(SECURITY_GROUPS.to_owned(), value.to_owned());
        read(&lb, others).map_err(|error| (error.reason(), error.to_string()))
    }

    fn found(pairs: &[(&str, &str)]) -> Vec<NameAndId> {
        pairs.iter().map(|(name, id)| ((*name).to_owned(), (*id).to_owned())).collect()
    }

    #[test]
    fn ids_stay_and_names_are_looked_up() {
        assert_eq!(read(&planned(&[]), OtherWishes { has_sources: true, ..NOTHING }).unwrap(), None);
        let named = of(" sg-2, front end,sg-1", NOTHING).unwrap().unwrap();
        assert_eq!(named.names().collect::<Vec<_>>(), ["front end"]);
        let ids = named.ids("vpc-1", &found(&[("front end", "sg-3"), ("another", "sg-4")])).unwrap();
        assert_eq!(ids.into_iter().collect::<Vec<_>>(), ["sg-1", "sg-2", "sg-3"]);
    }

    #[test]
    fn names_must_be_those_of_one_group() {
        let named = of("front end", NOTHING).unwrap().unwrap();
        for (found, part) in [
            (found(&[("front", "sg-1")]), "no security group of vpc-1"),
            (found(&[("front end", "sg-1"), ("front end", "sg-2")]), "sg-1 and sg-2"),
        ] {
            let error = named.ids("vpc-1", &found).unwrap_err();
            assert_eq!(error.reason(), "SecurityGroupsNotFound");
            let text = error.to_string();
            assert!(text.contains(part) && text.contains("`front end`") && text.contains("vpc-1"), "{text}");
        }
    }

    #[test]
    fn nothing_else_may_say_who_may_connect() {
        for (others, part) in [
            (OtherWishes { has_sources: true, ..NOTHING }, "source ranges"),
            (OtherWishes { is_disabled: true, ..NOTHING }, DISABLE_SECURITY_GROUP),
            (OtherWishes { has_path_mtu: true, ..NOTHING }, ICMP_FOR_PATH_MTU),
        ] {
            let (reason, text) = of("sg-1", others).unwrap_err();
            assert_eq!(reason, "ConflictingAnnotations");
            assert!(text.contains(part) && text.contains(SECURITY_GROUPS), "{text}");
        }
        assert_eq!(of(" , ", NOTHING).unwrap_err().0, "InvalidAnnotation");
        assert_eq!(of("sg-1,sg-1", NOTHING).unwrap_err().0, "InvalidAnnotation");
    }

    #[test]
    fn own_group_cannot_be_named() {
        let ids = BTreeSet::from(["sg-1".to_owned()]);
        assert_eq!(check_own(&ids, Some("sg-1")).unwrap_err().reason(), "InvalidAnnotation");
        assert!(check_own(&ids, Some("sg-2")).is_ok() && check_own(&ids, None).is_ok());
    }
}
