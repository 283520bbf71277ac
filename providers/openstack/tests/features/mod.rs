// SPDX-License-Identifier: Apache-2.0
//! What the provider does besides plain load balancers, each in a file of its own.

mod adoption;
mod failures;
mod families;
mod rules;
mod sharing;

use super::*;
