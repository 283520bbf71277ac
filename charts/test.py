# SPDX-License-Identifier: Apache-2.0
"""The chart's tests: run by charts/test, which builds the programs first."""

import json
import os
import pathlib
import re
import subprocess
import unittest

import yaml

CHART = pathlib.Path(__file__).with_name("steerage")
ALERTS = CHART / "files" / "alerts.yaml"
DASHBOARD = CHART / "files" / "dashboard.json"
UNIT_TESTS = CHART.with_name("alerts-test.yaml")
BINARIES = pathlib.Path(os.environ["STEERAGE_BINARIES"])
FULL_POOL = {"addresses": ["10.0.200.0/24"], "autoAssign": False, "excluded": ["10.0.200.1"], "namespaces": ["shop"], "priority": 7, "sharing": "Cluster", "maxAddressesPerNamespace": 5, "reuseDelaySeconds": 300, "namespaceSelector": {}, "serviceSelector": {"matchLabels": {"a": "b"}, "matchExpressions": [{"key": "c", "operator": "In", "values": ["d"]}]}}
POOLS = {"edge": {"addressPools": [{"name": "default", "addresses": ["10.0.200.0/24", "fd00::1-fd00::9"]}]}}
AWS = {"controller": {"provider": "aws"}, "aws": {"clusterName": "test", "vpcId": "vpc-1", "subnets": ["subnet-1", "subnet-2"]}}
AWS_BY_TAGS = {**AWS, "aws": {"clusterName": "test", "vpcId": "vpc-1"}}
FULL_AWS = {"controller": {**AWS["controller"], "podReadinessGates": True}, "aws": {**AWS["aws"], "region": "eu-west-1", "scheme": "internet-facing", "backendSecurityGroup": "sg-1", "sharedLoadBalancers": {"web": {"namespaces": ["shop"], "annotations": {"service.beta.kubernetes.io/aws-load-balancer-security-groups": "sg-2"}}}, "adopt": ["cloud-provider-aws", "aws-load-balancer-controller"], "elbv2Endpoint": "http://127.0.0.1:5000", "ec2Endpoint": "http://127.0.0.1:5001"}}
OPENSTACK = {"controller": {"provider": "openstack"}, "openstack": {"clusterName": "test", "subnetId": "subnet-1"}}
FULL_OPENSTACK = {**OPENSTACK, "controller": {"provider": "openstack", "defaultSteering": "api"}, "openstack": {**OPENSTACK["openstack"], "cloud": "prod", "cloudsSecret": "clouds", "memberSubnetId": "subnet-2", "ipv6SubnetId": "subnet-6", "ipv6MemberSubnetId": "subnet-7", "nodeSecurityGroupId": "group-1", "nodePorts": "31000-31999", "adopt": "kubernetes", "floatingNetworkId": "network-1", "provider": "ovn"}}
AZURE = {"controller": {"provider": "azure"}, "azure": {"clusterName": "test", "subscriptionId": "s", "resourceGroup": "g", "location": "westeurope", "virtualNetwork": "n"}}
FULL_AZURE = {**AZURE, "azure": {**AZURE["azure"], "subnet": "nodes", "networkSecurityGroup": "nsg", "zones": ["1", "2"], "identityClientId": "i", "workloadIdentity": True, "credentialsSecret": "azure"}}
GCE = {"controller": {"provider": "gce"}, "gce": {"clusterName": "test"}}
FULL_GCE = {**GCE, "gce": {"clusterName": "test", "project": "p", "region": "europe-west1", "network": "projects/host/global/networks/n", "subnetwork": "s", "nodeTags": ["node", "worker"], "zones": ["europe-west1-b", "europe-west1-c"], "credentialsSecret": "google"}}
SWITCHES = {
    "controller": {"defaultSteering": "api", "serveUnsetClass": True, "serveClasses": ["service.k8s.aws/nlb"], "migrateLegacyAnnotations": True, "replicas": 1},
    "agent": {
        "kubeProxyReplacement": True,
        "apiServer": "[fd00::1]:6443",
        "maxUnavailable": 2,
        "masqueradeAll": True,
        "metricsBindAddress": "none",
        "kubeProxyConfigMap": "kube-proxy",
    },
    "edge": {"serviceAccount": {"createTokenSecret": True}},
    "log": {"level": "debug", "format": "text"},
}
MONITORING = {
    "metrics": {
        "podMonitor": {"enabled": True, "kubeProxyJob": True, "interval": "1m30s", "additionalLabels": {"release": "prometheus"}},
        "scrapeConfig": {"enabled": True, "edgeHosts": ["10.0.0.1:10359", "[fd00::1]:10359", "edge1.example.org:10359"]},
        "prometheusRule": {"enabled": True, "additionalLabels": {"release": "prometheus"}},
        "dashboard": {"enabled": True, "annotations": {"grafana_folder": "Network"}},
    }
}
ON_NODES = {
    "edge": {"createPeersSecret": False, "onNodes": {"enabled": True, "interface": "eth1", "peersPort": 20360, "extraArgs": ["--group=a"], "nodeSelector": {"edge": "true"}}},
    "metrics": MONITORING["metrics"],
}
TUNNEL = {"edge": {**POOLS["edge"], "tunnel": {"vni": 7, "mtu": 1280, "sources": ["10.0.0.11", "fd00::/64"], "send": True}, "onNodes": {"enabled": True}}}
VALID = {"defaults": {}, "pools": POOLS, "all of a pool": {"edge": {"addressPools": [{"name": "a", **FULL_POOL}]}}, "aws": AWS, "aws without subnets": AWS_BY_TAGS, "all of aws": FULL_AWS, "azure": AZURE, "all of azure": FULL_AZURE, "gce": GCE, "all of gce": FULL_GCE, "openstack": OPENSTACK, "all of openstack": FULL_OPENSTACK, "switches": SWITCHES, "monitoring": MONITORING, "edge on nodes": ON_NODES, "edge with a tunnel": TUNNEL}
INVALID = {
    "the edge on nodes beside a cloud": {**AWS, "edge": {"onNodes": {"enabled": True}}},
    "a tunnel without edge hosts": {**POOLS, "edge": {**POOLS["edge"], "tunnel": {"vni": 7}}},
    "a tunnel without address pools": {"edge": {"tunnel": {"vni": 7, "sources": ["10.0.0.11"]}}},
    "a tunnel beside a cloud": {**AWS, **TUNNEL, "edge": {**TUNNEL["edge"], "onNodes": {"enabled": False}}},
    "a tunnel too small for IPv6": {"edge": {"tunnel": {"mtu": 1279}}},
    "a class of Steerage as another's": {"controller": {"serveClasses": ["steerage.dev/edge"]}},
    "an unknown value": {"controler": {}},
    "an unknown value inside": {"agent": {"service": "all"}},
    "an unknown provider": {"controller": {"provider": "gcp"}},
    "an unknown steering": {"controller": {"defaultSteering": "magic"}},
    "a port as text": {"controller": {"adminPort": "9580"}},
    "kube-proxy replacement without the API server": {"agent": {"kubeProxyReplacement": True}},
    "kube-proxy's file beside kube-proxy": {"agent": {"kubeProxyConfigMap": "kube-proxy"}},
    "an API server without a port": {"agent": {"kubeProxyReplacement": True, "apiServer": "10.0.0.1"}},
    "a pool without addresses": {"edge": {"addressPools": [{"name": "default", "addresses": []}]}},
    "a pool for a namespace that cannot be": {"edge": {"addressPools": [{"name": "a", "addresses": ["10.0.0.0/24"], "namespaces": ["Shop"]}]}},
    "a pool whose limit is zero": {"edge": {"addressPools": [{"name": "a", "addresses": ["10.0.0.0/24"], "maxAddressesPerNamespace": 0}]}},
    "a pool with an unknown sharing": {"edge": {"addressPools": [{"name": "a", "addresses": ["10.0.0.0/24"], "sharing": "All"}]}},
    "a selector with an unknown operator": {"edge": {"addressPools": [{"name": "a", "addresses": ["10.0.0.0/24"], "serviceSelector": {"matchExpressions": [{"key": "a", "operator": "Is"}]}}]}},
    "a pool without a name": {"edge": {"addressPools": [{"addresses": ["10.0.0.0/24"]}]}},
    "an IPv4 prefix that is too long": {"edge": {"addressPools": [{"name": "a", "addresses": ["10.0.0.0/33"]}]}},
    "an IPv6 prefix that is too long": {"edge": {"addressPools": [{"name": "a", "addresses": ["fd00::/129"]}]}},
    "an address by name": {"edge": {"addressPools": [{"name": "a", "addresses": ["example.org"]}]}},
    "a tunnel from an address that cannot be": {"edge": {**POOLS["edge"], "tunnel": {"vni": 7, "sources": ["10.0.0.300"]}}},
    "a tunnel from a range": {"edge": {**POOLS["edge"], "tunnel": {"vni": 7, "sources": ["10.0.0.1-10.0.0.9"]}}},
    "a tunnel whose packets are too short": {"edge": {**POOLS["edge"], "tunnel": {"vni": 7, "sources": ["10.0.0.1"], "mtu": 900}}},
    "a tunnel without a number that sends": {"edge": {**POOLS["edge"], "tunnel": {"send": True}}},
    "a controller that cannot be adopted": {**AWS, "aws": {**AWS["aws"], "adopt": ["metallb"]}},
    "a shared load balancer for nobody": {**AWS, "aws": {**AWS["aws"], "sharedLoadBalancers": {"web": {"namespaces": [], "annotations": {}}}}},
    "a shared load balancer with an unknown setting": {**AWS, "aws": {**AWS["aws"], "sharedLoadBalancers": {"web": {"namespaces": ["a"], "annotations": {}, "ports": "80"}}}},
    "readiness gates at the edge": {"controller": {"podReadinessGates": True}},
    "aws without a network": {"controller": {"provider": "aws"}},
    "azure without a region": {**AZURE, "azure": {**AZURE["azure"], "location": ""}},
    "gce without a name": {"controller": {"provider": "gce"}},
    "gce's token without a configuration": {**GCE, "gce": {"clusterName": "test", "tokenAudience": "a"}},
    "openstack without a subnet": {"controller": {"provider": "openstack"}, "openstack": {"clusterName": "test"}},
    "no node may be updated": {"agent": {"maxUnavailable": 0}},
    "an interval without a unit": {"metrics": {"podMonitor": {"interval": "30"}}},
    "an interval from small to large": {"metrics": {"podMonitor": {"interval": "30s1m"}}},
    "an interval as a number": {"metrics": {"scrapeConfig": {"interval": 30}}},
    "a label that is no text": {"metrics": {"prometheusRule": {"additionalLabels": {"release": 1}}}},
    "a switch as text": {"metrics": {"dashboard": {"enabled": "yes"}}},
    "a scrape configuration without edge hosts": {"metrics": {"scrapeConfig": {"enabled": True}}},
    "an edge host without a port": {"metrics": {"scrapeConfig": {"edgeHosts": ["10.0.0.1"]}}},
    "an edge host as a URL": {"metrics": {"scrapeConfig": {"edgeHosts": ["http://10.0.0.1:10359"]}}},
}
# All that is ever granted. A right that is added here is added for a reason that stands beside it in the chart.
RIGHTS = {
    "ClusterRole/steerage-controller": {
        "/services": "get list patch watch",
        "/services/status": "patch",
        "/nodes": "list watch",
        "/namespaces": "list watch",
        "discovery.k8s.io/endpointslices": "list watch",
        "events.k8s.io/events": "create patch",
    },
    "ClusterRole/steerage-agent": {
        "/services": "list watch",
        "/nodes": "list patch watch",
        "discovery.k8s.io/endpointslices": "list watch",
        "networking.k8s.io/servicecidrs": "list watch",
        "events.k8s.io/events": "create patch",
    },
    "Role/steerage-controller": {
        "coordination.k8s.io/leases": "create",
        "coordination.k8s.io/leases/steerage-controller": "get update",
        "steerage.dev/edgeloadbalancers": "create delete get list patch watch",
        "steerage.dev/edgenodesets": "create delete get list patch watch",
        "steerage.dev/addresspools": "list watch",
        "steerage.dev/addresspools/status": "patch",
        "steerage.dev/edgehosts": "list watch",
        "steerage.dev/edgetargethealths": "list watch",
    },
    "ClusterRole/steerage-edge": {"/namespaces/kube-system": "get"},
    "Role/steerage-edge": {
        "steerage.dev/edgeloadbalancers": "list watch",
        "steerage.dev/edgenodesets": "list watch",
        "steerage.dev/edgehosts": "create patch",
        "steerage.dev/edgetargethealths": "create delete list patch",
        "/secrets/steerage-edge-peers": "get",
    },
}


