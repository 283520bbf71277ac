# SPDX-License-Identifier: Apache-2.0
"""What Google's clients do not show of the stand-in: strictness, faults, throttling, repeated requests, and shapes of answers as they were
recorded from the real API (`_http.log` files of k8s-config-connector)."""

import http.client
import unittest
import urllib.error
from concurrent.futures import ThreadPoolExecutor

from standin import PROJECT, REGION, ZONE, StandIn, link

REGIONAL = f"regions/{REGION}"
CHECK = {"name": "check", "type": "HTTP", "httpHealthCheck": {"port": 10256}}
# Fields of an operation, as recorded: while it runs, and what is added when it is done.
RUNNING = {"id", "insertTime", "kind", "name", "operationType", "progress", "region", "selfLink", "startTime", "status", "targetId", "targetLink", "user"}
DONE = RUNNING | {"endTime"}
# Fields of resources, as recorded after an insert with little in it.
RECORDED = {
    "healthChecks": {"checkIntervalSec", "creationTimestamp", "healthyThreshold", "id", "kind", "name", "region", "selfLink", "tcpHealthCheck", "timeoutSec", "type", "unhealthyThreshold"},
    "addresses": {"address", "addressType", "creationTimestamp", "description", "id", "kind", "labelFingerprint", "name", "networkTier", "region", "selfLink", "status"},
    "firewalls": {"allowed", "creationTimestamp", "direction", "disabled", "id", "kind", "name", "network", "priority", "selfLink"},
    "backendServices": {"affinityCookieTtlSec", "connectionDraining", "creationTimestamp", "description", "fingerprint", "id", "kind", "loadBalancingScheme", "name", "protocol", "region", "selfLink", "sessionAffinity", "timeoutSec"},
    "forwardingRules": {"IPAddress", "IPProtocol", "creationTimestamp", "fingerprint", "id", "kind", "labelFingerprint", "loadBalancingScheme", "name", "networkTier", "portRange", "region", "selfLink"},
    "subnetworks": {"creationTimestamp", "fingerprint", "gatewayAddress", "id", "ipCidrRange", "kind", "name", "network", "privateIpGoogleAccess", "privateIpv6GoogleAccess", "purpose", "region", "selfLink", "stackType"},
}  # fmt: skip


class Api(unittest.TestCase):
    """A stand-in without delays for each test."""

    settings = {"anonymous": True}

    def setUp(self):
        self.standin = StandIn(**self.settings)
        self.addCleanup(self.standin.stop)

    def refused(self, method, path, body=None):
        """Status, reason and message."""
        status, answer = self.standin.compute(method, path, body)
        self.assertGreaterEqual(status, 400, answer)
        return status, answer["error"]["errors"][0]["reason"], answer["error"]["message"]

    def make(self, path, body):
        """Creates a resource, and returns what the operation becomes."""
        status, answer = self.standin.compute("POST", path, body)
        self.assertEqual(200, status, answer)
        return self.standin.done(answer)


