"""Samples through a handle, over fake engines: shapes, lost engines, aborts, streams."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

import rollout
from engines.fake.engine import fake_engine
from engines.fake.http_fake import HttpFakeLauncher
from engines.fake.launcher import make_engine
from engines.protocol import VersionSpan
from rollout.core.errors import GenerationFailed
from rollout.driver.client import http_client
from rollout.runtime.calls import sample_client
from rollout.runtime.handle import DeploymentHandle, ServerHandle, server_handle
from rollout.runtime.local import launch_local
from tests.support import builders
from tests.support.processes import wait_until
from tests.support.served_fakes import TIMEOUT_S, ServedEngine, config, engines_of

TWO = {"main": {"num_engines": 2}}
LONG = rollout.SamplingParams(max_new_tokens=400)
TOKEN_S = 0.005
CONTEXT = 600


slow_engine = partial(make_engine, token_s=TOKEN_S, context_length=CONTEXT)


@contextmanager
def launched(folder: Path, **more: Any) -> Iterator[DeploymentHandle]:
    handle = launch_local(config(folder, TWO, **more), launcher=HttpFakeLauncher(slow_engine))
    try:
        yield handle
    finally:
        handle.stop()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[DeploymentHandle]:
    with launched(tmp_path, run_id="exp", server={"router": {"client_key": "k"}}) as handle:
        yield handle


@pytest.fixture
def policy(run: DeploymentHandle) -> ServerHandle:
    return run["policy"]


def tokens(prompt: Sequence[int], num: int) -> tuple[int, ...]:
    """What a fake makes of a prompt, on one engine or on several."""
    return tuple((sum(prompt) + 7 * position) % 1000 for position in range(num))


def num_running(engine: ServedEngine) -> int:
    loads = engine._client.get("/v1/loads").json()["loads"]
    return sum(one["num_running_reqs"] for one in loads)


def with_requests(policy: ServerHandle, num: int) -> Callable[[], bool]:
    def has() -> bool:
        with engines_of(policy) as engines:
            return sum(map(num_running, engines.values())) == num

    return has


# -- shapes ---------------------------------------------------------------------------------------


def test_one_prompt_gives_one_reply_and_several_give_a_list(policy: ServerHandle) -> None:
    short = rollout.SamplingParams(max_new_tokens=3)
    reply = policy.generate([1, 2], short, request_id="one").result(TIMEOUT_S)
    assert (reply.rid, reply.output_ids) == ("one", tokens([1, 2], 3))
    assert reply.output_logprobs == (-1.0,) * 3
    assert reply.weight_versions == (VersionSpan("0", 0, 3),)
    assert reply.finish_reason is not None
    assert reply.finish_reason.kind == "length"
    assert reply.input_logprobs is None
    two = rollout.SamplingParams(max_new_tokens=3, n=2)
    replies = policy.generate([[1, 2], [5]], two).result(TIMEOUT_S)
    assert [one.output_ids for one in replies] == [tokens([1, 2], 3)] * 2 + [tokens([5], 3)] * 2


async def test_a_coroutine_awaits_the_same_call(policy: ServerHandle) -> None:
    short = rollout.SamplingParams(max_new_tokens=2)
    one, several = await asyncio.gather(
        policy.generate([3], short), policy.generate([[3], [4]], short)
    )
    assert one.output_ids == several[0].output_ids == tokens([3], 2)
    assert several[1].output_ids == tokens([4], 2)


def test_another_process_gets_samples(run: DeploymentHandle) -> None:
    child = (
        "import sys, rollout\n"
        "policy = rollout.connect(sys.argv[1])['policy']\n"
        "short = rollout.SamplingParams(max_new_tokens=2)\n"
        "print(*policy.generate([1, 2], short).result(30).output_ids)\n"
        "print(len(policy.generate([[1]] * 5, short).result(30)))\n"
        "print(sum(1 for part in policy.stream([1], short)) > 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", child, str(Path(run.config.log_dir) / "exp")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split() == [*map(str, tokens([1, 2], 2)), "5", "True"], done.stderr
    assert not done.stderr


def test_a_pickled_handle_gets_samples(policy: ServerHandle) -> None:
    short = rollout.SamplingParams(max_new_tokens=2)
    assert policy.generate([7], short).result(TIMEOUT_S)
    other = pickle.loads(pickle.dumps(policy))
    assert other.generate([7], short).result(TIMEOUT_S).output_ids == tokens([7], 2)


# -- what goes wrong ------------------------------------------------------------------------------


def test_a_malformed_prompt_is_named_before_anything_is_sent(policy: ServerHandle) -> None:
    prompts: list[list[Any]] = [[1, 2] for _ in range(64)]
    prompts[17] = [1, "x"]
    with pytest.raises(TypeError, match=r"token_ids\[17\]\[1\] = 'x': must be a whole number"):
        policy.generate(prompts)
    prompts[17] = []
    with pytest.raises(ValueError, match=r"token_ids\[17\] has no tokens"):
        policy.generate(prompts)
    with engines_of(policy) as engines:
        assert not any(engine.requests("/generate") for engine in engines.values())


def test_a_prompt_that_an_engine_refuses_costs_no_other_prompt_its_reply(
    policy: ServerHandle,
) -> None:
    prompts = [[number] for number in range(64)]
    prompts[17] = [1] * CONTEXT
    with pytest.raises(GenerationFailed, match="1 of 64 requests failed; request 17: ") as caught:
        policy.generate(prompts, rollout.SamplingParams(max_new_tokens=2)).result(TIMEOUT_S)
    error = pickle.loads(pickle.dumps(caught.value))
    assert list(error.failures) == [17]
    assert "600 tokens" in error.failures[17]
    for number, reply in enumerate(error.replies):
        assert (reply is None) == (number == 17)
        assert reply is None or reply.output_ids == tokens([number], 2)


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"token_ids": "text"}, TypeError, "token_ids = 'text': must be a list of token ids"),
    ({"token_ids": 5}, TypeError, "token_ids = 5"),
    ({"token_ids": []}, ValueError, "token_ids has no tokens"),
    ({"token_ids": [1.5]}, TypeError, r"token_ids\[0\] = 1.5"),
    ({"token_ids": [-1]}, ValueError, r"token_ids\[0\] = -1: must be at least 0"),
    ({"token_ids": [[1], 2]}, TypeError, r"token_ids\[1\] = 2"),
    ({"sampling": {"top_p": 1}}, TypeError, "sampling = {'top_p': 1}: must be SamplingParams"),
    ({"sampling": rollout.SamplingParams(n=2)}, ValueError, "n = 2: must be 1 for one prompt"),
    ({"timeout_s": 0}, ValueError, "timeout_s = 0"),
    ({"top_logprobs": -1}, ValueError, "top_logprobs = -1"),
    ({"prompt_logprobs": 1}, TypeError, "prompt_logprobs = 1: must be True or False"),
    ({"routed_experts": "all"}, TypeError, "routed_experts = 'all'"),
    ({"lora_path": 7}, TypeError, "lora_path = 7"),
    ({"affinity": 7}, TypeError, "affinity = 7"),
    ({"token_ids": [[1], [2]], "image_data": ["a"]}, ValueError, "the images of each of 2"),
]


@pytest.mark.parametrize(("change", "kind", "said"), WRONG)
def test_a_wrong_argument_is_named(
    policy: ServerHandle, change: dict[str, Any], kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        policy.generate(**{"token_ids": [1]} | change)


def test_a_stream_of_several_prompts_and_an_abort_of_nothing_are_refused(
    policy: ServerHandle,
) -> None:
    with pytest.raises(ValueError, match="stream takes one prompt"):
        policy.stream([[1], [2]])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="request_id = ''"):
        policy.abort("")
    policy.abort("unknown").result(TIMEOUT_S)


def test_a_late_reply_is_given_up_and_ends_at_its_engine(policy: ServerHandle) -> None:
    with pytest.raises(GenerationFailed, match=r"no reply within 0\.2 s"):
        policy.generate([1], LONG, timeout_s=0.2).result(TIMEOUT_S)
    assert wait_until(with_requests(policy, 0), TIMEOUT_S)


def test_requests_fail_with_the_reason_when_the_run_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_client, "_RECONNECT_S", 0.1)
    with launched(tmp_path) as run:
        policy = run["policy"]
        assert policy.url
        policy.generate([1], rollout.SamplingParams(max_new_tokens=1)).result(TIMEOUT_S)
        client = policy._sample_client()
        policy._samples = client
    policy._samples = client
    with pytest.raises(GenerationFailed, match="the request failed: "):
        policy.generate([1]).result(TIMEOUT_S)


# -- lost engines and new weights -----------------------------------------------------------------


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_request_survives_its_engine(policy: ServerHandle, is_streamed: bool) -> None:
    with engines_of(policy) as engines:
        for engine in engines.values():  # the one that gets the request dies after 100 tokens
            engine._post("/fake/fault", fault="generate#1:die@100")
        sampling = rollout.SamplingParams(max_new_tokens=150)
        if is_streamed:
            *_, reply = policy.stream([1, 2], sampling)
        else:
            reply = policy.generate([1, 2], sampling).result(TIMEOUT_S)
    assert len(reply.output_ids) == 150
    assert reply.output_logprobs is not None
    assert len(reply.output_logprobs) == 150
    assert reply.num_failovers == 1
    assert reply.weight_versions == (VersionSpan("0", 0, 150),)
    assert reply.output_ids[:60] == tokens([1, 2], 60)


def test_a_request_that_a_push_interrupts_has_a_span_of_each_version(policy: ServerHandle) -> None:
    stream = policy.stream([1, 2], LONG)
    parts = iter(stream)
    assert any(len(part.output_ids) > 20 for part in parts)
    pending = policy.push(builders.push(1))
    *_, reply = parts
    assert pending.result(TIMEOUT_S).weight_version == 1
    first, second = reply.weight_versions
    assert (first.version, second.version) == ("0", "1")
    assert first.end == second.start
    assert (first.start, second.end) == (0, 400)
    assert reply.output_logprobs is not None
    assert len(reply.output_logprobs) == 400


# -- aborts and streams ---------------------------------------------------------------------------


def test_another_handle_aborts_a_running_batch_and_nothing_else(policy: ServerHandle) -> None:
    other = pickle.loads(pickle.dumps(policy))
    batch = policy.generate([[1], [2], [3]], LONG, request_id="batch")
    alone = policy.generate([4], rollout.SamplingParams(max_new_tokens=200), request_id="batch-1")
    assert wait_until(with_requests(policy, 4), TIMEOUT_S)
    other.abort("batch").result(TIMEOUT_S)
    for reply in batch.result(TIMEOUT_S):
        assert reply.finish_reason is not None
        assert reply.finish_reason.kind == "abort"
        assert len(reply.output_ids) == len(reply.output_logprobs or ()) < 400
    assert len(alone.result(TIMEOUT_S).output_ids) == 200


def test_a_request_that_is_held_is_aborted_without_tokens(policy: ServerHandle) -> None:
    policy.offload().result(TIMEOUT_S)
    pending = policy.generate([1], LONG, request_id="held")
    with httpx.Client(headers={"authorization": "Bearer k"}, trust_env=False) as http:
        gate = lambda: http.get(f"{policy.url}/engines").json()["gate"]  # noqa: E731
        assert wait_until(lambda: gate()["num_held"] == 1, TIMEOUT_S)
    policy.abort("held").result(TIMEOUT_S)
    reply = pending.result(TIMEOUT_S)
    assert (reply.rid, reply.output_ids) == ("held", ())
    assert reply.finish_reason is not None
    assert reply.finish_reason.kind == "abort"


def test_an_abort_ends_what_its_call_has_not_sent_yet(
    policy: ServerHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_client, "_MOST_AT_ONCE", 4)
    batch = policy.generate([[1]] * 40, LONG, request_id="batch")
    policy.abort("batch").result(TIMEOUT_S)
    assert batch.done()
    kinds = {reply.finish_reason and reply.finish_reason.kind for reply in batch.result(TIMEOUT_S)}
    assert kinds == {"abort"}


def test_a_stream_is_aborted_with_its_tokens(policy: ServerHandle) -> None:
    parts = iter(policy.stream([1, 2], LONG, request_id="mine"))
    next(parts)
    policy.abort("mine").result(TIMEOUT_S)
    *_, last = parts
    assert last.finish_reason is not None
    assert last.finish_reason.kind == "abort"
    assert last.output_ids == tokens([1, 2], len(last.output_ids))
    assert len(last.output_ids) < 400


def test_a_stream_over_several_pushes_fails_over_once_for_each(
    policy: ServerHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_engine, "_ABORTED_BEHIND_STREAM_S", 0.2)
    parts = iter(policy.stream([1, 2], rollout.SamplingParams(max_new_tokens=500)))
    for version in (1, 2, 3):
        so_far = len(next(parts).output_ids)
        assert any(len(part.output_ids) > so_far + 60 for part in parts)
        policy.push(builders.push(version)).result(TIMEOUT_S)
    *_, reply = parts
    assert [span.version for span in reply.weight_versions] == ["0", "1", "2", "3"]
    assert (len(reply.output_ids), reply.num_failovers) == (500, 3)


def test_a_stream_has_everything_so_far_each_time(policy: ServerHandle) -> None:
    parts = list(policy.stream([1, 2], rollout.SamplingParams(max_new_tokens=40), request_id="s"))
    assert len(parts) > 3
    for part in parts:
        assert part.output_ids == tokens([1, 2], len(part.output_ids))
        assert part.rid == "s"
    lengths = [len(part.output_ids) for part in parts]
    assert lengths == sorted(lengths)
    assert lengths[-1] == 40
    assert [part.finish_reason is None for part in parts] == [True] * (len(parts) - 1) + [False]


def test_a_stream_that_is_left_early_ends_at_its_engine(policy: ServerHandle) -> None:
    for part in policy.stream([1], LONG):
        assert part.output_ids
        break
    assert wait_until(with_requests(policy, 0), 1.0), "the request goes on at its engine"
    with policy.stream([1], LONG) as stream:
        assert wait_until(with_requests(policy, 1), TIMEOUT_S)
    assert wait_until(with_requests(policy, 0), 1.0), "the request goes on at its engine"
    assert list(stream)[1:] == []  # at most what had come before


async def test_a_task_that_is_cancelled_in_a_stream_ends_the_request(policy: ServerHandle) -> None:
    has_begun = asyncio.Event()

    async def follow() -> None:
        async with policy.stream([1], LONG) as stream:
            async for _ in stream:
                has_begun.set()

    task = asyncio.create_task(follow())
    await has_begun.wait()
    task.cancel()
    await asyncio.wait([task])
    assert await asyncio.to_thread(wait_until, with_requests(policy, 0), 1.0)


def test_a_stream_that_fails_raises(policy: ServerHandle) -> None:
    with pytest.raises(GenerationFailed, match="600 tokens"):
        list(policy.stream([1] * CONTEXT))


# -- first calls of several threads ---------------------------------------------------------------

FIRST_CALLS = """
import os, sys, threading, traceback, rollout
policy = rollout.connect(sys.argv[1])["policy"]
short = rollout.SamplingParams(max_new_tokens=2)
begin, failed = threading.Barrier(16), []

