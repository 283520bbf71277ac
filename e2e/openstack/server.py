# SPDX-License-Identifier: Apache-2.0
"""An OpenStack for tests: the real APIs of Keystone, Neutron and Octavia behind one port of loopback, as `devstack` shows them.

    server.py [--port PORT] [--delay SECONDS] [--state DIR] [--until-eof]

Each is a process of its own with SQLite, and all end with this one. Octavia's provider drivers are our own: `amphora-test` accepts
everything, `ovn` refuses what OVN's driver refuses, and both report ACTIVE after the delay. When all answer, one line of JSON is printed:
what a client needs to log in, and the networks that exist. Only reads past the APIs are added: /test/snapshot and /test/targets.
"""

import argparse
import base64
import http.client
import json
import os
import secrets
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

HERE = Path(__file__).parent
VENV = Path(sys.prefix)
SERVICES = {"identity": "run_keystone.py", "network": "run_neutron.py", "load-balancer": "run_octavia.py"}
DRIVERS = {"amphora-test": "TestDriver", "ovn": "OvnDriver"}

KEYSTONE = """
[DEFAULT]
log_file = {state}/keystone.log
[database]
connection = sqlite:///{state}/keystone.db
[fernet_tokens]
key_repository = {state}/fernet
[fernet_receipts]
key_repository = {state}/receipts
[credential]
key_repository = {state}/credentials
[identity]
password_hash_rounds = 4
[cache]
enabled = true
backend = oslo_cache.dict
"""

NEUTRON = """
[DEFAULT]
core_plugin = ml2
service_plugins = router,tag,revisions,timestamp
auth_strategy = keystone
transport_url = fake://
notify_nova_on_port_status_changes = false
notify_nova_on_port_data_changes = false
dhcp_agent_notification = false
api_paste_config = {venv}/etc/neutron/api-paste.ini
state_path = {state}/neutron
log_file = {state}/neutron.log
[database]
connection = sqlite:///{state}/neutron.db
[oslo_concurrency]
lock_path = {state}/locks
[ml2]
type_drivers = local,flat
project_network_types = local
mechanism_drivers = logger
extension_drivers = port_security
[ml2_type_flat]
flat_networks = *
[quotas]
quota_floatingip = {floating_ips}
[keystone_authtoken]
{auth}
"""

OCTAVIA = """
[DEFAULT]
transport_url = fake://
log_file = {state}/octavia.log
[database]
connection = sqlite:///{state}/octavia.db
[api_settings]
auth_strategy = keystone
enabled_provider_drivers = {drivers}
default_provider_driver = amphora-test
[controller_worker]
network_driver = allowed_address_pairs_driver
[driver_agent]
status_socket_path = {state}/status.sock
stats_socket_path = {state}/stats.sock
get_socket_path = {state}/get.sock
[quotas]
default_load_balancer_quota = {load_balancers}
default_listener_quota = -1
default_member_quota = -1
default_pool_quota = -1
default_health_monitor_quota = -1
[keystone_authtoken]
{auth}
[service_auth]
{auth}
[neutron]
region_name = RegionOne
endpoint_override = {url}/network
valid_interfaces = public
"""

AUTH = """www_authenticate_uri = {url}/identity
auth_url = {url}/identity
auth_type = password
username = admin
password = {password}
project_name = admin
user_domain_id = default
project_domain_id = default
interface = public
region_name = RegionOne
"""


def parse():
    parser = argparse.ArgumentParser(description="Serves Keystone, Neutron and Octavia on loopback.")
    parser.add_argument("--port", type=int, default=0, help="serve all on this port (default: a free one)")
    parser.add_argument("--delay", type=float, default=0, help="seconds until Octavia's load balancers are ACTIVE")
    parser.add_argument("--state", help="keep configuration, databases and logs in this directory (default: a temporary one)")
    parser.add_argument("--load-balancers", type=int, default=-1, help="quota of load balancers of a project")
    parser.add_argument("--floating-ips", type=int, default=-1, help="quota of floating IPs of a project")
    parser.add_argument("--until-eof", action="store_true", help="end when standard input ends, as it does with the process that wrote to it")
    return parser.parse_args()


