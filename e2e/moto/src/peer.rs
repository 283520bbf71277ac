// SPDX-License-Identifier: Apache-2.0
//! What cloud-provider-aws needs to work with moto. Pure.

use std::net::SocketAddr;

/// The file of `--cloud-config` for a controller that runs outside of AWS, in `us-east-1`.
pub fn cloud_config(cluster: &str, zone: &str, vpc: &str, moto: SocketAddr) -> String {
    // A subnet must be named for a controller that is no instance itself. Nothing reads it. Rules in the nodes' security groups are the
    // operator's, as with Steerage: two and more for each Service would fill a group, which takes 60, with 30 Services.
    let global = format!(
        "[Global]\nRegion = us-east-1\nZone = {zone}\nVPC = {vpc}\nSubnetID = none\nKubernetesClusterID = {cluster}\n\
         DisableSecurityGroupIngress = true\n"
    );
    let service = |(service, signing): (&str, &str)| {
        format!(
            "[ServiceOverride \"{signing}\"]\nService = {service}\nRegion = us-east-1\nURL = http://{moto}\n\
             SigningRegion = us-east-1\nSigningMethod = v4\nSigningName = {signing}\n"
        )
    };
    let services = [("EC2", "ec2"), ("Elastic Load Balancing v2", "elasticloadbalancing")];
    services.map(service).into_iter().fold(global, |text, of| text + &of)
}

/// The key of the tag by which it knows the cluster's instances; the value is `owned`.
pub fn cluster_tag(cluster: &str) -> String {
    format!("kubernetes.io/cluster/{cluster}")
}
