# SPDX-License-Identifier: Apache-2.0
"""What the three servers of the control plane have in common: each is a process of its own, started by server.py.

The services keep their state in SQLite, which lets one connection write at a time and refuses others after a while: `one_call` is held
for each request, and for whatever else writes.
"""

import gc
import io
import logging
import os
import signal
import sys
import threading

one_call = threading.RLock()


def die_with_parent():
    """Ends this process when the launcher ends, whatever ends it."""
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != int(os.environ["STEERAGE_OPENSTACK_LAUNCHER"]):
        sys.exit("the launcher is gone")


def log_warnings():
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, force=True)


def serve(app, prefix):
    """Serves a WSGI application below a path on a free port of loopback, and prints the port."""
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_request(self, *args):
            pass

    def mounted(environ, start_response):
        path = environ["PATH_INFO"]
        if not path.startswith(prefix):
            start_response("404 Not Found", [("Content-Length", "0")])
            return [b""]
        environ["SCRIPT_NAME"], environ["PATH_INFO"] = prefix, path[len(prefix) :] or "/"
        # The body is read first: its sender must not hold the lock.
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        environ["wsgi.input"] = io.BytesIO(body)
        answer = []

        def remember(status, headers, exc_info=None):
            answer[:] = [status, headers]

        with one_call:
            parts = app(environ, remember)
            content = b"".join(parts)
            if hasattr(parts, "close"):
                parts.close()
        status, headers = answer
        headers = [(key, value) for key, value in headers if key.lower() not in ("content-length", "transfer-encoding")]
        if not status.startswith("204"):
            headers.append(("Content-Length", str(len(content))))
        start_response(status, headers)
        return [content]

    # What is loaded stays: without this, an eighth of the time goes into looking for garbage in it.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)
    server = make_server("127.0.0.1", 0, mounted, threaded=True, request_handler=Quiet)
    print(server.port, flush=True)
    server.serve_forever()