class Strictness(Api):
    """Whatever the schema does not have is refused."""

    def test_bodies(self):
        for change, status, reason, message in (
            ({"colour": "red"}, 400, "badRequest", 'Unknown name "colour": Cannot find field'),
            ({"httpHealthCheck": {"path": "/"}}, 400, "badRequest", "Unknown name \"path\" at 'resource.httpHealthCheck'"),
            ({"checkIntervalSec": "often"}, 400, "badRequest", "Invalid value at 'resource.checkIntervalSec' .TYPE_INT32., \"often\""),
            ({"checkIntervalSec": True}, 400, "badRequest", "TYPE_INT32"),
            ({"description": 7}, 400, "badRequest", "TYPE_STRING"),
            ({"type": "SMTP"}, 400, "invalid", "Must be one of"),
            ({"name": "Check"}, 400, "invalid", "Must be a match of regex"),
            ({"name": None}, 400, "required", "'resource.name' not specified"),
            ({"timeoutSec": 9}, 400, "invalid", "less than or equal to the check interval"),
            ({"checkIntervalSec": 301}, 400, "invalid", "between 1 and 300"),
            ({"tcpHealthCheck": {}}, 400, "invalid", "Only httpHealthCheck"),
        ):
            with self.subTest(change):
                found = self.refused("POST", f"{REGIONAL}/healthChecks", CHECK | change)
                self.assertEqual((status, reason), found[:2])
                self.assertRegex(found[2], message)
        self.assertEqual({}, self.standin.test("GET", "snapshot"))

    def test_paths_and_parameters(self):
        for path, status, message in (
            ("regions/moon-1/healthChecks", 400, "Unknown region"),
            (f"{REGIONAL}/healthchecks", 404, "was not found"),
            (f"{REGIONAL}/addresses?colour=red", 400, 'Unknown name "colour": Cannot bind query parameter'),
            (f"{REGIONAL}/addresses?maxResults=many", 400, "TYPE_UINT32"),
            (f"{REGIONAL}/addresses?alt=proto", 400, "alt"),
            (f"{REGIONAL}/addresses?filter=name%20%3E%20b", 400, "Invalid list filter expression"),
            (f"{REGIONAL}/addresses?filter=colour%20%3D%20red", 400, "Invalid list filter expression"),
            (f"{REGIONAL}/addresses?filter=(name%20eq%20a)(region%20%3D%20b)", 400, "Invalid list filter expression"),
            (f"{REGIONAL}/addresses/UPPER", 400, "Must be a match of regex"),
        ):
            with self.subTest(path):
                found = self.refused("GET", path)
                self.assertEqual(status, found[0])
                self.assertRegex(found[2], message)
        status, answer = self.standin.compute("GET", f"{REGIONAL}/addresses?$alt=json;enum-encoding=int&$apiVersion=2026-11-01&prettyPrint=false&alt=json&quotaUser=me")
        self.assertEqual(200, status, answer)
        self.assertEqual(404, self.standin.call("GET", "/compute/v1/projects/other-project/zones")[0])
        self.assertEqual(200, self.standin.call("GET", f"/compute/beta/projects/{PROJECT}/zones")[0])

    def test_fields_of_the_server_are_ignored(self):
        self.make(f"{REGIONAL}/healthChecks", CHECK | {"id": "1", "creationTimestamp": "never", "region": "moon", "selfLink": "x", "kind": "y"})
        made = self.standin.compute("GET", f"{REGIONAL}/healthChecks/check")[1]
        self.assertEqual((link(REGIONAL), "compute#healthCheck"), (made["region"], made["kind"]))

    def test_what_the_stand_in_does_not_know_is_an_error_of_its_own(self):
        self.assertEqual((501, "notImplemented"), self.refused("POST", "global/backendServices", {"name": "x"})[:2])
        self.assertEqual((200, "compute#backendServiceList"), ((answer := self.standin.compute("GET", "global/backendServices"))[0], answer[1]["kind"]))

    def test_resources(self):
        base = {"name": "x", "networkEndpointType": "GCE_VM_IP", "network": "global/networks/default", "subnetwork": f"{REGIONAL}/subnetworks/default"}
        for path, body, reason, message in (
            (f"zones/{ZONE}/networkEndpointGroups", base | {"defaultPort": 80}, "invalid", "Default port"),
            (f"zones/{ZONE}/networkEndpointGroups", base | {"subnetwork": None}, "required", "subnetwork"),
            (f"zones/{ZONE}/networkEndpointGroups", base | {"network": "default"}, "invalid", "malformed"),
            (f"zones/{ZONE}/networkEndpointGroups", base | {"network": "global/networks/none"}, "notFound", "was not found"),
            (f"{REGIONAL}/backendServices", {"name": "x", "portName": "http"}, "invalid", "not supported"),
            (f"{REGIONAL}/backendServices", {"name": "x", "localityLbPolicy": "ROUND_ROBIN"}, "invalid", "MAGLEV"),
            (f"{REGIONAL}/backendServices", {"name": "x", "sessionAffinity": "GENERATED_COOKIE"}, "invalid", "CLIENT_IP"),
            (f"{REGIONAL}/backendServices", {"name": "x", "healthChecks": ["a", "b"]}, "invalid", "At most one"),
            (f"{REGIONAL}/forwardingRules", {"name": "x", "ports": ["1"]}, "required", "backendService"),
            (f"{REGIONAL}/addresses", {"name": "x", "purpose": "GCE_ENDPOINT"}, "invalid", "internal"),
            (f"{REGIONAL}/addresses", {"name": "x", "address": "203.0.113.7"}, "invalid", "not in use"),
            (f"{REGIONAL}/addresses", {"name": "x", "addressType": "INTERNAL", "address": "10.9.9.9"}, "invalid", "outside"),
            ("global/firewalls", {"name": "x"}, "required", "allowed"),
            ("global/firewalls", {"name": "x", "allowed": [{"IPProtocol": "icmp", "ports": ["1"]}]}, "invalid", "tcp, udp and sctp"),
            ("global/firewalls", {"name": "x", "allowed": [{"IPProtocol": "tcp"}], "sourceRanges": ["192.0.2.1/24"]}, "invalid", "CIDR"),
            ("global/firewalls", {"name": "x", "allowed": [{"IPProtocol": "tcp"}], "sourceRanges": ["192.0.2.0/24", "2001:db8::/32"]}, "invalid", "mixed"),
        ):
            with self.subTest(body):
                found = self.refused("POST", path, body)
                self.assertEqual(reason, found[1], found)
                self.assertRegex(found[2], message)


