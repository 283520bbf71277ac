# SPDX-License-Identifier: Apache-2.0
"""Octavia's API with a provider driver of our own. Argument: its configuration."""

import functools
import sys

import child

(config,) = sys.argv[1:]
child.die_with_parent()
# Octavia reads the command line itself.
sys.argv = ["octavia-api"]

from octavia.api import app  # noqa: E402
from octavia.common import constants, utils  # noqa: E402
from oslo_config import cfg  # noqa: E402

application = app.setup_app(argv=["octavia-api", "--config-file", config])
child.log_warnings()
# Octavia's default, which SQLAlchemy does not take with SQLite.
cfg.CONF.set_override("pool_timeout", None, group="database")

from octavia.db import api as db  # noqa: E402
from octavia.db import base_models, models  # noqa: E402

# Octavia makes one for each use, and each asks Neutron for its extensions first: that is most of a creation's time.
utils.get_network_driver = functools.cache(utils.get_network_driver)

# Octavia's migrations are written for MariaDB and PostgreSQL; they also fill these tables.
base_models.BASE.metadata.create_all(db.get_engine())
LOOKUP_TABLES = {
    models.ProvisioningStatus: constants.SUPPORTED_PROVISIONING_STATUSES,
    models.OperatingStatus: constants.SUPPORTED_OPERATING_STATUSES,
    models.HealthMonitorType: constants.SUPPORTED_HEALTH_MONITOR_TYPES,
    models.Algorithm: constants.SUPPORTED_LB_ALGORITHMS,
    models.Protocol: constants.SUPPORTED_PROTOCOLS,
    models.SessionPersistenceType: constants.SUPPORTED_SP_TYPES,
    models.AmphoraRoles: constants.SUPPORTED_AMPHORA_ROLES,
    models.LBTopology: constants.SUPPORTED_LB_TOPOLOGIES,
    models.VRRPAuthMethod: constants.SUPPORTED_VRRP_AUTH,
    models.L7RuleType: constants.SUPPORTED_L7RULE_TYPES,
    models.L7RuleCompareType: constants.SUPPORTED_L7RULE_COMPARE_TYPES,
    models.L7PolicyAction: constants.SUPPORTED_L7POLICY_ACTIONS,
    models.ClientAuthenticationMode: constants.SUPPORTED_CLIENT_AUTH_MODES,
}
# A deleted load balancer refers to these.
PLACEHOLDERS = [
    models.FlavorProfile(id=constants.NIL_UUID, name="deleted", provider_name="deleted", flavor_data="{}"),
    models.Flavor(id=constants.NIL_UUID, flavor_profile_id=constants.NIL_UUID, name="deleted", enabled=False),
    models.AvailabilityZoneProfile(id=constants.NIL_UUID, name="deleted", provider_name="deleted", availability_zone_data="{}"),
    models.AvailabilityZone(name=constants.NIL_UUID, availability_zone_profile_id=constants.NIL_UUID, enabled=False),
]
session = db.get_session()
with session.begin():
    for model, names in LOOKUP_TABLES.items():
        session.add_all(model(name=name) for name in names)
    session.flush()
    for placeholder in PLACEHOLDERS:
        session.add(placeholder)
        session.flush()

child.serve(application, "/load-balancer")
