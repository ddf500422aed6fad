"""A fault in code of the user never becomes a wait, and never is silent, wherever it happens.

Three tables are multiplied: places with code of the user, faults, and modes; each with the first,
the middle and the last call of that code.  A tenth is in the default suite, the rest is slow.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import pytest

from engines.protocol import GenerateReply
from rollout.core.errors import RolloutError
from rollout.core.samples import Sample, SampleGroup, SampleStatus
from rollout.driver.client.generation_client import GenerationRequest
from rollout.driver.client.session import Session
from rollout.driver.data.prompt import Prompt
from rollout.driver.data.prompt_data import PromptData
from rollout.driver.driver import RolloutDriver
from rollout.driver.figures import step_figures
from rollout.driver.stream.hooks import Hooks
from rollout.driver.stream.options import RolloutOptions
from tests.support.driving import SAMPLING, engines, prompts
from tests.support.fake_generation_client import FakeGenerationClient
from tests.support.virtual_time import virtual_time
from tests.support.waits import forever

NUM_PROMPTS = 6
NUM_GROUPS = 3
GROUP_SIZE = 2
LIMIT_S = 20.0
NOT_PLANTED = -1
MANY_CALLS = 20


class Planted(Exception):
    """An error of the user."""


class Fault:
    """What goes wrong at one call of code of the user, once."""

    def __init__(self, kind: str, at: int) -> None:
        self.kind = kind
        self.at = at
        self.num_calls = 0
        self.at_s: float | None = None
        self.may_end = threading.Event()

    def now(self, value: Any, wrong: Any) -> Any:
        """What plain code returns that should return ``value``; ``wrong`` is of another type."""
        if not self._is_due():
            return value
        if self.kind == "hang in await":
            return forever()
        if self.kind == "hang in a thread":
            self.may_end.wait(30)
            return value
        return self._happen(value, wrong)

    async def later(self, value: Any, wrong: Any) -> Any:
        """The same of async code."""
        if not self._is_due():
            return value
        if self.kind == "hang in await":
            await forever()
        if self.kind == "hang in a thread":
            await asyncio.to_thread(self.may_end.wait, 30)
            return value
        return self._happen(value, wrong)

    def _is_due(self) -> bool:
        is_due = self.num_calls == self.at
        self.num_calls += 1
        if is_due and (loop := running_loop()) is not None:
            self.at_s = loop.time()
        return is_due

    def _happen(self, value: Any, wrong: Any) -> Any:
        if self.kind in RAISED:
            raise RAISED[self.kind]("planted")
        if self.kind == "wrong type":
            return wrong
        if self.kind == "NaN":
            return [math.nan] if isinstance(value, list) else math.nan
        assert self.kind == "10 s of CPU"
        if (loop := running_loop()) is not None:
            loop._jumping.now_s += 10.0
        return value


RAISED: dict[str, type[BaseException]] = {
    "Exception": Planted,
    "CancelledError": asyncio.CancelledError,
    "SystemExit": SystemExit,
    "KeyboardInterrupt": KeyboardInterrupt,
    "GeneratorExit": GeneratorExit,
}
ENDS_CALL = ("SystemExit", "KeyboardInterrupt")
FAULTS = (*RAISED, "wrong type", "NaN", "hang in await", "hang in a thread", "10 s of CPU")
MODES = ("sync", "one_ahead", "async", "list")
POSITIONS = ("first", "middle", "last")


def running_loop() -> Any:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


@dataclass
class Planting:
    """The arguments of a driver and of its calls, with the fault in one place."""

    hooks: dict[str, Any] = field(default_factory=dict)
    driver: dict[str, Any] = field(default_factory=dict)
    call: dict[str, Any] = field(default_factory=dict)
    data: Any = None


@dataclass(frozen=True)
class Place:
    """Code of the user.

    Attributes:
        name: in errors.
        becomes: what a fault there does: it fails ``samples``, ends the ``call``, is ``logged``, or
            is tried again (``retried``).
        no_meaning: faults that cannot be there, each with the reason.
    """

    name: str
    becomes: str
    plant: Callable[[Fault], Planting]
    no_meaning: dict[str, str] = field(default_factory=dict)
    is_async: bool = False


def reward_of(sample: Sample) -> float:
    return sample.metadata["number"] + len(sample.output_ids) / 100


def in_reward(fault: Fault) -> Planting:
    async def reward(sample: Sample) -> float:
        return await fault.later(reward_of(sample), "good")

    return Planting({"reward": reward})


def in_group_reward(fault: Fault) -> Planting:
    async def reward(group: SampleGroup) -> Any:
        return await fault.later([reward_of(sample) for sample in group], {0: 1.0, 1: 0.0})

    return Planting({"group_reward": reward})


def in_sample_filter(fault: Fault) -> Planting:
    def keep(sample: Sample) -> Any:
        return fault.now(True, None)

    return Planting({"sample_filter": keep})


def in_group_filter(fault: Fault) -> Planting:
    def keep(group: SampleGroup) -> Any:
        return fault.now("", None)

    return Planting({"group_filter": keep})


def in_generate(fault: Fault) -> Planting:
    async def generate(session: Session) -> None:
        await session.generate()
        await fault.later(None, None)

    return Planting({"generate": generate})


def in_tool(fault: Fault) -> Planting:
    async def tool() -> Any:
        return await fault.later([7, 7], ["seven"])

    async def generate(session: Session) -> None:
        await session.generate(replace(SAMPLING, max_new_tokens=4))
        session.observe(await tool())
        await session.generate()

    return Planting({"generate": generate})


def in_post_process(fault: Fault) -> Planting:
    def change(groups: list[SampleGroup]) -> Any:
        for group in groups:
            for sample in group:
                sample.reward = -sample.reward
        return fault.now(None, list(groups))

    return Planting({"post_process": change})


def in_on_sample(fault: Fault) -> Planting:
    return Planting(call={"on_sample": lambda sample: fault.now(None, None)})


def in_on_progress(fault: Fault) -> Planting:
    return Planting(call={"on_progress": lambda progress: fault.now(None, None)})


def in_on_metrics(fault: Fault) -> Planting:
    def write(step: int, metrics: Any) -> Any:
        return fault.now(None, None)

    return Planting(driver={"on_metrics": write})


def in_tracker(fault: Fault) -> Planting:
    def log(metrics: Any, step: int) -> Any:
        return fault.now(None, None)

    run = SimpleNamespace(log=log)
    return Planting(driver={"on_metrics": lambda step, metrics: run.log(metrics, step)})


class UserSource:
    """A source of the user."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.left = prompts(NUM_PROMPTS)

    def take(self) -> Any:
        result = self.fault.now(self.left[0] if self.left else None, {"prompt": 1})
        if isinstance(result, Prompt):
            self.left.pop(0)
        return result

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        raise NotImplementedError


