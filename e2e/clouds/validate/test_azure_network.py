# SPDX-License-Identifier: Apache-2.0
"""Microsoft's client azure-mgmt-network creates, reads, changes and deletes a load balancer on the stand-in, and polls its operations."""

import unittest

from azure.core.exceptions import HttpResponseError, ResourceNotFoundError
from azure.core.pipeline.policies import SansIOHTTPPolicy
from azure.mgmt.network import NetworkManagementClient, models
from standin import StandIn

SUBSCRIPTION, GROUP = "00000000-0000-0000-0000-000000000001", "cluster"
BASE = f"/subscriptions/{SUBSCRIPTION}/resourceGroups/{GROUP}/providers/Microsoft.Network"
IMDS = "/metadata/identity/oauth2/token?api-version=2018-02-01&resource=https://management.azure.com/"


class Token(SansIOHTTPPolicy):
    """Adds a token of the metadata service. Microsoft's own policy refuses addresses without TLS."""

    def __init__(self, standin):
        self.token = standin.call("GET", IMDS, headers={"Metadata": "true"})[2]["access_token"]

    def on_request(self, request):
        request.http_request.headers["Authorization"] = f"Bearer {self.token}"


class Lifecycle(unittest.TestCase):
    """One stand-in for all tests; each has names of its own."""

    @classmethod
    def setUpClass(cls):
        cls.standin = StandIn("azure", delay=0.2, retry_after=0)
        cls.addClassCleanup(cls.standin.stop)
        cls.client = NetworkManagementClient(object(), SUBSCRIPTION, base_url=cls.standin.url, authentication_policy=Token(cls.standin), polling_interval=0.05, retry_total=0)
        cls.addClassCleanup(cls.client.close)

    def address(self, name, **fields):
        """A public IP address that is ready."""
        body = models.PublicIPAddress(location="westeurope", sku=models.PublicIPAddressSku(name="Standard"), public_ip_allocation_method="Static", **fields)
        return self.client.public_ip_addresses.begin_create_or_update(GROUP, name, body).result(30)

    def balancer(self, name, *ports, frontend=None):
        """The body of a load balancer with a rule for each port."""
        base = f"{BASE}/loadBalancers/{name}"
        frontend = frontend or {"publicIPAddress": {"id": f"{BASE}/publicIPAddresses/{name}"}}

        def rule(port):
            refer = {"frontendIPConfiguration": {"id": f"{base}/frontendIPConfigurations/front"}, "backendAddressPool": {"id": f"{base}/backendAddressPools/nodes"}, "probe": {"id": f"{base}/probes/healthz"}}
            return {"name": f"tcp-{port}", "properties": refer | {"protocol": "Tcp", "frontendPort": port, "backendPort": port, "enableFloatingIP": True, "enableTcpReset": True}}

        probe = {"protocol": "Http", "port": 10256, "requestPath": "/healthz", "intervalInSeconds": 5, "probeThreshold": 2}
        parts = {"frontendIPConfigurations": [{"name": "front", "properties": frontend}], "backendAddressPools": [{"name": "nodes"}], "loadBalancingRules": [rule(port) for port in ports], "probes": [{"name": "healthz", "properties": probe}]}
        return {"location": "westeurope", "sku": {"name": "Standard"}, "properties": parts}

    def put(self, name, body, **how):
        """Creates or replaces a load balancer."""
        return self.client.load_balancers.begin_create_or_update(GROUP, name, body, **how).result(30)

    def refused(self, status, code, call, *arguments, **named):
        """Refused with this status and code."""
        with self.assertRaises(HttpResponseError) as caught:
            call(*arguments, **named)
        self.assertEqual((status, code), (caught.exception.status_code, caught.exception.error.code), caught.exception)
        return caught.exception

    def test_load_balancer_is_created_changed_and_deleted_in_order(self):
        address = self.address("web")
        self.assertRegex(address.ip_address, r"^198\.19\.")
        made = self.put("web", self.balancer("web", 80, 443))
        self.assertEqual("Succeeded", made.provisioning_state)
        rules = [f"{BASE}/loadBalancers/web/loadBalancingRules/tcp-{port}" for port in (80, 443)]
        for parts in (made.frontend_ip_configurations, made.backend_address_pools, made.probes):
            self.assertEqual(rules, [rule.id for rule in parts[0].load_balancing_rules])
        used = self.client.public_ip_addresses.get(GROUP, "web")
        self.assertEqual(made.frontend_ip_configurations[0].id, used.ip_configuration.id)
        self.refused(400, "PublicIPAddressCannotBeDeleted", self.client.public_ip_addresses.begin_delete, GROUP, "web")

        pools = self.client.load_balancer_backend_address_pools
        pool = {"properties": {"virtualNetwork": {"id": f"{BASE}/virtualNetworks/cluster"}, "loadBalancerBackendAddresses": [{"name": f"n{n}", "properties": {"ipAddress": f"10.240.0.{n}"}} for n in (4, 5)]}}
        put = pools.begin_create_or_update(GROUP, "web", "nodes", pool).result(30)
        self.assertEqual(["10.240.0.4", "10.240.0.5"], [item.ip_address for item in put.load_balancer_backend_addresses])
        self.refused(400, "LoadBalancerBackendAddressPoolInUse", pools.begin_delete, GROUP, "web", "nodes")
        changed = self.client.load_balancers.get(GROUP, "web")
        self.assertNotEqual(made.etag, changed.etag)

        # What is missing in a PUT is removed.
        body = changed.as_dict()
        body["properties"]["loadBalancingRules"] = body["properties"]["loadBalancingRules"][:1]
        replaced = self.put("web", body, headers={"If-Match": changed.etag})
        self.assertEqual((["tcp-80"], 2), ([rule.name for rule in replaced.load_balancing_rules], len(replaced.backend_address_pools[0].load_balancer_backend_addresses)))
        self.refused(412, "PreconditionFailed", self.put, "web", body, headers={"If-Match": changed.etag})
        self.assertEqual(["web"], [balancer.name for balancer in self.client.load_balancers.list(GROUP) if balancer.name == "web"])

        self.client.load_balancers.begin_delete(GROUP, "web").result(30)
        self.client.public_ip_addresses.begin_delete(GROUP, "web").result(30)
        for call in (self.client.load_balancers.get, self.client.public_ip_addresses.get):
            with self.assertRaises(ResourceNotFoundError):
                call(GROUP, "web")
        # What does not exist is deleted at once.
        self.client.load_balancers.begin_delete(GROUP, "web").result(30)

    def test_etag_of_the_answer_is_not_that_of_the_result(self):
        self.address("etag")
        seen = []
        poller = self.client.load_balancers.begin_create_or_update(GROUP, "etag", self.balancer("etag", 80), raw_response_hook=seen.append)
        result = poller.result(30)
        first = seen[0].http_response
        self.assertEqual((201, "Updating"), (first.status_code, first.json()["properties"]["provisioningState"]))
        self.assertIn("/providers/Microsoft.Network/locations/westeurope/operations/", first.headers["Azure-AsyncOperation"])
        self.assertIn("Retry-After", first.headers)
        self.assertNotEqual(first.json()["etag"], result.etag)

    def test_later_put_supersedes_the_earlier_one(self):
        self.address("twice")
        self.standin.test("POST", "faults", {"call": "loadBalancers.createOrUpdate", "operation_delay": 60})
        first = self.client.load_balancers.begin_create_or_update(GROUP, "twice", self.balancer("twice", 80))
        second = self.client.load_balancers.begin_create_or_update(GROUP, "twice", self.balancer("twice", 443))
        with self.assertRaisesRegex(HttpResponseError, "CanceledAndSupersededDueToAnotherOperation|superseded"):
            first.result(30)
        self.assertEqual(["tcp-443"], [rule.name for rule in second.result(30).load_balancing_rules])

    def test_internal_frontend_gets_an_address_of_its_subnet(self):
        subnet = {"id": f"{BASE}/virtualNetworks/cluster/subnets/nodes"}
        dynamic = self.put("internal", self.balancer("internal", 80, frontend={"subnet": subnet}))
        address = dynamic.frontend_ip_configurations[0].private_ip_address
        self.assertRegex(address, r"^10\.240\.255\.")
        static = {"subnet": subnet, "privateIPAllocationMethod": "Static", "privateIPAddress": address}
        self.refused(400, "PrivateIPAddressInUse", self.put, "other", self.balancer("other", 80, frontend=static))
        self.refused(400, "PrivateIPAddressNotInSubnet", self.put, "other", self.balancer("other", 80, frontend=static | {"privateIPAddress": "10.9.0.1"}))

    def test_families_do_not_mix(self):
        self.address("six", public_ip_address_version="IPv6")
        self.assertRegex(self.client.public_ip_addresses.get(GROUP, "six").ip_address, "^2001:db8:f::")
        body = self.balancer("six", 80)
        addresses = [{"name": f"n{n}", "properties": {"ipAddress": address, "virtualNetwork": {"id": f"{BASE}/virtualNetworks/cluster"}}} for n, address in enumerate(("fd00:240::4", "10.240.0.4"))]
        pool = body["properties"]["backendAddressPools"][0]
        for wrong, code in ((addresses, "BackendAddressPoolHasTwoFamilies"), (addresses[1:], "LoadBalancingRuleHasTwoFamilies")):
            pool["properties"] = {"loadBalancerBackendAddresses": wrong}
            self.refused(400, code, self.put, "six", body)
        pool["properties"] = {"loadBalancerBackendAddresses": addresses[:1]}
        self.put("six", body)
        internal = {"subnet": {"id": f"{BASE}/virtualNetworks/cluster/subnets/nodes"}, "privateIPAddressVersion": "IPv6"}
        made = self.put("internal-six", self.balancer("internal-six", 80, frontend=internal))
        self.assertRegex(made.frontend_ip_configurations[0].private_ip_address, "^fd00:240::ffff:")
        internal["subnet"] = {"id": f"{BASE}/virtualNetworks/cluster/subnets/other"}
        self.refused(400, "SubnetHasNoIPv6Prefix", self.put, "other-six", self.balancer("other-six", 80, frontend=internal))

    def test_security_rules_are_put_one_by_one_and_together(self):
        groups, rules = self.client.network_security_groups, self.client.security_rules
        rule = {"properties": {"protocol": "Tcp", "direction": "Inbound", "access": "Allow", "priority": 500, "sourceAddressPrefix": "Internet", "sourcePortRange": "*", "destinationAddressPrefixes": ["198.19.0.4"], "destinationPortRanges": ["80", "443"]}}
        made = rules.begin_create_or_update(GROUP, "nodes", "web", rule).result(30)
        self.assertEqual((500, ["80", "443"]), (made.priority, made.destination_port_ranges))
        self.refused(400, "SecurityRuleConflict", rules.begin_create_or_update, GROUP, "nodes", "same", rule)
        group = groups.get(GROUP, "nodes")
        self.assertEqual((["web"], 6), ([item.name for item in group.security_rules], len(group.default_security_rules)))
        self.refused(412, "PreconditionFailed", groups.begin_create_or_update, GROUP, "nodes", group, headers={"If-Match": 'W/"old"'})
        group.security_rules[0].priority = 501
        self.assertEqual(501, groups.begin_create_or_update(GROUP, "nodes", group, headers={"If-Match": group.etag}).result(30).security_rules[0].priority)
        self.refused(400, "InUseNetworkSecurityGroupCannotBeDeleted", groups.begin_delete, GROUP, "nodes")
        rules.begin_delete(GROUP, "nodes", "web").result(30)
        self.assertEqual([], groups.get(GROUP, "nodes").security_rules)

    def test_failed_operation_is_raised_and_the_resource_shows_it(self):
        fault = {"call": "publicIPAddresses.createOrUpdate", "operation_error": {"code": "InternalServerError", "message": "An error occurred."}}
        self.standin.test("POST", "faults", fault)
        with self.assertRaisesRegex(HttpResponseError, "An error occurred"):
            self.address("failed")
        self.assertEqual("Failed", self.client.public_ip_addresses.get(GROUP, "failed").provisioning_state)
        refused = self.refused(429, "RetryableError", self.put, "failed", self.balancer("failed", 80))
        self.assertEqual(["ReferencedResourceNotProvisioned"], [detail.code for detail in refused.error.details])
        # Putting it again repairs it.
        self.assertEqual("Succeeded", self.address("failed").provisioning_state)

    def test_throttled_call_says_when_to_try_again(self):
        self.standin.test("POST", "throttle", {"call": "virtualNetworks.get", "burst": 1, "rate": 0.001, "retry_after": 17})
        self.client.virtual_networks.get(GROUP, "cluster")
        refused = self.refused(429, "TooManyRequests", self.client.virtual_networks.get, GROUP, "cluster")
        self.assertEqual("17", refused.response.headers["Retry-After"])
        self.standin.test("POST", "throttle", {})

    def test_seeded_resources_are_read(self):
        self.standin.test("POST", "resources", [{"type": "publicIPPrefixes", "name": "few", "properties": {"ipPrefix": "198.19.200.0/31", "prefixLength": 31}, "sku": {"name": "Standard"}}])
        for name in ("few-0", "few-1"):
            self.assertRegex(self.address(name, public_ip_prefix=models.SubResource(id=f"{BASE}/publicIPPrefixes/few")).ip_address, r"^198\.19\.200\.[01]$")
        one = {"name": "ipconfig", "properties": {"privateIPAddress": "10.240.0.9", "subnet": {"id": f"{BASE}/virtualNetworks/cluster/subnets/nodes"}}}
        machine = f"{BASE.replace('Network', 'Compute')}/virtualMachines/vm"
        self.standin.test("POST", "resources", [{"type": "networkInterfaces", "name": "nic", "properties": {"ipConfigurations": [one], "virtualMachine": {"id": machine}}}, {"type": "virtualMachines", "name": "vm", "properties": {"vmId": "1"}}])
        interface = self.client.network_interfaces.get(GROUP, "nic")
        self.assertEqual(("10.240.0.9", machine), (interface.ip_configurations[0].private_ip_address, interface.virtual_machine.id))
        subnet = self.client.subnets.get(GROUP, "cluster", "nodes")
        self.assertEqual(["10.240.0.0/16", "fd00:240::/64"], subnet.address_prefixes)


if __name__ == "__main__":
    unittest.main()
