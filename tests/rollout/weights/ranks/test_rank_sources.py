"""What one rank pushes, bucket by bucket: renamed, split, cast, and never all whole at once."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout.core.errors import WeightMismatch
from rollout.weights.format.manifest import Manifest, TensorSpec, read_checkpoint_manifest

torch = pytest.importorskip("torch")
from rollout.weights.tensors import PushPlanCache  # noqa: E402
from rollout.weights.tensors.sources import (  # noqa: E402
    PlannedSource,
    StreamedSource,
    cast_to,
)

pytestmark = pytest.mark.embedded
BUCKET_BYTES = 1000
WRAPPED = "model._orig_mod.layers.0._checkpoint_wrapped_module.mlp.weight"
PLAIN = "model.layers.0.mlp.weight"


def sources(named: dict[str, Any], expected: Manifest | None = None, **more: Any) -> list[Any]:
    """Rank 0's and another rank's source of a mapping, and that of a generator."""
    options: dict[str, Any] = {"name_map": None, "dtype": None, "expected": expected, **more}
    plans = PushPlanCache()
    first = PlannedSource(named, plans=plans, is_on_all_ranks=True, **options)
    # Another rank has its tensors in any order.
    mixed = dict(reversed(named.items()))
    other = PlannedSource(
        mixed, tensors=first.tensors, plans=plans, is_on_all_ranks=True, **options
    )
    return [
        first,
        other,
        StreamedSource(iter(named.items()), **options),
    ]


def tensors_of(source: Any) -> dict[str, Any]:
    return {name: one for pairs, _ in source.buckets(BUCKET_BYTES) for name, one in pairs}


def test_the_names_of_wrapped_modules_are_the_checkpoints() -> None:
    for source in sources({WRAPPED: torch.ones(2)}):
        assert list(tensors_of(source)) == [PLAIN]


def test_stacked_experts_are_pushed_as_the_checkpoint_has_them(tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from rollout.testing.tiny_model import make_tiny_model

    path = make_tiny_model(tmp_path / "model", "qwen3_moe", num_experts=3, tie_embeddings=True)
    saved = load_file(path / "model.safetensors")
    trained = AutoModelForCausalLM.from_pretrained(path).state_dict()
    stacked = [name for name in trained if name.endswith(".experts.gate_up_proj")]
    assert len(stacked) == 2
    assert trained[stacked[0]].shape[0] == 3
    for source in sources(trained, read_checkpoint_manifest(path)):
        found = tensors_of(source)
        assert found.keys() == saved.keys()
        assert all(torch.equal(found[name], saved[name]) for name in saved)


def test_a_plan_is_kept_for_the_same_stacked_experts() -> None:
    names = ("l.experts.0.gate_proj.weight", "l.experts.0.up_proj.weight")
    expected = Manifest.of(TensorSpec(name, "float32", (2, 2)) for name in names)
    plans = PushPlanCache()

    def plan() -> Any:
        named = {"l.experts.gate_up_proj": torch.ones(1, 4, 2)}
        return PlannedSource(named, expected=expected, plans=plans)._plan

    assert list(plan().manifest.tensors) == list(names)
    assert plan() is plan()


def test_stacked_experts_stay_stacked_where_the_checkpoint_has_them_so() -> None:
    name = "l.experts.down_proj"
    expected = Manifest.of([TensorSpec(name, "float32", (2, 3, 4))])
    for source in sources({name: torch.ones(2, 3, 4)}, expected):
        assert list(tensors_of(source)) == [name]


class Alive:
    """Counts the bytes of a generator's tensors that are alive."""

    def __init__(self) -> None:
        self.now = self.most = self.total = 0

    def tensors(self, num: int, dtype: Any) -> Iterator[tuple[str, Any]]:
        for index in range(num):
            tensor = torch.full((25,), float(index), dtype=dtype)
            self.now += tensor.nbytes
            self.total += tensor.nbytes
            self.most = max(self.most, self.now)
            weakref.finalize(tensor, self._drop, tensor.nbytes)
            yield f"t{index}", tensor
            del tensor

    def _drop(self, num_bytes: int) -> None:
        self.now -= num_bytes