def helm(verb, values, *words):
    command = ["helm", verb, *(["steerage"] if verb == "template" else []), CHART, "-n", "steerage-system", "-f", "-", *words]
    return subprocess.run(command, input=json.dumps(values), capture_output=True, text=True, check=False)


def render(values, *words):
    """All rendered objects, by `Kind/name`."""
    done = helm("template", values, *words)
    if done.returncode:
        raise AssertionError(done.stderr)
    objects = [document for document in yaml.safe_load_all(done.stdout) if document]
    named = {f"{item['kind']}/{item['metadata']['name']}": item for item in objects}
    assert len(named) == len(objects), "two objects of one name"
    return named


def alerts():
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def pod(item):
    return item["spec"]["template"]["spec"]


class Source(unittest.TestCase):
    def test_the_definitions_are_those_of_the_types(self):
        printed = subprocess.run([BINARIES / "crds"], check=True, capture_output=True, text=True).stdout
        path = CHART / "files" / "crds.yaml"
        self.assertEqual(printed, path.read_text(), f"stale: cargo run --release -p steerage-edge-api --bin crds > {path}")

    def test_the_chart_has_the_version_of_the_programs(self):
        cargo = (CHART.parent.parent / "Cargo.toml").read_text()
        version = re.search(r'\[workspace\.package\]\nversion = "(.+)"', cargo).group(1)
        chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
        self.assertEqual((version, version), (chart["version"], chart["appVersion"]))

    def test_every_value_has_its_default_and_description_in_the_schema(self):
        def leaves(schema, values, path):
            for key, inner in schema["properties"].items():
                where = f"{path}.{key}".lstrip(".")
                if "description" in inner:
                    yield where, inner.get("default"), values.get(key)
                else:
                    yield from leaves(inner, values[key], where)

        schema = json.loads((CHART / "values.schema.json").read_text())
        values = yaml.safe_load((CHART / "values.yaml").read_text())
        for where, default, value in leaves(schema, values, ""):
            with self.subTest(where):
                self.assertEqual(default, value)


