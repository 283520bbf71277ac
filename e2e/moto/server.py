# SPDX-License-Identifier: Apache-2.0
"""moto's server at an address and port, with ELBv2 and EC2's security groups corrected where
moto differs from AWS. Two more arguments: for how many seconds AWS holds target groups and security groups after the deletion of their
load balancer. The first line that it prints is its port.

Each correction names what moto 5.2.5 does instead. Without them a wrong provider would pass, or a right one would fail. What moto lacks altogether,
the life of a target's health above all, is not made up here: who probes targets, as a lab's load balancer does, sets it.
"""

import io
import itertools
import sys
import threading
import time
from collections import defaultdict
from ipaddress import ip_address, ip_network

from moto.core import DEFAULT_ACCOUNT_ID
from moto.ec2.exceptions import DependencyViolationError, InvalidSubnetIdError
from moto.ec2.models import ec2_backends
from moto.ec2.models.security_groups import SecurityGroupBackend
from moto.ec2.responses.security_groups import SecurityGroups
from moto.elbv2 import exceptions as errors
from moto.elbv2 import models
from moto.elbv2.responses import ELBV2Response
from moto.moto_server.werkzeug_app import create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

Backend = models.ELBv2Backend
Group = models.FakeTargetGroup
NLB_PROTOCOLS = ("TCP", "UDP", "TCP_UDP", "TLS")
# Until when AWS holds target groups and security groups of a load balancer that was just deleted, in seconds of the monotonic clock.
held = {}
host, port = sys.argv[1], int(sys.argv[2])
target_group_release, security_group_release = map(float, sys.argv[3:])
# State and reason of targets, by target group and id, as somebody who probes them says; with None, moto's own are shown.
health = None
# For prefixes of AWS's choice.
prefix_numbers = itertools.count(1)
# Calls that may have changed something.
writes = 0


def error(code, message):
    return models.RESTError(code, message)


def is_held(group):
    return time.monotonic() < held.get(group, 0)


def groups_of(listener):
    return [a.data["TargetGroupArn"] for a in listener.default_actions if "TargetGroupArn" in a.data]


def correct(cls):
    """Replaces the method of the same name; the function gets moto's own as its first argument."""

    def replace(function):
        original = getattr(cls, function.__name__)
        setattr(cls, function.__name__, lambda self, *args, **kwargs: function(original, self, *args, **kwargs))
        return function

    return replace


@correct(Backend)
def create_load_balancer(original, self, name, *args, **kwargs):
    # moto creates a second one of the same name, and accepts any name.
    if any(b.name == name for b in self.load_balancers.values()):
        raise errors.DuplicateLoadBalancerName()
    if not 1 <= len(name) <= 32 or name.startswith("internal-") or name.strip("-") != name:
        raise errors.ValidationError(f"The load balancer name '{name}' is not valid")
    # moto accepts security groups that do not exist. Like AWS, it gives a network load balancer none that nobody named.
    for group in kwargs.get("security_groups") or []:
        if self.ec2_backend.get_security_group_from_id(group) is None:
            raise error("InvalidSecurityGroup", f"The security group '{group}' does not exist")
    made = original(self, name, *args, **kwargs)
    made.describes_until_active = 2
    if made.type == "network":
        # moto forms the name of a classic one, which cloud-provider-aws tells by it.
        made.dns_name = f"{name}-{made.arn.split('/')[-1]}.elb.{self.region_name}.amazonaws.com"
    return made


def refuse_source_nat(balancer_type, ip_address_type, enabled):
    if enabled == "on" and (balancer_type != "network" or ip_address_type != "dualstack"):
        raise error("InvalidConfigurationRequest", "A prefix for IPv6 source NAT needs a dualstack network load balancer")


def set_source_nat(balancer, params):
    """AWS chooses a prefix where a mapping has none, or asks for that."""
    enabled = params.get("EnablePrefixForIpv6SourceNat", "off")
    mappings = params.get("SubnetMappings", []) if enabled == "on" else []
    chosen = {m["SubnetId"]: m.get("SourceNatIpv6Prefix", "auto_assigned") for m in mappings}
    balancer.enable_prefix_for_ipv6_source_nat = enabled
    balancer.source_nat_prefixes = {
        subnet: f"2001:db8:aa:{next(prefix_numbers):x}::/80" if prefix == "auto_assigned" else prefix
        for subnet, prefix in chosen.items()
    }


