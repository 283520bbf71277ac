# SPDX-License-Identifier: Apache-2.0
"""A stand-in of a cloud's API, for tests.

    server.py gce|azure [--host ADDRESS] [--port PORT] [--settings JSON] [--until-eof]

It prints one line of JSON when it listens: its URL, and the settings. State is in memory, and goes with the process.
"""

import argparse
import importlib
import json
import os
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from core.server import Server  # noqa: E402: after the path

# Loaded when it is wanted: schemas need a second.
CLOUDS = {"azure": ("arm.cloud", "Azure"), "gce": ("gce.cloud", "Gce")}


def parse():
    """The command line."""
    parser = argparse.ArgumentParser(description="Serves a stand-in of a cloud's API.")
    parser.add_argument("cloud", choices=sorted(CLOUDS), help="the cloud")
    parser.add_argument("--host", default="127.0.0.1", help="serve at this address (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=0, help="serve at this port (default: a free one)")
    parser.add_argument("--settings", type=json.loads, default={}, help="settings as JSON; see SETTINGS of the cloud")
    parser.add_argument("--token-lifetime", type=float, default=3600.0, help="seconds until a token expires (default: 3600)")
    parser.add_argument("--until-eof", action="store_true", help="end when standard input ends, as it does with the process that wrote to it")
    return parser.parse_args()


def end_with_input():
    """Ends the process, whatever its threads do."""
    while os.read(0, 4096):
        pass
    os._exit(0)


def main():
    """Serves until the end."""
    args = parse()
    module, name = CLOUDS[args.cloud]
    cloud = getattr(importlib.import_module(module), name)
    server = Server(lambda timeline, tokens: cloud(timeline, tokens, args.settings), args.token_lifetime)
    listener = server.listen(args.host, args.port)
    if args.until_eof:
        threading.Thread(target=end_with_input, daemon=True).start()
    host = f"[{args.host}]" if ":" in args.host else args.host
    print(json.dumps({"url": f"http://{host}:{listener.server_port}", "settings": server.cloud.settings}), flush=True)
    listener.serve_forever()


if __name__ == "__main__":
    main()