class Recorded(Api):
    """The shapes of the real API's answers."""

    settings = {"anonymous": True, "delay": 0.05}

    def test_operations(self):
        _, started = self.standin.compute("POST", f"{REGIONAL}/addresses", {"name": "a"})
        self.assertLessEqual(set(started), RUNNING)
        done = self.standin.done(started)
        self.assertEqual((DONE, 100, "insert"), (set(done), done["progress"], done["operationType"]))
        self.assertEqual(link(f"{REGIONAL}/addresses/a"), done["targetLink"])
        _, of_zone = self.standin.compute("POST", f"zones/{ZONE}/networkEndpointGroups", {"name": "g", "networkEndpointType": "GCE_VM_IP", "network": "global/networks/default", "subnetwork": f"{REGIONAL}/subnetworks/default"})
        self.assertEqual(DONE - {"region"} | {"zone"}, set(self.standin.done(of_zone)))
        _, of_all = self.standin.compute("POST", "global/firewalls", {"name": "f", "allowed": [{"IPProtocol": "tcp"}]})
        self.assertEqual(DONE - {"region"}, set(self.standin.done(of_all)))
        _, patched = self.standin.compute("PATCH", "global/firewalls/f", {"priority": 5})
        self.assertEqual("compute.firewalls.patch", patched["operationType"])

    def test_resources_have_the_recorded_fields(self):
        self.make(f"{REGIONAL}/healthChecks", {"name": "x", "type": "TCP", "tcpHealthCheck": {"port": 80}})
        self.make(f"{REGIONAL}/addresses", {"name": "x"})
        self.make("global/firewalls", {"name": "x", "allowed": [{"IPProtocol": "tcp"}]})
        self.make(f"{REGIONAL}/backendServices", {"name": "x", "protocol": "TCP"})
        self.make(f"{REGIONAL}/forwardingRules", {"name": "x", "portRange": "90", "backendService": link(f"{REGIONAL}/backendServices/x")})
        for collection, recorded in RECORDED.items():
            with self.subTest(collection):
                place, name = ("global" if collection == "firewalls" else REGIONAL), ("default" if collection == "subnetworks" else "x")
                status, answer = self.standin.compute("GET", f"{place}/{collection}/{name}")
                self.assertEqual(200, status, answer)
                self.assertLessEqual(recorded, set(answer))
        rule = self.standin.compute("GET", f"{REGIONAL}/forwardingRules/x")[1]
        self.assertEqual("90-90", rule["portRange"])

    def test_errors(self):
        status, answer = self.standin.compute("GET", f"{REGIONAL}/healthChecks/none")
        message = f"The resource 'projects/{PROJECT}/{REGIONAL}/healthChecks/none' was not found"
        self.assertEqual((404, {"error": {"code": 404, "errors": [{"domain": "global", "message": message, "reason": "notFound"}], "message": message}}), (status, answer))

    def test_use_that_begins_during_a_deletion_fails_inside_an_operation(self):
        self.make(f"{REGIONAL}/healthChecks", CHECK)
        self.standin.test("POST", "faults", {"call": "compute.regionHealthChecks.delete", "operation_error": {"code": "RESOURCE_IN_USE_BY_ANOTHER_RESOURCE", "status": 400, "message": "The health_check resource 'a' is already being used by 'b'"}})
        _, operation = self.standin.compute("DELETE", f"{REGIONAL}/healthChecks/check")
        done = self.standin.done(operation)
        self.assertEqual(("RESOURCE_IN_USE_BY_ANOTHER_RESOURCE", 400, "BAD REQUEST"), (done["error"]["errors"][0]["code"], done["httpErrorStatusCode"], done["httpErrorMessage"]))
        self.assertEqual(200, self.standin.compute("GET", f"{REGIONAL}/healthChecks/check")[0])


