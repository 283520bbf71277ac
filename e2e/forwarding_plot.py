#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws failed connections against threshold × interval of the health check, from the suite's report with --measure-forwarding.

    e2e/forwarding_plot.py REPORT.json OUT.svg
"""

import json
import pathlib
import sys

TABLE = "Loss while the load balancer lags"
WIDTH, HEIGHT, LEFT, TOP, STEP = 260, 160, 50, 30, 330
STYLE = (
    "text{font:11px sans-serif;fill:#24292f}.axis{stroke:#8c959f}.off{stroke:#cf222e;fill:none;stroke-width:2}"
    ".on{stroke:#0969da;fill:none;stroke-width:2}@media(prefers-color-scheme:dark){text{fill:#e6edf3}"
    ".off{stroke:#ff7b72}.on{stroke:#58a6ff}}"
)


def chart(event, rows, left):
    lags = sorted({row["lag"] for row in rows})
    top = max(row["failed"] for row in rows) or 1

    def at(lag, failed):
        return f"{lag / lags[-1] * WIDTH:.0f},{HEIGHT - failed / top * HEIGHT:.0f}"

    parts = [f'<g transform="translate({left} {TOP})"><text y="-12">{event}: connections failed</text>']
    parts.append(f'<path class="axis" fill="none" d="M0,0V{HEIGHT}H{WIDTH}"/>')
    parts.append(f'<text x="-6" y="4" text-anchor="end">{top:.0f}</text><text x="-6" y="{HEIGHT}" text-anchor="end">0</text>')
    for lag in lags:
        parts.append(f'<text x="{lag / lags[-1] * WIDTH:.0f}" y="{HEIGHT + 16}" text-anchor="middle">{lag} s</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT + 32}" text-anchor="middle">threshold × interval</text>')
    for number, (state, name) in enumerate((("off", "dropping"), ("on", "forwarding"))):
        means = []
        for lag in lags:
            failed = [row["failed"] for row in rows if row["lag"] == lag and row["state"] == state]
            means.append(at(lag, sum(failed) / len(failed)))
        parts.append(f'<polyline class="{state}" points="{" ".join(means)}"/>')
        y = 14 * (number + 1)
        parts.append(f'<path class="{state}" d="M10,{y - 4}h16"/><text x="32" y="{y}">{name}</text>')
    return "".join(parts) + "</g>"


def main(report, out):
    tables = json.loads(pathlib.Path(report).read_text(encoding="utf-8"))["tables"]
    table = next(table for table in tables if table["title"] == TABLE)
    events = {}
    for cells in table["rows"]:
        row = dict(zip(table["columns"], cells))
        found = {"lag": int(row["threshold × interval s"]), "state": row["forwarding"], "failed": int(row["connections failed"])}
        events.setdefault(row["event"], []).append(found)
    charts = [chart(event, rows, LEFT + STEP * number) for number, (event, rows) in enumerate(events.items())]
    size = f'width="{STEP * len(charts)}" height="{HEIGHT + TOP + 40}"'
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"><title>Failed connections</title><style>{STYLE}</style>'
    pathlib.Path(out).write_text(svg + "\n" + "\n".join(charts) + "\n</svg>\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
