# SPDX-License-Identifier: Apache-2.0
"""What all kinds of resources have in common, and those that only tests make."""

from core.messages import Refusal

from .store import refused


def unlike_the_cloud(what):
    """A request that the real API may serve and the stand-in does not know. Not an answer that a provider should handle."""
    return Refusal(501, "NotImplementedByTheStandIn", f"The stand-in does not know {what}")


class Kind:
    """A kind of resource: `type` in its identifiers, `model` in azure-mgmt-network's types. `children` are its lists of parts that have
    an identifier each: the property, and the model."""

    type = model = None
    children = {}
    # Those of them that can be put and deleted one by one.
    writable = ()
    namespace = "Microsoft.Network"
    read_only = False

    def __init__(self, cloud):
        self.cloud, self.store = cloud, cloud.store

    def check(self, identifier, data, old):
        """The content with defaults; refuses what is wrong. `old` is the resource that it replaces, or None."""
        raise unlike_the_cloud(f"how to put {self.type}")

    def refuse_deletion(self, resource):
        """Refuses the deletion of what is in use."""

    def placed(self, resource):
        """Called when the content was accepted: the cloud chooses what the client left open."""

    def show(self, resource):
        """What clients see."""
        data = resource.data
        properties = {"provisioningState": resource.state, "resourceGuid": resource.guid} | data["properties"]
        shown = {"name": resource.name, "id": resource.id, "etag": resource.etag, "type": f"{self.namespace}/{self.type}"}
        return shown | data | {"properties": properties}

    def part(self, resource, collection, item, **more):
        """One of its parts as clients see it."""
        identifier = f"{resource.id}/{collection}/{item['name']}"
        shown = {"name": item["name"], "id": identifier, "etag": resource.etag, "type": f"{self.namespace}/{self.type}/{collection}"}
        return shown | item | {"properties": {"provisioningState": resource.state} | item.get("properties", {}) | more}


class Seeded(Kind):
    """What only tests make: their content is shown as it is."""

    read_only = True

    def __init__(self, cloud, type_, model, namespace="Microsoft.Network", children=()):
        super().__init__(cloud)
        self.type, self.model, self.namespace = type_, model, namespace
        self.children = dict(children)

    def show(self, resource):
        shown = super().show(resource)
        for collection in self.children:
            shown["properties"][collection] = [self.part(resource, collection, item) for item in resource.data["properties"].get(collection, [])]
        if self.namespace != "Microsoft.Network":
            del shown["etag"], shown["properties"]["resourceGuid"]
        return shown


def unique(items, what):
    """Refuses parts without a name, or with the same."""
    names = [item.get("name") for item in items]
    if not all(names):
        raise refused("MissingJsonProperty", f"A name is missing in {what}.")
    lowered = [name.lower() for name in names]
    twice = next((name for name in names if lowered.count(name.lower()) > 1), None)
    if twice:
        raise refused("DuplicateResourceName", f"Resource {what} has two child resources with the same name ({twice}).")
