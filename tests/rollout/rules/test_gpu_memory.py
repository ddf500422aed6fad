"""The memory sums of a GPU, against numbers that were computed by hand from the models' sizes."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.kinds import kind_of
from engines.protocol.kind import Shards
from rollout.rules.gpu_memory import (
    EngineSums,
    FreeBytes,
    ModelParts,
    TrainerSums,
    engine_sums,
    free_bytes,
    fsdp2_sums,
)
from rollout.weights.format.checkpoint_config import parts_of, read_checkpoint_config

CONFIGS = Path(__file__).parents[2] / "support/hub_configs"
GIB = 1 << 30


def parts(name: str) -> ModelParts:
    found = parts_of(read_checkpoint_config(CONFIGS / name))
    assert found is not None
    return found


def sums(name: str, shards: Shards, share: float = 0.6, kv_element_bytes: int = 2) -> EngineSums:
    return engine_sums(
        parts(name),
        shards,
        gpu_bytes=80 * GIB,
        gpu_share=share,
        element_bytes=2,
        kv_element_bytes=kv_element_bytes,
    )


@pytest.mark.parametrize(
    ("name", "checkpoint_bytes"), [("Qwen3-8B", 16381470720), ("Qwen3-30B-A3B", 61064245248)]
)
def test_the_parts_of_a_model_are_its_published_checkpoint(
    name: str, checkpoint_bytes: int
) -> None:
    # ``total_size`` of ``model.safetensors.index.json``; norms of queries and keys are not counted.
    assert 0 <= checkpoint_bytes - 2 * parts(name).num_elements < 100_000


EXPERTS_ON_8 = Shards(attention=8, dense=8, experts=8)
ATTENTION_OF_ITS_OWN = Shards(attention=1, dense=8, experts=8, pools=8)


@pytest.mark.parametrize(
    ("name", "shards", "weights_bytes", "kv_token_bytes", "kv_tokens"),
    [
        # 2 x (36 x (41 951 232 + 150 994 944) + 2 x 151 936 x 4096); 2 x 36 x 8 x 128 x 2
        ("Qwen3-8B", Shards(), 16381444096, 147456, 238431),
        # 2 x (48 x (19 140 608 + 603 979 776) / 8 + 2 x 151 936 x 2048 / 8); a KV head each
        ("Qwen3-30B-A3B", EXPERTS_ON_8, 7633027072, 24576, 1786563),
        # All of attention, embedding and KV heads on each GPU, and 8 caches.
        ("Qwen3-30B-A3B", ATTENTION_OF_ITS_OWN, 9785376768, 98304, 8 * 424746),
    ],
)
def test_what_an_engine_takes_of_a_gpu_with_80_gib(
    name: str, shards: Shards, weights_bytes: int, kv_token_bytes: int, kv_tokens: int
) -> None:
    assert sums(name, shards) == EngineSums(
        weights_bytes, int(0.6 * 80 * GIB), kv_token_bytes, kv_tokens
    )


def test_weights_that_do_not_fit_leave_no_tokens() -> None:
    assert sums("Qwen3-30B-A3B", Shards()).kv_tokens == 0


def test_a_cache_in_fp8_has_twice_the_tokens() -> None:
    half, whole = sums("Qwen3-8B", Shards(), kv_element_bytes=1), sums("Qwen3-8B", Shards())
    assert half.kv_tokens // 2 == whole.kv_tokens


def test_the_larger_end_of_a_pipeline_decides() -> None:
    """Two stages: 18 layers and either the embedding or the head."""
    found = sums("Qwen3-8B", Shards(pipeline=2))
    assert found.weights_bytes == 2 * (18 * 192_946_176 + 622_329_856)
    assert found.kv_token_bytes == 147456 // 2


def test_a_trainer_with_fsdp2_divides_sixteen_bytes_a_parameter() -> None:
    assert fsdp2_sums(8_000_000_000, 8) == TrainerSums(16_000_000_000, 12_000_000_000)


def test_the_room_in_each_part_of_a_step() -> None:
    engine, trainer = EngineSums(20, 60, 1, 40), TrainerSums(16, 12)
    assert free_bytes(100, engine, trainer, 5) == FreeBytes(28, 84, 63)
    assert free_bytes(50, engine, trainer, 5).serving == -22


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4]), st.floats(0.1, 0.9))
def test_more_gpus_take_less_each_and_hold_all_the_weights(
    tensor: int, pipeline: int, share: float
) -> None:
    shards = Shards(attention=tensor, dense=tensor, experts=tensor, pipeline=pipeline)
    whole, part = sums("Qwen3-30B-A3B", Shards(), share), sums("Qwen3-30B-A3B", shards, share)
    assert part.weights_bytes <= whole.weights_bytes
    assert part.weights_bytes * tensor * pipeline >= whole.weights_bytes - tensor * pipeline
    assert part.kv_token_bytes <= whole.kv_token_bytes


@pytest.mark.parametrize(
    ("kind", "options", "num_gpus", "expected"),
    [
        ("sglang", {}, 4, Shards(attention=4, dense=4, experts=4)),
        ("sglang", {"--tp": 2, "pp-size": 2}, 4, Shards(2, 2, 2, 2, 1)),
        ("sglang", {"tp": 4, "ep-size": 4}, 4, Shards(4, 4, 4, 1, 1)),
        ("sglang", {"dp-size": 4, "enable-dp-attention": True}, 4, Shards(1, 4, 4, 1, 4)),
        ("sglang", {"tp-size": 4, "attn-dp-size": 2}, 4, Shards(2, 4, 4, 1, 2)),
        ("sglang", {"dp-size": 2, "tp-size": 2}, 4, Shards(2, 2, 2, 1, 2)),
        ("sglang", {"tp-size": 3}, 4, None),
        ("vllm", {}, 4, Shards(4, 4, 4, 1, 1)),
        ("vllm", {"pipeline-parallel-size": 2}, 4, Shards(2, 2, 2, 2, 1)),
        (
            "vllm",
            {"data_parallel_size": 4, "enable-expert-parallel": True},
            4,
            Shards(1, 1, 4, 1, 4),
        ),
        ("vllm", {"tensor-parallel-size": 3}, 4, None),
        ("vllm", {"tensor-parallel-size": "2"}, 2, None),
        ("embedded", {}, 1, None),
    ],
)
def test_an_engine_divides_its_model_by_its_options(
    kind: str, options: dict[str, object], num_gpus: int, expected: Shards | None
) -> None:
    assert kind_of(kind).shards(options, num_gpus) == expected
