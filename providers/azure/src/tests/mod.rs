// SPDX-License-Identifier: Apache-2.0
//! The provider on an Azure in memory.

mod failed_load_balancer;
mod failed_public_ip;
mod late_failures;
mod moves;
mod security_group;
mod services;
mod together;
mod unusable;
