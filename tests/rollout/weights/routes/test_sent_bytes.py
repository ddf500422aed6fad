"""Every type, shape and layout over every route: an engine gets the values that the trainer has.

A tensor that is not sent right is refused by name; no third thing happens.  The bytes are those
that torch itself copies out of the trainer's tensor, read where an engine reads them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from engines.tensors.dtypes import DTYPES, SAFETENSORS_WORDS
from rollout.config import WeightUpdate
from rollout.core.errors import WeightMismatch
from rollout.weights.format.manifest import Manifest, TensorSpec, read_checkpoint_manifest
from rollout.weights.push.push import PushRequest
from rollout.weights.push.weight_push import push_weights
from rollout.weights.routes.adapter import AsAdapter
from rollout.weights.routes.route import PushTarget
from tests.support.byte_receiver import BroadcastProcess, ByteReceiver, contents
from tests.support.still_server import StillServer, server_config

torch = pytest.importorskip("torch")
from safetensors.torch import save_file  # noqa: E402

from rollout.weights.ranks.leader import push_of_one_rank  # noqa: E402
from rollout.weights.ranks.trainer_rank import TrainerRank  # noqa: E402
from rollout.weights.tensors import fp8_block_quantiser  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.embedded]
FLOATS = ("float64", "float32", "bfloat16", "float16")
SHAPES = ((), (1,), (0,), (0, 3), (5,), (3, 4), (2, 3, 5))
ROUTES: dict[str, tuple[dict[str, Any], bool]] = {
    "shared_memory, copied": ({"transport": "shared_memory"}, False),
    "shared_memory, streamed": ({"transport": "shared_memory", "stream": True}, True),
    "shared_memory, delta": ({"transport": "shared_memory", "encoding": "delta"}, False),
    "by_value": ({"transport": "by_value"}, False),
    "by_value, streamed": ({"transport": "by_value", "stream": True}, True),
    "disk": ({"transport": "disk"}, False),
    "distributed": ({"transport": "distributed", "backend": "gloo"}, True),
}
"""The settings of a push, and whether it may be streamed."""
BUCKETS = pytest.mark.parametrize("bucket_bytes", [1, 1 << 20], ids=["alone", "together"])
"""Each tensor in a bucket of its own, or all in one."""


def plain(values: Any) -> Any:
    return values


def transposed(values: Any) -> Any:
    return values.movedim(0, -1).contiguous().movedim(-1, 0) if values.dim() > 1 else values


def every_second(values: Any) -> Any:
    if not values.dim():
        return values
    wide = values.repeat_interleave(2, dim=-1)
    return wide[..., ::2]


def in_the_middle(values: Any) -> Any:
    """A view that begins at an odd element of larger memory."""
    flat = torch.zeros(values.numel() + 8, dtype=values.dtype)
    inner = flat[3 : 3 + values.numel()].view(values.shape)
    inner.copy_(values)
    return inner


def expanded(values: Any) -> Any:
    """One row, whose memory is read several times."""
    return values[:1].expand(values.shape) if values.dim() and values.numel() else values


def parameter(values: Any) -> Any:
    return torch.nn.Parameter(values, requires_grad=values.is_floating_point())


LAYOUTS: tuple[Callable[[Any], Any], ...] = (
    plain,
    transposed,
    every_second,
    in_the_middle,
    expanded,
    parameter,
)


@dataclass(frozen=True)
class Case:
    """What a trainer pushes, and what engines are to have then.

    Attributes:
        model_path: of a checkpoint; empty for none.
    """

    given: Mapping[str, Any]
    wanted: Mapping[str, Any]
    name_map: Any = None
    model_path: str = "/model"
    expected: Manifest | None = None
    more: Mapping[str, Any] = field(default_factory=dict)


def numbers(dtype: str, shape: tuple[int, ...], seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, 2 if dtype == "bool" else 100, shape, generator=generator)
    if dtype == "float8_e8m0fnu":  # it has powers of two only
        return torch.exp2((drawn % 8).float()).to(torch.float8_e8m0fnu)
    return drawn.float().to(getattr(torch, dtype))


def all_tensors(dtypes: tuple[str, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for dtype in dtypes:
        for shape in SHAPES:
            for layout in LAYOUTS:
                name = f"{dtype}.{'x'.join(map(str, shape))}.{layout.__name__}"
                # Not every operation exists in each type: the layout is made of integers as wide.
                values = numbers(dtype, shape, len(found))
                wide = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
                as_integers = values.view(wide[values.itemsize]) if values.dim() else values
                made = layout(as_integers)
                found[name] = made.view(values.dtype) if values.dim() else made
    return found


def plain_case(folder: Path) -> Case:
    given = all_tensors(tuple(SAFETENSORS_WORDS))
    return Case(given, given)


def mapped_case(folder: Path) -> Case:
    """A map that splits, turns and renames; its results are views."""
    given = {name: one for name, one in all_tensors(FLOATS).items() if one.dim() == 2}

    def name_map(name: str, tensor: Any) -> Iterator[tuple[str, Any]]:
        yield f"model.{name}.first", tensor[:1]
        yield f"model.{name}.rest", tensor[1:].t()

    wanted = {}
    for name, tensor in given.items():
        wanted[f"model.{name}.first"] = tensor[:1].clone()
        wanted[f"model.{name}.rest"] = tensor[1:].t().clone()
    return Case(given, wanted, name_map)


def cast_case(folder: Path) -> Case:
    """Float tensors are cast, the others stay."""
    given = {
        name: one for name, one in all_tensors((*FLOATS, "int64", "bool")).items() if one.numel()
    }
    wanted = {
        name: one.to(torch.bfloat16) if one.is_floating_point() else one
        for name, one in given.items()
    }
    return Case(given, wanted, more={"dtype": torch.bfloat16})


def stacked_case(folder: Path) -> Case:
    layer = "model.layers.0.mlp.experts"
    given, wanted = {}, {}
    for values in (torch.randn(3, 6, 4), torch.randn(6, 4, 3).permute(2, 0, 1)):
        place = layer.replace("0", str(len(given)))
        given[f"{place}.gate_up_proj"] = values
        for expert in range(3):
            wanted[f"{place}.{expert}.gate_proj.weight"] = values[expert, :3].clone()
            wanted[f"{place}.{expert}.up_proj.weight"] = values[expert, 3:].clone()
    specs = [TensorSpec(name, "float32", tuple(one.shape)) for name, one in wanted.items()]
    return Case(given, wanted, expected=Manifest.of(specs))


def fp8_case(folder: Path) -> Case:
    """A checkpoint in float8 with blocks of 2 x 2; what it has is quantised here once more."""
    weight = torch.tensor([[1.0, -2.0, 448.0], [4.0, 0.5, 0.0], [7.0, 14.0, 28.0]])
    scales = torch.tensor([[4 / 448, 1.0], [14 / 448, 28 / 448]])
    blocks = scales.repeat_interleave(2, 0)[:3].repeat_interleave(2, 1)[:, :3]
    values = (weight / blocks).to(torch.float8_e4m3fn)
    wanted = {"w.weight": values, "w.weight_scale_inv": scales, "norm.weight": torch.ones(3)}
    save_file(wanted, folder / "model.safetensors")
    quantisation = {
        "quant_method": "fp8",
        "weight_block_size": [2, 2],
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
    }
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantisation}))
    return Case(
        {"w.weight": weight.t().contiguous().t(), "norm.weight": torch.ones(3)},
        wanted,
        fp8_block_quantiser(folder),
        str(folder),
        read_checkpoint_manifest(folder),
    )


CASES = (plain_case, mapped_case, cast_case, stacked_case, fp8_case)


def rank_of(folder: Path, model_path: str, **settings: Any) -> TrainerRank:
    paths = {"shared_memory_path": str(folder), "disk_path": str(folder / "{version}")}
    return TrainerRank(server_config(model_path, **paths, **settings))


@pytest.fixture(scope="module")
def broadcasts() -> Iterator[BroadcastProcess]:
    with BroadcastProcess() as process:
        yield process


async def send(rank: TrainerRank, case: Case, engine: ByteReceiver, *, may_stream: bool) -> None:
    request = PushRequest(case.given, 1, case.name_map, **case.more)
    server = StillServer(case.expected)
    with push_of_one_rank(rank, server, request, may_stream=may_stream) as push:
        target = PushTarget(engine)  # type: ignore[arg-type]
        replies = await push_weights(push.weights, {"engine": target}, budget_s=120)
    assert replies["engine"].failure is None


@BUCKETS
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("route", ROUTES)
async def test_an_engine_gets_the_trainers_values(
    route: str,
    case: Callable[[Path], Case],
    bucket_bytes: int,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    settings, may_stream = ROUTES[route]
    made = case(tmp_path)
    few = len(made.given) < 40 or bucket_bytes > 1
    # A bucket for each of hundreds of tensors takes minutes by some routes.
    if not few:
        one_of_each = {name.split(".")[0]: name for name in made.given}.values()
        keep = set(one_of_each)
        wanted = {name: one for name, one in made.wanted.items() if any(k in name for k in keep)}
        given = {name: one for name, one in made.given.items() if name in keep}
        made = Case(given, wanted, made.name_map, made.model_path, made.expected, made.more)
    rank = rank_of(tmp_path, made.model_path, bucket_bytes=bucket_bytes, **settings)
    has_group = route == "distributed"
    engine = ByteReceiver(request.getfixturevalue("broadcasts") if has_group else None)
    await send(rank, made, engine, may_stream=may_stream)
    rank.close()
    wanted_bytes = {name: contents(one) for name, one in made.wanted.items()}
    assert engine.tensors.keys() == wanted_bytes.keys()
    wrong = [name for name, one in wanted_bytes.items() if engine.tensors[name] != one]
    assert not wrong
    assert engine.flushes[-1]
    assert not any(engine.flushes[:-1])


@pytest.mark.filterwarnings("ignore:torch.quantize")
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (lambda: torch.ones(2, 3).to_sparse(), "sparse"),
        (lambda: torch.ones(2, 3, device="meta"), "meta"),
        (lambda: torch.ones(2, dtype=torch.complex64), "complex64"),
        (lambda: torch.ones(2, dtype=torch.complex128), "complex128"),
        (lambda: [1.0, 2.0], "not a tensor"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8), "qint8"),
    ],
)
def test_what_no_route_sends_is_refused_by_name(
    route: str, tensor: Callable[[], Any], words: str, tmp_path: Path
) -> None:
    settings, may_stream = ROUTES[route]
    rank = rank_of(tmp_path, "/model", **settings)
    request = PushRequest({"fine": torch.ones(1), "bad": tensor()}, 1)
    with pytest.raises(WeightMismatch, match=rf"'bad'.*{words}"):
        push_of_one_rank(rank, StillServer(), request, may_stream=may_stream).close()
    rank.close()


def test_every_type_that_is_known_is_in_the_matrix() -> None:
    assert set(SAFETENSORS_WORDS) == {name for name in DTYPES if "complex" not in name}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_an_engine_gets_an_adapters_values(
    layout: Callable[[Any], Any], dtype: str, tmp_path: Path
) -> None:
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    given = {
        name.format("A"): layout(numbers(dtype, (2, 6), 1)),
        name.format("B"): layout(numbers(dtype, (4, 2), 2)),
    }
    rank = rank_of(tmp_path, "/model", update=WeightUpdate.LORA)
    case = Case(given, given, more={"adapter": {"r": 2, "lora_alpha": 2}})
    engine = ByteReceiver()
    request = PushRequest(case.given, 1, **case.more)
    with push_of_one_rank(rank, StillServer(), request, may_stream=False) as push:
        route = push.weights.route
        assert isinstance(route, AsAdapter)
        (bucket,) = push.weights.buckets
        assert isinstance(bucket, bytes)
        await route.load(PushTarget(engine), route.pack(bucket), 1)  # type: ignore[arg-type]
    rank.close()
    assert engine.tensors == {name: contents(one) for name, one in given.items()}
