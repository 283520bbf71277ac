# SPDX-License-Identifier: Apache-2.0
"""Google's client google-api-python-client, which is made from the discovery document, and its credentials for workload identity
federation, on the stand-in."""

import base64
import json
import tempfile
import time
import unittest
from pathlib import Path

import google_auth_httplib2
import httplib2
from standin import PROJECT, REGION, ZONE, StandIn, link
from google.auth import identity_pool
from google.auth.exceptions import OAuthError, RefreshError
from googleapiclient.discovery import build
from googleapiclient.errors import HttpError

POOL = "projects/123456789012/locations/global/workloadIdentityPools/test/providers/test"
ACCOUNT = "steerage@test-project.iam.gserviceaccount.com"
AT = {"project": PROJECT, "region": REGION}


def subject_token(audience=f"//iam.googleapis.com/{POOL}", lifetime=600):
    """A JWT as a cluster's API server makes them. Nobody checks its signature here."""
    claims = {"iss": "https://cluster.example", "sub": "system:serviceaccount:steerage:controller", "aud": [audience], "exp": int(time.time()) + lifetime}
    parts = ({"alg": "RS256"}, claims, {})
    return ".".join(base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts)


class Discovery(unittest.TestCase):
    """Without types: what the client sends is what a test writes."""

    @classmethod
    def setUpClass(cls):
        cls.standin = StandIn(anonymous=True)
        cls.addClassCleanup(cls.standin.stop)
        cls.api = build("compute", "v1", http=httplib2.Http(), client_options={"api_endpoint": f"{cls.standin.url}/compute/v1/"}, static_discovery=True)
        cls.addClassCleanup(cls.api.close)

    def finish(self, request):
        """Carries out a change, and blocks in `wait` until it is done."""
        operation = request.execute()
        wait = self.api.regionOperations().wait(**AT, operation=operation["name"]).execute()
        self.assertEqual(("DONE", None), (wait["status"], wait.get("error")))

    def refusal(self, request):
        """Status, reason and message of a refused request."""
        with self.assertRaises(HttpError) as caught:
            request.execute()
        error = json.loads(caught.exception.content)["error"]
        self.assertEqual(caught.exception.status_code, error["code"])
        self.assertEqual(error["message"], error["errors"][0]["message"])
        return error["code"], error["errors"][0]["reason"], error["message"]

    def test_health_check_is_created_changed_and_deleted(self):
        checks = self.api.regionHealthChecks()
        body = {"name": "local", "type": "HTTP", "httpHealthCheck": {"port": 30001, "requestPath": "/healthz"}, "checkIntervalSec": 3, "timeoutSec": 1}
        self.finish(checks.insert(**AT, body=body))
        made = checks.get(**AT, healthCheck="local").execute()
        self.assertEqual((3, 2, "compute#healthCheck"), (made["checkIntervalSec"], made["unhealthyThreshold"], made["kind"]))
        self.finish(checks.patch(**AT, healthCheck="local", body={"httpHealthCheck": {"port": 30002}}))
        self.assertEqual((30002, "/healthz"), ((check := checks.get(**AT, healthCheck="local").execute()["httpHealthCheck"])["port"], check["requestPath"]))
        self.finish(checks.update(**AT, healthCheck="local", body={"name": "local", "type": "TCP", "tcpHealthCheck": {"port": 80}}))
        self.assertEqual(("TCP", 5), ((check := checks.get(**AT, healthCheck="local").execute())["type"], check["checkIntervalSec"]))
        self.finish(checks.delete(**AT, healthCheck="local"))
        self.assertEqual((404, "notFound"), self.refusal(checks.get(**AT, healthCheck="local"))[:2])

    def test_rule_gets_labels_and_another_backend_service(self):
        services, rules = self.api.regionBackendServices(), self.api.forwardingRules()
        for name in ("one", "two"):
            self.finish(services.insert(**AT, body={"name": name, "protocol": "UNSPECIFIED", "loadBalancingScheme": "INTERNAL"}))
        body = {"name": "rule", "loadBalancingScheme": "INTERNAL", "backendService": link(f"regions/{REGION}/backendServices/one"), "IPProtocol": "L3_DEFAULT", "allPorts": True, "labels": {"lost": "yes"}}
        self.finish(rules.insert(**AT, body=body))
        rule = rules.get(**AT, forwardingRule="rule").execute()
        self.assertNotIn("labels", rule)
        labels = {"labels": {"app": "web"}, "labelFingerprint": rule["labelFingerprint"]}
        self.finish(rules.setLabels(**AT, resource="rule", body=labels))
        self.assertEqual((412, "conditionNotMet"), self.refusal(rules.setLabels(**AT, resource="rule", body=labels))[:2])
        self.finish(rules.setTarget(**AT, forwardingRule="rule", body={"target": link(f"regions/{REGION}/backendServices/two")}))
        self.finish(rules.patch(**AT, forwardingRule="rule", body={"allowGlobalAccess": True}))
        changed = rules.get(**AT, forwardingRule="rule").execute()
        self.assertEqual(({"app": "web"}, "two", True), (changed["labels"], changed["backendService"].split("/")[-1], changed["allowGlobalAccess"]))
        self.assertEqual((400, "invalid"), self.refusal(rules.patch(**AT, forwardingRule="rule", body={"allPorts": False}))[:2])
        self.assertEqual(["rule"], [item["name"] for item in rules.list(**AT, filter='(name = "rule") (loadBalancingScheme = "INTERNAL")').execute()["items"]])

    def test_service_of_another_scheme_or_protocol_is_refused(self):
        self.finish(self.api.regionBackendServices().insert(**AT, body={"name": "udp", "protocol": "UDP", "loadBalancingScheme": "EXTERNAL"}))
        body = {"name": "mismatch", "backendService": link(f"regions/{REGION}/backendServices/udp"), "ports": ["53"], "loadBalancingScheme": "EXTERNAL"}
        self.assertEqual((400, "invalid"), self.refusal(self.api.forwardingRules().insert(**AT, body=body))[:2])
        body |= {"IPProtocol": "UDP", "ports": [str(port) for port in range(1, 7)]}
        self.assertRegex(self.refusal(self.api.forwardingRules().insert(**AT, body=body))[2], "At most 5 ports")

    def test_instances_are_filtered_and_endpoints_need_one(self):
        self.standin.test("POST", "instances", [{"name": "here", "zone": ZONE, "address": "10.128.0.2"}, {"name": "there", "zone": "us-central1-b", "address": "10.128.0.3"}])
        listed = self.api.instances().list(project=PROJECT, zone=ZONE, filter="name eq he.*").execute()
        self.assertEqual(["here"], [item["name"] for item in listed["items"]])
        groups, at = self.api.networkEndpointGroups(), {"project": PROJECT, "zone": ZONE}
        body = {"name": "group", "networkEndpointType": "GCE_VM_IP", "network": "global/networks/default", "subnetwork": f"regions/{REGION}/subnetworks/default"}
        groups.insert(**at, body=body).execute()
        attach = groups.attachNetworkEndpoints
        self.assertEqual((404, "notFound"), self.refusal(attach(**at, networkEndpointGroup="group", body={"networkEndpoints": [{"instance": "there"}]}))[:2])
        wrong = {"networkEndpoints": [{"instance": "here", "ipAddress": "10.128.0.9"}]}
        self.assertRegex(self.refusal(attach(**at, networkEndpointGroup="group", body=wrong))[2], "doesn't belong to the .sub.network default or to the instance here")
        attach(**at, networkEndpointGroup="group", body={"networkEndpoints": [{"instance": "here"}]}).execute()
        self.assertEqual(1, groups.get(**at, networkEndpointGroup="group").execute()["size"])
        self.standin.test("DELETE", f"instances/{ZONE}/here")
        self.assertEqual(0, groups.get(**at, networkEndpointGroup="group").execute()["size"])


