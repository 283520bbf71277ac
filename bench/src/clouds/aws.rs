// SPDX-License-Identifier: Apache-2.0
//! AWS: moto, and cloud-provider-aws. Both programs make network load balancers that are reachable inside the VPC only.

mod rates;
mod snapshot;

use std::fs;
use std::net::Ipv4Addr;
use std::process::Command;
use std::time::Duration;

use anyhow::Result;
use serde_json::{Value, json};
use steerage_provider_conformance::{CallKind, Request};
use steerage_testmoto::{Release, Server as Moto, classify, peer};
use tokio::runtime::Runtime;

use super::cloud::{Cloud, Member, Start, Wanted};
use super::objects::CLUSTER;
use super::phases::Step;
use super::recorder::{Action, Counts, Recorder};
use crate::who::Who;

const REGION: &str = "us-east-1";
/// Read by Steerage all the time, about once a minute for each target group: the only call that does not tell that work continues.
const HEALTH: &str = "DescribeTargetHealth";
const ELBV2: &str = "elbv2";
const EC2: &str = "ec2";

/// moto behind a proxy.
pub(super) struct Aws {
    recorder: Recorder,
    vpc: String,
    subnets: Vec<String>,
    group: String,
    moto: Moto,
}

impl Aws {
    pub(super) fn start(runtime: &Runtime) -> Result<Self> {
        let moto = Moto::start(Release::USUAL)?;
        let (vpc, subnets) = moto.network()?;
        let group = moto.security_group(&vpc, "nodes")?;
        let recorder = Recorder::start(runtime, moto.addr(), action)?;
        Ok(Self { recorder, vpc, subnets, group, moto })
    }

    fn add_credentials(command: &mut Command) {
        // moto does not check them. Nothing here runs on an instance.
        command
            .envs([("AWS_ACCESS_KEY_ID", "test"), ("AWS_SECRET_ACCESS_KEY", "test")])
            .env("AWS_EC2_METADATA_DISABLED", "true");
    }
}

impl Cloud for Aws {
    fn recorder(&self) -> &Recorder {
        &self.recorder
    }

    fn member(&self, number: usize) -> Result<Member> {
        let zone = number % self.subnets.len();
        let address = Ipv4Addr::new(10, 0, u8::try_from(zone * 4)?, u8::try_from(10 + number)?);
        let id = self.moto.grouped_instance(&self.subnets[zone], address, &self.group)?;
        self.moto.tag(&id, &peer::cluster_tag(CLUSTER), "owned")?;
        Ok(Member {
            name: format!("node-{number}"),
            provider_id: format!("aws:///us-east-1a/{id}"),
            id,
            address,
        })
    }

    fn annotations(&self) -> Value {
        json!({
            "service.beta.kubernetes.io/aws-load-balancer-type": "nlb",
            "service.beta.kubernetes.io/aws-load-balancer-internal": "true",
        })
    }

    fn add_to_controller(&self, command: &mut Command, _: &Start<'_>) -> Result<()> {
        let endpoint = format!("http://{}", self.recorder.addr());
        Self::add_credentials(command);
        command
            .args(["--provider", "aws"])
            .args(["--aws-cluster-name", CLUSTER, "--aws-region", REGION, "--aws-vpc-id", &self.vpc])
            .args(["--aws-subnets", &self.subnets.join(",")])
            .args(["--aws-elbv2-endpoint", &endpoint, "--aws-ec2-endpoint", &endpoint]);
        Ok(())
    }

    fn add_to_peer(&self, command: &mut Command, start: &Start<'_>) -> Result<()> {
        let config = start.folder.join("cloud.conf");
        fs::write(&config, peer::cloud_config(CLUSTER, "us-east-1a", &self.vpc, self.recorder.addr()))?;
        Self::add_credentials(command);
        command.arg("--cloud-provider=aws").arg(format!("--cloud-config={}", config.display()));
        Ok(())
    }

    fn missing(&self, _: Who, wanted: &Wanted<'_>) -> Result<Option<String>> {
        let text = self.moto.snapshot()?;
        let serves = snapshot::serves(&text, wanted.services, wanted.port, &wanted.eligible);
        Ok((!serves).then(|| format!("not {} targets of each listener:\n{text}", wanted.eligible.len())))
    }

    fn left_over(&self) -> Result<usize> {
        Ok(snapshot::unused_target_groups(&self.moto.snapshot()?))
    }
}

/// See [`super::cloud::Vendor::goal`].
pub(super) fn goal(step: Step, services: u32) -> Option<u32> {
    match step {
        Step::Create => Some(8 * services),
        Step::EndpointsMove => Some(0),
        Step::NodeOut | Step::NodeBack => Some(services),
        Step::NodeReplaced => Some(2 * services + 10),
        Step::Restart => Some(30),
        Step::Delete => Some(5 * services),
        Step::PortChange | Step::AfterRestart => None,
    }
}

/// See [`rates::least_time`].
pub(super) fn time_by_rates(counts: &Counts) -> Duration {
    rates::least_time(counts.calls().map(|(action, count)| {
        let api = if action.api == EC2 { rates::Api::Ec2 } else { rates::Api::Elbv2 };
        (api, action.name.as_str(), count)
    }))
}

fn action(request: &Request) -> Option<Action> {
    let (CallKind::Read(name) | CallKind::Write(name)) = classify(request) else { return None };
    // The service in the scope of the credential: `…/us-east-1/ec2/aws4_request`.
    let header = request.headers().get(http::header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let api = if header.is_some_and(|header| header.contains("/ec2/")) { EC2 } else { ELBV2 };
    Some(Action { api, is_read: rates::is_read(&name), tells_of_work: name != HEALTH, name })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn goals_are_those_of_the_documents() {
        let goals = Step::ALL.map(|step| goal(step, 100));
        assert_eq!(
            goals,
            [Some(800), None, Some(0), Some(100), Some(100), Some(210), Some(30), None, Some(500)]
        );
    }

    #[test]
    fn rates_count_each_api_alone() {
        let of = |api, name: &str| Action { api, name: name.to_owned(), is_read: false, tells_of_work: true };
        let time = |action| time_by_rates(&Counts::of([(action, 60)]));
        assert_eq!(time(of(EC2, "AuthorizeSecurityGroupIngress")), Duration::from_secs(2));
        assert_eq!(time(of(ELBV2, "RegisterTargets")), Duration::from_secs(10));
    }
}
