"""Every call of a driver, cancelled at every await: nothing is lost, delivered twice or left over.

After each: every prompt of the source is delivered once, dropped once or pending; the next call
delivers what is missing; a driver that begins again from the journal, as it was at that moment,
delivers the same; no slot is taken, no request is in flight and no task is left.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from engines.protocol import SamplingParams
from rollout.core.samples import Sample, SampleGroup, all_samples
from rollout.driver import driver as driver_module
from rollout.driver.client.limiter import Limiter
from rollout.driver.driver import RolloutDriver
from rollout.driver.evaluation import EvalDataset
from rollout.driver.stream import journal
from rollout.driver.stream.hooks import Hooks
from rollout.driver.stream.options import RolloutOptions
from tests.support.cancelling import (
    Cut,
    async_methods,
    called,
    each_cut,
    inline,
    others,
    suspending,
)
from tests.support.driving import engines, numbers, prompts, source
from tests.support.fake_generation_client import FakeGenerationClient
from tests.support.small_policy import new_policy
from tests.support.virtual_time import VirtualTimeLoop, pass_time

MODES = ("sync", "one_ahead", "async")
# The source has so many prompts, and a filter drops one of them.
NUM, DROPPED = 7, 3
EXPECTED = [[1, 2], [4, 5], [6, 7]]
BATCH: dict[str, Any] = {"group_size": 2, "sampling": SamplingParams(max_new_tokens=3)}
_METHODS = ("generate", "abort", "load", "server_metrics", "report", "close")


async def rewarded(sample: Sample) -> float:
    await pass_time(0.004)
    return float(sample.prompt_ids[0])


def keeps(group: SampleGroup) -> str:
    return "third" if group.metadata["number"] == DROPPED else ""


class World:
    """A driver over fake engines, and what is known of it from outside.

    Attributes:
        folder: of its journal; None for none.
    """

    def __init__(self, limiters: list[Limiter], folder: Path | None = None) -> None:
        self.client = FakeGenerationClient(engines(0.01, 0.013))
        for name in _METHODS:
            setattr(self.client, name, suspending(getattr(self.client, name)))
        self.folder = folder
        self.driver = RolloutDriver(
            "http://nowhere",
            hooks=Hooks(reward=rewarded, group_filter=keeps),
            client=self.client,
            adapt_every_s=None,
            journal=folder,
        )
        self.limiter = limiters[-1]

    def check_quiet(self) -> None:
        """No request is in flight, and no slot is taken or waited for."""
        assert self.client.num_in_flight == 0
        assert (self.limiter.num_used, self.limiter.num_waiting) == (0, 0)

    async def check_closed(self) -> None:
        await self.driver.close()
        self.check_quiet()
        assert not others(), f"left over: {others()}"


@pytest.fixture
def new_world(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes worlds in which threads do their work between two turns of the loop."""
    limiters: list[Limiter] = []

    class NotedLimiter(Limiter):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            limiters.append(self)

    monkeypatch.setattr(driver_module, "Limiter", NotedLimiter)
    monkeypatch.setattr(asyncio, "to_thread", inline)
    monkeypatch.setattr(journal, "in_own_thread", soon)
    monkeypatch.setattr(journal.os, "fsync", lambda file: None)

    @asynccontextmanager
    async def made(folder: Path | None = None) -> AsyncIterator[World]:
        world = World(limiters, folder)
        yield world
        await world.check_closed()

    return made


