// SPDX-License-Identifier: Apache-2.0
//! The steering of a Service: its annotation's, else the flag's. A steering that the provider does not support is an error, never
//! replaced silently. Pods as targets are always registered and deregistered: no node's `/healthz` tells of them.

use steerage_model::{Service, annotations};
use steerage_provider_api::Steering;

use super::{Config, PlanError, has_pod_targets};

pub(crate) fn steering(service: &Service, config: &Config) -> Result<Steering, PlanError> {
    let chosen = match service.annotations.get(annotations::STEERING).map(|value| value.trim()) {
        Some(value) => Some(value.parse().map_err(|_| PlanError::UnknownSteering(value.to_owned()))?),
        None => None,
    };
    if has_pod_targets(service, config)? {
        return match chosen {
            None | Some(Steering::Api) => Ok(Steering::Api),
            Some(asked @ (Steering::HealthCheck | Steering::Fused)) => {
                Err(PlanError::SteeringOfPods(asked.as_str()))
            }
        };
    }
    let chosen = chosen.unwrap_or(config.default_steering);
    let supported = config.capabilities.steerings;
    if supported.contains(&chosen) {
        return Ok(chosen);
    }
    let supported: Vec<&str> = supported.iter().map(|steering| steering.as_str()).collect();
    Err(PlanError::SteeringNotSupported { steering: chosen.as_str(), supported: supported.join(" or ") })
}
