# SPDX-License-Identifier: Apache-2.0
"""Where tokens come from: the metadata service of a virtual machine (IMDS), and Microsoft Entra ID with a client's secret or a federated
token. All are served at the address of the API, as is what tells clients of the cloud's endpoints."""

import base64
import json
import re
import time

from core.messages import Answer

ASSERTION = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer"
AUDIENCE = "api://AzureADTokenExchange"
TENANT = re.compile(r"/(?P<tenant>[^/]+)/oauth2/v2\.0/token")


def name(path):
    """The name of a call, None if it is Resource Manager's."""
    if path.startswith("/metadata/identity/oauth2/token"):
        return "imds.token"
    if path.startswith("/metadata/instance"):
        return "imds.instance"
    if path == "/metadata/endpoints":
        return "metadata.endpoints"
    return "entra.token" if TENANT.fullmatch(path) else None


class Identity:
    """The services."""

    def __init__(self, cloud):
        self.cloud, self.tokens = cloud, cloud.tokens

    def answer(self, request, call):
        """Serves one call."""
        if call == "entra.token":
            return self._entra(request) if request.method == "POST" else Answer(405)
        if call == "metadata.endpoints":
            return self._endpoints(request)
        if request.headers.get("Metadata", "").lower() != "true" or request.headers.get("X-Forwarded-For"):
            return Answer(400, {"error": "invalid_request", "error_description": "Required metadata header not specified"})
        if not request.parameter("api-version"):
            return Answer(400, {"error": "invalid_request", "error_description": "Required query variable 'api-version' is missing"})
        if call == "imds.instance":
            settings = self.cloud.settings
            compute = {"location": settings["location"], "subscriptionId": settings["subscription"], "resourceGroupName": settings["resource_group"], "azEnvironment": "AzurePublicCloud", "name": "node-0"}
            return Answer(200, {"compute": compute})
        return self._imds(request)

    def _imds(self, request):
        settings, client = self.cloud.settings, request.parameter("client_id")
        if request.parameter("resource", "").rstrip("/") not in ("https://management.azure.com", "https://management.core.windows.net"):
            return Answer(400, {"error": "invalid_resource", "error_description": f"The resource principal {request.parameter('resource')} was not found."})
        if client not in (None, settings["client_id"]):
            return Answer(400, {"error": "invalid_request", "error_description": "Identity not found"})
        token, seconds = self.tokens.issue("managed identity")
        end = int(time.time()) + seconds
        body = {"access_token": token, "client_id": settings["client_id"], "expires_in": str(seconds), "expires_on": str(end), "ext_expires_in": str(seconds), "not_before": str(end - seconds), "resource": request.parameter("resource"), "token_type": "Bearer"}
        return Answer(200, body)

    def _entra(self, request):
        settings, form = self.cloud.settings, request.form()
        tenant = TENANT.fullmatch(request.path)["tenant"]
        if tenant != settings["tenant"]:
            return _refuse(400, "invalid_request", f"AADSTS90002: Tenant '{tenant}' not found.")
        if form.get("grant_type") != "client_credentials" or form.get("scope") != "https://management.azure.com/.default":
            return _refuse(400, "invalid_request", "AADSTS900144: The request body must contain the parameters 'grant_type' and 'scope'.")
        if form.get("client_id") != settings["client_id"]:
            return _refuse(400, "unauthorized_client", f"AADSTS700016: Application with identifier '{form.get('client_id')}' was not found in the directory.")
        if "client_assertion" in form:
            if form.get("client_assertion_type") != ASSERTION or not self._is_valid(form["client_assertion"]):
                return _refuse(401, "invalid_client", "AADSTS700211: No matching federated identity record found for presented assertion.")
        elif form.get("client_secret") != settings["client_secret"]:
            return _refuse(401, "invalid_client", "AADSTS7000215: Invalid client secret provided.")
        token, seconds = self.tokens.issue(form["client_id"])
        return Answer(200, {"token_type": "Bearer", "expires_in": seconds, "ext_expires_in": seconds, "access_token": token})

    def _is_valid(self, token):
        """Whether it is a JWT of the cluster for Entra; nobody checks the signature here."""
        parts = token.split(".")
        try:
            claims = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
        except (IndexError, ValueError):
            return False
        audience = claims.get("aud", [])
        audiences = [audience] if isinstance(audience, str) else audience
        return len(parts) == 3 and AUDIENCE in audiences and claims.get("exp", 0) > time.time() and claims.get("sub") == self.cloud.settings["subject"]

    def _endpoints(self, request):
        base = f"http://{request.headers.get('Host')}"
        audiences = ["https://management.core.windows.net/", "https://management.azure.com/"]
        authentication = {"loginEndpoint": base, "audiences": audiences, "tenant": "common", "identityProvider": "AAD"}
        known = {"name": "AzureCloud", "resourceManager": base, "authentication": authentication}
        # Old versions describe one cloud, newer ones list all.
        return Answer(200, known if request.parameter("api-version", "").startswith("2015") else [known])


def _refuse(status, error, description):
    return Answer(status, {"error": error, "error_description": description, "error_codes": [int(re.search(r"\d+", description)[0])]})
