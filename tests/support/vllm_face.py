"""Fake vLLM servers and what is sent to them."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

from engines.fake import FakeTensor, pack_tensors
from engines.fake.engine.fake_weights import DEFAULT_TENSORS
from engines.fake.vllm import FakeVllm
from tests.support.waits import until


def content(names: Sequence[str], version: str) -> str:
    """The ``content`` of an update with new contents for these tensors."""
    shapes = {one.name: one.shape for one in DEFAULT_TENSORS}
    tensors = {name: FakeTensor(shapes.get(name, (1,)), float(version)) for name in names}
    return base64.b64encode(pack_tensors(tensors)).decode()


def endless() -> dict[str, Any]:
    """A request that runs until it is aborted."""
    return {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 1_000_000}}


async def admitted(engine: FakeVllm, num: int = 1) -> None:
    """Returns when so many requests run on it."""
    await engine._until(lambda: len(engine.in_flight) >= num)


async def generating(engine: FakeVllm) -> None:
    """Returns when a request has tokens."""
    await until(lambda: any(one.output_ids for one in engine.in_flight.values()))
