// SPDX-License-Identifier: Apache-2.0
//! Which provider the flags choose, and how it is made. Called by the composition root only.

use std::sync::Arc;

use clap::ValueEnum;
use kube::Client;
use steerage_process::Process;
use steerage_provider_api::{Error, Provider};
use steerage_provider_aws::{Aws, AwsArgs};
#[cfg(feature = "azure")]
use steerage_provider_azure::{Azure, AzureArgs};
use steerage_provider_edge::EdgeProvider;
#[cfg(feature = "gce")]
use steerage_provider_gce::{Gce, GceArgs};
#[cfg(feature = "openstack")]
use steerage_provider_openstack::{Credentials, OpenStack, OpenStackArgs};
use steerage_watch::Watches;

use crate::cluster_uid;

const NOT_REACHED: &str = "cloud not reached, or no credentials found; starting, and retrying each call";

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum ProviderName {
    /// Steerage's software load balancer, steerage-edge
    Edge,
    /// AWS Network Load Balancers
    Aws,
    /// Google Compute Engine
    #[cfg(feature = "gce")]
    Gce,
    /// Azure Standard load balancers
    #[cfg(feature = "azure")]
    Azure,
    /// OpenStack Octavia
    #[cfg(feature = "openstack")]
    #[value(name = "openstack")]
    OpenStack,
}

impl ProviderName {
    /// Provider calls per second without the flag.
    pub(crate) fn default_qps(self) -> u32 {
        match self {
            Self::Edge => 10_000,
            Self::Aws => 20,
            #[cfg(feature = "azure")]
            Self::Azure => 20,
            #[cfg(feature = "gce")]
            Self::Gce => 20,
            #[cfg(feature = "openstack")]
            Self::OpenStack => 20,
        }
    }
}

/// The flags of the clouds.
#[derive(Debug, clap::Args)]
pub(crate) struct CloudArgs {
    #[command(flatten)]
    aws: AwsArgs,
    #[cfg(feature = "azure")]
    #[command(flatten)]
    azure: AzureArgs,
    #[cfg(feature = "gce")]
    #[command(flatten)]
    gce: GceArgs,
    #[cfg(feature = "openstack")]
    #[command(flatten)]
    openstack: OpenStackArgs,
}

/// `None` if the process stops first.
pub(crate) async fn new_provider(
    name: ProviderName,
    client: &Client,
    watches: &Watches,
    namespace: &str,
    clouds: CloudArgs,
    process: &Process,
) -> anyhow::Result<Option<Arc<dyn Provider>>> {
    Ok(Some(match name {
        ProviderName::Edge => {
            // A watch of the edge's objects without data must not freeze targets.
            let edge = Arc::new(EdgeProvider::new(client, &watches.dispensable(), namespace));
            process.metrics().register("controller", |registry| edge.register_metrics(registry));
            let (listed, pending) = (Arc::clone(&edge), process.readiness().task("edge objects"));
            let stop = process.shutdown().clone();
            process.spawn("edge objects", async move {
                tokio::select! {
                    () = stop.cancelled() => {}
                    () = listed.listed() => pending.done(),
                }
                Ok(())
            });
            edge
        }
        ProviderName::Aws => {
            let aws = clouds.aws.with_vpc().await?;
            // Wrong flags fail before the API server has to answer.
            steerage_provider_aws::Config::new(aws.clone(), String::new())?;
            let Some(uid) =
                cluster_uid::read(client, process.shutdown(), cluster_uid::UID_READ_TIMEOUT).await?
            else {
                return Ok(None);
            };
            let metrics = process.metrics().register("controller", steerage_provider_aws::api_metrics);
            let aws = Aws::connect(steerage_provider_aws::Config::new(aws, uid)?, metrics).await;
            let checked = tokio::select! {
                () = process.shutdown().cancelled() => return Ok(None),
                checked = aws.check() => checked,
            };
            match checked {
                Err(error @ Error::Denied(_)) => anyhow::bail!("AWS cannot be used: {error}"),
                // Traffic does not need the controller, and AWS may answer soon.
                Err(error) => {
                    tracing::warn!(cloud = "AWS", %error, "{NOT_REACHED}");
                }
                Ok(()) => {}
            }
            Arc::new(aws)
        }
        #[cfg(feature = "azure")]
        ProviderName::Azure => {
            return Ok(new_azure(client, clouds.azure, process).await?.map(|azure| Arc::new(azure) as _));
        }
        #[cfg(feature = "gce")]
        ProviderName::Gce => {
            return Ok(new_gce(client, clouds.gce, process).await?.map(|gce| Arc::new(gce) as _));
        }
        #[cfg(feature = "openstack")]
        ProviderName::OpenStack => {
            return Ok(new_openstack(client, clouds.openstack, process)
                .await?
                .map(|openstack| Arc::new(openstack) as _));
        }
    }))
}

