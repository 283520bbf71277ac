// SPDX-License-Identifier: Apache-2.0
//! The edge's objects that the provider reads and writes, each kind as an API and a cache of it.

use std::fmt::Debug;
use std::marker::PhantomData;
use std::net::IpAddr;

use k8s_openapi::serde::de::DeserializeOwned;
use kube::api::{
    Api, ApiResource, DeleteParams, DynamicObject, ListParams, Patch, PatchParams, PostParams, Preconditions,
};
use kube::{Client, Resource, ResourceExt as _};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use steerage_edge_api::{
    AddressPoolSpec, AddressPoolStatus, EdgeLoadBalancerSpec, EdgeNodeSetSpec, EdgeTargetHealthSpec,
};
use steerage_watch::Event;

use crate::cache::Cache;
use crate::calls::{Failure, call};
use crate::entry::{Change, Entry, EntryKind};
use crate::index::References;

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

impl References for LoadBalancerContent {
    fn addresses(entry: &Entry<Self>) -> Vec<IpAddr> {
        addresses(entry)
    }

    fn node_set(&self) -> Option<&str> {
        self.spec.node_set.as_deref()
    }
}

impl References for NodeSetContent {}
impl References for HealthContent {}
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

/// The objects of one kind in the namespace.
#[derive(Debug)]
pub(crate) struct Objects<S: Eq> {
    api: Api<DynamicObject>,
    pub(crate) cache: Cache<S>,
    pub(crate) kind: EntryKind<S>,
    resource: ApiResource,
}

impl<S: Clone + Debug + DeserializeOwned + References> Objects<S> {
    /// The kind of `K`, whose plural is `name`; nothing is read before [`crate::cache::follow`] runs.
    pub(crate) fn new<K: Resource<DynamicType = ()>>(
        client: &Client,
        namespace: &str,
        name: &'static str,
    ) -> Self {
        let resource = ApiResource::erase::<K>(&());
        let api = Api::namespaced_with(client.clone(), namespace, &resource);
        let kind = EntryKind { name, path: K::url_path(&(), Some(namespace)), content: PhantomData };
        Self { api, cache: Cache::default(), kind, resource }
    }

    /// Creates an object.
    pub(crate) async fn create(
        &self,
        metadata: kube::api::ObjectMeta,
        spec: &impl Serialize,
    ) -> Result<(), Failure> {
        let mut object = DynamicObject::new("", &self.resource).data(json!({"spec": spec}));
        object.metadata = metadata;
        let created = call(self.api.create(&PostParams::default(), &object)).await?;
        self.take_in(created);
        Ok(())
    }

    /// Changes an object by a merge patch, unless it has changed since `entry` was read.
    pub(crate) async fn patch(&self, name: &str, entry: &Entry<S>, mut patch: Value) -> Result<(), Failure> {
        patch["metadata"] = json!({"uid": entry.uid, "resourceVersion": entry.version});
        let params = PatchParams::default();
        let patched = call(self.api.patch(name, &params, &Patch::Merge(&patch))).await?;
        self.take_in(patched);
        Ok(())
    }

    /// Changes an object's status by a merge patch. Returns the changes of others that the response revealed before the watch.
    pub(crate) async fn patch_status(
        &self,
        name: &str,
        status: &impl Serialize,
    ) -> Result<Vec<Change<S>>, Failure> {
        let patch = json!({"status": status});
        let patched =
            call(self.api.patch_status(name, &PatchParams::default(), &Patch::Merge(&patch))).await?;
        Ok(self.take_in(patched))
    }

    /// Deletes the object with the UID of `entry`. `true` when it is deleted, `false` while a finalizer holds it.
    pub(crate) async fn delete(&self, name: &str, entry: &Entry<S>) -> Result<bool, Failure> {
        let preconditions = Preconditions { uid: Some(entry.uid.clone()), resource_version: None };
        let params = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
        match call(self.api.delete(name, &params)).await {
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

    /// Lists all objects consistently, so that the cache then contains every earlier write.
    pub(crate) async fn refresh(&self) -> Result<(), Failure> {
        let list = call(self.api.list(&ListParams::default())).await?;
        let version = list.metadata.resource_version.unwrap_or_default();
        let mut names = std::collections::BTreeSet::new();
        for object in list.items {
            names.insert(object.name_any());
            self.take_in(object);
        }
        let known: Vec<String> = self.cache.read(|rows| rows.map(|entry| entry.name.clone()).collect());
        for key in known.into_iter().filter(|name| !names.contains(name)) {
            self.cache.apply(Event::Delete { key, version: version.clone() });
        }
        Ok(())
    }

    /// Reads one object from the API server, and returns its entry after that.
    pub(crate) async fn reread(&self, name: &str) -> Result<Option<Entry<S>>, Failure> {
        let known = self.cache.get(name);
        match (call(self.api.get_opt(name)).await?, known) {
            (Some(object), _) => drop(self.take_in(object)),
            (None, Some(entry)) => self.cache.forget(name, &entry.uid),
            (None, None) => {}
        }
        Ok(self.cache.get(name))
    }

    fn take_in(&self, object: DynamicObject) -> Vec<Change<S>> {
        self.cache.apply(Event::Apply(Entry::new(object)))
    }
}
