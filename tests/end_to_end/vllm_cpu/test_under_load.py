"""Real vLLM is offloaded under load: no engine crashes, no request is lost, no reply is wrong.

As ``sglang/test_under_load.py``, whose clients and referee these are.
"""

from __future__ import annotations

import os

import pytest

from engines.cpu.vllm.recipe import RECIPE
from tests.support.offload_load import offload_under_load
from tests.support.real_policy import RealPolicy

FEW_CYCLES = 5
MANY_CYCLES = int(os.environ.get("ROLLOUT_VLLM_CYCLES", "200"))
# The KV caches of both engines, but for what was never written since.
FREED_BYTES = 2 * RECIPE.engine_options["kv-cache-memory-bytes"] * 3 // 4

pytestmark = [pytest.mark.vllm]


@pytest.mark.parametrize(
    "num_cycles",
    [
        pytest.param(FEW_CYCLES, marks=pytest.mark.timeout(900)),
        pytest.param(
            MANY_CYCLES, marks=[pytest.mark.chaos, pytest.mark.timeout(900 + 30 * MANY_CYCLES)]
        ),
    ],
    ids=["few", "many"],
)
async def test_offload_under_load(
    policy: RealPolicy,
    num_cycles: int,
    capsys: pytest.CaptureFixture[str],
    record_property,  # type: ignore[no-untyped-def]
) -> None:
    with capsys.disabled():
        load, figures = await offload_under_load(policy, num_cycles, FREED_BYTES)
        print(f"\n{figures}")
    record_property("figures", figures)
    # Every request is translated by the router, which continues each that is aborted.
    assert not load.kinds["abort"]
