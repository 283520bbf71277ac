// SPDX-License-Identifier: Apache-2.0
//! Where the objects go: to the API server, or to a directory. It decides nothing.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ListMeta, OwnerReference};
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams};
use kube::core::Request;
use kube::{Resource, ResourceExt as _};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use steerage_edge_api::{EdgeTargetHealth, EdgeTargetHealthSpec, HOST_LABEL, field_manager};

use super::WriteResult;
use super::objects::{ObjectKey, StatusObject};

/// Objects in one response: each can have some kilobytes.
const PAGE_SIZE: u32 = 250;

#[derive(Clone)]
pub(crate) enum StatusSink {
    Api {
        client: Box<kube::Client>,
        namespace: String,
    },
    /// One JSON file for each object.
    Directory(PathBuf),
}

/// A page of this host's objects.
#[derive(Debug, Deserialize)]
pub(super) struct Page {
    metadata: ListMeta,
    pub(super) items: Vec<ListedObject>,
}

impl Page {
    /// The token with which to ask for the next page, if there is one.
    pub(super) fn next(&self) -> Option<String> {
        self.metadata.continue_.clone().filter(|token| !token.is_empty())
    }
}

/// The parts of a listed object that are compared. The managed fields, most of an object's JSON, are skipped.
#[derive(Debug, Deserialize)]
pub(super) struct ListedObject {
    metadata: ListedMeta,
    #[serde(default)]
    spec: Value,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct ListedMeta {
    name: String,
    #[serde(default)]
    owner_references: Vec<OwnerReference>,
}

impl ListedObject {
    pub(super) fn name(&self) -> &str {
        &self.metadata.name
    }

    /// The names of the reports that it refers to.
    pub(super) fn shared_reports(&self) -> impl Iterator<Item = String> {
        let names = self.spec["sharedReports"].as_array();
        names.into_iter().flatten().filter_map(|name| name.as_str().map(str::to_owned))
    }

    /// Whether it has the owners and the specification of this one.
    pub(super) fn matches(&self, wanted: &EdgeTargetHealth) -> bool {
        let owners = wanted.metadata.owner_references.iter().flatten();
        let mut owners = owners.map(|owner| &owner.uid);
        let is_owner = |uid: &String| self.metadata.owner_references.iter().any(|owner| owner.uid == *uid);
        owners.all(is_owner)
            && EdgeTargetHealthSpec::deserialize(&self.spec).is_ok_and(|spec| spec == wanted.spec)
    }
}

impl StatusSink {
    /// Whether it can say what it has.
    pub(super) fn has_list(&self) -> bool {
        matches!(self, Self::Api { .. })
    }

    /// A page of the `EdgeTargetHealth` objects of this host.
    pub(super) async fn list(&self, host: &str, token: Option<&str>) -> anyhow::Result<Page> {
        let Self::Api { client, namespace } = self else { anyhow::bail!("there is no list") };
        let mut params = ListParams::default().labels(&format!("{HOST_LABEL}={host}")).limit(PAGE_SIZE);
        if let Some(token) = token {
            params = params.continue_token(token);
        }
        let request = Request::new(EdgeTargetHealth::url_path(&(), Some(namespace)))
            .list(&params)
            .map_err(kube::Error::BuildRequest)?;
        client.request(request).await.context("cannot list EdgeTargetHealth objects")
    }

    pub(super) async fn put(&self, host: &str, key: &ObjectKey, object: &StatusObject) -> WriteResult {
        let name = key.object_name(host);
        if let Some(object) = object.target_health(host) {
            return self.put_object(host, &name, &object).await;
        }
        match object.edge_host(host) {
            Some(object) => self.put_object(host, &name, &object).await,
            None => Ok(()),
        }
    }

    async fn put_object<K>(&self, host: &str, name: &str, object: &K) -> WriteResult
    where
        K: Resource<DynamicType = (), Scope = kube::core::NamespaceResourceScope>
            + Serialize
            + DeserializeOwned
            + Clone
            + std::fmt::Debug,
    {
        match self {
            Self::Api { client, namespace } => {
                let api = Api::<K>::namespaced(client.as_ref().clone(), namespace);
                let params = PatchParams::apply(&field_manager(host)).force();
                let patched = api.patch(name, &params, &Patch::Apply(object)).await;
                patched.map(drop).with_context(|| format!("cannot write {name}"))
            }
            Self::Directory(directory) => {
                let path = path(directory, &K::kind(&()), &object.name_any());
                replace_file(&path, &serde_json::to_vec_pretty(object)?)
                    .await
                    .with_context(|| format!("cannot write {}", path.display()))
            }
        }
    }

    /// Deletes the `EdgeTargetHealth` of this name, if it is there.
    pub(super) async fn delete(&self, name: &str) -> WriteResult {
        match self {
            Self::Api { client, namespace } => {
                let api = Api::<EdgeTargetHealth>::namespaced(client.as_ref().clone(), namespace);
                match api.delete(name, &DeleteParams::default()).await {
                    Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
                    deleted => deleted.map(drop).with_context(|| format!("cannot delete {name}")),
                }
            }
            Self::Directory(directory) => {
                let path = path(directory, &EdgeTargetHealth::kind(&()), name);
                match tokio::fs::remove_file(&path).await {
                    Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
                    removed => removed.with_context(|| format!("cannot remove {}", path.display())),
                }
            }
        }
    }
}

/// Whether the API server has refused this for lack of a permission.
pub(super) fn is_forbidden(error: &anyhow::Error) -> bool {
    code(error) == Some(403)
}

/// The status code of a response.
fn code(error: &anyhow::Error) -> Option<u16> {
    match error.downcast_ref() {
        Some(kube::Error::Api(status)) => Some(status.code),
        _ => None,
    }
}

fn path(directory: &Path, kind: &str, name: &str) -> PathBuf {
    directory.join(format!("{kind}.{name}.json"))
}

/// By renaming, so that no reader sees half of it.
async fn replace_file(path: &Path, text: &[u8]) -> std::io::Result<()> {
    let new = path.with_extension("new");
    tokio::fs::write(&new, text).await?;
    tokio::fs::rename(&new, path).await
}
