"""The stub of vLLM answers as the recorded vLLM did: it is not kinder."""

from __future__ import annotations

from pathlib import Path

import httpx

from engines.fake import write_checkpoint
from engines.launch import EngineSpec
from engines.protocol import NO_ACCESS, Endpoint
from tests.support.vllm_stub.conversation import TALK, differences, talk_with
from tests.support.vllm_stub.stub import StubVllm
from tests.support.vllm_stub.wire import ServedStubs, make_stub


async def test_the_stub_answers_all_that_was_recorded_alike(tmp_path: Path) -> None:
    def make(spec: EngineSpec, endpoint: Endpoint) -> StubVllm:
        return make_stub(spec, endpoint, token_s=0.001, reports_released=True)

    served = await ServedStubs(make).launch(
        EngineSpec("stub-0", "vllm", "/model", "", access=NO_ACCESS)
    )
    assert isinstance(served.engine, StubVllm)
    async with httpx.AsyncClient(base_url=served.endpoint.url, timeout=60) as http:
        talk = await talk_with(http, write_checkpoint(tmp_path), served.engine.lose_core)
    await served.kill()
    assert differences(talk, TALK) == []
