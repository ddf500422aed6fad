"""Whatever code of the user raises, the call ends in words, and each group is delivered once."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest

from rollout.core.errors import RolloutError
from rollout.core.samples import Sample, all_samples
from rollout.driver.client.session import Session
from rollout.driver.data.prompt import Prompt
from rollout.driver.data.prompt_data import PromptData
from rollout.driver.driver import Driver
from rollout.driver.stream.hooks import Hooks
from rollout.driver.stream.options import RolloutOptions
from tests.support.driving import SAMPLING, always, driving, engines, numbers, source
from tests.support.fake_generation_client import FakeGenerationClient
from tests.support.virtual_time import virtual_time
from tests.support.waits import forever

BATCH: dict[str, Any] = {"num_groups": 3, "group_size": 2, "sampling": SAMPLING}
ENDS_CALL = (SystemExit, KeyboardInterrupt)
ERRORS = (asyncio.CancelledError, *ENDS_CALL, GeneratorExit, RuntimeError)
MODES = ("sync", "one_ahead", "async")
# A hook that is called again and again uses no time, so no clock ends it.
MANY = 200


class Trouble:
    """Code of the user that raises until ``is_over``, or ``once``."""

    def __init__(self, kind: type[BaseException], *, once: bool = False) -> None:
        self.kind = kind
        self.once = once
        self.num_raised = 0
        self.is_over = False

    def __call__(self, *of: object) -> None:
        if self.is_over or self.num_raised > MANY:
            return
        self.num_raised += 1
        self.is_over = self.once
        raise self.kind("trouble")


def in_hooks(where: str, trouble: Trouble) -> Hooks:
    async def generate(session: Session) -> None:
        await session.generate()
        trouble()

    def reward(sample: Sample) -> float:
        trouble()
        return 1.0

    async def reward_later(sample: Sample) -> float:
        await asyncio.sleep(0)
        return reward(sample)

    async def reward_of_a_cancelled_task(sample: Sample) -> float:
        waiting = asyncio.create_task(forever())
        if trouble.kind is asyncio.CancelledError and not trouble.is_over:
            waiting.cancel()
            trouble.num_raised += 1
            await waiting
        waiting.cancel()
        return reward(sample)

    async def reward_that_cancels_itself(sample: Sample) -> float:
        task = asyncio.current_task()
        assert task is not None
        if trouble.kind is asyncio.CancelledError and not trouble.is_over:
            trouble.num_raised += 1
            task.cancel()
            await asyncio.sleep(0)
        return reward(sample)

    def group_reward(group: Any) -> list[float]:
        trouble()
        return [1.0] * len(group)

    async def group_reward_later(group: Any) -> list[float]:
        await asyncio.sleep(0)
        return group_reward(group)

    def keep(of: Any) -> bool:
        trouble()
        return True

    hooks: dict[str, dict[str, Any]] = {
        "generate": {"generate": generate},
        "reward": {"reward": reward},
        "reward, later": {"reward": reward_later},
        "reward, of a cancelled task": {"reward": reward_of_a_cancelled_task},
        "reward, cancels itself": {"reward": reward_that_cancels_itself},
        "group reward": {"group_reward": group_reward},
        "group reward, later": {"group_reward": group_reward_later},
        "sample filter": {"sample_filter": keep},
        "group filter": {"group_filter": keep},
        "post_process": {"post_process": trouble},
    }
    return Hooks(**{"reward": always(1.0), **hooks.get(where, {})})


HOOKS = (
    "generate",
    "reward",
    "reward, later",
    "reward, of a cancelled task",
    "reward, cancels itself",
    "group reward",
    "group reward, later",
    "sample filter",
    "group filter",
    "post_process",
)
CALLBACKS = ("on_sample", "on_progress", "on_metrics", "the source")


class Troubled(PromptData):
    """A source that raises at its fifth prompt."""

    def __init__(self, trouble: Callable[[], None]) -> None:
        rows = [{"input_ids": [index], "number": index} for index in range(1, 13)]
        super().__init__(rows, seed=None, num_epochs=1)
        self.trouble = trouble
        self.num = 0

    def take(self) -> Prompt | None:
        if self.num == 4:
            self.trouble()
        self.num += 1
        return super().take()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("where", [*HOOKS, *CALLBACKS])
@virtual_time
async def test_an_error_of_the_user_ends_the_call_by_name_and_costs_no_group(
    where: str, kind: type[BaseException], mode: Any, caplog: pytest.LogCaptureFixture
) -> None:
    trouble = Trouble(kind)
    hooks = in_hooks(where, trouble)
    on = {name: trouble if where == name else None for name in CALLBACKS}
    data = Troubled(trouble) if where == "the source" else source(12, num_epochs=1)
    call: dict[str, Any] = {**BATCH, "options": RolloutOptions(mode=mode)}
    call |= {name: on[name] for name in ("on_sample", "on_progress")}
    errors, trained = list[Exception](), list[int]()
    async with driving(engines(0.01, 0.02), hooks=hooks, on_metrics=on["on_metrics"]) as (
        driver,
        _,
    ):
        for step in itertools.count():
            try:
                async with asyncio.timeout(60.0):
                    groups = await driver.rollout(step, data, **call)
            except Exception as error:
                errors.append(error)
                trouble.is_over = True
                continue
            if not groups:
                break
            assert {sample.reward for sample in all_samples(groups)} == {1.0}
            trained += numbers(groups)
        stream = driver.stream_of(data)
        assert stream.auditor.findings(stream.pending) == []
    assert trained == list(range(1, 13))
    assert 0 < trouble.num_raised <= 24
    if where == "on_metrics":
        assert not errors
        assert f"on_metrics raised {kind.__name__}('trouble') at {__file__}:" in caplog.text
        assert "; the metrics of step 0 are lost there" in caplog.text
        return
    assert errors
    for error in errors:
        name = "the source of prompt 4" if where == "the source" else where.partition(",")[0]
        assert isinstance(error, RolloutError)
        assert f"{name} raised {kind.__name__}" in str(error)
        assert isinstance(error.__cause__, kind)


@virtual_time
async def test_a_reward_that_raises_cancelled_error_fails_its_sample_and_is_tried_again() -> None:
    trouble = Trouble(asyncio.CancelledError)

    def reward(sample: Sample) -> float:
        trouble.is_over = trouble.num_raised == 1
        trouble()
        return 1.0

    may_fail = RolloutOptions(max_failed_share=1.0)
    of: dict[str, Any] = {**BATCH, "num_groups": 1, "group_size": 1}
    async with driving(engines(0.01), hooks=Hooks(reward=reward, reward_tries=2)) as (driver, _):
        groups = await driver.rollout(0, source(4), options=may_fail, **of)
        assert groups[0].samples[0].reward == 1.0
    trouble.num_raised = 0
    async with driving(engines(0.01), hooks=Hooks(reward=reward)) as (driver, _):
        groups = await driver.rollout(0, source(4), options=may_fail, **of)
    sample = groups[0].samples[0]
    assert sample.error.startswith(f"reward raised CancelledError('trouble') at {__file__}:")
    assert "trouble()" in sample.traceback


@virtual_time
async def test_on_sample_that_raises_stops_no_other_sample() -> None:
    seen = list[Sample]()

    def look(sample: Sample) -> None:
        seen.append(sample)
        if len(seen) == 1:
            raise RuntimeError("no screen")

    async with driving(engines(0.01, 0.05)) as (driver, client):
        data = source(3, num_epochs=1)
        options = RolloutOptions(mode="async")
        with pytest.raises(RolloutError, match=r"on_sample raised RuntimeError\('no screen'\) at "):
            await driver.rollout(0, data, options=options, on_sample=look, **BATCH)
        groups = await driver.rollout(0, data, options=options, on_sample=look, **BATCH)
        assert not client.aborted
    assert numbers(groups) == [1, 2, 3]
    assert len(client.requests) == len(seen) == 6


@virtual_time
async def test_post_process_is_called_with_what_the_samples_were_rewarded_with() -> None:
    """Also after a call that failed, or that was cancelled behind the hook."""
    seen = list[float]()

    def halve(groups: Any) -> None:
        for sample in all_samples(groups):
            seen.append(sample.reward)
            sample.reward /= 2
            sample.output_ids.append(1)
            sample.metadata["is_halved"] = True
        if len(seen) == 6:
            raise RuntimeError("once")

    async def hang() -> dict[str, float]:
        await forever()
        raise AssertionError

    hooks = Hooks(reward=lambda sample: 4.0, post_process=halve)
    async with driving(engines(0.01), hooks=hooks) as (driver, client):
        data, metrics = source(6), client.server_metrics
        with pytest.raises(RolloutError, match=r"post_process raised RuntimeError\('once'\)"):
            await driver.rollout(0, data, **BATCH)
        client.server_metrics = hang
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5.0):
                await driver.rollout(0, data, **BATCH)
        client.server_metrics = metrics
        groups = await driver.rollout(0, data, **BATCH)
    assert seen == [4.0] * 18
    assert [group.rewards for group in groups] == [[2.0, 2.0]] * 3
    assert {len(sample.output_ids) for sample in all_samples(groups)} == {11}
    assert len(client.requests) == 6


@pytest.mark.parametrize("kind", ENDS_CALL)
@pytest.mark.parametrize("where", ["reward", "reward, later", "generate", "on_sample"])
def test_a_hook_that_exits_ends_the_call_of_a_blocking_driver_which_can_be_closed(
    where: str, kind: type[BaseException], threads_left: Callable[[], list[str]]
) -> None:
    # Once: of two samples at a time, the second may raise when the call has ended for the first.
    trouble = Trouble(kind, once=True)
    hooks = in_hooks(where, trouble)
    client = FakeGenerationClient(engines(0.001))
    on_sample = trouble if where == "on_sample" else None
    with Driver("http://nowhere", hooks=hooks, client=client, adapt_every_s=None) as driver:
        data = source(6)
        with pytest.raises(RolloutError, match=f"{where.partition(',')[0]} raised") as caught:
            driver.rollout(0, data, on_sample=on_sample, **BATCH).result(20)
        assert isinstance(caught.value.__cause__, kind)
        groups = driver.rollout(0, data, on_sample=on_sample, **BATCH).result(20)
        assert numbers(groups) == [1, 2, 3]
    assert threads_left() == []


@pytest.fixture
def threads_left() -> Callable[[], list[str]]:
    before = set(threading.enumerate())

    def left() -> list[str]:
        return [
            thread.name
            for thread in set(threading.enumerate()) - before
            if not thread.name.startswith("asyncio")
        ]

    return left


def test_a_task_of_a_hook_that_exits_ends_the_call_too() -> None:
    """Asyncio lets such a task end its event loop."""

    async def reward(sample: Sample) -> float:
        async def leave() -> None:
            raise SystemExit(3)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(leave())
        return 1.0

    client = FakeGenerationClient(engines(0.001))
    with Driver("http://nowhere", reward, client=client, adapt_every_s=None) as driver:
        with pytest.raises(RolloutError, match=r"reward raised SystemExit\(3\)") as caught:
            driver.rollout(0, source(6), **BATCH).result(20)
        assert isinstance(caught.value.__cause__, SystemExit)
