"""A real SGLang engine that sees: an image of an earlier step, after a push of another tower."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file

import rollout
from engines.launch import LocalLauncher
from engines.protocol.spec import EngineSpec
from rollout.runtime.handle import ServerHandle
from rollout.runtime.local import launch_local
from tests.engines.attached_config import config as attached_config
from tests.support.cpu_engines import cpu_engine
from tests.support.real_policy import one_engine, real_config
from tests.support.vision_model import (
    PROMPT,
    VisionReference,
    as_base64,
    make_image,
    make_vision_model,
)

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]
NUM_TOKENS = 8


def ask(policy: ServerHandle, image: Any, **own: str) -> dict[str, Any]:
    body = {
        "text": PROMPT,
        "image_data": [as_base64(image)],
        "sampling_params": {"max_new_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True},
        "return_logprob": True,
        **own,
    }
    reply = httpx.post(f"{policy.url}/generate", json=body, timeout=60, trust_env=False)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def gap(answer: dict[str, Any], reference: VisionReference, image: Any) -> float:
    """The largest difference from the log-probs of transformers."""
    ids = answer["output_ids"]
    assert len(ids) == NUM_TOKENS
    theirs = reference.logprobs(image, ids)
    ours = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
    return max(abs(one - other) for one, other in zip(ours, theirs, strict=True))


def test_an_image_seen_before_a_push_is_seen_by_the_new_tower_after_it(tmp_path: Path) -> None:
    models = [make_vision_model(tmp_path / f"weights-{seed}", seed) for seed in range(2)]
    old, new = map(VisionReference, models)
    stale = new.with_tower_of(old)
    images = [make_image(seed) for seed in range(4)]
    config = real_config(models[0], tmp_path, {"main": one_engine()})
    with launch_local(config) as deployment:
        policy = deployment["policy"]
        for image in images[:2] * 2:  # seen, and what was computed of them used again
            assert gap(ask(policy, image), old, image) < 1e-3
        assert ask(policy, images[0])["meta_info"]["cached_tokens"] > 0
        (engine,) = policy.status().result(30).groups[0].engines
        attached = attached_config(engine, models[0], tmp_path / "attached")
        with pytest.raises(rollout.RolloutError, match=r"understands image input .*'visual\."):
            launch_local(attached)
        with policy.offloaded() as window:
            window.push(load_file(models[1] / "model.safetensors"), version=1)
        for image in images:
            for own in ({}, {"extra_key": "mine"}):
                answer = ask(policy, image, **own)
                assert answer["meta_info"]["weight_version"] == "1"
                # With the old embedding of an image it would be the other way round.
                gaps = gap(answer, new, image), gap(answer, stale, image)
                assert gaps[0] < 1e-3 < 0.1 < gaps[1], gaps


@pytest.mark.chaos
async def test_an_attached_engine_that_has_embeddings_although_it_says_not_is_fenced(
    tmp_path: Path,
) -> None:
    """The sentinel shows each engine the same image before and after a push."""
    models = [make_vision_model(tmp_path / f"weights-{seed}", seed) for seed in range(2)]
    spec = EngineSpec(
        "theirs-0",
        model_path=str(models[0]),
        log_path=str(tmp_path / "theirs.log"),
        keeps_embeddings=True,
        **cpu_engine("sglang"),
    )
    theirs = await LocalLauncher().launch(spec)
    claims = {"SGLANG_VLM_CACHE_SIZE_MB": "0"}
    config = attached_config(theirs, models[0], tmp_path, env=claims)
    try:
        await asyncio.to_thread(_push_to, config, models[1])
    finally:
        await theirs.stop(5)


def _push_to(config: rollout.RolloutConfig, weights: Path) -> None:
    pushed = load_file(weights / "model.safetensors")
    with launch_local(config) as deployment:
        policy = deployment["policy"]
        with (
            pytest.raises(
                rollout.RolloutError,
                match=r"answers from state that older weights computed: log-probs of the "
                r"sentinel's image prompt differ ",
            ),
            policy.offloaded() as window,
        ):
            window.push(pushed, version=1)
