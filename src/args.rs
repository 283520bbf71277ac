// SPDX-License-Identifier: Apache-2.0
//! The controller's flags, and the composition root that turns them into its components. Called by `main`.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use clap::Parser;
use steerage_model::names;
use steerage_process::{Component, Process, ProcessArgs, duration};
use steerage_provider_api::{Provider, Steering};
use steerage_watch::{Backoff, ClientArgs, Watches};

use crate::chosen_provider::{CloudArgs, ProviderName, new_provider};
use crate::controller::{self, Components};
use crate::dry_run::{self, DryRun, read_only};
use crate::plan::{self, HealthCheckDefaults, ManagedClasses};
use crate::removal_hold::LONGEST_HOLD;
use crate::{lease, workers};

/// Default address of the administration server.
pub(crate) const ADMIN: SocketAddr = SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), 9580);

/// Gives Services of type `LoadBalancer` a load balancer that preserves the client's address
#[derive(Debug, Parser)]
#[command(name = "steerage", version)]
pub(crate) struct Args {
    /// Create load balancers with this provider; Services choose it by loadBalancerClass steerage.dev/PROVIDER
    #[arg(long, env = "STEERAGE_PROVIDER", value_enum)]
    provider: ProviderName,
    /// Steer Services without the annotation steerage.dev/steering this way: api, health-check or, with the provider edge only, fused
    #[arg(long, env = "STEERAGE_DEFAULT_STEERING", default_value = "health-check", value_name = "MODE")]
    default_steering: Steering,
    /// Also manage Services without loadBalancerClass; no other controller may then manage them
    #[arg(long, env = "STEERAGE_SERVE_UNSET_CLASS")]
    serve_unset_class: bool,
    /// Also manage Services with these classes of other controllers, such as service.k8s.aws/nlb. Stop those controllers first
    #[arg(
        long,
        env = "STEERAGE_SERVE_CLASSES",
        value_name = "CLASS,…",
        value_delimiter = ',',
        value_parser = other_class
    )]
    serve_classes: Vec<String>,
    /// Patch Services once to what their service.alpha.kubernetes.io or service.beta.kubernetes.io traffic annotations request
    #[arg(long, env = "STEERAGE_MIGRATE_LEGACY_ANNOTATIONS")]
    migrate_legacy_annotations: bool,

    /// Keep the Lease and the provider's objects in this namespace
    #[arg(long, env = "POD_NAMESPACE", default_value = "steerage-system")]
    namespace: String,
    /// Take part in leader election under this identity [default: the host name]
    #[arg(long, env = "POD_NAME", value_name = "NAME")]
    leader_elect_identity: Option<String>,
    /// Use the Lease of this name
    #[arg(
        long,
        env = "STEERAGE_LEADER_ELECT_RESOURCE_NAME",
        default_value = "steerage-controller",
        value_name = "NAME"
    )]
    leader_elect_resource_name: String,
    /// Wait this long after the last observed renewal before taking over the Lease
    #[arg(
        long,
        env = "STEERAGE_LEADER_ELECT_LEASE_DURATION",
        default_value = "15s",
        value_name = "DURATION",
        value_parser = plan::nonzero_duration
    )]
    leader_elect_lease_duration: Duration,
    /// Stop leading this long after the last successful renewal; at least 5s less than the lease duration
    #[arg(
        long,
        env = "STEERAGE_LEADER_ELECT_RENEW_DEADLINE",
        default_value = "10s",
        value_name = "DURATION",
        value_parser = plan::nonzero_duration
    )]
    leader_elect_renew_deadline: Duration,
    /// Wait this long between renewals, or between attempts to acquire the Lease
    #[arg(
        long,
        env = "STEERAGE_LEADER_ELECT_RETRY_PERIOD",
        default_value = "2s",
        value_name = "DURATION",
        value_parser = plan::nonzero_duration
    )]
    leader_elect_retry_period: Duration,

    /// Check nodes on this healthz port of their service proxy: kube-proxy, or the agent in its place
    #[arg(long, env = "STEERAGE_PROXY_HEALTHZ_PORT", default_value_t = 10256, value_name = "PORT")]
    proxy_healthz_port: u16,
    /// Check nodes on this healthz port of an agent beside kube-proxy, for Services labelled for the agent
    #[arg(long, env = "STEERAGE_AGENT_HEALTHZ_PORT", default_value_t = 10356, value_name = "PORT")]
    agent_healthz_port: u16,
    /// Check each target this often [default: 1s, or the provider's minimum if that is longer]
    #[arg(
        long,
        env = "STEERAGE_HEALTH_CHECK_INTERVAL",
        value_name = "DURATION",
        value_parser = plan::nonzero_duration
    )]
    health_check_interval: Option<Duration>,
    /// Fail a health check after this long [default: four fifths of the interval, at most 5s]
    #[arg(
        long,
        env = "STEERAGE_HEALTH_CHECK_TIMEOUT",
        value_name = "DURATION",
        value_parser = plan::nonzero_duration
    )]
    health_check_timeout: Option<Duration>,
    /// Mark a target healthy after this many consecutive successful checks
    #[arg(
        long,
        env = "STEERAGE_HEALTH_CHECK_HEALTHY_THRESHOLD",
        default_value_t = 2,
        value_name = "COUNT",
        value_parser = clap::value_parser!(u32).range(1..=100)
    )]
    health_check_healthy_threshold: u32,
    /// Mark a target unhealthy after this many consecutive failed checks
    #[arg(
        long,
        env = "STEERAGE_HEALTH_CHECK_UNHEALTHY_THRESHOLD",
        default_value_t = 2,
        value_name = "COUNT",
        value_parser = clap::value_parser!(u32).range(1..=100)
    )]
    health_check_unhealthy_threshold: u32,

    /// Reconcile this many load balancers at a time. A quarter, rounded down, is kept for urgent requests that change only targets: changed
    /// nodes, and changed endpoints of Services with an address or hostname in their status
    #[arg(
        long,
        env = "STEERAGE_CONCURRENT_SERVICE_SYNCS",
        default_value_t = 16,
        value_name = "COUNT",
        value_parser = clap::value_parser!(u16).range(1..)
    )]
    concurrent_service_syncs: u16,
    /// Limit provider calls per second, with bursts of twice as many [default: 10000 for edge, whose calls mostly cost no request, 20 for a
    /// cloud]
    #[arg(
        long,
        env = "STEERAGE_PROVIDER_QPS",
        value_name = "COUNT",
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    provider_qps: Option<u32>,
    /// Compare every load balancer with the provider about this often
    #[arg(
        long,
        env = "STEERAGE_RESYNC_PERIOD",
        default_value = "10m",
        value_name = "DURATION",
        value_parser = plan::nonzero_duration
    )]
    resync_period: Duration,
    /// Wait this long before deleting a load balancer whose Service is gone and was never seen by this process; a second list must
    /// confirm it. 0s deletes it after one list
    #[arg(
        long,
        env = "STEERAGE_ORPHAN_GRACE_PERIOD",
        default_value = "10m",
        value_name = "DURATION",
        value_parser = duration::parse
    )]
    orphan_grace_period: Duration,
    /// Freeze targets after this long without watch data; 0s disables, else at least 5m
    #[arg(
        long,
        env = "STEERAGE_FREEZE_TARGETS_AFTER",
        value_name = "DURATION",
        default_value = "0s",
        value_parser = watch_silence
    )]
    freeze_targets_after: Duration,
    /// Drain cordoned nodes: load balancers send them no new connections
    #[arg(long, env = "STEERAGE_DRAIN_CORDONED_NODES")]
    drain_cordoned_nodes: bool,
    /// Keep nodes as targets for up to this long when more than a third of a set of targets would leave within a minute; at most 30s,
    /// 0s disables. Nodes that drain, but for those that are only cordoned, leave at once
    #[arg(
        long,
        env = "STEERAGE_MASS_REMOVAL_HOLD",
        value_name = "DURATION",
        default_value = "30s",
        value_parser = removal_hold
    )]
    mass_removal_hold: Duration,

    /// Register pods that have the label steerage.dev/readiness-gate and the readiness gate steerage.dev/load-balancer-ready before they
    /// are ready, and set the gate when their load balancers find them healthy. Needs pods as targets (provider aws)
    #[arg(long, env = "STEERAGE_POD_READINESS_GATES")]
    pod_readiness_gates: bool,

    /// Log what would be done for each Service, write nothing, and exit; takes no Lease
    #[arg(long, env = "STEERAGE_DRY_RUN")]
    dry_run: bool,

    #[command(flatten)]
    client: ClientArgs,
    #[command(flatten)]
    process: ProcessArgs,
    #[command(flatten)]
    clouds: CloudArgs,
}

