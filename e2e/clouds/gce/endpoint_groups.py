# SPDX-License-Identifier: Apache-2.0
"""Zonal network endpoint groups of type GCE_VM_IP, and their endpoints."""

from core.messages import Answer, Refusal

from .discovery import invalid
from .kinds import Kind, required, unlike_the_cloud
from .store import link

AT_ONCE = 500


class NetworkEndpointGroups(Kind):
    """compute.networkEndpointGroups."""

    collection, noun, schema, metric = "networkEndpointGroups", "network_endpoint_group", "NetworkEndpointGroup", "NETWORK_ENDPOINT_GROUPS"

    def insert(self, scope, body):
        data = dict(body)
        kind = data.get("networkEndpointType")
        if kind is None:
            raise required("resource.networkEndpointType")
        if kind != "GCE_VM_IP":
            raise unlike_the_cloud(f"network endpoint groups of type {kind}")
        for field in ("network", "subnetwork"):
            if field not in data:
                raise required(f"resource.{field}")
        if "defaultPort" in data:
            raise invalid("resource.defaultPort", data["defaultPort"], "Default port cannot be set for type GCE_VM_IP.")
        network = self.store.resolve(data["network"], "resource.network", scope, ("networks",))
        subnetwork = self.store.resolve(data["subnetwork"], "resource.subnetwork", scope, ("subnetworks",))
        zone = scope.split("/")[-1]
        if subnetwork.path.split("/")[3] != zone.rsplit("-", 1)[0]:
            raise invalid("resource.subnetwork", data["subnetwork"], "The subnetwork must be in the region of the zone.")
        if subnetwork.data["network"] != link(network.path):
            raise invalid("resource.subnetwork", data["subnetwork"], "The subnetwork is not in the network.")
        return data | {"network": link(network.path), "subnetwork": link(subnetwork.path), "endpoints": {}}

    def references(self, data):
        return [self.path_of(data["network"]), self.path_of(data["subnetwork"])]

    def show(self, resource):
        data = dict(resource.data)
        return data | {"size": len(data.pop("endpoints"))}

    def attach(self, call, resource):
        """attachNetworkEndpoints: all or none, when the operation ends."""
        wanted = self._endpoints(call, resource)

        def finish():
            if self.store.resources.get(resource.path) is not resource:
                raise Refusal(404, "notFound", f"The resource '{resource.path}' was not found")
            for endpoint in wanted:
                self._instance(resource, endpoint)
            resource.data["endpoints"] |= {endpoint["instance"]: endpoint for endpoint in wanted}

        return self.cloud.operate(call, resource, "attachNetworkEndpoints", finish)

    def detach(self, call, resource):
        """detachNetworkEndpoints. One that is not attached is refused."""
        names = [endpoint["instance"] for endpoint in self._endpoints(call, resource, known=False)]
        missing = [name for name in names if name not in resource.data["endpoints"]]
        if missing:
            raise Refusal(400, "invalid", f"Invalid value for field 'resource.networkEndpoints': '{missing[0]}'. Specified network endpoint is not in the network endpoint group.")

        def finish():
            for name in names:
                resource.data["endpoints"].pop(name, None)

        return self.cloud.operate(call, resource, "detachNetworkEndpoints", finish)

    def list(self, call, resource):
        """listNetworkEndpoints, in pages."""
        show = call.body.get("healthStatus") == "SHOW"
        items = []
        for name, endpoint in sorted(resource.data["endpoints"].items()):
            item = {"networkEndpoint": endpoint}
            if show:
                item["healths"] = self._healths(resource, name)
            items.append(item)
        page, token = call.page(items)
        answer = {"kind": "compute#networkEndpointGroupsListNetworkEndpoints", "id": resource.data["id"]}
        return Answer(200, answer | ({"items": page} if page else {}) | ({"nextPageToken": token} if token else {}))

    def _healths(self, group, instance):
        of_group = [user for user in self.store.all("backendServices") if link(group.path) in [b["group"] for b in user.data.get("backends", [])]]
        state = self.cloud.health_of(group.path.split("/")[3], instance)["state"]
        return [{"backendService": {"backendService": link(user.path)}, "healthState": state} for user in of_group]

    def _endpoints(self, call, resource, known=True):
        endpoints = call.body.get("networkEndpoints", [])
        if not endpoints:
            raise required("resource.networkEndpoints")
        if len(endpoints) > AT_ONCE:
            raise Refusal(400, "invalid", f"Invalid value for field 'resource.networkEndpoints'. At most {AT_ONCE} network endpoints are allowed.")
        result = []
        for index, endpoint in enumerate(endpoints):
            where = f"resource.networkEndpoints[{index}]"
            if "instance" not in endpoint:
                raise required(f"{where}.instance")
            if "port" in endpoint or "fqdn" in endpoint:
                raise invalid(f"{where}.port", endpoint.get("port"), "It cannot be set for type GCE_VM_IP.")
            name = endpoint["instance"].split("/")[-1]
            if name in [other["instance"] for other in result]:
                raise invalid(where, name, "Duplicate network endpoint.")
            endpoint = endpoint | {"instance": name}
            result.append(self._instance(resource, endpoint) if known else endpoint)
        return result

    def _instance(self, group, endpoint):
        """The endpoint with its address. The instance has to be in the group's zone and subnetwork."""
        name, zone = endpoint["instance"], "/".join(group.path.split("/")[:4])
        instance = self.store.resources.get(f"{zone}/instances/{name}")
        if instance is None:
            raise Refusal(404, "notFound", f"The resource '{zone}/instances/{name}' was not found")
        subnetwork = group.data["subnetwork"]
        nic = next((nic for nic in instance.data["networkInterfaces"] if nic["subnetwork"] == subnetwork), None)
        address = endpoint.get("ipAddress", nic and nic["networkIP"])
        if nic is None or address != nic["networkIP"]:
            why = f"Specified IP address {address} doesn't belong to the (sub)network {subnetwork.split('/')[-1]} or to the instance {name}."
            raise invalid("resource.ipAddress", address, why)
        six = endpoint.get("ipv6Address")
        if six and six not in (nic.get("ipv6Address"), *(access.get("externalIpv6") for access in nic.get("ipv6AccessConfigs", []))):
            raise invalid("resource.ipv6Address", six, f"It doesn't belong to the instance {name}.")
        return endpoint | {"ipAddress": address}

    @property
    def actions(self):
        """Methods beside those of all kinds."""
        return {"attachNetworkEndpoints": self.attach, "detachNetworkEndpoints": self.detach, "listNetworkEndpoints": self.list}
