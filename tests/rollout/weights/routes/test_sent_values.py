"""The values that are checked are those that engines would hold: after the name map, in their type.

Where all tensors are known before the first is sent, no engine gets anything of a push with a value
that is no number; a generator is checked bucket by bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from engines.fake import FakeEngine
from engines.tensors import bulk_copy
from rollout.core.errors import WeightMismatch, WeightsUnavailable
from rollout.weights.format.manifest import Manifest, TensorSpec
from rollout.weights.push.push import PushRequest
from rollout.weights.push.weight_push import push_weights
from rollout.weights.routes.route import PushTarget
from tests.support.still_server import StillServer, server_config

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import Shard, distribute_tensor  # noqa: E402

from rollout.weights.ranks.leader import push_of_one_rank  # noqa: E402
from rollout.weights.ranks.trainer_rank import TrainerRank  # noqa: E402
from rollout.weights.tensors import finite_check  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.embedded]
LAYER = "model.layers.0.mlp.experts"
OTHER, NORM = "model.embed.weight", "model.norm.weight"
ROUTES: dict[str, tuple[dict[str, Any], bool]] = {
    "shared_memory, copied": ({"transport": "shared_memory"}, False),
    "shared_memory, delta": ({"transport": "shared_memory", "encoding": "delta"}, False),
    "shared_memory, streamed": ({"transport": "shared_memory", "stream": True}, True),
    "by_value": ({"transport": "by_value"}, False),
    "by_value, streamed": ({"transport": "by_value", "stream": True}, True),
    "disk": ({"transport": "disk"}, False),
    "distributed": ({"transport": "distributed", "backend": "gloo"}, True),
}
"""The settings of a push, and whether it may be streamed."""
VALUES = {
    "NaN": ("float32", "float32", float("nan"), "NaN or infinite[.]"),
    "infinite": ("bfloat16", "bfloat16", float("-inf"), "the most of bfloat16"),
    "over float16": ("float32", "float16", 1e6, "or over 65504, the most of float16"),
    "over bfloat16": (
        "float32",
        "bfloat16",
        -3.4e38,
        r"or over 3.38953e\+38, the most of bfloat16",
    ),
    "double over bfloat16": ("float64", "bfloat16", 1e300, "the most of bfloat16"),
    "double over float32": ("float64", "float32", 1e39, r"3.40282e\+38, the most of float32"),
}
"""The trainer's type, the model's, a value, and the words of the error."""


@dataclass(frozen=True)
class Pushed:
    """What a trainer pushes, and the model's tensors.

    Attributes:
        bad: the model's name of the tensor with the value.
    """

    tensors: Mapping[str, Any]
    model: Manifest
    bad: str
    name_map: Any = None


def plain(dtype: Any, model: str, value: float) -> Pushed:
    tensors = {OTHER: torch.ones(8, 4, dtype=dtype), NORM: torch.ones(4, dtype=dtype)}
    tensors[NORM][2] = value
    return Pushed(tensors, manifest(model, {OTHER: (8, 4), NORM: (4,)}), NORM)


def to_model(name: str, tensor: Any) -> Iterator[tuple[str, Any]]:
    yield f"model.{name}", tensor


def mapped(dtype: Any, model: str, value: float) -> Pushed:
    given = plain(dtype, model, value)
    tensors = {name.removeprefix("model."): value for name, value in given.tensors.items()}
    return replace(given, tensors=tensors, name_map=to_model)


def stacked(dtype: Any, model: str, value: float) -> Pushed:
    experts = torch.ones(2, 6, 4, dtype=dtype)
    experts[1, 4, 2] = value
    names = [f"{LAYER}.{n}.{part}_proj.weight" for n in range(2) for part in ("gate", "up")]
    shapes: dict[str, tuple[int, ...]] = {**dict.fromkeys(names, (3, 4)), OTHER: (8, 4)}
    tensors = {f"{LAYER}.gate_up_proj": experts, OTHER: torch.ones(8, 4, dtype=dtype)}
    return Pushed(tensors, manifest(model, shapes), names[-1])


def manifest(dtype: str, shapes: Mapping[str, tuple[int, ...]]) -> Manifest:
    return Manifest.of(TensorSpec(name, dtype, shape) for name, shape in shapes.items())


def rank_of(folder: Path, **settings: Any) -> TrainerRank:
    paths = {"shared_memory_path": str(folder), "disk_path": str(folder / "{version}")}
    return TrainerRank(server_config(folder, **paths, **settings))


def push(
    rank: TrainerRank, pushed: Pushed, *, may_stream: bool, tensors: Any = None, **more: Any
) -> Any:
    request = PushRequest(tensors or pushed.tensors, 1, pushed.name_map, **more)
    return push_of_one_rank(rank, StillServer(pushed.model), request, may_stream=may_stream)


@pytest.mark.parametrize("is_compiled", [True, False], ids=["compiled", "python"])
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("form", [plain, mapped, stacked])
@pytest.mark.parametrize("route", ROUTES)
def test_a_value_that_engines_could_not_hold_is_refused_before_the_server_is_called(
    route: str,
    form: Callable[[Any, str, float], Pushed],
    value: str,
    is_compiled: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not is_compiled:
        monkeypatch.setattr(bulk_copy, "_library", None)
    settings, may_stream = ROUTES[route]
    own, model, bad, words = VALUES[value]
    rank = rank_of(tmp_path, bucket_bytes=64, **settings)
    pushed = form(getattr(torch, own), model, bad)
    with pytest.raises(WeightMismatch, match=f"1 of .* of tensor '{pushed.bad}' are .*{words}"):
        push(rank, pushed, may_stream=may_stream).close()
    rank.close()
    assert not list(tmp_path.rglob("*.safetensors"))
    rank = rank_of(tmp_path, bucket_bytes=64, **settings)
    push(rank, form(getattr(torch, own), model, 2.0), may_stream=may_stream).close()
    rank.close()


@pytest.mark.parametrize("route", ROUTES)
def test_a_name_map_that_makes_no_numbers_of_numbers_is_refused_too(
    route: str, tmp_path: Path
) -> None:
    def divide(name: str, tensor: Any) -> Iterator[tuple[str, Any]]:
        yield f"model.{name}", tensor / tensor

    settings, may_stream = ROUTES[route]
    rank = rank_of(tmp_path, **settings)
    pushed = replace(mapped(torch.float32, "float32", 0.0), name_map=divide)
    with pytest.raises(WeightMismatch, match=f"1 of 4 values of tensor '{NORM}' are NaN"):
        push(rank, pushed, may_stream=may_stream).close()
    rank.close()


@pytest.mark.parametrize("route", ROUTES)
def test_a_cast_of_the_push_is_before_the_map_and_the_check(route: str, tmp_path: Path) -> None:
    settings, may_stream = ROUTES[route]
    rank = rank_of(tmp_path, **settings)
    pushed = mapped(torch.float32, "float16", 1e6)
    with pytest.raises(WeightMismatch, match=f"1 of 4 values of tensor '{NORM}'"):
        push(rank, pushed, may_stream=may_stream, dtype=torch.float16).close()
    rank.close()


def test_the_largest_values_of_the_models_type_pass(tmp_path: Path) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        rank = rank_of(tmp_path, transport="shared_memory")
        name = str(dtype).removeprefix("torch.")
        for value in (torch.finfo(dtype).max, torch.finfo(dtype).min):
            push(rank, mapped(torch.float32, name, value), may_stream=False).close()
        rank.close()


def test_what_may_hold_no_numbers_is_not_checked_behind_a_map(tmp_path: Path) -> None:
    for settings, may_stream in ROUTES.values():
        rank = rank_of(tmp_path, allow_nonfinite=True, **settings)
        for form in (plain, mapped, stacked):
            push(rank, form(torch.float32, "float16", 1e6), may_stream=may_stream).close()
        rank.close()


# -- once -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [plain, mapped, stacked])
@pytest.mark.parametrize("route", ROUTES)
def test_each_value_is_read_once(
    route: str,
    form: Callable[[Any, str, float], Pushed],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As it is copied, if all are copied before the server is called; also of float32 masters."""
    if not bulk_copy.is_compiled():
        pytest.skip("needs the compiled code")
    read: dict[str, int] = {"copied": 0, "read": 0}
    read_again: list[Any] = []
    copy_and_check, suspects = bulk_copy.copy_and_check, bulk_copy.suspects

    def copied(*given: Any) -> Any:
        read["copied"] += sum(given[3])
        return copy_and_check(*given)

    def looked(*given: Any) -> Any:
        read["read"] += sum(given[2])
        return suspects(*given)

    monkeypatch.setattr(bulk_copy, "copy_and_check", copied)
    monkeypatch.setattr(bulk_copy, "suspects", looked)
    monkeypatch.setattr(finite_check, "_in_ranges", read_again.__iadd__)
    settings, may_stream = ROUTES[route]
    rank = rank_of(tmp_path, bucket_bytes=64, **settings)
    pushed = form(torch.float32, "bfloat16", 2.0)
    made = push(rank, pushed, may_stream=may_stream)
    num_bytes = sum(tensor.nbytes for tensor in pushed.tensors.values())
    where = "copied" if route == "shared_memory, copied" else "read"
    assert read == {"copied": 0, "read": 0, where: num_bytes}
    assert not read_again
    made.close()
    rank.close()


