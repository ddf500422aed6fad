"""Two things in one turn of the event loop, arranged without sockets."""

import asyncio

from engines.protocol import Endpoint
from rollout.router.gate import Gate, GateState, Waiter
from rollout.router.proxy import Proxy
from rollout.routing import Member


class NoTransport:
    async def send(self, *request):
        raise AssertionError("nothing is to be sent")


async def test_a_client_that_leaves_just_as_the_gate_opens_harms_no_other_waiter():
    gate = Gate()
    gate.set_members(1, [Member("e-0", Endpoint("127.0.0.1", 1))])
    gate.set_state(GateState.HOLDING)
    messages = [{"type": "http.request", "body": b"{}"}]
    leaves = asyncio.Event()

    async def receive():
        if messages:
            return messages.pop()
        await leaves.wait()
        # Queued before the cancelled request can run: the gate opens in between.
        asyncio.get_running_loop().call_soon(gate.set_state, GateState.OPEN)
        return {"type": "http.disconnect"}

    async def send(message):
        raise AssertionError("nobody is there to be answered")

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/generate",
        "raw_path": b"/generate",
        "query_string": b"",
        "headers": [],
    }
    serving = asyncio.ensure_future(
        Proxy(gate, NoTransport(), hold_timeout_s=60)(scope, receive, send)
    )
    for _ in range(5):
        await asyncio.sleep(0)
    other = gate.enter()
    assert isinstance(other, Waiter)
    leaves.set()
    await serving
    assert other.decision is not None
    assert list(gate.in_flight) == [other.decision]
