# SPDX-License-Identifier: Apache-2.0
"""What Microsoft's client does not show of the stand-in: strictness, tokens, and shapes of answers as they were recorded from the real API
(Azure Service Operator's `Test_Networking_LoadBalancer_CRUD`)."""

import base64
import http.client
import json
import time
import unittest
import urllib.error
from urllib.parse import urlencode

from standin import StandIn

GROUP = "/subscriptions/00000000-0000-0000-0000-000000000001/resourceGroups/cluster"
BASE = f"{GROUP}/providers/Microsoft.Network"
ADDRESS = {"location": "westeurope", "sku": {"name": "Standard"}, "properties": {"publicIPAllocationMethod": "Static"}}
TENANT, CLIENT = "00000000-0000-0000-0000-000000000002", "00000000-0000-0000-0000-000000000003"
# Fields of a public IP address and of a load balancer, as recorded.
RECORDED_ADDRESS = {"resourceGuid", "ipAddress", "publicIPAddressVersion", "publicIPAllocationMethod", "idleTimeoutInMinutes", "ipTags", "provisioningState"}
RECORDED_BALANCER = {"provisioningState", "resourceGuid", "frontendIPConfigurations", "backendAddressPools", "loadBalancingRules", "probes", "inboundNatRules", "outboundRules", "inboundNatPools"}


class Api(unittest.TestCase):
    """A stand-in for each class: it starts slowly, because of the types."""

    settings = {"anonymous": True}

    @classmethod
    def setUpClass(cls):
        cls.standin = StandIn("azure", **cls.settings)
        cls.addClassCleanup(cls.standin.stop)

    def call(self, method, path, body=None, headers=(), version="2025-05-01"):
        """Status, headers and JSON."""
        return self.standin.call(method, f"{path}?api-version={version}" if version else path, body, headers)

    def refused(self, method, path, body=None, **how):
        """Status and code, and those of the first detail."""
        status, _, answer = self.call(method, path, body, **how)
        self.assertGreaterEqual(status, 400, answer)
        error = answer["error"]
        return status, error["code"], error["details"][0]["message"] if error.get("details") else error["message"]


