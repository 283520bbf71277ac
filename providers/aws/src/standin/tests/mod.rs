// SPDX-License-Identifier: Apache-2.0
//! The provider on the stand-in, with a paused clock.

mod adoption;
mod adoption_refused;
mod alike_refusals;
mod backend_group;
mod consistency;
mod driver;
mod dual_stack;
mod economy;
mod failing_groups;
mod follow;
mod groups_in_use;
mod held_ports;
mod late_calls;
mod named_groups;
mod options;
mod order;
mod peers;
mod pods;
mod quotas;
mod refused;
mod refused_listeners;
mod refused_ports;
mod restrict;
mod schedule;
mod security_group_faults;
mod security_groups;
mod shared;
mod shared_faults;
mod slow;
mod source_nat;
mod start;
mod subnets;
mod unanswered;
mod vanished;
mod zones;
