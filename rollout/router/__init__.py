"""The one door to a server's engines: HTTP in, a chosen engine, HTTP out.

gate.py, membership.py    who is let in, and to whom              (pure)
headers.py, stamp.py      what is changed in a message            (pure)
message.py, answers.py    a request read; what we answer ourselves
protocol.py, turns.py     the client's connection; its requests take turns
client_side.py            one request as its client sees it
exchange.py               the same on its way to an engine, and to another
failover.py               a request that goes on elsewhere, by token
tokens.py, openai_*.py    its tokens so far                       (pure)
recorded_chat.py          a chat whose turn is recorded           (pure)
pairs.py                  prefill and decode engines
keys.py, limits.py        who may ask; how many may
metrics.py, recordings.py what is counted; what is kept on request
upstream.py               one connection to an engine
pool.py                   the kept ones, and new ones
proxy.py                  what all exchanges share
app.py, control.py        what can be read over HTTP; what the router asks engines
listening.py, host.py     a port; all of it in a thread of its own
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