pub(crate) fn run(args: Args) -> ExitCode {
    let component = Component { name: "controller", version: env!("CARGO_PKG_VERSION"), admin: ADMIN };
    let (process_args, is_dry_run) = (args.process.clone(), args.dry_run);
    steerage_process::run(component, &process_args, |process| async move {
        // Boxed: it holds all that it makes, and clippy finds that too large for a stack.
        match Box::pin(args.compose(&process)).await? {
            Some(Components { watches, provider, config, provider_qps, .. }) if is_dry_run => {
                dry_run::run(process, DryRun { watches, provider, config, provider_qps }).await
            }
            Some(components) => Box::pin(controller::run(process, components)).await,
            None => Ok(()),
        }
    })
}

impl Args {
    /// `None` if the process stops before everything was read that the components need.
    async fn compose(self, process: &Process) -> anyhow::Result<Option<Components>> {
        let Self {
            provider,
            default_steering,
            serve_unset_class: serve_unset,
            serve_classes: others,
            migrate_legacy_annotations,
            namespace,
            leader_elect_identity,
            leader_elect_resource_name,
            leader_elect_lease_duration,
            leader_elect_renew_deadline,
            leader_elect_retry_period,
            proxy_healthz_port,
            agent_healthz_port,
            health_check_interval,
            health_check_timeout,
            health_check_healthy_threshold,
            health_check_unhealthy_threshold,
            concurrent_service_syncs,
            provider_qps,
            resync_period,
            orphan_grace_period,
            freeze_targets_after,
            drain_cordoned_nodes,
            mass_removal_hold,
            pod_readiness_gates,
            dry_run,
            client,
            process: _,
            clouds,
        } = self;
        let component = process.component();
        let client = steerage_watch::client(component.name, component.version, &client).await?;
        let client = if dry_run { read_only(client) } else { client };
        let provider_qps = provider_qps.unwrap_or(provider.default_qps());
        let watches =
            process.metrics().register("controller_watch", |registry| Watches::new(client.clone(), registry));
        let Some(provider) = new_provider(provider, &client, &watches, &namespace, clouds, process).await?
        else {
            return Ok(None);
        };
        let health = HealthCheckDefaults {
            interval: health_check_interval,
            timeout: health_check_timeout,
            healthy_threshold: health_check_healthy_threshold,
            unhealthy_threshold: health_check_unhealthy_threshold,
        };
        let capabilities = provider.capabilities();
        health.check(capabilities.health_interval).context("--health-check-interval")?;
        check_support(&*provider, default_steering, pod_readiness_gates)?;
        anyhow::ensure!(
            leader_elect_renew_deadline + Duration::from_secs(5) <= leader_elect_lease_duration
                && leader_elect_retry_period < leader_elect_renew_deadline,
            "--leader-elect-renew-deadline must be at least 5s shorter than --leader-elect-lease-duration, and longer than \
             --leader-elect-retry-period"
        );
        let identity = leader_elect_identity.map_or_else(host_name, Ok)?;
        Ok(Some(Components {
            config: plan::Config {
                capabilities,
                default_steering,
                classes: ManagedClasses { provider: provider.name(), serve_unset, others },
                proxy_healthz_port,
                agent_healthz_port,
                health,
                pod_readiness_gates,
                drain_cordoned_nodes,
            },
            lease: lease::LeaseOptions {
                namespace,
                name: leader_elect_resource_name,
                identity: format!("{identity}_{:x}", std::process::id()),
                timing: lease::LeaseTiming {
                    duration: leader_elect_lease_duration,
                    deadline: leader_elect_renew_deadline,
                    retry: leader_elect_retry_period,
                    ..lease::LeaseTiming::default()
                },
            },
            workers: workers::WorkerOptions {
                workers: usize::from(concurrent_service_syncs),
                resync_period,
                orphan_grace_period,
            },
            backoff: Backoff::new(Duration::from_millis(250), Duration::from_mins(5)),
            client,
            watches,
            provider,
            identity,
            provider_qps,
            freeze_targets_after: (!freeze_targets_after.is_zero()).then_some(freeze_targets_after),
            mass_removal_hold,
            migrate_legacy_annotations,
        }))
    }
}

