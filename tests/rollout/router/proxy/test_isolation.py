"""An error of the router's own ends the request it came from, and nothing else.

A profile function in the router's thread counts the calls that a request makes, of Python and of C,
and raises in place of the n-th one.  Every n is tried on every way a request can go, by default
every fourth.
"""

import asyncio
import json
import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import rollout.router
from engines.protocol import WorkerType
from rollout.rules.load_balancing import LeastInFlight
from tests.rollout.router.conftest import router_config
from tests.rollout.router.counting_engine import counting
from tests.rollout.router.raw import connect, post
from tests.rollout.router.stub_engine import STREAM, Hold, chunk, hold_then_reply, reply, stream

FOLDER = str(Path(rollout.router.__file__).parent)
# Not calls of a request: the guards, what the lifecycle and the clock call, and the connection.
NOT_OF_A_REQUEST = frozenset(
    {
        *(
            *("on", "_handle"),
            *("start", "start_whole", "feed", "end_of_request", "client_left", "expire", "stop"),
            *("write_paused", "write_resumed", "<lambda>"),
            "_decide",
            *("_carry_out", "_release", "_evict"),
            "_connect",
        ),
        *("data_received", "connection_lost", "connection_made", "eof_received"),
        *("pause_writing", "resume_writing", "abort", "_advance"),
        *("on_router_error", "_on_router_error", "log_router_error"),
        "<genexpr>",  # which is entered again to be closed
    }
)
OUTSIDE = frozenset(
    {
        *("Proxy._sweep", "ReadPacing._pause", "ClientConnection._close_if_idle"),
        "ClientConnection._read_more",
        *("ClientConnection.__init__", "ClientConnection.connection_made"),
        *("Gate.set_state", "Gate.set_members", "Proxy.stop_live"),
    }
)
FILES_NOT_OF_A_REQUEST = ("host.py", "control_api.py", "engine_queries.py", "read_pacing.py")


@dataclass
class Fault:
    """Raises ``error`` in place of the ``at``-th call, in the thread it is installed in."""

    error: type[Exception] = RuntimeError
    at: int = 0
    num: int = 0
    where: str = ""

    def __call__(self, frame, event, arg):
        code = frame.f_code
        if event not in ("call", "c_call") or not code.co_filename.startswith(FOLDER):
            return
        if code.co_filename.endswith(FILES_NOT_OF_A_REQUEST) or _is_outside(frame, event):
            return
        self.num += 1
        if self.num == self.at:
            self.where = f"{code.co_qualname}, {getattr(arg, '__name__', '')}"
            raise self.error("injected")


def _is_outside(frame, event) -> bool:
    if frame.f_code.co_name in NOT_OF_A_REQUEST:
        return event == "call" or frame.f_code.co_name != "data_received"
    while frame is not None and frame.f_code.co_name not in ("on", "_handle", "_admit_or_refuse"):
        if frame.f_code.co_qualname in OUTSIDE:
            return True
        frame = frame.f_back
    return False