def in_source(fault: Fault) -> Planting:
    return Planting(data=UserSource(fault))


class Rows:
    """Rows of the user."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault

    def __len__(self) -> int:
        return NUM_PROMPTS

    def __getitem__(self, at: int) -> Any:
        return self.fault.now({"input_ids": [at + 1], "number": at + 1}, 5)


def in_rows(fault: Fault) -> Planting:
    return Planting(data=PromptData(Rows(fault), seed=None, num_epochs=1))


def in_tokenizer(fault: Fault) -> Planting:
    def encode(text: str) -> Any:
        return fault.now([int(text)], text)

    rows = [{"prompt": str(number), "number": number} for number in range(1, NUM_PROMPTS + 1)]
    return Planting(data=PromptData(rows, encode=encode, seed=None, num_epochs=1))


class GreedyClient(FakeGenerationClient):
    """Each token depends on those before it alone, so a sample that was cut off ends as any."""

    def __init__(self) -> None:
        super().__init__(engines(0.01, 0.02))

    async def generate(self, request: GenerationRequest) -> GenerateReply:
        reply = await super().generate(request)
        first, begin = request.input_ids[0], len(request.input_ids)
        ids = tuple(first + 10 * (begin + at) for at in range(len(reply.output_ids)))
        return replace(reply, output_ids=ids)


class UserClient(GreedyClient):
    """A client of the user."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.fault = fault

    async def generate(self, request: GenerationRequest) -> Any:
        reply = await super().generate(request)
        return await self.fault.later(reply, {"text": "a"})


def in_client(fault: Fault) -> Planting:
    return Planting(driver={"client": UserClient(fault)})


SYNC = {"hang in a thread": "a plain call cannot be interrupted: test_closing.py has it named"}
RETURNS_NOTHING = {
    "wrong type": "what it returns is not used",
    "NaN": "what it returns is not used",
}
NOT_TIMED = {"10 s of CPU": "it is in a thread of its own, which has no virtual clock"}
PLACES = {
    "source": Place("the source of prompt", "call", in_source, SYNC),
    "reward": Place("reward", "samples", in_reward, is_async=True),
    "group reward": Place("group reward", "samples", in_group_reward, is_async=True),
    "sample filter": Place("sample filter", "samples", in_sample_filter, SYNC),
    "group filter": Place("group filter", "samples", in_group_filter, SYNC),
    "generate": Place("generate", "samples", in_generate, RETURNS_NOTHING, is_async=True),
    "post_process": Place("post_process", "samples", in_post_process, SYNC),
    "on_sample": Place("on_sample", "call", in_on_sample, SYNC | RETURNS_NOTHING),
    "on_progress": Place("on_progress", "call", in_on_progress, SYNC | RETURNS_NOTHING),
    "on_metrics": Place("on_metrics", "logged", in_on_metrics, RETURNS_NOTHING | NOT_TIMED),
    "tracker": Place("on_metrics", "logged", in_tracker, RETURNS_NOTHING | NOT_TIMED),
    "data set": Place("row", "call", in_rows, SYNC),
    "tokenizer": Place("encode of row", "call", in_tokenizer, SYNC),
    "tool": Place("generate", "samples", in_tool, is_async=True),
    "client": Place("the generation client", "samples", in_client, is_async=True),
}
OF_SOURCES = ("source", "data set", "tokenizer")
NOT_OF_A_LIST = "a list has its prompts before the call"


