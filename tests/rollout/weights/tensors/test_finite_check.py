"""Values that are no numbers are refused before anything is sent, by tensor."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engines.tensors import bulk_copy
from rollout.config import WeightUpdate
from rollout.core.errors import WeightMismatch
from rollout.weights.format.manifest import Manifest, TensorSpec
from rollout.weights.push.push import PushRequest
from tests.support.still_server import StillServer, server_config

torch = pytest.importorskip("torch")
from rollout.weights.ranks.leader import push_of_one_rank  # noqa: E402
from rollout.weights.ranks.trainer_rank import TrainerRank  # noqa: E402
from rollout.weights.tensors.finite_check import (  # noqa: E402
    _with_nonfinite,
    are_checked_in_copies,
    check_finite,
    largest_in,
    largest_of,
)
from rollout.weights.tensors.sources import PlannedSource, StreamedSource  # noqa: E402

pytestmark = pytest.mark.torch
NAN, INF = float("nan"), float("inf")
TYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def with_value(value: float, dtype: Any, place: int, size: int = 1000) -> Any:
    tensor = torch.linspace(-1, 1, size)
    tensor[place] = value
    return tensor.to(dtype)


@pytest.mark.parametrize("place", [0, 1, 500, 998, 999])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_one_value_anywhere_is_found_in_each_type(dtype: Any, place: int) -> None:
    check_finite([("whole", with_value(0.5, dtype, place), INF)])
    has_infinity = dtype is not torch.float8_e4m3fn
    for value in [NAN, INF, -INF] if has_infinity else [NAN]:
        tensor = with_value(value, dtype, place)
        with pytest.raises(WeightMismatch, match=r"1 of 1000 values of tensor 'broken'") as caught:
            check_finite([("fine", tensor.new_ones(3), INF), ("broken", tensor, INF)])
        assert caught.value.tensor == "broken"
        assert "weights.allow_nonfinite" in str(caught.value)


def test_the_first_is_named_and_the_others_are_counted() -> None:
    broken = torch.tensor([1.0, NAN])
    tensors = [("a", torch.ones(2), INF), ("b", broken, INF), ("c", broken, INF)]
    with pytest.raises(WeightMismatch, match="'b' are NaN or infinite; 1 more tensors"):
        check_finite(tensors)


def test_without_compiled_code_the_same_tensors_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    tensors = []
    for index in range(40):
        tensor = torch.randn(index + 1, 7).to(TYPES[index % len(TYPES)])
        if index % 5 == 2:
            tensor.view(-1)[index * 3] = NAN
        tensors.append((f"layer.{index}", tensor.T if index % 3 == 1 else tensor, INF))
    named = [one[0] for one in _with_nonfinite(tensors)]
    assert named == [f"layer.{index}" for index in range(2, 40, 5)]
    monkeypatch.setattr(bulk_copy, "_library", None)
    assert [one[0] for one in _with_nonfinite(tensors)] == named


@pytest.mark.parametrize("num_threads", [1, 3])
def test_threads_share_the_tensors(num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(num_threads))
    monkeypatch.setattr(bulk_copy, "_SHARE_BYTES", 9)
    tensors = [
        (str(index), torch.full((9,), NAN if index == 5 else 1.0), INF) for index in range(8)
    ]
    assert [one[0] for one in _with_nonfinite(tensors)] == ["5"]


def test_what_has_no_values_or_only_integers_passes() -> None:
    check_finite([("none", torch.empty(0), INF), ("ids", torch.tensor([1, 2]), INF)])


def test_a_view_that_is_not_contiguous_is_read_as_it_is() -> None:
    whole = torch.ones(8, 8)
    whole[0, 1] = NAN
    check_finite([("other columns", whole[:, 2:], INF), ("transposed", whole[1:].T, INF)])
    with pytest.raises(WeightMismatch, match="'columns'"):
        check_finite([("columns", whole[:, :2], INF)])


def test_values_that_the_models_type_does_not_have_are_named() -> None:
    assert largest_of("float64", "float8_e4m3fn") == INF
    assert largest_of("float32", "float16") == 65504
    assert largest_of("float64", "float32", "bfloat16") == torch.finfo(torch.bfloat16).max
    model = {"w": TensorSpec("w", "bfloat16", (2,))}
    assert largest_in(model, TensorSpec("w", "float16", (2,))) == 65504
    assert largest_in(model, TensorSpec("v", "float32", (2,))) == torch.finfo(torch.float32).max
    for dtype, words in (
        (torch.float16, "65504, the most of float16"),
        (torch.bfloat16, "bfloat16"),
    ):
        largest = torch.finfo(dtype).max
        tensor = torch.tensor([1.0, largest])
        check_finite([("w", tensor, largest)])
        with pytest.raises(WeightMismatch, match=rf"1 of 2 .* or over .*{words}"):
            check_finite([("w", tensor * 1.002, largest)])


# -- in a push ------------------------------------------------------------------------------------


def tensors_with(value: float) -> dict[str, Any]:
    return {"a": torch.ones(4, 4), "b": torch.tensor([1.0, value])}


def made(
    folder: Path,
    tensors: Any,
    *,
    allow: bool = False,
    transport: str = "shared_memory",
    **request: Any,
) -> Any:
    rank = TrainerRank(
        server_config(
            folder, shared_memory_path=str(folder), allow_nonfinite=allow, transport=transport
        )
    )
    return push_of_one_rank(
        rank, StillServer(), PushRequest(tensors, 1, **request), may_stream=False
    )


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_push_is_refused_before_anything_is_sent(
    value: float, is_compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_compiled:
        monkeypatch.setattr(bulk_copy, "_library", None)
    rank = TrainerRank(server_config(tmp_path, shared_memory_path=str(tmp_path)))
    request = PushRequest(tensors_with(value), 1)
    with pytest.raises(WeightMismatch, match="1 of 2 values of tensor 'b'"):
        push_of_one_rank(rank, StillServer(), request, may_stream=False)
    if not (is_compiled and bulk_copy.is_compiled()):
        assert not list(tmp_path.rglob("*.safetensors"))
    rank.close()
    assert not list(tmp_path.rglob("*.safetensors"))
    with made(tmp_path, tensors_with(value), allow=True) as push:
        assert push.weights.version == 1


@pytest.mark.parametrize(
    ("pushed", "model", "is_seen"),
    [
        ("bfloat16", "float32", True),
        ("bfloat16", "float16", False),
        ("float16", "float16", True),
        ("float16", "bfloat16", True),
        ("float32", "bfloat16", True),
        ("float32", "float16", False),
        ("float64", "float64", False),
        ("float8_e4m3fn", "float8_e4m3fn", False),
    ],
)
def test_what_compiled_code_cannot_see_is_not_left_to_the_copy(
    pushed: str, model: str, is_seen: bool
) -> None:
    can = bulk_copy.is_compiled() and is_seen
    specs = [TensorSpec("w", pushed, (2,)), TensorSpec("ids", "int64", (2,))]
    assert are_checked_in_copies(Manifest.of(specs), {"w": TensorSpec("w", model, (2,))}) is can
    alone = bulk_copy.is_compiled() and pushed in ("bfloat16", "float16", "float32")
    assert are_checked_in_copies(Manifest.of(specs), {}) is alone


@pytest.mark.skipif(not bulk_copy.is_compiled(), reason="needs the compiled code")
def test_what_is_only_suspect_passes() -> None:
    largest = torch.finfo(torch.bfloat16).max
    for value in (2.0**127, -largest):
        tensor = torch.tensor([1.0, value])
        assert bulk_copy.suspects(["float32"], [tensor.data_ptr()], [8]) == [True]
        check_finite([("w", tensor, largest)])


def test_a_cast_that_makes_infinite_values_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightMismatch, match="over 65504"):
        made(tmp_path, tensors_with(1e6), dtype=torch.float16)


def test_a_generator_is_checked_bucket_by_bucket(tmp_path: Path) -> None:
    def generate(value: float) -> Iterator[tuple[str, Any]]:
        yield from tensors_with(value).items()

    expected = Manifest.of([TensorSpec("a", "float32", (4, 4)), TensorSpec("b", "float16", (2,))])
    server = StillServer()
    server.expected = expected
    rank = TrainerRank(server_config(tmp_path, shared_memory_path=str(tmp_path)))
    for value in (NAN, 1e6):
        with pytest.raises(WeightMismatch, match="1 of 2 values of tensor 'b'"):
            push_of_one_rank(rank, server, PushRequest(generate(value), 1), may_stream=False)


def test_each_rank_checks_its_part_of_whole_tensors() -> None:
    tensors = {str(place): torch.ones(2) for place in range(7)} | {"7": torch.tensor([NAN, 1.0])}
    source = PlannedSource(tensors)
    for rank in range(3):
        if rank == 7 % 3:
            with pytest.raises(WeightMismatch, match="'7'"):
                source.check_values({}, rank, 3, 1 << 20)
        else:
            source.check_values({}, rank, 3, 1 << 20)


# -- tensors without values -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.eye(3).to_sparse(), r"'w' is torch.sparse_coo; push its to_dense\(\)"),
        (torch.empty(3, device="meta"), "'w' is on the meta device, so it has no values"),
    ],
)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_tensor_without_values_of_its_own_is_named(
    tensor: Any, message: str, is_streamed: bool
) -> None:
    def read() -> None:
        if is_streamed:
            source = StreamedSource([("w", tensor)], expected=None, name_map=None, dtype=None)
            next(source.buckets(100))
        else:
            PlannedSource({"w": tensor})

    with pytest.raises(WeightMismatch, match=message) as caught:
        read()
    assert caught.value.tensor == "w"


def test_a_plan_of_an_earlier_push_does_not_hide_it() -> None:
    from rollout.weights.tensors.push_plan import PushPlanCache

    plans, shape = PushPlanCache(), (4, 4)
    PlannedSource({"w": torch.ones(shape)}, plans=plans)
    for tensor in (torch.eye(4).to_sparse(), torch.empty(shape, device="meta")):
        with pytest.raises(WeightMismatch, match="'w' is"):
            PlannedSource({"w": tensor}, plans=plans)


# -- adapters -------------------------------------------------------------------------------------


def test_an_adapter_is_checked_too(tmp_path: Path) -> None:
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    adapter = {name.format("A"): torch.ones(2, 4), name.format("B"): torch.full((4, 2), NAN)}
    config = {"r": 2, "lora_alpha": 4}
    rank = TrainerRank(server_config(tmp_path, update=WeightUpdate.LORA))
    with pytest.raises(WeightMismatch, match=r"8 of 8 values of tensor '.*lora_B.weight'"):
        push_of_one_rank(
            rank, StillServer(), PushRequest(adapter, 1, adapter=config), may_stream=False
        )
