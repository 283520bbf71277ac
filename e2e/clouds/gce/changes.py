# SPDX-License-Identifier: Apache-2.0
"""How resources come, change and go: what is alike for all kinds."""

import re

from core.messages import Answer, Refusal

from .discovery import invalid
from .kinds import merge, required, unlike_the_cloud
from .store import Resource, fingerprint, link, timestamp

NAME = r"[a-z](?:[-a-z0-9]{0,61}[a-z0-9])?"
UUID = re.compile(r"(?!0{8}-0{4}-0{4}-0{4}-0{12})[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
# The fingerprint of no labels.
NO_LABELS = "42WmSpB8rSM="


class Changes:
    """Part of the cloud: `store`, `settings`, `quotas` and `kind_of` are its own."""

    def insert(self, call, kind):
        """insert."""
        body = {name: value for name, value in call.body.items() if name not in kind.ignored}
        name = body.get("name")
        if not name:
            raise required("resource.name")
        if not re.fullmatch(NAME, name):
            raise invalid("resource.name", name, f"Must be a match of regex '{NAME}'")
        if kind.read_only:
            raise unlike_the_cloud(call.method.id)
        return self._once(call, lambda: self._create(call, kind, name, body))

    def _create(self, call, kind, name, body):
        path = f"{call.scope}/{kind.collection}/{name}"
        if path in self.store.resources:
            raise Refusal(409, "alreadyExists", f"The resource '{path}' already exists")
        body.pop("fingerprint", None)
        data = kind.insert(call.scope, body)
        self._check_quota(call, kind)
        data |= {"kind": self.kind_of(kind.schema), "id": self.store.next_id(), "creationTimestamp": timestamp(), "name": name, "selfLink": link(path)}
        place = call.scope.split("/")[2]
        if place in ("regions", "zones"):
            data[place[:-1]] = link(call.scope)
        resource = Resource(path, kind, self._sealed(kind, data))
        self.store.resources[path] = resource

        def begin():
            resource.visible = True

        def finish():
            resource.ready, resource.operation = True, None

        def undo():
            del self.store.resources[path]

        return self._start(call, resource, "insert", begin, finish, undo)

    def _sealed(self, kind, data):
        """With fingerprints."""
        data = {name: value for name, value in data.items() if name not in ("fingerprint", "labelFingerprint")}
        if kind.labelled:
            data["labelFingerprint"] = fingerprint(data["labels"]) if data.get("labels") else NO_LABELS
        if kind.fingerprinted:
            data["fingerprint"] = fingerprint({k: v for k, v in data.items() if k not in ("kind", "id", "creationTimestamp", "selfLink")})
        return data

    def delete(self, call, resource):
        """delete."""
        def start():
            self.store.refuse_if_busy(resource)
            resource.kind.refuse_deletion(resource)
            resource.leaving = True

            def finish():
                resource.kind.refuse_deletion(resource)
                del self.store.resources[resource.path]

            def undo():
                resource.leaving, resource.operation = False, None

            return self._start(call, resource, "delete", lambda: None, finish, undo)

        return self._once(call, start)

    def patch(self, call, resource):
        """patch: a JSON merge patch."""
        self._check_fingerprint(call, resource)
        body = {name: value for name, value in call.body.items() if name not in resource.kind.ignored and name not in ("fingerprint", "labelFingerprint")}
        allowed = resource.kind.patchable
        for name, value in body.items():
            if allowed is not None and name not in allowed and value != resource.data.get(name):
                raise invalid(f"resource.{name}", value, "The field cannot be changed.")
        action = "compute.firewalls.patch" if resource.kind.collection == "firewalls" else "patch"
        return self.update(call, resource, action, merge(resource.data, body))

    def replace(self, call, resource):
        """update: the whole content."""
        if resource.kind.fingerprinted and "fingerprint" not in call.body:
            raise Refusal(412, "conditionNotMet", "Fingerprint is required for an update.")
        self._check_fingerprint(call, resource)
        kept = ("kind", "id", "creationTimestamp", "name", "selfLink", "region", "zone", "labels")
        body = {name: value for name, value in call.body.items() if name not in kept}
        return self.update(call, resource, "update", {name: value for name, value in resource.data.items() if name in kept} | body)

    def _check_fingerprint(self, call, resource):
        if call.body.get("name", resource.name) != resource.name:
            raise invalid("resource.name", call.body["name"], "The name of a resource cannot be changed.")
        if call.body.get("fingerprint") not in (None, resource.data.get("fingerprint")):
            raise Refusal(412, "conditionNotMet", "Invalid fingerprint.")

    def set_labels(self, call, resource):
        """setLabels."""
        if call.body.get("labelFingerprint") != resource.data.get("labelFingerprint"):
            raise Refusal(412, "conditionNotMet", "Labels fingerprint either invalid or resource labels have changed")
        data = resource.data | {"labels": call.body.get("labels", {})}
        return self.update(call, resource, "setLabels", data, checked=True)

    def update(self, call, resource, action, data, checked=False):
        """Changes the content of a resource, when the operation ends."""

        def start():
            self.store.refuse_if_busy(resource)
            changed = data if checked else resource.kind.change(resource, data)
            resource.changing = self._sealed(resource.kind, changed)

            def finish():
                # What it names may have gone meanwhile.
                for path in resource.kind.references(resource.changing):
                    self.store.visible(path)
                resource.data, resource.changing, resource.operation = resource.changing, None, None

            def undo():
                resource.changing = resource.operation = None

            return self._start(call, resource, action, lambda: None, finish, undo)

        return self._once(call, start)

    def operate(self, call, resource, action, finish):
        """An operation that the kind carries out itself, beside others on the same resource."""
        if resource.leaving or not resource.ready:
            self.store.refuse_if_busy(resource)
        return self._once(call, lambda: self._start(call, resource, action, lambda: None, finish, lambda: None, alone=False))

    def _start(self, call, resource, action, begin, finish, undo, alone=True):
        fault, delay = call.request.fault, self.settings["delays"].get(call.method.id, self.settings["delay"])
        error = None
        if fault and fault.get("operation_error"):
            wanted = fault.get("operation_error")
            error = Refusal(wanted.get("status", 503), wanted.get("code", "INTERNAL_ERROR"), wanted.get("message", "Injected by a test."))
        if fault:
            delay = fault.get("operation_delay") or delay
        operation = self.store.start(call.scope, action, resource, delay, begin, finish, undo, error)
        if alone:
            resource.operation = operation.path
        warnings = getattr(resource.kind, "warnings", lambda data: [])(resource.changing or resource.data)
        if warnings and action != "delete":
            operation.data["warnings"] = warnings
        return operation

    def _once(self, call, start):
        """Starts an operation, or finds the one that a request with the same requestId started."""
        wanted = call.query.get("requestId")
        if wanted is None:
            return Answer(200, self.store.show(start()))
        if not UUID.fullmatch(wanted):
            raise invalid("requestId", wanted, "Must be a valid, non-zero UUID.")
        key = (call.request.method, call.request.path, wanted)
        if key not in self.store.requests:
            self.store.requests[key] = start()
        return Answer(200, self.store.show(self.store.requests[key]))

    def _check_quota(self, call, kind):
        limit = self.quotas.get(kind.metric)
        place = call.scope.split("/")
        used = sum(r.path.startswith("/".join(place[:3])) for r in self.store.all(kind.collection))
        if limit is not None and used >= limit:
            where = f" in region {place[3]}" if place[2] == "regions" else ""
            raise Refusal(403, "quotaExceeded", f"Quota '{kind.metric}' exceeded.  Limit: {float(limit)}{where or ' globally'}.")
