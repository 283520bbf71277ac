// SPDX-License-Identifier: Apache-2.0
//! Rules of ports that are served although the Service no longer has them: AWS refuses the listener of a new port.

use std::collections::BTreeSet;

use steerage_provider_api::{Compare, LoadBalancer, Provider as _};
use tokio::time::Duration;

use super::driver::{apply, pause, provider, standin, standin_with, wanted};
use super::refused_listeners::{GOOD, MISSING, served, with_tls};
use super::security_groups::{ALL, OFFICE, group, rule};
use crate::standin::faults::{Fault, Faults};
use crate::standin::{Quotas, StandIn};

/// The ports that somebody may connect to.
fn open(cloud: &StandIn) -> Vec<u16> {
    group(cloud).own.iter().map(|rule| rule.port).collect()
}

/// A list shows no listeners, so until they are read, any port may have one.
#[tokio::test(start_paused = true)]
async fn restart_takes_no_rules_before_it_reads_the_listeners() {
    let plain = (wanted(&[(80, 30080), (443, 30443)], &[0]), wanted(&[(80, 30080), (8443, 30443)], &[0]));
    let with_tls = (with_tls(plain.0.clone(), "443", GOOD), with_tls(plain.1.clone(), "8443", MISSING));
    for (quota, (before, after)) in [(2, plain), (50, with_tls)] {
        let cloud = standin_with(1, Quotas { listeners: quota, ..Quotas::default() });
        let aws = provider(&cloud);
        apply(&aws, &before, Compare::Remembered).await.unwrap();
        pause().await;
        assert!(apply(&aws, &after, Compare::Remembered).await.unwrap().incomplete.is_some());
        assert!(served(&cloud).contains_key(&443));
        tokio::time::sleep(Duration::from_mins(10)).await;
        let aws = provider(&cloud);
        cloud.set_faults(Faults::Once("DescribeListeners", Fault::Code("Throttling")));
        for round in 0..4 {
            let answer = aws.apply(&after, Compare::Remembered).await;
            assert_eq!(open(&cloud), [80, 443, 8443], "round {round} at quota {quota}: {answer:?}");
            pause().await;
        }
        assert!(!cloud.has_faults(), "the read failed once");
    }
}

/// Who removes a port and then adds sources did not mean that port.
#[tokio::test(start_paused = true)]
async fn held_port_admits_nobody_new() {
    let of = |ports: &[(u16, u16)], tls, certificate, range: &str| {
        let lb = with_tls(wanted(ports, &[0]), tls, certificate);
        LoadBalancer { source_ranges: vec![range.parse().unwrap()], ..lb }
    };
    let cloud = standin(1);
    let aws = provider(&cloud);
    let first = of(&[(22, 30022), (80, 30080), (443, 30443)], "443", GOOD, OFFICE);
    apply(&aws, &first, Compare::Remembered).await.unwrap();
    for (range, kept) in [(ALL, Some(OFFICE)), ("10.1.0.0/16", Some("10.1.0.0/16")), ("192.0.2.0/24", None)] {
        pause().await;
        let moved = of(&[(80, 30080), (8443, 30443)], "8443", MISSING, range);
        assert!(apply(&aws, &moved, Compare::Remembered).await.unwrap().incomplete.is_some());
        assert_eq!(served(&cloud).into_keys().collect::<Vec<_>>(), [22, 80, 443]);
        let requested = [80, 8443].map(|port| rule("tcp", port, range));
        let held = kept.into_iter().flat_map(|kept| [22, 443].map(|port| rule("tcp", port, kept)));
        assert_eq!(group(&cloud).own, requested.into_iter().chain(held).collect::<BTreeSet<_>>(), "{range}");
    }
}
