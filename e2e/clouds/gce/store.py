# SPDX-License-Identifier: Apache-2.0
"""Resources and operations of the projects.

A resource that is being created has its name from the first moment, is seen once its operation runs, and is usable when that is done. One
that changes or goes accepts no other change until then: resourceNotReady, as the real API says. Effects happen when the operation ends.
"""

import base64
import hashlib
import itertools
import json
import re
from datetime import UTC, datetime, timedelta

from core.messages import Refusal

ROOT = "https://www.googleapis.com/compute/v1/"
# Clients that are told of another endpoint, as glbc is, write that into references.
HOSTS = re.compile(r"(?:https://(?:www|compute)\.googleapis\.com|http://127\.0\.0\.1:\d+)/(?:compute/)?(?:v1|beta|alpha)/(?P<path>projects/.+)")
VOLATILE = ("id", "creationTimestamp", "fingerprint", "labelFingerprint", "selfLink", "selfLinkWithId", "kind")


def timestamp(ago=0.0):
    """The time as the API writes it, so many seconds ago."""
    return (datetime.now(UTC) - timedelta(hours=8, seconds=ago)).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "-08:00"


def fingerprint(content):
    """A hash of the content, in the API's form."""
    text = json.dumps(content, sort_keys=True).encode()
    return base64.b64encode(hashlib.sha256(text).digest()[:8]).decode()


def link(path):
    """The URL of a path."""
    return ROOT + path


def not_found(path):
    """No such resource."""
    return Refusal(404, "notFound", f"The resource '{path}' was not found")


class Resource:
    """A resource: `data` is what clients see but for computed fields; `changing` is what it will be when its operation ends."""

    def __init__(self, path, kind, data):
        self.path, self.kind, self.data = path, kind, data
        self.changing = None
        self.operation = None
        self.visible = self.ready = self.leaving = False
        # Made by a test, not through the API.
        self.seeded = False

    @property
    def name(self):
        """Its name."""
        return self.data["name"]


class Operation:
    """A change that takes time."""

    def __init__(self, path, target, data, starts, ends):
        self.path, self.target, self.data = path, target, data
        self.starts, self.ends = starts, ends
        self.done = False


class Store:
    """Everything, by path: `projects/P/regions/R/forwardingRules/N`."""

    def __init__(self, timeline):
        self.timeline = timeline
        self.resources, self.operations, self.requests = {}, {}, {}
        self._ids = itertools.count(1_000_000_000_000_000_001, 37)

    def next_id(self):
        """An identifier of the server's."""
        return str(next(self._ids))

    def all(self, collection):
        """All resources of a collection, those that are being created too."""
        return [resource for resource in self.resources.values() if resource.path.split("/")[-2] == collection]

    def visible(self, path):
        """The resource at this path, if clients can see it."""
        resource = self.resources.get(path)
        if resource is None or not resource.visible:
            raise not_found(path)
        return resource

    def resolve(self, reference, field, scope, collections):
        """The resource that a field names by URL or path. It has to be in one of these collections and ready for use."""
        found = HOSTS.fullmatch(reference)
        path = found["path"] if found else reference
        project, region = scope.split("/")[1], "/".join(scope.split("/")[2:])
        if path.startswith(("global/", "regions/", "zones/")):
            path = f"projects/{project}/{path}"
        elif re.fullmatch(r"[a-z][-a-z0-9]*", path) and "addresses" in collections:
            path = f"projects/{project}/{region}/addresses/{path}"
        if not re.fullmatch(r"projects/[^/]+/(?:global|regions/[^/]+|zones/[^/]+)/[^/]+/[^/]+", path):
            raise Refusal(400, "invalid", f"Invalid value for field '{field}': '{reference}'. The URL is malformed.")
        if path.split("/")[-2] not in collections:
            raise Refusal(400, "invalid", f"Invalid value for field '{field}': '{reference}'. Unexpected resource collection '{path.split('/')[-2]}'.")
        resource = self.visible(path)
        if resource.leaving or not resource.ready:
            raise Refusal(400, "resourceNotReady", f"The resource '{path}' is not ready")
        return resource

    def users(self, path):
        """Which resources use this one, those that are being created or changed too."""

        def uses(resource):
            return any(path in resource.kind.references(data) for data in (resource.data, resource.changing) if data)

        return [resource for resource in self.resources.values() if resource.path != path and uses(resource)]

    def refuse_if_used(self, resource):
        """Refuses the deletion of what others use."""
        users = self.users(resource.path)
        if users:
            noun, user = resource.kind.noun, users[0].path
            raise Refusal(400, "resourceInUseByAnotherResource", f"The {noun} resource '{resource.path}' is already being used by '{user}'")

    def refuse_if_busy(self, resource):
        """Refuses the change of what is already changing."""
        if resource.operation is not None:
            raise Refusal(400, "resourceNotReady", f"The resource '{resource.path}' is not ready")

    def start(self, scope, action, target, delay, begin, finish, undo, error=None):
        """Starts an operation. A Refusal that `finish` raises is the operation's error, as `error` is if there is one; then `undo` runs."""
        now = self.timeline.now()
        name = f"operation-{self.next_id()}"
        path = f"{scope}/operations/{name}"
        data = {
            "kind": "compute#operation", "id": self.next_id(), "name": name, "operationType": action, "insertTime": timestamp(),
            "user": "steerage@example.com", "selfLink": link(path), "targetLink": link(target.path), "targetId": target.data["id"],
        }  # fmt: skip
        place = scope.split("/")[2]
        if place in ("regions", "zones"):
            data[place[:-1]] = link(scope)
        operation = Operation(path, target.path, data, now + delay / 5, now + delay)
        self.operations[path] = operation

        def run():
            data["startTime"] = timestamp(self.timeline.late())
            begin()

        def end():
            operation.done = True
            data["endTime"] = timestamp(self.timeline.late())
            try:
                if error:
                    raise error
                finish()
            except Refusal as refusal:
                undo()
                code = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", refusal.reason).upper()
                data["error"] = {"errors": [{"code": code, "message": refusal.message}]}
                data["httpErrorStatusCode"] = refusal.status
                data["httpErrorMessage"] = {400: "BAD REQUEST", 403: "FORBIDDEN", 404: "NOT FOUND", 409: "CONFLICT"}.get(refusal.status, "SERVICE UNAVAILABLE")

        self.timeline.at(operation.starts, run)
        self.timeline.at(operation.ends, end)
        return operation

    def show(self, operation):
        """The operation as clients see it."""
        running = "startTime" in operation.data or operation.starts == operation.ends
        status = "DONE" if operation.done else "RUNNING" if running else "PENDING"
        return operation.data | {"status": status, "progress": 100 if operation.done else 0}

    def snapshot(self):
        """Content of everything that was made through the API, by path."""
        made = [resource for resource in self.resources.values() if not resource.seeded]
        return {r.path: {k: v for k, v in r.kind.show(r).items() if k not in VOLATILE} for r in made}
