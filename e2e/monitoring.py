#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Evaluate every expression of the alert rules and of the dashboard against a real Prometheus. Called by hack/e2e.

Prometheus scrapes the controllers, agents and edge hosts of a lab by the monitors that the chart renders, and loads the chart's
rules. Each metric selector of an alert must find samples. Each expression of the dashboard must have a result. What exists only
after a fault is listed below with its reason; of it, the metric and its labels must exist. Of panels about another provider than
the lab's, the generated reference must list the metric and its labels.

The agents are also scraped as the job of kube-proxy, and must fill the dashboard and the alerts of kubernetes-mixin; what stays
empty is listed in kubernetes-mixin.yaml and documented.
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
FILES = ROOT / "charts" / "steerage" / "files"
MIXIN = ROOT / "e2e" / "kubernetes-mixin.yaml"
NAMESPACE = "steerage-system"
URL = "http://127.0.0.1:9090"
# Seconds from the first scrapes until all expressions have results.
DEADLINE = 180
SCRAPE_INTERVAL = "1s"
# In place of Grafana's own variable, which is at least four scrapes.
RATE_INTERVAL = "1m"

CALLS = "steerage_controller_provider_call_duration_seconds_count"
# Selectors whose label values appear with the first fault of their kind. The key of a value is its label.
AFTER_FAULT = {
    'steerage_controller_reconciles_total{result="failed"}': "no reconcile fails in a healthy cluster",
    CALLS + '{result=~"Provider.+"}': "no call of the provider fails in a healthy cluster",
    CALLS + '{result=~"NoFreeAddress|NoAddressPool"}': "the lab's pool has free addresses",
}
# Panels whose label values appear with the first fault of their kind.
PANELS_AFTER_FAULT = {"Failed provider calls": CALLS + '{result!="ok"}'}
# Panels of a cloud, which a lab with the edge shows empty. They are evaluated in a lab with that cloud; CI does so for AWS alone, whose
# metrics have the others' names but for the cloud's.
PANELS_OF_CLOUD = {
    title.format(name): cloud
    for cloud, name in {"aws": "AWS", "azure": "Azure", "gce": "GCE", "openstack": "OpenStack"}.items()
    for title in (
        "{} requests",
        "Duration of {} requests (p99)",
        "Rate of {} budgets",
        "Wait because of {} budgets (p99)",
    )
}
# Alerts that may be true in a lab: what the suite did before remains visible for a while.
TRUE_IN_LAB = {
    "SteerageNoFreeAddress": "a case of the suite exhausts a pool",
    "SteerageOrphanedLoadBalancers": "the suite deletes Services while the controller restarts; one may wait for its grace period",
}

# Served by the agent beside kube-proxy, too. Only under api steering does the controller follow endpoints, only under the other does
# the edge ask each Service's own port.
WORKLOAD = """
apiVersion: v1
kind: Namespace
metadata: {name: monitoring-test}
---
apiVersion: v1
kind: Service
metadata:
  name: measured
  namespace: monitoring-test
  labels: {service.kubernetes.io/service-proxy-name: steerage}
spec:
  type: LoadBalancer
  loadBalancerClass: steerage.dev/edge
  externalTrafficPolicy: Local
  selector: {app: echo}
  ports: [{port: 80, targetPort: 8080}]
---
apiVersion: v1
kind: Service
metadata:
  name: steered
  namespace: monitoring-test
  labels: {service.kubernetes.io/service-proxy-name: steerage}
  annotations: {steerage.dev/steering: api}
spec:
  type: LoadBalancer
  loadBalancerClass: steerage.dev/edge
  externalTrafficPolicy: Local
  selector: {app: echo}
  ports: [{port: 80, targetPort: 8080}]
"""

# Makes requests to the cloud.
WORKLOAD_OF_CLOUD = """
apiVersion: v1
kind: Namespace
metadata: {name: monitoring-test}
---
apiVersion: v1
kind: Service
metadata: {name: measured, namespace: monitoring-test}
spec:
  type: LoadBalancer
  loadBalancerClass: steerage.dev/CLOUD
  ports: [{port: 80, targetPort: 8080}]
"""


class Failure(Exception):
    """What the caller is told."""


