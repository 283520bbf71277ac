# SPDX-License-Identifier: Apache-2.0
"""Injected faults, throttling, and the record of calls."""

import fnmatch
import re
from collections import Counter

FIELDS = {
    "call", "path", "skip", "times",  # which calls
    "status", "reason", "message", "headers", "body",  # an answer instead of the cloud's
    "delay", "hang", "cut",  # of the connection
    "operation_delay", "operation_error",  # of the operation that the call starts
}  # fmt: skip


class Fault:
    """What happens to some calls: those whose name matches `call` and whose path matches `path`, after `skip` of them, `times` times (0:
    all of them)."""

    def __init__(self, number, fields):
        unknown = set(fields) - FIELDS
        if unknown:
            raise ValueError(f"unknown fields of a fault: {', '.join(sorted(unknown))}")
        if fields.get("cut") not in (None, "before", "after"):
            raise ValueError("cut is `before` or `after`: the effect")
        self.number, self.fields = number, fields
        self.path = re.compile(fields.get("path", ""))
        self.seen = self.hits = 0

    def get(self, field, default=None):
        """A field of the fault."""
        return self.fields.get(field, default)

    def applies(self, name, path):
        """Whether it happens to this call, which it counts."""
        if not fnmatch.fnmatchcase(name, self.fields.get("call", "*")) or not self.path.search(path):
            return False
        self.seen += 1
        times = self.fields.get("times", 1)
        if self.seen <= self.fields.get("skip", 0) or (times and self.hits >= times):
            return False
        self.hits += 1
        return True


class Faults:
    """All faults that were injected, in order. The first that applies is used."""

    def __init__(self):
        self._all = []
        self._number = 0

    def add(self, fields):
        """Injects one and returns its number."""
        self._number += 1
        self._all.append(Fault(self._number, fields))
        return self._number

    def clear(self):
        """Removes all."""
        self._all = []

    def of(self, name, path):
        """The fault of this call."""
        return next((fault for fault in self._all if fault.applies(name, path)), None)

    def show(self):
        """Each with how many calls it met."""
        return [fault.fields | {"id": fault.number, "hits": fault.hits} for fault in self._all]


class Throttle:
    """A budget of calls: `burst` at once and `rate` per second, for calls whose name matches `call`. None are throttled without one."""

    def __init__(self):
        self.set({})

    def set(self, fields):
        """Replaces the budget; without a rate there is none."""
        self.pattern = fields.get("call", "*")
        self.rate = fields.get("rate")
        self.burst = fields.get("burst", self.rate or 0)
        self.status = fields.get("status")
        self.retry_after = fields.get("retry_after")
        self.left, self.at = float(self.burst), None
        self.refused = 0

    def refuses(self, name, now):
        """Whether this call exceeds the budget, which it uses up."""
        if self.rate is None or not fnmatch.fnmatchcase(name, self.pattern):
            return False
        if self.at is not None:
            self.left = min(float(self.burst), self.left + (now - self.at) * self.rate)
        self.at = now
        if self.left < 1:
            self.refused += 1
            return True
        self.left -= 1
        return False


class Calls:
    """Which calls were answered: counts by name, and the last ones in order."""

    KEPT = 20_000

    def __init__(self):
        self.clear()

    def clear(self):
        """Forgets all."""
        self.counts, self.log = Counter(), []

    def add(self, name, path, status):
        """Counts one. `status` is 0 where the connection was cut."""
        self.counts[name] += 1
        if len(self.log) < self.KEPT:
            self.log.append({"call": name, "path": path, "status": status})
