"""One memory under two names: only where the model's checkpoint has equal tensors.  Needs torch.

A generator that gathers into one buffer pushes the last values under each name; the trainer and the
engines take the fingerprints of those, so nothing else finds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout.core.errors import WeightMismatch
from rollout.weights.format.manifest import Manifest, read_checkpoint_manifest

torch = pytest.importorskip("torch")
from safetensors.torch import save_file  # noqa: E402

from rollout.weights.tensors.aliases import NO_TIES, Ties, UnsentTensors  # noqa: E402
from rollout.weights.tensors.sources import PlannedSource, StreamedSource  # noqa: E402

pytestmark = pytest.mark.torch
NAMES = ["embed", "head", "left", "right"]
Fill = Callable[[Any, float], object]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A model that ties two of its tensors, in two files, and not the others."""
    tied = torch.randn(4, 4)
    save_file({"embed": tied, "left": torch.randn(4, 4)}, tmp_path / "a.safetensors")
    save_file({"head": tied.clone(), "right": torch.randn(4, 4)}, tmp_path / "b.safetensors")
    return tmp_path


def by_copy(buffer: Any, value: float) -> None:
    buffer.copy_(torch.full_like(buffer, value))


def by_view(buffer: Any, value: float) -> None:
    buffer.view(-1).fill_(value)


def unseen(buffer: Any, value: float) -> None:
    """As NCCL and ctypes write: torch counts no change."""
    buffer.numpy()[...] = value


FILLS = pytest.mark.parametrize("fill", [by_copy, by_view, unseen])


def streamed(
    named: Iterator[tuple[str, Any]],
    ties: Ties = NO_TIES,
    *,
    bucket_bytes: int = 1 << 20,
    expected: Manifest | None = None,
    name_map: Any = None,
    dtype: Any = None,
) -> dict[str, float]:
    """The first value of each tensor, when its bucket is taken."""
    source = StreamedSource(named, expected=expected, name_map=name_map, dtype=dtype, ties=ties)
    return {
        name: float(tensor.flatten()[0])
        for pairs, _ in source.buckets(bucket_bytes)
        for name, tensor in pairs
    }


def in_one_buffer(fill: Fill, shape: tuple[int, ...] = (4, 4)) -> Iterator[tuple[str, Any]]:
    buffer = torch.zeros(shape)
    for value, name in enumerate(("left", "right", "last")):
        fill(buffer, value)
        yield name, buffer


@FILLS
@pytest.mark.parametrize("per_bucket", [1, 2, 8])
@pytest.mark.parametrize("is_known", [True, False])
def test_a_generator_that_gathers_into_one_buffer_is_refused(
    fill: Fill, per_bucket: int, is_known: bool, checkpoint: Path
) -> None:
    """Also with a tensor in each bucket: the next is made before the bucket is taken."""
    ties = Ties(checkpoint) if is_known else NO_TIES
    expected = read_checkpoint_manifest(checkpoint) if is_known else None
    with pytest.raises(WeightMismatch, match=r"'left' (and 'right' are|was)"):
        streamed(in_one_buffer(fill), ties, bucket_bytes=64 * per_bucket, expected=expected)


@FILLS
def test_a_buffer_of_another_type_than_the_push_may_be_used_again(fill: Fill) -> None:
    """The cast has copied it."""
    found = streamed(in_one_buffer(fill), dtype=torch.bfloat16)
    assert found == {"left": 0, "right": 1, "last": 2}


@FILLS
def test_a_clone_of_each_is_pushed_as_it_was(fill: Fill) -> None:
    given = ((name, buffer.clone()) for name, buffer in in_one_buffer(fill))
    assert streamed(given) == {"left": 0, "right": 1, "last": 2}


@FILLS
def test_a_buffer_with_a_part_for_each_tensor_is_pushed(fill: Fill) -> None:
    """Torch has one count of changes for all views of a memory."""

    def in_parts() -> Iterator[tuple[str, Any]]:
        buffer = torch.zeros(3, 4, 4)
        for value, name in enumerate(("left", "right", "last")):
            fill(buffer[value], value)
            yield name, buffer[value]

    assert streamed(in_parts()) == {"left": 0, "right": 1, "last": 2}


