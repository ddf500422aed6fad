"""A trainer's weights as a checkpoint in float8 holds them: values and a scale per block."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.fake import FakeEngine, FakeLauncher
from engines.protocol import Endpoint, TensorInfo
from engines.protocol.spec import EngineSpec
from rollout.config import Transport, WeightsConfig
from rollout.core.errors import ConfigError, WeightMismatch
from rollout.rules.lifecycle import Command
from rollout.weights.format.manifest import check_push, read_checkpoint_manifest
from rollout.weights.push.weight_push import check_fits
from tests.support.builders import started_group

torch = pytest.importorskip("torch")
from safetensors.torch import load_file, save_file  # noqa: E402

from rollout.weights.push.push import PushRequest  # noqa: E402
from rollout.weights.ranks.leader import push_of_one_rank  # noqa: E402
from rollout.weights.ranks.trainer_rank import TrainerRank  # noqa: E402
from rollout.weights.tensors import (  # noqa: E402
    PlannedSource,
    PushPlanCache,
    bytes_fingerprint,
    fp8_block_quantiser,
)
from rollout.weights.tensors.fp8_quantiser import quantised  # noqa: E402
from rollout.weights.tensors.sources import StreamedSource  # noqa: E402
from tests.support.still_server import StillServer, make_push, server_config  # noqa: E402

pytestmark = pytest.mark.embedded
BLOCK = (128, 128)
QUANTISATION = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": list(BLOCK),
}
EMBED, NORM, PROJ = "model.embed_tokens.weight", "model.norm.weight", "model.q_proj.weight"
SHAPES = {EMBED: (64, 200), NORM: (200,), PROJ: (300, 200)}


def trained(seed: int = 0) -> dict[str, "torch.Tensor"]:
    """A trainer's model in bfloat16."""
    numbers = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=numbers).to(torch.bfloat16)
        for name, shape in SHAPES.items()
    }


