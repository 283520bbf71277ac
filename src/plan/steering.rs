// SPDX-License-Identifier: Apache-2.0
//! The steering of a Service: its annotation's, else the flag's. A steering that the provider does not support is an error, never
//! replaced silently.

use steerage_model::{Service, annotations};
use steerage_provider_api::Steering;

use super::{Config, PlanError};

pub(crate) fn steering(service: &Service, config: &Config) -> Result<Steering, PlanError> {
    let chosen = match service.annotations.get(annotations::STEERING).map(|value| value.trim()) {
        Some(value) => value.parse().map_err(|_| PlanError::UnknownSteering(value.to_owned()))?,
        None => config.default_steering,
    };
    let supported = config.capabilities.steerings;
    if supported.contains(&chosen) {
        return Ok(chosen);
    }
    let supported: Vec<&str> = supported.iter().map(|steering| steering.as_str()).collect();
    Err(PlanError::SteeringNotSupported { steering: chosen.as_str(), supported: supported.join(" or ") })
}
