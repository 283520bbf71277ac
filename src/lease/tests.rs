// SPDX-License-Identifier: Apache-2.0

mod cluster;
mod simulation;
