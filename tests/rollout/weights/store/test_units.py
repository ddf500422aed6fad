"""Units, where they go and where they stand: pure, for any model's names."""

import json
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.protocol import STAYS
from rollout.core.errors import WeightMismatch
from rollout.weights.format.manifest import Manifest, TensorSpec
from rollout.weights.store.layout.placement import (
    Unit,
    assign_replicas,
    make_units,
    plan_segments,
    tensor_ranges,
)
from tests.support.store_worlds import moe_manifest


def test_a_unit_is_one_expert_of_one_layer() -> None:
    units = {unit.name: unit for unit in make_units(moe_manifest(), 64 << 20)}
    expert = units["model.layers.1.mlp.experts.4/2/0"]
    assert [tensor.name for tensor in expert.tensors] == [
        "model.layers.1.mlp.experts.4.up_proj.weight",
        "model.layers.1.mlp.experts.4.down_proj.weight",
    ]
    assert {tensor.name for tensor in units["model.layers.0/2/0"].tensors} == {
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.input_layernorm.weight",
    }


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("model.layers.3.mlp.experts.17.gate_proj.weight", "model.layers.3.mlp.experts.17/4/0"),
        ("h.3.block_sparse_moe.experts.0.w1", "h.3.block_sparse_moe.experts.0/4/0"),
        ("model.layers.3.mlp.shared_experts.up_proj.weight", "model.layers.3/4/0"),
        ("model.layers.12.mlp.experts.gate_up_proj", "model.layers.12/4/0"),
        ("transformer.h.0.attn.weight", "transformer.h.0/4/0"),
        ("lm_head.weight", "/4/0"),
    ],
)
def test_names_of_any_model_have_a_unit(name: str, unit: str) -> None:
    made = make_units(Manifest.of([TensorSpec(name, "float32", (2,))]), 64)
    assert [one.name for one in made] == [unit]


def test_a_tensor_is_never_split_however_large_it_is() -> None:
    specs = [TensorSpec(f"w{index}", "float32", (100,)) for index in range(3)]
    assert [len(unit.tensors) for unit in make_units(Manifest.of(specs), 10)] == [1, 1, 1]


def test_a_dtype_that_no_file_can_hold_is_refused_by_name() -> None:
    manifest = Manifest.of([TensorSpec("w", "complex64", (2,))])
    with pytest.raises(
        WeightMismatch, match=r"'w' is complex64, which a safetensors file cannot hold"
    ):
        make_units(manifest, 64)


specs = st.builds(
    TensorSpec,
    st.from_regex(r"(a|b)\.[0-3]\.(experts\.[0-9]\.)?[a-d]{1,3}", fullmatch=True),
    st.sampled_from(["bfloat16", "float32", "int64", "uint8"]),
    st.lists(st.integers(0, 9), max_size=3).map(tuple),
)
models = st.lists(specs, min_size=1, max_size=40, unique_by=lambda one: one.name)


@settings(max_examples=25)
@given(models, st.integers(1, 500), st.integers(1, 7), st.integers(1, 3), st.integers(1, 900))
def test_every_byte_of_any_model_is_kept_often_enough_and_aligned(
    model: list[TensorSpec], unit_bytes: int, num_nodes: int, replicas: int, segment_bytes: int
) -> None:
    manifest = Manifest.of(model)
    units = make_units(manifest, unit_bytes)
    names = [tensor.name for unit in units for tensor in unit.tensors]
    assert sorted(names) == sorted(manifest.tensors)
    nodes = [f"n{index}" for index in range(num_nodes)]
    kept = assign_replicas(units, nodes, replicas)
    times = [sum(unit in own for own in kept.values()) for unit in range(len(units))]
    assert set(times) == {min(replicas, num_nodes)}
    assert kept == assign_replicas(units, list(reversed(nodes)), replicas)
    for own in kept.values():
        segments = plan_segments(units, own, segment_bytes)
        assert sorted(unit for one in segments for unit in one.units) == sorted(own)
        for segment in segments:
            check_file(segment.header, segment.num_bytes)
        for place in tensor_ranges(units, segments):
            element = place.tensor.element_bytes
            assert place.offset % element == 0


def check_file(header: bytes, num_bytes: int) -> None:
    """As the reference implementation wants it: one range after the other, to the end."""
    (length,) = struct.unpack("<Q", header[:8])
    assert len(header) == 8 + length
    told = json.loads(header[8:])
    # Its reader takes texts alone there, and engines map what has this word.
    assert all(isinstance(one, str) for one in told["__metadata__"].values())
    assert STAYS in told.pop("__metadata__")
    entries = list(told.values())
    position = 0
    for entry in entries:
        assert entry["data_offsets"][0] == position
        position = entry["data_offsets"][1]
    assert len(header) + position == num_bytes


def test_experts_that_do_not_divide_by_the_nodes_are_spread_evenly_and_completely() -> None:
    units = tuple(
        Unit(f"e{index}", (TensorSpec(f"e{index}", "uint8", (100,)),)) for index in range(10)
    )
    kept = assign_replicas(units, ["a", "b", "c"], 1)
    assert sorted(len(own) for own in kept.values()) == [3, 3, 4]
    assert sorted(unit for own in kept.values() for unit in own) == list(range(10))
    sizes = {node: sum(units[index].num_bytes for index in own) for node, own in kept.items()}
    assert sizes == {"a": 400, "b": 300, "c": 300}
