# SPDX-License-Identifier: Apache-2.0
"""The amphora of a lab: what is behind Octavia's API when load balancers have to forward packets. Called by the lab, in a network namespace.

    amphora.py --listen ADDRESS:PORT --folder DIR --interface DEVICE

One process stands for the amphorae of all load balancers. PUT /load-balancers/ID takes what Octavia's worker sends to an amphora: addresses,
the configuration of haproxy, which Octavia's own template has rendered, and the listeners over UDP. DELETE ends them. GET /health answers with
Octavia's heartbeats. It knows nothing of Octavia's API, and forwards without it.

An amphora has LVS for UDP, which few kernels offer in a namespace. Here nftables distributes datagrams as LVS does: by address translation
with the amphora's address as the source, weighted, among the members that pass their checks. Flows of a member that is gone begin anew.
Datagrams over IPv6 are not forwarded.
"""

import argparse
import csv
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

# From a change of haproxy's configuration until it has taken it over.
HAPROXY_WITHIN = 10
TABLE = "octavia"


class Refused(Exception):
    """The configuration can't be used."""


def run(*command, text=None):
    done = subprocess.run(command, input=text, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise Refused(f"{command}: {done.stdout.strip()}")
    return done.stdout


class Haproxy:
    """The haproxy of a load balancer: a master that is started once, and starts new workers on a reload."""

    def __init__(self, folder, name):
        self.folder, self.name = folder / name, name
        self.folder.mkdir(exist_ok=True)
        self.config, self.text, self.master = self.folder / "haproxy.cfg", None, None
        self.socket = str(folder / f"{name}.sock")

    def take(self, text):
        if text == self.text and self.master is not None and self.master.poll() is None:
            return
        if text is None:
            self.end()
            return
        previous = self.text
        self.config.write_text(text)
        files = ["-f", str(self.config), "-f", str(self.folder.parent / "group.cfg")]
        try:
            run("haproxy", "-c", "-q", *files)
        except Refused:
            # What serves stays.
            if previous is not None:
                self.config.write_text(previous)
            raise
        before = self.worker()
        if before is None:
            self.start(files)
        else:
            # Servers keep their state, as with Octavia's agent.
            (self.folder / "servers-state").write_text(self.ask("show servers state") + "\n")
            self.master.send_signal(signal.SIGUSR2)
        end = time.monotonic() + HAPROXY_WITHIN
        while self.worker() in (None, before):
            if time.monotonic() > end or self.master.poll() is not None:
                raise Refused(f"haproxy did not take its configuration: see {self.folder}/log")
            time.sleep(0.02)
        self.text = text

    def start(self, files):
        self.end()
        with open(self.folder / "log", "ab") as log:
            # The master waits for workers, so it must not end with the thread that starts it.
            self.master = subprocess.Popen(["haproxy", "-Ws", *files], stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def end(self):
        if self.master is not None and self.master.poll() is None:
            self.master.terminate()
            try:
                self.master.wait(5)
            except subprocess.TimeoutExpired:
                self.master.kill()
                self.master.wait()
        self.master = self.text = None

    def ask(self, command):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(5)
            connection.connect(self.socket)
            connection.sendall(f"{command}\n".encode())
            return b"".join(iter(lambda: connection.recv(65536), b"")).decode().strip()

    def worker(self):
        """The process that serves new connections; None if there is none."""
        if self.master is None or self.master.poll() is not None:
            return None
        try:
            lines = dict(line.split(": ", 1) for line in self.ask("show info").splitlines() if ": " in line)
        except OSError:
            return None
        return lines.get("Pid")

    def health(self):
        """The listeners and pools of a heartbeat."""
        listeners, pools = {}, {}
        if self.text is None:
            return listeners, pools
        try:
            lines = self.ask("show stat -1 7 -1").removeprefix("# ").splitlines()
        except OSError:
            return listeners, pools
        for line in csv.DictReader(lines):
            proxy, server, status = line["pxname"], line["svname"], line["status"]
            if server == "FRONTEND":
                numbers = {"tx": line["bout"], "rx": line["bin"], "conns": line["scur"], "totconns": line["stot"], "ereq": line["ereq"]}
                stats = {key: int(value or 0) for key, value in numbers.items()}
                listeners[proxy] = {"status": "OPEN" if status == "OPEN" else "FULL", "stats": stats}
                continue
            pool = pools.setdefault(proxy, {"members": {}})
            if server == "BACKEND":
                pool["status"] = status
            else:
                # A server without weight gets no new connection, whatever haproxy calls that.
                pool["members"][server] = "DRAIN" if status == "UP" and line["weight"] == "0" else status
        return listeners, pools


class Check:
    """The health checks of a member over UDP, as keepalived makes them: a member is up until as many checks in a row have failed."""

    def __init__(self, changed):
        self.changed, self.monitor, self.member = changed, None, None
        self.up, self.failed, self.ended = True, 0, threading.Event()
        threading.Thread(target=self.repeat, daemon=True).start()

    def repeat(self):
        while not self.ended.wait(self.monitor["delay"] if self.monitor else 0.05):
            monitor, member = self.monitor, self.member
            if monitor is None:
                continue
            if passes(monitor, member):
                up, self.failed = True, 0
            else:
                self.failed += 1
                up = self.up and self.failed < monitor["fall"]
            if up != self.up:
                self.up = up
                self.changed()


def passes(monitor, member):
    address = (member["monitor_address"] or member["address"], member["monitor_port"] or member["port"])
    try:
        if monitor["type"] == "HTTP":
            connection = http.client.HTTPConnection(*address, timeout=monitor["timeout"])
            connection.request(monitor["method"], monitor["path"])
            answer = connection.getresponse()
            connection.close()
            return str(answer.status) in monitor["codes"]
        if monitor["type"] == "UDP-CONNECT":
            # A closed port answers by ICMP; silence passes.
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.settimeout(monitor["timeout"])
                probe.connect(address)
                probe.send(b"")
                probe.send(b"")
                try:
                    probe.recv(1)
                except TimeoutError:
                    pass
                return True
        with socket.create_connection(address, monitor["timeout"]):
            return True
    except (OSError, http.client.HTTPException):
        return False


class Datagrams:
    """The rules of all load balancers: listeners over UDP, and whom each listener admits."""

    def __init__(self):
        self.lock = threading.RLock()
        self.wanted, self.checks, self.routes, self.written = {}, {}, {}, None

    def take(self, name, balancer):
        with self.lock:
            if balancer is None:
                self.wanted.pop(name, None)
            else:
                self.wanted[name] = balancer
            known = set()
            for listener in self.listeners():
                for member in listener["members"]:
                    if listener["monitor"] and member["enabled"]:
                        key = (listener["id"], member["id"])
                        known.add(key)
                        check = self.checks.setdefault(key, None) or Check(self.write)
                        self.checks[key] = check
                        check.member, check.monitor = member, listener["monitor"]
            for key in set(self.checks) - known:
                self.checks.pop(key).ended.set()
            self.write()

    def listeners(self):
        return [listener for balancer in self.wanted.values() for listener in balancer["udp"]]

    def is_up(self, listener, member):
        check = self.checks.get((listener["id"], member["id"]))
        return check is None or check.up

    def write(self):
        with self.lock:
            rules = ruleset(self.wanted, self.is_up)
            if rules != self.written:
                run("nft", "-f", "-", text=rules)
                self.written = rules
            routes = {
                (address, listener["port"], member["address"])
                for balancer in self.wanted.values()
                for address in balancer["addresses"]
                for listener in balancer["udp"]
                for member in listener["members"]
                if member["enabled"] and self.is_up(listener, member)
            }
            for address, port, member in set(self.routes) - routes:
                # Fails if there is no such flow.
                command = ["conntrack", "-D", "-p", "udp", "--orig-dst", address, "--orig-port-dst", str(port), "--reply-src", member]
                subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
            self.routes = routes

    def health(self, balancer):
        listeners, pools = {}, {}
        for listener in balancer["udp"]:
            stats = dict.fromkeys(("tx", "rx", "conns", "totconns", "ereq"), 0)
            listeners[listener["id"]] = {"status": "OPEN", "stats": stats}
            if not listener["pool"]:
                continue
            members = {}
            for member in listener["members"]:
                if not member["enabled"]:
                    members[member["id"]] = "MAINT"
                elif not listener["monitor"]:
                    members[member["id"]] = "no check"
                else:
                    members[member["id"]] = "UP" if self.is_up(listener, member) else "DOWN"
            status = "DOWN" if members and all(state == "DOWN" for state in members.values()) else "UP"
            pools[f"{listener['pool']}:{listener['id']}"] = {"status": status, "members": members}
        return listeners, pools


def ruleset(balancers, is_up):
    """The rules, as text. New connections and flows from elsewhere than a listener admits are dropped: Octavia does this by a security group."""
    fences, translations = [], []
    for balancer in balancers.values():
        addresses = [address for address in balancer["addresses"] if ":" not in address]
        if not addresses:
            continue
        addresses = set_of(addresses)
        for fence in balancer["fences"]:
            cidrs = [cidr for cidr in fence["cidrs"] if ":" not in cidr]
            others = f"ip saddr != {set_of(cidrs)}" if cidrs else ""
            fences.append(f"ct state new ip daddr {addresses} {fence['protocol']} dport {fence['port']} {others} drop")
        for listener in balancer["udp"]:
            slots = [
                f"{member['address']} . {member['port']}"
                for member in listener["members"]
                if member["enabled"] and is_up(listener, member)
                for _ in range(member["weight"])
            ]
            if slots:
                chosen = "jhash ip saddr" if listener["by_source"] else "numgen inc"
                seed = " seed 0x5eed" if listener["by_source"] else ""
                slots_of = ", ".join(f"{index} : {slot}" for index, slot in enumerate(slots))
                target = f"{chosen} mod {len(slots)}{seed} map {{ {slots_of} }}"
                translations.append(f"ip daddr {addresses} udp dport {listener['port']} dnat ip to {target}")
    chains = [
        ("fence", "filter hook prerouting priority mangle", fences),
        ("distribute", "nat hook prerouting priority dstnat", translations),
        ("hide", "nat hook postrouting priority srcnat", ["ct status dnat masquerade"]),
    ]
    lines = [f"table ip {TABLE}", f"delete table ip {TABLE}", f"table ip {TABLE} {{"]
    for name, hook, rules in chains:
        lines += [f"chain {name} {{", f"type {hook}; policy accept;", *rules, "}"]
    return "\n".join([*lines, "}", ""])


def set_of(values):
    return "{ " + ", ".join(sorted(values)) + " }"


class Amphora:
    """All load balancers."""

    def __init__(self, folder, interface):
        self.folder, self.interface, self.lock = folder, interface, threading.Lock()
        self.balancers, self.proxies, self.datagrams = {}, {}, Datagrams()
        (folder / "group.cfg").write_text("global\n    group nogroup\n")

    def put(self, name, wanted):
        with self.lock:
            for address in wanted["addresses"]:
                run("ip", "address", "replace", *self.of_device(address))
            # Who is admitted is known before a listener is.
            self.datagrams.take(name, wanted)
            proxy = self.proxies.setdefault(name, None) or Haproxy(self.folder, wanted["load_balancer"])
            self.proxies[name] = proxy
            proxy.take(wanted["haproxy"])
            self.balancers[name] = wanted

    def delete(self, name):
        with self.lock:
            wanted = self.balancers.pop(name, None)
            if wanted is None:
                return
            self.proxies.pop(name).end()
            self.datagrams.take(name, None)
            for address in wanted["addresses"]:
                run("ip", "address", "delete", *self.of_device(address))

    def of_device(self, address):
        return [f"{address}/128" if ":" in address else f"{address}/32", "dev", self.interface]

    def health(self):
        # Not while a configuration changes: it would miss what is not there yet.
        with self.lock:
            beats = []
            for name, balancer in self.balancers.items():
                listeners, pools = self.proxies[name].health()
                more_listeners, more_pools = self.datagrams.health(balancer)
                beats.append({"id": name, "ver": 2, "listeners": listeners | more_listeners, "pools": pools | more_pools})
            return beats


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    amphora = None

    def log_message(self, *args):
        pass

    def answer(self, status, content):
        body = json.dumps(content).encode()
        self.send_response_only(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def attempt(self, work):
        try:
            self.answer(200, work())
        except (Refused, OSError) as error:
            print(f"{self.command} {self.path}: {error}", file=sys.stderr, flush=True)
            self.answer(500, str(error))

    def do_GET(self):
        self.attempt(self.amphora.health)

    def do_PUT(self):
        wanted = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.attempt(lambda: self.amphora.put(self.path.rpartition("/")[2], wanted))

    def do_DELETE(self):
        self.attempt(lambda: self.amphora.delete(self.path.rpartition("/")[2]))


def main():
    parser = argparse.ArgumentParser(description="Forwards for Octavia.")
    parser.add_argument("--listen", required=True, help="take configurations at this address and port")
    parser.add_argument("--folder", required=True, help="keep configurations and logs in this directory")
    parser.add_argument("--interface", required=True, help="add the load balancers' addresses to this device")
    args = parser.parse_args()
    address, _, port = args.listen.rpartition(":")
    folder = Path(args.folder).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    Handler.amphora = Amphora(folder, args.interface)
    ThreadingHTTPServer.daemon_threads = True
    ThreadingHTTPServer((address, int(port)), Handler).serve_forever()


if __name__ == "__main__":
    main()
