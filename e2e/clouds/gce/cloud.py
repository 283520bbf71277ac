# SPDX-License-Identifier: Apache-2.0
"""The stand-in of Compute Engine: who may call, which method a request calls, and what all kinds of resources do alike."""

from core.messages import Answer, Later, Refusal
from core.server import Cloud

from . import identity
from .addresses import Addresses
from .backend_services import BackendServices
from .calls import Call
from .changes import Changes
from .discovery import Api, invalid
from .endpoint_groups import NetworkEndpointGroups
from .filters import compile_filter
from .firewalls import Firewalls
from .forwarding_rules import ForwardingRules
from .health_checks import HealthChecks
from .kinds import Seeded, unlike_the_cloud
from .pools import Pools
from .seeds import Seeds
from .store import Store, link, not_found

# For how long `wait` blocks at most.
WAIT_SECONDS = 120
# Discovery names of collections whose path has another.
COLLECTIONS = {"regionBackendServices": "backendServices", "regionHealthChecks": "healthChecks"}
SETTINGS = {
    "project": "test-project", "region": "us-central1", "zones": ["us-central1-a", "us-central1-b", "us-central1-c"], "cluster": "test",
    "service_account": "steerage@test-project.iam.gserviceaccount.com",
    "pool": "projects/123456789012/locations/global/workloadIdentityPools/test/providers/test",
    # Seconds of an operation; those of single methods; whether calls without a token are served; whether a used address can be released.
    "delay": 0.0, "delays": {}, "anonymous": False, "release_used_addresses": True,
    # What getHealth says of endpoints of which no prober has said anything.
    "external_range": "198.18.0.0/16", "unprobed": "HEALTHY",
}  # fmt: skip


