// SPDX-License-Identifier: Apache-2.0
//! A dry run: lists the cluster, plans every Service, and logs what the controller would do. Then it ends.
//!
//! It takes no Lease, so it may run beside the controller that writes. It writes nothing: it calls only what a provider promises to be
//! reading, and its client refuses every request that could write.

mod difference;
mod read_only;

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

use anyhow::Context as _;
use steerage_process::Process;
use steerage_provider_api::{LoadBalancer, Owner, Provider};
use steerage_watch::{Backoff, Watches};
use tokio::time::Duration;

use crate::cluster_index::{self, ClusterIndex, Snapshot};
use crate::plan::{self, Config, PlanError};
use crate::request_queue::RequestQueue;

pub(crate) use read_only::read_only;

/// What a dry run needs of the controller's components.
pub(crate) struct DryRun {
    pub(crate) watches: Watches,
    pub(crate) provider: Arc<dyn Provider>,
    pub(crate) config: Config,
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
    /// No difference was found, but the provider cannot compare everything.
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

/// An action, and its details for the log.
type Planned = (Action, String);

/// Runs until everything is logged, or until shutdown.
pub(crate) async fn run(process: Process, dry_run: DryRun) -> anyhow::Result<()> {
    let DryRun { watches, provider, config } = dry_run;
    // Nobody takes requests out of it.
    let backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(1));
    let requests = Arc::new(RequestQueue::new(|owner| owner.uid.clone(), backoff));
    let cluster = Arc::new(ClusterIndex::new(config.classes.clone(), requests, Arc::default()));
    cluster_index::follow(&process, &cluster, &watches);
    tokio::select! {
        biased;
        () = process.shutdown().cancelled() => return Ok(()),
        () = watches.relist() => {}
    }
    let owned = provider.preview_owned().await.context("cannot list the provider's load balancers")?;
    let owned: BTreeSet<Owner> = owned.into_iter().collect();
    let mut owners: BTreeSet<Owner> = cluster.owners().into_iter().collect();
    owners.extend(owned.iter().cloned());
    let mut counts = std::collections::BTreeMap::<Action, usize>::new();
    for owner in &owners {
        if process.shutdown().is_cancelled() {
            return Ok(());
        }
        let (action, details) = match cluster.snapshot(owner) {
            Some(snapshot) => {
                plan_service(&*provider, &config, &snapshot, owner, owned.contains(owner)).await?
            }
            None => (Action::Delete, "its Service is gone; deleted after --orphan-grace-period".to_owned()),
        };
        *counts.entry(action).or_default() += 1;
        tracing::info!(service = %owner.service, uid = owner.uid, %action, details, "dry run");
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
    provider: &dyn Provider,
    config: &Config,
    snapshot: &Snapshot,
    owner: &Owner,
    exists: bool,
) -> anyhow::Result<Planned> {
    let Snapshot { service, endpoints, nodes } = snapshot;
    if plan::is_paused(service) == Ok(true) {
        return Ok((Action::None, "the Service is paused".to_owned()));
    }
    if !plan::is_managed(service, &config.classes) {
        let details =
            if exists { "load balancer and finalizer" } else { "finalizer; no load balancer exists" };
        return Ok((Action::Delete, details.to_owned()));
    }
    let wanted =
        plan::is_paused(service).and_then(|_| plan::steering(service, config)).and_then(|steering| {
            let lb = plan::load_balancer(service, steering, config)?;
            Ok(LoadBalancer { targets: plan::targets(service, endpoints, nodes, steering, config).set, ..lb })
        });
    let lb = match wanted {
        Ok(lb) => lb,
        Err(error) => return Ok((Action::Refuse, refusal(&error))),
    };
    if !exists {
        return Ok((Action::Create, format!("{} targets", lb.targets.targets.len())));
    }
    let changes = provider.preview(&lb).await.with_context(|| format!("cannot compare {owner}"))?;
    let is_complete = changes.is_some();
    let mut changes = if let Some(changes) = changes {
        changes
    } else {
        let health = provider.target_health(owner).await;
        let health = health.with_context(|| format!("cannot read the targets of {owner}"))?;
        difference::of_targets(&lb.targets.targets, &health.targets)
    };
    if !service.has_finalizer(plan::finalizer(service)) {
        changes.push("adds the finalizer".to_owned());
    }
    Ok(conclude(changes, is_complete))
}

fn refusal(error: &PlanError) -> String {
    format!("{}: {error}. {}.", error.reason(), error.remedy())
}

/// `is_complete`: everything was compared.
fn conclude(mut changes: Vec<String>, is_complete: bool) -> Planned {
    let action = match (changes.is_empty(), is_complete) {
        (false, _) => Action::Change,
        (true, true) => Action::None,
        (true, false) => Action::Unknown,
    };
    if !is_complete {
        changes.push(
            "only targets are compared: the provider cannot preview listeners and health checks".to_owned(),
        );
    }
    (action, changes.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_difference_is_none_only_if_everything_was_compared() {
        let changes = || vec!["adds node-a".to_owned()];
        assert_eq!(conclude(changes(), true), (Action::Change, "adds node-a".to_owned()));
        assert_eq!(conclude(Vec::new(), true), (Action::None, String::new()));
        let (action, details) = conclude(Vec::new(), false);
        assert_eq!(action, Action::Unknown);
        assert!(details.starts_with("only targets are compared"), "{details}");
        let (action, details) = conclude(changes(), false);
        assert_eq!(action, Action::Change);
        assert!(details.starts_with("adds node-a; only targets"), "{details}");
    }
}
