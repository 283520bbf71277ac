// SPDX-License-Identifier: Apache-2.0
//! The loss meter reports every fault that is injected, and nothing else.

use std::sync::Arc;

use anyhow::Result;

use crate::self_test;
use crate::test_context::TestContext;

pub(super) async fn reports_each_injected_fault_and_nothing_else(test: Arc<TestContext>) -> Result<()> {
    self_test::run(&test, &[]).await
}
