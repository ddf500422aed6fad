"""A wrong push is found here, and the error says how to fix it; SGLang would crash or ignore it."""

import struct
from pathlib import Path

import pytest

from engines.protocol import TensorInfo
from rollout.config import Casts
from rollout.core.errors import WeightMismatch
from rollout.weights.format.manifest import (
    Manifest,
    TensorSpec,
    check_push,
    read_checkpoint_manifest,
    wrong_patterns,
)
from tests.support.builders import manifest, write_checkpoint

EXPECTED = Manifest.of(
    [
        TensorSpec("embed.weight", "bfloat16", (16, 8)),
        TensorSpec("layers.0.mlp.weight", "bfloat16", (8, 8)),
        TensorSpec("ids", "int64", (4,)),
    ]
)


def pushed(**changed: TensorSpec) -> Manifest:
    return Manifest(dict(EXPECTED.tensors) | changed)


def test_a_whole_push_is_accepted_and_its_floats_may_be_of_another_width() -> None:
    check_push(EXPECTED, EXPECTED, must_be_complete=True)
    wider = pushed(**{"embed.weight": TensorSpec("embed.weight", "float32", (16, 8))})
    check_push(wider, EXPECTED, must_be_complete=True)


def test_an_unknown_name_is_told_with_the_nearest_known() -> None:
    name = "layers.0.mlp.weights"
    strange = pushed(**{name: TensorSpec(name, "bfloat16", (8, 8))})
    with pytest.raises(WeightMismatch, match=r"did you mean 'layers\.0\.mlp\.weight'") as caught:
        check_push(strange, EXPECTED, must_be_complete=False)
    assert caught.value.tensor == name


def test_a_name_like_no_other_is_told_without_a_guess() -> None:
    strange = Manifest.of([TensorSpec("zzzz", "float32", (1,))])
    with pytest.raises(WeightMismatch, match=r"^the model has no tensor 'zzzz'$"):
        check_push(strange, EXPECTED, must_be_complete=False)


def test_a_head_that_the_model_ties_to_its_embedding_is_told_with_what_works() -> None:
    embedding = TensorSpec("model.embed_tokens.weight", "bfloat16", (16, 8))
    tied = Manifest.of([embedding, *EXPECTED.tensors.values()])
    head = TensorSpec("lm_head.weight", "bfloat16", (16, 8))
    why = (
        r"no tensor 'lm_head.weight': its checkpoint ties the head to 'model.embed_tokens.weight', "
        r".* leave 'lm_head.weight' out, or give the same tensor under both names .* "
        "tie_word_embeddings false"
    )
    with pytest.raises(WeightMismatch, match=why):
        check_push(Manifest({**tied.tensors, head.name: head}), tied, must_be_complete=True)
    other = TensorSpec("lm_head.weight", "bfloat16", (1, 8))
    with pytest.raises(WeightMismatch, match=r"'lm_head\.weight'; did you mean"):
        check_push(Manifest({**tied.tensors, other.name: other}), tied, must_be_complete=True)


def test_a_wrong_shape_is_told_with_the_models() -> None:
    wrong = pushed(**{"embed.weight": TensorSpec("embed.weight", "bfloat16", (8, 16))})
    with pytest.raises(WeightMismatch, match=r"has shape \[8, 16\], the model's is \[16, 8\]"):
        check_push(wrong, EXPECTED, must_be_complete=False)


def test_another_kind_of_number_is_refused() -> None:
    wrong = pushed(ids=TensorSpec("ids", "float32", (4,)))
    with pytest.raises(WeightMismatch, match="'ids' is float32, the model's is int64"):
        check_push(wrong, EXPECTED, must_be_complete=False)


@pytest.mark.parametrize(
    ("pushed_dtype", "model_dtype", "casts", "is_accepted"),
    [
        ("float32", "bfloat16", Casts.NARROW, True),
        ("float64", "float32", Casts.NARROW, True),
        ("bfloat16", "float32", Casts.NARROW, False),
        ("float16", "float32", Casts.NARROW, False),
        ("float16", "bfloat16", Casts.NARROW, False),
        ("bfloat16", "float16", Casts.NARROW, False),
        ("bfloat16", "float32", Casts.ANY, True),
        ("float16", "bfloat16", Casts.ANY, True),
        ("float32", "bfloat16", Casts.NONE, False),
        ("float32", "float32", Casts.NONE, True),
        ("int64", "float32", Casts.ANY, False),
        ("float32", "int64", Casts.ANY, False),
    ],
)
def test_a_setting_says_which_floats_may_be_of_another_width(
    pushed_dtype: str, model_dtype: str, casts: Casts, is_accepted: bool
) -> None:
    one, other = (
        Manifest.of([TensorSpec("a", dtype, (2,))]) for dtype in (pushed_dtype, model_dtype)
    )
    if is_accepted:
        check_push(one, other, must_be_complete=True, casts=casts)
        return
    with pytest.raises(WeightMismatch, match=f"'a' is {pushed_dtype}, the model's is") as refused:
        check_push(one, other, must_be_complete=True, casts=casts)
    if "float" in pushed_dtype + model_dtype and casts is not Casts.ANY:
        assert f"push {model_dtype}, or set weights.casts to any" in str(refused.value)


