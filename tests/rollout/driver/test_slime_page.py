"""The function of slime's page, over fake engines, with a double of slime's sample."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import rollout
from rollout.runtime.local import launch_local
from tests.support.pages import run_code
from tests.support.served_fakes import launched


class Status(Enum):
    """As ``slime.utils.types.Sample.Status``."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"


@dataclass
class Sample:
    """The fields of ``slime.utils.types.Sample`` that the function uses."""

    prompt: str = "hello"
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    rollout_log_probs: list[float] | None = None
    weight_versions: list[str] = field(default_factory=list)
    status: Status = Status.PENDING
    session_id: str | None = None


class AutoTokenizer:
    @classmethod
    def from_pretrained(cls, path: str) -> "AutoTokenizer":
        assert path == "/models/policy"
        return cls()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return list(text.encode())


@pytest.fixture
def generate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    transformers: Any = ModuleType("transformers")
    transformers.AutoTokenizer = AutoTokenizer
    monkeypatch.setitem(sys.modules, "transformers", transformers)
    monkeypatch.setenv("HF_CHECKPOINT", "/models/policy")
    monkeypatch.setenv("ROLLOUT_RUN", "runs/mine")
    with launched(launch_local, tmp_path) as deployment:
        monkeypatch.setattr(rollout, "connect", {"runs/mine": deployment}.__getitem__)
        yield run_code("how-to/names.md")["generate"]


async def test_it_fills_a_sample_and_continues_a_partial_one(generate: Any) -> None:
    # As GenerateState of slime/rollout/sglang_rollout.py makes them.
    params = {
        "temperature": 0.8,
        "top_p": 1.0,
        "top_k": -1,
        "max_new_tokens": 6,
        "stop": ["never"],
        "stop_token_ids": None,
        "skip_special_tokens": True,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }
    whole = await generate(None, Sample(), dict(params))
    assert whole.status is Status.TRUNCATED
    assert whole.tokens[:5] == list(b"hello")
    assert len(whole.tokens) == 5 + 6
    assert len(whole.rollout_log_probs) == whole.response_length == 6
    assert whole.weight_versions == ["0"]
    part = Sample(
        tokens=whole.tokens[:7],
        response_length=2,
        rollout_log_probs=[-1.0, -1.0],
        status=Status.ABORTED,
        session_id="mine",
    )
    rest = await generate(None, part, dict(params))
    assert len(rest.rollout_log_probs) == rest.response_length == 6
    assert len(rest.tokens) == 5 + 6