def write_state(args, state, url, password):
    auth = AUTH.format(url=url, password=password)
    drivers = ",".join(f"{name}:{name}" for name in DRIVERS)
    values = {"state": state, "venv": VENV, "auth": auth, "url": url, "drivers": drivers}
    values |= {"load_balancers": args.load_balancers, "floating_ips": args.floating_ips}
    for service, text in (("identity", KEYSTONE), ("network", NEUTRON), ("load-balancer", OCTAVIA)):
        (state / f"{service}.conf").write_text(text.format(**values))
    for keys in ("fernet", "receipts", "credentials"):
        (state / keys).mkdir(mode=0o700, exist_ok=True)
        # The staged key, and the primary one.
        for index in ("0", "1"):
            (state / keys / index).write_bytes(base64.urlsafe_b64encode(os.urandom(32)))
    # Octavia finds drivers by the metadata of installed packages.
    package = state / "packages" / "steerage_test_driver-1.dist-info"
    package.mkdir(parents=True, exist_ok=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: steerage-test-driver\nVersion: 1\n")
    entries = "\n".join(f"{name} = test_driver:{of}" for name, of in DRIVERS.items())
    (package / "entry_points.txt").write_text(f"[octavia.api.drivers]\n{entries}\n")


class Child:
    """One of the servers."""

    def __init__(self, service, state, args, *extra):
        environment = os.environ | {
            "PYTHONPATH": f"{HERE}:{state}/packages",
            "STEERAGE_OPENSTACK_LAUNCHER": str(os.getpid()),
            "STEERAGE_OPENSTACK_DELAY": str(args.delay),
            # What stevedore remembers of installed packages would be another state's.
            "XDG_CACHE_HOME": str(state / "cache"),
            "PYTHONWARNINGS": "ignore",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        self.service, self.output = service, state / f"{service}.out"
        command = [sys.executable, str(HERE / SERVICES[service]), str(state / f"{service}.conf"), *extra]
        with open(self.output, "wb") as output:
            self.process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=output)
        self.port = None

    def wait(self):
        line = self.process.stdout.readline().strip()
        if not line.isdigit():
            tail = self.output.read_text(errors="replace")[-3000:]
            sys.exit(f"{self.service} did not start; the end of its output:\n{tail}")
        self.port = int(line)


class Front(BaseHTTPRequestHandler):
    """Passes a request on to the service of its first path segment."""

    protocol_version = "HTTP/1.1"
    children, state = {}, None
    connections = threading.local()

    def log_message(self, *args):
        pass

    def handle_any(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        service = self.path.lstrip("/").partition("/")[0].partition("?")[0]
        if service == "test":
            return self.answer(200, [("Content-Type", "application/json")], read_past(self.state, self.path))
        child = self.children.get(service)
        if child is None or child.port is None:
            return self.answer(404, [("Content-Type", "text/plain")], f"no service {service}".encode())
        headers = {key: value for key, value in self.headers.items() if key.lower() != "connection"}
        status, answered, content = self.forward(child.port, headers, body)
        self.answer(status, answered, content)

    def handle(self):
        try:
            super().handle()
        except ConnectionError:
            # A client that does not wait for its answer, as one that crashes.
            pass

    do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = handle_any

    def forward(self, port, headers, body):
        for kept in (True, False):
            connection = getattr(self.connections, str(port), None) if kept else None
            if connection is None:
                connection = http.client.HTTPConnection("127.0.0.1", port)
            try:
                connection.request(self.command, self.path, body, headers)
                answer = connection.getresponse()
                content = answer.read()
            except (http.client.HTTPException, ConnectionError):
                # A server closes a connection that was quiet.
                if kept:
                    setattr(self.connections, str(port), None)
                    continue
                raise
            setattr(self.connections, str(port), connection)
            return answer.status, answer.getheaders(), content

    def answer(self, status, headers, content):
        self.send_response_only(status)
        for key, value in headers:
            if key.lower() not in ("connection", "content-length", "transfer-encoding", "keep-alive"):
                self.send_header(key, value)
        if status != 204:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD" and status != 204:
            self.wfile.write(content)


def rows(state, database, query):
    with sqlite3.connect(f"file:{state}/{database}.db?mode=ro", uri=True, timeout=30) as connection:
        return connection.execute(query).fetchall()


def read_past(state, path):
    """What is in the databases, without identifiers and times: for tests that compare a whole state."""
    tags = {}
    for resource, tag in rows(state, "octavia", "SELECT resource_id, tag FROM tags ORDER BY tag"):
        tags.setdefault(resource, []).append(tag)
    balancers = rows(
        state,
        "octavia",
        "SELECT b.id, b.name, b.description, b.provisioning_status, b.enabled, b.provider, v.ip_address, v.port_id "
        "FROM load_balancer b LEFT JOIN vip v ON v.load_balancer_id = b.id WHERE b.provisioning_status != 'DELETED'",
    )
    names = {id: name for id, name, *_ in balancers}
    members, shown, targets = {}, {}, {}
    for pool, *member in rows(
        state,
        "octavia",
        "SELECT pool_id, name, ip_address, protocol_port, weight, monitor_port, backup, enabled, provisioning_status FROM member",
    ):
        members.setdefault(pool, []).append(member)
    monitors = {
        pool: monitor
        for pool, *monitor in rows(
            state,
            "octavia",
            "SELECT pool_id, name, type, delay, timeout, fall_threshold, rise_threshold, http_method, url_path, expected_codes, "
            "enabled, provisioning_status FROM health_monitor",
        )
    }
    persistence = {pool: kept for pool, *kept in rows(state, "octavia", "SELECT pool_id, type, persistence_timeout FROM session_persistence")}
    pool_names = {}
    for id, name, balancer, *content in rows(
        state, "octavia", "SELECT id, name, load_balancer_id, protocol, lb_algorithm, enabled, provisioning_status FROM pool"
    ):
        pool_names[id] = name
        all_of = sorted(members.get(id, []))
        content += [monitors.get(id), persistence.get(id), tags.get(id)]
        shown[f"pool {names.get(balancer)}/{name}"] = f"{content} members {all_of}"
        targets.setdefault(balancer, {})[name] = sorted({member[0] for member in all_of})
    cidrs = {}
    for listener, cidr in rows(state, "octavia", "SELECT listener_id, cidr FROM listener_cidr ORDER BY cidr"):
        cidrs.setdefault(listener, []).append(cidr)
    for id, name, balancer, pool, *content in rows(
        state,
        "octavia",
        "SELECT id, name, load_balancer_id, default_pool_id, protocol, protocol_port, connection_limit, timeout_client_data, "
        "timeout_member_connect, timeout_member_data, timeout_tcp_inspect, enabled, provisioning_status FROM listener",
    ):
        content += [pool_names.get(pool), cidrs.get(id), tags.get(id)]
        shown[f"listener {names.get(balancer)}/{name}"] = str(content)
    ports = {port: names[id] for id, *_, port in balancers}
    for id, name, *content, address, port in balancers:
        shown[f"load balancer {name} {tags.get(id)}"] = str(content)
    floating = rows(
        state,
        "neutron",
        "SELECT f.floating_ip_address, f.fixed_port_id, s.description FROM floatingips f JOIN standardattributes s ON s.id = f.standard_attr_id",
    )
    for address, port, description in floating:
        shown[f"floating IP {description}"] = f"of {ports.get(port)}"
    for (device,) in rows(state, "neutron", "SELECT name FROM ports WHERE device_owner = 'Octavia'"):
        balancer = device.removeprefix("octavia-lb-")
        shown[f"VIP port of {names.get(balancer)} {tags.get(balancer)}"] = ""
    if path.startswith("/test/targets/"):
        uid = f"steerage.dev/uid={path.rpartition('/')[2]}"
        mine = [id for id in names if uid in tags.get(id, [])]
        return json.dumps({name: nodes for id in mine for name, nodes in targets.get(id, {}).items()}).encode()
    return json.dumps(shown).encode()


class Api:
    """The administrator's client, to prepare what tests need."""

    def __init__(self, url):
        self.url, self.token, self.subject = url, None, None

    def call(self, method, path, body=None):
        headers = {"Content-Type": "application/json"} | ({"X-Auth-Token": self.token} if self.token else {})
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data=data, method=method, headers=headers)
        try:
            with urllib.request.urlopen(request) as answer:
                self.subject = answer.headers.get("X-Subject-Token")
                return json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            sys.exit(f"{method} {path} failed: {error.code} {error.read().decode(errors='replace')}")

    def log_in(self, user, password, project):
        domain = {"id": "default"}
        identity = {"methods": ["password"], "password": {"user": {"name": user, "domain": domain, "password": password}}}
        self.token = None
        answer = self.call("POST", "/identity/v3/auth/tokens", {"auth": {"identity": identity, "scope": {"project": {"name": project, "domain": domain}}}})
        self.token = self.subject
        return answer["token"]


def catalog(api):
    for kind, path in (("network", "/network"), ("load-balancer", "/load-balancer")):
        service = api.call("POST", "/identity/v3/services", {"service": {"type": kind, "name": kind}})["service"]["id"]
        endpoint = {"service_id": service, "interface": "public", "url": api.url + path, "region_id": "RegionOne"}
        api.call("POST", "/identity/v3/endpoints", {"endpoint": endpoint})


def tenant(api, password):
    """A project with a user who may use load balancers, and an application credential of this user."""
    project = api.call("POST", "/identity/v3/projects", {"project": {"name": "cluster", "domain_id": "default"}})["project"]["id"]
    user = {"name": "steerage", "password": password, "domain_id": "default"}
    user = api.call("POST", "/identity/v3/users", {"user": user})["user"]["id"]
    roles = {role["name"]: role["id"] for role in api.call("GET", "/identity/v3/roles")["roles"]}
    for name in ("member", "load-balancer_member"):
        if name not in roles:
            roles[name] = api.call("POST", "/identity/v3/roles", {"role": {"name": name}})["role"]["id"]
        api.call("PUT", f"/identity/v3/projects/{project}/users/{user}/roles/{roles[name]}")
    admin = api.token
    token = api.log_in("steerage", password, "cluster")
    credential = {"application_credential": {"name": "steerage", "secret": password}}
    credential = api.call("POST", f"/identity/v3/users/{token['user']['id']}/application_credentials", credential)
    api.token = admin
    return {"project_id": project, "application_credential_id": credential["application_credential"]["id"]}


def networks(api, project):
    """The cluster's network with two subnets, an external one, and a router between them."""

    def make(kind, **fields):
        return api.call("POST", f"/network/v2.0/{kind}s", {kind: fields})[kind]["id"]

    outside = make("network", name="public", **{"router:external": True, "provider:network_type": "flat", "provider:physical_network": "public"})
    outside_subnet = make("subnet", network_id=outside, ip_version=4, cidr="203.0.113.0/24", enable_dhcp=False)
    inside = make("network", name="cluster", project_id=project)
    subnets = {"public_subnet_id": outside_subnet}
    for key, version, cidr in (("subnet_id", 4, "10.0.0.0/16"), ("ipv6_subnet_id", 6, "2001:db8:1::/64")):
        subnets[key] = make("subnet", network_id=inside, project_id=project, ip_version=version, cidr=cidr)
    router = make("router", project_id=project, external_gateway_info={"network_id": outside})
    api.call("PUT", f"/network/v2.0/routers/{router}/add_router_interface", {"subnet_id": subnets["subnet_id"]})
    return {"network_id": inside, "floating_network_id": outside, **subnets}


def run(args, state):
    socket.setdefaulttimeout(120)
    ThreadingHTTPServer.daemon_threads = True
    ThreadingHTTPServer.request_queue_size = 64
    try:
        front = ThreadingHTTPServer(("127.0.0.1", args.port), Front)
    except OSError as error:
        sys.exit(f"cannot listen on port {args.port} of 127.0.0.1: {error}")
    url = f"http://127.0.0.1:{front.server_port}"
    password = secrets.token_hex(8)
    write_state(args, state, url, password)
    Front.state = state
    Front.children = {
        "identity": Child("identity", state, args, f"{url}/identity/v3", password),
        "network": Child("network", state, args),
        "load-balancer": Child("load-balancer", state, args),
    }
    threading.Thread(target=front.serve_forever, daemon=True).start()
    for child in Front.children.values():
        child.wait()
    api = Api(url)
    api.log_in("admin", password, "admin")
    catalog(api)
    made = tenant(api, password)
    made |= networks(api, made["project_id"])
    print(json.dumps({"url": url, "auth_url": f"{url}/identity/v3", "username": "steerage", "project_name": "cluster", "secret": password, **made}), flush=True)
    for child in Front.children.values():
        child.process.wait()
        sys.exit(f"{child.service} ended")


def end_with_input():
    # Not sys.stdin: its lock would be held when the interpreter ends.
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def main():
    args = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if args.until_eof:
        threading.Thread(target=end_with_input, daemon=True).start()
    if args.state:
        state = Path(args.state).absolute()
        state.mkdir(parents=True, exist_ok=True)
        return run(args, state)
    # SQLite waits for the disk after each change.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    state = Path(tempfile.mkdtemp(prefix="steerage-openstack-", dir=memory))
    try:
        run(args, state)
    finally:
        shutil.rmtree(state, ignore_errors=True)


if __name__ == "__main__":
    main()