def test_of_a_generator_one_bucket_and_one_tensor_are_alive() -> None:
    alive = Alive()
    source = StreamedSource(
        alive.tensors(50, torch.float32), expected=None, name_map=None, dtype=None
    )
    for pairs, _ in source.buckets(BUCKET_BYTES):
        assert sum(one.nbytes for one in pairs.tensors) <= BUCKET_BYTES
        del pairs
    assert alive.most <= BUCKET_BYTES + 100 < alive.total / 4
    assert alive.now == 0


@pytest.mark.parametrize(("own", "models"), [("float64", "float32"), ("float32", "float64")])
def test_a_generators_tensors_are_cast_one_by_one_inside_their_bucket(
    own: str, models: str
) -> None:
    alive = Alive()
    expected = Manifest.of(TensorSpec(f"t{index}", models, (25,)) for index in range(50))
    source = StreamedSource(
        alive.tensors(50, getattr(torch, own)), expected=expected, name_map=None, dtype=None
    )
    num_seen = 0
    for pairs, _ in source.buckets(BUCKET_BYTES):
        wide = alive.now
        cast = cast_to(pairs, expected)
        assert alive.now < wide - 300, "the bucket's own tensors are still there"
        assert sum(one.nbytes for one in cast.tensors) <= BUCKET_BYTES
        assert {spec.dtype for spec in cast.specs} == {models}
        for name, one in cast:
            assert name == f"t{num_seen}"
            assert torch.equal(one, torch.full((25,), float(num_seen), dtype=one.dtype))
            num_seen += 1
        del pairs, cast
    assert num_seen == 50
    assert alive.most <= BUCKET_BYTES + 200


def test_where_a_generators_tensors_are_is_known_with_its_first_bucket() -> None:
    class OnGpu(torch.Tensor):  # a double: there is no GPU here
        is_cuda = True

    for kind, expected in ((torch.Tensor, False), (OnGpu, True)):
        named = iter([("a", torch.ones(2).as_subclass(kind))])
        source = StreamedSource(named, expected=None, name_map=None, dtype=None)
        assert not source.is_on_cuda
        assert [is_last for _, is_last in source.buckets(BUCKET_BYTES)] == [True]
        assert source.is_on_cuda is expected


def test_a_generator_without_tensors_is_refused() -> None:
    source = StreamedSource(iter(()), expected=None, name_map=None, dtype=None)
    with pytest.raises(WeightMismatch, match="has no tensors"):
        list(source.buckets(BUCKET_BYTES))


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def streamed_names(*named: tuple[str, Any], bucket_bytes: int = 1) -> list[str]:
    """The names that a generator's tensors have in a push; the model has a tied embedding."""
    expected = Manifest.of([TensorSpec(EMBEDDING, "float32", (4, 2))])
    source = StreamedSource(iter(named), expected=expected, name_map=None, dtype=None)
    return [name for pairs, _ in source.buckets(bucket_bytes) for name, _ in pairs]


@pytest.mark.parametrize("bucket_bytes", [1, 1000], ids=["a bucket before", "the same bucket"])
def test_a_generators_tied_tensor_is_left_out_after_the_one_that_the_model_has(
    bucket_bytes: int,
) -> None:
    tensor = torch.ones(4, 2)
    tied = (EMBEDDING, tensor), (HEAD, tensor.detach())
    assert streamed_names(*tied, bucket_bytes=bucket_bytes) == [EMBEDDING]
    # What comes first may be a wrong name, and so may what is no alias.
    assert streamed_names(*reversed(tied)) == [HEAD, EMBEDDING]
    assert streamed_names(tied[0], (HEAD, tensor.clone())) == [EMBEDDING, HEAD]
    assert streamed_names(tied[0], (HEAD, tensor[:2])) == [EMBEDDING, HEAD]


def test_memory_that_is_another_tensors_by_now_makes_none_tied() -> None:
    memory = torch.ones(4, 2).numpy()

    def generated() -> Iterator[tuple[str, Any]]:
        yield EMBEDDING, torch.from_numpy(memory)
        yield "b", torch.ones(4, 2)  # begins the next bucket, so that the first is let go of
        yield HEAD, torch.from_numpy(memory)  # at the same address, in a storage of its own

    expected = Manifest.of(TensorSpec(name, "float32", (4, 2)) for name in (EMBEDDING, "b"))
    source = StreamedSource(generated(), expected=expected, name_map=None, dtype=None)
    found = []
    for pairs, _ in source.buckets(1):
        found += [name for name, _ in pairs]
        del pairs
    assert found == [EMBEDDING, "b", HEAD]