def cases() -> Iterator[tuple[str, str, str, str]]:
    yield from itertools.product(PLACES, FAULTS, MODES, POSITIONS)


def why_no_meaning(place: str, fault: str, mode: str) -> str:
    """Why a case cannot be; empty if it can."""
    if mode == "list" and place in OF_SOURCES:
        return NOT_OF_A_LIST
    return PLACES[place].no_meaning.get(fault, "")


def parameters() -> list[Any]:
    found = []
    for case in cases():
        place, fault, mode, _ = case
        name = ", ".join(case)
        if not why_no_meaning(place, fault, mode):
            marks = () if crc32(name.encode()) % 10 == 0 else (pytest.mark.slow,)
            found.append(pytest.param(*case, id=name, marks=marks))
    return found


def test_every_place_has_every_fault_or_a_reason_why_it_cannot() -> None:
    assert len(PLACES) == 15
    left_out = [case for case in cases() if why_no_meaning(*case[:3])]
    assert len(left_out) + len(parameters()) == 15 * 10 * 4 * 3
    assert len(left_out) < 0.25 * len(list(cases()))


# -- one run ------------------------------------------------------------------------------------


@dataclass
class Run:
    """What a trainer has seen of all its calls."""

    fault: Fault
    delivered: list[tuple[int, int]] = field(default_factory=list)
    samples: dict[tuple[int, int], Sample] = field(default_factory=dict)
    errors: list[tuple[Exception, float]] = field(default_factory=list)
    close_s: float = 0.0

    def trajectories(self) -> dict[tuple[int, int], Any]:
        return {
            key: (sample.output_ids, sample.output_logprobs, sample.mask, sample.reward)
            for key, sample in self.samples.items()
            if sample.status is not SampleStatus.FAILED
        }

    @property
    def failed(self) -> list[Sample]:
        return [one for one in self.samples.values() if one.status is SampleStatus.FAILED]


async def run(place: str, kind: str, at: int, mode: str, most_failed: float) -> Run:
    """All prompts through a driver, whose calls are repeated until there are no more."""
    fault = Fault(kind, at)
    planting = PLACES[place].plant(fault)
    hooks = {"reward": reward_of, "generate_timeout_s": LIMIT_S, "reward_timeout_s": LIMIT_S}
    settings = {"client": GreedyClient(), "request_timeout_s": LIMIT_S}
    settings |= planting.driver
    client = settings["client"]
    data = planting.data
    if data is None:
        rows = [{"input_ids": [one], "number": one} for one in range(1, NUM_PROMPTS + 1)]
        data = PromptData(rows, seed=None, num_epochs=1)
    batch = {"num_groups": NUM_GROUPS, "group_size": GROUP_SIZE, "sampling": SAMPLING}
    options = RolloutOptions(
        mode="sync" if mode == "list" else mode, max_failed_share=most_failed, abort_timeout_s=5.0
    )
    before, tasks = set(threading.enumerate()), asyncio.all_tasks()
    loop, found = asyncio.get_running_loop(), Run(fault)
    lists = [prompts(NUM_PROMPTS)[:NUM_GROUPS], prompts(NUM_PROMPTS)[NUM_GROUPS:]]
    driver = RolloutDriver(
        "http://nowhere", hooks=Hooks(**hooks | planting.hooks), adapt_every_s=None, **settings
    )
    for step in range(MANY_CALLS):
        of: dict[str, Any] = {"prompts": data, **batch}
        if mode == "list":
            if not lists:
                break
            of |= {"prompts": lists[0], "num_groups": None}
        try:
            groups = await driver.rollout(step, options=options, **of, **planting.call)
        except Exception as error:
            found.errors.append((error, loop.time() - (fault.at_s or 0.0)))
            continue
        if mode == "list":
            lists.pop(0)
        elif not groups:
            break
        found.delivered += [(step, group.metadata["number"]) for group in groups]
        for group in groups:
            number = group.metadata["number"]
            found.samples |= {(number, index): one for index, one in enumerate(group)}
    else:
        raise AssertionError(f"no end after {MANY_CALLS} calls: {found.errors}")
    if mode != "list":
        stream = driver.stream_of(data)
        assert stream.auditor.findings(stream.pending) == []
        assert stream.pending == []
    began_s = loop.time()
    await driver.close()
    found.close_s = loop.time() - began_s
    assert client.num_in_flight == 0
    assert asyncio.all_tasks() == tasks
    fault.may_end.set()
    left = {one for one in set(threading.enumerate()) - before if not one.name.startswith("async")}
    for thread in left:
        thread.join(5)
        assert not thread.is_alive(), f"{thread.name} is left"
    return found