/// Refuses what the provider does not support.
fn check_support(
    provider: &dyn Provider,
    default_steering: Steering,
    pod_readiness_gates: bool,
) -> anyhow::Result<()> {
    let (name, capabilities) = (provider.name(), provider.capabilities());
    anyhow::ensure!(
        capabilities.steerings.contains(&default_steering),
        "--default-steering: the provider {name} does not support {default_steering}"
    );
    anyhow::ensure!(
        !pod_readiness_gates || capabilities.pod_targets.is_some(),
        "--pod-readiness-gates: the provider {name} does not support pods as targets"
    );
    Ok(())
}

/// A quiet watch delivers a bookmark about once a minute: a shorter limit would freeze targets of a healthy cluster.
fn watch_silence(text: &str) -> Result<Duration, String> {
    let limit = duration::parse(text)?;
    if limit.is_zero() || limit >= Duration::from_mins(5) {
        return Ok(limit);
    }
    Err("a quiet watch may bring no data for nearly five minutes: use 0s, or at least 5m".to_owned())
}

/// Each controller of Steerage has a class of its own.
fn other_class(text: &str) -> Result<String, String> {
    if text.is_empty() || text.starts_with(names::PREFIX) {
        return Err(format!(
            "name a class of another controller; those that begin with {} are Steerage's",
            names::PREFIX
        ));
    }
    Ok(text.to_owned())
}