def availability_zones(self):
    zones = [models.AvailabilityZone(subnet) for subnet in self.subnets]
    for zone in zones:
        prefix = getattr(self, "source_nat_prefixes", {}).get(zone.subnet_id)
        zone.source_nat_ipv6_prefixes = [prefix] if prefix else []
    return zones


# moto knows nothing of source NAT.
models.FakeLoadBalancer.enable_prefix_for_ipv6_source_nat = "off"
models.FakeLoadBalancer.availability_zones = property(availability_zones)


@correct(ELBV2Response)
def create_load_balancer(original, self):
    params = self._get_params()
    refuse_source_nat(
        params.get("Type"), params.get("IpAddressType", "ipv4"), params.get("EnablePrefixForIpv6SourceNat", "off")
    )
    answer = original(self)
    made = next(b for b in self.elbv2_backend.load_balancers.values() if b.name == params["Name"])
    set_source_nat(made, params)
    return answer


@correct(ELBV2Response)
def set_subnets(original, self):
    params = self._get_params()
    balancer = self.elbv2_backend.load_balancers.get(params["LoadBalancerArn"])
    if balancer:
        enabled = params.get("EnablePrefixForIpv6SourceNat", "off")
        refuse_source_nat(balancer.type, balancer.ip_address_type, enabled)
        if enabled == "off" and balancer.enable_prefix_for_ipv6_source_nat == "on" and has_udp(balancer):
            raise error("InvalidConfigurationRequest", "A listener with UDP needs the prefixes for IPv6 source NAT")
    answer = original(self)
    set_source_nat(balancer, params)
    enabled = balancer.enable_prefix_for_ipv6_source_nat
    return type(answer)({"AvailabilityZones": balancer.availability_zones, "EnablePrefixForIpv6SourceNat": enabled})


def has_udp(balancer):
    return any(listener.protocol.endswith("UDP") for listener in balancer.listeners.values())


@correct(Backend)
def set_ip_address_type(original, self, arn, ip_type):
    # moto changes it whatever the listeners have.
    balancer = self.load_balancers.get(arn)
    if balancer and balancer.type == "network" and ip_type != balancer.ip_address_type:
        used = [self.target_groups.get(g) for listener in balancer.listeners.values() for g in groups_of(listener)]
        if ip_type == "dualstack" and has_udp(balancer):
            raise error("InvalidConfigurationRequest", "A listener with UDP has targets with IPv4")
        if ip_type == "ipv4" and any(group and group.ip_address_type == "ipv6" for group in used):
            raise error("InvalidConfigurationRequest", "A target group has IPv6")
        if ip_type == "ipv4" and balancer.enable_prefix_for_ipv6_source_nat == "on":
            raise error("InvalidConfigurationRequest", "A prefix for IPv6 source NAT needs a dualstack load balancer")
    return original(self, arn, ip_type)


def activate(self):
    # moto reports active at once.
    self.describes_until_active = getattr(self, "describes_until_active", 0) - 1
    if self.describes_until_active <= 0:
        self.state = "active"


models.FakeLoadBalancer.activate = activate


@correct(Backend)
def delete_load_balancer(original, self, arn):
    # moto releases the target groups and security groups at once.
    balancer = self.load_balancers.get(arn)
    if balancer:
        now = time.monotonic()
        for group in (g for listener in balancer.listeners.values() for g in groups_of(listener)):
            held[group] = now + target_group_release
        for group in balancer.security_groups or []:
            held[group] = now + security_group_release
    return original(self, arn)


@correct(Backend)
def set_security_groups(original, self, arn, sec_groups):
    # moto gives groups also to a network load balancer that was created without any.
    balancer = self.load_balancers.get(arn)
    if balancer and balancer.type == "network" and not balancer.security_groups:
        raise error("InvalidConfigurationRequest", "The load balancer was created without a security group")
    return original(self, arn, sec_groups)


