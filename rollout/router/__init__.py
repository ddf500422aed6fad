"""The HTTP entrance to a server's engines: request in, an engine is chosen, reply out.

One folder per role; each imports only from those above it:

gate/          which requests are admitted, and to which engine (pure)
http/          messages: heads, bodies, JSON; connections to engines
continuation/  the tokens of a request so far, over several engines (pure)
proxy/         one request from its client to an engine and back; failover, metrics

host.py               the router in its own thread: start, steer, stop
control_api.py        what can be read and aborted over HTTP
pins.py               versions of adapters that clients keep between their requests
engine_queries.py     what the router requests from engines itself
"""

from __future__ import annotations

from rollout.router.gate.gate import ConnectionFailure, GateState
from rollout.router.host import RouterHost
from rollout.rules.routing import Backend, BackendState

__all__ = [
    "Backend",
    "BackendState",
    "ConnectionFailure",
    "GateState",
    "RouterHost",
]