class Time(Api):
    """What can be seen while operations run."""

    settings = {"anonymous": True, "delay": 60}

    def make(self, path, body):
        status, answer = self.standin.compute("POST", path, body)
        self.assertEqual(200, status, answer)
        self.standin.skip(60)

    def test_resource_has_its_name_before_it_is_seen_and_is_seen_before_it_can_be_used(self):
        _, first = self.standin.compute("POST", f"{REGIONAL}/healthChecks", CHECK)
        self.assertEqual("PENDING", first["status"])
        self.assertEqual(404, self.standin.compute("GET", f"{REGIONAL}/healthChecks/check")[0])
        self.assertEqual((409, "alreadyExists"), self.refused("POST", f"{REGIONAL}/healthChecks", CHECK)[:2])
        # A fifth of the time it is pending.
        self.standin.skip(12)
        self.assertEqual(200, self.standin.compute("GET", f"{REGIONAL}/healthChecks/check")[0])
        body = {"name": "service", "healthChecks": [link(f"{REGIONAL}/healthChecks/check")]}
        self.assertEqual((400, "resourceNotReady"), self.refused("POST", f"{REGIONAL}/backendServices", body)[:2])
        self.assertEqual((400, "resourceNotReady"), self.refused("DELETE", f"{REGIONAL}/healthChecks/check")[:2])
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(self.standin.compute, "POST", f"{REGIONAL}/operations/{first['name']}/wait")
            self.assertEqual("RUNNING", self.standin.compute("GET", f"{REGIONAL}/operations/{first['name']}")[1]["status"])
            self.standin.skip(48)
            self.assertEqual("DONE", waiting.result()[1]["status"])
        self.make(f"{REGIONAL}/backendServices", body)
        self.assertEqual((400, "resourceInUseByAnotherResource"), self.refused("DELETE", f"{REGIONAL}/healthChecks/check")[:2])

    def test_request_with_a_known_id_is_not_repeated(self):
        path = f"{REGIONAL}/addresses?requestId=6fa1cf2e-8d2b-4f0e-9d0b-000000000001"
        _, first = self.standin.compute("POST", path, {"name": "once"})
        _, second = self.standin.compute("POST", path, {"name": "once"})
        self.assertEqual(first["name"], second["name"])
        self.assertEqual("invalid", self.refused("POST", f"{REGIONAL}/addresses?requestId=1", {"name": "twice"})[1])
        self.assertEqual("invalid", self.refused("POST", f"{REGIONAL}/addresses?requestId=00000000-0000-0000-0000-000000000000", {"name": "twice"})[1])

    def test_deleted_resource_is_seen_until_the_end(self):
        self.make(f"{REGIONAL}/addresses", {"name": "gone"})
        _, operation = self.standin.compute("DELETE", f"{REGIONAL}/addresses/gone")
        self.assertEqual(200, self.standin.compute("GET", f"{REGIONAL}/addresses/gone")[0])
        self.assertEqual("resourceNotReady", self.refused("DELETE", f"{REGIONAL}/addresses/gone")[1])
        self.standin.skip(60)
        self.assertEqual("DONE", self.standin.done(operation)["status"])
        self.assertEqual(404, self.standin.compute("GET", f"{REGIONAL}/addresses/gone")[0])


