# SPDX-License-Identifier: Apache-2.0
"""A provider driver for Octavia whose load balancers forward: what Octavia's worker and health manager do, with the amphora of the lab.

Configurations come from Octavia's own template for haproxy, and heartbeats go to Octavia's own health manager. Only what is between is ours:
no virtual machine is started, and the amphora is a process that amphora.py describes.
"""

import http.client
import json
import os
import sys
import threading
import time
import traceback
import uuid

from octavia.amphorae.drivers.health import heartbeat_udp
from octavia.common import constants
from octavia.common.jinja.haproxy.combined_listeners import jinja_cfg
from octavia.db import api as db
from octavia.db import models, repositories
from octavia_lib.api.drivers import exceptions
from octavia_lib.common import constants as lib_constants

import child
import test_driver

AMPHORA = os.environ["STEERAGE_OPENSTACK_AMPHORA"]
# Between two heartbeats. An amphora sends one every 10 s.
BEAT = 0.5
VERSION = ["2", "6"]
due = threading.Event()


class Failed(Exception):
    """The amphora did not do what it was asked for."""


def call(method, path, content=None):
    connection = http.client.HTTPConnection(AMPHORA, timeout=30)
    try:
        connection.request(method, path, None if content is None else json.dumps(content))
        answer = connection.getresponse()
        text = answer.read().decode()
    except (OSError, http.client.HTTPException) as error:
        raise Failed(f"the amphora does not answer: {error}") from error
    finally:
        connection.close()
    if answer.status != 200:
        raise Failed(text)
    return json.loads(text)


def carry_out(load_balancer, deleted):
    """Brings a change to the amphora. Returns whether it could; if not, what was changed is in ERROR, as with Octavia's worker."""
    try:
        with child.one_call:
            amphora, wanted = read(load_balancer, deleted)
        if amphora is None:
            return True
        if wanted is None:
            call("DELETE", f"/load-balancers/{amphora}")
        else:
            call("PUT", f"/load-balancers/{amphora}", wanted)
    except Failed as failed:
        print(f"load balancer {load_balancer}: {failed}", file=sys.stderr, flush=True)
        return False
    except Exception:
        traceback.print_exc()
        return False
    finally:
        due.set()
    return True


def read(load_balancer, deleted):
    """The ID of a load balancer's amphora, which is made with it, and what the amphora has to do."""
    session = db.get_session()
    with session.begin():
        found = session.get(models.LoadBalancer, load_balancer)
        if found is None:
            return None, None
        amphora = next((amphora for amphora in found.amphorae if amphora.status != constants.DELETED), None)
        if deleted:
            if amphora is None:
                return None, None
            amphora.status = constants.DELETED
            return amphora.id, None
        if amphora is None:
            own = AMPHORA.partition(":")[0]
            amphora = models.Amphora(
                id=str(uuid.uuid4()), load_balancer_id=found.id, status=constants.AMPHORA_ALLOCATED, role=constants.ROLE_STANDALONE,
                lb_network_ip=own, vrrp_ip=own, cert_busy=False,
            )
            session.add(amphora)
            session.flush()
            session.refresh(found)
        # What the worker gets: other defaults than a row has.
        return amphora.id, render(found.to_data_model())


def going(item):
    return item.provisioning_status in (constants.PENDING_DELETE, constants.DELETED)


def render(balancer):
    listeners = [listener for listener in balancer.listeners if not going(listener)]
    over_tcp = [listener for listener in listeners if listener.protocol not in constants.LVS_PROTOCOLS]
    over_udp = [listener for listener in listeners if listener.protocol == constants.PROTOCOL_UDP and listener.enabled]
    text = None
    if over_tcp:
        templates = jinja_cfg.JinjaTemplater(
            base_amp_path=os.environ["STEERAGE_OPENSTACK_AMPHORA_FOLDER"], log_http="127.0.0.1:514", log_server="127.0.0.1:514",
            connection_logging=False,
        )
        text = templates.build_config(balancer.amphorae[0], over_tcp, {}, VERSION, {})
    fences = [
        {
            "protocol": "udp" if listener in over_udp else "tcp",
            "port": listener.protocol_port,
            "cidrs": [cidr.cidr for cidr in listener.allowed_cidrs],
        }
        for listener in listeners
        if listener.allowed_cidrs
    ]
    return {
        "load_balancer": balancer.id,
        "addresses": [vip.ip_address for vip in (balancer.vip, *balancer.additional_vips)],
        "haproxy": text,
        "udp": [datagrams(listener) for listener in over_udp] if balancer.enabled else [],
        "fences": fences,
    }


def datagrams(listener):
    pool = listener.default_pool
    if pool is None or going(pool) or not pool.enabled:
        return {"id": listener.id, "port": listener.protocol_port, "pool": None, "by_source": False, "monitor": None, "members": []}
    monitor = pool.health_monitor
    if monitor is not None and (going(monitor) or not monitor.enabled):
        monitor = None
    kept = pool.session_persistence
    by_source = pool.lb_algorithm == constants.LB_ALGORITHM_SOURCE_IP or (kept and kept.type == constants.SESSION_PERSISTENCE_SOURCE_IP)
    return {
        "id": listener.id,
        "port": listener.protocol_port,
        "pool": pool.id,
        "by_source": bool(by_source),
        "monitor": monitor and {
            "type": monitor.type, "delay": monitor.delay, "timeout": monitor.timeout, "fall": monitor.fall_threshold,
            "method": monitor.http_method, "path": monitor.url_path, "codes": (monitor.expected_codes or "200").split(","),
        },
        "members": [
            {
                "id": member.id, "address": member.ip_address, "port": member.protocol_port, "weight": member.weight,
                "enabled": member.enabled, "monitor_address": member.monitor_address, "monitor_port": member.monitor_port,
            }
            for member in pool.members
            if not going(member)
        ],
    }


def listen_to_heart():
    """Gives heartbeats to Octavia's health manager, when they say something new or something was changed."""
    manager, heard = heartbeat_udp.UpdateHealthDb(), {}
    while True:
        changed = due.wait(BEAT)
        due.clear()
        try:
            beats = call("GET", "/health")
            for beat in beats:
                said = json.dumps([{key: each["status"] for key, each in beat["listeners"].items()}, beat["pools"]], sort_keys=True)
                if changed or heard.get(beat["id"]) != said:
                    with child.one_call:
                        manager.update_health(beat | {"recv_time": time.time()}, AMPHORA)
                    heard[beat["id"]] = said
            heard = {beat["id"]: heard[beat["id"]] for beat in beats}
        except Failed:
            # Octavia would fail over after a minute.
            pass
        except Exception:
            traceback.print_exc()


test_driver.carry_out = carry_out
test_driver.REPORTS_OPERATION = False
threading.Thread(target=listen_to_heart, daemon=True).start()


class AmphoraDriver(test_driver.TestDriver):
    """Refuses what the driver of amphorae refuses."""

    def check_pool(self, pool):
        if pool.lb_algorithm == lib_constants.LB_ALGORITHM_SOURCE_IP_PORT:
            text = "Amphora provider does not support SOURCE_IP_PORT algorithm."
            raise exceptions.UnsupportedOptionError(user_fault_string=text, operator_fault_string=text)

    def loadbalancer_create(self, loadbalancer):
        for pool in loadbalancer.pools or []:
            self.check_pool(pool)
        super().loadbalancer_create(loadbalancer)

    def pool_create(self, pool):
        self.check_pool(pool)
        super().pool_create(pool)
