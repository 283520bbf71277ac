// SPDX-License-Identifier: Apache-2.0
//! Certificates beside the default one of a listener, of which AWS refuses some.

use std::sync::Arc;
use std::time::Duration;

use steerage_model::Protocol;
use steerage_provider_api::{Compare, LoadBalancer, Provider as _};

use super::driver::{apply, changes, pause, provider, standin, wanted};
use super::pods::with_pods;
use super::refused_listeners::{GOOD, MISSING, refusal, served, with_tls};
use super::refused_ports::without_pods_on_9090;
use super::unanswered::{until_failure, waits_for, with_interval};
use crate::Aws;
use crate::desired::tests::planned_with_pods;
use crate::standin::StandIn;
use crate::standin::faults::{Fault, Faults};

/// The listener exists, with the default certificate.
#[tokio::test(start_paused = true)]
async fn unknown_further_certificate_holds_up_no_other_port() {
    let cloud = standin(1);
    let aws = provider(&cloud);
    let ports = [(443, 30443), (8443, 30444)];
    let both = format!("{GOOD},{MISSING}");
    let outcome =
        apply(&aws, &with_tls(wanted(&ports, &[0]), "*", &both), Compare::Remembered).await.unwrap();
    let (_, message) = refusal(&outcome);
    assert!(message.contains("port 443. Served, but not as requested: ports 443, 8443. AWS"), "{message}");
    assert_eq!(served(&cloud).len(), 2);
    pause().await;
    changes(&cloud);
    let corrected = with_tls(wanted(&ports, &[0]), "*", GOOD);
    assert_eq!(apply(&aws, &corrected, Compare::Remembered).await.unwrap().incomplete, None);
    assert_eq!(changes(&cloud), [""; 0]);
}

/// A TLS listener with these certificates beside its default one.
fn with_certificates(others: &[String]) -> LoadBalancer {
    with_tls(wanted(&[(443, 30443)], &[0]), "*", &format!("{GOOD},{}", others.join(",")))
}

fn certificates(count: usize) -> Vec<String> {
    (0..count).map(|i| format!("arn:aws:acm:::n{i:02}")).collect()
}

/// A listener at AWS's limit: 24 of these certificates beside the default one, and one that somebody added.
async fn at_the_limit(many: &[String]) -> (Arc<StandIn>, Aws) {
    let cloud = standin(1);
    cloud.set_unlimited();
    let aws = provider(&cloud);
    apply(&aws, &with_certificates(&many[..24]), Compare::Remembered).await.unwrap();
    cloud.change(|cloud| {
        let tls = cloud.listeners.values_mut().next().unwrap().tls.as_mut().unwrap();
        tls.others.insert(many[24].clone());
    });
    pause().await;
    (cloud, aws)
}

/// At AWS's limit one leaves for another, which AWS refuses.
#[tokio::test(start_paused = true)]
async fn certificate_that_left_for_a_refused_one_is_put_back() {
    let many = certificates(25);
    let (cloud, aws) = at_the_limit(&many).await;
    let changed: Vec<String> = many[1..24].iter().cloned().chain([MISSING.to_owned()]).collect();
    let outcome = apply(&aws, &with_certificates(&changed), Compare::InPlace).await.unwrap();
    assert!(refusal(&outcome).1.contains("CertificateNotFound"), "{outcome:?}");
    let others = cloud.cloud().listeners.into_values().next().unwrap().tls.unwrap().others;
    assert_eq!(others, many.into_iter().collect());
}