class Gce(Changes, Cloud):
    """Compute Engine."""

    def __init__(self, timeline, tokens, settings):
        super().__init__(timeline, tokens, SETTINGS | settings)
        self.api, self.store = Api(), Store(timeline)
        self.pools = Pools(self.store, self.settings["external_range"])
        self.kinds = {}
        for kind in (Addresses, BackendServices, Firewalls, ForwardingRules, HealthChecks, NetworkEndpointGroups):
            self.kinds[kind.collection] = kind(self)
        for names in (("instances", "instance", "Instance"), ("networks", "network", "Network"), ("regions", "region", "Region"), ("subnetworks", "subnetwork", "Subnetwork"), ("zones", "zone", "Zone")):
            self.kinds[names[0]] = Seeded(self, *names)
        self.projects, self.hosts, self.health = set(), {}, {}
        self.seeds, self.identity = Seeds(self), identity.Identity(self)
        self.seeds.project(self.settings["project"])

    def kind_of(self, schema):
        """`compute#forwardingRule`."""
        return self.api.schemas[schema]["properties"]["kind"]["default"]

    def health_of(self, zone, instance, rule=None):
        """State and weight of an endpoint, as a prober of this forwarding rule found them, or else a test set them."""
        known = self.health.get(f"{zone}/{instance}", {"state": self.settings["unprobed"]})
        return self.health.get(f"{rule}/{zone}/{instance}", known)

    def name(self, request):
        other = identity.name(request.path)
        method = None if other else self.api.route(request.method, request.path)[0]
        return other or (method.id if method else "unknown")

    def throttled(self, throttle):
        status = throttle.status or 403
        message = "Quota exceeded for quota metric 'Queries' and limit 'Queries per minute' of service 'compute.googleapis.com' for consumer 'project_number:123456789012'."
        return Refusal(status, "rateLimitExceeded", message, retry_after=throttle.retry_after)

    def refuse(self, refusal):
        domain = "usageLimits" if refusal.reason in ("rateLimitExceeded", "quotaExceeded") else "global"
        error = {"code": refusal.status, "message": refusal.message, "errors": [{"message": refusal.message, "domain": domain, "reason": refusal.reason}]}
        headers = {}
        if refusal.status == 401:
            error["status"] = "UNAUTHENTICATED"
            headers["WWW-Authenticate"] = 'Bearer realm="https://accounts.google.com/"'
        if refusal.more.get("retry_after"):
            headers["Retry-After"] = str(refusal.more["retry_after"])
        return Answer(refusal.status, {"error": error}, headers)

    def answer(self, request, name):
        if identity.name(request.path):
            return self.identity.answer(request, name)
        method, values = self.api.route(request.method, request.path)
        if method is None:
            raise Refusal(404, "notFound", f"The requested URL {request.path} was not found on this server.")
        if not self.settings["anonymous"] and self.tokens.subject(request.headers.get("Authorization")) is None:
            raise Refusal(401, "authError", "Request had invalid authentication credentials. Expected OAuth 2 access token.")
        self.api.check_path(method, values)
        query = self.api.query(method, request.query)
        call = Call(request, method, values, query, self._body(request, method))
        self._check_place(call)
        answer = self._dispatch(call)
        self.api.check_answer(method.response, answer.body)
        return answer

    def _body(self, request, method):
        if method.request is None:
            return None
        try:
            body = request.json()
        except ValueError:
            raise Refusal(400, "parseError", "Parse Error") from None
        return self.api.body(method.request, body, patch=method.action == "patch")

    def _check_place(self, call):
        if call.project not in self.projects:
            raise not_found(f"projects/{call.project}")
        kind, _, name = "/".join(call.scope.split("/")[2:]).partition("/")
        if name and call.method.collection not in ("regions", "zones") and call.scope not in self.store.resources:
            raise invalid(kind[:-1], name, f"Unknown {kind[:-1]}.")

    def _dispatch(self, call):
        collection, action = call.method.collection, call.method.action
        if collection.endswith("Operations"):
            return self._operation(call, action)
        if collection == "projects":
            return self._project(call, action)
        kind = self.kinds.get(COLLECTIONS.get(collection, collection))
        if collection == "backendServices":
            # Global ones are for proxies.
            kind = None
        if action in ("list", "aggregatedList"):
            return self._list(call, kind, action)
        if kind is None:
            if action in ("get", "delete"):
                # Nothing of a kind exists that cannot be made.
                raise not_found(f"{call.scope}/{COLLECTIONS.get(collection, collection)}/{call.name}")
            raise unlike_the_cloud(call.method.id)
        if action == "insert":
            return self.insert(call, kind)
        resource = self.store.visible(call.scope if collection in ("regions", "zones") else f"{call.scope}/{kind.collection}/{call.name}")
        if action == "get":
            return Answer(200, kind.show(resource))
        if kind.read_only:
            raise unlike_the_cloud(call.method.id)
        common = {"delete": self.delete, "patch": self.patch, "update": self.replace, "setLabels": self.set_labels}
        found = common.get(action) or getattr(kind, "actions", {}).get(action)
        if found is None:
            raise unlike_the_cloud(call.method.id)
        return found(call, resource)

    def _list(self, call, kind, action):
        schema = self.api.schemas[call.method.response]["properties"]
        collection = kind.collection if kind else None
        fields = self.api.schemas[kind.schema]["properties"] if kind else ()
        passes = compile_filter(call.query.get("filter"), fields) if kind else lambda item: True
        order = call.query.get("orderBy", "name")
        if order not in ("name", "creationTimestamp desc"):
            raise invalid("orderBy", order, "Only name and creationTimestamp desc are supported.")
        start = f"projects/{call.project}/" if action == "aggregatedList" or collection in ("regions", "zones") else f"{call.scope}/{collection}/"
        found = [r for r in self.store.resources.values() if kind and r.kind is kind and r.visible and r.path.startswith(start)]
        found = [(r, kind.show(r)) for r in sorted(found, key=lambda r: r.path)]
        page, token = call.page([(r, item) for r, item in found if passes(item)])
        answer = {"kind": schema["kind"]["default"], "id": f"{call.scope}/{call.method.segments[-1]}", "selfLink": link(f"{call.scope}/{call.method.segments[-1]}")}
        if token:
            answer["nextPageToken"] = token
        if action == "list":
            return Answer(200, answer | ({"items": [item for _, item in page]} if page else {}))
        return Answer(200, answer | {"items": self._by_scope(call, [(r.path, item) for r, item in page])})

    def _by_scope(self, call, page):
        """The items of an aggregated list."""
        start, field = f"projects/{call.project}/", call.method.segments[-1]
        scopes = {}
        for path, item in page:
            scopes.setdefault("/".join(path.split("/")[2:-2]), []).append(item)
        empty = sorted({"/".join(p.split("/")[2:]) for p in self.store.resources if p.startswith(start) and len(p.split("/")) == 4} - set(scopes))
        items = {scope: {field: of_scope} for scope, of_scope in scopes.items()}
        for scope in empty:
            data = [{"key": "scope", "value": scope}]
            items[scope] = {"warning": {"code": "NO_RESULTS_ON_PAGE", "message": "There are no results for scope '" + scope + "' on this page.", "data": data}}
        return items

    def _operation(self, call, action):
        if action in ("list", "aggregatedList"):
            start = f"projects/{call.project}/" if action == "aggregatedList" else f"{call.scope}/operations/"
            fields = self.api.schemas["Operation"]["properties"]
            passes = compile_filter(call.query.get("filter"), fields)
            found = [(path, self.store.show(o)) for path, o in self.store.operations.items() if path.startswith(start)]
            page, token = call.page([(path, item) for path, item in found if passes(item)])
            more = {"nextPageToken": token} if token else {}
            kind = self.api.schemas[call.method.response]["properties"]["kind"]["default"]
            if action == "aggregatedList":
                place = f"projects/{call.project}/aggregated/operations"
                return Answer(200, {"kind": kind, "id": place, "selfLink": link(place), "items": self._by_scope(call, page)} | more)
            answer = {"kind": kind, "id": f"{call.scope}/operations", "selfLink": link(f"{call.scope}/operations")}
            return Answer(200, answer | ({"items": [item for _, item in page]} if page else {}) | more)
        path = f"{call.scope}/operations/{call.name}"
        operation = self.store.operations.get(path)
        if operation is None:
            raise not_found(path)
        if action == "delete":
            del self.store.operations[path]
            return Answer(204)
        if action == "wait" and not operation.done:
            call.request.until = until = getattr(call.request, "until", self.timeline.now() + WAIT_SECONDS)
            if until > self.timeline.now():
                raise Later(max(0.001, min(operation.ends, until) - self.timeline.now()))
        return Answer(200, self.store.show(operation))

    def _project(self, call, action):
        name = call.project
        project = {"kind": "compute#project", "name": name, "id": "123456789012", "selfLink": link(f"projects/{name}"), "defaultNetworkTier": "PREMIUM"}
        if action == "get":
            return Answer(200, project)
        if action == "getXpnHost":
            host = self.hosts.get(name)
            return Answer(200, {"kind": "compute#project", "name": host, "selfLink": link(f"projects/{host}")} if host else {})
        raise unlike_the_cloud(call.method.id)

    def snapshot(self):
        content = self.store.snapshot()
        for resource in self.store.all("networkEndpointGroups"):
            content[resource.path]["endpoints"] = sorted(resource.data["endpoints"])
        return content

    def control(self, method, path, body):
        """Also DELETE of /test/instances/ZONE/NAME."""
        if method == "DELETE" and path.startswith("instances/"):
            return self.seeds.remove_instance(*path.split("/")[1:]) or {}
        return super().control(method, path, body)

    def put(self, path, body):
        """/test/health, instances, projects, networks and subnetworks."""
        match path:
            case "health":
                self.health |= body
            case "instances":
                for fields in body if isinstance(body, list) else [body]:
                    self.seeds.instance(**fields)
            case "projects":
                self.seeds.project(body["name"])
                if body.get("host"):
                    self.hosts[body["name"]] = body["host"]
            case "networks":
                self.seeds.network(**body)
            case "subnetworks":
                self.seeds.subnetwork(**body)
            case _:
                raise KeyError(path)
