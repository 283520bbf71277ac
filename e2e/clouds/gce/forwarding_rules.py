# SPDX-License-Identifier: Apache-2.0
"""Regional forwarding rules of passthrough network load balancers."""

from .backend_services import SCHEMES, SERVES
from .discovery import invalid
from .kinds import Kind, ports, required, unlike_the_cloud
from .pools import canonical, check_stack, conflict, in_use
from .store import HOSTS, link

AT_MOST = 5
ALL = (0, 65535)


def numbers(data):
    """The ranges of ports that a rule forwards."""
    if data.get("ports"):
        return [ports(port, "resource.ports") for port in data["ports"]]
    return [ports(data["portRange"], "resource.portRange")] if "portRange" in data else [ALL]


def collide(one, other):
    """Whether two rules with one address want the same packets. A rule for all protocols takes only what no other rule takes."""
    if one["IPProtocol"] != other["IPProtocol"]:
        return False
    return any(a[0] <= b[1] and b[0] <= a[1] for a in numbers(one) for b in numbers(other))


class ForwardingRules(Kind):
    """compute.forwardingRules."""

    collection, noun, schema, metric = "forwardingRules", "forwarding_rule", "ForwardingRule", "FORWARDING_RULES"
    fingerprinted = labelled = True
    ignored = ("labels",)
    patchable = ("networkTier", "allowGlobalAccess")

    def insert(self, scope, body):
        data = {"loadBalancingScheme": "EXTERNAL", "IPProtocol": "TCP"} | body
        scheme = data["loadBalancingScheme"]
        if scheme not in SCHEMES:
            raise unlike_the_cloud(f"forwarding rules of the scheme {scheme}")
        if data.get("target") or not data.get("backendService"):
            raise unlike_the_cloud("forwarding rules with a target") if data.get("target") else required("resource.backendService")
        for field in ("IPAddresses", "ipCollection", "serviceLabel", "sourceIpRanges", "isMirroringCollector"):
            if data.get(field):
                raise unlike_the_cloud(f"the field {field} of forwarding rules")
        data["backendService"] = self._service(scope, data["backendService"], data)
        self._ports(data)
        resource, address = self._address(scope, data)
        six = data.get("ipVersion") == "IPV6" or "/" in (address or "")
        data["ipVersion"] = "IPV6" if six else "IPV4"
        if scheme == "EXTERNAL":
            self._external(scope, data, six, resource, address)
        else:
            self._internal(scope, data, six, resource, address)
        if not six:
            # The real API shows it for IPv6 only.
            del data["ipVersion"]
        return data

    def _service(self, scope, url, data):
        service = self.store.resolve(url, "resource.backendService", scope, ("backendServices",))
        if "/".join(service.path.split("/")[2:4]) != "/".join(scope.split("/")[2:4]):
            raise invalid("resource.backendService", url, "The backend service must be in the region of the forwarding rule.")
        if service.data["loadBalancingScheme"] != data["loadBalancingScheme"]:
            raise invalid("resource.backendService", url, "The load balancing scheme of the backend service must be that of the forwarding rule.")
        if data["IPProtocol"] not in SERVES[service.data["protocol"]]:
            raise invalid("resource.IPProtocol", data["IPProtocol"], f"The backend service has the protocol {service.data['protocol']}.")
        return link(service.path)

    def _ports(self, data):
        given = [field for field in ("ports", "portRange", "allPorts") if data.get(field)]
        if not given:
            raise required("resource.ports")
        if len(given) > 1:
            raise invalid(f"resource.{given[1]}", data[given[1]], "Only one of ports, portRange and allPorts may be set.")
        if data["IPProtocol"] == "L3_DEFAULT" and given != ["allPorts"]:
            raise invalid(f"resource.{given[0]}", data[given[0]], "The protocol L3_DEFAULT needs allPorts.")
        if len(data.get("ports", [])) > AT_MOST:
            raise invalid("resource.ports", data["ports"], f"At most {AT_MOST} ports are allowed.")
        if data["loadBalancingScheme"] == "INTERNAL" and "portRange" in data:
            raise invalid("resource.portRange", data["portRange"], "It is not supported with the load balancing scheme INTERNAL.")
        found = numbers(data)
        if data.get("ports") and any(first != last for first, last in found):
            raise invalid("resource.ports", data["ports"], "Must be single ports.")
        if data.get("ports") and len(set(found)) < len(found):
            raise invalid("resource.ports", data["ports"], "A port is listed twice.")
        if "portRange" in data:
            data["portRange"] = f"{found[0][0]}-{found[0][1]}"

    def _address(self, scope, data):
        """What the rule names: an address resource and its address, or an address, or neither."""
        given = data.get("IPAddress")
        if given is None:
            return None, None
        if HOSTS.fullmatch(given) or "/addresses/" in given or not set(given) & set(".:"):
            resource = self.store.resolve(given, "resource.IPAddress", scope, ("addresses",))
            return resource, resource.data["address"]
        return None, canonical(given, "resource.IPAddress")

    def _external(self, scope, data, six, resource, address):
        pools = self.cloud.pools
        data.setdefault("networkTier", "PREMIUM")
        for field in ("network", "allowGlobalAccess") + (() if six else ("subnetwork",)):
            if data.get(field):
                raise invalid(f"resource.{field}", data[field], "It is not supported for external IPv4 forwarding rules." if field == "subnetwork" else "It is for internal forwarding rules.")
        data.pop("allowGlobalAccess", None)
        subnetwork = None
        if six:
            if "subnetwork" not in data:
                raise required("resource.subnetwork")
            subnetwork = self.store.resolve(data["subnetwork"], "resource.subnetwork", scope, ("subnetworks",))
            check_stack(subnetwork, True, "resource.subnetwork")
            data["subnetwork"] = link(subnetwork.path)
            if data["networkTier"] != "PREMIUM":
                raise invalid("resource.networkTier", data["networkTier"], "IPv6 is of the tier PREMIUM.")
        if address is None:
            data["IPAddress"] = pools.internal(subnetwork, 6, external=True) if six else pools.external_ipv4()
            return
        resource = resource or pools.reservation(scope, address)
        data["IPAddress"] = address
        if resource is None:
            if pools.rules(address):
                raise conflict(address)
            raise invalid("resource.IPAddress", address, "Specified IP address is not reserved by this project in this region.")
        if resource.data["addressType"] != "EXTERNAL" or (resource.data.get("ipVersion") == "IPV6") != six:
            raise invalid("resource.IPAddress", address, "The address has another type or version.")
        tier = resource.data["networkTier"]
        if tier != data["networkTier"]:
            raise invalid("resource.networkTier", data["networkTier"], f"The network tier of external IP address is {tier}, that of ForwardingRule must be the same.")
        for rule in pools.rules(address):
            if collide(rule.data, data):
                raise conflict(address)

    def _internal(self, scope, data, six, resource, address):
        pools, region = self.cloud.pools, "/".join(scope.split("/")[2:])
        if data.setdefault("networkTier", "PREMIUM") != "PREMIUM":
            raise invalid("resource.networkTier", data["networkTier"], "Internal forwarding rules are of the tier PREMIUM.")
        data.setdefault("allowGlobalAccess", False)
        if "subnetwork" not in data and data.get("network") and not data["network"].endswith("/networks/default"):
            raise required("resource.subnetwork")
        subnetwork = self.store.resolve(data.get("subnetwork", f"{region}/subnetworks/default"), "resource.subnetwork", scope, ("subnetworks",))
        if subnetwork.path.split("/")[3] != scope.split("/")[3]:
            raise invalid("resource.subnetwork", data["subnetwork"], "The subnetwork must be in the region of the forwarding rule.")
        if six:
            check_stack(subnetwork, False, "resource.subnetwork")
        network = subnetwork.data["network"]
        if "network" in data and link(self.store.resolve(data["network"], "resource.network", scope, ("networks",)).path) != network:
            raise invalid("resource.network", data["network"], "The subnetwork is not in the network.")
        data |= {"network": network, "subnetwork": link(subnetwork.path)}
        if address is None:
            data["IPAddress"] = pools.internal(subnetwork, 6 if six else 4)
            return
        pools.check_inside(subnetwork, address, "resource.IPAddress")
        data["IPAddress"] = address
        resource = resource or pools.reservation(scope, address, link(subnetwork.path))
        users = pools.rules(address, link(subnetwork.path))
        shared = resource is not None and resource.data["purpose"] == "SHARED_LOADBALANCER_VIP"
        if users and (not shared or any(collide(rule.data, data) for rule in users)):
            raise in_use(address)

    def change(self, resource, data):
        if data.get("networkTier") != resource.data.get("networkTier"):
            # An address has one tier for its life.
            raise invalid("resource.networkTier", data.get("networkTier"), f"The network tier of external IP address is {resource.data.get('networkTier')}, that of ForwardingRule must be the same.")
        if "allowGlobalAccess" in data and data["loadBalancingScheme"] != "INTERNAL":
            raise invalid("resource.allowGlobalAccess", data["allowGlobalAccess"], "It is for internal forwarding rules.")
        return data

    def set_target(self, call, resource):
        """setTarget: another backend service of the same kind."""
        target = call.body.get("target")
        if not target:
            raise required("resource.target")
        if "/backendServices/" not in target:
            raise invalid("resource.target", target, "The new target must be of the type of the old one.")
        data = resource.data | {"backendService": self._service(call.scope, target, resource.data)}
        return self.cloud.update(call, resource, "SetTarget", data)

    def references(self, data):
        urls = [data["backendService"]] + [data[field] for field in ("subnetwork", "network") if field in data]
        return [self.path_of(url) for url in urls]

    def refuse_deletion(self, resource):
        """Nothing uses a forwarding rule."""

    @property
    def actions(self):
        """Methods beside those of all kinds."""
        return {"setTarget": self.set_target}
