# SPDX-License-Identifier: Apache-2.0
"""An OpenStack for tests: the real APIs of Keystone, Neutron and Octavia behind one port of loopback, as `devstack` shows them.

    server.py [--port PORT] [--delay SECONDS] [--state DIR] [--until-eof] [--amphora ADDRESS:PORT …]

Each is a process of its own with SQLite, and all end with this one. Octavia's provider drivers are our own: `amphora-test` accepts
everything, `ovn` refuses what OVN's driver refuses, and both report ACTIVE after the delay. When all answer, one line of JSON is printed:
what a client needs to log in, and the networks that exist. Only reads past the APIs are added: /test/snapshot, /test/targets, /test/health and
/test/writes.

In a lab it has a data path: with --amphora there is a driver `amphora-lab`, whose load balancers forward, and this process translates
floating IPs. PUT /test/down/SERVICE then makes a service answer 503, until PUT /test/up/SERVICE.
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
DRIVERS = {"amphora-test": "test_driver:TestDriver", "ovn": "test_driver:OvnDriver"}
# Not `amphora`: Octavia has a driver of that name.
FORWARDING_DRIVERS = {"amphora-lab": "amphora_driver:AmphoraDriver"}

KEYSTONE = """
[DEFAULT]
log_file = {state}/keystone.log
[database]
connection = sqlite:///{state}/keystone.db
sqlite_synchronous = false
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
sqlite_synchronous = false
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
sqlite_synchronous = false
[api_settings]
auth_strategy = keystone
enabled_provider_drivers = {drivers}
default_provider_driver = {default_driver}
[controller_worker]
network_driver = allowed_address_pairs_driver
[driver_agent]
status_socket_path = {state}/status.sock
stats_socket_path = {state}/stats.sock
get_socket_path = {state}/get.sock
[haproxy_amphora]
# haproxy needs two files for each connection that it may have.
default_connection_limit = 2000
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
    parser.add_argument("--listen", default="127.0.0.1", help="serve at this address (default: loopback)")
    parser.add_argument("--port", type=int, default=0, help="serve all on this port (default: a free one)")
    parser.add_argument("--delay", type=float, default=0, help="seconds until Octavia's load balancers are ACTIVE")
    parser.add_argument("--state", help="keep configuration, databases and logs in this directory (default: a temporary one)")
    parser.add_argument("--load-balancers", type=int, default=-1, help="quota of load balancers of a project")
    parser.add_argument("--floating-ips", type=int, default=-1, help="quota of floating IPs of a project")
    parser.add_argument("--subnet", default="10.0.0.0/16", help="the IPv4 subnet of VIPs and nodes")
    parser.add_argument("--vips", help="the addresses of VIPs in the subnet, FIRST-LAST (default: all)")
    parser.add_argument("--floating", default="203.0.113.0/24", help="the subnet of floating IPs")
    parser.add_argument("--amphora", help="let load balancers forward, by the amphora at this address and port")
    parser.add_argument("--amphora-folder", help="the amphora's --folder")
    parser.add_argument("--inside", help="translate floating IPs, for this device of the subnet")
    parser.add_argument("--until-eof", action="store_true", help="end when standard input ends, as it does with the process that wrote to it")
    return parser.parse_args()


def write_state(args, state, url, password):
    auth = AUTH.format(url=url, password=password)
    classes = FORWARDING_DRIVERS | DRIVERS if args.amphora else DRIVERS
    drivers = ",".join(f"{name}:{name}" for name in classes)
    values = {"state": state, "venv": VENV, "auth": auth, "url": url, "drivers": drivers, "default_driver": next(iter(classes))}
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
    entries = "\n".join(f"{name} = {of}" for name, of in classes.items())
    (package / "entry_points.txt").write_text(f"[octavia.api.drivers]\n{entries}\n")


