"""Real SGLang and real vLLM in one server: with a cut their log-probs are of two kinds."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import rollout
from rollout.core.errors import GenerationFailed
from rollout.runtime.handle import ServerHandle
from rollout.runtime.local import launch_local
from tests.support.models import FOR_VLLM, plain_models
from tests.support.real_policy import one_engine, real_config

pytestmark = [
    pytest.mark.chaos,  # it needs both engines
    pytest.mark.sglang,
    pytest.mark.vllm,
    pytest.mark.timeout(300),
]
NUM = 1500


@pytest.fixture
def policy(tmp_path: Path) -> Iterator[ServerHandle]:
    (model,) = plain_models(tmp_path / "models", 1, **FOR_VLLM)
    groups = {"sglang": one_engine("sglang"), "vllm": one_engine("vllm")}
    with launch_local(real_config(model, tmp_path, groups)) as deployment:
        yield deployment["policy"]


def sampling(num: int, top_p: float) -> rollout.SamplingParams:
    return rollout.SamplingParams(max_new_tokens=num, top_p=top_p, ignore_eos=True)


def test_no_reply_joins_the_log_probs_of_two_kinds(policy: ServerHandle) -> None:
    for top_p, expected in ((1.0, {"full"}), (0.5, {"full", "cut"})):
        replies = policy.generate([[1, 2, 3]] * 8, sampling(20, top_p)).result(120)
        assert {reply.logprob_kind for reply in replies} == expected
    whole = policy.generate([[1, 2, 3], [4, 5, 6]], sampling(NUM, 0.5))
    streams = [iter(policy.stream([7, last], sampling(NUM, 0.5))) for last in (8, 9)]
    for parts in streams:
        next(parts)
    status = policy.status().result(30)
    (group,) = [group for group in status.groups if group.kind == "vllm"]
    (killed,) = group.engines
    assert killed.pid is not None
    os.kill(killed.pid, signal.SIGKILL)
    # Nothing of these was shown, so what vLLM had begun starts over.
    replies = whole.result(120)
    assert [(len(reply.output_ids), reply.logprob_kind) for reply in replies] == [(NUM, "full")] * 2
    assert sum(reply.num_failovers for reply in replies) == 1
    ends = [end_of(parts) for parts in streams]
    assert sorted(ends) == ["full", "the log-probs of its tokens are cut"]


def end_of(parts: Iterator[rollout.GenerateReply]) -> str:
    """The kind of a stream's log-probs, or why it has failed."""
    try:
        *_, last = parts
    except GenerationFailed as error:
        why = "the log-probs of its tokens are cut"
        return why if why in str(error) else str(error)
    assert len(last.output_ids) == NUM
    return str(last.logprob_kind)