# -- where not all values are known before ---------------------------------------------------------


class Loading(FakeEngine):
    """Counts the updates that it gets."""

    num_updates = 0

    async def update_weights_from_tensor(self, *given: Any, **more: Any) -> None:
        self.num_updates += 1
        await super().update_weights_from_tensor(*given, **more)


async def test_a_bucket_of_a_generator_is_checked_before_it_is_sent(tmp_path: Path) -> None:
    pushed = mapped(torch.float32, "bfloat16", 3.4e38)
    rank = rank_of(tmp_path, transport="by_value", stream=True, bucket_bytes=64)
    engine = Loading("engine")
    with (
        push(rank, pushed, may_stream=True, tensors=iter(pushed.tensors.items())) as made,
        pytest.raises(WeightsUnavailable, match=f"1 of 4 values of tensor '{NORM}'"),
    ):
        await push_weights(made.weights, {"engine": PushTarget(engine)}, budget_s=20)
    assert engine.num_updates < 2  # the bucket before, if it came in time
    rank.close()


def test_a_generator_that_is_copied_is_refused_before_the_server_is_called(tmp_path: Path) -> None:
    pushed = mapped(torch.float32, "bfloat16", 3.4e38)
    rank = rank_of(tmp_path, bucket_bytes=64)
    with pytest.raises(WeightMismatch, match=f"1 of 4 values of tensor '{NORM}'"):
        push(rank, pushed, may_stream=False, tensors=iter(pushed.tensors.items()))
    rank.close()


