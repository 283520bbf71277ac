// SPDX-License-Identifier: Apache-2.0
//! Tests of the words that decide: host names and tags.

use super::*;

#[test]
fn host_names_lead_to_the_names_of_load_balancers() {
    for (text, found) in [
        ("a1b2-0123456789abcdef.elb.eu-west-1.amazonaws.com", Some(("a1b2", true))),
        ("k8s-shop-web-12-0123456789abcdef.elb.cn-north-1.amazonaws.com.cn", Some(("k8s-shop-web-12", true))),
        ("a1b2-1234567890.eu-west-1.elb.amazonaws.com", Some(("a1b2", false))),
        (
            "internal-a0123456789abcdef0123456789abcde-1234567890.eu-west-1.elb.amazonaws.com",
            Some(("a0123456789abcdef0123456789abcde", false)),
        ),
        ("a0123456789abcdef0123456789abcdef-0123456789abcdef.elb.eu-west-1.amazonaws.com", None),
        ("web-1.example.com", None),
        ("elb.eu-west-1.amazonaws.com", None),
        ("localhost", None),
        ("", None),
    ] {
        let parsed = Hostname::parse(text).map(|found| (found.balancer, found.is_network));
        assert_eq!(parsed, found, "{text}");
    }
}

#[test]
fn peers_have_the_names_of_their_projects() {
    let names: Vec<String> = Peer::value_variants().iter().map(|peer| peer.name()).collect();
    assert_eq!(names, ["cloud-provider-aws", "aws-load-balancer-controller"]);
}