def write_fp8_checkpoint(
    folder: Path,
    quantisation: Mapping[str, Any] | None = None,
    changed: Mapping[str, "torch.Tensor"] | None = None,
) -> Path:
    """The same model on disk, with the projection in float8."""
    values, scales = reference(trained()[PROJ], BLOCK)
    tensors = trained() | {PROJ: values, f"{PROJ}_scale_inv": scales} | dict(changed or {})
    try:
        save_file(tensors, folder / "model.safetensors")
    except KeyError as error:
        pytest.skip(f"this version of safetensors has no {error}")
    config = {"quantization_config": {**QUANTISATION, **(quantisation or {})}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def reference(
    weight: "torch.Tensor", block: tuple[int, int]
) -> tuple["torch.Tensor", "torch.Tensor"]:
    """Block by block, one at a time."""
    rows, columns = (-(-size // edge) for size, edge in zip(weight.shape, block, strict=True))
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(rows, columns)
    for row in range(rows):
        for column in range(columns):
            part = (
                slice(row * block[0], (row + 1) * block[0]),
                slice(column * block[1], (column + 1) * block[1]),
            )
            piece = weight[part].float()
            largest = piece.abs().max()
            scale = largest / 448 if largest / 448 > 0 else torch.tensor(1.0)
            scales[row, column] = scale
            values[part] = (piece / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return values, scales


def dequantised(
    values: "torch.Tensor", scales: "torch.Tensor", block: tuple[int, int]
) -> "torch.Tensor":
    rows, columns = values.shape
    wide = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return values.float() * wide[:rows, :columns]


@given(
    shape=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    block=st.tuples(st.sampled_from([1, 3, 16]), st.sampled_from([1, 5, 16])),
    exponent=st.integers(-45, 30),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float16]),
    seed=st.integers(0, 2**16),
)
def test_it_is_what_one_block_at_a_time_gives_with_edges_of_any_size(
    shape: tuple[int, int],
    block: tuple[int, int],
    exponent: int,
    dtype: "torch.dtype",
    seed: int,
) -> None:
    numbers = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=numbers) * torch.rand(shape, generator=numbers).round()
    weight = (weight * 10.0 ** min(exponent, 3 if dtype is torch.float16 else 30)).to(dtype)
    values, scales = quantised(weight, block)
    want_values, want_scales = reference(weight, block)
    assert torch.equal(scales, want_scales)
    assert torch.equal(values.view(torch.uint8), want_values.view(torch.uint8))
    # 3 bits after the leading one: half a step is 1/16 of the value; 2^-10 of a scale below that.
    error = (dequantised(values, scales, block) - weight.float()).abs()
    wide = dequantised(torch.ones_like(values.float()), scales, block)
    assert bool((error <= weight.float().abs() / 16 * 1.001 + wide * 2**-10 * 1.001).all()) or (
        float(scales.min()) < 1e-37  # such scales have fewer bits themselves
    )


def test_a_block_of_zeros_stays_zero_and_the_largest_value_stays_finite() -> None:
    weight = torch.zeros(4, 4)
    weight[2:, 2:] = 1e-3
    values, scales = quantised(weight, (2, 2))
    assert scales[0, 0] == 1.0
    assert torch.equal(values[:2, :2].float(), torch.zeros(2, 2))
    assert torch.equal(values[2:, 2:].float(), torch.full((2, 2), 448.0))


def test_scales_in_ue8m0_are_the_next_power_of_two(tmp_path: Path) -> None:
    folder = write_fp8_checkpoint(tmp_path, {"scale_fmt": "ue8m0"})
    weight = trained()[PROJ]
    weight[:128, :128] = 0
    weight[128, 0] = 448 / 8  # its scale is a power of two by itself
    weight[128:256, 1:128] = weight[129:256, :1] = 0
    (_, values), (_, scales) = fp8_block_quantiser(folder)(PROJ, weight)
    _, exact = reference(weight, BLOCK)
    wanted = 2.0 ** torch.ceil(torch.log2(exact.double()))
    assert torch.equal(scales.double(), wanted)
    assert (scales[0, 0], scales[1, 0]) == (1, 0.125)
    for row, column in ((0, 1), (2, 1)):
        part = slice(row * 128, (row + 1) * 128), slice(column * 128, (column + 1) * 128)
        divided = (weight[part].float() / scales[row, column]).to(torch.float8_e4m3fn)
        assert torch.equal(values[part].float(), divided.float())


def test_stacked_experts_of_a_trainer_are_split_and_quantised(tmp_path: Path) -> None:
    """As transformers 5 holds them, pushed whole or by a generator."""
    experts, names = "model.layers.0.mlp.experts", ("gate_proj", "up_proj", "down_proj")
    numbers = torch.Generator().manual_seed(1)
    stacked = {
        f"{experts}.gate_up_proj": torch.randn(2, 2 * 140, 130, generator=numbers),
        f"{experts}.down_proj": torch.randn(2, 130, 140, generator=numbers),
    }
    single: dict[str, torch.Tensor] = {}
    for expert in range(2):
        gate, up = stacked[f"{experts}.gate_up_proj"][expert].chunk(2)
        parts = (gate, up, stacked[f"{experts}.down_proj"][expert])
        for name, part in zip(names, parts, strict=True):
            values, scales = reference(part, BLOCK)
            weight = f"{experts}.{expert}.{name}.weight"
            single |= {weight: values, f"{weight}_scale_inv": scales}
    folder = write_fp8_checkpoint(tmp_path, changed=single)
    tensors, expected = trained() | stacked, read_checkpoint_manifest(folder)
    quantise = fp8_block_quantiser(folder)
    assert expected is not None
    planned = PlannedSource(tensors, expected=expected, name_map=quantise)
    assert dict(planned.manifest.tensors) == dict(expected.tensors)
    streamed = StreamedSource(
        iter(tensors.items()), expected=expected, name_map=quantise, dtype=None
    )
    for source in (planned, streamed):
        found = dict(pair for pairs, _ in source.buckets(50_000) for pair in pairs)
        assert found.keys() == expected.tensors.keys()
        for name, tensor in single.items():
            assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_only_what_the_checkpoint_holds_in_float8_is_quantised(tmp_path: Path) -> None:
    quantise = fp8_block_quantiser(write_fp8_checkpoint(tmp_path))
    tensors = trained()
    assert [name for name, _ in quantise(EMBED, tensors[EMBED])] == [EMBED]
    assert next(iter(quantise(NORM, tensors[NORM])))[1] is tensors[NORM]
    (name, values), (scale_name, scales) = quantise(PROJ, tensors[PROJ])
    assert (name, scale_name) == (PROJ, f"{PROJ}_scale_inv")
    assert (values.dtype, scales.dtype) == (torch.float8_e4m3fn, torch.float32)
    assert tuple(scales.shape) == (3, 2)
    assert [one for one, _ in quantise(PROJ, values)] == [PROJ]  # a trainer may hold it so


def test_the_outline_of_a_push_has_the_checkpoints_names_types_and_shapes(tmp_path: Path) -> None:
    folder = write_fp8_checkpoint(tmp_path)
    expected = read_checkpoint_manifest(folder)
    assert expected is not None
    weights = PlannedSource(trained(), expected=expected, name_map=fp8_block_quantiser(folder))
    assert dict(weights.manifest.tensors) == dict(expected.tensors)
    check_push(weights.manifest, expected, must_be_complete=True)


def test_a_tied_head_is_left_out_as_without_a_name_map(tmp_path: Path) -> None:
    folder = write_fp8_checkpoint(tmp_path)
    tensors = trained()
    tensors["lm_head.weight"] = tensors[EMBED]
    weights = PlannedSource(
        tensors,
        expected=read_checkpoint_manifest(folder),
        name_map=fp8_block_quantiser(folder),
    )
    assert "lm_head.weight" not in weights.manifest.tensors


def test_a_plan_is_kept_for_the_same_quantiser(tmp_path: Path) -> None:
    quantise = fp8_block_quantiser(write_fp8_checkpoint(tmp_path))
    plans = PushPlanCache()
    first, second = (
        PlannedSource(trained(seed), name_map=quantise, plans=plans) for seed in range(2)
    )
    assert first.manifest is second.manifest


@pytest.mark.parametrize(
    ("transport", "at_once", "num_loads"),
    [
        (Transport.SHARED_MEMORY, False, 2),
        (Transport.SHARED_MEMORY, True, 1),
        (Transport.DISK, False, 1),
    ],
)
def test_a_pushed_model_is_the_checkpoint_that_a_quantising_export_would_write(
    tmp_path: Path, transport: Transport, at_once: bool, num_loads: int
) -> None:
    source = tmp_path / "checkpoint"
    source.mkdir()
    write_fp8_checkpoint(source)
    quantise = fp8_block_quantiser(source)
    paths = {"disk_path": str(tmp_path / "saved-{version}"), "shared_memory_path": str(tmp_path)}
    config = server_config(source, transport=transport, bucket_bytes=70_000, **paths)
    rank = TrainerRank(config)
    rank.loads.is_at_once = at_once
    tensors = trained(seed=7)
    server = StillServer(read_checkpoint_manifest(source))
    outgoing = push_of_one_rank(rank, server, PushRequest(tensors, 1, quantise), may_stream=True)
    assert len(outgoing.weights.buckets) == num_loads
    found: dict[str, torch.Tensor] = {}
    for bucket in outgoing.weights.buckets:
        assert isinstance(bucket, Mapping)
        for file in Path(bucket["path"]).glob("*.safetensors"):
            found |= {name: tensor.clone() for name, tensor in load_file(file).items()}
    outgoing.close()
    rank.close()
    values, scales = reference(tensors[PROJ], BLOCK)
    wanted = tensors | {PROJ: values, f"{PROJ}_scale_inv": scales}
    assert found.keys() == wanted.keys() == outgoing.weights.manifest.fingerprints.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype is tensor.dtype
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize("stream", [False, True])
def test_no_engine_gets_what_was_quantised_of_a_nan_and_the_check_quantises_nothing(
    tmp_path: Path, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "checkpoint"
    source.mkdir()
    write_fp8_checkpoint(source)
    quantise = fp8_block_quantiser(source)
    rank = TrainerRank(server_config(source, shared_memory_path=str(tmp_path), stream=stream))
    server, tensors = StillServer(read_checkpoint_manifest(source)), trained()
    quantised_on: list[str] = []
    monkeypatch.setattr(
        "rollout.weights.tensors.fp8_quantiser.quantised",
        lambda weight, *more, **kind: (
            quantised_on.append(weight.device.type) or quantised(weight, *more, **kind)
        ),
    )
    push_of_one_rank(rank, server, PushRequest(tensors, 1, quantise), may_stream=stream).close()
    assert quantised_on == ["meta"] + ["cpu"] * (not stream)  # streamed: as engines take it
    tensors[PROJ][3, 5] = torch.nan
    with pytest.raises(WeightMismatch, match=f"tensor '{PROJ}.* NaN"):
        push_of_one_rank(rank, server, PushRequest(tensors, 1, quantise), may_stream=stream)
    rank.close()


async def test_engines_with_the_checkpoint_hold_and_verify_what_was_quantised(
    tmp_path: Path,
) -> None:
    folder = write_fp8_checkpoint(tmp_path)
    expected = read_checkpoint_manifest(folder)
    assert expected is not None
    held = [TensorInfo(one.name, one.dtype, one.shape) for one in expected.tensors.values()]

    def holding(spec: EngineSpec, endpoint: Endpoint) -> FakeEngine:
        return FakeEngine(spec.engine_id, endpoint=endpoint, tensors=held, reports_manifest=True)

    group, engines = await started_group(
        2, needs_offload=False, launcher=FakeLauncher(holding), model_path=str(folder)
    )
    await group.run(Command.PAUSE_GENERATION)
    await group.run(Command.FLUSH_CACHE)
    as_trained = make_push(trained(1), version=1, bucket_bytes=70_000)
    with pytest.raises(WeightMismatch, match=r"push with name_map=.*fp8_block_quantiser"):
        check_fits(as_trained, "policy", WeightsConfig(), "", expected)
    push = make_push(
        trained(1), version=1, bucket_bytes=70_000, name_map=fp8_block_quantiser(folder)
    )
    check_fits(push, "policy", WeightsConfig(), "", expected)
    await group.run(Command.UPDATE_WEIGHTS, push=push)
    assert not (await group.run(Command.VERIFY, version=1)).failures
    values, scales = reference(trained(1)[PROJ], BLOCK)
    for engine in engines:
        assert engine.weights.digests[PROJ] == bytes_fingerprint(PROJ, values)
        scale_name = f"{PROJ}_scale_inv"
        assert engine.weights.digests[scale_name] == bytes_fingerprint(scale_name, scales)
    await group.stop()


@pytest.mark.parametrize(
    ("quantisation", "changed", "why"),
    [
        ({"quant_method": "gptq"}, {}, "quant_method is 'gptq', not 'fp8'"),
        ({"fmt": "e5m2"}, {}, "fmt is 'e5m2'"),
        ({"scale_fmt": "e5m2"}, {}, "scale_fmt is 'e5m2', not 'ue8m0'"),
        (
            {"scale_fmt": "ue8m0"},
            {f"{PROJ}_scale_inv": torch.zeros(3, 2, dtype=torch.float8_e8m0fnu)},
            "scale_inv is float8_e8m0fnu, not float32",
        ),
        ({"weight_block_size": None}, {}, "weight_block_size is None"),
        ({"weight_block_size": [64, 128]}, {}, r"shape \[3, 2\], and \[300, 200\] has \[5, 2\]"),
        ({}, {PROJ: torch.zeros(300, 200)}, f"{PROJ} is float32 of shape .*, not a matrix"),
        (
            {},
            {f"{PROJ}_scale_inv": torch.zeros(3, 2, dtype=torch.float16)},
            "scale_inv is float16, not float32",
        ),
    ],
)
def test_another_quantisation_is_refused_by_name(
    tmp_path: Path,
    quantisation: Mapping[str, Any],
    changed: Mapping[str, "torch.Tensor"],
    why: str,
) -> None:
    write_fp8_checkpoint(tmp_path, quantisation, changed)
    with pytest.raises(ConfigError, match=f"cannot be pushed to by fp8_block_quantiser: .*{why}"):
        fp8_block_quantiser(tmp_path)


def test_a_checkpoint_that_is_not_quantised_is_refused(tmp_path: Path) -> None:
    save_file(trained(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="there is no quantization_config"):
        fp8_block_quantiser(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": QUANTISATION}))
    with pytest.raises(ConfigError, match=r"holds no tensor \.\.\._scale_inv"):
        fp8_block_quantiser(tmp_path)


def test_a_weight_that_is_no_matrix_is_refused(tmp_path: Path) -> None:
    quantise = fp8_block_quantiser(write_fp8_checkpoint(tmp_path))
    with pytest.raises(WeightMismatch, match=r"is torch\.float32 of shape \[2, 2, 2\], and only"):
        list(quantise(PROJ, torch.zeros(2, 2, 2)))