@correct(Backend)
def set_subnets(original, self, arn, subnets, subnet_mappings):
    # moto wants two zones also of a network load balancer, and replaces the subnet of a zone in one call.
    balancer = self.load_balancers.get(arn)
    if balancer is None or balancer.type != "network":
        return original(self, arn, subnets, subnet_mappings)
    try:
        wanted = [self.ec2_backend.get_subnet(mapping["SubnetId"]) for mapping in subnet_mappings]
    except InvalidSubnetIdError as unknown:
        raise errors.SubnetNotFoundError() from unknown
    zones = {subnet.availability_zone: subnet.id for subnet in [*wanted, *balancer.subnets]}
    if any(zones[subnet.availability_zone] != subnet.id for subnet in [*wanted, *balancer.subnets]):
        raise error("InvalidConfigurationRequest", "An Availability Zone has one subnet, which no call replaces")
    balancer.subnets = wanted
    return [models.AvailabilityZone(subnet) for subnet in wanted]


@correct(SecurityGroupBackend)
def delete_security_group(original, self, name=None, group_id=None):
    # moto deletes a group that a load balancer uses.
    balancers = models.elbv2_backends[self.account_id][self.region_name].load_balancers.values()
    if is_held(group_id) or any(group_id in (b.security_groups or []) for b in list(balancers)):
        raise DependencyViolationError(f"resource {group_id} has a dependent object")
    return original(self, name, group_id)


def all_or_nothing(original, self):
    # moto refuses a rule that is there already, one that is missing and the 61st, but keeps the changes of the rules before it.
    group = self.ec2_backend.get_security_group_from_id(self._get_param("GroupId"))
    before = list(group.ingress_rules) if group else []
    try:
        return original(self)
    except Exception:
        if group:
            group.ingress_rules = before
        raise


@correct(SecurityGroups)
def authorize_security_group_ingress(original, self):
    return all_or_nothing(original, self)


@correct(SecurityGroups)
def revoke_security_group_ingress(original, self):
    return all_or_nothing(original, self)


@correct(Backend)
def delete_target_group(original, self, target_group_arn):
    if is_held(target_group_arn):
        raise errors.ResourceInUseError("The target group is currently in use by a listener or a rule")
    return original(self, target_group_arn)


def check_forward(backend, balancer, protocol, actions):
    # moto takes each protocol with each IP family.
    is_dual = balancer.ip_address_type == "dualstack"
    needs_v6 = is_dual and protocol.endswith("UDP")
    if needs_v6 and balancer.enable_prefix_for_ipv6_source_nat == "off":
        raise error("InvalidConfigurationRequest", "UDP on a dualstack load balancer needs prefixes for IPv6 source NAT")
    for action in actions:
        group = backend.target_groups.get(action.get("TargetGroupArn"))
        if group is None:
            raise errors.TargetGroupNotFoundError()
        if group.protocol != protocol and (protocol, group.protocol) != ("TLS", "TCP"):
            raise error("IncompatibleProtocols", f"{protocol} listener, {group.protocol} target group")
        has_v6 = group.ip_address_type == "ipv6"
        if needs_v6 and not has_v6 or has_v6 and not is_dual:
            raise error("InvalidConfigurationRequest", f"{protocol} on this load balancer needs targets of the other IP family")


@correct(Backend)
def create_listener(original, self, load_balancer_arn, protocol, port, ssl_policy, certificate, actions, *args, **kwargs):
    # moto accepts a second listener on a port, and a target group of another protocol.
    balancer = self.load_balancers.get(load_balancer_arn)
    if balancer and any(str(other.port) == str(port) for other in balancer.listeners.values()):
        raise errors.DuplicateListenerError()
    if balancer:
        check_forward(self, balancer, protocol, actions)
    return original(self, load_balancer_arn, protocol, port, ssl_policy, certificate, actions, *args, **kwargs)