class Strictness(Api):
    """Whatever the types do not have is refused."""

    def test_bodies(self):
        address = {"id": f"{BASE}/publicIPAddresses/a"}
        self.assertEqual(201, self.call("PUT", address["id"], ADDRESS)[0])
        name = f"{BASE}/loadBalancers/lb"
        front, pool = {"name": "f", "properties": {"publicIPAddress": address}}, {"name": "p"}
        rule = {"protocol": "Tcp", "frontendPort": 80, "backendPort": 80, "frontendIPConfiguration": {"id": f"{name}/frontendIPConfigurations/f"}, "backendAddressPool": {"id": f"{name}/backendAddressPools/p"}}

        def balancer(rules=(), probes=(), frontends=(front,), **more):
            parts = {"frontendIPConfigurations": list(frontends), "backendAddressPools": [pool], "probes": list(probes)}
            parts["loadBalancingRules"] = [{"name": f"r{index}", "properties": one} for index, one in enumerate(rules)]
            return {"location": "westeurope", "sku": {"name": "Standard"}, "properties": parts} | more

        for body, code, message in (
            (balancer(colour="red"), "InvalidRequestFormat", "Could not find member 'colour' on object of type 'LoadBalancer'"),
            (balancer([rule | {"frontendPort": "80"}]), "InvalidRequestFormat", "Error converting value \"80\" to type 'int'"),
            (balancer([rule | {"protocol": "Sctp"}]), "InvalidRequestFormat", "TransportProtocol"),
            (balancer([{k: v for k, v in rule.items() if k != "protocol"}]), "InvalidRequestFormat", "Required property 'protocol'"),
            (balancer(location="moonbase"), "LocationNotAvailableForResourceType", "moonbase"),
            (balancer(location=None), "LocationRequired", "location"),
            (balancer([rule | {"probe": {"id": f"{name}/probes/none"}}]), "InvalidResourceReference", "probes/none referenced by resource .*/loadBalancingRules/r0 was not found"),
            (balancer([rule, rule | {"frontendPort": 81}]), "RulesUseSameBackendPortProtocolAndPool", "with floating IP disabled"),
            (balancer([rule | {"enableFloatingIP": True}] * 2), "RulesUseSameFrontendPortProtocolAndIPConfig", "same protocol"),
            (balancer([rule | {"frontendPort": 0, "backendPort": 0}]), "LoadBalancingRulePortOutOfRange", "between 1 and 65534"),
            (balancer([rule | {"idleTimeoutInMinutes": 3}]), "LoadBalancingRuleIdleTimeoutOutOfRange", "between 4 and 100"),
            (balancer(probes=[{"name": "x", "properties": {"protocol": "Tcp", "port": 1, "requestPath": "/"}}]), "ProbeRequestPathInvalid", "not allowed"),
            (balancer(probes=[{"name": "x", "properties": {"protocol": "Http", "port": 1}}]), "ProbeRequestPathInvalid", "required"),
            (balancer(probes=[{"name": "x", "properties": {"protocol": "Tcp", "port": 1, "intervalInSeconds": 4}}]), "ProbeIntervalOutOfRange", "out of range"),
            (balancer(frontends=[front, front]), "DuplicateResourceName", "same name"),
            (balancer(frontends=[front, front | {"name": "g"}]), "PublicIPReferencedByMultipleIPConfigs", "multiple ipconfigs"),
            (balancer(frontends=[{"name": "f", "properties": {"publicIPAddress": {"id": f"{BASE}/publicIPAddresses/none"}}}]), "InvalidResourceReference", "was not found"),
        ):
            with self.subTest(code=code, message=message):
                found = self.refused("PUT", name, body)
                self.assertEqual((400, code), found[:2], found)
                self.assertRegex(found[2], message)
        self.assertEqual(404, self.call("GET", name)[0])
        self.assertEqual(201, self.call("PUT", name, balancer([rule]))[0])
        taken = balancer()
        self.assertEqual((400, "PublicIPAddressInUse"), self.refused("PUT", f"{BASE}/loadBalancers/other", taken)[:2])

    def test_paths_and_versions(self):
        for path, how, status, code in (
            (f"{BASE}/loadBalancers/none", {}, 404, "ResourceNotFound"),
            (f"{BASE.replace('/cluster/', '/none/')}/loadBalancers/x", {}, 404, "ResourceGroupNotFound"),
            (f"{BASE.replace('000001', '000009')}/loadBalancers/x", {}, 404, "SubscriptionNotFound"),
            (f"{BASE}/loadBalancers/x", {"version": None}, 400, "MissingApiVersionParameter"),
            (f"{BASE}/loadBalancers/x", {"version": "2030-01-01"}, 400, "NoRegisteredProviderFound"),
            (f"{BASE}/routeTables/x", {}, 501, "NotImplementedByTheStandIn"),
        ):
            with self.subTest(path):
                self.assertEqual((status, code), self.refused("GET", path, **how)[:2])
        self.assertEqual(200, self.call("GET", f"{BASE.lower()}/VIRTUALNETWORKS/Cluster")[0])

    def test_public_addresses(self):
        name = f"{BASE}/publicIPAddresses/fixed"
        self.call("PUT", name, ADDRESS | {"zones": ["1", "2"]})
        self.assertEqual("ResourceAvailabilityZonesCannotBeModified", self.refused("PUT", name, ADDRESS)[1])
        self.assertEqual("StandardSkuPublicIPAddressMustBeStatic", self.refused("PUT", name, ADDRESS | {"properties": {}})[1])
        label = {"publicIPAllocationMethod": "Static", "dnsSettings": {"domainNameLabel": "web"}}
        self.call("PUT", f"{BASE}/publicIPAddresses/label", ADDRESS | {"properties": label})
        self.assertEqual("web.westeurope.cloudapp.azure.com", self.call("GET", f"{BASE}/publicIPAddresses/label")[2]["properties"]["dnsSettings"]["fqdn"])
        self.assertEqual("DnsRecordInUse", self.refused("PUT", f"{BASE}/publicIPAddresses/other", ADDRESS | {"properties": label})[1])
        self.standin.test("POST", "quotas", {"publicIPAddresses": 0})
        self.assertEqual("PublicIPCountLimitReached", self.refused("PUT", f"{BASE}/publicIPAddresses/more", ADDRESS)[1])
        self.standin.test("POST", "quotas", {"publicIPAddresses": None})

    def test_security_rules(self):
        rule = {"protocol": "Tcp", "direction": "Inbound", "access": "Allow", "priority": 500, "sourceAddressPrefix": "*", "sourcePortRange": "*", "destinationAddressPrefix": "*", "destinationPortRange": "80"}
        for change, code in (
            ({"priority": 99}, "SecurityRuleInvalidPriority"),
            ({"sourceAddressPrefixes": ["10.0.0.0/8"]}, "SecurityRuleParameterContradiction"),
            ({"destinationPortRange": "80-70"}, "SecurityRuleInvalidPortRange"),
            ({"destinationAddressPrefix": "10.0.0.0/33"}, "SecurityRuleInvalidAddressPrefix"),
        ):
            with self.subTest(code):
                found = self.refused("PUT", f"{BASE}/networkSecurityGroups/nodes/securityRules/x", {"properties": rule | change})
                self.assertEqual((400, code), found[:2])
        many = [f"198.51.{n // 256}.{n % 256}" for n in range(4001)]
        self.assertEqual("MaxAddressPrefixesPerNsgExceeded", self.refused("PUT", f"{BASE}/networkSecurityGroups/nodes/securityRules/x", {"properties": {k: v for k, v in rule.items() if k != "destinationAddressPrefix"} | {"destinationAddressPrefixes": many}})[1])

    def test_faults_cut_the_connection_before_or_after_the_effect(self):
        for cut, exists in (("before", 404), ("after", 200)):
            self.standin.test("POST", "faults", {"call": "publicIPAddresses.createOrUpdate", "cut": cut})
            with self.assertRaises((urllib.error.URLError, http.client.RemoteDisconnected)):
                self.call("PUT", f"{BASE}/publicIPAddresses/cut", ADDRESS)
            self.assertEqual(exists, self.call("GET", f"{BASE}/publicIPAddresses/cut")[0])


