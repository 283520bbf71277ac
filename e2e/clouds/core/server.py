# SPDX-License-Identifier: Apache-2.0
"""The HTTP server: it records calls, injects faults, and hands what remains to the cloud, one request at a time.

Tests control it below /test/: `faults` (GET, POST, DELETE), `throttle` (POST), `calls` (GET, DELETE), `snapshot` (GET), `time` (POST,
to skip some), `tokens` (POST, DELETE), and what the cloud adds.
"""

import json
import socket
import threading
import traceback
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from .faults import Calls, Faults, Throttle
from .messages import Answer, Later, Refusal, Request
from .timeline import Timeline
from .tokens import Tokens


class Cloud:
    """What a cloud has to offer. All methods but `name` run under the server's lock."""

    def __init__(self, timeline, tokens, settings):
        self.timeline, self.tokens, self.settings, self.quotas = timeline, tokens, settings, {}

    def name(self, request):
        """The name by which a call is counted, and by which faults name it."""
        raise NotImplementedError

    def answer(self, request, name):
        """Serves a call; raises Refusal or Later."""
        raise NotImplementedError

    def refuse(self, refusal):
        """The answer that says this refusal."""
        raise NotImplementedError

    def throttled(self, throttle):
        """The refusal of a call that exceeds the budget."""
        raise NotImplementedError

    def snapshot(self):
        """All that tests compare: names and contents, without identifiers, times and versions."""
        raise NotImplementedError

    def control(self, method, path, body):
        """Serves a call below /test/ that changes the cloud: `settings` (GET, POST), `quotas` (POST), and what `put` knows. KeyError if
        there is no such call."""
        if method == "GET" and path == "settings":
            return self.settings
        if method != "POST":
            raise KeyError(path)
        match path:
            case "settings":
                unknown = set(body) - set(self.settings)
                if unknown:
                    raise ValueError(f"unknown settings: {unknown}")
                # Others have the same dictionary.
                self.settings.update(body)
            case "quotas":
                self.quotas |= body
            case _:
                self.put(path, body)
        return {}

    def put(self, path, body):
        """What else a test makes by a POST. KeyError if there is no such call."""
        raise KeyError(path)


class Server:
    """A cloud behind one address."""

    def __init__(self, make_cloud, lifetime=3600.0):
        self.lock = threading.Lock()
        self.timeline = Timeline()
        self.tokens = Tokens(lifetime, self.timeline.clock)
        self.cloud = make_cloud(self.timeline, self.tokens)
        self.faults, self.throttle, self.calls = Faults(), Throttle(), Calls()
        self.ended = threading.Event()

    def serve(self, request):
        """The answer, or None if the connection is to be cut."""
        if request.path.startswith("/test/"):
            with self.lock:
                self.timeline.advance()
                return self._control(request)
        name = self.cloud.name(request)
        with self.lock:
            request.fault = fault = self.faults.of(name, request.path)
            throttled = self.throttle.refuses(name, self.timeline.clock())
        answer = self._answer(request, name, fault, throttled)
        with self.lock:
            self.calls.add(name, request.path, answer.status if answer else 0)
        return answer

    def _answer(self, request, name, fault, throttled):
        if fault:
            self.ended.wait(fault.get("delay", 0) + fault.get("hang", 0))
            if fault.get("hang") or fault.get("cut") == "before":
                return None
            if fault.get("status"):
                return self._injected(fault)
        if throttled:
            return self.cloud.refuse(self.cloud.throttled(self.throttle))
        while True:
            try:
                with self.lock:
                    self.timeline.advance()
                    answer = self.cloud.answer(request, name)
                break
            except Refusal as refusal:
                answer = self.cloud.refuse(refusal)
                break
            except Later as later:
                # Not longer, because tests can put the clock forward.
                self.ended.wait(min(later.seconds, 0.05))
            except Exception as error:  # noqa: BLE001: a fault of the stand-in must not look like one of the network
                traceback.print_exc()
                return self.cloud.refuse(Refusal(500, "faultOfTheStandIn", repr(error)))
        return None if fault and fault.get("cut") == "after" else answer

    def _injected(self, fault):
        headers = fault.get("headers", {})
        if fault.get("body") is not None:
            body = fault.get("body")
            return Answer(fault.get("status"), body.encode() if isinstance(body, str) else body, headers)
        refusal = Refusal(fault.get("status"), fault.get("reason", "backendError"), fault.get("message", "Injected by a test."))
        answer = self.cloud.refuse(refusal)
        answer.headers |= headers
        return answer

    def _control(self, request):
        body = json.loads(request.body) if request.body else None
        what = request.path.removeprefix("/test/")
        try:
            match request.method, what:
                case "GET", "faults":
                    return Answer(200, self.faults.show())
                case "POST", "faults":
                    return Answer(200, {"id": self.faults.add(body)})
                case "DELETE", "faults":
                    self.faults.clear()
                case "POST", "throttle":
                    self.throttle.set(body)
                case "GET", "calls":
                    return Answer(200, {"counts": self.calls.counts, "log": self.calls.log, "throttled": self.throttle.refused})
                case "DELETE", "calls":
                    self.calls.clear()
                case "GET", "snapshot":
                    return Answer(200, self.cloud.snapshot())
                case "POST", "time":
                    self.timeline.skip(float(body["skip"]))
                    self.timeline.advance()
                case "POST", "tokens":
                    self.tokens.lifetime = float(body["lifetime"])
                case "DELETE", "tokens":
                    self.tokens.revoke()
                case method, path:
                    return Answer(200, self.cloud.control(method, path, body))
        except Refusal as refusal:
            return Answer(400, {"message": refusal.message})
        except (KeyError, TypeError, ValueError) as error:
            return Answer(400, {"message": f"{request.method} {request.path}: {error!r}"})
        return Answer(200, {})

    def listen(self, host, port):
        """Binds the address. The caller runs `serve_forever` of what is returned."""
        server = self

        class Handler(_Handler):
            """The handler of this server."""

            served = server

        class Listener(ThreadingHTTPServer):
            """Many clients connect at once."""

            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
            daemon_threads = True
            request_queue_size = 128

        return Listener((host, port), Handler)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # One packet for head and body; with Nagle's algorithm a second one would wait.
    wbufsize = -1
    disable_nagle_algorithm = True
    served = None

    def log_message(self, *_args):
        """Nothing is logged: /test/calls has it."""

    def handle(self):
        try:
            super().handle()
        except ConnectionError:
            # A client that does not wait for its answer, as one that crashes.
            pass

    def handle_any(self):
        """Serves any method."""
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        answer = self.served.serve(Request(self.command, self.path, self.headers, body))
        if answer is None:
            self.close_connection = True
            return
        content = answer.content()
        self.send_response_only(answer.status)
        headers = {"Content-Type": "application/json; charset=UTF-8"} | answer.headers
        for name, value in headers.items():
            self.send_header(name, value)
        if answer.status != 204:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if answer.status != 204 and self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = handle_any