class Values(unittest.TestCase):
    def test_valid_values_lint_and_render(self):
        for name, values in VALID.items():
            with self.subTest(name):
                done = helm("lint", values, "--strict")
                self.assertEqual(0, done.returncode, done.stdout + done.stderr)
                render(values)

    def test_invalid_values_are_refused(self):
        for name, values in INVALID.items():
            with self.subTest(name):
                done = helm("template", values)
                self.assertNotEqual(0, done.returncode)
                self.assertIn("values don't meet the specifications of the schema", done.stderr)

    def test_agents_guard_the_addresses_of_the_edge_s_pools(self):
        def guarded(values):
            arguments = pod(render(values)["DaemonSet/steerage-agent"])["containers"][0]["args"]
            return [argument for argument in arguments if argument.startswith("--drop-unassigned-vips")]

        wanted = [f"--drop-unassigned-vips={address}" for address in POOLS["edge"]["addressPools"][0]["addresses"]]
        self.assertEqual(wanted, guarded(POOLS))
        self.assertEqual([], guarded({**POOLS, "agent": {"dropUnassignedVips": False}}))
        self.assertEqual([], guarded(AWS))

    def test_agents_receive_before_edge_hosts_on_nodes_send(self):
        def of_tunnel(values, program):
            arguments = pod(render(values)[f"DaemonSet/steerage-{program}"])["containers"][0]["args"]
            return [argument for argument in arguments if "tunnel" in argument]

        receive = ["--edge-tunnel-vni=7", "--edge-tunnel-port=10361", "--edge-tunnel-sources=10.0.0.11,fd00::/64", "--edge-tunnel-vips=10.0.200.0/24,fd00::1-fd00::9"]
        silent = {"edge": {**TUNNEL["edge"], "tunnel": {**TUNNEL["edge"]["tunnel"], "send": False}}}
        for values, sent in ((TUNNEL, ["--tunnel-vni=7", "--tunnel-port=10361", "--tunnel-mtu=1280"]), (silent, [])):
            self.assertEqual((receive, sent), (of_tunnel(values, "agent"), of_tunnel(values, "edge")))
        self.assertEqual(([], []), (of_tunnel(ON_NODES, "agent"), of_tunnel(ON_NODES, "edge")))

    def test_shared_load_balancers_are_a_file_whose_change_restarts_the_controller(self):
        objects = render(FULL_AWS)
        file = objects["ConfigMap/steerage-controller"]["data"]["shared-load-balancers.json"]
        self.assertEqual(FULL_AWS["aws"]["sharedLoadBalancers"], json.loads(file))
        controller = objects["Deployment/steerage-controller"]
        mounts = {mount["name"]: mount["mountPath"] for mount in pod(controller)["containers"][0]["volumeMounts"]}
        volumes = {volume["name"]: volume["configMap"]["name"] for volume in pod(controller)["volumes"]}
        self.assertEqual(({"configuration": "/etc/steerage"}, {"configuration": "steerage-controller"}), (mounts, volumes))
        checksum = lambda item: item["spec"]["template"]["metadata"].get("annotations", {}).get("checksum/shared-load-balancers")
        other = json.loads(json.dumps(FULL_AWS))
        other["aws"]["sharedLoadBalancers"]["web"]["namespaces"] = ["blog"]
        self.assertNotEqual(checksum(controller), checksum(render(other)["Deployment/steerage-controller"]))
        plain = render(AWS)
        self.assertNotIn("ConfigMap/steerage-controller", plain)
        # OpenStack's credentials lie beside it.
        shared = {**FULL_OPENSTACK, "openstack": {**FULL_OPENSTACK["openstack"], "sharedLoadBalancers": {"web": {"namespaces": ["shop"]}}}}
        objects = render(shared)
        self.assertEqual(shared["openstack"]["sharedLoadBalancers"], json.loads(objects["ConfigMap/steerage-controller"]["data"]["shared-load-balancers.json"]))
        names = lambda items: sorted(item["name"] for item in items)
        controller = pod(objects["Deployment/steerage-controller"])
        self.assertEqual((["clouds", "configuration"],) * 2, (names(controller["volumes"]), names(controller["containers"][0]["volumeMounts"])))
        self.assertIsNone(checksum(plain["Deployment/steerage-controller"]))

    def test_clouds_yaml_lies_where_clients_of_openstack_look(self):
        for values, secret in ((OPENSTACK, "steerage-openstack"), (FULL_OPENSTACK, "clouds")):
            controller = pod(render(values)["Deployment/steerage-controller"])
            self.assertEqual([{"name": "clouds", "secret": {"secretName": secret}}], controller["volumes"])
            mounts = controller["containers"][0]["volumeMounts"]
            self.assertEqual([{"name": "clouds", "mountPath": "/etc/openstack", "readOnly": True}], mounts)

    def test_credentials_lie_where_clients_of_google_look(self):
        controller = pod(render(FULL_GCE)["Deployment/steerage-controller"])
        self.assertEqual([{"name": "credentials", "secret": {"secretName": "google"}}], controller["volumes"])
        container = controller["containers"][0]
        self.assertEqual([{"name": "credentials", "mountPath": "/etc/gce", "readOnly": True}], container["volumeMounts"])
        self.assertIn({"name": "GOOGLE_APPLICATION_CREDENTIALS", "value": "/etc/gce/credentials.json"}, container["env"])
        self.assertIn("--gce-node-tags=node,worker", container["args"])
        federated = pod(render({**FULL_GCE, "gce": {**FULL_GCE["gce"], "tokenAudience": "//iam/pool"}})["Deployment/steerage-controller"])
        token = {"serviceAccountToken": {"audience": "//iam/pool", "path": "token"}}
        sources = [{"secret": {"name": "google"}}, token]
        self.assertEqual([{"name": "credentials", "projected": {"sources": sources}}], federated["volumes"])
        plain = pod(render(GCE)["Deployment/steerage-controller"])
        self.assertNotIn("volumes", plain)
        self.assertNotIn("GOOGLE_APPLICATION_CREDENTIALS", [variable["name"] for variable in plain["containers"][0]["env"]])

    def test_credentials_of_azure_are_variables_or_an_identity(self):
        deployment = render(FULL_AZURE)["Deployment/steerage-controller"]
        container = pod(deployment)["containers"][0]
        self.assertEqual([{"secretRef": {"name": "azure"}}], container["envFrom"])
        self.assertIn("--azure-zones=1,2", container["args"])
        self.assertEqual("true", deployment["spec"]["template"]["metadata"]["labels"]["azure.workload.identity/use"])
        plain = render(AZURE)["Deployment/steerage-controller"]
        self.assertNotIn("envFrom", pod(plain)["containers"][0])
        self.assertNotIn("azure.workload.identity/use", plain["spec"]["template"]["metadata"]["labels"])

    def test_an_agent_that_is_off_leaves_nothing(self):
        names = render({"agent": {"enabled": False}})
        self.assertFalse([name for name in names if "agent" in name])

    def test_another_provider_leaves_nothing_of_the_edge(self):
        names = render(AWS, "--set", "crds.install=false")
        self.assertFalse([name for name in names if "edge" in name.lower() or "Pool" in name])

    def test_nodes_are_edge_hosts_on_request(self):
        self.assertNotIn("DaemonSet/steerage-edge", render({}))
        objects = render(ON_NODES)
        spec = pod(objects["DaemonSet/steerage-edge"])
        self.assertEqual((True, True, "steerage-edge"), tuple(spec[key] for key in ("hostNetwork", "automountServiceAccountToken", "serviceAccountName")))
        self.assertEqual([10359, 20360], [port["containerPort"] for port in spec["containers"][0]["ports"]])
        arguments = spec["containers"][0]["args"]
        self.assertIn("--peers-key-secret=steerage-edge-peers", arguments)
        # The only host waits for its successor on another node, and has time to hand over.
        times = dict(argument.split("=") for argument in arguments if argument.endswith("s"))
        wait, grace = (int(times[flag].removesuffix("s")) for flag in ("--hand-over-wait", "--shutdown-grace-period"))
        hand_over, route_withdraw_wait = 4.5, 2
        self.assertTrue(0 < wait and wait + hand_over + route_withdraw_wait < grace < spec["terminationGracePeriodSeconds"], times)
        self.assertIn("PodMonitor/steerage-edge", objects)

    def test_edge_hosts_have_a_key_of_their_own(self):
        keys = {render({})["Secret/steerage-edge-peers"]["data"]["key"] for _ in range(2)}
        self.assertEqual((2, {64}), (len(keys), {len(key) for key in keys}))
        self.assertNotIn("Secret/steerage-edge-peers", render(ON_NODES))

    def test_definitions_stay_unless_told_otherwise(self):
        for keep, expected in (("true", {"helm.sh/resource-policy": "keep"}), ("false", None)):
            objects = render({}, "--set", f"crds.keep={keep}")
            found = [item["metadata"].get("annotations") for name, item in objects.items() if "CustomResource" in name]
            self.assertEqual([expected] * 5, found)
        self.assertFalse([name for name in render({"crds": {"install": False}}) if "CustomResource" in name])

    def test_all_settings_of_a_pool_are_in_its_spec(self):
        self.assertEqual(FULL_POOL, render(VALID["all of a pool"])["AddressPool/a"]["spec"])

    def test_pools_come_after_definitions_that_are_new(self):
        new = render(POOLS)["AddressPool/default"]
        known = render(POOLS, "--api-versions", "steerage.dev/v1alpha1/AddressPool")["AddressPool/default"]
        self.assertEqual("post-install,post-upgrade,post-rollback", new["metadata"]["annotations"]["helm.sh/hook"])
        self.assertNotIn("annotations", known["metadata"])
        self.assertEqual({"addresses": ["10.0.200.0/24", "fd00::1-fd00::9"], "autoAssign": True, "priority": 0, "sharing": "Namespace"}, known["spec"])


