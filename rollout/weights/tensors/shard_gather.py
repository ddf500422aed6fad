"""Whole tensors from the shards of all ranks.

Always true: all ranks start the same gathers in the same order, also after one was late, so that a
late rank still finds its peers; besides the whole tensors, memory holds at most the pieces under
way, each at most ``_PIECE_BYTES`` or a quarter of the tensors, unless one tensor is larger.

On a GPU, this process waits once for all gathers of a bucket, before its stream waits for any: a
rank that never joins leaves the stream free.  Over gloo few are under way at once, see below.

Small shards are copied together and gathered at once.  A gather of its own for each costs six times
the CPU over gloo.  ``DTensor.full_tensor()`` and ``redistribute()`` are used only for placements
that are not understood here.  In torch 2.13 they start a gather while they hold the interpreter's
lock.  A thread of gloo that frees the gather before holds gloo's lock, and needs the interpreter's:
some thousand gathers over gloo ended in a deadlock or in a corrupted heap.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist

from rollout.weights.tensors.push_plan import cast_dtype

_PIECE_BYTES = 8 << 20
_MOST_UNDER_WAY = 2
# On a GPU: of inputs and of outputs that are copied.
_MOST_DEVICE_BYTES = 64 << 20
# The driver takes about a thousand calls before it makes the caller wait.
_MOST_ON_DEVICE = 256
# A tensor of this size is gathered into its own memory.
_LARGE_BYTES = 1 << 20
_POLL_S = 0.0005

_REQUIRES_GRAD = attrgetter("requires_grad")
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
# Gathers that were late.  A backend still writes into their tensors.
_late: list[Any] = []


class GatherTimeout(TimeoutError):
    """A rank has not joined a gather."""


def is_shard(tensor: Any) -> bool:
    """Whether it is a DTensor, without importing that."""
    # Most are plain, and ``hasattr`` is slow for a missing name.
    return type(tensor) not in _PLAIN and hasattr(tensor, "full_tensor")


def has_shards(tensors: Iterable[Any]) -> bool:
    """Whether there is a DTensor among them."""
    # One call for all tensors: a model of experts has tens of thousands.
    return not _PLAIN.issuperset(map(type, tensors)) and any(map(is_shard, tensors))


def gathered_whole(
    tensors: Sequence[Any], dtype: torch.dtype | None = None, timeout_s: float | None = None
) -> list[torch.Tensor]:
    """The whole tensors; shards are cast to ``dtype`` before they are gathered.

    Args:
        timeout_s: for each gather, on a GPU for all of them; None leaves it to the process group.

    Raises:
        GatherTimeout: a gather was late.  All gathers of these tensors are started.
    """
    if dtype is None and not has_shards(tensors) and not any(map(_REQUIRES_GRAD, tensors)):
        return list(tensors)
    results: list[Any] = [None] * len(tensors)
    shards = []
    with torch.no_grad():
        for index, tensor in enumerate(tensors):
            target = cast_dtype(tensor, dtype)
            if not is_shard(tensor):
                whole = tensor.detach() if tensor.requires_grad else tensor
                # ``to`` takes a microsecond also if it has nothing to do.
                results[index] = whole if whole.dtype is target else whole.to(target)
            elif (shard := _shard_of(index, tensor, target)) is None:
                results[index] = _redistributed(tensor, target)
            elif shard.num_parts == 1:
                results[index] = shard.local.to(shard.device, target)
            else:
                shards.append(shard)
        _Gathers(results, timeout_s).run(_pieces(shards))
    return results


@dataclass(frozen=True, slots=True)
class _Shard:
    """This rank's part of a tensor that the ranks of a group have cut along one dimension.

    Attributes:
        index: where the whole tensor belongs.
        shape: of the whole tensor.
        rows: of the whole tensor along ``dim`` that a rank holds; the last ones may have fewer.
    """

    index: int
    local: torch.Tensor
    dim: int
    shape: torch.Size
    dtype: torch.dtype
    device: str
    group: Any
    num_parts: int

    @property
    def rows(self) -> int:
        return -(-self.shape[self.dim] // self.num_parts)

    @property
    def part_numel(self) -> int:
        """Elements of a rank's part with its padding."""
        size = self.shape[self.dim]
        return self.shape.numel() // size * self.rows if size else 0

    @property
    def whole_bytes(self) -> int:
        return self.part_numel * self.num_parts * self.dtype.itemsize

    @property
    def is_large(self) -> bool:
        """Its parts lie one after the other in the whole tensor, and are worth a gather."""
        is_even = self.shape[self.dim] % self.num_parts == 0
        return is_even and self.dim == 0 and self.whole_bytes >= _LARGE_BYTES

    @property
    def flat(self) -> torch.Tensor:
        """The own part, in one dimension."""
        return self.local.to(self.device, self.dtype).reshape(-1)

    def whole_of(self, parts: torch.Tensor) -> torch.Tensor:
        """The whole tensor from the parts, one row for each rank."""
        whole = torch.empty(self.shape, dtype=self.dtype, device=parts.device)
        if not whole.numel():
            return whole
        if self.dim == 0 and self.shape[0] % self.num_parts == 0:
            whole.view(self.num_parts, -1).copy_(parts)
            return whole
        for part, target in zip(parts, whole.split(self.rows, self.dim), strict=False):
            target.copy_(part[: target.numel()].view(target.shape))
        return whole


