"""Real engines are offloaded under load: none crashes, no request is lost, no reply is wrong.

64 clients keep two groups busy through the real router while the whole of
pause, flush, release, resume, push, continue is gone through at random moments.  The number of
rounds of the long run is ``ROLLOUT_CYCLES``; docs/testing.md has its figures.
"""

from __future__ import annotations

import os

import pytest

from tests.support.offload_load import offload_under_load
from tests.support.real_policy import RealPolicy
from tools.cpu_engines import install

FEW_CYCLES = 6
MANY_CYCLES = int(os.environ.get("ROLLOUT_CYCLES", "200"))
FREED_BYTES = {
    "sglang": 1,
    # The KV caches of both engines, but for what was never written since.
    "vllm": 2 * install.OPTIONS["vllm"]["kv-cache-memory-bytes"] * 3 // 4,
}


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
    kind: str,
    num_cycles: int,
    capsys: pytest.CaptureFixture[str],
    record_property,  # type: ignore[no-untyped-def]
) -> None:
    with capsys.disabled():
        load, figures = await offload_under_load(policy, num_cycles, FREED_BYTES[kind])
        print(f"\n{figures}")
    record_property("figures", figures)
    # vLLM's requests are translated by the router, which continues each that is aborted.
    assert load.kinds["abort"] > num_cycles if kind == "sglang" else not load.kinds["abort"]
