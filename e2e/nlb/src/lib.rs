// SPDX-License-Identifier: Apache-2.0
//! The AWS of a lab: moto, which simulates AWS's API, and a forwarder that does with packets what a network load balancer (NLB) does.
//!
//! `hack/lab up --cloud aws` runs the program `steerage-nlb` in the namespace of the lab's router, between clients and nodes. It learns
//! what to do from the API alone, by AWS's own SDK ([`read`]), as if the controller's wishes had reached AWS. It probes the targets
//! ([`probe`]), judges them ([`health`]), and makes the kernel forward to them ([`ruleset`], [`apply`]). What it found about targets it
//! gives back to moto, whose `DescribeTargetHealth` then shows it.
//!
//! [`cloud`], [`health`], [`ruleset`] and [`addresses`] are pure. Nothing here knows Steerage, its provider or Kubernetes.

pub mod account;
pub mod addresses;
pub mod apply;
pub mod args;
pub mod cloud;
pub mod health;
mod last_read;
pub mod probe;
pub mod read;
pub mod ruleset;
pub mod run;
