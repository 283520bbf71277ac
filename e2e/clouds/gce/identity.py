# SPDX-License-Identifier: Apache-2.0
"""Where tokens come from: the metadata server of a virtual machine, Security Token Service with IAM credentials for workload identity
federation, and the token endpoint for keys of service accounts. All are served at the address of the API."""

import base64
import json
import time
from datetime import UTC, datetime, timedelta
from urllib.parse import unquote

from core.messages import Answer

EXCHANGE = "urn:ietf:params:oauth:grant-type:token-exchange"
BEARER = "urn:ietf:params:oauth:grant-type:jwt-bearer"
ACCESS = "urn:ietf:params:oauth:token-type:access_token"
JWT = ("urn:ietf:params:oauth:token-type:jwt", "urn:ietf:params:oauth:token-type:id_token")
METADATA = "/computeMetadata/v1"


def name(path):
    """The name of a call, None if it is another service's."""
    if path == "/" or path.startswith(METADATA):
        return "metadata.token" if path.endswith("/token") else "metadata.get"
    if path.endswith(":generateAccessToken"):
        return "iamcredentials.generateAccessToken"
    return {"/v1/token": "sts.token", "/token": "oauth2.token"}.get(path)


def _claims(token):
    """The claims of a JWT whose signature nobody checks here; None if it is no JWT or has expired."""
    parts = token.split(".")
    try:
        claims = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
        return claims if len(parts) == 3 and claims.get("exp", 0) > time.time() else None
    except (IndexError, ValueError):
        return None


class Identity:
    """The three services."""

    def __init__(self, cloud):
        self.cloud, self.tokens = cloud, cloud.tokens

    def answer(self, request, call):
        """Serves one call."""
        if call.startswith("metadata."):
            return self._metadata(request)
        if call == "sts.token":
            return self._exchange(request)
        return self._impersonate(request) if call.startswith("iamcredentials") else self._key(request)

    def _metadata(self, request):
        headers = {"Metadata-Flavor": "Google", "Server": "Metadata Server for VM", "Content-Type": "application/text"}
        if request.path == "/":
            return Answer(200, b"computeMetadata/\n", headers)
        if request.headers.get("Metadata-Flavor") != "Google" or request.headers.get("X-Forwarded-For"):
            return Answer(403, b"Missing Metadata-Flavor:Google header.\n", headers)
        settings = self.cloud.settings
        account = {"email": settings["service_account"], "scopes": "https://www.googleapis.com/auth/cloud-platform\n"}
        values = {
            "project/project-id": settings["project"],
            "project/numeric-project-id": "123456789012",
            "instance/zone": f"projects/123456789012/zones/{settings['zones'][0]}",
            "instance/name": "controller",
            "instance/tags": json.dumps(["node"]),
            "instance/attributes/cluster-name": settings["cluster"],
            "instance/attributes/cluster-location": settings["zones"][0],
        }
        for who in ("default", settings["service_account"]):
            values |= {f"instance/service-accounts/{who}/{key}": value for key, value in account.items()}
            if request.path == f"{METADATA}/instance/service-accounts/{who}/token":
                token, seconds = self.tokens.issue(settings["service_account"])
                body = {"access_token": token, "expires_in": seconds, "token_type": "Bearer"}
                return Answer(200, body, headers | {"Content-Type": "application/json"})
            if request.path.rstrip("/") == f"{METADATA}/instance/service-accounts/{who}" and request.parameter("recursive") == "true":
                body = {"aliases": ["default"], "email": account["email"], "scopes": account["scopes"].split()}
                return Answer(200, body, headers | {"Content-Type": "application/json"})
        value = values.get(request.path.removeprefix(METADATA + "/"))
        return Answer(404, b"Not Found\n", headers) if value is None else Answer(200, value.encode(), headers)

    def _exchange(self, request):
        form = request.form()
        if "json" in request.headers.get("Content-Type", ""):
            # The JSON form of the same request has its fields in camel case.
            form = {"".join("_" + c.lower() if c.isupper() else c for c in key): value for key, value in request.json().items()}
        if form.get("grant_type") != EXCHANGE or form.get("requested_token_type") != ACCESS or form.get("subject_token_type") not in JWT:
            return _oauth(400, "invalid_request", "Invalid value for grant_type, requested_token_type or subject_token_type.")
        pool = self.cloud.settings["pool"]
        if form.get("audience") != f"//iam.googleapis.com/{pool}":
            return _oauth(400, "invalid_target", f"The target service indicated by the \"audience\" parameters is invalid: {form.get('audience')}")
        if not form.get("scope"):
            return _oauth(400, "invalid_scope", "Some requested scopes cannot be shown.")
        claims = _claims(form.get("subject_token", ""))
        audience = (claims or {}).get("aud", [])
        audiences = [audience] if isinstance(audience, str) else audience
        if claims is None or not {f"//iam.googleapis.com/{pool}", f"https://iam.googleapis.com/{pool}"} & set(audiences):
            return _oauth(400, "invalid_grant", "The subject token is no valid token for this provider, or has expired.")
        token, seconds = self.tokens.issue(f"principal:{claims.get('sub')}")
        return Answer(200, {"access_token": token, "issued_token_type": ACCESS, "token_type": "Bearer", "expires_in": seconds})

    def _impersonate(self, request):
        subject = self.tokens.subject(request.headers.get("Authorization"))
        if subject is None:
            return Answer(401, {"error": {"code": 401, "message": "Request had invalid authentication credentials.", "status": "UNAUTHENTICATED"}})
        email = unquote(request.path.split("/")[-1]).removesuffix(":generateAccessToken")
        if not subject.startswith("principal:") or email != self.cloud.settings["service_account"]:
            message = "Permission 'iam.serviceAccounts.getAccessToken' denied on resource (or it may not exist)."
            return Answer(403, {"error": {"code": 403, "message": message, "status": "PERMISSION_DENIED"}})
        body = request.json()
        if not body.get("scope"):
            return Answer(400, {"error": {"code": 400, "message": "Request contains an invalid argument.", "status": "INVALID_ARGUMENT"}})
        lifetime = float(body.get("lifetime", "3600s").removesuffix("s"))
        token, seconds = self.tokens.issue(email, min(lifetime, self.tokens.lifetime))
        end = datetime.now(UTC) + timedelta(seconds=seconds)
        return Answer(200, {"accessToken": token, "expireTime": end.strftime("%Y-%m-%dT%H:%M:%SZ")})

    def _key(self, request):
        form = request.form()
        claims = _claims(form.get("assertion", ""))
        if form.get("grant_type") != BEARER or claims is None or claims.get("iss") != self.cloud.settings["service_account"]:
            return _oauth(400, "invalid_grant", "Invalid JWT.")
        token, seconds = self.tokens.issue(claims["iss"])
        return Answer(200, {"access_token": token, "expires_in": seconds, "token_type": "Bearer"})


def _oauth(status, error, description):
    return Answer(status, {"error": error, "error_description": description})
