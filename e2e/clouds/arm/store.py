# SPDX-License-Identifier: Apache-2.0
"""Resources and operations of a subscription. A PUT takes effect at once, and is shown as `Updating` until its operation ends; then the
etag changes once more. Another PUT meanwhile cancels that operation. Identifiers are compared without case, as Azure does."""

import uuid

from core.messages import Answer, Refusal

# Seconds between questions that the real API asks for.
RETRY_AFTER = 10


def new_etag():
    """A new version of a resource."""
    return f'W/"{uuid.uuid4()}"'


def refused(code, message, status=400):
    """A refusal in Azure's words."""
    return Refusal(status, code, message)


def not_referenced(identifier, by):
    """A reference to nothing."""
    message = f"Resource {identifier} referenced by resource {by} was not found. Please make sure that the referenced resource exists, and that both resources are in the same region."
    return refused("InvalidResourceReference", message)


def not_provisioned(message):
    """What a resource refers to is not ready."""
    return Refusal(429, "RetryableError", "A retryable error occurred.", details=[{"code": "ReferencedResourceNotProvisioned", "message": message}])


class Resource:
    """A resource: what the client put, its etag and state."""

    def __init__(self, identifier, kind, data):
        self.id, self.kind, self.data = identifier, kind, data
        self.guid, self.etag = str(uuid.uuid4()), new_etag()
        self.state, self.operation = "Succeeded", None
        # Made by a test, not through the API.
        self.seeded = False
        # What the cloud chose, such as an address.
        self.chosen = {}

    @property
    def name(self):
        """Its name."""
        return self.id.split("/")[-1]


class Operation:
    """A change that takes time."""

    def __init__(self, identifier):
        self.id, self.status, self.error = identifier, "InProgress", None


class Store:
    """Everything, by identifier."""

    def __init__(self, timeline, settings):
        self.timeline, self.settings = timeline, settings
        self.resources, self.operations = {}, {}

    def get(self, identifier):
        """A resource, or None."""
        return self.resources.get(identifier.lower())

    def put(self, resource):
        """Adds one."""
        self.resources[resource.id.lower()] = resource

    def all(self, kind):
        """All of a kind."""
        return [resource for resource in self.resources.values() if resource.kind.type == kind]

    def start(self, resource, finish, undo, request, call):
        """Starts an operation on a resource, and cancels that which is under way."""
        earlier = self.operations.get(resource.operation)
        if earlier and earlier.status == "InProgress":
            earlier.status = "Canceled"
            earlier.error = {"code": "CanceledAndSupersededDueToAnotherOperation", "message": f"Operation was canceled and superseded by another operation on resource {resource.id}."}
        operation = Operation(str(uuid.uuid4()))
        self.operations[operation.id] = operation
        resource.operation, resource.etag = operation.id, new_etag()
        fault = request.fault
        delay = (fault and fault.get("operation_delay")) or self.settings["delays"].get(call, self.settings["delay"])
        wanted = fault and fault.get("operation_error")

        def end():
            if operation.status != "InProgress":
                return
            if wanted:
                operation.status = "Failed"
                operation.error = {"code": wanted.get("code", "InternalServerError"), "message": wanted.get("message", "Injected by a test.")}
                undo()
            else:
                operation.status = "Succeeded"
                finish()
            resource.etag = new_etag()

        self.timeline.at(self.timeline.now() + delay, end)
        return operation

    def headers(self, request, operation, deleted=False):
        """Where the operation is."""
        base = f"http://{request.headers.get('Host')}/subscriptions/{self.settings['subscription']}/providers/Microsoft.Network/locations/{self.settings['location']}"
        version = f"?api-version={request.parameter('api-version')}"
        headers = {"Azure-AsyncOperation": f"{base}/operations/{operation.id}{version}", "Azure-AsyncNotification": "Enabled"}
        headers["Retry-After"] = str(self.settings["retry_after"])
        return headers | ({"Location": f"{base}/operationResults/{operation.id}{version}"} if deleted else {})

    def show_operation(self, request, identifier, result):
        """Answers questions for an operation, at either of its URLs."""
        operation = self.operations.get(identifier)
        if operation is None:
            raise refused("ResourceNotFound", f"The operation {identifier} was not found.", 404)
        if result:
            if operation.status == "InProgress":
                return Answer(202, None, self.headers(request, operation, deleted=True))
            return Answer(204) if operation.status == "Succeeded" else Answer(400, {"error": operation.error})
        more = {"Retry-After": str(self.settings["retry_after"])} if operation.status == "InProgress" else {}
        return Answer(200, {"status": operation.status} | ({"error": operation.error} if operation.error else {}), more)
