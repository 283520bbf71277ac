// SPDX-License-Identifier: Apache-2.0
//! The provider on an Azure in memory.

mod guard;
mod late;
mod moves;
mod services;
mod together;
mod trouble;
