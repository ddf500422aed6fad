"""No engine that SGLang runs keeps the embedding of an image over a push that changes its tower."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import rollout
from engines import fake
from engines.fake.engine.fake_weights import DEFAULT_TENSORS
from engines.fake.http_fake import HttpFakeLauncher
from engines.fake.launcher import make_engine
from engines.launch import start_settings
from engines.protocol import TensorInfo
from engines.protocol.spec import EngineSpec
from rollout.runtime.preflight import planned_spec, wrong_settings
from tests.engines.attached_config import config

CACHE = "SGLANG_VLM_CACHE_SIZE_MB"
TOWER = "visual.patch_embed.proj.weight"
KEPT = {"not_pushed": ["visual.*"]}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tower = TensorInfo(TOWER, "float32", (2, 2))
    return fake.write_checkpoint(tmp_path / "vision", (*DEFAULT_TENSORS, tower))


def launched(model: Path, weights: dict[str, Any], **engine: Any) -> rollout.RolloutConfig:
    group = {"engine": {"kind": "sglang", **engine}}
    server = {"model_path": str(model), "groups": {"main": group}, "weights": weights}
    return rollout.RolloutConfig.from_dict(
        {"log_dir": str(model.parent), "servers": {"policy": server}}
    )


def environment(model: Path, weights: dict[str, Any]) -> dict[str, str]:
    """What an engine of this server is started with."""
    server = launched(model, weights).servers["policy"]
    return dict(start_settings(planned_spec(server, server.groups["main"]), {}).env)


@pytest.mark.parametrize("weights", [{}, {"update": "partial"}, {"update": "lora"}])
def test_an_engine_is_launched_without_the_cache_if_its_tower_may_be_pushed(
    model: Path, weights: dict[str, Any]
) -> None:
    assert environment(model, weights)[CACHE] == "0"


@pytest.mark.parametrize("weights", [KEPT, {"update": "frozen"}])
def test_a_tower_that_is_not_pushed_keeps_the_cache(model: Path, weights: dict[str, Any]) -> None:
    assert CACHE not in environment(model, weights)


def test_a_language_model_is_started_as_it_was(tmp_path: Path) -> None:
    assert CACHE not in environment(fake.write_checkpoint(tmp_path / "text"), {})


def test_a_cache_that_is_configured_is_refused_before_the_launch(model: Path) -> None:
    asked = {"env": {CACHE: "100"}}
    (wrong,) = [one for one in wrong_settings(launched(model, {}, **asked)) if CACHE in str(one)]
    assert wrong.setting == "servers.policy.groups.main.engine"
    assert not [one for one in wrong_settings(launched(model, KEPT, **asked)) if CACHE in str(one)]


def seeing(spec: EngineSpec, endpoint: Any) -> Any:
    return make_engine(spec, endpoint, understands_images=True)


async def attach(whole: Any) -> None:
    def serve() -> None:
        with rollout.launch(whole, backend="local") as deployment:
            assert deployment["policy"].status().result().phase == "serving"

    await asyncio.to_thread(serve)


async def test_an_attached_engine_that_sees_is_refused_unless_it_says_that_it_keeps_nothing(
    model: Path, tmp_path: Path
) -> None:
    theirs = await HttpFakeLauncher(seeing).launch(EngineSpec("theirs-0", "fake", str(model), ""))
    try:
        with pytest.raises(rollout.RolloutError) as refused:
            await attach(config(theirs, model, tmp_path))
        said = str(refused.value)
        assert "theirs-0 understands image input and keeps the embeddings" in said
        assert f"a push that changes tensor {TOWER!r}" in said
        assert f"Start it with {CACHE}=0, and say so in engine.env" in said
        assert "weights.not_pushed" in said
        await attach(config(theirs, model, tmp_path, env={CACHE: "0"}))
        await attach(config(theirs, model, tmp_path, weights=KEPT, needs_offload=False))
    finally:
        await theirs.kill()


async def test_an_attached_engine_of_texts_is_asked_for_nothing(
    model: Path, tmp_path: Path
) -> None:
    theirs = await HttpFakeLauncher().launch(EngineSpec("theirs-0", "fake", str(model), ""))
    try:
        await attach(config(theirs, model, tmp_path))
    finally:
        await theirs.kill()


def test_other_variables_of_an_attached_engine_are_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(rollout.ConfigError, match="env cannot be set"):
        config("http://127.0.0.1:1", model, tmp_path, env={CACHE: "0", "OTHER": "1"})
