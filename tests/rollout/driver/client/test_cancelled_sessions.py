"""Turns of sessions, cancelled at every await: no slot, request, task or token is left over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, ClassVar

import pytest

from engines.protocol import SamplingParams
from rollout.core.pending import Pending
from rollout.core.samples import Sample, SampleFailure, SampleStatus
from rollout.driver.client import agent_session
from rollout.driver.client.agent_session import AgentSession
from rollout.driver.client.completer import AbortScope, Completer
from rollout.driver.client.limiter import Limiter
from rollout.driver.client.retry import RetryPolicy
from rollout.driver.client.session import Session
from rollout.driver.stream.hooks import Hooks
from rollout.driver.stream.options import RolloutOptions
from tests.support.cancelling import (
    Cut,
    async_methods,
    called,
    cut_off,
    each_cut,
    others,
    public_methods,
    suspending,
)
from tests.support.driving import always, driving, engines, numbers, source
from tests.support.fake_generation_client import FakeGenerationClient
from tests.support.virtual_time import VirtualTimeLoop, pass_time

TURN = SamplingParams(max_new_tokens=3)
ALL = SamplingParams(max_new_tokens=6)


async def two_turns(session: Session) -> None:
    await session.generate(TURN)
    session.observe([7], " tool ")
    await session.generate(TURN)


async def of_generate(cut: Cut, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that goes on after one that was cut off has each token once."""
    client = FakeGenerationClient(engines(0.01))
    client.generate = suspending(client.generate)  # type: ignore[method-assign]
    loop = asyncio.get_running_loop()
    limiter = Limiter(1, clock=loop.time)
    scope = AbortScope()
    complete = partial(Completer(client, limiter, RetryPolicy()).complete, scope=scope)

    def session(*earlier: Any) -> Session:
        return Session(Sample([1], status=SampleStatus.PENDING), ALL, complete, *earlier)

    first = session()
    await called(two_turns(first), cut)
    assert (limiter.num_used, limiter.num_waiting) == (0, 0)
    assert client.num_in_flight == 0
    assert scope.rids == set()
    assert not others()
    first.sample.check()
    first.sample.status = SampleStatus.ABORTED  # as what runs the hook does
    num_before = len(client.requests)
    again = session(first.sample, first.turns)
    await two_turns(again)
    again.sample.check()
    assert again.sample.mask == [1, 1, 1, 0, 1, 1, 1]
    assert len(client.requests) - num_before == 2 - len(first.turns)


async def of_a_hook(cut: Cut, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook that is cancelled costs its sample, and no other."""
    num = 0

    async def generate(session: Session) -> None:
        nonlocal num
        num += 1
        turns = two_turns(session)
        await (cut_off(turns, cut) if num == 2 else turns)

    options = RolloutOptions(max_failed_share=1.0)
    batch: dict[str, Any] = {"group_size": 2, "sampling": ALL, "num_groups": 2}
    hooks = Hooks(generate=generate, reward=always(1.0))
    async with driving(engines(0.01), hooks=hooks, max_in_flight=1) as (driver, client):
        data = source(4, num_epochs=1)
        groups = await driver.rollout(0, data, options=options, **batch)
        assert client.num_in_flight == 0
        samples = [sample for group in groups for sample in group]
        failed = [one for one in samples if one.status is SampleStatus.FAILED]
        assert [one.failure for one in failed] in ([], [SampleFailure.GENERATE_ERROR])
        assert len(failed) == (cut.number > 0)
        for sample in samples:
            sample.check()
            assert sample in failed or sample.mask == [1, 1, 1, 0, 1, 1, 1]
        assert numbers(groups) == [1, 2]
        assert numbers(await driver.rollout(1, data, **batch)) == [3, 4]
    assert not others()


class FakeHttp:
    """Stands in for ``aiohttp.ClientSession``, and counts what is open."""

    num_open = 0
    deleted: ClassVar[list[str]] = []
    status = 200

    def __init__(self, **_: Any) -> None:
        self._ends: list[Any] = []

    async def __aenter__(self) -> Any:
        await pass_time(0.001)
        type(self).num_open += 1
        return self

    async def __aexit__(self, *_: object) -> None:
        type(self).num_open -= 1
        await pass_time(0.001)

    def request(self, method: str, url: str) -> Any:
        if method == "DELETE":
            self.deleted.append(url)
        return FakeHttp()

    async def json(self) -> Any:
        await pass_time(0.001)
        return {"turns": []}


def of_agent(name: str) -> Callable[..., Coroutine[Any, Any, None]]:
    async def of_it(cut: Cut, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(agent_session.aiohttp, "ClientSession", FakeHttp)
        monkeypatch.setattr(FakeHttp, "deleted", [])
        loop, cuts = asyncio.get_running_loop(), [cut]

        def submit(call: Coroutine[Any, Any, Any]) -> Pending[Any]:
            async def run() -> Any:
                return await cut_off(call, cuts.pop() if cuts else Cut(0))

            return Pending(asyncio.run_coroutine_threadsafe(run(), loop))

        session = AgentSession(["http://nowhere"], "s", key="", control_key="", submit=submit)
        try:
            await getattr(session, name)()
        except asyncio.CancelledError:
            assert cut.was_reached
        await pass_time(1.0)
        assert FakeHttp.num_open == 0
        assert not others()
        if name != "close":
            assert await getattr(session, name)() == []
        await session.close()
        assert FakeHttp.deleted
        assert FakeHttp.num_open == 0

    return of_it


CALLS: dict[str, Callable[..., Coroutine[Any, Any, None]]] = {
    "Session.generate": of_generate,
    "Session.generate, by a hook": of_a_hook,
    "AgentSession.turns": of_agent("turns"),
    "AgentSession.samples": of_agent("samples"),
    "AgentSession.close": of_agent("close"),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_of_sessions_that_are_cancelled(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(cut: Cut) -> None:
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            runner.run(CALLS[name](cut, monkeypatch))

    assert each_cut(name, run, is_whole=True) > 5


def test_every_call_of_a_session_has_a_row() -> None:
    rows = {name.partition(",")[0] for name in CALLS}
    of_agents = {f"AgentSession.{name}" for name in public_methods(AgentSession)}
    assert rows == of_agents | {f"Session.{name}" for name in async_methods(Session)}
