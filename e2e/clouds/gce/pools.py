# SPDX-License-Identifier: Apache-2.0
"""Which IP addresses exist, who has reserved them, and who uses them."""

import ipaddress
import itertools

from core.messages import Refusal

from .discovery import invalid


def expanded(address):
    """An IPv6 range of a load balancer as the API writes it: all groups, without leading zeros, and 96 bits."""
    return ":".join(f"{int(group, 16):x}" for group in address.exploded.split(":")) + "/96"


def canonical(text, field):
    """The address, or the first address of an IPv6 range, as one text. IPv6 addresses of load balancers are ranges of 96 bits."""
    try:
        network = ipaddress.ip_network(text, strict=False)
    except ValueError:
        raise invalid(field, text, "Must be an IP address.") from None
    if network.version == 6:
        return expanded(network.network_address)
    if network.prefixlen != 32:
        raise invalid(field, text, "Must be an IP address.")
    return str(network.network_address)


class Pools:
    """Addresses of all projects. `external` is the range that external IPv4 addresses come from."""

    def __init__(self, store, external):
        self.store, self.external = store, ipaddress.ip_network(external)
        # The numbers of the last external addresses that were given: of IPv6, those beyond what instances have.
        self._next, self._next_v6 = 10, 0x7FFF

    def reservation(self, scope, address, subnetwork=None):
        """The address resource that reserves this address: in the region for external ones, in the subnetwork's network for others."""
        for resource in self.store.all("addresses"):
            if resource.data["address"] != address:
                continue
            if subnetwork is None and resource.data["addressType"] == "EXTERNAL":
                return resource if resource.path.startswith(scope + "/") else None
            if subnetwork is not None and resource.data.get("subnetwork") == subnetwork:
                return resource
        return None

    def rules(self, address, subnetwork=None):
        """The forwarding rules with this address, of the subnetwork's network if it is internal."""
        rules = [rule for rule in self.store.all("forwardingRules") if rule.data["IPAddress"] == address]
        if subnetwork is None:
            return [rule for rule in rules if rule.data["loadBalancingScheme"] == "EXTERNAL"]
        return [rule for rule in rules if rule.data.get("subnetwork") == subnetwork and rule.data["loadBalancingScheme"] == "INTERNAL"]

    def _taken(self):
        taken = {resource.data["address"] for resource in self.store.all("addresses")}
        taken |= {rule.data["IPAddress"] for rule in self.store.all("forwardingRules")}
        for instance in self.store.all("instances"):
            for nic in instance.data["networkInterfaces"]:
                taken |= {nic["networkIP"], nic.get("ipv6Address")}
        return taken

    def external_ipv4(self):
        """A free external address. Addresses are not used again at once, as a client that still has the old one could be served."""
        taken = self._taken()
        for _ in range(self.external.num_addresses):
            self._next = self._next + 1 if self._next < self.external.num_addresses - 2 else 1
            address = str(self.external[self._next])
            if address not in taken:
                return address
        raise Refusal(503, "ZONE_RESOURCE_POOL_EXHAUSTED", "The stand-in has no more external addresses.")

    def internal(self, subnetwork, version, external=False):
        """A free address of a subnetwork, from its end: instances have those at the beginning."""
        taken = self._taken()
        if version == 4:
            network = ipaddress.ip_network(subnetwork.data["ipCidrRange"])
            found = (str(network[-number]) for number in range(3, network.num_addresses - 2))
        else:
            prefix = subnetwork.data["externalIpv6Prefix" if external else "internalIpv6Prefix"]
            first = ipaddress.ip_network(prefix).network_address
            start = self._next_v6 + 1 if external else 0x8000
            numbers = itertools.chain(range(start, 0x10000), range(0x8000, start))
            found = (expanded(first + (number << 32)) for number in numbers)
        address = next((address for address in found if address not in taken), None)
        if address is None:
            raise Refusal(400, "IP_SPACE_EXHAUSTED", f"IP space of '{subnetwork.path}' is exhausted.")
        if version == 6 and external:
            # As for IPv4: not used again at once.
            self._next_v6 = (int(ipaddress.ip_network(address).network_address) >> 32) & 0xFFFF
        return address

    def check_inside(self, subnetwork, address, field, external=False):
        """Refuses an address that is not of the subnetwork."""
        six = "/" in address
        name = ("externalIpv6Prefix" if external else "internalIpv6Prefix") if six else "ipCidrRange"
        network = ipaddress.ip_network(subnetwork.data[name])
        inside = ipaddress.ip_address(address.split("/")[0]) in network
        if not inside or (not six and address in {str(network[0]), str(network[1]), str(network[-2]), str(network[-1])}):
            raise invalid(field, address, "Requested internal IP address is outside the subnetwork/network range.")
        for instance in self.store.all("instances"):
            for nic in instance.data["networkInterfaces"]:
                if nic["networkIP"] == address and nic["subnetwork"].endswith(subnetwork.path):
                    raise in_use(address)


def in_use(address):
    """An internal address that another resource has."""
    return Refusal(409, "conflict", f"IP_IN_USE_BY_ANOTHER_RESOURCE - IP '{address}' is already being used by another resource.")


def conflict(address):
    """An external address that a forwarding rule has already."""
    return invalid("resource.IPAddress", address, "Specified IP address is in-use and would result in a conflict.")


def check_stack(subnetwork, external, field):
    """Refuses IPv6 on a subnetwork that has none of this kind."""
    access = "EXTERNAL" if external else "INTERNAL"
    if subnetwork.data.get("stackType") not in ("IPV4_IPV6", "IPV6_ONLY") or subnetwork.data.get("ipv6AccessType") != access:
        raise invalid(field, subnetwork.path, f"The subnetwork must have IPv6 of the access type {access}.")
