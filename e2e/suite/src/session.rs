// SPDX-License-Identifier: Apache-2.0
//! Connects the suite to a cluster from inside its first client's network namespace.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Result;
use tokio::runtime::Runtime;

use crate::cluster::Cluster;
use crate::service_proxy::ServiceProxy;
use crate::suite::Suite;

/// Runs `work` with a suite and a runtime whose threads are all inside the client's namespace: every socket is the client's.
pub(crate) fn inside<T: Send>(
    service_proxy: ServiceProxy,
    cluster: Box<dyn Cluster>,
    logs: PathBuf,
    work: impl FnOnce(&Arc<Suite>, &Runtime) -> Result<T> + Send,
) -> Result<T> {
    let [client, _] = cluster.clients();
    steerage_lab::in_netns(&client.netns, move || {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        let suite = Arc::new(runtime.block_on(Suite::start(service_proxy, cluster, logs))?);
        work(&suite, &runtime)
    })?
}
