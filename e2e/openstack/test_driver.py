# SPDX-License-Identifier: Apache-2.0
"""A provider driver for Octavia that has no load balancers: what Octavia asks for becomes ACTIVE after a delay, as it does with a real one.

Octavia itself allocates the VIP port in Neutron, because `create_vip_port` is not implemented. A load balancer whose description is
`test:error` becomes ERROR instead of ACTIVE and serves nobody, and one of `test:stuck` stays PENDING. Of one of `test:fail`, changes of
listeners, pools, members and health monitors fail as with Octavia's worker: what was changed is in ERROR, the rest is ACTIVE.
"""

import os
import queue
import threading
import time

from octavia.api.drivers.driver_agent.driver_updater import DriverUpdater
from octavia.db import api as db
from octavia.db import repositories
from octavia_lib.api.drivers import exceptions, provider_base

import child

DELAY = float(os.environ["STEERAGE_OPENSTACK_DELAY"])
updates = queue.Queue()


def carry_out(load_balancer, deleted):
    """What a driver does before it reports; returns whether it could. A driver that forwards has another one."""
    return True


# Whether what is ACTIVE is said to serve. A driver that forwards asks instead.
REPORTS_OPERATION = True


def settle():
    while True:
        due, load_balancer, deleted = updates.get()
        time.sleep(max(0, due - time.monotonic()))
        done = carry_out(load_balancer, deleted)
        with child.one_call:
            report(load_balancer, deleted, done)


def pending(items):
    return [item for item in items if item.provisioning_status.startswith("PENDING")]


def report(load_balancer, deleted, done):
    """Tells Octavia that everything of this load balancer that is PENDING is done, or could not be."""
    repos = repositories.Repositories()
    session = db.get_session()
    with session.begin():
        found = repos.load_balancer.get(session, id=load_balancer)
        if found is None or found.description == "test:stuck":
            return
        listeners, pools = list(found.listeners), list(found.pools)
        members = [member for pool in pools for member in pool.members]
        monitors = [pool.health_monitor for pool in pools if pool.health_monitor]
    # Octavia's worker reverts a change of a part by setting the part to ERROR, and its parents and the load balancer to ACTIVE; only what it
    # does to the whole ends in ERROR of the load balancer. The API sets what is changed and its parents to PENDING.
    failed = []
    if found.description == "test:fail" or not done:
        if not deleted and found.provisioning_status != "PENDING_CREATE":
            kinds = (members, monitors, pools, listeners)
            failed = next((kind for kind in map(pending, kinds) if kind), [])
        if not failed and not done:
            failed = pending([found, *listeners, *pools, *members, *monitors])
        deleted = deleted and done
    failed = {item.id for item in failed}

    def of(items, monitored=()):
        for item in items:
            is_failed = found.description == "test:error" or item.id in failed
            gone = (item.provisioning_status == "PENDING_DELETE" or deleted) and item.id not in failed
            if gone or item.provisioning_status.startswith("PENDING"):
                state = {"id": item.id, "provisioning_status": "DELETED" if gone else "ERROR" if is_failed else "ACTIVE"}
                if not gone and found.description == "test:error":
                    state["operating_status"] = "OFFLINE"
                elif not gone and REPORTS_OPERATION:
                    state["operating_status"] = "NO_MONITOR" if item.id in monitored else "ONLINE"
                yield state

    without = {member.id for pool in pools if not pool.health_monitor for member in pool.members}
    status = {
        "members": list(of(members, without)),
        "healthmonitors": list(of(monitors)),
        "pools": list(of(pools)),
        "listeners": list(of(listeners)),
        "loadbalancers": list(of([found])),
    }
    answer = DriverUpdater().update_loadbalancer_status(status)
    if answer["status_code"] != 200:
        raise RuntimeError(f"Octavia refuses the status {status}: {answer}")


threading.Thread(target=settle, daemon=True).start()


def later(load_balancer, deleted=False):
    updates.put((time.monotonic() + DELAY, load_balancer, deleted))


def of_pool(pool):
    session = db.get_session()
    with session.begin():
        return repositories.PoolRepository().get(session, id=pool).load_balancer_id


class TestDriver(provider_base.ProviderDriver):
    def get_supported_flavor_metadata(self):
        return {"size": "of the load balancer"}

    def validate_flavor(self, flavor):
        pass

    def get_supported_availability_zone_metadata(self):
        return {"zone": "of the load balancer"}

    def validate_availability_zone(self, availability_zone):
        pass

    def loadbalancer_create(self, loadbalancer):
        later(loadbalancer.loadbalancer_id)

    def loadbalancer_update(self, old, new):
        later(old.loadbalancer_id)

    def loadbalancer_delete(self, loadbalancer, cascade=False):
        later(loadbalancer.loadbalancer_id, deleted=True)

    def listener_create(self, listener):
        later(listener.loadbalancer_id)

    def listener_update(self, old, new):
        later(old.loadbalancer_id)

    def listener_delete(self, listener):
        later(listener.loadbalancer_id)

    def pool_create(self, pool):
        later(pool.loadbalancer_id)

    def pool_update(self, old, new):
        later(old.loadbalancer_id)

    def pool_delete(self, pool):
        later(pool.loadbalancer_id)

    def member_create(self, member):
        later(of_pool(member.pool_id))

    def member_update(self, old, new):
        later(of_pool(old.pool_id))

    def member_delete(self, member):
        later(of_pool(member.pool_id))

    def member_batch_update(self, pool_id, members):
        later(of_pool(pool_id))

    def health_monitor_create(self, healthmonitor):
        later(of_pool(healthmonitor.pool_id))

    def health_monitor_update(self, old, new):
        later(of_pool(old.pool_id))

    def health_monitor_delete(self, healthmonitor):
        later(of_pool(healthmonitor.pool_id))


def unsupported(what):
    raise exceptions.UnsupportedOptionError(
        user_fault_string=f"OVN provider does not support {what}", operator_fault_string=f"no {what}"
    )


class OvnDriver(TestDriver):
    """Refuses what the driver of OVN refuses, as its documentation says."""

    def check_listener(self, listener):
        if getattr(listener, "allowed_cidrs", None):
            unsupported("allowed_cidrs option")

    def check_pool(self, pool):
        if pool.lb_algorithm != "SOURCE_IP_PORT":
            unsupported(f"{pool.lb_algorithm} algorithm")
        if pool.protocol not in ("TCP", "UDP", "SCTP"):
            unsupported(f"{pool.protocol} protocol")
        if pool.healthmonitor:
            self.check_monitor(pool.healthmonitor)

    def check_monitor(self, monitor):
        if monitor.type not in ("TCP", "UDP-CONNECT"):
            unsupported(f"{monitor.type} health monitors")

    def loadbalancer_create(self, loadbalancer):
        for listener in loadbalancer.listeners or []:
            self.check_listener(listener)
        for pool in loadbalancer.pools or []:
            self.check_pool(pool)
        super().loadbalancer_create(loadbalancer)

    def listener_create(self, listener):
        self.check_listener(listener)
        super().listener_create(listener)

    def listener_update(self, old, new):
        self.check_listener(new)
        super().listener_update(old, new)

    def pool_create(self, pool):
        self.check_pool(pool)
        super().pool_create(pool)

    def health_monitor_create(self, healthmonitor):
        self.check_monitor(healthmonitor)
        super().health_monitor_create(healthmonitor)