@dataclass(frozen=True, slots=True)
class _Piece:
    """Shards of one group that are gathered together."""

    shards: Sequence[_Shard]

    def started(self) -> tuple[Any, torch.Tensor, torch.Tensor]:
        """The gather under way, its input and its output, which has one row for each rank."""
        first = self.shards[0]
        own = first.flat if first.is_large else self._joined()
        parts = own.new_empty(first.num_parts, own.numel())
        return _gather(parts.view(-1), own, first.group), own, parts

    def _joined(self) -> torch.Tensor:
        first = self.shards[0]
        numel = sum(shard.part_numel for shard in self.shards)
        own = torch.empty(numel, dtype=first.dtype, device=first.device)
        begin = 0
        for shard in self.shards:
            part = own[begin : begin + shard.local.numel()]
            part.view(shard.local.shape).copy_(shard.local)
            begin += shard.part_numel
        return own

    def ended(self, parts: torch.Tensor, results: list[Any]) -> None:
        """Put the whole tensors in their places."""
        if self.shards[0].is_large:
            (shard,) = self.shards
            results[shard.index] = parts.view(shard.shape)
            return
        begin = 0
        for shard in self.shards:
            results[shard.index] = shard.whole_of(parts[:, begin : begin + shard.part_numel])
            begin += shard.part_numel


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """A gather that was started."""

    piece: _Piece
    work: Any
    own: torch.Tensor
    parts: torch.Tensor

    @property
    def more_bytes(self) -> int:
        """What it takes besides the whole tensors and the shards."""
        first = self.piece.shards[0]
        if not first.is_large:
            return self.own.nbytes + self.parts.nbytes
        return 0 if self.own.data_ptr() == first.local.data_ptr() else self.own.nbytes


class _Gathers:
    """Gathers pieces, some under way at once."""

    def __init__(self, results: list[Any], timeout_s: float | None) -> None:
        self._results = results
        self._timeout_s = timeout_s
        self._under_way: list[_UnderWay] = []

    def run(self, pieces: Iterator[_Piece]) -> None:
        try:
            for piece in pieces:
                self._under_way.append(_UnderWay(piece, *piece.started()))
                if self._is_full():
                    self._end()
            while self._under_way:
                self._end()
        except GatherTimeout:
            _late.append((self._under_way, [piece.started() for piece in pieces]))
            raise

    def _is_full(self) -> bool:
        number = len(self._under_way)
        if not self._is_on_stream:
            return number == _MOST_UNDER_WAY
        more_bytes = sum(gather.more_bytes for gather in self._under_way)
        return number == _MOST_ON_DEVICE or more_bytes >= _MOST_DEVICE_BYTES

    @property
    def _is_on_stream(self) -> bool:
        """Whether the gathers run one after the other on a GPU, without a thread of gloo."""
        shard = self._under_way[0].piece.shards[0]
        return shard.device != "cpu" and str(dist.get_backend(shard.group)) != "gloo"

    def _end(self) -> None:
        """Wait for the first gather, on a GPU for all that are under way."""
        ending = self._under_way[: None if self._is_on_stream else 1]
        works = [gather.work for gather in ending]
        if self._timeout_s is not None and ending[0].own.device.type != "cpu":
            _wait_on_device(works, self._timeout_s)
        else:
            for work in works:
                _wait(work, self._timeout_s)
        for gather in ending:
            gather.piece.ended(gather.parts, self._results)
        del self._under_way[: len(ending)]


