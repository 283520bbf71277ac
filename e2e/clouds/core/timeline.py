# SPDX-License-Identifier: Apache-2.0
"""Effects that happen at a time. Nothing runs by itself: the server calls `advance` before each request, under its lock, so that a
request sees everything that was due before it, in order."""

import heapq
import itertools
import time


class Timeline:
    """Scheduled effects, and the time that they see."""

    def __init__(self):
        self._skipped = 0.0
        self._queue = []
        self._numbers = itertools.count()
        self._now = self.clock()

    def clock(self):
        """Seconds of a clock that tests can put forward."""
        return time.monotonic() + self._skipped

    def skip(self, seconds):
        """Puts the clock forward."""
        self._skipped += seconds

    def now(self):
        """The time of the effect that runs, or of the request."""
        return self._now

    def late(self):
        """Seconds since the effect that runs was due: it runs with the next request."""
        return max(0.0, self.clock() - self._now)

    def at(self, when, effect):
        """Runs the effect at this time, or with the next request if that has passed."""
        heapq.heappush(self._queue, (when, next(self._numbers), effect))

    def advance(self):
        """Runs everything that is due."""
        until = self.clock()
        while self._queue and self._queue[0][0] <= until:
            when, _, effect = heapq.heappop(self._queue)
            self._now = max(self._now, when)
            effect()
        self._now = until
