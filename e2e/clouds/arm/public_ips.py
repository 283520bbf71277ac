# SPDX-License-Identifier: Apache-2.0
"""Public IP addresses of the Standard SKU, and prefixes that tests make."""

import copy

from .kinds import Kind, unlike_the_cloud
from .store import not_referenced, refused

FIXED = {
    "publicIPAddressVersion": "PublicIPAddressVersionCannotBeChanged",
    "publicIPAllocationMethod": "PublicIPAddressAllocationMethodCannotBeChanged",
    "publicIPPrefix": "PublicIPAddressPrefixCannotBeChanged",
}


class PublicIPAddresses(Kind):
    """Microsoft.Network/publicIPAddresses."""

    type, model = "publicIPAddresses", "PublicIPAddress"

    def check(self, identifier, data, old):
        data = copy.deepcopy(data)
        data["sku"] = {"tier": "Regional"} | data.get("sku", {})
        if data["sku"].get("name") != "Standard":
            raise unlike_the_cloud("public IP addresses of another SKU than Standard")
        own = data.setdefault("properties", {})
        own.pop("ipAddress", None)
        own.pop("ipConfiguration", None)
        own.setdefault("publicIPAllocationMethod", "Dynamic")
        if own["publicIPAllocationMethod"] != "Static":
            raise refused("StandardSkuPublicIPAddressMustBeStatic", f"Standard sku publicIp {identifier} must have AllocationMethod set to Static.")
        defaults = {"publicIPAddressVersion": "IPv4", "idleTimeoutInMinutes": 4, "ipTags": []}
        own |= {field: value for field, value in defaults.items() if field not in own}
        if not 4 <= own["idleTimeoutInMinutes"] <= 30:
            raise refused("PublicIPAddressIdleTimeoutOutOfRange", f"The idle timeout of {identifier} has to be between 4 and 30.")
        prefix = own.get("publicIPPrefix", {}).get("id")
        if prefix and (self.store.get(prefix) is None or self.store.get(prefix).kind.type != "publicIPPrefixes"):
            raise not_referenced(prefix, identifier)
        if old:
            self._fixed(identifier, data, old)
        label = own.get("dnsSettings", {}).get("domainNameLabel")
        for other in self.store.all(self.type):
            if label and other is not old and other.data["properties"].get("dnsSettings", {}).get("domainNameLabel") == label:
                raise refused("DnsRecordInUse", f"DNS record {label}.{data['location']}.cloudapp.azure.com is already used by another public IP.")
        if label:
            own["dnsSettings"]["fqdn"] = f"{label}.{data['location']}.cloudapp.azure.com"
        return data

    def _fixed(self, identifier, data, old):
        for field, code in FIXED.items():
            if data["properties"].get(field) != old.data["properties"].get(field):
                raise refused(code, f"The field {field} of {identifier} cannot be changed.")
        if sorted(data.get("zones", [])) != sorted(old.data.get("zones", [])):
            raise refused("ResourceAvailabilityZonesCannotBeModified", f"Resource {identifier} has an existing availability zone constraint which cannot be modified.")

    def placed(self, resource):
        own = resource.data["properties"]
        prefix = own.get("publicIPPrefix", {}).get("id")
        if "address" not in resource.chosen:
            resource.chosen["address"] = self.cloud.free_public_address(own["publicIPAddressVersion"], prefix)

    def refuse_deletion(self, resource):
        user = self.cloud.user_of(resource)
        if user:
            raise refused("PublicIPAddressCannotBeDeleted", f"Public IP address {resource.id} can not be deleted since it is still allocated to resource {user}.")

    def show(self, resource):
        shown = super().show(resource)
        # The address is known when the operation is done.
        if resource.state != "Updating" or resource.chosen.get("seen"):
            shown["properties"]["ipAddress"] = resource.chosen["address"]
            resource.chosen["seen"] = True
        user = self.cloud.user_of(resource)
        return shown | {"properties": shown["properties"] | ({"ipConfiguration": {"id": user}} if user else {})}
