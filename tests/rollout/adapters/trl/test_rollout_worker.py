"""The worker's thread: its samples, its versions, and how it ends."""

import asyncio
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from engines.protocol import FinishReason, GenerateReply
from engines.protocol.types import VersionSpan
from rollout.adapters.trl import RolloutWorker, WeightTransfer
from rollout.adapters.trl.judged_groups import GroupSampler, oldest_version
from rollout.core.errors import ConfigError, LifecycleError, RolloutError, WeightMismatch
from rollout.core.pending import LoopThread, Pending
from tests.support.waits import until

REPLY = GenerateReply(
    "1", "", (5, 6), (-0.5, -0.25), FinishReason("stop"), weight_versions=(VersionSpan("7", 0, 2),)
)

LOOPS: list[LoopThread] = []


@pytest.fixture(autouse=True)
def loops_are_closed() -> Iterator[None]:
    yield
    while LOOPS:
        LOOPS.pop().close()


class Policy:
    """Answers at once, or holds every request until it is aborted."""

    def __init__(self, *, holds: bool = False) -> None:
        self.weight_version = 7
        self.reply = REPLY
        self._holds = holds
        self._aborted: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._loop = LoopThread("policy")
        LOOPS.append(self._loop)

    def generate(
        self, prompts: list[Any], *_: Any, request_id: str, logprob_kind: str, **__: Any
    ) -> Pending[Any]:
        assert logprob_kind == "full"

        async def reply() -> list[GenerateReply]:
            if self._holds:
                await self._aborted[request_id].wait()
            return [self.reply] * len(prompts)

        return self._loop.submit(reply())

    def abort(self, request_id: str) -> Pending[None]:
        async def abort() -> None:
            self._aborted[request_id].set()

        return self._loop.submit(abort())

    def status(self) -> Any:
        found = SimpleNamespace(gate="closed", phase="paused")
        return SimpleNamespace(result=lambda: found)


class Tokenizer:
    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [len(text)]}

    def apply_chat_template(self, prompt: list[Any], **_: Any) -> list[int]:
        return [1, len(prompt)]

    def decode(self, ids: Any, **_: Any) -> str:
        return " ".join(map(str, ids))


ARGS = SimpleNamespace(
    queue_maxsize=4,
    num_generations=2,
    max_inflight_tasks=4,
    request_timeout=60,
    chat_template_kwargs=None,
    max_completion_length=8,
    temperature=1.0,
    top_p=1.0,
    top_k=0,
    min_p=None,
    repetition_penalty=1.0,
)


def worker(
    policy: Policy, reward: Callable[..., Any], prompt: Any = "ask", rows: Any = None
) -> RolloutWorker:
    rows = [{"prompt": prompt, "answer": "5 6"}] if rows is None else rows
    made = RolloutWorker(policy, rows, reward, Tokenizer(), ARGS)  # type: ignore[arg-type]
    made.update_model_version(2)
    return made