@dataclass
class Rig:
    """A bench whose router counts its calls, its timers and what its loop complains of."""

    bench: object
    complaints: list = field(default_factory=list)
    timers: list = field(default_factory=list)
    epoch: int = 10

    @property
    def proxy(self):
        return self.bench.host._proxy

    async def on_loop(self, work, *args):
        return await self.bench.host._on_loop(lambda: work(*args))

    async def prepare(self):
        def install():
            loop = asyncio.get_running_loop()
            loop.set_exception_handler(lambda loop, context: self.complaints.append(context))

            def call_later(*args):
                self.timers.append(loop.call_later(*args))
                return self.timers[-1]

            self.proxy.call_later = call_later

        await self.on_loop(install)

    async def run(self, way, fault: Fault) -> list[int | None]:
        await self.on_loop(sys.setprofile, fault)
        try:
            return await asyncio.wait_for(way(self), 10)
        finally:
            await self.on_loop(sys.setprofile, None)

    async def check(self):
        """Nothing of the request is there any more, and nothing else was touched."""
        gate, proxy = self.bench.host._gate, self.proxy
        async with asyncio.timeout(5):
            while await self.on_loop(lambda: len(gate.in_flight) or len(proxy.live)):
                pass
        left = await self.on_loop(
            lambda: [
                *(len(gate.prefilling), gate.num_held, gate._held_bytes),
                proxy.bodies.num_bytes + len(proxy.bodies._on_late),
                sum(not (timer.cancelled() or timer.when() < 0) for timer in self.timers),
            ]
        )
        assert left == [0, 0, 0, 0, 0]
        self.timers.clear()
        assert self.complaints == []
        for engine in (await self.bench.host.stats())["engines"]:
            assert (engine["state"], engine["num_failures"]) == ("serving", 0), engine

    async def set_members(self, *indices, **fields):
        self.epoch += 1
        members = [self.bench.member(index, **fields) for index in indices]
        await self.bench.host.set_members(self.epoch, members)


