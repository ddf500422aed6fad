"""No route takes a tensor that is not what the plan of the push says: its bytes would be others.

Routes copy as many bytes from a tensor's address as the plan says, so a tensor of a narrower type
would be pushed with the memory beside it, and verified with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout.config import WeightUpdate
from rollout.core.errors import WeightMismatch
from rollout.weights.format.manifest import TensorSpec
from rollout.weights.push.push import PushRequest
from rollout.weights.routes.rank_end import OwnGpu
from rollout.weights.routes.route import EnginePlace
from tests.support.cuda_double import CudaDouble
from tests.support.still_server import HERE, StillServer, server_config

torch = pytest.importorskip("torch")
from rollout.weights.ranks.follower import Follower, RankShares  # noqa: E402
from rollout.weights.ranks.leader import Leader, push_of_one_rank  # noqa: E402
from rollout.weights.ranks.trainer_rank import TrainerRank  # noqa: E402
from rollout.weights.tensors.payload import ExportSettings  # noqa: E402
from rollout.weights.tensors.sources import Pairs  # noqa: E402

pytestmark = pytest.mark.torch
GPU = "gpu-of-both"
ROUTES: dict[str, tuple[dict[str, Any], bool]] = {
    "shared_memory, copied": ({"transport": "shared_memory"}, False),
    "shared_memory, streamed": ({"transport": "shared_memory", "stream": True}, True),
    "shared_memory, delta": ({"transport": "shared_memory", "encoding": "delta"}, False),
    "shared_memory, store": ({"transport": "shared_memory", "store": {"path": "/dev/shm"}}, False),
    "by_value": ({"transport": "by_value"}, False),
    "disk": ({"transport": "disk"}, False),
    "distributed": ({"transport": "distributed", "backend": "gloo"}, True),
    "distributed, delta": ({"transport": "distributed", "encoding": "delta"}, True),
    "cuda_ipc": ({"transport": "cuda_ipc"}, True),
}
"""The settings of a push, and whether it is streamed."""
NameMap = Callable[[str, Any], Iterator[tuple[str, Any]]]


def in_matrices(name: str, tensor: Any) -> Iterator[tuple[str, Any]]:
    """Autocast computes it in bfloat16."""
    yield name, tensor @ torch.eye(len(tensor), dtype=tensor.dtype, device=tensor.device)


def in_losses(name: str, tensor: Any) -> Iterator[tuple[str, Any]]:
    """Autocast computes it in float32."""
    zeros = torch.zeros_like(tensor)
    yield name, torch.nn.functional.mse_loss(tensor, zeros, reduction="none")


WIDER_AND_NARROWER = pytest.mark.parametrize(
    ("dtype", "name_map", "planned", "made"),
    [
        pytest.param("float32", in_matrices, "float32", "bfloat16", id="narrower"),
        pytest.param("bfloat16", in_losses, "bfloat16", "float32", id="wider"),
    ],
)


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "cuda_ipc" in request.node.name:
        double = CudaDouble([GPU])
        double.install(monkeypatch.setattr)
        double.use(0)


def rank_of(folder: Path, **settings: Any) -> TrainerRank:
    paths = {"shared_memory_path": str(folder), "disk_path": str(folder / "{version}")}
    return TrainerRank(server_config(folder, **paths, **settings))


def make_first_bucket(rank: TrainerRank, request: PushRequest, *, streams: bool) -> None:
    gpus = (GPU,) if rank.config.weights.transport == "cuda_ipc" else ()
    server = StillServer(engines=[EnginePlace("engine", HERE, gpus, encodings=("delta",))])
    follower = Follower(rank, server, request)
    follower.__dict__["gpu"] = OwnGpu(GPU, ExportSettings("", "")) if gpus else None
    contents = request.contents(WeightUpdate.FULL)
    leader = Leader(server, follower, contents, may_stream=streams, streams=streams)
    with follower.resources:
        follower.prepare(leader.decide([follower.ready()]))
        follower.make(0)


@WIDER_AND_NARROWER
@pytest.mark.parametrize("route", ROUTES)
def test_no_route_gets_a_tensor_that_autocast_has_made_of_another_type(
    route: str,
    dtype: str,
    name_map: NameMap,
    planned: str,
    made: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[Any] = []
    make = RankShares.make

    def noted(shares: RankShares, *bucket: Any) -> Any:
        given.append(bucket)
        return make(shares, *bucket)

    monkeypatch.setattr(RankShares, "make", noted)
    settings, streams = ROUTES[route]
    rank = rank_of(tmp_path, **settings)
    weights = {"w": torch.ones(8, 8, dtype=getattr(torch, dtype))}
    request = PushRequest(weights, 1, name_map)
    make_first_bucket(rank, request, streams=streams)
    assert len(given) == 1
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(WeightMismatch, match=f"'w'.* {made} .* {planned} .*autocast") as caught,
    ):
        make_first_bucket(rank, request, streams=streams)
    assert len(given) == 1
    assert caught.value.tensor == "w"
    rank.close()
    assert not list(tmp_path.rglob("*.safetensors"))


@WIDER_AND_NARROWER
def test_a_plan_that_was_made_outside_of_autocast_is_not_followed_inside(
    dtype: str, name_map: NameMap, planned: str, made: str, tmp_path: Path
) -> None:
    rank, server = rank_of(tmp_path), StillServer()
    weights = {"w": torch.ones(8, 8, dtype=getattr(torch, dtype))}

    def push(version: int) -> Any:
        request = PushRequest(weights, version, name_map)
        return push_of_one_rank(rank, server, request, may_stream=False)

    push(1).close()
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(WeightMismatch, match="autocast"):
        push(2)
    with push(2) as made_push:
        assert made_push.weights.manifest.tensors["w"].dtype == planned
    rank.close()


def test_an_adapter_behind_a_name_map_is_compared_with_its_plan_too(tmp_path: Path) -> None:
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    adapter = {name.format("A"): torch.ones(4, 4), name.format("B"): torch.ones(4, 4)}
    rank = TrainerRank(server_config(tmp_path, update=WeightUpdate.LORA))
    request = PushRequest(adapter, 1, in_matrices, adapter={"r": 4, "lora_alpha": 4})
    push_of_one_rank(rank, StillServer(), request, may_stream=False).close()
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(WeightMismatch, match=r"'base.*A.weight'.* bfloat16 .* float32"),
    ):
        push_of_one_rank(rank, StillServer(), request, may_stream=False)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (torch.ones(2, 3, dtype=torch.bfloat16), r"is bfloat16 \[2, 3\], not float32 \[2, 3\]"),
        (torch.ones(2, 3, dtype=torch.int32), r"is int32 \[2, 3\], not float32 \[2, 3\]"),
        (torch.ones(3, 2), r"is float32 \[3, 2\], not float32 \[2, 3\]"),
        (torch.ones(2, 2), r"is float32 \[2, 2\], not float32 \[2, 3\]"),
        (torch.ones(2, 3).to_sparse(), "is torch.sparse_coo; push its"),
        (torch.ones(2, 3, device="meta"), "is on the meta device"),
        ([1.0] * 6, "is a list, not a tensor"),
    ],
)
def test_a_bucket_cannot_be_made_with_a_tensor_that_differs_from_its_description(
    given: Any, words: str
) -> None:
    specs = [TensorSpec("v", "float16", (1,)), TensorSpec("w", "float32", (2, 3))]
    fine = torch.ones(1, dtype=torch.float16)
    Pairs(specs, [fine, torch.ones(2, 3)])
    Pairs(specs, [fine, torch.ones(3, 2).T])
    with pytest.raises(WeightMismatch, match=f"'w' {words}") as caught:
        Pairs(specs, [fine, given])
    assert caught.value.tensor == "w"
