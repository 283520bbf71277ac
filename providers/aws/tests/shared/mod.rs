// SPDX-License-Identifier: Apache-2.0
//! A load balancer that several Services share, on moto.

use std::collections::BTreeSet;

use steerage_model::Protocol;
use steerage_model::annotations::SHARED_LOAD_BALANCER;
use steerage_provider_api::{Compare, Progress, Provider as _};
use steerage_provider_aws::{AwsArgs, Config};
use steerage_provider_conformance::{converge, fixture};
use steerage_requirements::requires;

use crate::listener;
use crate::moto::Moto;

#[tokio::test]
async fn services_share_a_load_balancer() {
    requires!(Moto);
    let moto = Moto::start(3).await.unwrap();
    let file = std::env::temp_dir().join(format!("steerage-shared-{}.json", std::process::id()));
    let open = "service.beta.kubernetes.io/aws-load-balancer-disable-nlb-sg";
    std::fs::write(
        &file,
        format!(r#"{{"web": {{"namespaces": ["*"], "annotations": {{"{open}": "true"}}}}}}"#),
    )
    .unwrap();
    let args = AwsArgs {
        aws_cluster_name: Some(moto.config.cluster.name.clone()),
        aws_vpc_id: Some(moto.config.vpc.clone()),
        aws_shared_load_balancers: Some(file.clone()),
        ..AwsArgs::default()
    };
    let shared_load_balancers = Config::new(args, String::new()).unwrap().shared_load_balancers;
    std::fs::remove_file(file).unwrap();
    let config = Config { shared_load_balancers, ..moto.config.clone() };
    let sharing = |name: &str, port: u16| {
        let lb = fixture::first(&moto, &fixture::owner(name, 1));
        let mut lb = fixture::with_listeners(lb, vec![listener(Protocol::Tcp, port, 30_000 + port)]);
        lb.annotations.insert(SHARED_LOAD_BALANCER.to_owned(), "web".to_owned());
        fixture::with_targets(&moto, &lb, &[0, 1])
    };
    let (a, b) = (sharing("a", 80), sharing("b", 443));
    for lb in [&a, &b] {
        // Each by a process of its own.
        converge(&moto.provider(config.clone()), lb).await.unwrap();
    }
    let balancers = moto.balancers().await.unwrap();
    let [balancer] = &balancers[..] else { panic!("{balancers:?}") };
    let arn = balancer.load_balancer_arn.clone().unwrap();
    let ports = async || {
        let listeners = moto.listeners(&arn).await.unwrap();
        listeners.into_iter().filter_map(|found| found.port).collect::<BTreeSet<i32>>()
    };
    assert_eq!(ports().await, BTreeSet::from([80, 443]));
    let aws = moto.provider(config);
    let refused = aws.apply(&sharing("c", 443), Compare::Remembered).await.unwrap_err();
    assert_eq!(refused.reason(), "PortInUse", "{refused}");
    while aws.delete(&a.owner).await.unwrap() != Progress::Done {}
    assert_eq!(ports().await, BTreeSet::from([443]));
    while aws.delete(&b.owner).await.unwrap() != Progress::Done {}
    assert!(moto.balancers().await.unwrap().is_empty() && moto.groups().await.unwrap().is_empty());
}
