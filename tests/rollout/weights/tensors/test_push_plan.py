from __future__ import annotations

import weakref
from collections.abc import Iterator

import pytest

from rollout.core.errors import WeightMismatch

torch = pytest.importorskip("torch")
from rollout.weights.tensors import PlannedSource, PushPlanCache  # noqa: E402  only where there is torch
from rollout.weights.tensors.sources import Pairs  # noqa: E402


def tensors(**changed: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"a": torch.zeros(2, 3), "b": torch.ones(4), **changed}


def doubled(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    yield f"{name}.1", tensor
    yield f"{name}.2", tensor * 2


def planned(plans: PushPlanCache, named: dict[str, torch.Tensor], **more: object) -> PlannedSource:
    return PlannedSource(named, plans=plans, **more)  # type: ignore[arg-type]


def test_the_same_model_is_planned_once() -> None:
    plans = PushPlanCache()
    first = planned(plans, tensors())
    again = planned(plans, tensors(a=torch.full((2, 3), 7.0)))
    assert again.manifest is first.manifest
    [(pairs, is_last)] = again.buckets(1 << 20)
    assert is_last
    assert torch.equal(dict(pairs)["a"], torch.full((2, 3), 7.0)), "an earlier push's tensor"


@pytest.mark.parametrize(
    "named",
    [
        pytest.param(tensors(a=torch.zeros(3, 2)), id="shape"),
        pytest.param(tensors(b=torch.ones(4, dtype=torch.bfloat16)), id="dtype"),
        pytest.param(tensors(c=torch.ones(1)), id="one more"),
        pytest.param({"a": torch.zeros(2, 3)}, id="one less"),
        pytest.param(dict(reversed(tensors().items())), id="order"),
        pytest.param({"a": torch.zeros(2, 3), "x": torch.ones(4)}, id="name"),
    ],
)
def test_another_model_has_a_plan_of_its_own(named: dict[str, torch.Tensor]) -> None:
    plans = PushPlanCache()
    first = planned(plans, tensors())
    other = planned(plans, named)
    assert other.manifest is not first.manifest
    assert [(spec.name, spec.dtype, spec.shape) for spec in other.manifest.tensors.values()] == [
        (n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in named.items()
    ]
    assert planned(plans, tensors()).manifest is first.manifest, "both are kept"


def test_a_name_map_is_asked_for_names_once_and_for_tensors_at_every_push() -> None:
    plans = PushPlanCache()
    first = planned(plans, tensors(), name_map=doubled)
    again = planned(plans, tensors(b=torch.full((4,), 5.0)), name_map=doubled)
    assert again.manifest is first.manifest
    assert planned(plans, tensors()).manifest is not first.manifest
    [(pairs, _)] = again.buckets(1 << 20)
    assert [name for name, _ in pairs] == ["a.1", "a.2", "b.1", "b.2"]
    assert torch.equal(dict(pairs)["b.2"], torch.full((4,), 10.0))


def test_a_plan_holds_no_tensor() -> None:
    plans = PushPlanCache()
    named = tensors()
    ends = [weakref.ref(tensor) for tensor in named.values()]
    weights = planned(plans, named)
    for pairs, _ in weights.buckets(1 << 20):
        del pairs
    del named, weights
    assert [end() for end in ends] == [None, None]


def test_few_plans_are_kept() -> None:
    plans = PushPlanCache()
    first = planned(plans, tensors())
    for size in range(1, 6):
        planned(plans, {"a": torch.zeros(size)})
    assert planned(plans, tensors()).manifest is not first.manifest


def test_what_is_no_tensor_is_refused_also_where_there_is_a_plan() -> None:
    plans = PushPlanCache()
    planned(plans, tensors())
    with pytest.raises(WeightMismatch, match="'b' is a list, not a tensor"):
        planned(plans, tensors(b=[1.0]))  # type: ignore[arg-type]


def test_what_needs_a_gradient_is_pushed_without_it() -> None:
    named = {"a": torch.nn.Parameter(torch.ones(3))}
    [(pairs, _)] = PlannedSource(named).buckets(100)
    assert not pairs[0][1].requires_grad


def test_pairs_are_a_sequence_of_names_and_tensors() -> None:
    pairs = Pairs.of(tensors().items())
    assert len(pairs) == 2
    assert pairs[1][0] == "b"
    assert [name for name, _ in pairs[:1]] == ["a"]
    assert [spec.shape for spec in pairs.specs] == [(2, 3), (4,)]
