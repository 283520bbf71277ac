// SPDX-License-Identifier: Apache-2.0
//! The edge's objects that the provider reads and writes, each kind as an API and a cache of it.

use std::fmt::{self, Debug};
use std::marker::PhantomData;
use std::net::IpAddr;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ListMeta, Time};
use kube::api::{
    ApiResource, DeleteParams, DynamicObject, GetParams, ListParams, Patch, PatchParams, PostParams,
    Preconditions,
};
use kube::core::Request;
use kube::core::request::Error as RequestError;
use kube::{Client, Resource, ResourceExt as _};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use steerage_edge_api::{
    AddressPoolSpec, AddressPoolStatus, EdgeHostSpec, EdgeLoadBalancerSpec, EdgeNodeSetSpec,
    EdgeTargetHealthSpec, field_manager,
};
use steerage_watch::Event;

use crate::cache::Cache;
use crate::calls::{Failure, call};
use crate::entry::{Change, Entry, EntryKind};
use crate::index::References;
use crate::sharing::Sharing;

/// Objects in one response to a list: thousands of load balancers at once would be most of the controller's memory.
const PAGE_SIZE: u32 = 500;

/// The used parts of an object, apart from `metadata`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub(crate) struct Content<S> {
    pub(crate) spec: S,
}

/// The used parts of an address pool.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(crate) struct PoolContent {
    pub(crate) spec: AddressPoolSpec,
    #[serde(default)]
    pub(crate) status: Option<AddressPoolStatus>,
}

/// The used parts of an edge host's description of itself.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(crate) struct HostContent {
    pub(crate) spec: EdgeHostSpec,
    metadata: HostMeta,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
struct HostMeta {
    name: String,
    #[serde(default)]
    managed_fields: Vec<FieldManager>,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
struct FieldManager {
    #[serde(default)]
    manager: String,
    time: Option<Time>,
}

impl HostContent {
    /// When the host itself last changed the object, by the API server's clock. A label of another client is no such change.
    pub(crate) fn changed_by_host(&self) -> Option<&Time> {
        let manager = field_manager(&self.metadata.name);
        let own = self.metadata.managed_fields.iter().filter(|entry| entry.manager == manager);
        own.filter_map(|entry| entry.time.as_ref()).max()
    }
}

impl References for LoadBalancerContent {
    fn addresses(entry: &Entry<Self>) -> Vec<IpAddr> {
        addresses(entry)
    }

    fn sharing(entry: &Entry<Self>) -> Option<Sharing> {
        Sharing::of(entry)
    }

    fn node_set(&self) -> Option<&str> {
        self.spec.node_set.as_deref()
    }
}

impl References for NodeSetContent {}
impl References for HealthContent {}
impl References for HostContent {}
impl References for PoolContent {}

/// The addresses of an object, also of one that this version cannot fully read.
pub(crate) fn addresses(entry: &Entry<LoadBalancerContent>) -> Vec<IpAddr> {
    match &entry.content {
        Ok(content) => content.spec.addresses.clone(),
        Err(raw) => {
            let list = raw.pointer("/spec/addresses").and_then(Value::as_array);
            list.into_iter().flatten().filter_map(|text| text.as_str()?.parse().ok()).collect()
        }
    }
}

pub(crate) type LoadBalancerContent = Content<EdgeLoadBalancerSpec>;
pub(crate) type NodeSetContent = Content<EdgeNodeSetSpec>;
pub(crate) type HealthContent = Content<EdgeTargetHealthSpec>;

/// A page of a list.
#[derive(Deserialize)]
#[serde(bound = "S: DeserializeOwned")]
struct Page<S> {
    metadata: ListMeta,
    items: Vec<Entry<S>>,
}

/// The objects of one kind in the namespace.
pub(crate) struct Objects<S: Eq> {
    client: Client,
    requests: Request,
    pub(crate) cache: Cache<S>,
    pub(crate) kind: EntryKind<S>,
    resource: ApiResource,
}

impl<S: Debug + Eq> Debug for Objects<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Objects")
            .field("kind", &self.kind)
            .field("cache", &self.cache)
            .finish_non_exhaustive()
    }
}

impl<S: Clone + Debug + DeserializeOwned + References> Objects<S> {
    /// The kind of `K`, whose plural is `name`; nothing is read before [`crate::cache::follow`] runs.
    pub(crate) fn new<K: Resource<DynamicType = ()>>(
        client: &Client,
        namespace: &str,
        name: &'static str,
    ) -> Self {
        let path = K::url_path(&(), Some(namespace));
        Self {
            client: client.clone(),
            requests: Request::new(path.clone()),
            cache: Cache::default(),
            kind: EntryKind { name, path, content: PhantomData },
            resource: ApiResource::erase::<K>(&()),
        }
    }