def run(*command, **more):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False, **more)
    if done.returncode:
        raise Failure(f"{' '.join(map(str, command[:4]))} … failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def monitors(edge_hosts):
    """The PodMonitors and, with edge hosts, the ScrapeConfig, as the chart renders them."""
    values = {
        "metrics": {
            "podMonitor": {"enabled": True, "kubeProxyJob": True, "interval": SCRAPE_INTERVAL},
            "scrapeConfig": {"enabled": bool(edge_hosts), "edgeHosts": edge_hosts, "interval": SCRAPE_INTERVAL},
        }
    }
    helm = ["helm", "template", "steerage", ROOT / "charts" / "steerage", "-n", NAMESPACE, "-f", "-"]
    rendered = run(*helm, "-s", "templates/monitoring.yaml", input=json.dumps(values))
    return [document for document in yaml.safe_load_all(rendered) if document]


def snake(name):
    return re.sub(r"[A-Z]", lambda letter: "_" + letter.group().lower(), name)


def meta_name(label):
    return "__meta_kubernetes_pod_label_" + re.sub(r"\W", "_", label)


def discover(pods):
    """Each port of each pod, with the labels of Prometheus' own discovery, which Debian's Prometheus lacks."""
    for pod in pods:
        metadata, spec, status = pod["metadata"], pod["spec"], pod["status"]
        for container in spec["containers"]:
            for port in container.get("ports", []):
                labels = {
                    "__meta_kubernetes_namespace": metadata["namespace"],
                    "__meta_kubernetes_pod_name": metadata["name"],
                    "__meta_kubernetes_pod_phase": status["phase"],
                    "__meta_kubernetes_pod_node_name": spec.get("nodeName", ""),
                    "__meta_kubernetes_pod_container_name": container["name"],
                    "__meta_kubernetes_pod_container_port_name": port.get("name", ""),
                    **{meta_name(label): value for label, value in metadata.get("labels", {}).items()},
                }
                yield {"targets": [f"{status['podIP']}:{port['containerPort']}"], "labels": labels}


def scrape_job(monitor, pods):
    """The scrape configuration that the operator makes of a monitor."""
    spec, name = monitor["spec"], monitor["metadata"]["name"]
    if monitor["kind"] == "ScrapeConfig":
        return {
            "job_name": f"scrapeConfig/{NAMESPACE}/{name}",
            "scrape_interval": spec["scrapeInterval"],
            "metrics_path": spec["metricsPath"],
            "static_configs": spec["staticConfigs"],
        }
    (endpoint,) = spec["podMetricsEndpoints"]
    pod = "__meta_kubernetes_pod_"
    relabel = [{"action": "drop", "source_labels": [pod + "phase"], "regex": "(Failed|Succeeded)"}]
    for label, value in spec["selector"]["matchLabels"].items():
        relabel.append({"action": "keep", "source_labels": [meta_name(label)], "regex": re.escape(value)})
    relabel += [
        {"action": "keep", "source_labels": [pod + "container_port_name"], "regex": endpoint["port"]},
        {"source_labels": ["__meta_kubernetes_namespace"], "target_label": "namespace"},
        {"source_labels": [pod + "container_name"], "target_label": "container"},
        {"source_labels": [pod + "name"], "target_label": "pod"},
        {"target_label": "job", "replacement": f"{NAMESPACE}/{name}"},
        *({snake(key): value for key, value in rule.items()} for rule in endpoint["relabelings"]),
    ]
    names = spec["namespaceSelector"]["matchNames"]
    return {
        "job_name": f"podMonitor/{NAMESPACE}/{name}/0",
        "scrape_interval": endpoint["interval"],
        "metrics_path": endpoint["path"],
        "static_configs": list(discover(pod for pod in pods if pod["metadata"]["namespace"] in names)),
        "relabel_configs": relabel,
        "metric_relabel_configs": [
            {snake(key): value for key, value in rule.items()} for rule in endpoint.get("metricRelabelings", [])
        ],
    }


@contextmanager
def prometheus(folder, jobs, log):
    """A Prometheus on the loopback interface of this network namespace, ended with the context."""
    config = {
        "global": {"evaluation_interval": "5s"},
        "rule_files": [str(FILES / "alerts.yaml")],
        "scrape_configs": jobs,
    }
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    run("promtool", "check", "config", path)
    command = ["prometheus", f"--config.file={path}", f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={URL[7:]}"]
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        try:
            wait_for("Prometheus", is_ready, 60)
            yield process
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def is_ready():
    """Whether Prometheus has started. Its port is open earlier; until then it answers 503."""
    try:
        with urllib.request.urlopen(f"{URL}/-/ready", timeout=10):
            return True
    except OSError:
        return False


def get(path, **words):
    address = f"{URL}{path}?{urllib.parse.urlencode(words)}" if words else URL + path
    try:
        with urllib.request.urlopen(address, timeout=10) as reply:
            return reply.read().decode()
    except urllib.error.HTTPError as error:
        raise Failure(f"{words.get('query', path)}: {error.read().decode()}") from error
    except OSError:
        return None


def query(expression):
    text = get("/api/v1/query", query=expression)
    if text is None:
        raise Failure("Prometheus does not answer")
    return json.loads(text)["data"]["result"]


def has_number(result):
    """Whether a sample is a number: a quantile of no observations is NaN, and a panel shows nothing for it."""
    return any(not math.isnan(float(sample["value"][1])) for sample in result)


def wait_for(what, is_done, seconds):
    end = time.monotonic() + seconds
    while not is_done():
        if time.monotonic() > end:
            raise Failure(f"{what} not seen within {seconds}s")
        time.sleep(0.2)


AGGREGATION = re.compile(r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)")
SELECTOR = re.compile(r"(?<![\w:.\"])(?P<name>[a-zA-Z_:][\w:]*)(?P<matchers>\{[^}]*\})?(?!\s*\(|[\w:])")
WORDS = {"and", "or", "unless", "offset", "bool", "by", "without", "on", "ignoring", "group_left", "group_right", "inf", "nan"}


def selectors(expression):
    """The instant-vector selectors of an expression, each once."""
    plain = AGGREGATION.sub(" ", expression)
    plain = re.sub(r"\[[^\]]*\]", " ", plain)
    found = [match.group() for match in SELECTOR.finditer(plain) if match["name"].lower() not in WORDS]
    return list(dict.fromkeys(found))


def relaxed(selector):
    """The selector without the values of its matchers: the metric with these labels."""
    return re.sub(r'(\w+)(=~|!~|!=|=)"[^"]*"', r'\1!=""', selector)


def mixin():
    """kubernetes-mixin's expressions as Grafana and Prometheus evaluate them, with all instances chosen."""
    text = MIXIN.read_text().replace("$cluster", "").replace("$instance", ".+").replace("$__rate_interval", RATE_INTERVAL)
    return yaml.safe_load(text)


def mixin_panels():
    for panel in mixin()["panels"]:
        for expression in panel["expressions"]:
            yield panel["title"], expression


def is_empty(expression):
    return any(entry["part"] in expression for entry in mixin()["empty"])


def mixin_rules():
    """The same expressions as rules, of which promtool checks the syntax."""
    rules = [{"alert": alert["alert"], "expr": alert["expression"]} for alert in mixin()["alerts"]]
    rules += [{"record": f"mixin:panel_{number}", "expr": panel[1]} for number, panel in enumerate(mixin_panels())]
    return {"groups": [{"name": "kubernetes-mixin", "rules": rules}]}


def mixin_results():
    """What must have a result: every panel but those that are documented as empty, and the metric of every alert."""
    for title, expression in mixin_panels():
        if not is_empty(expression):
            yield f"kubernetes-mixin's panel {title!r}", expression, True
    for alert in mixin()["alerts"]:
        for selector in selectors(alert["expression"]):
            yield f"kubernetes-mixin's alert {alert['alert']}", selector, False


def mixin_problems():
    """Alerts that are true although all is well, and panels that are listed as empty and are not."""
    found = [f"kubernetes-mixin's alert {alert['alert']} is true" for alert in mixin()["alerts"] if query(alert["expression"])]
    for title, expression in mixin_panels():
        # A restart of the API server has responses of these kinds, too.
        if is_empty(expression) and "rest_client" not in expression and query(expression):
            found.append(f"kubernetes-mixin's panel {title!r} is listed as empty, and is not: {expression}")
    return found


def alerts():
    return [rule for group in yaml.safe_load((FILES / "alerts.yaml").read_text())["groups"] for rule in group["rules"]]


def panel_expressions():
    """All expressions of the dashboard with the panel's title, as Grafana sends them."""
    for panel in json.loads((FILES / "dashboard.json").read_text())["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"].replace("$__rate_interval", RATE_INTERVAL)


def true_alerts():
    """The alerts whose expression is true although all is well. Over a window of many minutes, a single event, which fires no alert,
    would keep an expression true until after the deadline: it may not be true over a short one."""
    found = []
    for alert in alerts():
        true = query(re.sub(r"\[\d+m\]", f"[{RATE_INTERVAL}]", alert["expr"]))
        if true and alert["alert"] not in TRUE_IN_LAB:
            found.append(f"alert {alert['alert']} is true in a healthy lab: {[sample['metric'] for sample in true]}")
    return found


def expected_results():
    """What must have a result: by the alert or panel, the expression, and whether a sample must be a number."""
    for alert in alerts():
        for selector in selectors(alert["expr"]):
            yield f"alert {alert['alert']}", relaxed(selector) if selector in AFTER_FAULT else selector, False
    for title, expression in panel_expressions():
        if title in PANELS_OF_CLOUD:
            continue
        faulty = PANELS_AFTER_FAULT.get(title)
        yield f"panel {title!r}", relaxed(faulty) if faulty else expression, True


def missing_results(expected):
    """Those of the expected results that are not there now. A duration has a result only for a while after an observation, so each
    expression must have one at some time, and not all at the same time."""
    for entry in list(expected):
        _, expression, is_number = entry
        result = query(expression)
        if has_number(result) if is_number else result:
            expected.remove(entry)
    return [f"{what}: no result of {expression}" for what, expression, _ in expected]


def wait_until_empty(problems):
    end = time.monotonic() + DEADLINE
    while found := problems():
        if time.monotonic() > end:
            raise Failure("\n  ".join([f"after {DEADLINE}s:", *found]))
        time.sleep(1)


def documented_labels():
    """The labels of each of the controller's metrics, by its name, from the generated reference."""
    page = (ROOT / "docs" / "reference" / "controller.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| \w+ \| ([^|]*) \|", page, re.MULTILINE)
    return {name: set(re.findall(r"`(\w+)`", labels)) for name, labels in rows}


def undocumented(expression, documented):
    """The metrics of an expression that do not exist, or not with the labels that it uses."""
    grouped = [name for names in re.findall(r"\b(?:by|on)\s*\(([^)]*)\)", expression) for name in re.findall(r"\w+", names)]
    labels = {*grouped, *re.findall(r'(\w+)(?:=~|!~|!=|=)"', expression)} - {"le"}
    for selector in selectors(expression):
        name = selector.partition("{")[0]
        series = name if name in documented else re.sub(r"_(bucket|count|sum)$", "", name)
        if not labels <= documented.get(series, set()):
            yield name


def check_lists():
    """No entry of the lists may outlive the expression that it excuses, and what a lab does not show must be documented."""
    used = {selector for alert in alerts() for selector in selectors(alert["expr"])}
    stale = [name for name in AFTER_FAULT if name not in used]
    stale += [name for name in TRUE_IN_LAB if name not in {alert["alert"] for alert in alerts()}]
    panels = list(panel_expressions())
    stale += [
        title for title, selector in PANELS_AFTER_FAULT.items()
        if not any(title == known and selector in selectors(expression) for known, expression in panels)
    ]
    stale += [title for title in PANELS_OF_CLOUD if title not in dict(panels)]
    if stale:
        raise Failure(f"excused, but used by no alert or panel: {', '.join(stale)}")
    expressions = [expression for _, expression in mixin_panels()]
    for entry in mixin()["empty"]:
        if not any(entry["part"] in expression for expression in expressions):
            raise Failure(f"{entry['part']} is listed as empty, but no expression has it")
        if entry["reason"] not in " ".join((ROOT / entry["page"]).read_text().split()):
            raise Failure(f"{entry['page']} does not say of {entry['part']}: {entry['reason']}")
    documented = documented_labels()
    for title, expression in panels:
        missing = list(undocumented(expression, documented)) if title in PANELS_OF_CLOUD else []
        if missing:
            raise Failure(f"panel {title!r}: the reference lists no such metric, or not with these labels: {', '.join(missing)}")


def up_targets():
    """The jobs of the targets that answer, and whether all do."""
    targets = json.loads(get("/api/v1/targets", state="active") or '{"data": {"activeTargets": []}}')["data"]["activeTargets"]
    up = [target["labels"]["job"] for target in targets if target["health"] == "up"]
    return up, len(up) == len(targets)


def check_targets(edges):
    """Each program is scraped, and every target answers."""
    jobs, are_all = up_targets()
    up = [job.rpartition("-")[2] for job in jobs]
    return (
        are_all
        and {"controller", "agent"} <= set(up)
        and up.count("edge") == edges
        and jobs.count("kube-proxy") == up.count("agent")
    )


def evaluate_cloud(lab, cloud):
    """The panels of a cloud have results while the controller makes a load balancer there. Returns what is printed."""
    wait_for("a scrape of the controller", lambda: any(job.endswith("-controller") for job in up_targets()[0]), 30)
    lab("kubectl", "apply", "-f", "-", input=WORKLOAD_OF_CLOUD.replace("CLOUD", cloud))
    expected = [(f"panel {title!r}", text, True) for title, text in panel_expressions() if PANELS_OF_CLOUD.get(title) == cloud]
    count = len(expected)
    wait_until_empty(lambda: missing_results(expected))
    return f"{count} expressions of the dashboard have results in a lab with {cloud}"


def evaluate_lab(lab, edges):
    """All that a lab with the edge shows. Returns what is printed."""
    wait_for("a scrape of every program", lambda: check_targets(edges), 30)
    lab("kubectl", "apply", "-f", "-", input=WORKLOAD)
    lab("kubectl", "apply", "-n", "monitoring-test", "-f", str(ROOT / "examples" / "echo.yaml"))
    lab("kubectl", "rollout", "status", "-n", "monitoring-test", "deployment/echo", "--timeout=60s")
    wait_until_empty(true_alerts)
    for title in [*PANELS_AFTER_FAULT, *PANELS_OF_CLOUD]:
        # Its result may be empty, but it must be an expression.
        query(dict(panel_expressions())[title])
    # A kind and reason of failed watches are counted from the first failure on.
    lab("stop-apiserver")
    lab("start-apiserver")
    # An external IP that is a cluster IP is refused with an event, which the agents post.
    reserved = lab("kubectl", "get", "service", "-n", "default", "kubernetes", "-o", "jsonpath={.spec.clusterIP}")
    refused = json.dumps({"spec": {"externalIPs": [reserved]}})
    lab("kubectl", "patch", "service", "-n", "monitoring-test", "measured", "--type", "merge", "-p", refused)
    # Endpoints change, so that controller, agents and edges measure how long their work takes.
    lab("kubectl", "scale", "-n", "monitoring-test", "deployment/echo", "--replicas=3")
    expected = [*expected_results(), *mixin_results()]
    wait_until_empty(lambda: missing_results(expected))
    wait_until_empty(mixin_problems)
    count = sum(title not in PANELS_OF_CLOUD for title, _ in panel_expressions())
    of_mixin = sum(1 for _ in mixin_results())
    return f"{len(alerts())} alerts and {count} expressions of the dashboard have results, and so have {of_mixin} of kubernetes-mixin's"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lab", required=True, help="Path of the program steerage-lab")
    parser.add_argument("--name", required=True, help="Use the lab of this name")
    parser.add_argument("--log", type=Path, required=True, help="Write Prometheus' log to this file")
    clouds = sorted(set(PANELS_OF_CLOUD.values()))
    parser.add_argument("--cloud", choices=clouds, help="Evaluate only the panels of this cloud, which the lab has")
    arguments = parser.parse_args()
    # Nodes run the lab's program, also those of a lab whose API server is started again.
    os.environ["STEERAGE_LAB"] = arguments.lab

    def lab(*words, **more):
        return run(arguments.lab, words[0], "--name", arguments.name, *words[1:], **more)

    known = dict(re.findall(r"^export (\w+)='?([^'\n]*)'?$", lab("env"), re.MULTILINE))
    netns = f"/run/netns/{known['LAB_CP_NETNS']}"
    if os.stat("/proc/self/ns/net").st_ino != os.stat(netns).st_ino:
        # Pods and edge hosts are reached from the lab only.
        os.execvp("nsenter", ["nsenter", f"--net={netns}", sys.executable, "-B", *sys.argv])
    started = time.monotonic()
    check_lists()
    edges = [f"{known[f'LAB_{name.upper()}_IP4']}:10359" for name in known.get("LAB_EDGES", "").split()]
    pods = json.loads(lab("kubectl", "get", "pods", "-A", "-o", "json"))["items"]
    pods = [pod for pod in pods if "podIP" in pod["status"] and "deletionTimestamp" not in pod["metadata"]]
    jobs = [scrape_job(monitor, pods) for monitor in monitors(edges)]
    with tempfile.TemporaryDirectory(prefix="steerage-monitoring-") as folder, prometheus(Path(folder), jobs, arguments.log):
        rules = Path(folder) / "kubernetes-mixin.yaml"
        rules.write_text(yaml.safe_dump(mixin_rules()))
        run("promtool", "check", "rules", rules)
        try:
            done = evaluate_cloud(lab, arguments.cloud) if arguments.cloud else evaluate_lab(lab, len(edges))
        finally:
            lab("kubectl", "delete", "namespace", "monitoring-test", "--ignore-not-found", "--wait=false")
    print(f"monitoring: {done} ({time.monotonic() - started:.0f} s)")


if __name__ == "__main__":
    try:
        main()
    except Failure as failure:
        sys.exit(f"monitoring: {failure}")
