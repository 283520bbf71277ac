// SPDX-License-Identifier: Apache-2.0
//! A real etcd and a real kube-apiserver on loopback, for tests that a scripted server cannot serve.
//!
//! RBAC is on; no controller runs. A dependency of tests and of the benchmark only. The processes and the folder go with the
//! [`Server`]. The processes also end when the test is killed; the next server removes the folder that is then left over.

mod credentials;
mod keeper;

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use anyhow::Context;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};

use keeper::Keeper;

/// The options of a server.
#[derive(Debug, Clone)]
pub struct Options {
    /// The address that the API server listens on; it must exist.
    pub address: Ipv4Addr,
    /// Further arguments of the API server; the last of a repeated flag applies.
    pub arguments: Vec<String>,
    /// Further administrators: a token and a name each.
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
    /// Starts a server and waits until it is ready. Blocks for some seconds.
    pub fn start() -> anyhow::Result<Self> {
        Self::start_with(Options::default())
    }

    /// Starts a server with these options.
    pub fn start_with(options: Options) -> anyhow::Result<Self> {
        // Fails if the test has installed one already.
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        Ok(Self { keeper: Keeper::start(options)? })
    }

    /// The server that all tests of a program share. The first call starts it.
    ///
    /// # Panics
    /// If the server cannot be started. The message says what to do.
    #[allow(clippy::panic, reason = "only tests call it")]
    pub fn shared() -> &'static Self {
        static SHARED: OnceLock<Server> = OnceLock::new();
        SHARED.get_or_init(|| Self::start().unwrap_or_else(|error| panic!("{error:#}")))
    }

    /// Kills the API server: its connections break and new ones are refused. Its data stay.
    pub fn cut(&self) -> anyhow::Result<()> {
        self.keeper.cut()
    }

    /// Starts the API server again after [`Server::cut`], at the same address, and waits until it is ready.
    pub fn heal(&self) -> anyhow::Result<()> {
        self.keeper.heal()
    }

    /// The kubeconfig of an administrator.
    pub fn kubeconfig(&self) -> &Path {
        self.keeper.kubeconfig()
    }

    /// Writes a kubeconfig for `user` in `groups`, with the rights that RBAC grants them. A service account is
    /// the user `system:serviceaccount:NAMESPACE:NAME` in the groups `system:serviceaccounts` and
    /// `system:serviceaccounts:NAMESPACE`.
    pub fn kubeconfig_for(&self, user: &str, groups: &[&str]) -> anyhow::Result<PathBuf> {
        self.keeper.kubeconfig_for(user, groups)
    }

    /// A client of the administrator. Each test makes its own: a client belongs to the runtime that first used it.
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
