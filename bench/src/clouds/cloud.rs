// SPDX-License-Identifier: Apache-2.0
//! What the measurement has to know of a cloud.

use std::net::Ipv4Addr;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::Result;
use serde_json::Value;
use tokio::runtime::Runtime;

use super::phases::Step;
use super::recorder::{Counts, Recorder};
use super::{aws, azure, gce, openstack};
use crate::who::Who;

/// The clouds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Vendor {
    /// moto, and cloud-provider-aws
    Aws,
    /// Keystone, Neutron and Octavia with a provider driver of the tests, and cloud-provider-openstack
    Openstack,
    /// The stand-in of Compute Engine, and glbc
    Gce,
    /// The stand-in of Azure Resource Manager, and cloud-provider-azure
    Azure,
}

impl Vendor {
    /// Key in JSON.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Aws => "aws",
            Self::Openstack => "openstack",
            Self::Gce => "gce",
            Self::Azure => "azure",
        }
    }

    /// Name of a program in tables.
    pub(super) fn title(self, who: Who) -> &'static str {
        match (who, self) {
            (Who::Ours, _) => "Steerage",
            (Who::Peer, Self::Aws) => "cloud-provider-aws",
            (Who::Peer, Self::Openstack) => "cloud-provider-openstack",
            (Who::Peer, Self::Gce) => "glbc",
            (Who::Peer, Self::Azure) => "cloud-provider-azure",
        }
    }

    /// The file that `hack/prepare peers` builds.
    pub(super) fn peer_program(self) -> &'static str {
        match self {
            Self::Aws => "aws-cloud-controller-manager",
            Self::Openstack => "openstack-cloud-controller-manager",
            Self::Gce => "glbc",
            Self::Azure => "azure-cloud-controller-manager",
        }
    }

    /// The largest number of Services of a full run: the others' stand-ins use one core.
    pub(super) fn most_services(self) -> u32 {
        match self {
            Self::Aws => 100,
            Self::Openstack | Self::Gce | Self::Azure => 50,
        }
    }

    /// What [`Cloud::left_over`] counts.
    pub(super) fn left_over(self) -> &'static str {
        match self {
            Self::Aws => "target groups",
            Self::Openstack => "load balancers and floating IPs",
            Self::Gce => "objects, some of which all Services share",
            Self::Azure => "load balancers, public IPs and security rules",
        }
    }

    /// The goal for all Services together: a bound for calls. Goals are reported, and none fails a run. Those for the other
    /// clouds than AWS are fewer calls than the peer's in each row.
    pub(super) fn goal(self, step: Step, services: u32) -> Option<u32> {
        match self {
            Self::Aws => aws::goal(step, services),
            Self::Openstack | Self::Gce | Self::Azure => None,
        }
    }

    /// The least time in which the cloud admits these calls, if that is known.
    pub(super) fn time_by_rates(self, counts: &Counts) -> Option<Duration> {
        (self == Self::Aws).then(|| aws::time_by_rates(counts))
    }

    /// Starts what stands for the cloud.
    pub(super) fn start(self, runtime: &Runtime) -> Result<Box<dyn Cloud>> {
        Ok(match self {
            Self::Aws => Box::new(aws::Aws::start(runtime)?),
            Self::Openstack => Box::new(openstack::OpenStack::start(runtime)?),
            Self::Gce => Box::new(gce::Gce::start(runtime)?),
            Self::Azure => Box::new(azure::Azure::start(runtime)?),
        })
    }
}

/// A machine of the cloud, and the node that it is.
#[derive(Clone, Debug)]
pub(super) struct Member {
    /// Name of the node.
    pub(super) name: String,
    /// What the cloud calls the machine where it is a target.
    pub(super) id: String,
    pub(super) provider_id: String,
    pub(super) address: Ipv4Addr,
}

/// What the Services ask for.
pub(super) struct Wanted<'a> {
    pub(super) services: u32,
    /// Of every Service.
    pub(super) port: u16,
    /// IDs of all machines that are eligible.
    pub(super) eligible: Vec<&'a str>,
    /// ID of the machine with all endpoints.
    pub(super) endpoints: &'a str,
}

/// What the measurement gives to a program that it starts.
pub(super) struct Start<'a> {
    pub(super) kubeconfig: &'a Path,
    /// A directory for configuration.
    pub(super) folder: &'a Path,
}

/// A running stand-in, and its proxy.
pub(super) trait Cloud {
    /// Calls of the measured program.
    fn recorder(&self) -> &Recorder;

    /// Makes the machine with this number.
    fn member(&self, number: usize) -> Result<Member>;

    /// Annotations of each Service, which both programs read the same way.
    fn annotations(&self) -> Value;

    /// What Steerage is started with.
    fn add_to_controller(&self, command: &mut Command, start: &Start<'_>) -> Result<()>;

    /// What the vendor's program is started with.
    fn add_to_peer(&self, command: &mut Command, start: &Start<'_>) -> Result<()>;

    /// What the cloud lacks or has too much of, if anything.
    fn missing(&self, who: Who, wanted: &Wanted<'_>) -> Result<Option<String>>;

    /// Objects that serve no Service any more.
    fn left_over(&self) -> Result<usize>;
}
