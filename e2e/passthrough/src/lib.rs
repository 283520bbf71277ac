// SPDX-License-Identifier: Apache-2.0
//! The GCE or Azure of a lab: the stand-in of its API, and a forwarder that does with packets what the cloud's load balancers do.
//!
//! `hack/lab up --cloud gce` and `--cloud azure` run the program `steerage-passthrough` in the namespace of the lab's router, between
//! clients and nodes. It learns what to do from the API alone ([`gce`], [`azure`]), checks the targets from the cloud's addresses, judges
//! them, and makes the kernel hand packets to them unchanged: with the client as source, and the VIP as destination. Checks, health and the
//! loading of rules are those of `steerage-nlb`, which does the same for AWS.
//!
//! [`cloud`], [`gce`] and [`azure`] but for their reading, [`marks`] and [`ruleset`] are pure. Nothing here knows Steerage, its providers or
//! Kubernetes.

pub mod apply;
pub mod args;
pub mod azure;
pub mod cloud;
pub mod gce;
pub mod marks;
pub mod ruleset;
pub mod run;
