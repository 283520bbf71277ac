# SPDX-License-Identifier: Apache-2.0
"""Network security groups, and their rules."""

import copy
import ipaddress

from .kinds import Kind, unique
from .store import refused

RULES_AT_MOST, PREFIXES_AT_MOST = 1000, 4000
DEFAULTS = (
    ("AllowVnetInBound", "Inbound", "Allow", 65000, "VirtualNetwork", "VirtualNetwork"),
    ("AllowAzureLoadBalancerInBound", "Inbound", "Allow", 65001, "AzureLoadBalancer", "*"),
    ("DenyAllInBound", "Inbound", "Deny", 65500, "*", "*"),
    ("AllowVnetOutBound", "Outbound", "Allow", 65000, "VirtualNetwork", "VirtualNetwork"),
    ("AllowInternetOutBound", "Outbound", "Allow", 65001, "*", "Internet"),
    ("DenyAllOutBound", "Outbound", "Deny", 65500, "*", "*"),
)


def is_prefix(value):
    """Whether it is an address, a range or a service tag."""
    if value == "*" or value[:1].isalpha() and ":" not in value:
        return True
    try:
        ipaddress.ip_network(value, strict=False)
    except ValueError:
        return False
    return True


def are_ports(value):
    """Whether it is a port, a range or all."""
    first, _, last = value.partition("-")
    return value == "*" or (first.isdigit() and (last or first).isdigit() and 0 <= int(first) <= int(last or first) <= 65535)


class SecurityGroups(Kind):
    """Microsoft.Network/networkSecurityGroups."""

    type, model = "networkSecurityGroups", "NetworkSecurityGroup"
    children = {"securityRules": "SecurityRule", "defaultSecurityRules": "SecurityRule"}
    writable = ("securityRules",)

    def check(self, identifier, data, old):
        data = copy.deepcopy(data)
        own = data.setdefault("properties", {})
        for field in ("networkInterfaces", "subnets", "defaultSecurityRules"):
            own.pop(field, None)
        rules = own.setdefault("securityRules", [])
        unique(rules, f"{identifier}/securityRules")
        if len(rules) > RULES_AT_MOST:
            raise refused("MaxSecurityRulesPerNsgExceeded", f"Cannot create more than {RULES_AT_MOST} security rules for network security group {identifier}.")
        priorities, prefixes = {}, {"source": 0, "destination": 0}
        for rule in rules:
            self._rule(identifier, rule, prefixes)
            key = (rule["properties"]["direction"], rule["properties"]["priority"])
            if key in priorities:
                raise refused("SecurityRuleConflict", f"Security rule {rule['name']} conflicts with rule {priorities[key]}. Rules cannot have the same Priority and Direction.")
            priorities[key] = rule["name"]
        for side, count in prefixes.items():
            if count > PREFIXES_AT_MOST:
                raise refused("MaxAddressPrefixesPerNsgExceeded", f"Network security group {identifier} has more than {PREFIXES_AT_MOST} {side} address prefixes.")
        return data

    def _rule(self, identifier, rule, prefixes):
        own, name = rule.get("properties", {}), f"{identifier}/securityRules/{rule['name']}"
        if not 100 <= own.get("priority", 0) <= 4096:
            raise refused("SecurityRuleInvalidPriority", f"Security rule has invalid Priority. Value provided: {own.get('priority')} Allowed range 100-4096.")
        for side in ("source", "destination"):
            for what, test in (("AddressPrefix", is_prefix), ("PortRange", are_ports)):
                one, many = own.get(f"{side}{what}"), own.get(f"{side}{what}{'es' if what == 'AddressPrefix' else 's'}", [])
                groups = own.get(f"{side}ApplicationSecurityGroups") if what == "AddressPrefix" else None
                if sum(bool(given) for given in (one, many, groups)) != 1:
                    raise refused("SecurityRuleParameterContradiction", f"Security rule {name} needs exactly one of {side}{what} and its plural.")
                wrong = next((value for value in [one] * bool(one) + many if not test(value)), None)
                if wrong is not None:
                    raise refused(f"SecurityRuleInvalid{what}", f"Security rule has invalid {what}. Value provided: {wrong}")
                # A list of more than one may not have tags that stand for everything.
                if what == "AddressPrefix":
                    prefixes[side] += len(many) or bool(one)
                    if "*" in many:
                        raise refused("SecurityRuleInvalidAddressPrefix", f"Security rule {name} has * in a list of prefixes.")

    def show(self, resource):
        shown = super().show(resource)
        own = shown["properties"]
        own["securityRules"] = [self.show_part(resource, "securityRules", rule) for rule in resource.data["properties"]["securityRules"]]
        own["defaultSecurityRules"] = [self.show_part(resource, "defaultSecurityRules", rule) for rule in self.default_rules()]
        used = [subnet for network in self.store.all("virtualNetworks") for subnet in network.kind.show(network)["properties"]["subnets"]]
        used = [{"id": subnet["id"]} for subnet in used if subnet["properties"].get("networkSecurityGroup", {}).get("id", "").lower() == resource.id.lower()]
        return shown | {"properties": own | ({"subnets": used} if used else {})}

    def default_rules(self):
        """Rules that every group has."""
        for name, direction, access, priority, source, destination in DEFAULTS:
            own = {"protocol": "*", "sourcePortRange": "*", "destinationPortRange": "*", "sourceAddressPrefix": source, "destinationAddressPrefix": destination}
            yield {"name": name, "properties": own | {"access": access, "priority": priority, "direction": direction}}

    def show_part(self, resource, collection, item):
        """A rule."""
        return self.part(resource, collection, item)

    def refuse_part_deletion(self, resource, collection, name):
        """Nothing uses a rule."""

    def refuse_deletion(self, resource):
        used = self.show(resource)["properties"].get("subnets")
        if used:
            raise refused("InUseNetworkSecurityGroupCannotBeDeleted", f"Network security group {resource.id} cannot be deleted because it is in use by the following resources: {used[0]['id']}.")
