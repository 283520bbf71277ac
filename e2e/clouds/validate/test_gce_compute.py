# SPDX-License-Identifier: Apache-2.0
"""Google's client google-cloud-compute creates, reads, changes and deletes a load balancer on the stand-in."""

import unittest
import unittest.mock

from standin import PROJECT, REGION, ZONE, StandIn, link
from google.api_core import exceptions
from google.api_core.client_options import ClientOptions
from google.api_core.future.polling import DEFAULT_POLLING
from google.auth import compute_engine
from google.auth.credentials import AnonymousCredentials
from google.cloud import compute_v1 as compute


class Clients:
    """Clients of the stand-in. Those that poll operations would be made with Google's address, so they are given."""

    def __init__(self, url, credentials):
        self.arguments = {"transport": "rest", "credentials": credentials, "client_options": ClientOptions(api_endpoint=url)}
        scopes = {"region_operations": compute.RegionOperationsClient, "zone_operations": compute.ZoneOperationsClient, "global_operations": compute.GlobalOperationsClient}
        self.operations = {name: client(**self.arguments) for name, client in scopes.items()}

    def make(self, client):
        """A client of one resource."""
        made = client(**self.arguments)
        services = getattr(made.transport, "_extended_operations_services", None)
        if services is not None:
            services.update(self.operations)
        return made


def finish(operation):
    """Google's own polling, which raises an operation's error."""
    operation.result(timeout=30, polling=DEFAULT_POLLING.with_delay(initial=0.05, maximum=0.1))


