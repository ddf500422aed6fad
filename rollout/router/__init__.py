"""The one door to a server's engines: HTTP in, a chosen engine, HTTP out.

gate.py, membership.py    who is let in, and to whom          (pure)
headers.py, stamp.py      what is changed in a message        (pure)
proxy.py                  one request from its first byte to its last
transport.py, upstream.py how a request reaches an engine     (replaceable under the same gate)
app.py                    what can be read over HTTP
host.py                   all of it in a thread of its own
"""

from __future__ import annotations

from rollout.router.gate import ConnectionFailure, GateState
from rollout.router.host import RouterHost
from rollout.router.settings import RouterSettings
from rollout.routing import Member, MemberState

__all__ = [
    "ConnectionFailure",
    "GateState",
    "Member",
    "MemberState",
    "RouterHost",
    "RouterSettings",
]