/// The same where a call fails between the two.
#[tokio::test(start_paused = true)]
async fn certificate_that_left_is_not_forgotten() {
    let many = certificates(26);
    let changed = [&many[1..24], &[MISSING.to_owned()]].concat();
    let accepted = [&many[1..24], &many[25..26]].concat();
    for fault in [Fault::Code("Throttling"), Fault::Code("ServiceUnavailable"), Fault::Before] {
        let (cloud, aws) = at_the_limit(&many).await;
        let others = || cloud.cloud().listeners.into_values().next().unwrap().tls.unwrap().others;
        cloud.set_faults(Faults::Once("AddListenerCertificates", fault));
        while cloud.has_faults() {
            let _ = aws.apply(&with_certificates(&changed), Compare::InPlace).await;
        }
        assert!(!others().contains(&many[0]), "{fault:?}");
        let outcome = apply(&aws, &with_certificates(&changed), Compare::Remembered).await.unwrap();
        assert!(refusal(&outcome).1.contains("CertificateNotFound"), "{outcome:?}");
        assert!(others().contains(&many[0]), "{fault:?}");
        let outcome = apply(&aws, &with_certificates(&accepted), Compare::Remembered).await.unwrap();
        assert_eq!((outcome.incomplete, others()), (None, accepted.iter().cloned().collect()), "{fault:?}");
    }
}

/// The same where another part of the Service changes in between.
#[tokio::test(start_paused = true)]
async fn certificate_that_left_is_not_forgotten_by_another_change() {
    let many = certificates(25);
    let changed = with_certificates(&[&many[1..24], &[MISSING.to_owned()]].concat());
    let (cloud, aws) = at_the_limit(&many).await;
    let others = || {
        let all = cloud.cloud().listeners.into_values();
        all.filter(|found| found.port == 443).find_map(|found| found.tls).unwrap().others
    };
    cloud.set_faults(Faults::Once("AddListenerCertificates", Fault::Code("Throttling")));
    while cloud.has_faults() {
        let _ = aws.apply(&changed, Compare::InPlace).await;
    }
    assert!(!others().contains(&many[0]));
    let ports = wanted(&[(443, 30443), (8443, 30843)], &[0]);
    let other = LoadBalancer { annotations: changed.annotations.clone(), ..ports };
    let outcome = apply(&aws, &other, Compare::Remembered).await.unwrap();
    assert!(refusal(&outcome).1.contains("CertificateNotFound"), "{outcome:?}");
    assert!(others().contains(&many[0]));
}

/// AWS removes one certificate and refuses to remove another, so those in their place are not tried.
#[tokio::test(start_paused = true)]
async fn certificate_that_left_returns_while_the_new_ones_wait() {
    let many = certificates(27);
    let changed = [&many[2..24], &many[25..27]].concat();
    let (cloud, aws) = at_the_limit(&many).await;
    let others = || cloud.cloud().listeners.into_values().next().unwrap().tls.unwrap().others;
    let before = others();
    cloud.set_faults(Faults::Each("RemoveListenerCertificates", ":n01", Fault::Code("AccessDenied")));
    changes(&cloud);
    let outcome = apply(&aws, &with_certificates(&changed), Compare::InPlace).await.unwrap();
    assert!(refusal(&outcome).1.contains("RemoveListenerCertificates"), "{outcome:?}");
    let made = changes(&cloud);
    assert_eq!(made.iter().filter(|name| **name == "RemoveListenerCertificates").count(), 2, "{made:?}");
    assert_eq!(others(), before);
    cloud.set_faults(Faults::None);
    let outcome = apply(&aws, &with_certificates(&changed), Compare::InPlace).await.unwrap();
    assert_eq!((outcome.incomplete, others()), (None, changed.into_iter().collect()));
}

/// Clients choose certificates by name: none goes while AWS refuses another one of the same listener.
#[tokio::test(start_paused = true)]
async fn listener_keeps_its_certificates_while_a_new_one_is_refused() {
    let of = |certificates: &str| with_tls(wanted(&[(443, 30443)], &[0]), "*", certificates);
    for refused in [format!("{MISSING},arn:aws:acm:::c"), format!("arn:aws:acm:::c,{MISSING}")] {
        let cloud = standin(1);
        let aws = provider(&cloud);
        apply(&aws, &of(&format!("{GOOD},arn:aws:acm:::b")), Compare::Remembered).await.unwrap();
        pause().await;
        let outcome = apply(&aws, &of(&refused), Compare::Remembered).await.unwrap();
        assert!(refusal(&outcome).1.contains("CertificateNotFound"), "{outcome:?}");
        let tls = |cloud: &StandIn| cloud.cloud().listeners.into_values().next().unwrap().tls.unwrap();
        assert!(
            tls(&cloud).certificate == GOOD && tls(&cloud).others.contains("arn:aws:acm:::b"),
            "{refused}"
        );
        apply(&aws, &of("arn:aws:acm:::c"), Compare::Remembered).await.unwrap();
        let tls = tls(&cloud).without_default();
        assert_eq!((tls.certificate.as_str(), tls.others.len()), ("arn:aws:acm:::c", 0), "{refused}");
    }
}