class Addresses(Api):
    """Whose an address is."""

    def setUp(self):
        super().setUp()
        for scheme in ("EXTERNAL", "INTERNAL"):
            for protocol in ("TCP", "UDP"):
                self.make(f"{REGIONAL}/backendServices", {"name": f"{scheme}-{protocol}".lower(), "protocol": protocol, "loadBalancingScheme": scheme})

    def rule(self, name, scheme, protocol="TCP", **fields):
        """The body of a forwarding rule."""
        service = link(f"{REGIONAL}/backendServices/{scheme}-{protocol}".replace("EXTERNAL", "external").replace("INTERNAL", "internal").replace(protocol, protocol.lower()))
        return {"name": name, "loadBalancingScheme": scheme, "IPProtocol": protocol, "ports": ["80"], "backendService": service} | fields

    def made(self, collection, body):
        """What was made."""
        self.make(f"{REGIONAL}/{collection}", body)
        return self.standin.compute("GET", f"{REGIONAL}/{collection}/{body['name']}")[1]

    def test_ephemeral_address_can_be_reserved_and_released(self):
        rule = self.made("forwardingRules", self.rule("rule", "EXTERNAL"))
        other = self.rule("other", "EXTERNAL", "UDP", IPAddress=rule["IPAddress"])
        self.assertEqual((400, "invalid"), self.refused("POST", f"{REGIONAL}/forwardingRules", other)[:2])
        address = self.made("addresses", {"name": "kept", "address": rule["IPAddress"]})
        self.assertEqual(("IN_USE", [rule["selfLink"]]), (address["status"], address["users"]))
        self.make(f"{REGIONAL}/forwardingRules", other)
        self.assertEqual(200, self.standin.compute("DELETE", f"{REGIONAL}/addresses/kept")[0])
        self.assertEqual(rule["IPAddress"], self.standin.compute("GET", f"{REGIONAL}/forwardingRules/rule")[1]["IPAddress"])
        self.make(f"{REGIONAL}/addresses", {"name": "kept", "address": rule["IPAddress"]})
        self.standin.test("POST", "settings", {"release_used_addresses": False})
        self.assertEqual("resourceInUseByAnotherResource", self.refused("DELETE", f"{REGIONAL}/addresses/kept")[1])

    def test_tiers_have_to_agree(self):
        address = self.made("addresses", {"name": "standard", "networkTier": "STANDARD"})
        refused = self.refused("POST", f"{REGIONAL}/forwardingRules", self.rule("rule", "EXTERNAL", IPAddress=address["address"]))
        self.assertRegex(refused[2], "The network tier of external IP address is STANDARD, that of ForwardingRule must be the same")
        self.make(f"{REGIONAL}/forwardingRules", self.rule("rule", "EXTERNAL", IPAddress="standard", networkTier="STANDARD"))

    def test_internal_address_is_shared_only_if_reserved_for_it(self):
        plain = self.made("addresses", {"name": "plain", "addressType": "INTERNAL"})
        self.make(f"{REGIONAL}/forwardingRules", self.rule("tcp", "INTERNAL", IPAddress=plain["address"]))
        refused = self.refused("POST", f"{REGIONAL}/forwardingRules", self.rule("udp", "INTERNAL", "UDP", IPAddress=plain["address"]))
        self.assertEqual(409, refused[0])
        self.assertRegex(refused[2], "IP_IN_USE_BY_ANOTHER_RESOURCE")
        shared = self.made("addresses", {"name": "shared", "addressType": "INTERNAL", "purpose": "SHARED_LOADBALANCER_VIP"})
        self.make(f"{REGIONAL}/forwardingRules", self.rule("tcp-2", "INTERNAL", IPAddress=shared["selfLink"]))
        self.make(f"{REGIONAL}/forwardingRules", self.rule("udp-2", "INTERNAL", "UDP", IPAddress=shared["selfLink"]))

    def test_ipv6(self):
        six = self.made("forwardingRules", self.rule("six", "EXTERNAL", ipVersion="IPV6", subnetwork=f"{REGIONAL}/subnetworks/default"))
        self.assertEqual(("2001:db8:0:1:0:8000:0:0/96", "IPV6"), (six["IPAddress"], six["ipVersion"]))
        wrong = self.rule("wrong", "INTERNAL", ipVersion="IPV6", subnetwork=f"{REGIONAL}/subnetworks/default")
        self.assertRegex(self.refused("POST", f"{REGIONAL}/forwardingRules", wrong)[2], "access type INTERNAL")
        reserved = self.made("addresses", {"name": "six", "address": "2001:db8:0:1:0:8000::/96", "ipVersion": "IPV6", "ipv6EndpointType": "NETLB", "subnetwork": f"{REGIONAL}/subnetworks/default"})
        self.assertEqual(("IN_USE", 96), (reserved["status"], reserved["prefixLength"]))


