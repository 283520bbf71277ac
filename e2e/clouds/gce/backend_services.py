# SPDX-License-Identifier: Apache-2.0
"""Regional backend services of passthrough network load balancers."""

from core.messages import Answer, Refusal

from .discovery import invalid
from .kinds import Kind, unlike_the_cloud
from .store import HOSTS, link

SCHEMES = ("EXTERNAL", "INTERNAL")
POLICIES = {"EXTERNAL": ("MAGLEV", "WEIGHTED_MAGLEV"), "INTERNAL": ("MAGLEV", "WEIGHTED_GCP_RENDEZVOUS")}
AFFINITIES = ("NONE", "CLIENT_IP", "CLIENT_IP_PROTO", "CLIENT_IP_PORT_PROTO")
# For proxies only.
FOREIGN = ("portName", "port", "urlMap", "iap", "cdnPolicy", "circuitBreakers", "consistentHash", "outlierDetection", "securitySettings")
BACKEND = ("maxConnections", "maxConnectionsPerEndpoint", "maxConnectionsPerInstance", "maxRate", "maxRatePerEndpoint", "maxRatePerInstance", "maxUtilization")
# Which protocols of forwarding rules a backend service serves.
SERVES = {"TCP": ("TCP",), "UDP": ("UDP",), "UNSPECIFIED": ("TCP", "UDP", "L3_DEFAULT")}