/// Whether the controller goes on: false if the process stops first. Credentials and flags that the cloud refuses are an error.
#[cfg(any(feature = "azure", feature = "gce", feature = "openstack"))]
async fn may_start(
    cloud: &str,
    check: impl Future<Output = Result<(), Error>>,
    process: &Process,
) -> anyhow::Result<bool> {
    let checked = tokio::select! {
        () = process.shutdown().cancelled() => return Ok(false),
        checked = check => checked,
    };
    check_usable(cloud, checked)?;
    Ok(true)
}

/// An error if waiting does not help: what a flag names may not exist, or the cloud is too old.
#[cfg(any(feature = "azure", feature = "gce", feature = "openstack"))]
fn check_usable(cloud: &str, checked: Result<(), Error>) -> anyhow::Result<()> {
    match checked {
        Err(error @ (Error::Denied(_) | Error::Invalid { .. })) => {
            anyhow::bail!("{cloud} cannot be used: {error}")
        }
        // Traffic does not need the controller, and the cloud may answer soon.
        Err(error) => tracing::warn!(cloud, %error, "{NOT_REACHED}"),
        Ok(()) => {}
    }
    Ok(())
}

/// `None` if the process stops first.
#[cfg(feature = "azure")]
async fn new_azure(client: &Client, args: AzureArgs, process: &Process) -> anyhow::Result<Option<Azure>> {
    // Wrong flags fail before the API server has to answer.
    steerage_provider_azure::Config::new(args.clone(), String::new())?;
    let credentials = steerage_provider_azure::Credentials::load(args.azure_identity_client_id.as_deref())?;
    let Some(uid) = cluster_uid::read(client, process.shutdown(), cluster_uid::UID_READ_TIMEOUT).await?
    else {
        return Ok(None);
    };
    let metrics = process.metrics().register("controller", steerage_provider_azure::api_metrics);
    let config = steerage_provider_azure::Config::new(args, uid)?;
    let azure = Azure::connect(config, credentials, metrics)?;
    Ok(may_start("Azure", azure.check(), process).await?.then_some(azure))
}

/// `None` if the process stops first.
#[cfg(feature = "gce")]
async fn new_gce(client: &Client, args: GceArgs, process: &Process) -> anyhow::Result<Option<Gce>> {
    let args = tokio::select! {
        () = process.shutdown().cancelled() => return Ok(None),
        args = args.discovered() => args?,
    };
    // Wrong flags fail before the API server has to answer.
    steerage_provider_gce::Config::new(args.clone(), String::new())?;
    let Some(uid) = cluster_uid::read(client, process.shutdown(), cluster_uid::UID_READ_TIMEOUT).await?
    else {
        return Ok(None);
    };
    let metrics = process.metrics().register("controller", steerage_provider_gce::api_metrics);
    let gce = Gce::connect(steerage_provider_gce::Config::new(args, uid)?, metrics)?;
    Ok(may_start("GCE", gce.check(), process).await?.then_some(gce))
}

/// `None` if the process stops first.
#[cfg(feature = "openstack")]
async fn new_openstack(
    client: &Client,
    args: OpenStackArgs,
    process: &Process,
) -> anyhow::Result<Option<OpenStack>> {
    // Wrong flags fail before the API server has to answer.
    steerage_provider_openstack::Config::new(args.clone(), String::new())?;
    // The chart sets the flag always; without a name, the variables count.
    let credentials = Credentials::load(args.openstack_cloud.as_deref().filter(|name| !name.is_empty()))?;
    let Some(uid) = cluster_uid::read(client, process.shutdown(), cluster_uid::UID_READ_TIMEOUT).await?
    else {
        return Ok(None);
    };
    let metrics = process.metrics().register("controller", steerage_provider_openstack::api_metrics);
    let config = steerage_provider_openstack::Config::new(args, uid)?;
    let openstack = OpenStack::connect(config, credentials, metrics)?;
    Ok(may_start("OpenStack", openstack.check(), process).await?.then_some(openstack))
}

#[cfg(all(test, feature = "openstack"))]
mod tests {
    use super::*;

    /// OpenStack did not refuse anything: it is too old.
    #[test]
    fn start_ends_where_waiting_does_not_help_and_names_no_wrong_party() {
        let old = Error::invalid("RejectedByProvider", "Octavia has API version 2.13. Upgrade Octavia.");
        let error = check_usable("OpenStack", Err(old)).unwrap_err().to_string();
        assert!(error.starts_with("OpenStack cannot be used: Octavia has"), "{error}");
        assert!(check_usable("OpenStack", Err(Error::denied("no"))).is_err());
        assert!(check_usable("OpenStack", Err(Error::Unavailable("no answer".to_owned()))).is_ok());
        assert!(check_usable("OpenStack", Ok(())).is_ok());
    }
}