def call(number):
    begin.wait()
    try:
        if number % 2:
            reply = policy.generate([number], short).result(30)
        else:
            *_, reply = policy.stream([number], short)
        assert len(reply.output_ids) == 2, reply
    except BaseException:
        failed.append(traceback.format_exc())

threads = [threading.Thread(target=call, args=(number,)) for number in range(16)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
loops = [thread for thread in threading.enumerate() if thread.name == f"samples-{os.getpid()}"]
print(len(failed), "failed;", len(loops), "loop;", *failed[:1])
"""


@pytest.mark.parametrize(
    "num_processes",
    [3, pytest.param(50, marks=[pytest.mark.slow, pytest.mark.timeout(400)])],
)
def test_the_first_calls_of_16_threads_of_a_process_share_one_loop(
    run: DeploymentHandle, num_processes: int
) -> None:
    folder = str(Path(run.config.log_dir) / "exp")
    for _ in range(num_processes):
        done = subprocess.run(
            [sys.executable, "-c", FIRST_CALLS, folder], capture_output=True, text=True, timeout=60
        )
        assert (done.stdout.strip(), done.stderr) == ("0 failed; 1 loop;", "")


@pytest.mark.parametrize(
    ("where", "name"), [(sample_client, "LoopThread"), (server_handle, "SampleClient")]
)
def test_what_the_threads_of_a_process_share_is_made_once(
    policy: ServerHandle, monkeypatch: pytest.MonkeyPatch, where: Any, name: str
) -> None:
    """Each maker waits for a second one, which would be at work at the same time."""
    make, two_at_once, made = getattr(where, name), threading.Barrier(2), list[Any]()

    def make_slowly(*args: Any) -> Any:
        with suppress(threading.BrokenBarrierError):
            two_at_once.wait(0.3)
        made.append(make(*args))
        return made[-1]

    monkeypatch.setattr(where, name, make_slowly)
    monkeypatch.setattr(sample_client, "_LOOPS", {})
    with ThreadPoolExecutor(4) as threads:
        short = rollout.SamplingParams(max_new_tokens=1)
        calls = [threads.submit(policy.generate, [1], short) for _ in range(4)]
        for call in calls:
            assert call.result().result(TIMEOUT_S).output_ids
    assert len(made) == 1
