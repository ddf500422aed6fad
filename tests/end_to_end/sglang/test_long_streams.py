"""Requests that take half a minute over real SGLang: many pushes in one reply, and aborts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import rollout
from tests.support import abort_story
from tests.support.engine_keys import Keys
from tests.support.real_policy import RealPolicy, one_engine, real_policy
from tests.support.referee import Answer, Referee, Span

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]

FOR_S = 30.0


@pytest.fixture(scope="module")
def slow_policy(
    models: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealPolicy]:
    """One engine, to which each continuation goes; each token takes 20 ms more there, so that a
    reply lasts as long as on a large model."""
    folder = tmp_path_factory.mktemp("one-engine")
    with real_policy(models, folder, {"only": one_engine()}) as policy:
        (engine,) = policy.engines()
        body = {"forward_sleep_time": 0.02}
        url = f"{engine.endpoint.url}/slow_down"
        httpx.post(url, json=body, timeout=30, auth=Keys(engine)).raise_for_status()
        yield policy


@pytest.mark.parametrize(
    "every_s",
    [pytest.param(1.0, marks=pytest.mark.chaos), 2.0, pytest.param(3.0, marks=pytest.mark.chaos)],
)
def test_a_stream_fails_over_once_for_each_push(slow_policy: RealPolicy, every_s: float) -> None:
    policy, prompt = slow_policy, [11, 12, 13]
    sampling = rollout.SamplingParams(max_new_tokens=900, temperature=0.0, ignore_eos=True)
    stream = policy.handle.stream(prompt, sampling)
    parts = iter(stream)
    next(parts)
    end_s, num_pushes = time.monotonic() + FOR_S, 0
    last = next(parts)
    while time.monotonic() < end_s and last.finish_reason is None:
        policy.handle.push(policy.next_tensors()).result(120)
        num_pushes += 1
        next_s = time.monotonic() + every_s
        while last.finish_reason is None and time.monotonic() < next_s:
            last = next(parts)
    while last.finish_reason is None:
        last = next(parts)
    assert num_pushes >= 5
    assert last.num_failovers == num_pushes
    assert (last.finish_reason.kind, len(last.output_ids)) == ("length", 900)
    answer = Answer(
        rid="",
        prompt=tuple(prompt),
        output=last.output_ids,
        logprobs=last.output_logprobs or (),
        spans=tuple(Span(int(one.version), one.start, one.end) for one in last.weight_versions),
        kind="length",
    )
    assert not Referee(policy.weights_of).findings([answer])


def test_an_abort_ends_the_replies_of_its_call_and_no_others(slow_policy: RealPolicy) -> None:
    abort_story.check_aborts_of_calls(slow_policy.handle)


def test_an_abort_ends_the_request_of_its_id_and_no_other(slow_policy: RealPolicy) -> None:
    policy = slow_policy
    version = policy.handle.weight_version + 1
    abort_story.check_aborts_of_ids(policy.handle, policy.next_tensors(), version)


def test_an_abort_ends_several_completions(slow_policy: RealPolicy) -> None:
    abort_story.check_an_abort_of_several_completions(slow_policy.handle)
