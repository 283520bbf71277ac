// SPDX-License-Identifier: Apache-2.0
//! How much one Service and one namespace may have of what all share: Azure's limits are those of a load balancer and of the network
//! security group, and whoever uses them up stops everybody else. Pure.

use std::collections::BTreeMap;

use steerage_model::Key;
use steerage_provider_api::{Error, LoadBalancer};
use steerage_provider_cloud::ClusterId;

use crate::admission::{ALLOWING, MOST_ADDRESSES};
use crate::marks::Mark;
use crate::merge::{Fragment, MOST_FRONTENDS, MOST_RULES};
use crate::options::Sources;
use crate::reasons;
use crate::types::BalancerProperties;

/// Rules of one Service: a port of a family is one.
const RULES_OF_SERVICE: usize = 250;
/// Ranges, and service tags, of one Service.
const RANGES_OF_SERVICE: usize = 250;
const TAGS_OF_SERVICE: usize = 5;
/// A namespace may have one of so many parts of a load balancer and of the security group.
const NAMESPACES: usize = 2;

/// Refuses a Service that wants too much.
pub(crate) fn check_service(lb: &LoadBalancer, sources: &Sources) -> Result<(), Error> {
    let rules = lb.listeners.len() * lb.families.len();
    let too_many_sources = reasons::TOO_MANY_SOURCE_RANGES;
    for (reason, what, wants, most) in [
        (reasons::TOO_MANY_PORTS, "ports, counted for each IP family", rules, RULES_OF_SERVICE),
        (too_many_sources, "source ranges", sources.ranges.len(), RANGES_OF_SERVICE),
        (too_many_sources, "service tags", sources.tags.len(), TAGS_OF_SERVICE),
    ] {
        if wants > most {
            let message = format!(
                "The Service has {wants} {what}, and Steerage allows {most}, because all Services share what Azure allows. No load balancer is \
                 created or changed. Use fewer, or several Services."
            );
            return Err(Error::invalid(reason, message));
        }
    }
    Ok(())
}

/// Refuses a Service that adds to a load balancer of which its namespace has its share. It wants so many frontends and rules, with those of
/// old addresses. `known` says whose the parts are.
pub(crate) fn check_namespace(
    all: &BalancerProperties,
    (cluster, known): (&ClusterId, &BTreeMap<Mark, Key>),
    fragment: &Fragment,
    [frontends, rules]: [usize; 2],
) -> Result<(), Error> {
    let namespace = fragment.service.namespace();
    let fronts = all.frontends.iter().map(|part| part.name.as_str());
    let of_rules = all.rules.iter().map(|part| part.name.as_str());
    for (what, names, wants, most) in [
        ("frontends", fronts.collect::<Vec<_>>(), frontends, MOST_FRONTENDS / NAMESPACES),
        ("rules", of_rules.collect(), rules, MOST_RULES / NAMESPACES),
    ] {
        let (mut own, mut others) = (0, 0);
        for mark in names.iter().filter_map(|name| Mark::read(cluster, name)) {
            if mark == fragment.mark {
                own += 1;
            } else if known.get(&mark).is_some_and(|of| of.namespace() == namespace) {
                others += 1;
            }
        }
        if wants > own && others + wants > most {
            let message = format!(
                "The namespace {namespace} has {others} other {what} in the load balancer; with the Service's {wants} that is more than the \
                 {most} that Steerage allows a namespace, because all Services share what Azure allows. No load balancer is created or \
                 changed. Delete Services or ports, or use another namespace."
            );
            return Err(Error::invalid(reasons::NAMESPACE_LIMIT_EXCEEDED, message));
        }
    }
    Ok(())
}

/// Refuses a Service that adds to a security group of which its namespace has its share. It has rules, sources and addresses there, before
/// and after.
pub(crate) fn check_rules(namespace: &str, [before, after]: [[usize; 3]; 2]) -> Result<(), Error> {
    let limits = [("rules", ALLOWING as usize), ("sources", MOST_ADDRESSES), ("addresses", MOST_ADDRESSES)];
    for (((what, most), was), now) in limits.into_iter().zip(before).zip(after) {
        let most = most / NAMESPACES;
        if now > most && now > was {
            let message = format!(
                "The namespace {namespace} has {was} {what} in the network security group; with the Service they would be {now}, and Steerage \
                 allows a namespace {most}, because all Services share what Azure allows. No rule is added, so clients of the Service are \
                 admitted as before. Use fewer different source ranges and ports, or another namespace."
            );
            return Err(Error::invalid(reasons::NAMESPACE_LIMIT_EXCEEDED, message));
        }
    }
    Ok(())
}

