"""No loss and no duplicates, under engine failures, aborts, pauses, a closed gate and restarts."""

import asyncio
import contextlib
import json
import random
import tempfile
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines.fake import FakeEngine
from engines.protocol import SamplingParams
from engines.protocol.errors import EngineError
from rollout.core.errors import RolloutError
from rollout.core.samples import all_samples
from rollout.driver.client.retry import RetryPolicy
from rollout.driver.driver import RolloutDriver
from rollout.driver.stream import journal
from rollout.driver.stream.audit import Auditor
from rollout.driver.stream.hooks import Hooks
from rollout.driver.stream.options import RolloutOptions
from tests.support.driving import numbers, push, source
from tests.support.fake_generation_client import FakeGenerationClient
from tests.support.virtual_time import VirtualTimeLoop, pass_time

NUM_PROMPTS = 40
SAMPLING = SamplingParams(max_new_tokens=6)


@pytest.mark.parametrize(
    ("acts", "pending", "finding"),
    [
        ([("take", 0), ("deliver", 0)], [], None),
        ([("take", 0)], [0], None),
        ([("take", 0), ("drop", 0, "x")], [], None),
        ([("take", 0)], [], "prompt 0: delivered 0 times, dropped 0 times, pending 0 times"),
        ([("take", 0), ("deliver", 0), ("deliver", 0)], [], "delivered 2 times"),
        ([("take", 0), ("deliver", 0)], [0], "delivered 1 times, dropped 0 times, pending 1"),
        ([("take", 0)], [0, 0], "pending 2 times"),
        ([("take", 0), ("drop", 0, "x"), ("drop", 0, "y")], [], "dropped twice"),
        ([("take", 0), ("take", 0)], [0], "prompt 0 was taken, but 1 was expected"),
        ([], [3], "prompt 3 was never taken"),
    ],
)
def test_the_auditor_finds_what_is_wrong(acts, pending, finding: str | None) -> None:
    auditor = Auditor()
    for act, *arguments in acts:
        getattr(auditor, act)(*arguments)
    found = auditor.findings(pending)
    assert found == [] if finding is None else finding in found[0]


def test_the_auditor_is_restored_from_its_state() -> None:
    auditor = Auditor()
    auditor.take(0)
    auditor.take(1)
    auditor.deliver(0)
    state = json.loads(json.dumps(auditor.state_dict()))
    auditor.deliver(1)
    auditor.load_state_dict(state)
    assert auditor.findings([1]) == []
    assert auditor.findings([]) != []


def run(world: Callable[[], "World"]) -> None:
    async def run_it() -> None:
        await world().run()

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(run_it())