@correct(Backend)
def modify_listener(original, self, arn, port=None, protocol=None, ssl_policy=None, certificates=None, actions=None):
    # moto knows the protocols of application load balancers only, and accepts target groups that do not exist.
    if protocol not in (None, *NLB_PROTOCOLS):
        raise error("UnsupportedProtocol", f"Protocol {protocol} is not supported")
    listener = self.describe_listeners(load_balancer_arn=None, listener_arns=[arn])[0]
    balancer = self.load_balancers[listener.load_balancer_arn]
    check_forward(self, balancer, protocol or listener.protocol, actions or [])
    # moto makes the rest of the change before it looks at the certificate.
    if certificates and not self._certificate_exists(certificate_arn=certificates[0]["CertificateArn"]):
        raise error("CertificateNotFound", "Certificate not found")
    changed = original(self, arn, port, None, ssl_policy, certificates, actions)
    changed.protocol = protocol or changed.protocol
    if certificates:
        # moto changes the certificate of HTTPS listeners only. The others may contain the default one too.
        others = (changed.certificates or [])[1:]
        changed.certificate = certificates[0]["CertificateArn"]
        changed.certificates = [changed.certificate, *others]
    return changed


def only_certificate(certificates):
    # moto takes any number.
    if len(certificates) != 1:
        raise errors.ValidationError("You must specify exactly one certificate")
    return certificates[0]["CertificateArn"]


@correct(Backend)
def add_listener_certificates(original, self, arn, certificates):
    # moto adds one that the list has again, and does not count the default one as AWS does.
    added = only_certificate(certificates)
    listener = self.describe_listeners(load_balancer_arn=None, listener_arns=[arn])[0]
    if not self._certificate_exists(certificate_arn=added):
        raise error("CertificateNotFound", "Certificate not found")
    if added not in listener.certificates[1:]:
        if len(listener.certificates) > 25:
            raise error("TooManyCertificates", "At most 25 certificates beside the default one")
        listener.certificates.append(added)
    return listener.certificates


@correct(Backend)
def remove_listener_certificates(original, self, arn, certificates):
    # moto also removes the default certificate, its first one.
    removed = only_certificate(certificates)
    listener = self.describe_listeners(load_balancer_arn=None, listener_arns=[arn])[0]
    default, *others = listener.certificates
    if removed == default:
        raise error("OperationNotPermitted", "Default certificate cannot be removed")
    listener.certificates = [default, *(other for other in others if other != removed)]


@correct(Backend)
def modify_target_group_attributes(original, self, target_group_arn, attributes):
    # moto accepts any attribute.
    group = self.target_groups.get(target_group_arn)
    if group and group.protocol == "TLS" and any(key.startswith("stickiness.") for key in attributes):
        raise error("InvalidConfigurationRequest", "The provided target group attribute is not supported")
    return original(self, target_group_arn, attributes)


@correct(Backend)
def add_tags(original, self, resource_arns, tags):
    # moto's limit is 10.
    for arn in resource_arns:
        self._get_resource_by_arn(arn)
        there = self.tagging_service.get_tag_dict_for_resource(arn)
        if len({*there, *(tag["Key"] for tag in tags)}) > 50:
            raise error("TooManyTags", "At most 50 tags")
        if any(len(tag.get("Value", "")) > 256 for tag in tags):
            raise errors.ValidationError("A tag's value has at most 256 characters")
        self.tagging_service.tag_resource(arn, tags)


@correct(Backend)
def describe_target_groups(original, self, load_balancer_arn, target_group_arns, names):
    # moto keeps load balancers on a target group after they have released it, and forgets those that a changed listener added.
    for group in self.target_groups.values():
        group.load_balancer_arns = sorted(
            {b.arn for b in self.load_balancers.values() for li in b.listeners.values() if group.arn in groups_of(li)}
        )
    return original(self, load_balancer_arn, target_group_arns, names)


@correct(Backend)
def describe_tags(original, self, resource_arns):
    # moto accepts any number.
    if len(resource_arns) > 20:
        raise errors.ValidationError("At most 20 resources can be described")
    return original(self, resource_arns)


def check_health(interval, timeout, healthy, unhealthy):
    for value, low, high in ((interval, 5, 300), (timeout, 2, 120), (healthy, 2, 10), (unhealthy, 2, 10)):
        if value is not None and not low <= int(value) <= high:
            raise errors.ValidationError(f"{value} is not between {low} and {high}")


