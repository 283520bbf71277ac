// SPDX-License-Identifier: Apache-2.0
//! A dry run: lists the cluster, plans every Service, and logs what the controller would do. Then it ends.
//!
//! It takes no Lease, so it may run beside the controller that writes. It writes nothing: it calls only what a provider promises to be
//! reading, and its client refuses every request that could write.

mod difference;
mod paced_reader;
mod read_only;

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

use anyhow::Context as _;
use steerage_model::Service;
use steerage_process::Process;
use steerage_provider_api::{Error, Owner, Provider};
use steerage_watch::{Backoff, Watches};
use tokio::time::Duration;

use crate::cluster_index::{self, ClusterIndex, Snapshot};
use crate::plan::{self, Config, PlanError, TargetPlan};
use crate::rate_limit::RateLimiter;
use crate::request_queue::RequestQueue;
use paced_reader::PacedReader;

pub(crate) use read_only::read_only;

/// What a dry run needs of the controller's components.
pub(crate) struct DryRun {
    pub(crate) watches: Watches,
    pub(crate) provider: Arc<dyn Provider>,
    pub(crate) config: Config,
    pub(crate) provider_qps: u32,
}

/// What the controller would do for one Service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Action {
    Create,
    Change,
    Delete,
    /// The Service is refused. What exists is kept.
    Refuse,
    None,
    /// No difference was found, but not everything was compared.
    Unknown,
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Create => "create",
            Self::Change => "change",
            Self::Delete => "delete",
            Self::Refuse => "refuse",
            Self::None => "none",
            Self::Unknown => "unknown",
        })
    }
}

/// How much of what exists was compared with what is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Compared {
    All,
    Targets,
    Nothing,
}

/// An action, and its details for the log.
type Planned = (Action, String);

/// Runs until everything is logged, or until shutdown.
pub(crate) async fn run(process: Process, dry_run: DryRun) -> anyhow::Result<()> {
    let DryRun { watches, provider, config, provider_qps } = dry_run;
    // Nobody takes requests out of it.
    let backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(1));
    let requests = Arc::new(RequestQueue::new(|owner| owner.uid.clone(), backoff));
    let cluster = ClusterIndex::new(config.classes.clone(), requests, Arc::default());
    let cluster = Arc::new(cluster.with_cordoned_nodes_drained(config.drain_cordoned_nodes));
    cluster_index::follow(&process, &cluster, &watches, config.pod_readiness_gates);
    let reader = PacedReader::new(provider, RateLimiter::of_qps(provider_qps));
    tokio::select! {
        biased;
        () = process.shutdown().cancelled() => Ok(()),
        result = async {
            watches.relist().await;
            plan_all(&reader, &config, &cluster).await
        } => result,
    }
}

/// Plans and logs every Service, and what only the provider has.
async fn plan_all(reader: &PacedReader, config: &Config, cluster: &ClusterIndex) -> anyhow::Result<()> {
    let owned = reader.read(async |provider| provider.preview_owned().await).await;
    let owned = owned.context("cannot list the provider's load balancers")?;
    let owned: BTreeSet<Owner> = owned.into_iter().collect();
    let mut owners: BTreeSet<Owner> = cluster.owners().into_iter().collect();
    owners.extend(owned.iter().cloned());
    let mut counts = std::collections::BTreeMap::<Action, usize>::new();
    for owner in &owners {
        let snapshot = cluster.snapshot(owner, config);
        let (action, details) = if let Some(snapshot) = &snapshot {
            plan_service(reader, config, cluster, owner, snapshot, owned.contains(owner)).await
        } else {
            let details = "deletes the load balancer after --orphan-grace-period: its Service is gone";
            (Action::Delete, details.to_owned())
        };
        *counts.entry(action).or_default() += 1;
        let warnings = snapshot.map(|snapshot| warnings(&snapshot.service));
        let warnings = warnings.filter(|text| !text.is_empty());
        tracing::info!(service = %owner.service, uid = owner.uid, %action, details, warnings, "dry run");
    }
    let count = |action| counts.get(&action).copied().unwrap_or(0);
    tracing::info!(
        create = count(Action::Create),
        change = count(Action::Change),
        delete = count(Action::Delete),
        refuse = count(Action::Refuse),
        none = count(Action::None),
        unknown = count(Action::Unknown),
        "dry run complete; nothing was written"
    );
    Ok(())
}

