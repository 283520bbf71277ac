// SPDX-License-Identifier: Apache-2.0
//! The flags of the controller, and how they become its parts. Called by `main`.

use std::net::{Ipv6Addr, SocketAddr};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use clap::{Parser, ValueEnum};
use kube::Client;
use steerage_process::{Component, Process, ProcessArgs};
use steerage_provider_api::{Provider, Steering};
use steerage_provider_aws::{Aws, AwsArgs};
use steerage_provider_edge::EdgeProvider;
use steerage_watch::ClientArgs;

use crate::controller::{self, Parts};
use crate::plan::{self, Classes, HealthDefaults};
use crate::queue::Backoff;
use crate::{lease, workers};

/// Gives Services of type `LoadBalancer` a load balancer that keeps the client's address and loses no connection
#[derive(Debug, Parser)]
#[command(name = "steerage", version)]
pub(crate) struct Args {
    /// Who makes the load balancers; Services choose it by loadBalancerClass steerage.dev/PROVIDER
    #[arg(long, env = "STEERAGE_PROVIDER", value_enum)]
    provider: ProviderName,
    /// Steering of Services without the annotation steerage.dev/steering: api or health-check
    #[arg(long, env = "STEERAGE_DEFAULT_STEERING", default_value = "health-check", value_name = "MODE")]
    default_steering: Steering,
    /// Also serve Services that name no loadBalancerClass; no other controller may then do so
    #[arg(long, env = "STEERAGE_SERVE_UNSET_CLASS")]
    serve_unset_class: bool,
    /// Change Services once to what their old annotations (service.alpha.kubernetes.io/external-traffic) ask for
    #[arg(long, env = "STEERAGE_MIGRATE_LEGACY_ANNOTATIONS")]
    migrate_legacy_annotations: bool,

    /// Namespace of the Lease and of the provider's own objects
    #[arg(long, env = "POD_NAMESPACE", default_value = "steerage-system")]
    namespace: String,
    /// Name of this process among its like; by default the machine's name
    #[arg(long, env = "POD_NAME")]
    identity: Option<String>,
    /// Name of the Lease
    #[arg(long, default_value = "steerage-controller", value_name = "NAME")]
    lease_name: String,
    /// How long another controller leaves the Lease to a holder of whom it hears nothing
    #[arg(long, default_value = "15s", value_name = "TIME", value_parser = plan::duration)]
    lease_duration: Duration,
    /// How long the holder counts on the Lease after its last renewal; less than the duration by five seconds or more
    #[arg(long, default_value = "10s", value_name = "TIME", value_parser = plan::duration)]
    lease_deadline: Duration,
    /// Time between two renewals
    #[arg(long, default_value = "2s", value_name = "TIME", value_parser = plan::duration)]
    lease_retry: Duration,

    /// Port of the service proxy's health on every node: kube-proxy's, or the agent's where it replaces kube-proxy
    #[arg(long, default_value_t = 10256, value_name = "PORT")]
    node_health_port: u16,
    /// Port of the agent's health where it lives beside kube-proxy, for Services labelled for it
    #[arg(long, default_value_t = 10356, value_name = "PORT")]
    agent_health_port: u16,
    /// Time between two probes of a target; by default one second, or the shortest that the provider takes
    #[arg(long, value_name = "TIME", value_parser = plan::duration)]
    health_check_interval: Option<Duration>,
    /// Time that a probe may take; by default four fifths of the interval
    #[arg(long, value_name = "TIME", value_parser = plan::duration)]
    health_check_timeout: Option<Duration>,
    /// Good probes in a row that make a target healthy
    #[arg(long, default_value_t = 2, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=100))]
    health_check_healthy_threshold: u32,
    /// Bad probes in a row that make a target unhealthy
    #[arg(long, default_value_t = 2, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=100))]
    health_check_unhealthy_threshold: u32,

