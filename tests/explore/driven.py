"""A driver with a journal beside the commands of a world, in a process that may be lost.

Its requests go through the gate as those of all clients.  When its process is lost, its connections
end with it, and another driver begins from the journal: together they deliver each prompt once.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextvars import ContextVar, copy_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.protocol import GenerateReply, SamplingParams
from rollout.driver.client.generation_client import (
    EngineLoad,
    FailureKind,
    GenerationError,
    GenerationRequest,
)
from rollout.driver.data.prompt_data import PromptData
from rollout.driver.driver import RolloutDriver
from rollout.driver.stream import journal
from tests.explore.explorer import ExploredProcess

if TYPE_CHECKING:
    from tests.explore.world import World

_GROUPS = 2
_SAMPLING = SamplingParams(max_new_tokens=2)
_real_thread = journal.in_own_thread
# In which a driver runs.
_WORLD: ContextVar[World | None] = ContextVar("world", default=None)


def _in_own_thread(work: Callable[[], Any], name: str) -> Future[Any]:
    """The real one, but in an explored loop: there the write is an event."""
    world = _WORLD.get()
    if world is None:
        return _real_thread(work, name)
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()

    async def write() -> None:
        await world.happens("journal", "driver's write", 1)
        future.set_result(work())

    asyncio.get_running_loop().create_task(write())
    return future


journal.in_own_thread = _in_own_thread


class Driving:
    """A training script that takes all prompts of a data set, over the lives of its process.

    Attributes:
        given: by step, the prompts of the batch that the script got.
        num_lives: processes of it.
    """

    def __init__(self, world: World, num_prompts: int) -> None:
        self.given: list[list[int]] = []
        self.num_lives = 0
        self._world = world
        self._num_prompts = num_prompts
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        # Of what is not in the script's process: the router and the engines.
        self._outside = copy_context()
        self._connections: list[asyncio.Task[GenerateReply]] = []
        self._driver: RolloutDriver | None = None
        self.begin()

    def begin(self) -> None:
        """Another process of the script."""
        self.num_lives += 1
        self._process: ExploredProcess = self._world.new_process()
        self._task = self._process.create_task(self._script())

    @property
    def is_done(self) -> bool:
        return self._task.done()

    def lose(self) -> None:
        """``kill -9``: the kernel closes its files and connections; then it is launched again."""
        self._process.kill()
        if self._driver is not None:
            for stream in self._driver._streams.values():
                if stream._journal is not None:
                    stream._journal._files.close()
        self._world.forget_lost()
        for connection in self._connections:
            connection.cancel()
        self._connections.clear()
        self.begin()

    async def _script(self) -> None:
        _WORLD.set(self._world)
        data = PromptData(
            [{"input_ids": [number], "number": number} for number in range(self._num_prompts)],
            seed=None,
            num_epochs=1,
        )
        driver = self._driver = RolloutDriver(
            "http://nowhere",
            lambda sample: 1.0,
            client=_Client(self),
            adapt_every_s=None,
            journal=Path(self._folder.name) / "journal",
            clock=asyncio.get_running_loop().time,
        )
        driver._watch = _NoWatch()  # type: ignore[assignment]
        step = len(self.given)
        while groups := await driver.rollout(
            step, data, num_groups=_GROUPS, group_size=1, sampling=_SAMPLING
        ):
            self.given.append([group.metadata["number"] for group in groups])
            step += 1
        stream = driver.stream_of(data)
        for why in stream.auditor.findings(stream.pending):
            self._world.violate(f"driver: {why}")
        await driver.close()

    def end(self) -> None:
        """Nothing more happens: remove the journal."""
        self._folder.cleanup()

    def wrong(self) -> str:
        """What is wrong when nothing is left that could happen; empty if nothing is."""
        if not self._task.done():
            return f"I4: the driver waits for ever, after {self.given}"
        if (error := self._task.exception()) is not None:
            return f"the driver ended with {error!r}"
        expected = [
            list(range(first, min(first + _GROUPS, self._num_prompts)))
            for first in range(0, self._num_prompts, _GROUPS)
        ]
        if self.given != expected:
            return f"the driver's lives delivered {self.given}, not {expected}"
        return ""

    async def generate(self, request: GenerationRequest) -> GenerateReply:
        """One request over a connection that ends with the process."""
        work = self._world.answer(request)
        connection = asyncio.get_running_loop().create_task(work, context=self._outside.copy())
        self._connections.append(connection)
        return await connection


class _NoWatch:
    """No thread looks at an explored loop."""

    why_blocked = ""

    def start(self) -> None:
        """It has none."""

    def close(self) -> None:
        """It has none."""


class _Client:
    """A ``GenerationClient`` whose requests are those of a world."""

    def __init__(self, driving: Driving) -> None:
        self._driving = driving
        self.generate = driving.generate

    async def abort(self, rids: Sequence[str], *, prefix: str = "") -> None:
        """No plan aborts."""

    async def load(self) -> EngineLoad | None:
        return None

    async def server_metrics(self) -> Mapping[str, float]:
        return {}

    async def report(self, figures: Mapping[str, Any]) -> None:
        """There is no page."""

    async def close(self) -> None:
        """Connections end by themselves."""


def no_reply(why: str, kind: FailureKind = FailureKind.UNAVAILABLE) -> GenerationError:
    """Why a request of a driver has no reply."""
    return GenerationError(why, kind=kind, retry_after_s=1.0)