class Recorded(Api):
    """The shapes of the real API's answers."""

    settings = {"anonymous": True, "delay": 60}

    def finished(self, headers):
        """The operation's last answer, after its first."""
        path = headers["Azure-AsyncOperation"].removeprefix(self.standin.url)
        self.assertEqual({"status": "InProgress"}, self.standin.call("GET", path)[2])
        self.standin.skip(60)
        return self.standin.call("GET", path)[2]

    def test_resources_and_operations(self):
        status, headers, created = self.call("PUT", f"{BASE}/publicIPAddresses/a", ADDRESS)
        self.assertEqual((201, "Updating", RECORDED_ADDRESS - {"ipAddress"}), (status, created["properties"]["provisioningState"], set(created["properties"])))
        self.assertEqual({"status": "Succeeded"}, self.finished(headers))
        _, headers, address = self.call("GET", f"{BASE}/publicIPAddresses/a")
        self.assertEqual((RECORDED_ADDRESS, address["etag"]), (set(address["properties"]), headers["ETag"]))
        self.assertEqual({"name", "id", "etag", "location", "properties", "type", "sku"}, set(address))
        self.assertEqual({"name": "Standard", "tier": "Regional"}, address["sku"])
        self.assertNotEqual(created["etag"], address["etag"])
        front = {"name": "f", "properties": {"publicIPAddress": {"id": f"{BASE}/publicIPAddresses/a"}}}
        body = {"location": "westeurope", "sku": {"name": "Standard"}, "properties": {"frontendIPConfigurations": [front]}}
        _, headers, _ = self.call("PUT", f"{BASE}/loadBalancers/b", body)
        self.finished(headers)
        balancer = self.call("GET", f"{BASE}/loadBalancers/b")[2]
        self.assertEqual(RECORDED_BALANCER, set(balancer["properties"]))
        front = balancer["properties"]["frontendIPConfigurations"][0]
        self.assertEqual((balancer["etag"], "Microsoft.Network/loadBalancers/frontendIPConfigurations", "Dynamic"), (front["etag"], front["type"], front["properties"]["privateIPAllocationMethod"]))
        status, headers, _ = self.call("DELETE", f"{BASE}/loadBalancers/b")
        self.assertEqual(202, status)
        self.assertIn("/operationResults/", headers["Location"])
        self.assertEqual("Deleting", self.call("GET", f"{BASE}/loadBalancers/b")[2]["properties"]["provisioningState"])
        self.assertEqual((409, "AnotherOperationInProgress"), self.refused("PUT", f"{BASE}/loadBalancers/b", body)[:2])
        location = headers["Location"].removeprefix(self.standin.url)
        self.assertEqual(202, self.standin.call("GET", location)[0])
        self.finished(headers)
        self.assertEqual(204, self.standin.call("GET", location)[0])
        message = "The Resource 'Microsoft.Network/loadBalancers/b' under resource group 'cluster' was not found. For more details please go to https://aka.ms/ARMResourceNotFoundFix"
        self.assertEqual((404, "ResourceNotFound", message), self.refused("GET", f"{BASE}/loadBalancers/b"))


