# SPDX-License-Identifier: Apache-2.0
"""What the tests here use a stand-in with: a running server, and calls past the clouds' clients."""

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

SERVER = Path(__file__).parent.parent / "server.py"
PROJECT, REGION, ZONE = "test-project", "us-central1", "us-central1-a"


class StandIn:
    """A server process with the given settings."""

    def __init__(self, cloud="gce", lifetime=3600, **settings):
        command = [sys.executable, str(SERVER), cloud, "--until-eof", "--token-lifetime", str(lifetime), "--settings", json.dumps(settings)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.url = json.loads(self.process.stdout.readline())["url"]

    def stop(self):
        """Ends it."""
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()

    def call(self, method, path, body=None, headers=()):
        """Status, headers and JSON of the answer."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, method=method, headers={"Content-Type": "application/json"} | dict(headers))
        try:
            with urllib.request.urlopen(request) as answer:
                content, status, headers = answer.read(), answer.status, answer.headers
        except urllib.error.HTTPError as error:
            content, status, headers = error.read(), error.code, error.headers
        try:
            return status, headers, json.loads(content or b"null")
        except ValueError:
            return status, headers, content.decode()

    def test(self, method, path, body=None):
        """A call below /test/, which has to succeed."""
        status, _, answer = self.call(method, f"/test/{path}", body)
        if status != 200:
            raise AssertionError(f"{method} /test/{path}: {answer}")
        return answer

    def skip(self, seconds):
        """Puts its clock forward."""
        self.test("POST", "time", {"skip": seconds})

    def compute(self, method, path, body=None, token=None):
        """A call of the API, with a token if there is one."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return self.call(method, f"/compute/v1/projects/{PROJECT}/{path}", body, headers)[::2]

    def done(self, operation):
        """Polls an operation until it is done."""
        path = operation["selfLink"].split("/compute/v1", 1)[1]
        for _ in range(500):
            status, _, operation = self.call("GET", f"/compute/v1{path}")
            if status != 200:
                raise AssertionError(operation)
            if operation["status"] == "DONE":
                return operation
            time.sleep(0.01)
        raise AssertionError(f"never done: {operation}")


def link(path):
    """The URL of something in the project."""
    return f"https://www.googleapis.com/compute/v1/projects/{PROJECT}/{path}"
