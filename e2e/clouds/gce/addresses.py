# SPDX-License-Identifier: Apache-2.0
"""Reserved regional addresses."""

from core.messages import Refusal

from .discovery import invalid
from .kinds import Kind, required, unlike_the_cloud
from .pools import canonical, check_stack, in_use
from .store import link

PURPOSES = ("GCE_ENDPOINT", "SHARED_LOADBALANCER_VIP")


class Addresses(Kind):
    """compute.addresses."""

    collection, noun, schema, metric = "addresses", "address", "Address", "STATIC_ADDRESSES"
    labelled = True

    def insert(self, scope, body):
        data = {"addressType": "EXTERNAL", "description": ""} | body
        if data["addressType"] == "EXTERNAL":
            return self._external(scope, data)
        return self._internal(scope, data)

    def _external(self, scope, data):
        pools, six = self.cloud.pools, data.get("ipVersion") == "IPV6"
        if "purpose" in data:
            raise invalid("resource.purpose", data["purpose"], "It is for internal addresses.")
        data.setdefault("networkTier", "PREMIUM")
        if data["networkTier"] not in ("PREMIUM", "STANDARD"):
            raise invalid("resource.networkTier", data["networkTier"], "Must be PREMIUM or STANDARD.")
        if six or ":" in data.get("address", ""):
            return self._external_v6(scope, data)
        if "subnetwork" in data:
            raise invalid("resource.subnetwork", data["subnetwork"], "It is for internal addresses, and for IPv6.")
        if "address" not in data:
            return data | {"address": pools.external_ipv4()}
        address = canonical(data["address"], "resource.address")
        rules = [rule for rule in pools.rules(address) if rule.path.startswith(scope + "/")]
        if pools.reservation(scope, address) or not rules:
            # Somebody else's, or reserved already. The real API says only that it cannot be had.
            raise invalid("resource.address", address, "Specified IP address is already reserved." if rules else "Specified IP address is not in use by this project, and so cannot be reserved.")
        tier = rules[0].data["networkTier"]
        if tier != data["networkTier"]:
            raise invalid("resource.networkTier", data["networkTier"], f"The network tier of external IP address is {tier}, that of Address must be the same.")
        return data | {"address": address}

    def _external_v6(self, scope, data):
        pools = self.cloud.pools
        if "subnetwork" not in data:
            raise required("resource.subnetwork")
        if data.get("ipv6EndpointType") != "NETLB":
            raise unlike_the_cloud("external IPv6 addresses of virtual machines: ipv6EndpointType has to be NETLB")
        if data["networkTier"] != "PREMIUM":
            raise invalid("resource.networkTier", data["networkTier"], "External IPv6 addresses are of the tier PREMIUM.")
        subnetwork = self.store.resolve(data["subnetwork"], "resource.subnetwork", scope, ("subnetworks",))
        check_stack(subnetwork, True, "resource.subnetwork")
        data |= {"ipVersion": "IPV6", "subnetwork": link(subnetwork.path), "prefixLength": 96}
        address = canonical(data["address"], "resource.address") if "address" in data else pools.internal(subnetwork, 6, external=True)
        if pools.reservation(scope, address):
            raise invalid("resource.address", address, "Specified IP address is already reserved.")
        pools.check_inside(subnetwork, address, "resource.address", external=True)
        return data | {"address": address}

    def _internal(self, scope, data):
        pools = self.cloud.pools
        data.setdefault("purpose", "GCE_ENDPOINT")
        data.setdefault("networkTier", "PREMIUM")
        if data["purpose"] not in PURPOSES:
            raise unlike_the_cloud(f"addresses of the purpose {data['purpose']}")
        if data["networkTier"] != "PREMIUM":
            raise invalid("resource.networkTier", data["networkTier"], "Internal addresses are of the tier PREMIUM.")
        if "network" in data:
            raise invalid("resource.network", data["network"], "It is for the purpose VPC_PEERING only.")
        subnetwork = self.store.resolve(data.get("subnetwork", f"{'/'.join(scope.split('/')[2:])}/subnetworks/default"), "resource.subnetwork", scope, ("subnetworks",))
        six = data.get("ipVersion") == "IPV6" or ":" in data.get("address", "")
        if six:
            check_stack(subnetwork, False, "resource.subnetwork")
            data |= {"ipVersion": "IPV6", "prefixLength": 96}
        data["subnetwork"] = link(subnetwork.path)
        if "address" not in data:
            return data | {"address": pools.internal(subnetwork, 6 if six else 4)}
        address = canonical(data["address"], "resource.address")
        rules = pools.rules(address, data["subnetwork"])
        # A used address can be reserved, but not for sharing: the rule that has it did not ask for that.
        if pools.reservation(scope, address, data["subnetwork"]) or (rules and data["purpose"] != "GCE_ENDPOINT"):
            raise in_use(address)
        pools.check_inside(subnetwork, address, "resource.address")
        return data | {"address": address}

    def references(self, data):
        return [self.path_of(data["subnetwork"])] if "subnetwork" in data else []

    def using(self, resource):
        """The forwarding rules that have this address."""
        data = resource.data
        internal = data["addressType"] == "INTERNAL"
        rules = self.cloud.pools.rules(data["address"], data["subnetwork"] if internal else None)
        return [rule for rule in rules if rule.visible and (internal or rule.path.rsplit("/", 2)[0] == resource.path.rsplit("/", 2)[0])]

    def refuse_deletion(self, resource):
        users = self.using(resource)
        # The rule keeps the address, which is ephemeral then.
        if users and not self.cloud.settings["release_used_addresses"]:
            raise Refusal(400, "resourceInUseByAnotherResource", f"The address resource '{resource.path}' is already being used by '{users[0].path}'")

    def show(self, resource):
        users = self.using(resource)
        status = "RESERVING" if not resource.ready else "IN_USE" if users else "RESERVED"
        data = dict(resource.data) | {"status": status} | ({"users": [link(rule.path) for rule in users]} if users else {})
        if data.get("prefixLength"):
            data["address"] = data["address"].split("/")[0]
        return data
