// SPDX-License-Identifier: Apache-2.0
//! cloud-provider-aws beside a lab's control plane: it makes network load balancers for Services without a class. What the simulated AWS
//! has of it, and not of Steerage. Blocking.

use anyhow::{Context as _, Result};
use nix::sys::signal::Signal;
use steerage_lab::aws::{Account, api};
use steerage_lab::{Lab, daemon};
use steerage_testmoto::peer;

use super::Aws;

/// The program that `hack/prepare peers` builds.
const PROGRAM: &str = "aws-cloud-controller-manager";
/// How the names of Steerage's target groups begin, in their ARNs.
const OURS: &str = ":targetgroup/st-";

/// The running program. It ends when this is dropped.
pub struct Peer {
    lab: Lab,
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = daemon::stop(&self.lab, PROGRAM, Signal::SIGKILL);
    }
}

impl Peer {
    /// Ends the program as a rolling update does.
    pub fn stop(self) -> Result<()> {
        Ok(daemon::stop(&self.lab, PROGRAM, Signal::SIGTERM)?)
    }
}

impl Aws {
    /// Starts cloud-provider-aws with its controller of Services only: the lab's nodes have their provider IDs already.
    pub fn start_peer(&self) -> Result<Peer> {
        let lab = self.lab.clone();
        let account = Account::open(&lab)?;
        for instance in account.instances.values() {
            self.moto.tag(instance, &peer::cluster_tag(&lab.plan.name), "owned")?;
        }
        let config = lab.folder().join("config/cloud-provider-aws.conf");
        let text = peer::cloud_config(&lab.plan.name, &account.zone, &account.vpc, api(&lab.plan).into());
        std::fs::write(&config, text).with_context(|| format!("writing {}", config.display()))?;
        let command = [
            // moto takes any credentials.
            "env".to_owned(),
            "AWS_ACCESS_KEY_ID=lab".to_owned(),
            "AWS_SECRET_ACCESS_KEY=lab".to_owned(),
            "AWS_EC2_METADATA_DISABLED=true".to_owned(),
            lab.bin(PROGRAM).display().to_string(),
            "--cloud-provider=aws".to_owned(),
            "--controllers=service-lb-controller".to_owned(),
            "--leader-elect=false".to_owned(),
            format!("--cluster-name={}", lab.plan.name),
            format!("--cloud-config={}", config.display()),
            format!("--cert-dir={}", lab.folder().join("config").display()),
            format!("--kubeconfig={}", lab.kubeconfig("admin").display()),
        ];
        daemon::spawn(&lab, PROGRAM, &lab.plan.control_plane().netns, &command)?;
        Ok(Peer { lab })
    }

    /// Shortens the time for which AWS keeps connections to deregistered targets, in all target groups that are not Steerage's.
    pub fn shorten_delays_of_peer(&self, seconds: u32) -> Result<()> {
        let seconds = seconds.to_string();
        for group in self.target_groups_of_peer()? {
            let parameters = [
                ("TargetGroupArn", group.as_str()),
                ("Attributes.member.1.Key", "deregistration_delay.timeout_seconds"),
                ("Attributes.member.1.Value", seconds.as_str()),
            ];
            self.moto.elbv2("ModifyTargetGroupAttributes", &parameters, "RequestId")?;
        }
        Ok(())
    }

    /// The ARNs of the target groups that are not Steerage's.
    pub fn target_groups_of_peer(&self) -> Result<Vec<String>> {
        let health = self.moto.health()?;
        Ok(health.into_keys().filter(|arn| !arn.contains(OURS)).collect())
    }
}