async fn plan_service(
    reader: &PacedReader,
    config: &Config,
    cluster: &ClusterIndex,
    owner: &Owner,
    snapshot: &Snapshot,
    exists: bool,
) -> Planned {
    let Snapshot { service, endpoints, nodes } = snapshot;
    if plan::is_paused(service) == Ok(true) {
        return (Action::None, "the Service is paused".to_owned());
    }
    if plan::is_unmanaged_by_flag(service, &config.classes) {
        return (Action::None, "keeps the load balancer: its class is not managed any more".to_owned());
    }
    if !plan::is_managed(service, &config.classes) {
        let details = if exists {
            "deletes the load balancer and removes the finalizer"
        } else {
            "removes the finalizer; there is no load balancer"
        };
        return (Action::Delete, details.to_owned());
    }
    let wanted =
        plan::is_paused(service).and_then(|_| plan::steering(service, config)).and_then(|steering| {
            let lb = plan::load_balancer(service, steering, config)?;
            cluster.check_addresses(service, lb.requested_addresses.iter().copied())?;
            let targets = if plan::has_pod_targets(service, config)? {
                TargetPlan::of_pods(cluster.pod_targets(service, config))
            } else {
                let labels = plan::node_labels(service, config)?;
                plan::targets(service, endpoints, nodes, steering, labels.as_ref(), config)
            };
            Ok(plan::with_last_resort(lb.with_targets(&targets.targets()), &targets, config))
        });
    let lb = match wanted {
        Ok(lb) => lb,
        Err(error) => return (Action::Refuse, refusal(&error)),
    };
    let changes = match reader.read(async |provider| provider.preview(&lb).await).await {
        Ok(changes) => changes,
        Err(error) => return not_compared(&error),
    };
    if let Some(changes) = changes.as_ref().filter(|_| !exists) {
        return (Action::Change, changes.join("; "));
    }
    if !exists {
        return (Action::Create, format!("creates a load balancer with {} targets", lb.targets().count()));
    }
    let compared = match changes {
        Some(_) => Compared::All,
        None if reader.reports_health() => Compared::Targets,
        None => Compared::Nothing,
    };
    let mut changes = match changes {
        Some(changes) => changes,
        // What is registered is not known.
        None if compared == Compared::Nothing => Vec::new(),
        None => match reader.read(async |provider| provider.target_health(owner).await).await {
            Ok(health) => difference::of_targets(&lb.targets(), &health.targets),
            Err(error) => return not_compared(&error),
        },
    };
    if !service.has_finalizer(plan::finalizer(service)) {
        changes.push("adds the finalizer".to_owned());
    }
    conclude(changes, compared)
}

/// What works otherwise than its user may believe.
fn warnings(service: &Service) -> String {
    plan::ignored_annotations(service).collect::<Vec<_>>().join(" ")
}

/// The provider refuses the Service, or cannot be read. The next Service may be readable.
fn not_compared(error: &Error) -> Planned {
    match error {
        Error::Invalid { reason, message } => (Action::Refuse, format!("{reason}: {message}")),
        error => (Action::Unknown, format!("the provider cannot be read: {error}")),
    }
}

fn refusal(error: &PlanError) -> String {
    format!("{}: {error}. {}.", error.reason(), error.remedy())
}

fn conclude(mut changes: Vec<String>, compared: Compared) -> Planned {
    let action = match (changes.is_empty(), compared) {
        (false, _) => Action::Change,
        (true, Compared::All) => Action::None,
        (true, Compared::Targets | Compared::Nothing) => Action::Unknown,
    };
    let left_out = match compared {
        Compared::All => None,
        Compared::Targets => {
            Some("only targets are compared: the provider cannot preview listeners and health checks")
        }
        Compared::Nothing => Some(
            "the load balancer is not compared: the provider cannot preview changes, and reports no targets",
        ),
    };
    changes.extend(left_out.map(str::to_owned));
    (action, changes.join("; "))
}

#[cfg(test)]
mod tests {
    use steerage_model::{Node, Protocol, ServicePort, TrafficPolicy};
    use steerage_watch::Event;

    use super::*;
    use crate::cluster_index::owner_of;
    use crate::cluster_index::tests::service;
    use crate::reconcile::tests::{Silent, reconciler, silent_client};

    /// What is planned for one Service, by the provider's answers to `preview`.
    async fn planned(previews: Vec<Result<Option<Vec<String>>, Error>>, exists: bool) -> Planned {
        planned_with(previews, exists, |_, _| {}).await
    }

    /// The same, after a change of the Service and the cluster.
    async fn planned_with(
        previews: Vec<Result<Option<Vec<String>>, Error>>,
        exists: bool,
        change: impl FnOnce(&mut Service, &ClusterIndex),
    ) -> Planned {
        planned_by(Silent::with_previews(previews), exists, change).await
    }

    async fn planned_by(
        provider: Silent,
        exists: bool,
        change: impl FnOnce(&mut Service, &ClusterIndex),
    ) -> Planned {
        let provider: Arc<dyn Provider> = Arc::new(provider);
        let reconciler = reconciler(Arc::clone(&provider), silent_client());
        let mut service = service();
        service.finalizers = vec![plan::finalizer(&service).to_owned()];
        service.ports = vec![ServicePort::new("", Protocol::Tcp, 80, Some(30080))];
        service.cluster_ips = vec![[10, 96, 0, 1].into()];
        change(&mut service, &reconciler.cluster);
        reconciler.cluster.on_service(Event::Apply(service.clone()));
        let owner = owner_of(&service);
        let snapshot = reconciler.cluster.snapshot(&owner, &reconciler.config).expect("the Service");
        let reader = PacedReader::new(provider, RateLimiter::of_qps(1));
        plan_service(&reader, &reconciler.config, &reconciler.cluster, &owner, &snapshot, exists).await
    }

