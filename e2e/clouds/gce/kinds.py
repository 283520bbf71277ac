# SPDX-License-Identifier: Apache-2.0
"""What all kinds of resources have in common."""

import ipaddress

from core.messages import Refusal

from .discovery import invalid


def required(field):
    """A field that is missing."""
    return Refusal(400, "required", f"Required field '{field}' not specified")


def unlike_the_cloud(what):
    """A request that the real API may serve and the stand-in does not know. Not an answer that a provider should handle."""
    return Refusal(501, "notImplemented", f"The stand-in does not know {what}")


def merge(old, patch):
    """A JSON merge patch."""
    result = dict(old)
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        elif isinstance(value, dict) and isinstance(old.get(name), dict):
            result[name] = merge(old[name], value)
        else:
            result[name] = value
    return result


def check_range(data, field, low, high):
    """Refuses a number out of its range."""
    value = data.get(field)
    if value is not None and not low <= value <= high:
        raise invalid(f"resource.{field}", value, f"Must be between {low} and {high}, inclusive.")


def parse_ranges(values, field):
    """Networks in CIDR notation; host bits must be zero."""
    result = []
    for value in values:
        try:
            result.append(ipaddress.ip_network(value))
        except ValueError:
            raise invalid(field, value, "Must be a CIDR address range.") from None
    return result


def ports(value, field):
    """The first and the last port of `80` or `80-90`."""
    first, _, last = value.partition("-")
    if not first.isdigit() or not (last or first).isdigit() or not 0 <= int(first) <= int(last or first) <= 65535:
        raise invalid(field, value, "Must be a port or a range of ports.")
    return int(first), int(last or first)


class Kind:
    """A kind of resource. `noun` is its name in messages, `schema` that in the discovery document."""

    collection = noun = schema = None
    # Whether the content has a fingerprint, and the labels one.
    fingerprinted = labelled = False
    # Fields that insert ignores: labels are set by setLabels only.
    ignored = ()
    # Fields that patch may change; None: all that change() accepts.
    patchable = None
    # The name of its quota.
    metric = None
    # Seeded by tests only.
    read_only = False

    def __init__(self, cloud):
        self.cloud, self.store = cloud, cloud.store

    def insert(self, scope, body):
        """The content of a new resource, with defaults; refuses what is wrong."""
        raise unlike_the_cloud(f"how to create {self.collection}")

    def change(self, resource, data):
        """The content of a changed resource; refuses what is wrong."""
        raise unlike_the_cloud(f"how to change {self.collection}")

    def references(self, data):
        """The paths of resources that this one uses."""
        return []

    def refuse_deletion(self, resource):
        """Refuses the deletion of what is in use."""
        self.store.refuse_if_used(resource)

    def show(self, resource):
        """What clients see."""
        return resource.data

    def path_of(self, url):
        """The path of a URL that the store wrote."""
        return url.removeprefix("https://www.googleapis.com/compute/v1/")


class Seeded(Kind):
    """What only tests make."""

    read_only = True

    def __init__(self, cloud, collection, noun, schema):
        super().__init__(cloud)
        self.collection, self.noun, self.schema = collection, noun, schema

    def references(self, data):
        paths = [data[field] for field in ("network",) if field in data]
        for interface in data.get("networkInterfaces", []):
            paths += [interface["network"], interface["subnetwork"]]
        return [self.path_of(path) for path in paths]