/// The certificate that leaves for a refused one is not missing for a moment at each try.
#[tokio::test(start_paused = true)]
async fn certificate_does_not_leave_for_a_refused_one_again_and_again_while_a_port_waits() {
    let cloud = standin(1);
    cloud.set_unlimited();
    let aws = provider(&cloud);
    let many = certificates(25);
    let of = |port, others: &[String]| {
        let ports = [(Protocol::Tcp, 80, port), (Protocol::Tcp, 443, 8443)];
        let certificates = format!("{GOOD},{}", others.join(","));
        with_tls(with_pods(&planned_with_pods(&ports), &[0, 1]), "443", &certificates)
    };
    apply(&aws, &of(8080, &many[..24]), Compare::Remembered).await.unwrap();
    let others = || cloud.cloud().listeners.into_values().find_map(|found| found.tls).unwrap().others;
    cloud.change(|cloud| {
        let tls = cloud.listeners.values_mut().find_map(|found| found.tls.as_mut()).unwrap();
        tls.others.insert(many[24].clone());
    });
    pause().await;
    let waiting = without_pods_on_9090(&of(9090, &[&many[1..24], &[MISSING.to_owned()]].concat()));
    changes(&cloud);
    aws.apply(&waiting, Compare::InPlace).await.unwrap();
    let mut removed = 0;
    for _ in 0..8 {
        removed += changes(&cloud).iter().filter(|name| **name == "RemoveListenerCertificates").count();
        assert_eq!(others(), many.iter().cloned().collect());
        tokio::time::sleep(Duration::from_secs(2)).await;
        let outcome = aws.apply(&waiting, Compare::Remembered).await.unwrap();
        assert!(outcome.incomplete.unwrap().1.contains("CertificateNotFound"));
    }
    assert_eq!(removed, 2, "two equal answers are enough");
}

/// The certificate that left was deleted meanwhile, so that AWS does not take it back, or the permission is missing.
#[tokio::test(start_paused = true)]
async fn certificate_that_cannot_return_does_not_hurry_later_changes() {
    let many = certificates(25);
    for code in ["CertificateNotFound", "AccessDenied"] {
        let (cloud, aws) = at_the_limit(&many).await;
        let changed = [&many[1..24], &[MISSING.to_owned()]].concat();
        let others = || cloud.cloud().listeners.into_values().next().unwrap().tls.unwrap().others;
        cloud.set_faults(Faults::Each("AddListenerCertificates", "", Fault::Code(code)));
        let outcome = apply(&aws, &with_certificates(&changed), Compare::InPlace).await.unwrap();
        assert!(refusal(&outcome).1.contains(code), "{outcome:?}");
        assert_eq!(others(), many[1..].iter().cloned().collect());
        pause().await;
        cloud.set_faults(Faults::Each("ModifyTargetGroup", "", Fault::Code("ServiceUnavailable")));
        let mut waits = Vec::new();
        for _ in 0..3 {
            let outcome = until_failure(&aws, &with_interval(with_certificates(&changed), 20)).await;
            waits.push(waits_for(&outcome, "ModifyTargetGroup"));
            tokio::time::sleep(waits[waits.len() - 1]).await;
        }
        assert_eq!(waits, [waits[0], waits[0] * 2, waits[0] * 4], "{code}");
        cloud.set_faults(Faults::None);
        let outcome = apply(&aws, &with_certificates(&changed), Compare::Remembered).await.unwrap();
        assert!(refusal(&outcome).1.contains("CertificateNotFound"), "{outcome:?}");
        assert_eq!(others().contains(&many[0]), code == "AccessDenied", "it returns with the permission");
    }
}