    fn throttled() -> Error {
        Error::Throttled { after: Some(Duration::from_mins(1)), message: "slowly".to_owned() }
    }

    #[tokio::test(start_paused = true)]
    async fn what_the_provider_refuses_is_refused_before_it_exists_too() {
        for exists in [false, true] {
            let (action, details) =
                planned(vec![Err(Error::invalid("WrongScheme", "Use another."))], exists).await;
            assert_eq!((action, details.as_str()), (Action::Refuse, "WrongScheme: Use another."));
        }
        assert_eq!(planned(vec![Ok(None)], false).await.0, Action::Create);
        let adopts = || "adopts the load balancer web".to_owned();
        assert_eq!(planned(vec![Ok(Some(vec![adopts()]))], false).await, (Action::Change, adopts()));
        assert_eq!(planned(vec![Ok(Some(Vec::new()))], true).await, (Action::None, String::new()));
    }

    #[tokio::test(start_paused = true)]
    async fn address_of_the_cluster_is_refused() {
        let (action, details) = planned_with(vec![Ok(None)], false, |service, cluster| {
            let addresses = vec!["10.0.0.9".parse().expect("ip")];
            cluster.on_node(Event::Apply(Node { name: "cp".to_owned(), addresses, ..Node::default() }));
            service.load_balancer_ip = Some("10.0.0.9".to_owned());
        })
        .await;
        assert_eq!(action, Action::Refuse);
        assert!(
            details.starts_with("ClusterAddress: The address 10.0.0.9 belongs to the node cp"),
            "{details}"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_failure_that_may_pass_is_tried_again_and_ends_one_service_only() {
        let unavailable = || Err(Error::Unavailable("AWS failed".to_owned()));
        let answers = vec![Err(throttled()), unavailable(), Ok(Some(vec!["adds node-a".to_owned()]))];
        assert_eq!(planned(answers, true).await, (Action::Change, "adds node-a".to_owned()));
        let answers = (0..4).map(|_| Err(throttled())).chain([unavailable()]).collect();
        let (action, details) = planned(answers, true).await;
        assert_eq!(action, Action::Unknown);
        assert!(details.contains("AWS failed"), "{details}");
        let (action, details) = planned(vec![Err(Error::denied("no"))], true).await;
        assert_eq!(action, Action::Unknown);
        assert!(details.contains("denied permission: no"), "a second try changes nothing: {details}");
    }

    /// As Azure: there are targets, and no provider says which of them are registered.
    #[tokio::test(start_paused = true)]
    async fn nothing_is_compared_with_a_provider_that_reports_no_targets() {
        let planned = async |exists| {
            let provider = Silent::with_previews(vec![Ok(None)]).without_health();
            planned_by(provider, exists, |service, cluster| {
                service.external_policy = TrafficPolicy::Cluster;
                let addresses = vec!["10.0.0.9".parse().expect("ip")];
                let node = Node { name: "a".to_owned(), addresses, ..Node::default() };
                cluster.on_node(Event::Apply(node));
            })
            .await
        };
        let (action, details) = planned(false).await;
        assert_eq!((action, details.as_str()), (Action::Create, "creates a load balancer with 1 targets"));
        let (action, details) = planned(true).await;
        assert_eq!(action, Action::Unknown, "{details}");
        assert!(details.starts_with("the load balancer is not compared"), "{details}");
    }

    #[test]
    fn ignored_annotations_are_named() {
        let mut service = service();
        assert_eq!(warnings(&service), "");
        service.annotations.insert("steerage.dev/stering".to_owned(), "api".to_owned());
        assert!(warnings(&service).contains("The nearest known one is steerage.dev/steering."));
    }

    #[test]
    fn no_difference_is_none_only_if_everything_was_compared() {
        let changes = || vec!["adds node-a".to_owned()];
        assert_eq!(conclude(changes(), Compared::All), (Action::Change, "adds node-a".to_owned()));
        assert_eq!(conclude(Vec::new(), Compared::All), (Action::None, String::new()));
        let (action, details) = conclude(Vec::new(), Compared::Targets);
        assert_eq!(action, Action::Unknown);
        assert!(details.starts_with("only targets are compared"), "{details}");
        let (action, details) = conclude(changes(), Compared::Targets);
        assert_eq!(action, Action::Change);
        assert!(details.starts_with("adds node-a; only targets"), "{details}");
    }
}
