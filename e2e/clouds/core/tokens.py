# SPDX-License-Identifier: Apache-2.0
"""Access tokens that the stand-in's own token endpoints give, and that its API demands."""

import secrets


class Tokens:
    """Tokens with their subjects and ends."""

    def __init__(self, lifetime, clock):
        self.lifetime, self._clock = lifetime, clock
        self._valid = {}

    def issue(self, subject, lifetime=None):
        """A new token, and for how many seconds it is valid."""
        seconds = self.lifetime if lifetime is None else lifetime
        token = f"token-{secrets.token_urlsafe(24)}"
        self._valid[token] = (subject, self._clock() + seconds)
        return token, int(seconds)

    def subject(self, authorization):
        """Whose token the header has; None without a valid one."""
        scheme, _, token = (authorization or "").partition(" ")
        subject, end = self._valid.get(token.strip(), (None, 0))
        return subject if scheme.lower() == "bearer" and self._clock() < end else None

    def revoke(self):
        """Ends all tokens."""
        self._valid = {}
