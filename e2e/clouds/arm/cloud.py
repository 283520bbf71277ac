# SPDX-License-Identifier: Apache-2.0
"""The stand-in of Azure: which resource a request is about, and what all kinds of resources do alike."""

import re

from core.messages import Answer, Refusal
from core.server import Cloud

from . import identity
from .addresses import Addresses
from .kinds import Seeded, unlike_the_cloud
from .load_balancers import LoadBalancers
from .public_ips import PublicIPAddresses
from .schema import VERSION, Schema
from .security_groups import SecurityGroups
from .store import Resource, Store, refused

SETTINGS = {
    "subscription": "00000000-0000-0000-0000-000000000001", "resource_group": "cluster", "location": "westeurope",
    "tenant": "00000000-0000-0000-0000-000000000002", "client_id": "00000000-0000-0000-0000-000000000003", "client_secret": "secret",
    "subject": "system:serviceaccount:steerage:controller",
    # Seconds of an operation; those of single calls; what Retry-After says; whether calls without a token are served.
    "delay": 0.0, "delays": {}, "retry_after": 1, "anonymous": False,
    "public_range": "198.19.0.0/16", "public_range_v6": "2001:db8:f::/64", "page": 100,
}  # fmt: skip
PATH = re.compile(
    r"/subscriptions/(?P<subscription>[^/]+)(?:/resourceGroups/(?P<group>[^/]+))?/providers/(?P<namespace>Microsoft\.[A-Za-z]+)/"
    r"(?P<type>[^/]+)(?:/(?P<name>[^/]+)(?:/(?P<collection>[^/]+)(?:/(?P<part>[^/]+))?)?)?",
    re.IGNORECASE,
)
NAME = re.compile(r"[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,78}[A-Za-z0-9_])?")
FINAL = ("Succeeded", "Failed")


class Call:
    """What a request is about."""

    def __init__(self, request, found, kind):
        self.request, self.kind = request, kind
        self.group, self.name, self.part = found["group"], found["name"], found["part"]
        self.collection = found["collection"]
        base = f"/subscriptions/{found['subscription']}/resourceGroups/{self.group}/providers/{kind.namespace}/{kind.type}"
        self.id = f"{base}/{self.name}" if self.name else base


