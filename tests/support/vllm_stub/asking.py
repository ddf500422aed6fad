"""Stubs of vLLM, requests for them, and how far they are."""

from __future__ import annotations

from typing import Any

from tests.support.vllm_stub.stub import StubVllm
from tests.support.waits import until


def stub_with(**facts: Any) -> StubVllm:
    """A stub with these attributes."""
    engine = StubVllm()
    vars(engine).update(facts)
    return engine


def endless() -> dict[str, Any]:
    """A request that runs until it is aborted."""
    return {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 1_000_000}}


async def admitted(engine: StubVllm, num: int = 1) -> None:
    """Returns when so many requests run on it."""
    await engine._until(lambda: len(engine.in_flight) >= num)


async def generating(engine: StubVllm) -> None:
    """Returns when a request has tokens."""
    await until(lambda: any(one.output_ids for one in engine.in_flight.values()))