@FILLS
def test_a_buffer_of_the_largest_tensor_that_each_begins_is_refused(fill: Fill) -> None:
    def at_the_begin() -> Iterator[tuple[str, Any]]:
        buffer = torch.zeros(64)
        for value, name in enumerate(("left", "right")):
            part = buffer[: 16 - value].view(-1)
            fill(part, value)
            yield name, part

    with pytest.raises(WeightMismatch, match="'left' and 'right' are pushed from the same memory"):
        streamed(at_the_begin())


def test_what_a_map_makes_in_one_buffer_is_refused() -> None:
    buffer = torch.zeros(4, 4)

    def name_map(name: str, tensor: Any) -> Iterator[tuple[str, Any]]:
        for part in ("q", "k"):
            yield f"{name}.{part}", tensor if tensor.is_meta else buffer.copy_(tensor)

    given = {"a": torch.ones(4, 4)}
    with pytest.raises(WeightMismatch, match=r"'a[.]q' and 'a[.]k' are pushed from"):
        streamed(iter(given.items()), name_map=name_map)


def test_a_change_of_what_waits_for_its_bucket_is_found_by_name() -> None:
    def changing() -> Iterator[tuple[str, Any]]:
        first = torch.zeros(4, 4)
        yield "first", first
        first[0] += 1
        yield "second", torch.zeros(4, 4)

    with pytest.raises(WeightMismatch, match="'first' was changed after it was given"):
        streamed(changing())


def test_views_and_empty_tensors_of_one_memory_are_no_aliases() -> None:
    whole, empty = torch.ones(4, 4), torch.empty(0)
    given = {"a": whole[:2], "b": whole[2:], "c": empty, "d": empty}
    source = PlannedSource(given)
    assert sum(len(pairs) for pairs, _ in source.buckets(1 << 20)) == len(given)
    source_of = StreamedSource(iter(given.items()), expected=None, name_map=None, dtype=None)
    assert sum(len(pairs) for pairs, _ in source_of.buckets(1 << 20)) == len(given)


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("is_mapped", [False, True])
def test_names_that_the_checkpoint_ties_have_one_memory(
    is_streamed: bool, is_mapped: bool, checkpoint: Path
) -> None:
    ties, expected = Ties(checkpoint), read_checkpoint_manifest(checkpoint)

    def name_map(name: str, tensor: Any) -> Iterator[tuple[str, Any]]:
        yield name.removeprefix("own."), tensor

    def push(first: str, second: str) -> int:
        prefix = "own." if is_mapped else ""
        one = torch.ones(4, 4)
        given = {prefix + first: one, prefix + second: one}
        more: Any = {"name_map": name_map if is_mapped else None, "ties": ties}
        source: Any
        if is_streamed:
            source = StreamedSource(iter(given.items()), expected=expected, dtype=None, **more)
        else:
            source = PlannedSource(given, expected=expected, **more)
        return sum(len(pairs) for pairs, _ in source.buckets(1 << 20))

    assert push("embed", "head") == 2
    for pair in (("left", "right"), ("embed", "left"), ("right", "head")):
        with pytest.raises(WeightMismatch, match="'{}' and '{}' are pushed from".format(*pair)):
            push(*pair)


def test_the_checkpoint_shows_which_names_are_tied(checkpoint: Path) -> None:
    ties = Ties(checkpoint)
    assert ties.are_tied("embed", "head") is True
    assert ties.are_tied("left", "right") is False
    assert ties.are_tied("left", "lacking") is None
    assert NO_TIES.are_tied("embed", "head") is None
    (checkpoint / "c.safetensors").write_bytes(b"cut")
    assert Ties(checkpoint).are_tied("embed", "head") is True


def test_a_checkpoint_that_was_cut_meanwhile_shows_nothing(checkpoint: Path) -> None:
    ties = Ties(checkpoint)
    assert ties.are_tied("left", "right") is False  # all headers are read now
    for name in ("a.safetensors", "b.safetensors"):
        file = checkpoint / name
        file.write_bytes(file.read_bytes()[:100])
    assert ties.are_tied("embed", "head") is None


def test_names_of_a_bucket_that_was_taken_are_free_again() -> None:
    unsent, buffer = UnsentTensors(NO_TIES), torch.zeros(4)
    unsent.add("a", buffer)
    unsent.take()
    buffer += 1
    unsent.add("b", buffer)
    unsent.take()


def test_tensors_of_inference_mode_have_no_count_of_changes_and_are_pushed() -> None:
    with torch.inference_mode():
        given = {"a": torch.ones(4), "b": torch.zeros(4)}
    assert streamed(iter(given.items())) == {"a": 1, "b": 0}