async def end_of(reader) -> int | None:
    """The status of one complete response; None if the connection was cut."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        while head.startswith(b"HTTP/1.1 100"):
            head = await reader.readuntil(b"\r\n\r\n")
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length: "):
                await reader.readexactly(int(line[16:]))
            if line.startswith(b"transfer-encoding"):
                while size := int(await reader.readuntil(b"\n"), 16):
                    await reader.readexactly(size + 2)
                await reader.readexactly(2)
        return int(head[9:12])
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


async def one(rig, *parts) -> list[int | None]:
    reader, writer = await connect(rig.bench, *parts)
    try:
        return [await end_of(reader)]
    finally:
        writer.close()


async def whole(rig):
    """Known head, complete reply."""
    rig.bench.engines[0].script = reply()
    return await one(rig, post(b'{"input_ids": [1]}'))


async def parsed(rig):
    """Unknown head, and a body in pieces."""
    rig.bench.engines[0].script = reply()
    rig.epoch += 1
    message = post(b'{"input_ids": [1]}', extra=b"Expect: 100-continue\r\nX-N: %d\r\n" % rig.epoch)
    reader, writer = await connect(rig.bench, message[:-10])
    await rig.on_loop(len, "")
    writer.write(message[-10:])
    try:
        return [await end_of(reader)]
    finally:
        writer.close()


async def streamed(rig):
    rig.bench.engines[0].script = stream(b"data: 1\n\n", b"data: 2\n\n")
    return await one(rig, post(b'{"stream": true}'))


async def pipelined(rig):
    rig.bench.engines[0].script = reply()
    reader, writer = await connect(rig.bench, post(b"{}"), post(b"{}", b"/v1/score"))
    try:
        return [await end_of(reader), await end_of(reader)]
    finally:
        writer.close()


def failing_over(*, is_streamed):
    async def way(rig):
        rig.bench.engines[0].script = counting()
        asked = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 3}}
        body = json.dumps({**asked, "stream": is_streamed}).encode()
        return await one(rig, post(body, extra=b"X-Token-Failover: on\r\n"))

    return way


def completing(path, fields):
    async def way(rig):
        async def says(connection, seen):
            text = {"delta": {"content": "a"}} if b"chat" in path else {"text": "a"}
            choice = {"index": 0, **text, "finish_reason": "stop"}
            event = {"id": "i", "object": "o", "created": 1, "model": "m", "choices": [choice]}
            event["usage"] = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            await connection.send(STREAM, chunk(b"data: %s\n\n" % json.dumps(event).encode()))
            await connection.send(chunk(b"data: [DONE]\n\n"), b"0\r\n\r\n")

        rig.bench.engines[0].script = says
        body = json.dumps({"model": "m", "max_tokens": 4, "stream": True, **fields}).encode()
        return await one(rig, post(body, path, b"X-Token-Failover: on\r\n"))

    return way


async def held(rig):
    """Two requests are held and released together."""
    rig.bench.engines[0].script = reply()
    await rig.bench.host.set_gate("holding")
    pairs = [await connect(rig.bench, post(b"{}")) for _ in range(2)]
    try:
        ends = [asyncio.ensure_future(end_of(reader)) for reader, _ in pairs]
        while rig.bench.host._gate.num_held + sum(end.done() for end in ends) < 2:
            await rig.on_loop(len, "")
        await rig.bench.host.set_gate("open")
        return await asyncio.gather(*ends)
    finally:
        await rig.bench.host.set_gate("open")
        for _, writer in pairs:
            writer.close()


async def in_flight(rig, act) -> list[int | None]:
    """A request is on its engine while ``act`` is done."""
    hold = Hold()
    rig.bench.engines[0].script = hold_then_reply(hold)
    reader, writer = await connect(rig.bench, post(b"{}"))
    end, entered = asyncio.ensure_future(end_of(reader)), asyncio.ensure_future(hold.entered.wait())
    try:
        await asyncio.wait({end, entered}, return_when="FIRST_COMPLETED")
        await act(writer)
        hold.opened.set()
        return [await end]
    finally:
        entered.cancel()
        writer.close()


async def evicted(rig):
    async def act(writer):
        await rig.set_members(1)

    try:
        return await in_flight(rig, act)
    finally:
        await rig.set_members(0)


async def left(rig):
    async def act(writer):
        writer.transport.abort()

    await in_flight(rig, act)
    return [200]  # it is the client that ends it


async def expired(rig):
    async def act(writer):
        await rig.on_loop(lambda: [live.expire(1.0) for live in list(rig.proxy.live)])

    return [504 if status is None else status for status in await in_flight(rig, act)]


async def stopped(rig):
    async def act(writer):
        await rig.on_loop(rig.proxy.stop_live)

    return await in_flight(rig, act)


async def paired(rig):
    """A prefill and a decode engine; the log-probs of the prompt are wanted."""
    roles = (WorkerType.PREFILL, WorkerType.DECODE)
    for index in range(2):
        rig.bench.engines[index].script = counting()
    rig.epoch += 1
    members = [rig.bench.member(n, worker_type=role) for n, role in enumerate(roles)]
    await rig.bench.host.set_members(rig.epoch, members)
    asked = {"input_ids": [1], "return_logprob": True, "logprob_start_len": 0, "stream": False}
    body = json.dumps({**asked, "sampling_params": {"max_new_tokens": 2}}).encode()

    async def prefills(connection, seen):
        meta = {"input_token_logprobs": [[None, 1, None]], "finish_reason": {"type": "length"}}
        event = json.dumps({"text": "", "output_ids": [], "meta_info": meta}).encode()
        await connection.send(STREAM, chunk(b"data: %s\n\n" % event), b"0\r\n\r\n")

    rig.bench.engines[0].script = prefills
    try:
        return await one(rig, post(body))
    finally:
        await rig.set_members(0)


async def never_read(rig):
    """The client reads its response only after the router has paused the engine."""
    rig.bench.engines[0].script = reply(b"x" * (8 << 20))
    reader, writer = await connect(rig.bench)
    writer.transport.pause_reading()
    writer.write(post(b"{}"))

    def state():
        live = list(rig.proxy.live)
        return len(live), any(request.response.client.is_write_paused for request in live)

    was_live = False
    for _ in range(100):
        num, is_paused = await rig.on_loop(state)
        if is_paused or (was_live and not num):
            break
        was_live = was_live or num > 0
    writer.transport.resume_reading()
    try:
        return [await end_of(reader)]
    finally:
        writer.close()


WAYS = {
    "whole": whole,
    "parsed": parsed,
    "streamed": streamed,
    "pipelined": pipelined,
    "failover": failing_over(is_streamed=False),
    "failover-streamed": failing_over(is_streamed=True),
    "completions": completing(b"/v1/completions", {"prompt": [1]}),
    "chat": completing(b"/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    "held": held,
    "evicted": evicted,
    "left": left,
    "expired": expired,
    "stopped": stopped,
    "paired": paired,
    "never-read": never_read,
}
UNDISTURBED = {"held": [200, 200], "pipelined": [200, 200], "expired": [504], "stopped": [503]}


async def fail_every_call(make_bench, caplog, name, error, every=1):
    caplog.set_level(logging.CRITICAL)
    way = WAYS[name]
    rig = Rig(await make_bench(reply(), reply()))
    await rig.set_members(0)
    await rig.prepare()
    for _ in range(3):  # heads and connections are known from the second time on
        counter = Fault()
        assert await rig.run(way, counter) == UNDISTURBED.get(name, [200])
        await rig.check()
    assert counter.num > 30
    ends = set()
    for at in range(1, counter.num + 1, every):
        fault = Fault(error, at)
        try:
            got = await rig.run(way, fault)
            await rig.check()
            assert await whole(rig) == [200]
        except BaseException as problem:
            problem.add_note(f"at call {at} of {counter.num}: {fault.where}")
            raise
        if name == "held":
            assert 200 in got, (at, fault.where)
        ends |= set(got)
    assert ends <= {*UNDISTURBED.get(name, [200]), 500, None}
    return ends


@pytest.mark.parametrize("name", [name for name in WAYS if name != "never-read"])
async def test_an_error_in_any_call_ends_its_request_alone(make_bench, caplog, name):
    """Every fourth; the errors of the next test are raised in all."""
    ends = await fail_every_call(make_bench, caplog, name, RuntimeError, every=4)
    assert name in ("left", "expired") or 500 in ends


@pytest.mark.slow
@pytest.mark.parametrize("error", [RecursionError, MemoryError])
@pytest.mark.parametrize("name", WAYS)
async def test_so_does_an_error_of_any_kind(make_bench, caplog, name, error):
    await fail_every_call(make_bench, caplog, name, error)


# -- the errors that were seen --------------------------------------------------------------


async def test_bodies_too_deep_to_be_written_again_do_not_stop_the_gate(make_bench):
    bench = await make_bench(reply(), config=router_config(max_held_requests=100))
    await bench.host.set_gate("holding")
    asked = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 3}}
    pending = []
    for depth in range(940, 1000, 2):
        body = json.dumps({**asked, "x": 0}).replace("0}", "[" * depth + "]" * depth + "}")
        pending.append(asyncio.ensure_future(send(bench, body.encode())))
    await bench.wait_until_held(30)
    last = asyncio.ensure_future(send(bench, json.dumps(asked).encode()))
    await bench.wait_until_held(31)
    await bench.host.set_gate("open")
    assert await asyncio.wait_for(last, 5) == 200
    assert set(await asyncio.wait_for(asyncio.gather(*pending), 5)) <= {200, 400, 500}


async def send(bench, body):
    reader, writer = await connect(bench, post(body, extra=b"X-Token-Failover: on\r\n"))
    try:
        return await end_of(reader)
    finally:
        writer.close()


class Choosy(LeastInFlight):
    """Fails on the requests with one affinity."""

    wants_affinity = True

    def choose(self, candidates, hint=None):
        if hint.affinity == "bad":
            raise RuntimeError("a policy of somebody else")
        return candidates.least()


@pytest.mark.parametrize("gate", ["open", "holding"])
async def test_a_policy_that_fails_on_one_request_fails_that_one(make_bench, gate, monkeypatch):
    monkeypatch.setattr("rollout.router.host.make_policy", lambda *_, **__: Choosy())
    bench = await make_bench(reply())
    await bench.host.set_gate(gate)
    bad = bench.begin(json={}, headers={"X-Affinity": "bad"})
    good = bench.begin(json={}, headers={"X-Affinity": "good"})
    if gate == "holding":
        await bench.wait_until_held(2)
    await bench.host.set_gate("open")
    assert ((await bad).status, (await good).status) == (500, 200)
    assert (await bad).json["error"]["type"] == "router_error"