class Rights(unittest.TestCase):
    def test_accounts_have_these_rights_and_no_others(self):
        found = {}
        for name, item in render(POOLS).items():
            for rule in item.get("rules", []) if "Role/" in name else []:
                for resource in rule["resources"]:
                    path = "/".join([rule["apiGroups"][0], resource, *rule.get("resourceNames", [])])
                    found.setdefault(name, {})[path] = " ".join(sorted(rule["verbs"]))
        self.assertEqual(RIGHTS, found)

    def test_a_controller_of_a_cloud_reads_the_cluster_s_uid(self):
        def of_namespaces(values):
            rules = render(values)["ClusterRole/steerage-controller"]["rules"]
            return [(rule.get("resourceNames"), rule["verbs"]) for rule in rules if "namespaces" in rule["resources"]]

        self.assertEqual([(["kube-system"], ["get"])], of_namespaces(AWS))
        self.assertEqual([(None, ["list", "watch"])], of_namespaces(POOLS))

    def test_only_readiness_gates_need_pods(self):
        def of_pods(values):
            rules = render(values)["ClusterRole/steerage-controller"]["rules"]
            return {resource: rule["verbs"] for rule in rules for resource in rule["resources"] if "pods" in resource}

        self.assertEqual({"pods": ["list", "watch"], "pods/status": ["patch"]}, of_pods(FULL_AWS))
        self.assertEqual({}, of_pods(AWS))

    def test_an_agent_in_kube_proxy_s_place_knows_the_networks_of_services(self):
        rules = render(SWITCHES)["ClusterRole/steerage-agent"]["rules"]
        of_cidrs = [rule["verbs"] for rule in rules if "servicecidrs" in rule["resources"]]
        self.assertEqual([["list", "watch"]], of_cidrs)

    def test_external_ips_can_be_denied(self):
        denied = {"agent": {"denyServiceExternalIPs": True}}
        for values, count in (({}, 0), (denied, 1)):
            agent = pod(render(values)["DaemonSet/steerage-agent"])["containers"][0]["args"]
            self.assertEqual(count, agent.count("--deny-service-external-ips"))

    def test_settings_of_kube_proxy_are_taken_over(self):
        values = {
            "agent": {
                "kubeProxyReplacement": True,
                "apiServer": "10.0.0.1:6443",
                "kubeProxyConfigMap": "kube-proxy",
                "masqueradeAll": True,
                "metricsBindAddress": "0.0.0.0:10249",
            }
        }
        spec = pod(render(values)["DaemonSet/steerage-agent"])
        (container,) = spec["containers"]
        for argument in ("--config=/etc/steerage/kube-proxy/config.conf", "--masquerade-all", "--metrics-bind-address=0.0.0.0:10249"):
            self.assertIn(argument, container["args"])
        self.assertEqual([{"name": "kube-proxy", "configMap": {"name": "kube-proxy"}}], spec["volumes"])
        self.assertEqual("/etc/steerage/kube-proxy", container["volumeMounts"][0]["mountPath"])

    def test_forwarding_to_other_nodes_is_off_by_default(self):
        tunnels = {"forwardTunnelDevices": ["flannel.1", "flannel-v6.1"]}
        forwarding = ["--forward-without-local-endpoints"]
        for values, wanted in (
            ({}, []),
            (tunnels, []),
            ({"forwardWithoutLocalEndpoints": True}, forwarding),
            ({"forwardWithoutLocalEndpoints": True, **tunnels}, [*forwarding, "--forward-tunnel-devices=flannel.1,flannel-v6.1"]),
        ):
            agent = pod(render({"agent": values})["DaemonSet/steerage-agent"])["containers"][0]["args"]
            self.assertEqual(wanted, [argument for argument in agent if argument.startswith("--forward")])

    def test_edge_hosts_on_nodes_end_only_after_the_program_of_one_that_was_taken_out(self):
        edge = render({"edge": {**POOLS["edge"], "onNodes": {"enabled": True}}})["DaemonSet/steerage-edge"]
        # 10 s after the hand-over, --route-withdraw-wait, and some for the hand-over itself.
        self.assertGreaterEqual(edge["spec"].get("minReadySeconds", 0), 10 + 2 + 1)

    def test_every_container_is_confined(self):
        added = {"controller": None, "agent": ["NET_ADMIN"], "edge": ["NET_ADMIN", "NET_RAW", "BPF", "PERFMON"]}
        for values in VALID.values():
            for name, item in render(values).items():
                if item["kind"] not in ("Deployment", "DaemonSet"):
                    continue
                spec = pod(item)
                self.assertEqual({"type": "RuntimeDefault"}, spec["securityContext"]["seccompProfile"])
                for volume in spec.get("volumes", []):
                    if volume["name"] == "bpf":
                        self.assertEqual(("edge", "/sys/fs/bpf"), (spec["containers"][0]["name"], volume["hostPath"]["path"]))
                        continue
                    self.assertIn(set(volume) - {"name"}, ({"configMap"}, {"secret"}), "no folder of the host")
                for container in spec["containers"]:
                    context = container["securityContext"]
                    self.assertEqual((False, True), (context["allowPrivilegeEscalation"], context["readOnlyRootFilesystem"]))
                    self.assertEqual(["ALL"], context["capabilities"]["drop"])
                    self.assertEqual(added[container["name"]], context["capabilities"].get("add"), name)

    def test_only_the_agent_is_root_and_on_the_node_s_network(self):
        objects = render({})
        controller, agent = pod(objects["Deployment/steerage-controller"]), pod(objects["DaemonSet/steerage-agent"])
        self.assertEqual((True, 65532), tuple(controller["securityContext"][key] for key in ("runAsNonRoot", "runAsUser")))
        self.assertNotIn("hostNetwork", controller)
        self.assertTrue(agent["hostNetwork"])
        self.assertEqual([{"operator": "Exists"}], agent["tolerations"])


