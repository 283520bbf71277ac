# SPDX-License-Identifier: Apache-2.0
"""Keystone, with the tables and the administrator that it needs. Arguments: its configuration, its URL, and a password."""

import os
import sys

import child

config, url, password = sys.argv[1:]
child.die_with_parent()
# Keystone reads the command line itself.
sys.argv = ["keystone"]
os.environ["OS_KEYSTONE_CONFIG_FILES"] = config

from keystone.server.flask import core  # noqa: E402

app = core.initialize_application(name="public", config_files=[config])
child.log_warnings()

from keystone.cmd import bootstrap  # noqa: E402
from keystone.common import sql  # noqa: E402

# Keystone's migrations take ten times as long.
with sql.session_for_write() as session:
    sql.ModelBase.metadata.create_all(session.get_bind())
# The application has loaded them, and they can be loaded once.
bootstrap.backends.load_backends = lambda: None
admin = bootstrap.Bootstrapper()
admin.project_name = admin.admin_username = "admin"
admin.admin_password = password
admin.admin_role_name = "admin"
admin.service_name = "keystone"
admin.region_id = "RegionOne"
admin.public_url = admin.internal_url = admin.admin_url = url
admin.immutable_roles = False
admin.bootstrap()
child.serve(app, "/identity")