class Faults(Api):
    """What tests inject."""

    def test_answers_are_replaced(self):
        self.standin.test("POST", "faults", {"call": "compute.addresses.*", "skip": 1, "times": 2, "status": 503, "reason": "backendError", "headers": {"Retry-After": "7"}})
        statuses = [self.standin.compute("GET", f"{REGIONAL}/addresses")[0] for _ in range(4)]
        self.assertEqual([200, 503, 503, 200], statuses)

    def test_permission_is_denied(self):
        self.standin.test("POST", "faults", {"call": "compute.firewalls.*", "times": 0, "status": 403, "reason": "forbidden", "message": "Required 'compute.firewalls.list' permission"})
        self.assertEqual((403, "forbidden"), self.refused("GET", "global/firewalls")[:2])

    def test_connection_is_cut_before_or_after_the_effect(self):
        for cut, exists in (("before", 404), ("after", 200)):
            self.standin.test("POST", "faults", {"call": "compute.addresses.insert", "cut": cut})
            with self.assertRaises((urllib.error.URLError, http.client.RemoteDisconnected)):
                self.standin.compute("POST", f"{REGIONAL}/addresses", {"name": "cut"})
            self.assertEqual(exists, self.standin.compute("GET", f"{REGIONAL}/addresses/cut")[0])
        self.assertEqual(2, self.standin.test("GET", "calls")["counts"]["compute.addresses.insert"])

    def test_calls_are_throttled(self):
        for status in (403, 429):
            self.standin.test("POST", "throttle", {"call": "compute.*", "burst": 2, "rate": 0.001, "status": status})
            found = [self.standin.compute("GET", f"{REGIONAL}/addresses") for _ in range(3)]
            self.assertEqual([200, 200, status], [code for code, _ in found])
            self.assertEqual("rateLimitExceeded", found[-1][1]["error"]["errors"][0]["reason"])

    def test_quota_is_exceeded(self):
        self.standin.test("POST", "quotas", {"STATIC_ADDRESSES": 1})
        self.make(f"{REGIONAL}/addresses", {"name": "one"})
        refused = self.refused("POST", f"{REGIONAL}/addresses", {"name": "two"})
        self.assertEqual((403, "quotaExceeded"), refused[:2])

    def test_misspelt_fault_is_refused(self):
        self.assertEqual(400, self.standin.call("POST", "/test/faults", {"cal": "x"})[0])

    def test_weights_need_a_health_check_of_http(self):
        self.make(f"{REGIONAL}/healthChecks", {"name": "tcp", "type": "TCP"})
        body = {"name": "weighted", "localityLbPolicy": "WEIGHTED_MAGLEV", "healthChecks": [link(f"{REGIONAL}/healthChecks/tcp")]}
        self.assertEqual("INVALID_HEALTH_CHECK_FOR_DYNAMIC_WIEGHTED_LB", self.make(f"{REGIONAL}/backendServices", body)["warnings"][0]["code"])

    def test_health_is_what_a_prober_says(self):
        self.standin.test("POST", "instances", {"name": "node", "zone": ZONE, "address": "10.128.0.2"})
        group = {"name": "g", "networkEndpointType": "GCE_VM_IP", "network": "global/networks/default", "subnetwork": f"{REGIONAL}/subnetworks/default"}
        self.make(f"zones/{ZONE}/networkEndpointGroups", group)
        self.make(f"zones/{ZONE}/networkEndpointGroups/g/attachNetworkEndpoints", {"networkEndpoints": [{"instance": "node"}]})
        self.make(f"{REGIONAL}/healthChecks", CHECK)
        backend = {"group": link(f"zones/{ZONE}/networkEndpointGroups/g"), "balancingMode": "CONNECTION"}
        self.make(f"{REGIONAL}/backendServices", {"name": "s", "healthChecks": [link(f"{REGIONAL}/healthChecks/check")], "backends": [backend]})
        self.make(f"{REGIONAL}/forwardingRules", {"name": "r", "ports": ["80"], "backendService": link(f"{REGIONAL}/backendServices/s")})
        self.standin.test("POST", "health", {f"{ZONE}/node": {"state": "UNHEALTHY", "weight": 3}})
        _, health = self.standin.compute("POST", f"{REGIONAL}/backendServices/s/getHealth", {"group": backend["group"]})
        self.assertEqual([("UNHEALTHY", "3", "10.128.0.2")], [(h["healthState"], h["weight"], h["ipAddress"]) for h in health["healthStatus"]])
        _, listed = self.standin.compute("POST", f"zones/{ZONE}/networkEndpointGroups/g/listNetworkEndpoints", {"healthStatus": "SHOW"})
        self.assertEqual("UNHEALTHY", listed["items"][0]["healths"][0]["healthState"])
        self.standin.test("POST", "health", {f"r/{ZONE}/node": {"state": "HEALTHY"}})
        _, health = self.standin.compute("POST", f"{REGIONAL}/backendServices/s/getHealth", {"group": backend["group"]})
        self.assertEqual(["HEALTHY"], [h["healthState"] for h in health["healthStatus"]], "what was found for the rule itself")
        for method, path, reason in (("DELETE", f"zones/{ZONE}/networkEndpointGroups/g", "resourceInUseByAnotherResource"), ("DELETE", f"{REGIONAL}/backendServices/s", "resourceInUseByAnotherResource")):
            self.assertEqual(reason, self.refused(method, path)[1])

    def test_snapshot_has_no_identifiers(self):
        self.make(f"{REGIONAL}/addresses", {"name": "shown"})
        snapshot = self.standin.test("GET", "snapshot")
        self.assertEqual({"address", "addressType", "description", "name", "networkTier", "region", "status"}, set(snapshot[f"projects/{PROJECT}/{REGIONAL}/addresses/shown"]))