def soon(work: Callable[[], Any], name: str) -> Future[Any]:
    """``in_own_thread`` for virtual time."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    asyncio.get_running_loop().call_later(0.001, run)
    return future


def run_in_virtual_time(call: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(call)


def check_groups(groups: list[SampleGroup]) -> None:
    """Each sample is whole, and was rewarded once, for its prompt."""
    for group in groups:
        for sample in group:
            sample.check()
            assert len(sample.output_ids) == 3
            assert sample.reward == group.metadata["number"] == sample.prompt_ids[0]
        assert len(group) == 2


async def steps_of(driver: RolloutDriver, data: Any, step: int, **batch: Any) -> list[list[int]]:
    """The prompts of all batches from this step to the end of the source."""
    found = list[list[int]]()
    while groups := await driver.rollout(step, data, **BATCH, **batch):
        check_groups(groups)
        found.append(numbers(groups))
        step += 1
        assert step < NUM, f"more than there are: {found}"
    stream = driver.stream_of(data)
    assert stream.auditor.findings(stream.pending) == []
    assert stream.auditor.dropped == {DROPPED - 1: "third"}
    assert not stream.pending
    return found


def check_same(mode: str, found: list[list[int]], expected: list[list[int]]) -> None:
    """The same batches; where groups run ahead, a batch has those that were ready first."""
    if mode == "async":
        each, wanted = (sorted(itertools.chain(*batches)) for batches in (found, expected))
        assert each == wanted, f"{found} for {expected}"
    else:
        assert found == expected


async def of_a_source(
    new_world: Any, cut: Cut, mode: Any, num_before: int, folder: Path | None
) -> None:
    batch: dict[str, Any] = {"num_groups": 2, "options": RolloutOptions(mode=mode)}
    data, given = source(NUM, num_epochs=1), list[list[int]]()
    copied = None if folder is None else folder.with_name("copied")
    async with new_world(folder) as world:
        for step in range(num_before):
            given.append(numbers(await world.driver.rollout(step, data, **BATCH, **batch)))
        result = await called(world.driver.rollout(num_before, data, **BATCH, **batch), cut)
        if not result.is_cancelled:
            check_groups(result.value)
            given.append(numbers(result.value))
        if mode == "sync":
            world.check_quiet()
        if copied is not None:
            shutil.copytree(folder, copied)
        stream = world.driver.stream_of(data)
        assert stream.auditor.findings(stream.pending) == []
        rest = await steps_of(world.driver, data, len(given), **batch)
    check_same(mode, given + rest, EXPECTED)
    if copied is not None:
        async with new_world(copied) as world:
            again = await steps_of(world.driver, source(NUM, num_epochs=1), len(given), **batch)
        check_same(mode, again, rest)


async def of_a_list(
    new_world: Any, cut: Cut, mode: Any, num_before: int, folder: Path | None
) -> None:
    options = RolloutOptions(mode=mode)
    async with new_world() as world:
        before = others()
        for step in range(num_before):
            await world.driver.rollout(step, prompts(4), options=options, **BATCH)
        await called(world.driver.rollout(1, prompts(4), options=options, **BATCH), cut)
        world.check_quiet()
        await pass_time(1.0)  # reports to the page
        assert others() == before
        groups = await world.driver.rollout(2, prompts(4), options=options, **BATCH)
        check_groups(groups)
        assert numbers(groups) == [1, 2, 4]


async def of_evaluate(
    new_world: Any, cut: Cut, mode: Any, num_before: int, folder: Path | None
) -> None:
    batch: dict[str, Any] = {"num_groups": 2, "options": RolloutOptions(mode=mode)}
    sampling = BATCH["sampling"]
    datasets = {
        "one": EvalDataset(prompts(3), sampling),
        "two": EvalDataset(prompts(2), sampling, num_samples=2),
    }
    data, given = source(NUM, num_epochs=1), list[list[int]]()
    async with new_world(folder) as world:
        for step in range(num_before):
            given.append(numbers(await world.driver.rollout(step, data, **BATCH, **batch)))
        before = others()
        await called(world.driver.evaluate(0, datasets), cut)
        if mode == "sync":
            world.check_quiet()
            names = ("driver-report", "the generation client's report")
            reports = {task for task in others() if task.get_name() in names}
            assert others() - reports <= before
        result = await world.driver.evaluate(0, datasets)
        assert (result.metrics["eval/one"], result.metrics["eval/two"]) == (2.0, 1.5)
        given += await steps_of(world.driver, data, len(given), **batch)
    check_same(mode, given, EXPECTED)


async def of_close(
    new_world: Any, cut: Cut, mode: Any, num_before: int, folder: Path | None
) -> None:
    """A second ``close`` ends what goes on after the first, and the journal's folder is free."""
    batch: dict[str, Any] = {"num_groups": 2, "options": RolloutOptions(mode=mode)}
    data, given = source(NUM, num_epochs=1), list[list[int]]()
    async with new_world(folder) as world:
        for step in range(num_before):
            given.append(numbers(await world.driver.rollout(step, data, **BATCH, **batch)))
        calls = [world.driver.rollout(num_before, data, **BATCH, **batch)]
        if folder is None:
            calls.append(world.driver.rollout(9, prompts(4), **BATCH))
        waiting = asyncio.gather(*calls, return_exceptions=True)
        await pass_time(0.015)
        await called(world.driver.close(), cut)
        await world.driver.close()
        for outcome in await waiting:
            assert "was closed before the batch was full" in repr(outcome)
        stream = world.driver.stream_of(data)
        assert stream.auditor.findings(stream.pending) == []
    if folder is not None:
        async with new_world(folder) as world:
            given += await steps_of(world.driver, source(NUM, num_epochs=1), len(given), **batch)
        check_same(mode, given, EXPECTED)


