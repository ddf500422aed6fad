"""Each token of random requests over real engines is what its reply calls it, or there is no reply.

The long run has ``ROLLOUT_AUDIT_REPLIES`` replies; docs/testing.md has its figures.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.models import FOR_VLLM, plain_models
from tests.support.real_policy import RealPolicy, one_engine, real_policy
from tests.support.token_audit import Auditor

FEW = 40
MANY = int(os.environ.get("ROLLOUT_AUDIT_REPLIES", "2000"))


@pytest.fixture
def policy(kind: str, tmp_path: Path) -> Iterator[RealPolicy]:
    """Two engines of one group, so that one of them may die at any moment."""
    models = plain_models(tmp_path / "models", **(FOR_VLLM if kind == "vllm" else {}))
    groups = {"main": {**one_engine(kind), "num_engines": 2}}
    health = {"max_restarts": 1000}  # the long run kills more than is restarted by default
    with real_policy(models, tmp_path / "logs", groups, health=health) as policy:
        yield policy


@pytest.mark.parametrize(
    ("num_replies", "num_kills", "every_s"),
    [
        pytest.param(FEW, 1, (0.3, 1.0), marks=pytest.mark.timeout(900)),
        pytest.param(
            MANY,
            MANY // 200,
            (1.0, 5.0),
            marks=[pytest.mark.chaos, pytest.mark.timeout(900 + 4 * MANY)],
        ),
    ],
    ids=["few", "many"],
)
async def test_each_token_is_what_its_reply_calls_it(
    policy: RealPolicy,
    kind: str,
    num_replies: int,
    num_kills: int,
    every_s: tuple[float, float],
    capsys: pytest.CaptureFixture[str],
    record_property,  # type: ignore[no-untyped-def]
) -> None:
    auditor = Auditor(policy, seed=50, has_seeds=kind != "vllm")
    report = await auditor.run(num_replies, num_kills, every_s)
    with capsys.disabled():
        print(f"\n{report.figures()}")
    record_property("figures", report.figures())
    assert not report.differences, "\n".join(report.differences[:10])
    assert report.num_replies + report.num_chats > 0.8 * num_replies, report.figures()
    assert report.num_pushes > 3
