"""The conversation that the stub of vLLM is made of is the one with vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.vllm_stub.conversation import TALK, differences, talk_with_vllm

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


async def test_vllm_answers_as_it_did_when_it_was_recorded(tmp_path: Path) -> None:
    assert differences(await talk_with_vllm(tmp_path), TALK) == []
