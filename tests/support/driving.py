"""Drivers over fake engines in memory, for tests in virtual time."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from engines.fake import FakeEngine
from engines.protocol import PauseMode, SamplingParams
from rollout.core.samples import Sample, SampleGroup
from rollout.driver.data.prompt import Prompt
from rollout.driver.data.prompt_data import PromptData
from rollout.driver.driver import RolloutDriver
from tests.support.fake_generation_client import FakeGenerationClient
from tests.support.virtual_time import pass_time

SAMPLING = SamplingParams(max_new_tokens=10)


def engines(*token_s: float) -> list[FakeEngine]:
    """One engine for each number of seconds that its tokens take."""
    return [FakeEngine(f"fake-{i}", token_s=seconds) for i, seconds in enumerate(token_s)]


def prompts(num: int) -> list[Prompt]:
    """``num`` prompts, each with its number."""
    return [Prompt((index,), {"number": index}) for index in range(1, num + 1)]


def source(num: int, **settings: Any) -> PromptData:
    """A data set of ``num`` rows in order."""
    rows = [{"input_ids": [index], "number": index} for index in range(1, num + 1)]
    return PromptData(rows, **{"seed": None, **settings})


def numbers(groups: Sequence[SampleGroup]) -> list[int]:
    """Which prompts the groups are of."""
    return [group.metadata["number"] for group in groups]


def always(value: float) -> Callable[[Sample], float]:
    return lambda sample: value


@asynccontextmanager
async def driving(
    of: Sequence[FakeEngine], reward: Any = None, **settings: Any
) -> AsyncIterator[tuple[RolloutDriver, FakeGenerationClient]]:
    client = FakeGenerationClient(of)
    settings = {"adapt_every_s": None, **settings}
    async with RolloutDriver("http://nowhere", reward, client=client, **settings) as driver:
        yield driver, client
    assert client.num_in_flight == 0


async def push(
    client: FakeGenerationClient,
    version: int,
    seconds: float = 1.0,
    mode: PauseMode = PauseMode.ABORT,
) -> None:
    """What a server does for new weights: hold requests, pause, update, continue, open."""
    client.hold()
    for engine in client.engines:
        await engine.pause_generation(mode)
    await pass_time(seconds)
    for engine in client.engines:
        await engine.update_weight_version(str(version))
        await engine.continue_generation()
    client.weight_version = version
    client.open()