class Child:
    """One of the servers."""

    def __init__(self, service, state, args, *extra):
        environment = os.environ | {
            "PYTHONPATH": f"{HERE}:{state}/packages",
            "STEERAGE_OPENSTACK_LAUNCHER": str(os.getpid()),
            "STEERAGE_OPENSTACK_DELAY": str(args.delay),
            "STEERAGE_OPENSTACK_AMPHORA": args.amphora or "",
            "STEERAGE_OPENSTACK_AMPHORA_FOLDER": args.amphora_folder or "",
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
    down, writes, counting = set(), 0, threading.Lock()
    connections = threading.local()

    def log_message(self, *args):
        pass

    def handle_any(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        service = self.path.lstrip("/").partition("/")[0].partition("?")[0]
        if service == "test":
            return self.answer(200, [("Content-Type", "application/json")], self.past())
        if service in self.down:
            return self.answer(503, [("Content-Type", "text/plain")], f"{service} is down".encode())
        if service != "identity" and self.command not in ("GET", "HEAD"):
            with self.counting:
                Front.writes += 1
        child = self.children.get(service)
        if child is None or child.port is None:
            return self.answer(404, [("Content-Type", "text/plain")], f"no service {service}".encode())
        headers = {key: value for key, value in self.headers.items() if key.lower() != "connection"}
        status, answered, content = self.forward(child.port, headers, body)
        self.answer(status, answered, content)

    def past(self):
        *_, verb, subject = self.path.split("/")
        if verb == "down":
            self.down.add(subject)
        elif verb == "up":
            self.down.discard(subject)
        elif subject == "writes":
            return json.dumps(self.writes).encode()
        else:
            return read_past(self.state, self.path)
        return json.dumps(sorted(self.down)).encode()

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
    if path.startswith("/test/health/"):
        return json.dumps(health(state, {id for id in names if f"steerage.dev/uid={path.rpartition('/')[2]}" in tags.get(id, [])})).encode()
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
    rules = rows(
        state,
        "neutron",
        "SELECT r.protocol, r.port_range_min, r.port_range_max, r.remote_ip_prefix, s.description FROM securitygrouprules r "
        "JOIN standardattributes s ON s.id = r.standard_attr_id WHERE s.description LIKE 'steerage%'",
    )
    for *content, description in rules:
        shown[f"rule {content} {description}"] = ""
    for balancer, vip in rows(state, "octavia", "SELECT load_balancer_id, subnet_id FROM additional_vip"):
        # Octavia forgets those of deleted load balancers later.
        if balancer in names:
            shown[f"additional VIP of {names[balancer]} {tags.get(balancer)}"] = vip
    for (device,) in rows(state, "neutron", "SELECT name FROM ports WHERE device_owner = 'Octavia'"):
        balancer = device.removeprefix("octavia-lb-")
        shown[f"VIP port of {names.get(balancer)} {tags.get(balancer)}"] = ""
    if path.startswith("/test/targets/"):
        uid = f"steerage.dev/uid={path.rpartition('/')[2]}"
        mine = [id for id in names if uid in tags.get(id, [])]
        return json.dumps({name: nodes for id in mine for name, nodes in targets.get(id, {}).items()}).encode()
    return json.dumps(shown).encode()


def health(state, balancers):
    """The nodes in each operating status, for each pool of these load balancers."""
    shown = {}
    members = rows(
        state,
        "octavia",
        "SELECT p.id, p.load_balancer_id, m.name, m.operating_status FROM pool p LEFT JOIN member m ON m.pool_id = p.id AND "
        "m.provisioning_status != 'PENDING_DELETE'",
    )
    for pool, balancer, member, status in members:
        if balancer in balancers:
            states = shown.setdefault(pool, {})
            if member:
                states.setdefault(status, []).append(member)
    return list(shown.values())


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


def choices(api):
    """A flavor and an availability zone for load balancers."""

    def make(path, kind, **fields):
        return api.call("POST", f"/load-balancer/v2.0/lbaas/{path}", {kind: fields})[kind]

    driver = {"provider_name": "amphora-test"}
    profile = make("flavorprofiles", "flavorprofile", name="large", flavor_data='{"size": "large"}', **driver)
    flavor = make("flavors", "flavor", name="large", flavor_profile_id=profile["id"])
    zone = make("availabilityzoneprofiles", "availability_zone_profile", name="one", availability_zone_data='{"zone": "one"}', **driver)
    zone = make("availabilityzones", "availability_zone", name="zone-1", availability_zone_profile_id=zone["id"])
    return {"flavor_id": flavor["id"], "availability_zone": zone["name"]}


def networks(api, project, args):
    """The cluster's network with two subnets, an external one, and a router between them."""

    def make(kind, **fields):
        return api.call("POST", f"/network/v2.0/{kind}s", {kind: fields})[kind]["id"]

    outside = make("network", name="public", **{"router:external": True, "provider:network_type": "flat", "provider:physical_network": "public"})
    outside_subnet = make("subnet", network_id=outside, ip_version=4, cidr=args.floating, enable_dhcp=False)
    inside = make("network", name="cluster", project_id=project)
    subnets = {"public_subnet_id": outside_subnet}
    pools = {}
    if args.vips:
        first, _, last = args.vips.partition("-")
        pools["allocation_pools"] = [{"start": first, "end": last}]
    for key, version, cidr, fields in (("subnet_id", 4, args.subnet, pools), ("ipv6_subnet_id", 6, "2001:db8:1::/64", {})):
        subnets[key] = make("subnet", network_id=inside, project_id=project, ip_version=version, cidr=cidr, **fields)
    router = make("router", project_id=project, external_gateway_info={"network_id": outside})
    api.call("PUT", f"/network/v2.0/routers/{router}/add_router_interface", {"subnet_id": subnets["subnet_id"]})
    return {"network_id": inside, "floating_network_id": outside, **subnets}


def run(args, state):
    socket.setdefaulttimeout(120)
    ThreadingHTTPServer.daemon_threads = True
    ThreadingHTTPServer.request_queue_size = 64
    try:
        front = ThreadingHTTPServer((args.listen, args.port), Front)
    except OSError as error:
        sys.exit(f"cannot listen on port {args.port} of {args.listen}: {error}")
    url = f"http://{args.listen}:{front.server_port}"
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
    made |= networks(api, made["project_id"], args)
    made |= choices(api)
    if args.inside:
        from l3_agent import translate

        threading.Thread(target=translate, args=(lambda query: rows(state, "neutron", query), args.inside), daemon=True).start()
    access = json.dumps({"url": url, "auth_url": f"{url}/identity/v3", "username": "steerage", "project_name": "cluster", "secret": password, **made})
    # For who did not start it. Complete, or not there.
    (state / "access.partial").write_text(access)
    (state / "access.partial").replace(state / "access.json")
    print(access, flush=True)
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
