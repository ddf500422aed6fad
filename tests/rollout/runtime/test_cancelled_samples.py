"""Calls for samples, cancelled at every await: no slot, request, stream or task is left over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any

import pytest

from engines.protocol import GenerateReply, SamplingParams
from rollout.config import RouterConfig
from rollout.core.pending import Pending
from rollout.driver.client.generation_client import GenerationRequest
from rollout.driver.client.sample_requests import rid_prefix
from rollout.runtime.calls import sample_client
from rollout.runtime.calls.sample_client import ReplyStream, SampleClient
from tests.support.cancelling import (
    Cut,
    called,
    cut_off,
    each_cut,
    others,
    public_methods,
    suspending,
)
from tests.support.driving import engines
from tests.support.fake_generation_client import FakeGenerationClient
from tests.support.virtual_time import VirtualTimeLoop, pass_time


class FakeHttpClient:
    """``HttpGenerationClient`` over engines in memory."""

    def __init__(self, fake: FakeGenerationClient) -> None:
        self.fake = fake
        self.num_streams = 0
        self.generate = suspending(fake.generate)

    async def order_abort(self, prefix: str) -> None:
        await pass_time(0.001)
        await self.fake.abort([], prefix=prefix)
        await pass_time(0.001)

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[GenerateReply, None]:
        self.num_streams += 1
        try:
            replies = self.fake.engines[0].stream_generate(
                input_ids=request.input_ids,
                sampling_params=request.sampling,
                rid=request.rid,
                return_logprob=True,
            )
            async with aclosing(replies):
                async for reply in replies:
                    yield reply
        finally:
            self.num_streams -= 1

    async def close(self) -> None:
        return


class Here:
    """``LoopThread`` on the loop of the test; its next call is cut off."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.cuts: list[Cut] = []

    def submit(self, call: Coroutine[Any, Any, Any], why_late: Any = str) -> Pending[Any]:
        async def run() -> Any:
            return await cut_off(call, self.cuts.pop() if self.cuts else Cut(0))

        return Pending(asyncio.run_coroutine_threadsafe(run(), self.loop))


class World:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fake = FakeGenerationClient(engines(1.0))
        self.http = FakeHttpClient(self.fake)
        self.here = Here()
        monkeypatch.setattr(sample_client, "HttpGenerationClient", lambda *_, **__: self.http)
        monkeypatch.setattr(sample_client, "_loop", lambda pid: self.here)
        monkeypatch.setattr(sample_client, "_MOST_AT_ONCE", 1)  # a slot that is lost is missed
        self.client = SampleClient(self._url, RouterConfig())
        self._num = 0

    async def _url(self) -> str:
        await pass_time(0.001)
        return "http://nowhere"

    def request(self, name: str, num_tokens: int = 4) -> GenerationRequest:
        self._num += 1
        rid = f"{rid_prefix(name)}{self._num}"
        return GenerationRequest(rid, [1], SamplingParams(max_new_tokens=num_tokens))

    async def check(self) -> None:
        """Nothing is left, and the next calls have all of their tokens."""
        await pass_time(0.5)  # less than a token takes
        assert self.fake.num_in_flight == self.http.num_streams == 0
        assert not self.fake.engines[0].in_flight
        assert not others()
        # No call of the same name counts as aborted, or as under way.
        replies = await self.client.generate([self.request("mine"), self.request("mine")], "mine")
        assert [len(reply.output_ids) for reply in replies] == [4, 4]
        assert [len(part.output_ids) async for part in self.stream()][-1] == 4
        now_s = self.here.loop.time()
        await self.client.abort("mine")
        assert self.here.loop.time() < now_s + 0.05, "it waits for a call that has ended"
        assert not others()

    def stream(self) -> ReplyStream:
        return self.client.stream(self.request("mine"), "mine")


async def of_generate(world: World, cut: Cut) -> None:
    world.here.cuts.append(cut)
    await ended(world.client.generate([world.request("mine"), world.request("mine")], "mine"))


async def of_generate_one(world: World, cut: Cut) -> None:
    world.here.cuts.append(cut)
    await ended(world.client.generate_one(world.request("mine"), "mine"))


async def of_stream(world: World, cut: Cut) -> None:
    """The caller is cancelled between two parts."""

    async def read() -> None:
        async for _ in world.stream():
            pass

    await called(read(), cut)


async def of_reading(world: World, cut: Cut) -> None:
    """The task that reads the reply is: by ``close``, or with its loop."""
    read = ReplyStream._read

    async def cut_read(self: ReplyStream, replies: Any) -> None:
        await cut_off(read(self, replies), cut)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReplyStream, "_read", cut_read)
        parts = [part async for part in world.stream()]
    assert cut.number or len(parts[-1].output_ids) == 4


async def of_abort(world: World, cut: Cut) -> None:
    """A call that was aborted in part is ended by the next abort."""
    long = world.client.generate([world.request("mine", 1000)], "mine")
    await pass_time(0.05)
    world.here.cuts.append(cut)
    await ended(world.client.abort("mine"))
    await world.client.abort("mine")
    replies = await long
    assert [reply.finish_reason.kind for reply in replies] == ["abort"]


async def ended(pending: Pending[Any]) -> None:
    with suppress(asyncio.CancelledError):
        await pending


CALLS: dict[str, Callable[[World, Cut], Coroutine[Any, Any, None]]] = {
    "generate": of_generate,
    "generate_one": of_generate_one,
    "stream": of_stream,
    "stream, its reader": of_reading,
    "abort": of_abort,
}
# Those that only make something.
NO_CALLS = {"session"}


@pytest.mark.parametrize("name", CALLS)
def test_calls_for_samples_that_are_cancelled(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(cut: Cut) -> None:
        async def case() -> None:
            world = World(monkeypatch)
            await CALLS[name](world, cut)
            await world.check()

        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            runner.run(case())

    assert each_cut(name, run, is_whole=True) > 3


def test_every_call_for_samples_has_a_row() -> None:
    rows = {name.partition(",")[0] for name in CALLS} | NO_CALLS
    assert rows == public_methods(SampleClient)