class Programs(unittest.TestCase):
    def test_the_programs_take_the_arguments(self):
        programs = {"Deployment/steerage-controller": "steerage", "DaemonSet/steerage-agent": "steerage-agent"}
        for name, values in VALID.items():
            objects = render(values)
            on_nodes = {"DaemonSet/steerage-edge": "steerage-edge"} if "DaemonSet/steerage-edge" in objects else {}
            for item, program in {**programs, **on_nodes}.items():
                arguments = pod(objects[item])["containers"][0]["args"]
                with self.subTest(name, program=program):
                    # Help is given only once what stands before it was understood.
                    done = subprocess.run([BINARIES / program, *arguments, "--help"], capture_output=True, text=True, check=False)
                    self.assertEqual(0, done.returncode, done.stderr)
                    self.assertIn("--log-level", done.stdout)


class Monitoring(unittest.TestCase):
    def test_nothing_of_it_is_rendered_by_default(self):
        kinds = {item["kind"] for item in render({}).values()}
        self.assertFalse(kinds & {"PodMonitor", "ScrapeConfig", "PrometheusRule", "ConfigMap"})

    def test_monitors_select_the_pods_and_a_port_of_theirs(self):
        objects = render(MONITORING)
        for component, kind in (("controller", "Deployment"), ("agent", "DaemonSet")):
            monitor = objects[f"PodMonitor/steerage-{component}"]
            template = objects[f"{kind}/steerage-{component}"]["spec"]["template"]
            selected = monitor["spec"]["selector"]["matchLabels"]
            self.assertEqual(selected, {key: template["metadata"]["labels"].get(key) for key in selected})
            self.assertEqual(component, selected["app.kubernetes.io/component"])
            ports = [port["name"] for container in template["spec"]["containers"] for port in container["ports"]]
            endpoint = monitor["spec"]["podMetricsEndpoints"][0]
            self.assertIn(endpoint["port"], ports)
            self.assertEqual(("1m30s", "prometheus"), (endpoint["interval"], monitor["metadata"]["labels"]["release"]))
        self.assertNotIn("PodMonitor/steerage-agent", render({**MONITORING, "agent": {"enabled": False}}))

    def test_agents_are_scraped_as_kube_proxy_s_job_on_request(self):
        spec = render(MONITORING)["PodMonitor/steerage-kube-proxy"]["spec"]
        self.assertEqual(render(MONITORING)["PodMonitor/steerage-agent"]["spec"]["selector"], spec["selector"])
        (endpoint,) = spec["podMetricsEndpoints"]
        self.assertIn({"targetLabel": "job", "replacement": "kube-proxy"}, endpoint["relabelings"])
        kept = endpoint["metricRelabelings"][0]["regex"]
        for name, expected in (("kubeproxy_sync_proxy_rules_duration_seconds_bucket", True), ("steerage_agent_frontends", False)):
            self.assertEqual(expected, bool(re.fullmatch(kept, name)), name)
        plain = {"metrics": {"podMonitor": {"enabled": True}}}
        self.assertNotIn("PodMonitor/steerage-kube-proxy", render(plain))

    def test_edge_hosts_are_scraped_as_one_job_of_steerage(self):
        spec = render(MONITORING)["ScrapeConfig/steerage-edge"]["spec"]
        wanted = {"labels": {"job": "steerage-system/steerage-edge"}, "targets": MONITORING["metrics"]["scrapeConfig"]["edgeHosts"]}
        self.assertEqual([wanted], spec["staticConfigs"])

    def test_rules_and_dashboard_are_the_files(self):
        objects = render(MONITORING)
        rule, dashboard = objects["PrometheusRule/steerage"], objects["ConfigMap/steerage-dashboard"]
        self.assertEqual(yaml.safe_load(ALERTS.read_text()), rule["spec"])
        self.assertEqual(json.loads(DASHBOARD.read_text()), json.loads(dashboard["data"]["steerage.json"]))
        self.assertEqual("1", dashboard["metadata"]["labels"]["grafana_dashboard"])
        self.assertEqual({"grafana_folder": "Network"}, dashboard["metadata"]["annotations"])

    def test_alerts_say_how_bad_it_is_and_link_a_section_that_exists(self):
        page = (CHART.parent.parent / "docs" / "troubleshooting.md").read_text()
        sections = {
            re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in re.findall(r"^#+ (.+)$", page, re.MULTILINE)
        }
        manual = (CHART.parent.parent / "docs" / "monitoring.md").read_text()
        for alert in alerts():
            with self.subTest(alert["alert"]):
                self.assertEqual({"summary", "description", "runbook_url"}, set(alert["annotations"]))
                self.assertIn(alert["labels"]["severity"], ("critical", "warning", "info"))
                self.assertIn("for", alert)
                self.assertIn("Next", alert["annotations"]["description"])
                before, _, section = alert["annotations"]["runbook_url"].partition("/docs/troubleshooting.md#")
                self.assertEqual("https://github.com/steerage-dev/steerage/blob/main", before)
                self.assertIn(section, sections)
                self.assertIn(f"| `{alert['alert']}` | {alert['labels']['severity']} |", manual)
                self.assertIn(f"(troubleshooting.md#{section})", manual)
        named = set(re.findall(r"`(Steerage\w+)`", manual))
        self.assertEqual({alert["alert"] for alert in alerts()}, named)

    def test_alerts_fire_when_they_should_and_only_then(self):
        names = [test["name"] for test in yaml.safe_load(UNIT_TESTS.read_text())["tests"]]
        for alert in alerts():
            for behaviour in ("fires", "stays silent"):
                with self.subTest(alert["alert"]):
                    self.assertTrue([name for name in names if name.startswith(f"{alert['alert']} {behaviour}")], f"no test: {behaviour}")
        for command in (["check", "rules", ALERTS], ["test", "rules", UNIT_TESTS]):
            done = subprocess.run(["promtool", *command], capture_output=True, text=True, check=False)
            self.assertEqual(0, done.returncode, done.stdout + done.stderr)

    def test_panels_have_a_place_a_unit_a_description_and_the_chosen_datasource(self):
        dashboard = json.loads(DASHBOARD.read_text())
        self.assertEqual(["datasource"], [variable["name"] for variable in dashboard["templating"]["list"]])
        panels = dashboard["panels"]
        self.assertEqual(len(panels), len({panel["id"] for panel in panels}))
        taken = set()
        for panel in panels:
            with self.subTest(panel["title"]):
                place = panel["gridPos"]
                cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
                self.assertFalse(cells & taken, "overlaps another panel")
                self.assertLessEqual(place["x"] + place["w"], 24)
                taken |= cells
                if panel["type"] == "row":
                    continue
                self.assertTrue(panel["description"] and panel["fieldConfig"]["defaults"]["unit"] and panel["targets"])
                for source in (panel, *panel["targets"]):
                    self.assertEqual({"type": "prometheus", "uid": "${datasource}"}, source["datasource"])


if __name__ == "__main__":
    unittest.main()
