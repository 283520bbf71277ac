# SPDX-License-Identifier: Apache-2.0
"""Requests, answers, and the exceptions that end a request early."""

import json
from urllib.parse import parse_qsl, unquote, urlsplit


class Request:
    """One HTTP request. `fault` is the injected fault that applies to it, if any."""

    def __init__(self, method, target, headers, body):
        parts = urlsplit(target)
        self.method = method
        self.path = unquote(parts.path)
        self.query = parse_qsl(parts.query, keep_blank_values=True)
        self.headers = headers
        self.body = body
        self.fault = None

    def parameter(self, name, default=None):
        """The last value of a query parameter."""
        return dict(self.query).get(name, default)

    def json(self):
        """The body as JSON; ValueError if it is none."""
        return json.loads(self.body)

    def form(self):
        """The body as a form."""
        return dict(parse_qsl(self.body.decode(errors="replace"), keep_blank_values=True))


class Answer:
    """A status, a body of JSON or bytes, and headers."""

    def __init__(self, status, body=None, headers=()):
        self.status = status
        self.body = body
        self.headers = dict(headers)

    def content(self):
        """The body's bytes."""
        if self.body is None:
            return b""
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body, separators=(",", ":")).encode()


class Refusal(Exception):
    """The cloud refuses: a status, a reason in the cloud's words, and a message."""

    def __init__(self, status, reason, message, **more):
        super().__init__(message)
        self.status, self.reason, self.message, self.more = status, reason, message, more


class Later(Exception):
    """The request blocks: it is tried again after these seconds, in which others are served."""

    def __init__(self, seconds):
        super().__init__(f"again in {seconds} s")
        self.seconds = seconds