CALM: dict[tuple[str, str], Run] = {}


async def calm(place: str, mode: str) -> Run:
    """The run without a fault, and with as many calls of the place as it has."""
    key = (place, mode)
    if key not in CALM:
        CALM[key] = await run(place, "Exception", NOT_PLANTED, mode, 0.0)
        assert not CALM[key].errors
        assert len(CALM[key].samples) == NUM_PROMPTS * GROUP_SIZE
    return CALM[key]


# -- what must hold -----------------------------------------------------------------------------


@pytest.mark.parametrize(("place", "fault", "mode", "position"), parameters())
@virtual_time
async def test_a_fault_of_the_user_is_named_and_costs_only_its_samples(
    place: str,
    fault: str,
    mode: str,
    position: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step_figures, "_CLOSE_S", 0.2, raising=False)
    quiet = await calm(place, mode)
    num_calls = quiet.fault.num_calls
    at = {"first": 0, "middle": num_calls // 2, "last": num_calls - 1}[position]
    becomes = expected(place, fault)
    strict = await run(place, fault, at, mode, 0.0)
    assert strict.fault.num_calls > at, "the fault was not reached"
    assert strict.close_s <= 5.0
    # Nothing is lost and nothing comes twice, and what comes is what comes without the fault.
    assert sorted(number for _, number in strict.delivered) == list(range(1, NUM_PROMPTS + 1))
    by_step = itertools.groupby(strict.delivered, key=lambda pair: pair[0])
    assert all(is_sorted(list(pairs)) for _, pairs in by_step)
    assert strict.trajectories() == quiet.trajectories()
    if becomes in ("nothing", "retried"):
        assert strict.errors == []
        return
    if becomes == "logged":
        assert strict.errors == []
        assert has_words(caplog.text, place, fault), caplog.text
        return
    (error, within_s), *more = strict.errors
    assert not more
    assert isinstance(error, RolloutError), repr(error)
    assert within_s <= 1.0 + (LIMIT_S if "hang" in fault else 0.0)
    assert has_words(str(error), place, fault), str(error)
    if fault in RAISED:
        assert isinstance(error.__cause__, RAISED[fault]), repr(error.__cause__)
    if becomes != "samples":
        return
    assert "the first, sample " in str(error)
    kind = await run(place, fault, at, mode, 1.0)
    assert kind.errors == []
    assert len(kind.failed) == NUM_FAILED.get(place, 1)
    for sample in kind.failed:
        assert sample.reward is None
        assert has_words(sample.error, place, fault), sample.error
        assert sample.traceback
    of_others = quiet.trajectories()
    assert kind.trajectories() == {key: of_others[key] for key in kind.trajectories()}


def is_sorted(values: list[Any]) -> bool:
    return values == sorted(values)


NUM_FAILED = {
    "group reward": GROUP_SIZE,
    "group filter": GROUP_SIZE,
    "post_process": NUM_GROUPS * GROUP_SIZE,
}


def expected(place: str, fault: str) -> str:
    becomes = PLACES[place].becomes
    if fault == "10 s of CPU":
        return "nothing"
    if place == "client" and "hang" in fault:
        return "nothing"  # it is sent again, as a reply that was lost
    if fault in ENDS_CALL and becomes == "samples":
        return "call"
    if becomes == "logged" and fault in ("wrong type", "NaN"):
        return "nothing"
    return becomes


def has_words(text: str, place: str, fault: str) -> bool:
    """Whether a text names the place, what happened and the line."""
    name = PLACES[place].name
    if fault == "hang in a thread" and PLACES[place].becomes == "logged":
        return f"{name} still runs" in text
    happened = {"wrong type": "", "NaN": "nan"}.get(fault, "planted")
    if "hang" in fault:
        happened = "within its limit of 20 s" if PLACES[place].is_async else "is async"
    has_line = f"{__file__}:" in text
    if place == "data set" and fault in ("wrong type", "NaN"):
        has_line, happened = True, "not a mapping"  # a row has no line, but a number
    return name in text and happened in text and has_line
