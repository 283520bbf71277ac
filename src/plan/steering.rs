// SPDX-License-Identifier: Apache-2.0
//! Which kind of steering a Service gets: its annotation's, else the flag's, if the provider can do it. Never a silent other one.

use steerage_model::{Service, names};
use steerage_provider_api::Steering;

use super::{Config, PlanError};

/// The steering of a Service.
pub(crate) fn steering(service: &Service, config: &Config) -> Result<Steering, PlanError> {
    let chosen = match service.annotations.get(names::STEERING) {
        Some(text) => text.trim().parse().map_err(PlanError::UnknownSteering)?,
        None => config.default_steering,
    };
    let can = config.capabilities.steerings;
    if can.contains(&chosen) {
        return Ok(chosen);
    }
    let others: Vec<&str> = can.iter().map(|steering| steering.as_str()).collect();
    Err(PlanError::SteeringNotSupported(chosen.to_string(), others.join(" or ")))
}
