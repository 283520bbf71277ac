# SPDX-License-Identifier: Apache-2.0
"""Which addresses are free, and who has the others."""

import ipaddress

from .store import refused


class Addresses:
    """Part of the cloud: `store` and `settings` are its own."""

    def __init__(self, timeline, tokens, settings):
        super().__init__(timeline, tokens, settings)
        # The last address of each public range that was given.
        self._numbers = {"IPv4": 3, "IPv6": 3}

    def user_of(self, address):
        """The frontend that has a public IP address."""
        for balancer in self.store.all("loadBalancers"):
            for frontend in balancer.data["properties"]["frontendIPConfigurations"]:
                if frontend["properties"].get("publicIPAddress", {}).get("id", "").lower() == address.id.lower():
                    return f"{balancer.id}/frontendIPConfigurations/{frontend['name']}"
        return None

    def subnet(self, identifier):
        """The subnet of this identifier."""
        network, _, name = identifier.partition("/subnets/")
        found = self.store.get(network)
        subnets = found.data["properties"].get("subnets", []) if found else []
        return next((subnet for subnet in subnets if subnet["name"].lower() == name.lower()), None)

    def is_in(self, subnet, address):
        """Whether an address is one of the subnet."""
        own = subnet["properties"]
        try:
            wanted = ipaddress.ip_address(address)
        except ValueError:
            return False
        return any(wanted in ipaddress.ip_network(prefix) for prefix in own.get("addressPrefixes") or [own["addressPrefix"]])

    def private_addresses(self, besides=None):
        """Private addresses that are in use."""
        used = set()
        for balancer in self.store.all("loadBalancers"):
            for frontend in balancer.data["properties"]["frontendIPConfigurations"]:
                if f"{balancer.id}/frontendIPConfigurations/{frontend['name']}".lower() != (besides or "").lower():
                    used.add(frontend["properties"].get("privateIPAddress"))
        for interface in self.store.all("networkInterfaces"):
            used |= {one["properties"].get("privateIPAddress") for one in interface.data["properties"].get("ipConfigurations", [])}
        return used

    def free_private_address(self, identifier, version):
        """A free address at the end of a subnet."""
        own, used = self.subnet(identifier)["properties"], self.private_addresses()
        networks = map(ipaddress.ip_network, own.get("addressPrefixes") or [own["addressPrefix"]])
        network = next(network for network in networks if f"IPv{network.version}" == version)
        return next(str(network[-number]) for number in range(2, network.num_addresses) if str(network[-number]) not in used)

    def free_public_address(self, version, prefix):
        """A free public address, of a prefix if one is named."""
        used = {address.chosen.get("address") for address in self.store.all("publicIPAddresses")}
        if prefix:
            network = ipaddress.ip_network(self.store.get(prefix).data["properties"]["ipPrefix"])
            found = next((str(address) for address in network if str(address) not in used), None)
            if found is None:
                raise refused("PublicIPPrefixOutOfIpAddresses", f"No address is left in {prefix}.")
            return found
        network = ipaddress.ip_network(self.settings["public_range" if version == "IPv4" else "public_range_v6"])
        self._numbers[version] += 1
        return str(network[self._numbers[version]])
