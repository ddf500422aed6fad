"""What a broadcast is received into, and where it goes from there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from engines.embedded.core.errors import Invalid
from engines.embedded.weights.broadcast_receiver import BroadcastReceiver
from engines.embedded.weights.model_weights import ModelWeights
from engines.tensors.collective.bucket import BroadcastRefused, BucketContent, content_of
from engines.tensors.collective.buffers import BucketBuffers

CPU = torch.device("cpu")
SHAPES = {"wide": ((5, 3), torch.float64), "a": ((3,), torch.bfloat16), "b": ((), torch.float32)}


class Holder(torch.nn.Module):
    """Parameters under the names of a checkpoint."""

    def __init__(self, held: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._held = held

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return iter((name, torch.nn.Parameter(one, False)) for name, one in self._held.items())


@pytest.fixture
def held() -> dict[str, torch.Tensor]:
    return {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in SHAPES.items()}


@pytest.fixture
def receiver(held: dict[str, torch.Tensor]) -> BroadcastReceiver:
    return BroadcastReceiver(ModelWeights(Holder(held)), CPU)


def content(new: Mapping[str, torch.Tensor], *, is_flat: bool) -> BucketContent:
    dtypes = [str(one.dtype).removeprefix("torch.") for one in new.values()]
    return BucketContent(list(new), dtypes, [list(one.shape) for one in new.values()], is_flat)


def received(
    receiver: BroadcastReceiver, new: Mapping[str, torch.Tensor], *, is_flat: bool
) -> None:
    """As a group would: into each part, the bytes that were sent."""
    plan = receiver.plan(content(new, is_flat=is_flat))
    buffer = receiver.take(plan)
    sent = [one.reshape(-1).view(torch.uint8) for one in new.values()]
    if is_flat:
        sent = [torch.cat(sent)]
    for part, whole in zip(receiver.parts(plan, buffer), sent, strict=True):
        part.view(-1).view(torch.uint8).copy_(whole)
    receiver.deliver(plan, buffer)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("is_flat", [True, False])
def test_each_tensor_comes_to_its_place(
    held: dict[str, torch.Tensor], is_flat: bool, device: str
) -> None:
    held = {name: one.to(device) for name, one in held.items()}
    receiver = BroadcastReceiver(ModelWeights(Holder(held)), torch.device(device))
    for _ in range(2):  # the second by the plan of the first
        new = {name: torch.randn(shape).to(dtype) for name, (shape, dtype) in SHAPES.items()}
        new = dict(sorted(new.items(), key=lambda one: -one[1].itemsize))
        received(receiver, new, is_flat=is_flat)
        assert all(torch.equal(held[name].cpu(), one) for name, one in new.items())


def test_another_dtype_is_converted(
    receiver: BroadcastReceiver, held: dict[str, torch.Tensor]
) -> None:
    new = {"a": torch.randn(3), "wide": torch.randn(5, 3)}
    received(receiver, new, is_flat=True)
    assert torch.equal(held["a"], new["a"].bfloat16())
    assert torch.equal(held["wide"], new["wide"].double())


def test_a_bucket_of_the_same_names_and_other_shapes_has_a_plan_of_its_own(
    receiver: BroadcastReceiver,
) -> None:
    good = content({"a": torch.zeros(3).bfloat16()}, is_flat=True)
    assert receiver.plan(good) is receiver.plan(
        content({"a": torch.zeros(3).bfloat16()}, is_flat=True)
    )
    with pytest.raises(Invalid, match="has shape"):
        receiver.plan(content({"a": torch.zeros(4).bfloat16()}, is_flat=True))


@pytest.mark.parametrize(
    ("names", "dtypes", "shapes", "words"),
    [
        (["a", "b"], ["bfloat16", "float32"], [[3], []], "'b' begins at byte 6"),
        (["a"], ["bfloat"], [[3]], "unknown dtype 'bfloat'"),
        (["a", "b"], ["bfloat16"], [[3]], "differ in length"),
        (["nobody"], ["float32"], [[1]], "unknown weight 'nobody'"),
        ([], [], [], "empty"),
    ],
)
def test_what_does_not_fit_is_refused(
    receiver: BroadcastReceiver,
    names: list[str],
    dtypes: list[str],
    shapes: list[list[int]],
    words: str,
) -> None:
    with pytest.raises((Invalid, BroadcastRefused), match=words):
        receiver.plan(BucketContent(names, dtypes, shapes, is_flat=True))


@pytest.mark.parametrize(
    "raw", [{}, {"names": "a", "dtypes": [], "shapes": []}, {"names": [["a"]]}]
)
def test_a_request_that_does_not_say_is_refused(raw: dict[str, Any]) -> None:
    with pytest.raises(BroadcastRefused, match="names"):
        content_of({"dtypes": [], "shapes": [], **raw})


def test_memory_is_used_again_and_let_go_at_the_end(receiver: BroadcastReceiver) -> None:
    plan = receiver.plan(content({"wide": torch.zeros(5, 3).double()}, is_flat=True))
    first = receiver.take(plan)
    receiver.deliver(plan, first)
    second = receiver.take(plan)
    assert second.data_ptr() == first.data_ptr()
    receiver.deliver(plan, second)
    assert receiver.num_bytes >= plan.num_bytes
    receiver.free()
    assert receiver.num_bytes == 0


def test_a_buffer_that_was_taken_is_nobody_elses() -> None:
    buffers = BucketBuffers(CPU)
    one, other = buffers.take(100), buffers.take(100)
    assert one.data_ptr() != other.data_ptr()
    buffers.give(one)
    assert buffers.take(101).numel() >= 101
    assert buffers.num_bytes == 0
