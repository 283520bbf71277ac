// SPDX-License-Identifier: Apache-2.0
//! What all cases share: the cluster, an API client, the report, and a namespace with one backend per node.

use std::path::PathBuf;
use std::sync::Mutex;

use anyhow::{Context as _, Result};
use k8s_openapi::api::core::v1::{Namespace, Pod};
use kube::Api;
use kube::api::{DeleteParams, ListParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use serde_json::json;
use tokio::sync::OnceCell;
use tokio::task::block_in_place;

use steerage_lab::Cloud;

use crate::aws::Aws;
use crate::cluster::{Cluster, Host};
use crate::off_link::OffLink;
use crate::openstack::OpenStack;
use crate::passthrough::Passthrough;
use crate::pods;
use crate::report::Report;
use crate::service_proxy::ServiceProxy;
use crate::services::Vips;

/// The namespace of the shared backends.
pub const COMMON: &str = "e2e-common";
/// The label of the shared backends. Their names begin with it and a hyphen.
pub const ECHO: &str = "echo";
/// The label of as many others, for a Service whose traffic must reach no other's backends.
pub const OTHER: &str = "other";
/// The label of namespaces that cases made.
const MARK: &str = "steerage.dev/e2e";

/// What all cases share.
pub struct Suite {
    /// The service proxy of the cluster.
    pub service_proxy: ServiceProxy,
    /// An API client with an administrator's rights.
    pub client: kube::Client,
    /// The measurements.
    pub report: Report,
    /// The folder for diagnostics of failed cases.
    pub logs: PathBuf,
    /// Set once the loss meter has passed its test of itself.
    pub meter_tested: OnceCell<()>,
    cluster: Box<dyn Cluster>,
    seen: Mutex<Vec<Vips>>,
    backends: OnceCell<Vec<Pod>>,
}

impl Suite {
    /// Connects to the cluster and removes namespaces of an earlier run.
    pub async fn start(
        service_proxy: ServiceProxy,
        cluster: Box<dyn Cluster>,
        logs: PathBuf,
    ) -> Result<Self> {
        // Fails only when a library has installed it already.
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        let file = cluster.kubeconfig();
        let kubeconfig =
            Kubeconfig::read_from(&file).with_context(|| format!("reading {}", file.display()))?;
        let config = kube::Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
        let client = kube::Client::try_from(config)?;
        let suite = Self {
            service_proxy,
            client,
            report: Report::default(),
            logs,
            meter_tested: OnceCell::new(),
            cluster,
            seen: Mutex::default(),
            backends: OnceCell::new(),
        };
        suite.sweep().await?;
        Ok(suite)
    }

    /// Removes all namespaces of the run.
    pub async fn finish(&self) {
        if let Err(error) = self.sweep().await {
            eprintln!("removing the tests' namespaces: {error:#}");
        }
    }

    /// The simulated AWS that the nodes are in, if they are in one.
    pub fn aws(&self) -> Option<Aws> {
        self.cluster.aws()
    }

    /// The OpenStack that the nodes are in, if they are in one.
    pub fn openstack(&self) -> Option<OpenStack> {
        self.cluster.openstack()
    }

    /// The GCE or Azure that the nodes are in, if they are in one.
    pub fn passthrough(&self) -> Option<Passthrough> {
        self.cluster.passthrough()
    }

    /// How a node gets off the link of the edge hosts, where that is possible.
    pub fn off_link(&self) -> Option<OffLink> {
        self.cluster.off_link()
    }

    /// The cloud that the nodes are in.
    pub fn cloud(&self) -> Option<Cloud> {
        let openstack = || self.openstack().map(|_| Cloud::OpenStack);
        let passthrough = || self.passthrough().map(|found| found.cloud);
        self.aws().map(|_| Cloud::Aws).or_else(openstack).or_else(passthrough)
    }

    /// The nodes.
    pub fn nodes(&self) -> Vec<Host> {
        self.cluster.nodes()
    }

    /// The two clients.
    pub fn clients(&self) -> [Host; 2] {
        self.cluster.clients()
    }

    /// Records addresses that a Service got.
    pub fn record_vips(&self, vips: Vips) {
        if let Ok(mut seen) = self.seen.lock() {
            seen.retain(|other| *other != vips);
            seen.push(vips);
        }
    }

    /// All addresses that Services got.
    pub fn recorded_vips(&self) -> Vec<Vips> {
        self.seen.lock().map(|seen| seen.clone()).unwrap_or_default()
    }

    /// Runs a blocking operation on the cluster.
    pub fn cluster<T>(&self, work: impl FnOnce(&dyn Cluster) -> T) -> T {
        block_in_place(|| work(&*self.cluster))
    }

    /// Runs requests inside a host's network namespace.
    pub fn inside<T: Send>(&self, host: &Host, work: impl AsyncFnOnce() -> Result<T> + Send) -> Result<T> {
        block_in_place(|| {
            steerage_lab::in_netns(&host.netns, || -> Result<T> {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
                runtime.block_on(work())
            })?
        })
    }

    /// One ready backend per node, in the nodes' order, in [`COMMON`] with the label [`ECHO`]. Those with the label [`OTHER`] are
    /// ready, too.
    pub async fn backends(&self) -> Result<&[Pod]> {
        let made = self.backends.get_or_try_init(async || -> Result<Vec<Pod>> {
            self.make_namespace(COMMON).await?;
            let nodes = self.nodes();
            let mut backends = Vec::new();
            for app in [ECHO, OTHER] {
                for node in &nodes {
                    let pod = pods::echo(&format!("{app}-{}", node.name), app, &node.name, 0)?;
                    backends.push(pods::create(&self.client, COMMON, &pod).await?);
                }
            }
            for pod in &mut backends {
                pods::set_ready(&self.client, pod, true).await?;
                *pod = pods::wait_ready(&self.client, pod, true).await?;
            }
            backends.truncate(nodes.len());
            Ok(backends)
        });
        Ok(made.await?)
    }

    /// Makes a namespace that [`Suite::finish`] removes.
    pub async fn make_namespace(&self, name: &str) -> Result<()> {
        let namespace = json!({ "metadata": { "name": name, "labels": { MARK: "true" } } });
        let namespace: Namespace = serde_json::from_value(namespace)?;
        Api::all(self.client.clone())
            .create(&PostParams::default(), &namespace)
            .await
            .context("making a namespace")?;
        Ok(())
    }

    async fn sweep(&self) -> Result<()> {
        let namespaces: Api<Namespace> = Api::all(self.client.clone());
        let ours = ListParams::default().labels(MARK);
        for namespace in namespaces.list(&ours).await? {
            namespaces
                .delete(namespace.metadata.name.as_deref().unwrap_or_default(), &DeleteParams::default())
                .await?;
        }
        crate::wait::until("the end of the tests' namespaces", crate::wait::TIMEOUT * 2, async || {
            let left = namespaces.list(&ours).await.map_err(|error| error.to_string())?.items;
            if left.is_empty() {
                return Ok(());
            }
            Err(format!("{:?}", left.iter().map(|namespace| &namespace.metadata.name).collect::<Vec<_>>()))
        })
        .await
    }
}
