# SPDX-License-Identifier: Apache-2.0
"""Neutron's API, without agents. Argument: its configuration."""

import os
import sys

import child

(config,) = sys.argv[1:]
child.die_with_parent()
os.environ["OS_NEUTRON_CONFIG_FILES"] = config
# Neutron reads the command line itself.
sys.argv = ["neutron-api"]

import logging  # noqa: E402

logging.getLogger().addHandler(logging.StreamHandler(sys.stderr))

from neutron import server  # noqa: E402

server._init_configuration(prog="neutron-api")
child.log_warnings()

import neutron.db.migration.models.head  # noqa: E402, F401
from neutron.server import api  # noqa: E402
from neutron_lib.db import api as db  # noqa: E402
from neutron_lib.db import model_base  # noqa: E402

# Neutron's migrations are written for MariaDB and PostgreSQL.
model_base.BASEV2.metadata.create_all(db.get_writer_session().get_bind())
child.serve(api.api_server(), "/network")
