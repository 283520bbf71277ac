# SPDX-License-Identifier: Apache-2.0
"""Standard load balancers, with their parts. A PUT replaces the whole."""

import copy

from .kinds import Kind, unique, unlike_the_cloud
from .schema import malformed
from .store import not_provisioned, not_referenced, refused

RULES_AT_MOST = 1500


def refer(items):
    """References to parts or resources."""
    return [{"id": item} for item in items]


class LoadBalancers(Kind):
    """Microsoft.Network/loadBalancers."""

    type, model = "loadBalancers", "LoadBalancer"
    children = {
        "frontendIPConfigurations": "FrontendIPConfiguration", "backendAddressPools": "BackendAddressPool", "loadBalancingRules": "LoadBalancingRule",
        "probes": "Probe", "inboundNatRules": "InboundNatRule", "outboundRules": "OutboundRule", "inboundNatPools": "InboundNatPool",
    }  # fmt: skip
    writable = ("backendAddressPools",)

    def check(self, identifier, data, old):
        data = copy.deepcopy(data)
        data["sku"] = {"tier": "Regional"} | data.get("sku", {})
        if data["sku"].get("name") != "Standard":
            raise unlike_the_cloud("load balancers of another SKU than Standard")
        properties = data.setdefault("properties", {})
        for collection in self.children:
            unique(properties.setdefault(collection, []), f"{identifier}/{collection}")
        for collection in ("inboundNatRules", "inboundNatPools"):
            if properties[collection]:
                raise unlike_the_cloud(f"{collection} of load balancers")
        for frontend in properties["frontendIPConfigurations"]:
            self._frontend(identifier, data, frontend)
        for pool in properties["backendAddressPools"]:
            self.check_pool(identifier, pool)
        for probe in properties["probes"]:
            self._probe(identifier, probe)
        if len(properties["loadBalancingRules"]) > RULES_AT_MOST:
            raise refused("LoadBalancingRuleCountLimitReached", f"Cannot create more than {RULES_AT_MOST} rules in load balancer {identifier}.")
        for rule in properties["loadBalancingRules"]:
            self._rule(identifier, properties, rule)
            self._family(properties, rule)
        for rule in properties["outboundRules"]:
            own = rule["properties"]
            for frontend in own["frontendIPConfigurations"]:
                self._inside(identifier, properties, f"{identifier}/outboundRules/{rule['name']}", frontend, "frontendIPConfigurations")
            self._inside(identifier, properties, f"{identifier}/outboundRules/{rule['name']}", own["backendAddressPool"], "backendAddressPools")
        self._collisions(identifier, properties["loadBalancingRules"])
        return data

    def _frontend(self, identifier, data, frontend):
        own, name = frontend.setdefault("properties", {}), f"{identifier}/frontendIPConfigurations/{frontend['name']}"
        given = [field for field in ("publicIPAddress", "publicIPPrefix", "subnet") if own.get(field)]
        if len(given) != 1:
            raise refused("InvalidRequestFormat", f"Frontend IP configuration {name} needs one of publicIPAddress and subnet.")
        if given == ["publicIPPrefix"]:
            raise unlike_the_cloud("frontends of outbound rules with a prefix")
        own.setdefault("privateIPAllocationMethod", "Dynamic")
        others = [other for other in data["properties"]["frontendIPConfigurations"] if other is not frontend]
        if any(bool(other.get("properties", {}).get("subnet")) != (given == ["subnet"]) for other in others):
            raise refused("LoadBalancerCannotHaveBothPublicAndPrivateFrontends", f"Load balancer {identifier} has public and private frontends.")
        if given == ["subnet"]:
            return self._private(identifier, own, name)
        address = self.store.get(own["publicIPAddress"].get("id", ""))
        if address is None or address.kind.type != "publicIPAddresses":
            raise not_referenced(own["publicIPAddress"].get("id"), name)
        if any(other["properties"].get("publicIPAddress", {}).get("id", "").lower() == address.id.lower() for other in others if other.get("properties")):
            raise refused("PublicIPReferencedByMultipleIPConfigs", f"Public IP address {address.id} is referenced by multiple ipconfigs in resource {identifier}.")
        user = self.cloud.user_of(address)
        if user and user.lower() != name.lower() and not user.lower().startswith(identifier.lower() + "/"):
            raise refused("PublicIPAddressInUse", f"Resource {name} is referencing public IP address {address.id} that is already allocated to resource {user}.")
        if address.state not in ("Succeeded", "Updating"):
            last = f"Cannot proceed with operation because resource {address.id} used by resource {identifier} is not in Succeeded state. Resource is in {address.state} state."
            raise not_provisioned(last)
        return None

    def _private(self, identifier, own, name):
        subnet = self.cloud.subnet(own["subnet"].get("id", ""))
        if subnet is None:
            raise not_referenced(own["subnet"].get("id"), name)
        version = own.setdefault("privateIPAddressVersion", "IPv4")
        prefixes = subnet["properties"].get("addressPrefixes") or [subnet["properties"]["addressPrefix"]]
        if version == "IPv6" and not any(":" in prefix for prefix in prefixes):
            raise refused("SubnetHasNoIPv6Prefix", f"Subnet {own['subnet']['id']} has no prefix of {version}, which {name} wants.")
        if own["privateIPAllocationMethod"] == "Static":
            wanted = own.get("privateIPAddress", "")
            if not self.cloud.is_in(subnet, wanted):
                raise refused("PrivateIPAddressNotInSubnet", f"Private static IP address {wanted} does not belong to the range of subnet prefix {own['subnet']['id']}.")
            if wanted in self.cloud.private_addresses(besides=name):
                raise refused("PrivateIPAddressInUse", f"IP configuration {name} is using the private IP address {wanted} which is already allocated to another resource.")
        else:
            own.pop("privateIPAddress", None)

    def check_pool(self, identifier, pool):
        """Refuses a pool that is wrong. Also for a pool that is put by itself."""
        own, name = pool.setdefault("properties", {}), f"{identifier}/backendAddressPools/{pool['name']}"
        addresses = own.setdefault("loadBalancerBackendAddresses", [])
        unique(addresses, f"{name}/loadBalancerBackendAddresses")
        found = set()
        for address in addresses:
            at = address.get("properties", {})
            network = (at.get("virtualNetwork") or own.get("virtualNetwork") or {}).get("id")
            network = network or at.get("subnet", {}).get("id", "").split("/subnets/")[0]
            known = self.store.get(network or "")
            if not network or known is None or known.kind.type != "virtualNetworks":
                raise not_referenced(network, f"{name}/loadBalancerBackendAddresses/{address['name']}")
            wanted = at.get("ipAddress")
            if not wanted or not any(self.cloud.is_in(subnet, wanted) for subnet in known.data["properties"]["subnets"]):
                raise refused("BackendAddressIsNotInVirtualNetwork", f"IP address {wanted} of {name} is not in the virtual network {network}.")
            if wanted in found:
                raise refused("DuplicateIpAddressOnBackendAddressPool", f"Found duplicate IP address {wanted} on backend pool {name}.")
            found.add(wanted)
        if len({":" in address for address in found}) > 1:
            raise refused("BackendAddressPoolHasTwoFamilies", f"Backend pool {name} has addresses of both IP families.")

    def _family(self, properties, rule):
        """Refuses a rule from one IP family to the other."""
        own = rule["properties"]
        front = next(f for f in properties["frontendIPConfigurations"] if own["frontendIPConfiguration"]["id"].lower().endswith(f"/{f['name'].lower()}"))["properties"]
        address = front.get("publicIPAddress")
        version = self.store.get(address["id"]).data["properties"]["publicIPAddressVersion"] if address else front["privateIPAddressVersion"]
        pools = [pool["id"].lower() for pool in [own.get("backendAddressPool"), *own.get("backendAddressPools", [])] if pool]
        for pool in properties["backendAddressPools"]:
            addresses = pool["properties"]["loadBalancerBackendAddresses"]
            if any(used.endswith(f"/{pool['name'].lower()}") for used in pools) and any((":" in a["properties"]["ipAddress"]) != (version == "IPv6") for a in addresses):
                raise refused("LoadBalancingRuleHasTwoFamilies", f"Rule {rule['name']} has a frontend of {version}, and other addresses in the pool {pool['name']}.")

    def _probe(self, identifier, probe):
        own, name = probe["properties"], f"{identifier}/probes/{probe['name']}"
        if not 1 <= own["port"] <= 65535:
            raise refused("ProbePortOutOfRange", f"The port of {name} has to be between 1 and 65535.")
        http = own["protocol"] in ("Http", "Https")
        if http != bool(own.get("requestPath")):
            raise refused("ProbeRequestPathInvalid", f"Probe {name} has the protocol {own['protocol']}: a request path is {'required' if http else 'not allowed'}.")
        interval = own.setdefault("intervalInSeconds", 15)
        own.setdefault("numberOfProbes", 1)
        own.setdefault("probeThreshold", 1)
        if interval < 5 or not 1 <= own["probeThreshold"] <= 100 or interval * max(own["numberOfProbes"], own["probeThreshold"]) >= 2147483647:
            raise refused("ProbeIntervalOutOfRange", f"Interval or threshold of {name} is out of range.")

    def _inside(self, identifier, properties, by, reference, collection):
        """The part that a reference names."""
        wanted = (reference or {}).get("id", "")
        found = [f"{identifier}/{collection}/{item['name']}" for item in properties[collection]]
        same = next((item for item in found if item.lower() == wanted.lower()), None)
        if same is None:
            raise not_referenced(wanted, by)
        return same

    def _rule(self, identifier, properties, rule):
        own, name = rule.get("properties"), f"{identifier}/loadBalancingRules/{rule['name']}"
        if own is None or not own.get("frontendIPConfiguration"):
            raise malformed("MissingJsonProperty", f"Rule {name} has no frontend IP configuration.")
        self._inside(identifier, properties, name, own["frontendIPConfiguration"], "frontendIPConfigurations")
        for pool in [own.get("backendAddressPool"), *own.get("backendAddressPools", [])]:
            if pool:
                self._inside(identifier, properties, name, pool, "backendAddressPools")
        if own.get("probe"):
            self._inside(identifier, properties, name, own["probe"], "probes")
        every = own["protocol"] == "All"
        ports = (own["frontendPort"], own.setdefault("backendPort", own["frontendPort"]))
        if every != (ports == (0, 0)) or not all(0 <= port <= 65534 for port in ports) or (not every and 0 in ports):
            raise refused("LoadBalancingRulePortOutOfRange", f"Ports of {name} have to be between 1 and 65534, or both 0 with the protocol All.")
        if every and "subnet" not in next(f for f in properties["frontendIPConfigurations"] if own["frontendIPConfiguration"]["id"].lower().endswith("/" + f["name"].lower()))["properties"]:
            raise refused("LoadBalancingRuleProtocolAllIsForInternal", f"Rule {name} has the protocol All, which needs a private frontend.")
        if not 4 <= own.setdefault("idleTimeoutInMinutes", 4) <= 100:
            raise refused("LoadBalancingRuleIdleTimeoutOutOfRange", f"The idle timeout of {name} has to be between 4 and 100.")
        for field in ("enableFloatingIP", "enableTcpReset", "disableOutboundSnat"):
            own.setdefault(field, False)
        own.setdefault("loadDistribution", "Default")

    def _collisions(self, identifier, rules):
        fronts, backs = {}, {}
        for rule in rules:
            own, name = rule["properties"], f"{identifier}/loadBalancingRules/{rule['name']}"
            front = (own["frontendIPConfiguration"]["id"].lower(), own["protocol"], own["frontendPort"])
            if front in fronts:
                raise refused("RulesUseSameFrontendPortProtocolAndIPConfig", f"Load balancing rules {fronts[front]} and {name} use the same protocol and port of a frontend.")
            fronts[front] = name
            pools = {pool["id"].lower() for pool in [own.get("backendAddressPool"), *own.get("backendAddressPools", [])] if pool}
            for pool in () if own["enableFloatingIP"] else pools:
                back = (pool, own["protocol"], own["backendPort"])
                if back in backs:
                    message = f"Load balancing rules {backs[back]} and {name} with floating IP disabled use the same protocol {own['protocol']} and backend port {own['backendPort']}, and must not be used with the same backend address pool {pool}."
                    raise refused("RulesUseSameBackendPortProtocolAndPool", message)
                backs[back] = name

    def placed(self, resource):
        for frontend in resource.data["properties"]["frontendIPConfigurations"]:
            own = frontend["properties"]
            if own.get("subnet") and own["privateIPAllocationMethod"] == "Dynamic":
                own["privateIPAddress"] = resource.chosen.setdefault(frontend["name"], self.cloud.free_private_address(own["subnet"]["id"], own["privateIPAddressVersion"]))

    def show(self, resource):
        shown, parts = super().show(resource), resource.data["properties"]
        for collection in self.children:
            shown["properties"][collection] = [self.show_part(resource, collection, item) for item in parts[collection]]
        return shown

    def show_part(self, resource, collection, item):
        """A part, with references to the rules that use it."""
        more, parts = {}, resource.data["properties"]
        mine = f"{resource.id}/{collection}/{item['name']}".lower()
        fields = {"frontendIPConfigurations": ("frontendIPConfiguration", "frontendIPConfigurations"), "backendAddressPools": ("backendAddressPool", "backendAddressPools"), "probes": ("probe",)}.get(collection, ())
        for kind in ("loadBalancingRules", "outboundRules"):
            using = []
            for rule in parts[kind]:
                named = [reference for field in fields if (value := rule["properties"].get(field)) for reference in (value if isinstance(value, list) else [value])]
                if any(reference["id"].lower() == mine for reference in named):
                    using.append(f"{resource.id}/{kind}/{rule['name']}")
            if using:
                more[kind] = refer(using)
        return self.part(resource, collection, item, **more)

    def refuse_part_deletion(self, resource, collection, name):
        """Refuses the deletion of a part that a rule uses."""
        item = next(item for item in resource.data["properties"][collection] if item["name"].lower() == name.lower())
        users = self.show_part(resource, collection, item)["properties"].get("loadBalancingRules")
        if users:
            raise refused("LoadBalancerBackendAddressPoolInUse", f"Backend address pool {resource.id}/{collection}/{name} is in use by {users[0]['id']}.")
