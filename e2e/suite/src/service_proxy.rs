// SPDX-License-Identifier: Apache-2.0
//! Which service proxy a cluster runs.

use clap::ValueEnum;

/// Which service proxy the cluster runs. It decides which cases apply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ServiceProxy {
    /// kube-proxy on every node: all cases.
    KubeProxy,
    /// Steerage's agent instead of kube-proxy.
    Agent,
}

impl ServiceProxy {
    /// The name as the flag takes it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::KubeProxy => "kube-proxy",
            Self::Agent => "agent",
        }
    }
}