/// A target whose node does not come back must leave.
fn removal_hold(text: &str) -> Result<Duration, String> {
    let hold = duration::parse(text)?;
    let longest = duration::display(LONGEST_HOLD);
    if hold <= LONGEST_HOLD { Ok(hold) } else { Err(format!("a removal may be held for at most {longest}")) }
}

fn host_name() -> anyhow::Result<String> {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").context("cannot read the host name")?;
    Ok(name.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;
    use crate::reconcile::tests::Silent;

    /// Common usage outside Steerage.
    const UNPREFIXED: [(&str, &str); 3] =
        [("namespace", "POD_NAMESPACE"), ("leader-elect-identity", "POD_NAME"), ("kubeconfig", "KUBECONFIG")];

    #[test]
    fn targets_freeze_after_five_minutes_or_never() {
        let limit = |text: &str| {
            let line = ["steerage", "--provider=edge", "--freeze-targets-after", text];
            Args::try_parse_from(line).ok().map(|args| args.freeze_targets_after)
        };
        let minutes = |count| Some(Duration::from_mins(count));
        assert_eq!([limit("0s"), limit("5m"), limit("10m")], [minutes(0), minutes(5), minutes(10)]);
        assert_eq!([limit("30s"), limit("1m"), limit("120")], [None; 3]);
    }

    #[test]
    fn removals_are_held_for_thirty_seconds_at_most() {
        let hold = |flags: &[&str]| {
            let line = ["steerage", "--provider=edge"].into_iter().chain(flags.iter().copied());
            Args::try_parse_from(line).ok().map(|args| args.mass_removal_hold)
        };
        let seconds = |count| Some(Duration::from_secs(count));
        assert_eq!([hold(&[]), hold(&["--mass-removal-hold=0s"])], [seconds(30), seconds(0)]);
        assert_eq!([hold(&["--mass-removal-hold=31s"]), hold(&["--mass-removal-hold=30"])], [None; 2]);
    }

    #[test]
    fn pods_do_not_wait_by_default() {
        let gates = |flags: &[&str]| {
            let line = ["steerage", "--provider=aws"].into_iter().chain(flags.iter().copied());
            Args::try_parse_from(line).ok().map(|args| args.pod_readiness_gates)
        };
        assert_eq!([gates(&[]), gates(&["--pod-readiness-gates"])], [Some(false), Some(true)]);
    }

    #[test]
    fn pods_wait_only_for_providers_that_have_them_as_targets() {
        let edge = Silent::default();
        assert!(check_support(&edge, Steering::Api, false).is_ok());
        let refused = check_support(&edge, Steering::Api, true).expect_err("no pods");
        assert!(refused.to_string().contains("--pod-readiness-gates"), "{refused}");
        assert!(check_support(&edge, Steering::HealthCheck, false).is_err());
    }

    #[test]
    fn classes_of_steerage_are_not_served_as_those_of_others() {
        let served = |classes: &str| {
            let line = ["steerage", "--provider=aws", "--serve-classes", classes];
            Args::try_parse_from(line).ok().map(|args| args.serve_classes)
        };
        assert_eq!(
            served("service.k8s.aws/nlb,b"),
            Some(vec!["service.k8s.aws/nlb".to_owned(), "b".to_owned()])
        );
        assert_eq!([served("steerage.dev/edge"), served("a,")], [None, None]);
    }

    #[test]
    fn environment_variables_are_named_after_their_flags() {
        for arg in Args::command().get_arguments() {
            let (Some(flag), Some(env)) = (arg.get_long(), arg.get_env()) else { continue };
            let expected = match UNPREFIXED.iter().find(|(name, _)| *name == flag) {
                Some((_, env)) => (*env).to_owned(),
                None => format!("STEERAGE_{}", flag.to_uppercase().replace('-', "_")),
            };
            assert_eq!(env.to_str(), Some(expected.as_str()), "--{flag}");
        }
    }
}