class Federation(unittest.TestCase):
    """google-auth exchanges a token of the cluster for Google's."""

    @classmethod
    def setUpClass(cls):
        cls.standin = StandIn()
        cls.addClassCleanup(cls.standin.stop)

    def list_addresses(self, token, impersonate):
        """Calls the API with credentials of a pool."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "token")
            file.write_text(token, encoding="ascii")
            arguments = {
                "audience": f"//iam.googleapis.com/{POOL}", "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
                "token_url": f"{self.standin.url}/v1/token", "credential_source": {"file": str(file)},
                "scopes": ["https://www.googleapis.com/auth/compute"],
            }  # fmt: skip
            if impersonate:
                arguments["service_account_impersonation_url"] = f"{self.standin.url}/v1/projects/-/serviceAccounts/{impersonate}:generateAccessToken"
            http = google_auth_httplib2.AuthorizedHttp(identity_pool.Credentials(**arguments), http=httplib2.Http())
            with build("compute", "v1", http=http, client_options={"api_endpoint": f"{self.standin.url}/compute/v1/"}, static_discovery=True) as api:
                return api.addresses().list(**AT).execute()

    def test_federated_and_impersonated_tokens_are_accepted(self):
        for impersonate in (None, ACCOUNT):
            self.assertEqual("compute#addressList", self.list_addresses(subject_token(), impersonate)["kind"])
        calls = self.standin.test("GET", "calls")["counts"]
        self.assertEqual((2, 1), (calls["sts.token"], calls["iamcredentials.generateAccessToken"]))

    def test_foreign_and_expired_tokens_are_refused(self):
        for token in (subject_token(audience="//iam.googleapis.com/other"), subject_token(lifetime=-1)):
            with self.assertRaises(OAuthError):
                self.list_addresses(token, None)
        with self.assertRaises(RefreshError):
            self.list_addresses(subject_token(), "other@test-project.iam.gserviceaccount.com")


if __name__ == "__main__":
    unittest.main()
