# SPDX-License-Identifier: Apache-2.0
"""What the stand-ins of all clouds share: HTTP, a clock of scheduled effects, injected faults, throttling, tokens, and counts of calls.

It knows no cloud. A cloud is a class with the methods of `server.Cloud`.
"""