POLICY = new_policy(random.Random(1))


async def of_check_logprobs(
    new_world: Any, cut: Cut, mode: Any, num_before: int, folder: Path | None
) -> None:
    draw = random.Random(2)
    samples = [POLICY.sample(draw, engine_id="main-0", version="5") for _ in range(4)]
    groups = [SampleGroup(0, samples)]
    theirs = [POLICY.logprobs(sample) for sample in all_samples(groups)]
    async with new_world() as world:
        await called(world.driver.check_logprobs(groups, theirs), cut)
        report = await world.driver.check_logprobs(groups, theirs)
    assert report.mismatch is None
    assert len(world.client.reports) in ({2} if cut.number == 0 else {1, 2})


CALLS: dict[str, list[Callable[..., Coroutine[Any, Any, None]]]] = {
    "rollout": [of_a_source, of_a_list],
    "evaluate": [of_evaluate],
    "check_logprobs": [of_check_logprobs],
    "close": [of_close],
}
# Which of them are the same whatever the mode, or have no journal.
_ONCE, _WITHOUT_JOURNAL = (of_check_logprobs,), (of_check_logprobs, of_a_list)


def cases() -> list[tuple[str, Any, str, int, bool]]:
    found = []
    for name, of_name in CALLS.items():
        for of, mode, num, kept in itertools.product(of_name, MODES, (0, 1), (False, True)):
            if (kept and of in _WITHOUT_JOURNAL) or (of in _ONCE and (mode, num) != ("sync", 0)):
                continue
            found.append((name, of, mode, num, kept))
    return found


def run_case(case: tuple[str, Any, str, int, bool], new_world: Any, *, is_whole: bool) -> None:
    name, of, mode, num_before, has_journal = case
    text = f"{name}: {of.__name__}, {mode}, call {num_before}, journal {has_journal}"

    def run(cut: Cut) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "journal" if has_journal else None
            run_in_virtual_time(of(new_world, cut, mode, num_before, path))

    each_cut(text, run, is_whole=is_whole)
    gc.collect()  # a coroutine that is never awaited is reported as it goes


@pytest.mark.parametrize("case", cases(), ids=lambda case: f"{case[1].__name__}-{case[2:]}")
def test_a_tenth_of_all_cancelled_calls(case: Any, new_world: Any) -> None:
    run_case(case, new_world, is_whole=False)


@pytest.mark.slow
@pytest.mark.parametrize("case", cases(), ids=lambda case: f"{case[1].__name__}-{case[2:]}")
def test_all_cancelled_calls(case: Any, new_world: Any) -> None:
    run_case(case, new_world, is_whole=True)


def test_every_call_of_a_driver_has_a_row() -> None:
    assert set(CALLS) == async_methods(RolloutDriver)
