# SPDX-License-Identifier: Apache-2.0
"""Neutron's router in a lab: translates floating IPs as Neutron's L3 agent does, in the network namespace that it runs in.

It reads Neutron's database, from which an agent gets the same by remote calls. A host inside that uses a floating IP is hidden behind the
router, because answers must come back through it.
"""

import subprocess
import time
import traceback

EVERY = 0.3
TABLE = "neutron"
QUERY = "SELECT floating_ip_address, fixed_ip_address FROM floatingips WHERE fixed_ip_address IS NOT NULL AND router_id IS NOT NULL"


def ruleset(floating, inside):
    elements = ", ".join(f"{address} : {fixed}" for address, fixed in sorted(floating.items()))
    elements = f"elements = {{ {elements} }}" if elements else ""
    return f"""table ip {TABLE}
delete table ip {TABLE}
table ip {TABLE} {{
  map floating {{ type ipv4_addr : ipv4_addr; {elements} }}
  chain prerouting {{ type nat hook prerouting priority dstnat; dnat ip to ip daddr map @floating; }}
  chain postrouting {{ type nat hook postrouting priority srcnat; iifname "{inside}" ct status dnat masquerade; }}
}}
"""


def translate(rows, inside):
    """Keeps the rules in line with what `rows` reads, for ever."""
    written = None
    while True:
        try:
            floating = dict(rows(QUERY))
            if floating != written:
                subprocess.run(["nft", "-f", "-"], input=ruleset(floating, inside), text=True, check=True)
                for address, fixed in (written or {}).items():
                    if floating.get(address) != fixed:
                        # Fails if there is no connection.
                        command = ["conntrack", "-D", "--orig-dst", address]
                        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
                written = floating
        except Exception:
            traceback.print_exc()
        time.sleep(EVERY)