    /// Load balancers that are worked on at a time
    #[arg(long, default_value_t = 16, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..))]
    workers: u16,
    /// Calls of the provider a second, after a burst of twice as many; by default 1000 for the edge, whose state is in memory,
    /// and 20 for a cloud, where each consists of several
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..))]
    provider_rate: Option<u32>,
    /// After about how long every load balancer is compared with what it should be
    #[arg(long, default_value = "10m", value_name = "TIME", value_parser = plan::duration)]
    compare_every: Duration,
    /// Silence of a watch after which targets stay as they are, more than a minute; by default never
    #[arg(long, value_name = "TIME", value_parser = plan::duration)]
    freeze_after: Option<Duration>,

    #[command(flatten)]
    client: ClientArgs,
    #[command(flatten)]
    process: ProcessArgs,
    #[command(flatten)]
    aws: AwsArgs,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ProviderName {
    /// Our own edge
    Edge,
    /// Network load balancers of Amazon Web Services
    Aws,
}

/// Runs the controller.
pub(crate) fn run(args: Args) -> ExitCode {
    let component = Component {
        name: "controller",
        version: env!("CARGO_PKG_VERSION"),
        admin: SocketAddr::from((Ipv6Addr::UNSPECIFIED, 9580)),
    };
    let process_args = args.process.clone();
    steerage_process::run(component, &process_args, |process| async move {
        let parts = args.parts(&process).await?;
        controller::run(process, parts).await
    })
}

impl Args {
    async fn parts(self, process: &Process) -> anyhow::Result<Parts> {
        let Self {
            provider,
            default_steering,
            serve_unset_class,
            migrate_legacy_annotations,
            namespace,
            identity,
            lease_name,
            lease_duration,
            lease_deadline,
            lease_retry,
            node_health_port,
            agent_health_port,
            health_check_interval,
            health_check_timeout,
            health_check_healthy_threshold,
            health_check_unhealthy_threshold,
            workers,
            provider_rate,
            compare_every,
            freeze_after,
            client,
            process: _,
            aws,
        } = self;
        let component = process.component();
        let client = steerage_watch::client(component.name, component.version, &client).await?;
        let provider_rate = provider_rate.unwrap_or(match provider {
            ProviderName::Edge => 1000,
            ProviderName::Aws => 20,
        });
        let provider = make(provider, &client, &namespace, aws, process).await?;
        let health = HealthDefaults {
            interval: health_check_interval,
            timeout: health_check_timeout,
            healthy_threshold: health_check_healthy_threshold,
            unhealthy_threshold: health_check_unhealthy_threshold,
        };
        let capabilities = provider.capabilities();
        health.check(capabilities.health_interval).context("--health-check-interval")?;
        anyhow::ensure!(
            capabilities.steerings.contains(&default_steering),
            "--default-steering: the provider {} cannot steer by {default_steering}",
            provider.name()
        );
        anyhow::ensure!(
            lease_deadline + Duration::from_secs(5) <= lease_duration && lease_retry < lease_deadline,
            "--lease-deadline must be at least five seconds shorter than --lease-duration, and longer than --lease-retry"
        );
        let identity = match identity {
            Some(identity) => identity,
            None => host_name()?,
        };
        Ok(Parts {
            config: plan::Config {
                capabilities,
                default_steering,
                classes: Classes { provider: provider.name(), serve_unset: serve_unset_class },
                node_health_port,
                agent_health_port,
                health,
            },
            lease: lease::Options {
                namespace,
                name: lease_name,
                identity: format!("{identity}_{:x}", std::process::id()),
                timing: lease::Timing {
                    duration: lease_duration,
                    deadline: lease_deadline,
                    retry: lease_retry,
                    ..lease::Timing::default()
                },
            },
            workers: workers::Options {
                workers: usize::from(workers),
                backoff: Backoff { least: Duration::from_millis(250), most: Duration::from_mins(5) },
                compare_every,
            },
            client,
            provider,
            identity,
            provider_rate,
            freeze_after,
            migrate: migrate_legacy_annotations,
        })
    }
}

async fn make(
    name: ProviderName,
    client: &Client,
    namespace: &str,
    aws: AwsArgs,
    process: &Process,
) -> anyhow::Result<Arc<dyn Provider>> {
    Ok(match name {
        ProviderName::Edge => {
            let edge = Arc::new(EdgeProvider::new(client, namespace));
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
        ProviderName::Aws => Arc::new(Aws::connect(aws.try_into()?).await),
    })
}

fn host_name() -> anyhow::Result<String> {
    let name =
        std::fs::read_to_string("/proc/sys/kernel/hostname").context("cannot read the machine's name")?;
    Ok(name.trim().to_owned())
}