#[cfg(test)]
pub(crate) mod tests {
    use crate::annotations;
    use crate::config::tests::config;
    use crate::desired::desired;
    use crate::desired::tests::{annotated, named, planned};
    use crate::document::{BalancerDocument, Document as _};
    use crate::merge::{FrontendAddress, FrontendPart, Intent, Layout, Others};
    use crate::types::Balancer;

    use super::*;

    pub(crate) fn intent(lb: &LoadBalancer) -> Intent {
        let all = desired(lb, &config()).unwrap();
        let part = |front: &crate::desired::WantedFrontend| FrontendPart {
            family: front.family,
            address: FrontendAddress::Public(format!("/ips/{}", lb.owner.uid)),
            pool: front.pool.clone(),
        };
        Intent::Present(Fragment {
            service: all.service.clone(),
            mark: all.mark.clone(),
            is_listed: false,
            frontends: all.frontends.iter().map(part).collect(),
            rules: all.rules,
            probe: all.probe,
            others: Others::Gone,
        })
    }

    #[test]
    fn service_with_too_many_ports_ranges_or_tags_is_refused() {
        let ports: Vec<u16> = (1..=251).collect();
        let error = desired(&planned(&ports, &[1]), &config()).unwrap_err();
        assert!(error.reason() == "TooManyPorts" && error.to_string().contains("251 ports"), "{error}");
        assert!(desired(&planned(&ports[1..], &[1]), &config()).is_ok());
        let mut lb = planned(&[80], &[1]);
        let mut with_group = config();
        with_group.security_group = Some("/nsg".to_owned());
        lb.source_ranges = (0..251).map(|i| format!("10.0.{i}.0/24").parse().unwrap()).collect();
        assert_eq!(desired(&lb, &with_group).unwrap_err().reason(), "TooManySourceRanges");
        let tagged = |tags: &str| annotated(planned(&[80], &[1]), annotations::ALLOWED_SERVICE_TAGS, tags);
        assert!(desired(&tagged("A,B,C,D,E"), &with_group).is_ok());
        assert_eq!(desired(&tagged("A,B,C,D,E,F"), &with_group).unwrap_err().reason(), "TooManySourceRanges");
    }

    /// Old addresses count, too.
    #[test]
    fn namespace_that_moves_again_and_again_has_no_more_than_half() {
        let document = BalancerDocument::new(Layout { config: config(), is_internal: false });
        let mut body: Option<Balancer> = None;
        let ports: Vec<u16> = (1..=250).collect();
        let to = |name: &str, ip: &str| {
            let Intent::Present(mut fragment) = intent(&named(name, &ports, &[1])) else { unreachable!() };
            fragment.others = Others::Serve;
            fragment.frontends[0].address = FrontendAddress::Public(format!("/ips/{ip}"));
            Intent::Present(fragment)
        };
        for (name, ip) in [("many-0", "a"), ("many-1", "b"), ("many-1", "c")] {
            assert!(document.apply(&mut body, &to(name, ip), &|_| false).unwrap());
        }
        let error = document.apply(&mut body, &to("many-0", "d"), &|_| false).unwrap_err();
        assert_eq!(error.reason(), "NamespaceLimitExceeded", "{error}");
    }

    /// A namespace with many Services leaves room for others, and what it has goes on.
    #[test]
    fn namespace_has_half_of_the_load_balancer() {
        let document = BalancerDocument::new(Layout { config: config(), is_internal: false });
        let mut body: Option<Balancer> = None;
        let ports: Vec<u16> = (1..=250).collect();
        let apply =
            |body: &mut Option<Balancer>, lb: &LoadBalancer| document.apply(body, &intent(lb), &|_| false);
        for index in 0..3 {
            assert!(apply(&mut body, &named(&format!("many-{index}"), &ports, &[1])).unwrap());
        }
        let error = apply(&mut body, &named("more", &[80], &[1])).unwrap_err();
        assert!(
            error.reason() == "NamespaceLimitExceeded" && error.to_string().contains("namespace shop"),
            "{error}"
        );
        assert!(apply(&mut body, &named("many-0", &ports, &[2])).unwrap(), "its nodes change");
        let mut other = named("other", &ports, &[1]);
        other.owner.service = Key::new("zoo", "other");
        assert!(apply(&mut body, &other).unwrap(), "another namespace");
        let gone = desired(&named("many-1", &[80], &[1]), &config()).unwrap();
        document.apply(&mut body, &Intent::Absent(gone.mark, gone.service), &|_| false).unwrap();
        assert!(apply(&mut body, &named("more", &[80], &[1])).unwrap());
    }
}
