"""Which engines can be part of a group, and the message about the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engines.protocol import ModelInfo, ServerInfo, WorkerType
from engines.protocol.features import Features
from rollout.config import Drain, GroupConfig, Transport, WeightUpdate
from rollout.rules.engine_compat import (
    why_embeddings_outlive_pushes,
    why_incompatible,
    why_quantised_online,
)

GOOD = Features(
    engine="sglang",
    version="0.5.23",
    worker_type=WorkerType.REGULAR,
    has_weight_session=True,
    is_retract_safe=True,
    has_memory_saver=True,
    has_weights_cpu_backup=True,
    num_payloads=1,
    takes_tensors=True,
    streams_are_cumulative=True,
    moves_experts=False,
    undrivable="",
)


def why(
    update: WeightUpdate = WeightUpdate.FULL, drain: Drain = Drain.ABORT, **changed: Any
) -> str:
    return why_incompatible(
        replace(GOOD, **changed),
        GroupConfig(),
        update,
        drain,
        memory_saver=True,
        weights_cpu_backup=True,
    )


def test_an_engine_with_everything_is_let_in() -> None:
    assert why() == ""


@pytest.mark.parametrize(
    ("changed", "mending"),
    [
        ({"undrivable": "SGLang 0.4 cannot be driven"}, "cannot be driven"),
        ({"has_memory_saver": False}, "--enable-memory-saver"),
        ({"has_weights_cpu_backup": False}, "--enable-weights-cpu-backup"),
        ({"worker_type": WorkerType.DECODE}, "group of its own type"),
        ({"takes_tensors": False}, "one engine per replica"),
        ({"streams_are_cumulative": False}, "--incremental-streaming-output"),
    ],
)
def test_what_an_engine_lacks_is_reported_with_what_fixes_it(
    changed: dict[str, Any], mending: str
) -> None:
    said = why(**changed)
    assert mending in said
    assert "{engine}" in said


def test_a_frozen_model_may_have_replicas() -> None:
    assert why(WeightUpdate.FROZEN, takes_tensors=False) == ""


def test_an_engine_that_is_never_released_needs_no_memory_saver() -> None:
    bare = replace(GOOD, has_memory_saver=False, has_weights_cpu_backup=False)
    full = WeightUpdate.FULL
    group = GroupConfig(needs_offload=False)
    assert (
        why_incompatible(
            bare, group, full, Drain.FINISH, memory_saver=False, weights_cpu_backup=False
        )
        == ""
    )


@pytest.mark.parametrize("drain", list(Drain))
def test_requests_are_retracted_only_where_the_engine_survives_that(drain: Drain) -> None:
    reason = why(drain=drain, is_retract_safe=False)
    if drain is Drain.RETRACT:
        assert "crashes when memory is released while requests are retracted" in reason
        assert "set lifecycle.drain to abort or finish" in reason
    else:
        assert reason == ""
    assert why(drain=drain) == ""


@pytest.mark.parametrize(
    ("transport", "update", "is_refused"),
    [
        (Transport.DISTRIBUTED, WeightUpdate.FULL, True),
        (Transport.DISTRIBUTED, WeightUpdate.PARTIAL, True),
        (Transport.DISTRIBUTED, WeightUpdate.FROZEN, False),
        (Transport.SHARED_MEMORY, WeightUpdate.FULL, False),
        (Transport.AUTO, WeightUpdate.FULL, False),
        (Transport.CUDA_IPC, WeightUpdate.FULL, True),
        (Transport.CUDA_IPC, WeightUpdate.FROZEN, False),
    ],
)
def test_a_named_transport_that_the_engine_does_not_take_is_refused(
    transport: Transport, update: WeightUpdate, is_refused: bool
) -> None:
    whys = {Transport.DISTRIBUTED: "it joins none", Transport.CUDA_IPC: "it opens none"}
    said = why_incompatible(
        replace(GOOD, why_no_groups="it joins none", why_no_handles="it opens none"),
        GroupConfig(),
        update,
        Drain.ABORT,
        memory_saver=True,
        weights_cpu_backup=True,
        transport=transport,
    )
    refusal = (
        f"transport = {transport} does not reach engine {{engine}}: {whys.get(transport)}; use"
    )
    assert (refusal in said) is is_refused
    assert bool(said) is is_refused


@pytest.mark.parametrize(
    ("options", "update", "is_quantised", "is_refused"),
    [
        ({"quantization": "fp8"}, WeightUpdate.FULL, False, True),
        ({"--quantization": "w8a8_int8"}, WeightUpdate.PARTIAL, False, True),
        ({"quantization": "fp8"}, WeightUpdate.FULL, True, False),
        ({"quantization": "fp8"}, WeightUpdate.FROZEN, False, False),
        ({"quantization": "fp8"}, WeightUpdate.LORA, False, False),
        ({"quantization": "fp8", "load-format": "flash_rl"}, WeightUpdate.FULL, False, False),
        ({"quantization": None}, WeightUpdate.FULL, False, False),
        ({}, WeightUpdate.FULL, False, False),
    ],
)
def test_an_engine_that_quantises_its_checkpoint_itself_takes_no_push(
    options: dict[str, Any], update: WeightUpdate, is_quantised: bool, is_refused: bool
) -> None:
    said = why_quantised_online(options, update, is_quantised=is_quantised)
    assert ("rollout.weights.tensors.fp8_block_quantiser" in said) is is_refused
    assert bool(said) is is_refused


@pytest.mark.parametrize(
    ("model", "info", "encoder", "kinds"),
    [
        ({"has_image_understanding": True}, {}, "tensor 'visual.x'", "image input"),
        (
            {"has_image_understanding": True, "has_audio_understanding": True},
            {"rl_on_policy_target": None},
            "tensor 'visual.x'",
            "image and audio input",
        ),
        ({"has_image_understanding": False}, {}, "tensor 'visual.x'", ""),
        ({"has_image_understanding": True}, {}, "", ""),
        ({"has_image_understanding": True}, {"rl_on_policy_target": "fsdp"}, "tensor 'v'", ""),
    ],
)
def test_an_engine_that_keeps_embeddings_of_an_encoder_that_is_pushed_is_refused(
    model: dict[str, Any], info: dict[str, Any], encoder: str, kinds: str
) -> None:
    said = why_embeddings_outlive_pushes(
        ModelInfo("/m", "0", model),
        ServerInfo("0.5.23", "sglang", True, False, raw=info),
        encoder,
        "SGLANG_VLM_CACHE_SIZE_MB",
    )
    assert bool(said) is bool(kinds)
    assert kinds in said
    assert encoder in said or not said