def always_right(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    return [1.0] * len(completions)


@pytest.fixture
def running(loops_are_closed: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    started: list[RolloutWorker] = []

    def start(one: RolloutWorker) -> RolloutWorker:
        started.append(one)
        one.start()
        return one

    yield start
    for one in started:
        one.stop()


@pytest.mark.slow  # imports TRL
def test_a_sample_has_what_trl_trains_on(running: Callable[..., RolloutWorker]) -> None:
    pytest.importorskip("trl")
    seen: list[dict[str, Any]] = []

    async def second_is_better(**arguments: Any) -> list[float]:
        seen.append(arguments)
        return [0.0, 1.0]

    messages = [{"role": "user", "content": "ask"}]
    one = running(worker(Policy(), second_is_better, messages))
    first, second = one.rollout_buffer.get(timeout=30), one.rollout_buffer.get(timeout=30)
    assert seen[0]["prompts"] == [messages] * 2
    assert seen[0]["completion_ids"] == [[5, 6]] * 2
    assert seen[0]["answer"] == ["5 6"] * 2
    assert first.completion == [{"role": "assistant", "content": "5 6"}]
    assert first.input_ids.tolist() == [1, 1, 5, 6]
    assert first.completion_mask.tolist() == [0, 0, 1, 1]
    assert first.old_log_probs.tolist() == [0.0, 0.0, -0.5, -0.25]
    assert (first.advantage, second.advantage) == pytest.approx((-1.0, 1.0))
    assert second.metrics["rewards/second_is_better"] == 1.0
    # The trainer's version 2 is the server's version 7.
    assert first.model_version == 2
    assert one.metrics_queue.get(timeout=30)["completions/mean_length"] == (4, 2)
    one.check_health(60)


@pytest.mark.slow  # imports TRL
def test_a_full_buffer_holds_the_worker_up(running: Callable[..., RolloutWorker]) -> None:
    pytest.importorskip("trl")
    one = running(worker(Policy(), always_right))
    for _ in range(12):
        one.rollout_buffer.get(timeout=30)
    assert one.rollout_buffer.qsize() <= 4


def test_stop_aborts_what_is_under_way() -> None:
    policy = Policy(holds=True)
    one = worker(policy, always_right)
    one.start()
    one.stop()
    with pytest.raises(queue.Empty):
        one.rollout_buffer.get_nowait()
    one.check_health(60)


def test_an_error_of_a_reward_function_reaches_the_trainer(
    running: Callable[..., RolloutWorker], caplog: pytest.LogCaptureFixture
) -> None:
    def broken(**_: Any) -> list[float]:
        raise ValueError("no judge today")

    one = running(worker(Policy(), broken))
    assert one._thread is not None
    one._thread.join(30)
    with pytest.raises(ValueError, match="no judge today"):
        one.check_health(60)
    assert "the rollout worker has failed" in caplog.text


def stories(num: int) -> Iterator[dict[str, str]]:
    for _ in range(num):
        yield {"prompt": "ask", "answer": "5 6"}


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([], "dataset: it has no rows; give a list"),
        (stories(0), "dataset: it has no rows; give a list"),
        (stories(1), "dataset: it gave no row when it was read again, as a generator does"),
    ],
    ids=["an empty list", "an empty generator", "a generator that ends"],
)
def test_a_data_set_that_ends_reaches_the_trainer_by_name(
    running: Callable[..., RolloutWorker], rows: Any, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    one = running(worker(Policy(), always_right, rows=rows))
    assert one._thread is not None
    one._thread.join(10)
    with pytest.raises(ConfigError, match=why):
        one.check_health(60)
    one.stop()
    for thread in threading.enumerate():
        if thread.name.startswith("trl-"):
            thread.join(10)
            assert not thread.is_alive()
    assert "StopIteration" not in caplog.text


def test_a_data_set_that_takes_its_time_holds_no_other_group_up(
    running: Callable[..., RolloutWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end, is_judged = threading.Event(), threading.Event()

    async def judged(*_: Any) -> list[Any]:
        is_judged.set()
        return []

    monkeypatch.setattr(GroupSampler, "_judged", judged)

    def slow() -> Iterator[dict[str, str]]:
        yield from stories(1)
        may_end.wait()
        yield from stories(1)

    try:
        one = running(worker(Policy(), always_right, rows=slow()))
        assert is_judged.wait(30)
        before = one._alive_at
        asyncio.run(until(lambda: one._alive_at > before))
    finally:
        may_end.set()


def test_a_group_in_the_middle_of_a_push_has_one_of_the_two_pairs_of_versions() -> None:
    """The trainer's thread writes the versions, and the worker's reads them at any moment."""

    class Watched(GroupSampler):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if self.__dict__.get("is_watched"):
                asyncio.run(self.group(0, {"prompt": "ask", "answer": "5 6"}))

        async def _judged(self, *of: Any) -> list[Any]:
            seen.extend(of[-1])
            return []

    seen: list[int] = []
    policy = Policy()
    sampler = Watched(policy, [always_right], Tokenizer(), ARGS, [], queue.Queue())  # type: ignore[arg-type]
    sampler.set_model_version(2)
    policy.weight_version = 8
    policy.reply = replace(REPLY, weight_versions=(VersionSpan("8", 0, 2),))
    vars(sampler)["is_watched"] = True
    sampler.set_model_version(3)
    assert seen
    assert set(seen) == {3}


def test_an_engine_with_old_weights_reaches_the_trainer(
    running: Callable[..., RolloutWorker],
) -> None:
    policy = Policy()
    policy.reply = replace(REPLY, weight_versions=(VersionSpan("6", 0, 2),))
    one = running(worker(policy, always_right))
    assert one._thread is not None
    one._thread.join(30)
    with pytest.raises(WeightMismatch, match="version 6, but the engines had version 7"):
        one.check_health(60)


def test_a_worker_that_hangs_is_reported() -> None:
    one = worker(Policy(), always_right)
    one._alive_at = time.monotonic() - 100
    with pytest.raises(RolloutError, match="was not active for 100 s, of at most 60 s"):
        one.check_health(60)


def test_the_oldest_version_counts() -> None:
    reply = replace(REPLY, weight_versions=(VersionSpan("7", 0, 1), VersionSpan("8", 1, 2)))
    assert oldest_version(reply, 7) == 7
    with pytest.raises(WeightMismatch, match="version 7, 8, but the engines had version 8"):
        oldest_version(reply, 8)


def test_weights_need_a_transfer_and_engines_that_serve() -> None:
    transfer = WeightTransfer(Policy())  # type: ignore[arg-type]
    with pytest.raises(LifecycleError, match="send_weights before init_weight_transfer"):
        transfer.send_weights(iter([]))
    with pytest.raises(LifecycleError, match="the gate is closed, the phase paused"):
        transfer.resume()
    transfer.destroy()