class SharedNetwork(Api):
    """A project that uses the network of another one."""

    def test_group_is_in_the_network_of_the_host_project(self):
        self.standin.test("POST", "projects", {"name": "host-project"})
        self.standin.test("POST", "instances", {"name": "node", "zone": ZONE, "address": "10.128.0.2", "network_project": "host-project"})
        host = "projects/host-project"
        body = {"name": "g", "networkEndpointType": "GCE_VM_IP", "network": f"{host}/global/networks/default", "subnetwork": f"{host}/{REGIONAL}/subnetworks/default"}
        self.make(f"zones/{ZONE}/networkEndpointGroups", body)
        attached = self.make(f"zones/{ZONE}/networkEndpointGroups/g/attachNetworkEndpoints", {"networkEndpoints": [{"instance": "node"}]})
        self.assertNotIn("error", attached)
        self.standin.test("POST", "faults", {"call": "compute.firewalls.*", "path": "/projects/host-project/", "times": 0, "status": 403, "reason": "forbidden"})
        self.assertEqual(403, self.standin.call("GET", "/compute/v1/projects/host-project/global/firewalls")[0])
        self.assertEqual(200, self.standin.compute("GET", "global/firewalls")[0])


class Metadata(unittest.TestCase):
    """The metadata server."""

    def test_values_need_the_header(self):
        standin = StandIn()
        self.addCleanup(standin.stop)
        path = "/computeMetadata/v1/instance/service-accounts/default/token"
        self.assertEqual(403, standin.call("GET", path)[0])
        header = {"Metadata-Flavor": "Google"}
        self.assertEqual(403, standin.call("GET", path, headers=header | {"X-Forwarded-For": "192.0.2.1"})[0])
        status, headers, token = standin.call("GET", path, headers=header)
        self.assertEqual((200, "Google", "Bearer"), (status, headers["Metadata-Flavor"], token["token_type"]))
        self.assertEqual(200, standin.compute("GET", "zones", token=token["access_token"])[0])
        standin.skip(3600)
        self.assertEqual(401, standin.compute("GET", "zones", token=token["access_token"])[0])
        for what, value in (("project/project-id", PROJECT), ("instance/zone", f"projects/123456789012/zones/{ZONE}")):
            self.assertEqual((200, value), standin.call("GET", f"/computeMetadata/v1/{what}", headers=header)[::2])


if __name__ == "__main__":
    unittest.main()