class BackendServices(Kind):
    """compute.regionBackendServices."""

    collection, noun, schema, metric = "backendServices", "backend_service", "BackendService", "BACKEND_SERVICES"
    fingerprinted = True

    def insert(self, scope, body):
        return self._check(scope, body)

    def change(self, resource, data):
        scope = "/".join(resource.path.split("/")[:4])
        new = self._check(scope, data)
        if new["loadBalancingScheme"] != resource.data["loadBalancingScheme"]:
            raise invalid("resource.loadBalancingScheme", new["loadBalancingScheme"], "The load balancing scheme cannot be changed.")
        for rule in self.store.all("forwardingRules"):
            if self.path_of(rule.data["backendService"]) == resource.path and rule.data["IPProtocol"] not in SERVES[new["protocol"]]:
                raise invalid("resource.protocol", new["protocol"], f"The forwarding rule '{rule.path}' has the protocol {rule.data['IPProtocol']}.")
        return new

    def references(self, data):
        urls = data.get("healthChecks", []) + [backend["group"] for backend in data.get("backends", [])]
        return [self.path_of(url) for url in urls + ([data["network"]] if "network" in data else [])]

    def _check(self, scope, body):
        defaults = {"affinityCookieTtlSec": 0, "connectionDraining": {"drainingTimeoutSec": 0}, "description": "", "protocol": "TCP", "sessionAffinity": "NONE", "timeoutSec": 30}
        data = defaults | {"loadBalancingScheme": "EXTERNAL"} | body
        scheme = data["loadBalancingScheme"]
        if scheme not in SCHEMES:
            raise unlike_the_cloud(f"backend services of the scheme {scheme}")
        if data["protocol"] not in SERVES:
            raise invalid("resource.protocol", data["protocol"], "The protocol is not supported for passthrough network load balancers.")
        for field in FOREIGN:
            if data.get(field):
                raise invalid(f"resource.{field}", data[field], f"It is not supported with the load balancing scheme {scheme}.")
        allowed = AFFINITIES + (("CLIENT_IP_NO_DESTINATION",) if scheme == "INTERNAL" else ())
        if data["sessionAffinity"] not in allowed:
            raise invalid("resource.sessionAffinity", data["sessionAffinity"], f"Must be one of [{', '.join(allowed)}]")
        if data.get("localityLbPolicy") and data["localityLbPolicy"] not in POLICIES[scheme]:
            raise invalid("resource.localityLbPolicy", data["localityLbPolicy"], f"Must be one of [{', '.join(POLICIES[scheme])}]")
        if scheme != "INTERNAL":
            for field in ("network", "networkPassThroughLbTrafficPolicy"):
                if field in data and "haPolicy" not in data:
                    raise invalid(f"resource.{field}", data[field], "It is for the load balancing scheme INTERNAL only.")
        draining = data["connectionDraining"].setdefault("drainingTimeoutSec", 0)
        if not 0 <= draining <= 3600:
            raise invalid("resource.connectionDraining.drainingTimeoutSec", draining, "Must be between 0 and 3600, inclusive.")
        self._tracking(data)
        if "network" in data:
            data["network"] = link(self.store.resolve(data["network"], "resource.network", scope, ("networks",)).path)
        return data | self._health_checks(scope, data) | self._backends(scope, data)

    def _tracking(self, data):
        policy = data.get("connectionTrackingPolicy", {})
        timeout = policy.get("idleTimeoutSec")
        if policy.get("enableStrongAffinity") and data["sessionAffinity"] not in ("CLIENT_IP", "CLIENT_IP_PROTO"):
            raise invalid("resource.connectionTrackingPolicy.enableStrongAffinity", "true", "Strong affinity needs the affinity CLIENT_IP or CLIENT_IP_PROTO.")
        if timeout is not None and not 60 <= timeout <= 57600:
            raise invalid("resource.connectionTrackingPolicy.idleTimeoutSec", timeout, "Must be between 60 and 57600, inclusive.")

    def _health_checks(self, scope, data):
        urls = data.get("healthChecks", [])
        if len(urls) > 1:
            raise invalid("resource.healthChecks", len(urls), "At most one health check is allowed.")
        if data.get("backends") and not urls:
            raise Refusal(400, "required", "Required field 'resource.healthChecks' not specified")
        checks = [self.store.resolve(url, "resource.healthChecks[0]", scope, ("healthChecks",)) for url in urls]
        region = scope.split("/")[3]
        for check in checks:
            if check.path.split("/")[2] == "regions" and check.path.split("/")[3] != region:
                raise invalid("resource.healthChecks[0]", urls[0], "The health check must be global or in the same region.")
        return {"healthChecks": [link(check.path) for check in checks]} if checks else {}

    def _backends(self, scope, data):
        result, network = [], data.get("network")
        for index, backend in enumerate(data.get("backends", [])):
            where, url = f"resource.backends[{index}]", backend.get("group", "")
            if not HOSTS.fullmatch(url):
                raise invalid(f"{where}.group", url, "The URL is malformed.")
            group = self.store.resolve(url, f"{where}.group", scope, ("networkEndpointGroups",))
            if group.path.split("/")[3].rsplit("-", 1)[0] != scope.split("/")[3]:
                raise invalid(f"{where}.group", url, "The backend must be in a zone of the region.")
            if link(group.path) in [other["group"] for other in result]:
                raise invalid(f"{where}.group", url, "Duplicate backend.")
            if network and group.data["network"] != network:
                raise invalid(f"{where}.group", url, "All backends must be in one network.")
            network = group.data["network"]
            if backend.get("balancingMode") != "CONNECTION":
                raise invalid(f"{where}.balancingMode", backend.get("balancingMode"), "The balancing mode must be CONNECTION.")
            for field in BACKEND:
                if field in backend:
                    raise invalid(f"{where}.{field}", backend[field], "It is not supported for passthrough network load balancers.")
            result.append({"capacityScaler": 1.0} | backend | {"group": link(group.path)})
        return {"backends": result} if result else {}

    def warnings(self, data):
        """Warnings of the operation that makes it so."""
        if data.get("localityLbPolicy", "").startswith("WEIGHTED") and data.get("healthChecks"):
            check = self.store.resources[self.path_of(data["healthChecks"][0])]
            if not check.data["type"].startswith("HTTP"):
                return [{"code": "INVALID_HEALTH_CHECK_FOR_DYNAMIC_WIEGHTED_LB", "message": "Weights need a health check of type HTTP, HTTPS or HTTP2."}]
        return []

    def health(self, call, resource):
        """getHealth: one status for each forwarding rule and endpoint of the group."""
        url = call.body.get("group", "")
        group = self.store.resolve(url, "resource.group", call.scope, ("networkEndpointGroups",))
        if link(group.path) not in [backend["group"] for backend in resource.data.get("backends", [])]:
            raise invalid("resource.group", url, "The group is no backend of the backend service.")
        statuses = []
        for rule in sorted(self.store.users(resource.path), key=lambda rule: rule.path):
            for name, endpoint in sorted(group.data["endpoints"].items()):
                zone = group.path.split("/")[3]
                known = self.cloud.health_of(zone, name, rule.name)
                status = {"healthState": known["state"], "instance": link(f"{'/'.join(group.path.split('/')[:4])}/instances/{name}"), "ipAddress": endpoint["ipAddress"]}
                status |= {"forwardingRule": link(rule.path), "forwardingRuleIp": rule.data["IPAddress"]}
                statuses.append(status | ({"weight": str(known["weight"])} if "weight" in known else {}))
        return Answer(200, {"kind": "compute#backendServiceGroupHealth"} | ({"healthStatus": statuses} if statuses else {}))

    @property
    def actions(self):
        """Methods beside those of all kinds."""
        return {"getHealth": self.health}