class Tokens(Api):
    """Without a token nothing is served."""

    settings = {}

    def accepted(self, token):
        """Whether the API accepts the token."""
        return self.call("GET", f"{BASE}/loadBalancers", headers={"Authorization": f"Bearer {token}"})[0] == 200

    def entra(self, tenant=TENANT, **fields):
        """Status and answer of Entra's token endpoint."""
        form = {"grant_type": "client_credentials", "client_id": CLIENT, "scope": "https://management.azure.com/.default"} | fields
        return self.standin.call("POST", f"/{tenant}/oauth2/v2.0/token", urlencode(form).encode(), {"Content-Type": "application/x-www-form-urlencoded"})[::2]

    def test_api_demands_one(self):
        self.assertEqual((401, "InvalidAuthenticationToken"), self.refused("GET", f"{BASE}/loadBalancers")[:2])

    def test_managed_identity(self):
        path = "/metadata/identity/oauth2/token?api-version=2018-02-01&resource=https://management.azure.com/"
        self.assertEqual(400, self.standin.call("GET", path)[0])
        status, _, answer = self.standin.call("GET", path, headers={"Metadata": "true"})
        self.assertEqual((200, "3600", "Bearer"), (status, answer["expires_in"], answer["token_type"]))
        self.assertTrue(self.accepted(answer["access_token"]))
        self.assertEqual(400, self.standin.call("GET", f"{path}&client_id=other", headers={"Metadata": "true"})[0])

    def test_client_secret(self):
        status, answer = self.entra(client_secret="secret")
        self.assertEqual((200, 3600), (status, answer["expires_in"]))
        self.assertTrue(self.accepted(answer["access_token"]))
        status, answer = self.entra(client_secret="wrong")
        self.assertEqual((401, "invalid_client"), (status, answer["error"]))
        self.assertEqual(400, self.entra(tenant="other", client_secret="secret")[0])

    def test_federated_token(self):
        def assertion(**change):
            claims = {"aud": ["api://AzureADTokenExchange"], "sub": "system:serviceaccount:steerage:controller", "exp": int(time.time()) + 600} | change
            return ".".join(base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in ({"alg": "RS256"}, claims, {}))

        kind = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer"
        status, answer = self.entra(client_assertion=assertion(), client_assertion_type=kind)
        self.assertEqual(200, status, answer)
        self.assertTrue(self.accepted(answer["access_token"]))
        for wrong in ({"aud": "other"}, {"exp": 1}, {"sub": "other"}):
            self.assertEqual(401, self.entra(client_assertion=assertion(**wrong), client_assertion_type=kind)[0])

    def test_endpoints(self):
        _, _, endpoints = self.standin.call("GET", "/metadata/endpoints?api-version=2022-09-01")
        self.assertEqual((self.standin.url, self.standin.url), (endpoints[0]["resourceManager"], endpoints[0]["authentication"]["loginEndpoint"]))


if __name__ == "__main__":
    unittest.main()