QUANTISED = Manifest.of(
    [
        TensorSpec("q.weight", "float8_e4m3fn", (8, 8)),
        TensorSpec("q.weight_scale_inv", "float32", (1, 1)),
        TensorSpec("plain.weight", "float8_e4m3fn", (8, 8)),
    ]
)


@pytest.mark.parametrize("casts", list(Casts))
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e5m2"])
def test_a_wide_float_is_no_float8_and_the_refusal_names_the_quantiser(
    dtype: str, casts: Casts
) -> None:
    wide = Manifest(dict(QUANTISED.tensors) | {"q.weight": TensorSpec("q.weight", dtype, (8, 8))})
    with pytest.raises(
        WeightMismatch,
        match=f"'q.weight' is {dtype}, the model's is float8_e4m3fn with scales in "
        r"'q\.weight_scale_inv'; push with name_map=rollout\."
        "fp8_block_quantiser",
    ):
        check_push(wide, QUANTISED, must_be_complete=True, casts=casts)


@pytest.mark.parametrize(
    ("pushed_dtype", "model_dtype"), [("bfloat16", "float8_e4m3fn"), ("float8_e4m3fn", "bfloat16")]
)
def test_a_float8_without_scales_is_neither_cast_nor_quantised(
    pushed_dtype: str, model_dtype: str
) -> None:
    one, other = (
        Manifest.of([TensorSpec("plain.weight", dtype, (8, 8))])
        for dtype in (pushed_dtype, model_dtype)
    )
    with pytest.raises(WeightMismatch, match=f"is {pushed_dtype}, the model's.*; push that dtype$"):
        check_push(one, other, must_be_complete=True, casts=Casts.ANY)


def test_missing_tensors_are_counted_only_where_the_push_must_be_complete() -> None:
    part = Manifest({"ids": EXPECTED.tensors["ids"]})
    check_push(part, EXPECTED, must_be_complete=False)
    with pytest.raises(WeightMismatch, match=r"lacks 2 of 3 tensors, first 'embed\.weight'"):
        check_push(part, EXPECTED, must_be_complete=True)


def test_a_complete_push_leaves_out_what_is_not_pushed_and_only_that() -> None:
    part = Manifest({"ids": EXPECTED.tensors["ids"]})
    check_push(part, EXPECTED, must_be_complete=True, not_pushed=["embed.*", "layers.[01].*"])
    with pytest.raises(WeightMismatch, match=r"lacks 1 of 3 tensors, first 'layers\.0\.mlp"):
        check_push(part, EXPECTED, must_be_complete=True, not_pushed=["embed.*"])


@pytest.mark.parametrize("must_be_complete", [True, False])
def test_a_pushed_tensor_that_is_said_not_to_be_is_refused_with_the_pattern(
    must_be_complete: bool,
) -> None:
    with pytest.raises(WeightMismatch, match=r"'ids' is pushed, and .* with 'i\*'; leave it out"):
        check_push(
            EXPECTED, EXPECTED, must_be_complete=must_be_complete, not_pushed=["zz", "i*", "ids"]
        )


@pytest.mark.parametrize(
    ("pattern", "near"),
    [
        ("mpt.*", "mtp.fc.weight, mtp.norm.weight"),
        ("model.layers.61.*", "model.layers.60.a, model.layers.60.b, model.layers.60.c"),
        ("lm_haed.weight", "lm_head.weight"),
        ("*", ""),
    ],
)
def test_a_pattern_without_a_match_is_told_with_names_like_it(pattern: str, near: str) -> None:
    names = ["mtp.fc.weight", "mtp.norm.weight", "lm_head.weight", "model.norm.weight"]
    names += [f"model.layers.{layer}.{name}" for layer in (0, 60) for name in "abcd"]
    found = list(wrong_patterns([pattern], names))
    assert len(found) == 1
    assert near in found[0]


def test_patterns_that_match_some_names_are_right() -> None:
    assert list(wrong_patterns(["mtp.*", "lm_head.weight"], ["mtp.a", "lm_head.weight", "b"])) == []


def test_a_name_may_occur_once() -> None:
    spec = TensorSpec("embed.weight", "float32", (1,))
    with pytest.raises(WeightMismatch, match=r"'embed\.weight' is pushed twice"):
        Manifest.of([spec, spec])


def test_a_checkpoint_says_what_it_holds_in_its_headers(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    assert read_checkpoint_manifest(tmp_path) == manifest()


def test_the_files_of_a_sharded_checkpoint_are_read_together(tmp_path: Path) -> None:
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        write_checkpoint(folder, [TensorInfo(f"{name}.weight", "float32", (2,))])
        (folder / "model.safetensors").rename(tmp_path / f"model-{name}.safetensors")
    read = read_checkpoint_manifest(tmp_path)
    assert read is not None
    assert sorted(read.tensors) == ["one.weight", "two.weight"]


def test_a_checkpoint_in_another_format_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert read_checkpoint_manifest(tmp_path) is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1234",
        struct.pack("<Q", 10**9) + b"{}",
        struct.pack("<Q", 4) + b"oops",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 2) + b"\xff\xfe",
        struct.pack("<Q", 8) + b'{"a": 1}',
        struct.pack("<Q", 9) + b'{"a": {}}',
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(WeightMismatch, match=r"model\.safetensors is not a safetensors file"):
        read_checkpoint_manifest(tmp_path)
