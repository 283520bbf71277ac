// SPDX-License-Identifier: Apache-2.0
//! Where etcd and kube-apiserver are.

use std::path::PathBuf;

use anyhow::bail;

/// The folder of both programs: `KUBEBUILDER_ASSETS` if that is set, else the project's cache.
pub(crate) fn folder() -> anyhow::Result<PathBuf> {
    let var = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let cache = || {
        let base = var("XDG_CACHE_HOME").or_else(|| var("HOME").map(|home| home.join(".cache")));
        var("STEERAGE_CACHE").or_else(|| base.map(|base| base.join("steerage")))
    };
    let Some(folder) = var("KUBEBUILDER_ASSETS").or_else(|| cache().map(|cache| cache.join("bin"))) else {
        bail!("neither KUBEBUILDER_ASSETS nor HOME is set");
    };
    for name in ["etcd", "kube-apiserver"] {
        let path = folder.join(name);
        if !path.exists() {
            bail!("{} is missing: run hack/prepare, or set KUBEBUILDER_ASSETS", path.display());
        }
    }
    Ok(folder)
}