class World:
    """Engines, a driver, a trainer with checkpoints, and faults injected into them.

    Attributes:
        trained: prompts whose groups the trainer has, as it remembers them.
    """

    def __init__(
        self, seed: int, options: RolloutOptions, num_groups: int, journal: Path | None = None
    ) -> None:
        self.journal = journal
        self.random = random.Random(seed)
        self.client = FakeGenerationClient([self.new_engine(i) for i in range(3)])
        self.client.weight_version = self.version = 0
        self.options = options
        self.batch: dict[str, Any] = {
            "num_groups": num_groups,
            "group_size": 2,
            "sampling": SAMPLING,
        }
        self.trained: list[int] = []
        self.saved: tuple[list[int], str, int] | None = None
        self.num_new = 3
        self.start()

    def new_engine(self, number: int) -> FakeEngine:
        version = str(getattr(self, "version", 0))
        speed = self.random.choice([0.01, 0.02, 0.07])
        return FakeEngine(f"fake-{number}", token_s=speed, weight_version=version)

    def start(self) -> None:
        """A new driver that continues from the last checkpoint."""
        hooks = Hooks(
            reward=self.reward, group_filter=lambda group: group.metadata["number"] % 7 != 0
        )
        self.source = source(NUM_PROMPTS, num_epochs=1, seed=5)
        self.driver = RolloutDriver(
            "http://nowhere",
            hooks=hooks,
            client=self.client,
            adapt_every_s=None,
            max_in_flight=self.random.choice([3, 8, 100]),
            retry_policy=RetryPolicy(max_lost=2, unavailable_s=3.0),
            journal=self.journal,
        )
        if self.saved is None:
            self.trained = []
        else:
            self.trained, state = list(self.saved[0]), self.saved[1]
        if self.saved is not None and self.journal is None:
            self.driver.restore(self.source, json.loads(state), **self.batch, options=self.options)

    def reward(self, sample) -> float:
        if self.random.random() < 0.01:
            raise RuntimeError("the reward failed")
        return 1.0

    async def step(self, number: int) -> bool:
        """Train on one batch; whether there may be more."""
        try:
            groups = await self.driver.rollout(
                number, self.source, options=self.options, **self.batch
            )
        except RolloutError:
            self.check()
            return True
        for sample in all_samples(groups):
            sample.check()
            assert sum(sample.mask) == len(sample.output_ids) == 6
        self.trained += numbers(groups)
        self.check()
        return bool(groups)

    def check(self) -> None:
        stream = self.driver.stream_of(self.source)
        assert stream.auditor.findings(stream.pending) == []

    def checkpoint(self, number: int) -> None:
        state = json.dumps(self.driver.state_of(self.source))
        self.saved = (list(self.trained), state, number)

    async def crash(self) -> None:
        if self.journal is not None:  # and nothing more is written, as after SIGKILL
            for stream in self.driver._streams.values():
                assert stream._journal is not None
                stream._journal._line = lambda changes, step: None
        await self.driver.close()
        self.start()

    async def disturb(self) -> None:
        """Inject one fault, or do one thing to the engines."""
        living = [engine for engine in self.client.engines if not engine.is_dead]
        match self.random.choice(["die", "abort", "push", "close", "hold", "nothing"]):
            case "die" if living:
                victim = self.random.choice(living)
                victim.die("a planned death")
                await pass_time(self.random.random())
                self.client.engines.remove(victim)
                self.client.engines.append(self.new_engine(self.num_new))
                self.num_new += 1
            case "abort":
                for engine in living:
                    with contextlib.suppress(EngineError):
                        await engine.abort_request()
            case "push":
                self.version += 1
                with contextlib.suppress(EngineError):
                    await push(self.client, self.version, 0.1)
                self.client.open()
            case "close":
                self.client.is_closed = True
                await pass_time(self.random.random() * 5)
                self.client.is_closed = False
            case "hold":
                self.client.hold()
                await pass_time(self.random.random())
                self.client.open()

    async def disturb_all_the_time(self) -> None:
        while True:
            await pass_time(self.random.random() * 0.5)
            await self.disturb()

    async def run(self) -> None:
        trouble = asyncio.create_task(self.disturb_all_the_time())
        number = 0
        for count in range(400):
            if count == 40:
                trouble.cancel()
                await asyncio.wait([trouble])
                self.stop_faults()
            if not await self.step(number):
                break
            if self.random.random() < 0.3:
                self.checkpoint(number)
            number += 1
            may_crash = self.saved is not None or self.journal is not None
            if count < 40 and self.random.random() < 0.15 and may_crash:
                await self.crash()
                number = 0 if self.saved is None else self.saved[2] + 1
        else:
            raise AssertionError("the source does not end")
        trouble.cancel()
        await asyncio.wait([trouble])
        stream = self.driver.stream_of(self.source)
        assert stream.pending == []
        dropped = stream.auditor.dropped
        await self.driver.close()
        assert len(self.trained) == len(set(self.trained))
        assert len(self.trained) + len(dropped) == NUM_PROMPTS
        if self.options.max_version_lag is None:
            expected = [number for number in range(1, NUM_PROMPTS + 1) if number % 7]
            assert sorted(self.trained) == expected
        assert self.client.num_in_flight == 0

    def stop_faults(self) -> None:
        """Inject no more faults, so that the run ends."""
        self.client.is_closed = False
        self.client.open()
        self.client.engines = [self.new_engine(100 + i) for i in range(2)]


RUNS = {
    "seed": st.integers(0, 2**32),
    "mode": st.sampled_from(["sync", "one_ahead", "async"]),
    "over_sampling": st.sampled_from([1.0, 1.5, 3.0]),
    "partial": st.booleans(),
    "max_version_lag": st.sampled_from([None, 0, 2]),
    "when_stale": st.sampled_from(["redo", "drop"]),
    "num_groups": st.integers(1, 9),
}
PROFILE = settings(
    max_examples=settings.default.max_examples // 2,  # each is a run of a driver
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


@PROFILE
@given(**RUNS)
def test_every_prompt_reaches_the_trainer_exactly_once(seed, num_groups, **options) -> None:
    run(lambda: World(seed, RolloutOptions(abort_timeout_s=2.0, **options), num_groups))


@PROFILE
@given(**RUNS)
def test_with_a_journal_every_prompt_reaches_it_once_over_crashes(
    seed, num_groups, **options
) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal, "in_own_thread", at_once)
        every = RolloutOptions(abort_timeout_s=2.0, **options)
        run(lambda: World(seed, every, num_groups, Path(folder)))


def at_once(work: Callable[[], Any], name: str) -> Future[Any]:
    """Threads run in real time, of which a test in virtual time has none."""
    future: Future[Any] = Future()
    future.set_result(work())
    return future