@pytest.fixture
def mesh() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


async def test_what_a_map_makes_of_shards_is_checked_before_its_bucket_is_sent(
    tmp_path: Path, mesh: Any
) -> None:
    """It is known after the gather only."""
    pushed = mapped(torch.float32, "bfloat16", 3.4e38)
    cut = {n: distribute_tensor(t, mesh, [Shard(0)]) for n, t in pushed.tensors.items()}
    rank = rank_of(tmp_path, transport="by_value", stream=True, bucket_bytes=64)
    engine = Loading("engine")
    with (
        push(rank, pushed, may_stream=True, tensors=cut) as made,
        pytest.raises(WeightsUnavailable, match=f"1 of 4 values of tensor '{NORM}'"),
    ):
        await push_weights(made.weights, {"engine": PushTarget(engine)}, budget_s=20)
    assert engine.num_updates < 2
    rank.close()


@pytest.mark.parametrize("value", ["NaN", "over float16", "over bfloat16"])
@pytest.mark.parametrize("form", [plain, stacked])
def test_shards_whose_values_the_model_keeps_are_checked_before_the_first_gather(
    form: Callable[[Any, str, float], Pushed], value: str, tmp_path: Path, mesh: Any
) -> None:
    own, model, bad, words = VALUES[value]
    pushed = form(getattr(torch, own), model, bad)
    cut = {n: distribute_tensor(t, mesh, [Shard(0)]) for n, t in pushed.tensors.items()}
    rank = rank_of(tmp_path, transport="by_value", stream=True, bucket_bytes=64)
    with pytest.raises(WeightMismatch, match=f"1 of .*{words}"):
        push(rank, pushed, may_stream=True, tensors=cut).close()
    rank.close()