@correct(Backend)
def create_target_group(original, self, name, **kwargs):
    # moto accepts any interval and threshold, and shows an attribute of network load balancers only once it was set.
    check_health(
        kwargs.get("healthcheck_interval_seconds"),
        kwargs.get("healthcheck_timeout_seconds"),
        kwargs.get("healthy_threshold_count"),
        kwargs.get("unhealthy_threshold_count"),
    )
    group = original(self, name, **kwargs)
    is_datagram = group.protocol in ("UDP", "TCP_UDP")
    group.attributes.update(
        {
            "preserve_client_ip.enabled": "false" if kwargs.get("target_type") == "ip" and kwargs.get("protocol") in ("TCP", "TLS") else "true",
            "proxy_protocol_v2.enabled": "false",
            "deregistration_delay.connection_termination.enabled": "true" if is_datagram else "false",
        }
    )
    if not is_datagram:
        group.attributes["target_health_state.unhealthy.connection_termination.enabled"] = "true"
        group.attributes["target_health_state.unhealthy.draining_interval_seconds"] = "0"
    return group


@correct(Backend)
def modify_target_group(original, self, arn, *args, **kwargs):
    # moto accepts any interval and threshold, and drops the codes for a TCP target group with an HTTP check.
    proto, port, path, interval, timeout, healthy, unhealthy, codes = args
    check_health(interval, timeout, healthy, unhealthy)
    group = original(self, arn, *args, **kwargs)
    if codes is not None and group.health_check_protocol in ("HTTP", "HTTPS"):
        group.matcher = {"HttpCode": codes}
    return group


@correct(Group)
def register(original, self, targets):
    # moto registers those before the bad one, and accepts instances that do not exist, and addresses outside the VPC.
    bad = []
    if self.target_type == "ip":
        vpc = self.ec2_backend.get_vpc(self.vpc_id)
        ranges = [ip_network(association["cidr_block"]) for association in vpc.cidr_block_association_set]
        outside = [target["Id"] for target in targets if not any(ip_address(target["Id"]) in block for block in ranges)]
        if outside:
            raise errors.ValidationError(f"The IP address {outside[0]} is not within a range that is valid for VPC {self.vpc_id}")
        return original(self, targets)
    for target in targets:
        instance = self.ec2_backend.get_instance_by_id(target["Id"])
        if instance is None or instance.state != "running":
            bad.append(target["Id"])
    if bad:
        names = ", ".join(f"'{b}'" for b in bad)
        raise error("InvalidTarget", f"The following targets are not in a running state and cannot be registered: {names}")
    return original(self, targets)


@correct(Group)
def deregister(original, self, targets):
    # moto refuses targets that are not registered.
    return original(self, [t for t in targets if t["Id"] in self.targets])


@correct(Backend)
def describe_target_health(original, self, target_group_arn, targets):
    # moto's targets are healthy at once and for ever, and gone as soon as they are deregistered.
    answer = original(self, target_group_arn, targets)
    if health is None:
        return answer
    group = self.target_groups[target_group_arn]
    known = health.get(target_group_arn, {})
    for status in answer:
        if status.instance_id in group.targets and status.status == "healthy":
            state = known.get(status.instance_id, ("draining", None))
            # One that is registered again begins anew.
            status.status, status.reason = state if state[0] != "draining" else ("initial", "Elb.RegistrationInProgress")
    if not targets:
        leaving = [(id, state) for id, state in known.items() if id not in group.targets and state[0] == "draining"]
        port = {id: target["Port"] for id, target in group.deregistered_targets.items()}
        answer += [models.FakeHealthStatus(id, port.get(id, group.port), group.health_check_port, *state) for id, state in leaving]
    return answer


