// SPDX-License-Identifier: Apache-2.0
//! A real etcd and a real kube-apiserver on loopback, for tests that need more of the API than a script can play.
//!
//! RBAC is on; no controller runs. A dependency of tests and of the benchmark only. All is gone with the [`Server`]. Its processes end with that of the
//! test at the latest, however that ends; a folder that is then left over is removed by the next server that starts.

mod credentials;
mod keeper;

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use anyhow::Context;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};

use keeper::Keeper;

/// What may differ from one server to another.
#[derive(Debug, Clone)]
pub struct Options {
    /// The address that the API server listens on; it must exist.
    pub address: Ipv4Addr,
    /// More arguments of the API server; of a flag that is given twice, the last one holds.
    pub arguments: Vec<String>,
    /// More administrators: a token and a name each.
    pub administrators: Vec<(String, String)>,
}

impl Default for Options {
    fn default() -> Self {
        Self { address: Ipv4Addr::LOCALHOST, arguments: Vec::new(), administrators: Vec::new() }
    }
}

/// A running control plane.
#[derive(Debug)]
pub struct Server {
    keeper: Keeper,
}

impl Server {
    /// Starts one and returns when it is ready. Blocks for some seconds.
    pub fn start() -> anyhow::Result<Self> {
        Self::start_with(Options::default())
    }

    /// The same, otherwise than usual.
    pub fn start_with(options: Options) -> anyhow::Result<Self> {
        // Fails when the test installed one already, which is as good.
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        Ok(Self { keeper: Keeper::start(options)? })
    }

    /// The one server that all tests of a binary share; started by whoever asks first.
    ///
    /// # Panics
    /// If it cannot be started. The message says what to do.
    #[allow(clippy::panic, reason = "called by tests only, which have nothing else to do with the error")]
    pub fn shared() -> &'static Self {
        static SHARED: OnceLock<Server> = OnceLock::new();
        SHARED.get_or_init(|| Self::start().unwrap_or_else(|error| panic!("{error:#}")))
    }

    /// Kills the API server, so that its connections break and new ones are refused. What it stored stays.
    pub fn cut(&self) -> anyhow::Result<()> {
        self.keeper.cut()
    }

    /// Starts the API server again after [`Server::cut`], under the same address, and returns when it is ready.
    pub fn heal(&self) -> anyhow::Result<()> {
        self.keeper.heal()
    }

    /// The kubeconfig of an administrator.
    pub fn kubeconfig(&self) -> &Path {
        self.keeper.kubeconfig()
    }

    /// Writes a kubeconfig for `user` in `groups`, who may do what RBAC gives to them, and nothing else. A service account is
    /// the user `system:serviceaccount:NAMESPACE:NAME` in the groups `system:serviceaccounts` and
    /// `system:serviceaccounts:NAMESPACE`.
    pub fn kubeconfig_for(&self, user: &str, groups: &[&str]) -> anyhow::Result<PathBuf> {
        self.keeper.kubeconfig_for(user, groups)
    }

    /// A client of the administrator. Made anew for each test: a client belongs to the runtime that first used it.
    pub async fn client(&self) -> anyhow::Result<Client> {
        client(self.kubeconfig()).await
    }
}

/// A client from a kubeconfig that does not retry.
pub(crate) async fn client(kubeconfig: &Path) -> anyhow::Result<Client> {
    let kubeconfig = Kubeconfig::read_from(kubeconfig).context("cannot read the kubeconfig")?;
    let mut config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
    config.default_retry = false;
    Ok(Client::try_from(config)?)
}
