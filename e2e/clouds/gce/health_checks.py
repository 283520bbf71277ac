# SPDX-License-Identifier: Apache-2.0
"""Health checks, regional and global."""

from core.messages import Refusal

from .discovery import invalid
from .kinds import Kind, check_range, required

# The field of each type, the default of its port, and whether it has a path.
FIELDS = {
    "HTTP": ("httpHealthCheck", 80, True),
    "HTTPS": ("httpsHealthCheck", 443, True),
    "HTTP2": ("http2HealthCheck", 443, True),
    "TCP": ("tcpHealthCheck", 80, False),
    "SSL": ("sslHealthCheck", 443, False),
    "GRPC": ("grpcHealthCheck", None, False),
    "GRPC_WITH_TLS": ("grpcTlsHealthCheck", None, False),
}


class HealthChecks(Kind):
    """compute.regionHealthChecks and compute.healthChecks."""

    collection, noun, schema, metric = "healthChecks", "health_check", "HealthCheck", "HEALTH_CHECKS"

    def insert(self, scope, body):
        return self._check({"checkIntervalSec": 5, "timeoutSec": 5, "healthyThreshold": 2, "unhealthyThreshold": 2} | body)

    def change(self, resource, data):
        defaults = {"checkIntervalSec": 5, "timeoutSec": 5, "healthyThreshold": 2, "unhealthyThreshold": 2}
        return self._check(defaults | data)

    def _check(self, data):
        if "type" not in data:
            raise required("resource.type")
        if data["type"] not in FIELDS:
            raise invalid("resource.type", data["type"], "Invalid health check type.")
        field, port, has_path = FIELDS[data["type"]]
        others = [name for name, *_ in FIELDS.values() if name != field and name in data]
        if others:
            raise invalid(f"resource.{others[0]}", "", f"Only {field} may be set for a health check of type {data['type']}.")
        check_range(data, "checkIntervalSec", 1, 300)
        check_range(data, "timeoutSec", 1, 300)
        check_range(data, "healthyThreshold", 1, 10)
        check_range(data, "unhealthyThreshold", 1, 10)
        if data["timeoutSec"] > data["checkIntervalSec"]:
            message = f"Timeout seconds ({data['timeoutSec']}) must be less than or equal to the check interval ({data['checkIntervalSec']})."
            raise Refusal(400, "invalid", f"Invalid value for field 'resource.timeoutSec': '{data['timeoutSec']}'. {message}")
        check = dict(data.get(field, {}))
        if port is not None:
            if check.get("portSpecification") in (None, "USE_FIXED_PORT"):
                check.setdefault("port", port)
            check.setdefault("proxyHeader", "NONE")
        elif "port" not in check:
            raise required(f"resource.{field}.port")
        if has_path:
            check.setdefault("requestPath", "/")
            if not check["requestPath"].startswith("/"):
                raise invalid(f"resource.{field}.requestPath", check["requestPath"], "Must start with '/'.")
        check_range(check, "port", 1, 65535)
        return data | {field: check}