class Azure(Addresses, Cloud):
    """Resource Manager with Microsoft.Network."""

    def __init__(self, timeline, tokens, settings):
        super().__init__(timeline, tokens, SETTINGS | settings)
        self.schema, self.store = Schema(), Store(timeline, self.settings)
        kinds = [LoadBalancers(self), PublicIPAddresses(self), SecurityGroups(self), Seeded(self, "publicIPPrefixes", "PublicIPPrefix"), Seeded(self, "networkInterfaces", "NetworkInterface")]
        kinds += [Seeded(self, "virtualNetworks", "VirtualNetwork", children={"subnets": "Subnet"}), Seeded(self, "virtualMachines", None, "Microsoft.Compute")]
        self.kinds = {kind.type.lower(): kind for kind in kinds}
        self.identity, self.groups = identity.Identity(self), {self.settings["resource_group"].lower()}
        self._seed()

    def _seed(self):
        group = {"id": f"{self.base()}/networkSecurityGroups/nodes"}
        subnets = [
            {"name": "nodes", "properties": {"addressPrefixes": ["10.240.0.0/16", "fd00:240::/64"], "networkSecurityGroup": group}},
            {"name": "other", "properties": {"addressPrefix": "10.241.0.0/16"}},
        ]
        self.seed("virtualNetworks", "cluster", {"addressSpace": {"addressPrefixes": ["10.240.0.0/15", "fd00:240::/48"]}, "subnets": subnets})
        self.seed("networkSecurityGroups", "nodes", {"securityRules": []})

    def base(self):
        """Where resources of Microsoft.Network are in the settings' resource group."""
        return f"/subscriptions/{self.settings['subscription']}/resourceGroups/{self.settings['resource_group']}/providers/Microsoft.Network"

    def seed(self, type_, name, properties, **fields):
        """Makes a resource past the API."""
        kind = self.kinds[type_.lower()]
        identifier = f"{self.base().replace('Microsoft.Network', kind.namespace)}/{kind.type}/{name}"
        resource = Resource(identifier, kind, {"location": self.settings["location"]} | fields | {"properties": properties})
        resource.seeded = kind.read_only
        self.store.put(resource)
        return resource

    def name(self, request):
        other = identity.name(request.path)
        if other:
            return other
        if re.search(r"/providers/Microsoft\.Network/locations/[^/]+/operation", request.path, re.IGNORECASE):
            return "operations.get"
        found = PATH.fullmatch(request.path)
        kind = self.kinds.get(found["type"].lower()) if found else None
        if kind is None:
            return "unknown"
        verb = {"PUT": "createOrUpdate", "PATCH": "updateTags", "DELETE": "delete"}.get(request.method, "get")
        if verb == "get" and not (found["part"] or (found["name"] and not found["collection"])):
            verb = "list"
        return ".".join(part for part in (kind.type, found["collection"], verb) if part)

    def throttled(self, throttle):
        return Refusal(429, "TooManyRequests", "The request is being throttled as the limit has been reached for this operation.", retry_after=throttle.retry_after or 5)

    def refuse(self, refusal):
        error = {"code": refusal.reason, "message": refusal.message, "details": refusal.more.get("details", [])}
        headers = {"WWW-Authenticate": 'Bearer authorization_uri="https://login.windows.net/"'} if refusal.status == 401 else {}
        if refusal.more.get("retry_after"):
            headers["Retry-After"] = str(refusal.more["retry_after"])
        return Answer(refusal.status, {"error": error}, headers)

    def answer(self, request, name):
        if identity.name(request.path):
            return self.identity.answer(request, name)
        if not self.settings["anonymous"] and self.tokens.subject(request.headers.get("Authorization")) is None:
            raise refused("InvalidAuthenticationToken", "The access token is invalid.", 401)
        version = request.parameter("api-version")
        if version is None:
            raise refused("MissingApiVersionParameter", "The api-version query parameter (?api-version=) is required for all requests.")
        if not re.fullmatch(r"20\d\d-\d\d-\d\d", version) or version > VERSION:
            raise refused("NoRegisteredProviderFound", f"No registered resource provider found for the API version '{version}'.")
        found = PATH.fullmatch(request.path)
        if found and found["subscription"] != self.settings["subscription"]:
            raise refused("SubscriptionNotFound", f"The subscription '{found['subscription']}' could not be found.", 404)
        if name == "operations.get":
            kind, identifier = request.path.split("/")[-2:]
            return self.store.show_operation(request, identifier, kind.lower() == "operationresults")
        if name == "unknown" or found["namespace"].lower() != self.kinds[found["type"].lower()].namespace.lower():
            raise unlike_the_cloud(f"{request.method} {request.path}")
        return self._dispatch(Call(request, found, self.kinds[found["type"].lower()]), name)

    def _dispatch(self, call, name):
        if call.group and call.group.lower() not in self.groups:
            raise refused("ResourceGroupNotFound", f"Resource group '{call.group}' could not be found.", 404)
        if call.collection:
            return self._dispatch_part(call, name)
        method = call.request.method
        if method == "GET":
            return self._get(call) if call.name else self._list(call)
        if call.kind.read_only or not call.name:
            raise unlike_the_cloud(f"{method} {call.id}")
        found = {"PUT": self._put, "DELETE": self._delete, "PATCH": self._tags}.get(method)
        if found is None:
            raise unlike_the_cloud(f"{method} {call.id}")
        return found(call, name)

    def _existing(self, call):
        resource = self.store.get(call.id)
        if resource is None:
            message = f"The Resource '{call.kind.namespace}/{call.kind.type}/{call.name}' under resource group '{call.group}' was not found. For more details please go to https://aka.ms/ARMResourceNotFoundFix"
            raise refused("ResourceNotFound", message, 404)
        return resource

    def _shown(self, resource):
        shown = resource.kind.show(resource)
        if resource.kind.model:
            self.schema.check_answer(resource.kind.model, shown)
        return shown

    def _get(self, call):
        resource = self._existing(call)
        return Answer(200, self._shown(resource), {"ETag": resource.etag})

    def _list(self, call):
        start = call.id.lower() + "/" if call.group else ""
        found = [r for r in self.store.all(call.kind.type) if r.id.lower().startswith(start)]
        return self._pages(call, [self._shown(resource) for resource in sorted(found, key=lambda r: r.id)])

    def _pages(self, call, items):
        start, size = int(call.request.parameter("$skipToken", "0")), self.settings["page"]
        answer = {"value": items[start : start + size]}
        if start + size < len(items):
            request = call.request
            answer["nextLink"] = f"http://{request.headers.get('Host')}{request.path}?api-version={request.parameter('api-version')}&$skipToken={start + size}"
        return Answer(200, answer)

    def _body(self, call, model):
        try:
            body = call.request.json()
        except ValueError:
            raise refused("InvalidRequestContent", "The request content was invalid and could not be deserialized.") from None
        return self.schema.request(model, body)

    def _check_etag(self, request, resource, etags):
        wanted, none = request.headers.get("If-Match"), request.headers.get("If-None-Match")
        if none == "*" and resource is not None:
            raise refused("PreconditionFailed", "Precondition failed.", 412)
        if wanted and wanted != "*" and wanted not in etags:
            detail = f"Etag provided in if-match header {wanted} does not match etag {resource.etag if resource else ''} of resource {resource.id if resource else request.path}."
            raise Refusal(412, "PreconditionFailed", "Precondition failed.", details=[{"code": "PreconditionFailedEtagMismatch", "message": detail}])

    def _check_free(self, resource):
        if resource.state == "Deleting":
            raise refused("AnotherOperationInProgress", f"Another operation on this or dependent resource is in progress. To retrieve status of the operation use uri of the operation. Resource: {resource.id}", 409)

    def _put(self, call, name):
        old = self.store.get(call.id)
        self._check_etag(call.request, old, [old.etag] if old else [])
        body = self._body(call, call.kind.model)
        for field in ("id", "name", "type", "etag"):
            body.pop(field, None)
        if not NAME.fullmatch(call.name):
            raise refused("InvalidResourceName", f"Resource name {call.name} is invalid.")
        if not body.get("location"):
            raise refused("LocationRequired", "The location property is required for this definition.")
        if body["location"].replace(" ", "").lower() != self.settings["location"]:
            raise refused("InvalidResourceLocation" if old else "LocationNotAvailableForResourceType", f"The resource '{call.name}' cannot be in location '{body['location']}'.", 409 if old else 400)
        if old:
            self._check_free(old)
        data = call.kind.check(old.id if old else call.id, body, old)
        if old is None:
            self._check_quota(call)
        resource = old or Resource(call.id, call.kind, data)
        return self._change(call, name, resource, data, created=old is None)

    def _change(self, call, name, resource, data, created, show=None):
        resource.data, resource.state = data, "Updating"
        self.store.put(resource)
        resource.kind.placed(resource)

        def finish():
            resource.state = "Succeeded"

        def undo():
            resource.state = "Failed"

        operation = self.store.start(resource, finish, undo, call.request, name)
        shown = (show or self._shown)(resource)
        return Answer(201 if created else 200, shown, self.store.headers(call.request, operation))

    def _check_quota(self, call):
        limit = self.quotas.get(call.kind.type)
        if limit is not None and len(self.store.all(call.kind.type)) >= limit:
            code = {"publicIPAddresses": "PublicIPCountLimitReached", "loadBalancers": "LoadBalancerCountLimitReached"}.get(call.kind.type, "QuotaExceeded")
            raise refused(code, f"Cannot create more than {limit} {call.kind.type} for this subscription in this region.")

    def _delete(self, call, name):
        resource = self.store.get(call.id)
        if resource is None:
            return Answer(204)
        self._check_etag(call.request, resource, [resource.etag])
        self._check_free(resource)
        resource.kind.refuse_deletion(resource)
        before, resource.state = resource.state, "Deleting"

        def finish():
            try:
                resource.kind.refuse_deletion(resource)
            except Refusal as refusal:
                operation.status, operation.error = "Failed", {"code": refusal.reason, "message": refusal.message}
                return undo()
            return self.store.resources.pop(resource.id.lower(), None)

        def undo():
            resource.state = before if before in FINAL else "Succeeded"

        operation = self.store.start(resource, finish, undo, call.request, name)
        return Answer(202, None, self.store.headers(call.request, operation, deleted=True))

    def _tags(self, call, _name):
        resource = self._existing(call)
        resource.data["tags"] = self._body(call, "TagsObject").get("tags", {})
        return Answer(200, self._shown(resource))

    def _dispatch_part(self, call, name):
        collection = next((known for known in call.kind.children if known.lower() == call.collection.lower()), None)
        if collection is None:
            raise unlike_the_cloud(f"{call.collection} of {call.kind.type}")
        resource, method = self._existing(call), call.request.method
        parts = self._shown(resource)["properties"][collection]
        if method == "GET" and not call.part:
            return self._pages(call, parts)
        part = next((item for item in parts if call.part and item["name"].lower() == call.part.lower()), None)
        if method == "GET":
            if part is None:
                raise refused("NotFound", f"Resource {resource.id}/{collection}/{call.part} not found.", 404)
            return Answer(200, part, {"ETag": resource.etag})
        if method not in ("PUT", "DELETE") or collection not in call.kind.writable or not call.part:
            raise unlike_the_cloud(f"{method} {collection}")
        self._check_etag(call.request, part and resource, [resource.etag])
        self._check_free(resource)
        others = [item for item in resource.data["properties"][collection] if item["name"].lower() != call.part.lower()]
        if method == "DELETE":
            if part is None:
                return Answer(204)
            resource.kind.refuse_part_deletion(resource, collection, call.part)
            answer = self._change_parts(call, name, resource, collection, others, created=False)
            operation = self.store.operations[resource.operation]
            return Answer(202, None, answer.headers | self.store.headers(call.request, operation, deleted=True))
        body = self._body(call, call.kind.children[collection]) | {"name": part["name"] if part else call.part}
        for field in ("id", "etag", "type"):
            body.pop(field, None)
        return self._change_parts(call, name, resource, collection, [*others, body], created=part is None)

    def _change_parts(self, call, name, resource, collection, items, created):
        data = resource.data | {"properties": resource.data["properties"] | {collection: items}}
        data = resource.kind.check(resource.id, data, resource)

        def show(changed):
            return next((item for item in self._shown(changed)["properties"][collection] if item["name"].lower() == call.part.lower()), None)

        return self._change(call, name, resource, data, created, show)

    def snapshot(self):
        return {r.id.replace(self.base() + "/", ""): _plain(r.kind.show(r)) for r in self.store.resources.values() if not r.seeded}

    def put(self, path, body):
        """/test/groups, and resources: {"type", "name", "properties"}."""
        match path:
            case "groups":
                self.groups.add(body["name"].lower())
            case "resources":
                for fields in body if isinstance(body, list) else [body]:
                    self.seed(fields.pop("type"), fields.pop("name"), fields.pop("properties", {}), **fields)
            case _:
                raise KeyError(path)


def _plain(value):
    """Without identifiers, versions and states."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if key not in ("etag", "resourceGuid", "provisioningState")}
    return [_plain(item) for item in value] if isinstance(value, list) else value
