# SPDX-License-Identifier: Apache-2.0
"""Firewall rules of VPC networks."""

from core.messages import Refusal

from .discovery import invalid
from .kinds import Kind, check_range, parse_ranges, ports, required
from .store import link

WITH_PORTS = ("tcp", "udp", "sctp", "6", "17", "132")
NAMES = ("tcp", "udp", "sctp", "icmp", "esp", "ah", "ipip", "all")


class Firewalls(Kind):
    """compute.firewalls."""

    collection, noun, schema, metric = "firewalls", "firewall", "Firewall", "FIREWALLS"

    def insert(self, scope, body):
        return self._check(scope, body)

    def change(self, resource, data):
        if self._network(data, "/".join(resource.path.split("/")[:3])) != resource.data["network"]:
            raise invalid("resource.network", data.get("network"), "The network of a firewall cannot be changed.")
        return self._check("/".join(resource.path.split("/")[:3]), data)

    def references(self, data):
        return [self.path_of(data["network"])]

    def _network(self, data, scope):
        reference = data.get("network", "global/networks/default")
        return link(self.store.resolve(reference, "resource.network", scope, ("networks",)).path)

    def _check(self, scope, body):
        data = {"direction": "INGRESS", "priority": 1000, "disabled": False, "logConfig": {"enable": False}} | body
        data.pop("params", None)
        data["network"] = self._network(data, scope)
        check_range(data, "priority", 0, 65535)
        if bool(data.get("allowed")) == bool(data.get("denied")):
            raise required("resource.allowed")
        for field in ("allowed", "denied"):
            for index, entry in enumerate(data.get(field, [])):
                self._protocol(entry, f"resource.{field}[{index}]")
        families = set()
        for field in ("sourceRanges", "destinationRanges"):
            of_field = {network.version for network in parse_ranges(data.get(field, []), f"resource.{field}")}
            if len(of_field) > 1:
                raise invalid(f"resource.{field}", ", ".join(data[field]), "IPv4 and IPv6 ranges cannot be mixed.")
            families |= of_field
            if len(data.get(field, [])) > 5000:
                raise Refusal(400, "invalid", f"Invalid value for field 'resource.{field}'. At most 5000 ranges are allowed.")
        if len(families) > 1:
            raise invalid("resource.destinationRanges", ", ".join(data["destinationRanges"]), "Ranges must have the family of the sources.")
        if len(data.get("targetTags", [])) > 70 or len(data.get("sourceTags", [])) > 30:
            raise Refusal(400, "invalid", "Invalid value for field 'resource.targetTags'. At most 70 target tags and 30 source tags are allowed.")
        if data["direction"] == "INGRESS":
            if not any(data.get(field) for field in ("sourceRanges", "sourceTags", "sourceServiceAccounts")):
                data["sourceRanges"] = ["::/0"] if families == {6} else ["0.0.0.0/0"]
        elif data.get("sourceTags") or data.get("sourceRanges"):
            raise invalid("resource.sourceRanges", "", "Sources are for ingress only." if data.get("sourceTags") else "Sources of egress are not supported.")
        return data

    def _protocol(self, entry, where):
        protocol = entry.get("IPProtocol", "").lower()
        if not protocol:
            raise required(f"{where}.IPProtocol")
        if protocol not in NAMES and not (protocol.isdigit() and int(protocol) < 256):
            raise invalid(f"{where}.IPProtocol", protocol, "Must be a well-known protocol or its number.")
        entry["IPProtocol"] = protocol
        if entry.get("ports") and protocol not in WITH_PORTS:
            raise invalid(f"{where}.ports", entry["ports"], "Ports are for tcp, udp and sctp only.")
        for index, value in enumerate(entry.get("ports", [])):
            ports(value, f"{where}.ports[{index}]")