def _gather(parts: torch.Tensor, own: torch.Tensor, group: Any) -> Any:
    # The other name is deprecated in torch 2.13.
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(parts, own, group=group, async_op=True)


def _wait(work: Any, timeout_s: float | None) -> None:
    """Wait for a gather; with a deadline only in host memory.

    Raises:
        GatherTimeout: it is late.
    """
    if timeout_s is None:
        work.wait()
        return
    try:
        work.wait(timedelta(seconds=timeout_s))
    except RuntimeError:
        if work.is_completed():  # with an error of its own
            raise
        raise _too_late(timeout_s) from None


def _wait_on_device(works: Sequence[Any], timeout_s: float) -> None:
    """Wait for gathers on a GPU: for the last of them first, after which the others are done.

    Raises:
        GatherTimeout: one is late.  No stream waits for it: with a deadline, NCCL's own wait would
            abort the communicator.
    """
    deadline = time.monotonic() + timeout_s
    for work in reversed(works):
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise _too_late(timeout_s)
            time.sleep(_POLL_S)
    for work in works:
        work.wait()


def _too_late(timeout_s: float) -> GatherTimeout:
    return GatherTimeout(f"a gather was not done within {timeout_s:g} s: a rank did not join it")


def _shard_of(index: int, tensor: Any, dtype: torch.dtype) -> _Shard | None:
    """None if ranks of several dimensions of the mesh have cut it, or not into chunks."""
    from torch.distributed.tensor import Shard

    mesh = tensor.device_mesh
    cut = [at for at, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    if len(cut) != 1 or type(tensor.placements[cut[0]]) is not Shard:
        return None
    return _Shard(
        index,
        tensor.to_local(),
        tensor.placements[cut[0]].dim % tensor.ndim,
        tensor.shape,
        dtype,
        # FSDP2's CPU offload: the ranks' group gathers on the mesh's devices only.
        mesh.device_type,
        mesh.get_group(cut[0]),
        mesh.size(cut[0]),
    )


def _redistributed(tensor: Any, dtype: torch.dtype) -> torch.Tensor:
    tensor = tensor.to(dtype)
    if tensor.device.type != tensor.device_mesh.device_type:
        tensor = tensor.to(tensor.device_mesh.device_type)
    whole: torch.Tensor = tensor.full_tensor()
    return whole


def _pieces(shards: Sequence[_Shard]) -> Iterator[_Piece]:
    """The shards in pieces; equal on all ranks."""
    most_bytes = min(_PIECE_BYTES, sum(shard.whole_bytes for shard in shards) // 4)
    alike: dict[tuple[str, torch.dtype], list[_Shard]] = defaultdict(list)
    num_bytes: Counter[tuple[str, torch.dtype]] = Counter()
    for shard in shards:
        if shard.is_large:
            yield _Piece([shard])
            continue
        key = shard.group.group_name, shard.dtype
        alike[key].append(shard)
        num_bytes[key] += shard.whole_bytes
        if num_bytes[key] >= most_bytes:
            yield _Piece(alike.pop(key))
            del num_bytes[key]
    for shards_alike in alike.values():
        yield _Piece(shards_alike)
