"""Each token of random requests to one server of SGLang and vLLM is what its reply calls it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout.runtime.local import launch_local
from tests.support.models import FOR_VLLM, plain_models
from tests.support.real_policy import RealPolicy, Sabotage, one_engine, real_config
from tests.support.token_audit import Auditor

pytestmark = [
    pytest.mark.chaos,  # it needs both engines
    pytest.mark.sglang,
    pytest.mark.vllm,
]
NUM = int(os.environ.get("ROLLOUT_AUDIT_REPLIES", "2000")) // 10


@pytest.fixture
def policy(tmp_path: Path) -> Iterator[RealPolicy]:
    models = plain_models(tmp_path / "models", **FOR_VLLM)
    groups = {"sglang": one_engine("sglang"), "vllm": one_engine("vllm")}
    config = real_config(models[0], tmp_path / "logs", groups)
    with launch_local(config) as deployment:
        yield RealPolicy(deployment["policy"], models, tmp_path / "logs", Sabotage())


@pytest.mark.timeout(900 + 4 * NUM)
async def test_each_token_of_two_kinds_is_what_its_reply_calls_it(
    policy: RealPolicy, capsys: pytest.CaptureFixture[str]
) -> None:
    report = await Auditor(policy, seed=51, has_seeds=False).run(NUM)
    with capsys.disabled():
        print(f"\n{report.figures()}")
    assert not report.differences, "\n".join(report.differences[:10])
    assert report.num_replies + report.num_chats > 0.7 * NUM, report.figures()
    assert report.num_pushes > 3
