"""Routed experts of each version span are those of a fresh forward pass with its weights: over each
kind of pause, a full KV cache, shared prefixes and a kill, embedded and on real SGLang.

vLLM has routed experts in its second model runner only, which needs Triton, so not on a CPU.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import rollout
from rollout.core.types import EngineStatus
from rollout.runtime.handle import ServerHandle
from rollout.runtime.local import launch_local
from rollout.testing.tiny_model import make_tiny_model
from tests.support.busy_engines import num_running
from tests.support.expert_truth import NUM_LAYERS, ExpertTruth
from tests.support.paged import until
from tests.support.real_policy import one_engine, real_config

pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5")  # its gates say what they chose
pytestmark = pytest.mark.timeout(600)
EMBEDDED = (pytest.mark.embedded, pytest.mark.slow)
NUM_TOKENS = 300
SHARED = [11, 12, 13] * 20
PROMPTS = [[*SHARED, 20 + number] for number in range(8)]
"""On two engines, four on each: in the end they need 1 444 places."""
PLACES = 900
SAMPLING = rollout.SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True)


def engines_of(policy: ServerHandle) -> list[EngineStatus]:
    (group,) = policy.status().result(30).groups
    return list(group.engines)


@pytest.mark.parametrize(
    ("kind", "drain"),
    [
        pytest.param("embedded", "abort", marks=EMBEDDED),
        pytest.param("embedded", "finish", marks=EMBEDDED),
        pytest.param("embedded", "retract", marks=EMBEDDED),
        # With retract SGLang is refused: tests/rollout/config and tests/engines/test_attached.py.
        pytest.param("sglang", "abort", marks=pytest.mark.sglang),
        pytest.param("sglang", "finish", marks=pytest.mark.sglang),
    ],
)
def test_experts_of_each_span_are_those_of_its_weights(
    kind: str, drain: str, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    models = {
        version: make_tiny_model(
            tmp_path / f"moe-{version}", "qwen3_moe", seed=version, num_layers=NUM_LAYERS
        )
        for version in range(2)
    }
    options = {"max-total-tokens": PLACES}
    options |= {"enable-return-routed-experts": True} if kind == "sglang" else {}
    group = one_engine(kind, options=options) | {"num_engines": 2}
    settings = {"health": {"recover": False}, "lifecycle": {"drain": drain}}
    config = real_config(models[0], tmp_path / "logs", {"main": group}, **settings)
    with launch_local(config) as deployment:
        policy = deployment["policy"]
        # Each after the other, so that the last ones find a prefix in the cache.
        calm = [
            policy.generate(SHARED, SAMPLING, routed_experts=True).result(120) for _ in range(4)
        ]
        pending = policy.generate(PROMPTS, SAMPLING, routed_experts=True)
        until(lambda: all(map(num_running, engines_of(policy))), "both engines have requests")
        policy.push(load_file(models[1] / "model.safetensors"), version=1).result(120)
        again = policy.generate(PROMPTS, SAMPLING, routed_experts=True)
        until(lambda: all(map(num_running, engines_of(policy))), "both engines have requests")
        os.kill(engines_of(policy)[0].pid or 0, signal.SIGKILL)
        replies = [*pending.result(300), *again.result(300)]
        last = policy.generate(PROMPTS, SAMPLING, routed_experts=True).result(300)
    truth = ExpertTruth(models)
    assert [truth.num_wrong(SHARED, reply) for reply in calm] == [{"0": 0}] * 4
    # The embedded engine's cache has no experts, so it computes such prompts again.
    assert any(reply.cached_tokens for reply in calm) is (kind == "sglang")
    other = ExpertTruth({0: models[1]})
    assert other.num_wrong(SHARED, calm[0])["0"] > NUM_TOKENS // 2  # it can be wrong
    for prompt, reply in zip(PROMPTS * 3, [*replies, *last], strict=True):
        assert len(reply.output_ids) == NUM_TOKENS
        assert set(truth.num_wrong(prompt, reply).values()) == {0}, reply.weight_versions
    assert sum(reply.num_failovers for reply in replies) > 0
    # A drain that waits leaves no reply of two versions.
    spans = [len(reply.weight_versions) for reply in replies[: len(PROMPTS)]]
    assert max(spans) == (1 if drain == "finish" else 2)