def snapshot():
    """All state of ELBv2 and all security groups, one line per object: its name, a tab, its content without generated identifiers."""
    backend = models.elbv2_backends[DEFAULT_ACCOUNT_ID]["us-east-1"]
    groups = {
        group.id: group
        for of_vpc in list(ec2_backends[DEFAULT_ACCOUNT_ID]["us-east-1"].groups.values())
        for group in list(of_vpc.values())
    }

    def attributes(of):
        # moto keeps numbers where AWS has strings, until they are set.
        return sorted((key, str(value)) for key, value in of.items())

    def tags(arn):
        return sorted(backend.tagging_service.get_tag_dict_for_resource(arn).items())

    # Every VPC has one of the name "default".
    for group in (group for group in groups.values() if group.name != "default"):
        rules = [(r.ip_protocol, r.from_port, r.to_port, r.cidr_ipv4, r.description) for r in group.ingress_rules]
        own_tags = sorted((tag["key"], tag["value"]) for tag in group.get_tags())
        yield f"security group {group.name}\t{[group.vpc_id, own_tags, sorted(rules, key=str)]}"
    names = {arn: group.name for arn, group in backend.target_groups.items()}
    for arn, g in backend.target_groups.items():
        check = [g.health_check_protocol, g.health_check_path, g.health_check_port, getattr(g, "matcher", None)]
        check += [g.health_check_interval_seconds, g.health_check_timeout_seconds]
        check += [g.healthy_threshold_count, g.unhealthy_threshold_count]
        content = [g.protocol, g.port, g.vpc_id, g.target_type, check, attributes(g.attributes), tags(arn)]
        yield f"target group {g.name}\t{content} targets {sorted(g.targets)}"
    for arn, b in backend.load_balancers.items():
        subnets = sorted(subnet.id for subnet in b.subnets)
        security = sorted(groups[g].name if g in groups else "nothing" for g in b.security_groups or [])
        families = [b.ip_address_type, b.enable_prefix_for_ipv6_source_nat]
        yield f"load balancer {b.name}\t{[b.type, b.scheme, families, subnets, security, attributes(b.attrs), tags(arn)]}"
        for listener in b.listeners.values():
            to = [names.get(g, "nothing") for g in groups_of(listener)]
            yield f"listener {b.name}:{listener.port}\t{[listener.protocol, to, tags(listener.arn)]}"


def targets():
    """One line per target group: the UID in its tag, a tab, its name, a tab, its targets."""
    backend = models.elbv2_backends[DEFAULT_ACCOUNT_ID]["us-east-1"]
    for arn, g in backend.target_groups.items():
        uid = backend.tagging_service.get_tag_dict_for_resource(arn).get("steerage.dev/uid", "")
        yield f"{uid}\t{g.name}\t{' '.join(sorted(g.targets))}"


def counted_writes():
    yield str(writes)


def shown_health():
    """One line per target: its group's ARN, its id, state and reason, separated by tabs."""
    backend = models.elbv2_backends[DEFAULT_ACCOUNT_ID]["us-east-1"]
    for arn in list(backend.target_groups):
        for status in backend.describe_target_health(arn, []):
            yield f"{arn}\t{status.instance_id}\t{status.status}\t{status.reason or ''}"


def set_health(lines):
    """Takes lines as shown_health has them, of all targets."""
    global health
    states = defaultdict(dict)
    for line in lines:
        group, id, state, reason = line.split("\t")
        states[group][id] = (state, reason or None)
    health = states


# moto's models are not made for several threads: a call that reads a table fails while another one writes it.
one_call = threading.Lock()
# moto's own dispatcher takes half of a call's time: it looks for each of moto's services on the disk, for every call.
services = {"ec2": create_backend_app("ec2"), "elasticloadbalancing": create_backend_app("elbv2")}


LOOKS = {"/test/snapshot": snapshot, "/test/targets": targets, "/test/writes": counted_writes, "/test/health": shown_health}


def app(environ, start_response):
    body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    with one_call:
        return answer(environ, body, start_response)


def answer(environ, body, start_response):
    global writes
    # Reads past the API, for tests that poll: moto needs milliseconds for every call.
    look = LOOKS.get(environ["PATH_INFO"])
    if look is None:
        # The scope of the credential: AWS4-HMAC-SHA256 Credential=key/date/region/service/aws4_request
        name = environ["HTTP_AUTHORIZATION"].split("/")[3]
        if name not in services:
            # Few tests need it, and it takes its time to load.
            services[name] = create_backend_app(name)
        if b"Action=Describe" not in body:
            writes += 1
        environ["wsgi.input"] = io.BytesIO(body)
        return services[name](environ, start_response)
    if environ["REQUEST_METHOD"] == "POST" and look is shown_health:
        set_health(body.decode().splitlines())
    body = "\n".join(look()).encode()
    # Without a length the body would come in chunks.
    start_response("200 OK", [("Content-Type", "text/plain"), ("Content-Length", str(len(body)))])
    return [body]


class Quiet(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_request(self, *args):
        pass


server = make_server(host, port, app, threaded=True, request_handler=Quiet)
print(server.port, flush=True)
server.serve_forever()
