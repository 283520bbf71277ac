# SPDX-License-Identifier: Apache-2.0
"""A call of the API, and pages of lists."""

from .discovery import invalid

PAGE = 500


class Call:
    """A request whose method, place and body are known."""

    def __init__(self, request, method, values, query, body):
        self.request, self.method, self.query, self.body = request, method, query, body
        self.project = values["project"]
        place = next((f"{place}s/{values[place]}" for place in ("region", "zone") if place in values), "global")
        self.scope = f"projects/{self.project}/{place}"
        last = method.segments[-1] if method.segments[-1].startswith("{") else method.segments[-2]
        self.name = values.get(last.strip("{}")) if last.strip("{}") not in ("project", "region", "zone") or method.collection in ("regions", "zones") else None

    def page(self, items):
        """The page of the items that the query wants, and the token of the next one."""
        size = min(self.query.get("maxResults", PAGE), PAGE) or PAGE
        token = self.query.get("pageToken", "0")
        if not token.isdigit():
            raise invalid("pageToken", token, "Invalid page token.")
        start = int(token)
        return items[start : start + size], str(start + size) if start + size < len(items) else None