class Lifecycle(unittest.TestCase):
    """One stand-in for all tests; each has names of its own."""

    @classmethod
    def setUpClass(cls):
        cls.standin = StandIn(anonymous=True, delay=0.05)
        cls.addClassCleanup(cls.standin.stop)
        cls.standin.test("POST", "instances", [{"name": f"node-{n}", "zone": ZONE, "address": f"10.128.0.{n + 2}", "tags": ["node"]} for n in range(3)])
        clients = Clients(cls.standin.url, AnonymousCredentials())
        cls.checks = clients.make(compute.RegionHealthChecksClient)
        cls.services = clients.make(compute.RegionBackendServicesClient)
        cls.groups = clients.make(compute.NetworkEndpointGroupsClient)
        cls.rules = clients.make(compute.ForwardingRulesClient)
        cls.addresses = clients.make(compute.AddressesClient)
        cls.firewalls = clients.make(compute.FirewallsClient)
        cls.instances = clients.make(compute.InstancesClient)
        cls.operations = clients.make(compute.GlobalOperationsClient)
        cls.at = {"project": PROJECT, "region": REGION}

    def check(self, name):
        body = compute.HealthCheck(name=name, type_="HTTP", http_health_check=compute.HTTPHealthCheck(port=10256, request_path="/healthz"))
        finish(self.checks.insert(**self.at, health_check_resource=body))
        return link(f"regions/{REGION}/healthChecks/{name}")

    def group(self, name):
        body = compute.NetworkEndpointGroup(name=name, network_endpoint_type="GCE_VM_IP", network=link("global/networks/default"), subnetwork=link(f"regions/{REGION}/subnetworks/default"))
        finish(self.groups.insert(project=PROJECT, zone=ZONE, network_endpoint_group_resource=body))
        return link(f"zones/{ZONE}/networkEndpointGroups/{name}")

    def service(self, name, **fields):
        backend = compute.Backend(group=self.group(name), balancing_mode="CONNECTION")
        body = compute.BackendService(name=name, protocol="TCP", load_balancing_scheme="EXTERNAL", health_checks=[self.check(name)], backends=[backend], **fields)
        finish(self.services.insert(**self.at, backend_service_resource=body))
        return link(f"regions/{REGION}/backendServices/{name}")

    def rule(self, name, service, **fields):
        body = compute.ForwardingRule(name=name, load_balancing_scheme="EXTERNAL", backend_service=service, **({"I_p_protocol": "TCP", "ports": ["80", "443"]} | fields))
        finish(self.rules.insert(**self.at, forwarding_rule_resource=body))
        return self.rules.get(**self.at, forwarding_rule=name)

    def test_load_balancer_is_created_changed_and_deleted_in_order(self):
        service = self.service("web")
        rule = self.rule("web", service)
        self.assertEqual((["80", "443"], service, "PREMIUM"), (list(rule.ports), rule.backend_service, rule.network_tier))
        endpoints = [compute.NetworkEndpoint(instance=f"node-{n}") for n in range(2)]
        request = compute.NetworkEndpointGroupsAttachEndpointsRequest(network_endpoints=endpoints)
        group = {"project": PROJECT, "zone": ZONE, "network_endpoint_group": "web"}
        finish(self.groups.attach_network_endpoints(**group, network_endpoint_groups_attach_endpoints_request_resource=request))
        attached = self.groups.list_network_endpoints(**group, network_endpoint_groups_list_endpoints_request_resource=compute.NetworkEndpointGroupsListEndpointsRequest())
        self.assertEqual({("node-0", "10.128.0.2"), ("node-1", "10.128.0.3")}, {(item.network_endpoint.instance, item.network_endpoint.ip_address) for item in attached})
        self.assertEqual(2, self.groups.get(**group).size)
        health = self.services.get_health(**self.at, backend_service="web", resource_group_reference_resource=compute.ResourceGroupReference(group=link(f"zones/{ZONE}/networkEndpointGroups/web")))
        self.assertEqual({(rule.I_p_address, "HEALTHY")}, {(status.forwarding_rule_ip, status.health_state) for status in health.health_status})
        detach = compute.NetworkEndpointGroupsDetachEndpointsRequest(network_endpoints=endpoints[:1])
        finish(self.groups.detach_network_endpoints(**group, network_endpoint_groups_detach_endpoints_request_resource=detach))
        self.assertEqual(1, self.groups.get(**group).size)

        for client, arguments in (
            (self.checks, self.at | {"health_check": "web"}),
            (self.groups, group),
            (self.services, self.at | {"backend_service": "web"}),
        ):
            with self.assertRaisesRegex(exceptions.BadRequest, "is already being used by"):
                client.delete(**arguments)
        finish(self.rules.delete(**self.at, forwarding_rule="web"))
        finish(self.services.delete(**self.at, backend_service="web"))
        finish(self.groups.delete(**group))
        finish(self.checks.delete(**self.at, health_check="web"))
        with self.assertRaises(exceptions.NotFound):
            self.checks.get(**self.at, health_check="web")

    def test_stale_fingerprint_is_refused(self):
        self.service("stale")
        first = self.services.get(**self.at, backend_service="stale")
        second = self.services.get(**self.at, backend_service="stale")
        first.session_affinity = "CLIENT_IP"
        finish(self.services.update(**self.at, backend_service="stale", backend_service_resource=first))
        second.connection_draining = compute.ConnectionDraining(draining_timeout_sec=60)
        for change in (self.services.update, self.services.patch):
            with self.assertRaises(exceptions.PreconditionFailed):
                change(**self.at, backend_service="stale", backend_service_resource=second)
        changed = self.services.get(**self.at, backend_service="stale")
        self.assertEqual(("CLIENT_IP", 0), (changed.session_affinity, changed.connection_draining.draining_timeout_sec))
        self.assertNotEqual(second.fingerprint, changed.fingerprint)

    def test_second_change_waits_for_the_first(self):
        self.service("busy")
        change = compute.BackendService(session_affinity="CLIENT_IP")
        self.standin.test("POST", "faults", {"call": "compute.regionBackendServices.patch", "operation_delay": 60})
        first = self.services.patch(**self.at, backend_service="busy", backend_service_resource=change)
        with self.assertRaisesRegex(exceptions.BadRequest, "is not ready"):
            self.services.patch(**self.at, backend_service="busy", backend_service_resource=change)
        self.standin.skip(60)
        finish(first)

    def test_reserved_address_is_shared_by_two_protocols(self):
        finish(self.addresses.insert(**self.at, address_resource=compute.Address(name="shared")))
        address = self.addresses.get(**self.at, address="shared")
        self.assertEqual("RESERVED", address.status)
        tcp = self.service("shared-tcp")
        finish(self.services.insert(**self.at, backend_service_resource=compute.BackendService(name="shared-udp", protocol="UDP", load_balancing_scheme="EXTERNAL")))
        udp = link(f"regions/{REGION}/backendServices/shared-udp")
        self.rule("shared-tcp", tcp, I_p_address=address.address, ports=["53"])
        self.rule("shared-udp", udp, I_p_address=address.self_link, ports=["53"], I_p_protocol="UDP")
        with self.assertRaisesRegex(exceptions.BadRequest, "in-use and would result in a conflict"):
            self.rule("third", tcp, I_p_address=address.address, ports=["53"])
        self.assertEqual(("IN_USE", 2), ((used := self.addresses.get(**self.at, address="shared")).status, len(used.users)))
        found = self.addresses.list(compute.ListAddressesRequest(**self.at, filter=f"address = {address.address}"))
        self.assertEqual(["shared"], [item.name for item in found])

    def test_firewall_is_patched(self):
        allowed = compute.Allowed(I_p_protocol="tcp", ports=["80", "443"])
        body = compute.Firewall(name="web", allowed=[allowed], source_ranges=["192.0.2.0/24"], target_tags=["node"], destination_ranges=["198.51.100.1/32"])
        finish(self.firewalls.insert(project=PROJECT, firewall_resource=body))
        finish(self.firewalls.patch(project=PROJECT, firewall="web", firewall_resource=compute.Firewall(name="web", source_ranges=["192.0.2.0/25"])))
        rule = self.firewalls.get(project=PROJECT, firewall="web")
        self.assertEqual((["192.0.2.0/25"], ["80", "443"], 1000, "INGRESS"), (list(rule.source_ranges), list(rule.allowed[0].ports), rule.priority, rule.direction))

    def test_error_inside_an_operation_is_raised(self):
        self.standin.test("POST", "faults", {"call": "compute.addresses.insert", "operation_error": {"code": "QUOTA_EXCEEDED", "status": 403, "message": "Quota 'STATIC_ADDRESSES' exceeded."}})
        with self.assertRaisesRegex(exceptions.GoogleAPICallError, "STATIC_ADDRESSES"):
            finish(self.addresses.insert(**self.at, address_resource=compute.Address(name="failed")))
        with self.assertRaises(exceptions.NotFound):
            self.addresses.get(**self.at, address="failed")

    def test_lists_have_pages(self):
        for number in range(3):
            finish(self.addresses.insert(**self.at, address_resource=compute.Address(name=f"page-{number}")))
        pager = self.addresses.list(compute.ListAddressesRequest(**self.at, max_results=1, filter="name eq page-.*"))
        self.assertEqual([["page-0"], ["page-1"], ["page-2"]], [[item.name for item in page.items] for page in pager.pages])
        everywhere = dict(self.addresses.aggregated_list(project=PROJECT))
        self.assertIn("page-1", [item.name for item in everywhere[f"regions/{REGION}"].addresses])
        self.assertEqual("NO_RESULTS_ON_PAGE", everywhere["zones/us-central1-b"].warning.code if "zones/us-central1-b" in everywhere else "NO_RESULTS_ON_PAGE")

    def test_operations_of_all_places_are_in_one_list(self):
        started = [self.addresses.insert(**self.at, address_resource=compute.Address(name="followed")), self.firewalls.insert(project=PROJECT, firewall_resource=compute.Firewall(name="followed", allowed=[compute.Allowed(I_p_protocol="tcp")]))]
        names = [operation.name for operation in started]
        for operation in started:
            finish(operation)
        request = compute.AggregatedListGlobalOperationsRequest(project=PROJECT, filter=f"name eq '{'|'.join(names)}'")
        found = dict(self.operations.aggregated_list(request))
        listed = {scope: [(item.name, item.status.name, item.error.errors) for item in of_scope.operations] for scope, of_scope in found.items() if of_scope.operations}
        self.assertEqual({f"regions/{REGION}": [(names[0], "DONE", [])], "global": [(names[1], "DONE", [])]}, listed)

    def test_instances_have_addresses_and_tags(self):
        node = self.instances.get(project=PROJECT, zone=ZONE, instance="node-1")
        self.assertEqual(("10.128.0.3", ["node"]), (node.network_interfaces[0].network_i_p, list(node.tags.items)))

    def test_existing_name_is_refused(self):
        self.check("twice")
        with self.assertRaisesRegex(exceptions.Conflict, "already exists"):
            self.check("twice")


class MetadataCredentials(unittest.TestCase):
    """google-auth gets its tokens from the stand-in's metadata server."""

    def test_tokens_are_demanded_and_expire(self):
        standin = StandIn()
        self.addCleanup(standin.stop)
        self.assertEqual(401, standin.compute("GET", f"regions/{REGION}/addresses")[0])
        host = standin.url.removeprefix("http://")
        with unittest.mock.patch("google.auth.compute_engine._metadata._GCE_METADATA_HOST", host):
            addresses = Clients(standin.url, compute_engine.Credentials()).make(compute.AddressesClient)
            self.assertEqual([], list(addresses.list(project=PROJECT, region=REGION)))
            standin.test("DELETE", "tokens")
            # The client asks for a new one after 401, and repeats the call.
            self.assertEqual([], list(addresses.list(project=PROJECT, region=REGION)))
        calls = standin.test("GET", "calls")["counts"]
        self.assertEqual((2, 4), (calls["metadata.token"], calls["compute.addresses.list"]))


if __name__ == "__main__":
    unittest.main()
