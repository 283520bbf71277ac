# SPDX-License-Identifier: Apache-2.0
"""What exists before a test: projects, regions, zones, networks, subnetworks and instances. Tests add more of them below /test/."""

import ipaddress

from .store import Resource, fingerprint, link, timestamp


class Seeds:
    """Makes resources past the API."""

    def __init__(self, cloud):
        self.cloud, self.store = cloud, cloud.store

    def put(self, collection, path, **fields):
        """A resource that is ready."""
        kind = self.cloud.kinds[collection]
        data = {"kind": self.cloud.kind_of(kind.schema), "id": self.store.next_id(), "creationTimestamp": timestamp(), "name": path.split("/")[-1], "selfLink": link(path)}
        resource = Resource(path, kind, data | fields)
        resource.visible = resource.ready = resource.seeded = True
        self.store.resources[path] = resource
        return resource

    def project(self, project):
        """A project with the regions, the zones and a default network of the settings."""
        settings = self.cloud.settings
        base, region = f"projects/{project}", settings["region"]
        zones = [f"{base}/zones/{zone}" for zone in settings["zones"]]
        self.put("regions", f"{base}/regions/{region}", description=region, status="UP", zones=[link(zone) for zone in zones])
        for zone in zones:
            self.put("zones", zone, description=zone.split("/")[-1], status="UP", region=link(f"{base}/regions/{region}"))
        self.network(project, "default")
        six = {"stack": "IPV4_IPV6"}
        self.subnetwork(project, "default", "default", "10.128.0.0/20", **six, access="EXTERNAL", prefix="2001:db8:0:1::/64")
        self.subnetwork(project, "internal-ipv6", "default", "10.129.0.0/20", **six, access="INTERNAL", prefix="fd20:0:0:1::/64")
        self.cloud.projects.add(project)

    def network(self, project, name):
        """A network with subnetworks of its own."""
        path = f"projects/{project}/global/networks/{name}"
        self.put("networks", path, autoCreateSubnetworks=False, routingConfig={"routingMode": "REGIONAL", "bgpBestPathSelectionMode": "LEGACY"}, selfLinkWithId=link(path))

    def subnetwork(self, project, name, network, cidr, stack="IPV4_ONLY", access=None, prefix=None):
        """A subnetwork of the region."""
        region = self.cloud.settings["region"]
        fields = {
            "network": link(f"projects/{project}/global/networks/{network}"), "region": link(f"projects/{project}/regions/{region}"),
            "ipCidrRange": cidr, "gatewayAddress": str(ipaddress.ip_network(cidr)[1]), "stackType": stack, "purpose": "PRIVATE",
            "privateIpGoogleAccess": False, "privateIpv6GoogleAccess": "DISABLE_GOOGLE_ACCESS", "fingerprint": fingerprint([name, cidr]),
        }  # fmt: skip
        if access:
            fields |= {"ipv6AccessType": access, "externalIpv6Prefix" if access == "EXTERNAL" else "internalIpv6Prefix": prefix}
            if access == "INTERNAL":
                fields["ipv6CidrRange"] = prefix
        self.put("subnetworks", f"projects/{project}/regions/{region}/subnetworks/{name}", **fields)

    def instance(self, name, zone, address, tags=(), address_v6=None, project=None, network_project=None, network="default", subnetwork="default", status="RUNNING", labels=None):
        """A virtual machine with one interface."""
        settings = self.cloud.settings
        project, region = project or settings["project"], settings["region"]
        host = network_project or project
        interface = {
            "kind": "compute#networkInterface", "name": "nic0", "networkIP": address, "stackType": "IPV4_IPV6" if address_v6 else "IPV4_ONLY",
            "network": link(f"projects/{host}/global/networks/{network}"), "fingerprint": fingerprint([name, address]),
            "subnetwork": link(f"projects/{host}/regions/{region}/subnetworks/{subnetwork}"),
        }  # fmt: skip
        subnet = self.store.visible(f"projects/{host}/regions/{region}/subnetworks/{subnetwork}").data
        if address_v6 and subnet.get("ipv6AccessType") == "EXTERNAL":
            access = {"kind": "compute#accessConfig", "type": "DIRECT_IPV6", "name": "external-ipv6", "externalIpv6": address_v6, "externalIpv6PrefixLength": 96, "networkTier": "PREMIUM"}
            interface["ipv6AccessConfigs"] = [access]
        elif address_v6:
            interface |= {"ipv6Address": address_v6, "internalIpv6PrefixLength": 96}
        place = f"projects/{project}/zones/{zone}"
        self.store.visible(place)
        fields = {
            "zone": link(place), "machineType": link(f"{place}/machineTypes/e2-standard-2"), "status": status, "canIpForward": False,
            "networkInterfaces": [interface], "tags": {"items": list(tags), "fingerprint": fingerprint(list(tags))},
            "labels": labels or {}, "labelFingerprint": fingerprint(labels or {}), "fingerprint": fingerprint([name, list(tags)]),
        }  # fmt: skip
        self.put("instances", f"{place}/instances/{name}", **fields)

    def remove_instance(self, zone, name, project=None):
        """Removes a virtual machine, and with it its endpoints."""
        project = project or self.cloud.settings["project"]
        del self.store.resources[f"projects/{project}/zones/{zone}/instances/{name}"]
        for group in self.store.all("networkEndpointGroups"):
            if group.path.startswith(f"projects/{project}/zones/{zone}/"):
                group.data["endpoints"].pop(name, None)