    /// Creates an object.
    pub(crate) async fn create(
        &self,
        metadata: kube::api::ObjectMeta,
        spec: &impl Serialize,
    ) -> Result<(), Failure> {
        let ApiResource { api_version, kind, .. } = &self.resource;
        let object = json!({"apiVersion": api_version, "kind": kind, "metadata": metadata, "spec": spec});
        let request = self.requests.create(&PostParams::default(), object.to_string().into_bytes());
        let created = self.send(request).await?;
        self.take_in(created);
        Ok(())
    }

    /// Changes an object by a merge patch, unless it has changed since `entry` was read.
    pub(crate) async fn patch(&self, name: &str, entry: &Entry<S>, mut patch: Value) -> Result<(), Failure> {
        patch["metadata"] = json!({"uid": entry.uid, "resourceVersion": entry.version});
        let request = self.requests.patch(name, &PatchParams::default(), &Patch::Merge(&patch));
        let patched = self.send(request).await?;
        self.take_in(patched);
        Ok(())
    }

    /// Changes an object's status by a merge patch. Returns the changes of others that the response revealed before the watch.
    pub(crate) async fn patch_status(
        &self,
        name: &str,
        status: &impl Serialize,
    ) -> Result<Vec<Change<S>>, Failure> {
        let patch = Patch::Merge(json!({"status": status}));
        let request = self.requests.patch_subresource("status", name, &PatchParams::default(), &patch);
        let patched = self.send(request).await?;
        Ok(self.take_in(patched))
    }

    /// Deletes the object with the UID of `entry`. `true` when it is deleted, `false` while a finalizer holds it.
    pub(crate) async fn delete(&self, name: &str, entry: &Entry<S>) -> Result<bool, Failure> {
        let preconditions = Preconditions { uid: Some(entry.uid.clone()), resource_version: None };
        let params = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
        let deleting = async {
            let request = self.requests.delete(name, &params).map_err(kube::Error::BuildRequest)?;
            self.client.request_status::<DynamicObject>(request).await
        };
        match call(deleting).await {
            Ok(either) => {
                let held = either.left().is_some_and(|object| {
                    object.metadata.deletion_timestamp.is_some() && !object.finalizers().is_empty()
                });
                if !held {
                    self.cache.forget(name, &entry.uid);
                }
                Ok(!held)
            }
            Err(failure) if failure.code() == Some(404) => {
                self.cache.forget(name, &entry.uid);
                Ok(true)
            }
            Err(failure) => Err(failure),
        }
    }

    /// Lists all objects consistently, in pages of one version, so that the cache then contains every earlier write.
    pub(crate) async fn refresh(&self) -> Result<(), Failure> {
        let mut names = std::collections::BTreeSet::new();
        let mut page = ListParams::default().limit(PAGE_SIZE);
        let version = loop {
            let list: Page<S> = self.send(self.requests.list(&page)).await?;
            for entry in list.items {
                names.insert(entry.name.clone());
                self.take_in(entry);
            }
            match list.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => page = page.continue_token(&token),
                None => break list.metadata.resource_version.unwrap_or_default(),
            }
        };
        let known: Vec<String> = self.cache.read(|rows| rows.map(|entry| entry.name.clone()).collect());
        for key in known.into_iter().filter(|name| !names.contains(name)) {
            self.cache.apply(Event::Delete { key, version: version.clone() });
        }
        Ok(())
    }

    /// Reads one object from the API server, and returns its entry after that.
    pub(crate) async fn reread(&self, name: &str) -> Result<Option<Entry<S>>, Failure> {
        let known = self.cache.get(name);
        match (self.send(self.requests.get(name, &GetParams::default())).await, known) {
            (Ok(entry), _) => drop(self.take_in(entry)),
            (Err(failure), Some(entry)) if failure.code() == Some(404) => {
                self.cache.forget(name, &entry.uid);
            }
            (Err(failure), None) if failure.code() == Some(404) => {}
            (Err(failure), _) => return Err(failure),
        }
        Ok(self.cache.get(name))
    }

    /// Sends a request, and reads the response to it.
    async fn send<T: DeserializeOwned>(
        &self,
        request: Result<http::Request<Vec<u8>>, RequestError>,
    ) -> Result<T, Failure> {
        call(async { self.client.request(request.map_err(kube::Error::BuildRequest)?).await }).await
    }

    fn take_in(&self, entry: Entry<S>) -> Vec<Change<S>> {
        self.cache.apply(Event::Apply(entry))
    }
}
