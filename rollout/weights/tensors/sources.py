"""A trainer's tensors under the checkpoint's names, bucket by bucket, alike on all ranks.

Always true: names, dtypes and shapes of a mapping are known before anything is gathered or sent; a
source holds one bucket of whole tensors at most, and of a generator's the one that begins the next
bucket; gathers run in the thread that takes the buckets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, overload

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from engines.tensors.stacked_experts import split_experts
from engines.tensors.torch_fingerprint import device_fingerprints, dtype_name
from rollout.core.errors import WeightMismatch
from rollout.weights.format.manifest import Manifest, TensorSpec
from rollout.weights.format.named import named_pairs
from rollout.weights.format.stacked_experts import ExpertSplitter, is_stacked, splitter_of
from rollout.weights.tensors.aliases import NO_TIES, Ties, UnsentTensors, check_apart
from rollout.weights.tensors.finite_check import (
    Checked,
    check_finite,
    check_in_memory,
    largest_in,
    largest_of,
)
from rollout.weights.tensors.fp8_quantiser import Fp8BlockQuantiser
from rollout.weights.tensors.push_plan import (
    NameMap,
    PlannedBucket,
    PushPlanCache,
    cast_dtype,
    check_is_tensor,
    first_difference,
    specs_of,
)
from rollout.weights.tensors.shard_gather import gathered_whole, has_shards, is_shard

# By torch.compile and activation checkpointing.
_ADDED_TO_NAMES = ("_orig_mod.", "_checkpoint_wrapped_module.")

# What they make of numbers that its types can hold are numbers; of a user's map that is not known.
_OWN_MAPS = (type(None), ExpertSplitter, Fp8BlockQuantiser)

NamedTensors = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
TensorList = Sequence[Sequence[Any]]
"""Name, dtype and shape of each of the trainer's tensors, in the order of their gathers."""


class Pairs(Sequence[tuple[str, torch.Tensor]]):
    """Names and tensors of one bucket; a pair is made only when it is read.

    Every route takes its tensors from here, and copies as many bytes of each as its spec says.

    Attributes:
        specs: specs of ``tensors``; the same list at every push of the same plan.

    Raises:
        WeightMismatch: a tensor is not what its spec says; names it.
    """

    def __init__(self, specs: Sequence[TensorSpec], tensors: Sequence[torch.Tensor]) -> None:
        if (difference := first_difference(specs, tensors)) is not None:
            name, why = difference
            raise WeightMismatch(f"tensor {name!r} {why}", tensor=name)
        self.specs = specs
        self.tensors = tensors

    @classmethod
    def of(cls, pairs: Iterable[tuple[str, torch.Tensor]]) -> Pairs:
        pairs = list(pairs)
        return cls(specs_of(pairs), [tensor for _, tensor in pairs])

    def __len__(self) -> int:
        return len(self.specs)

    @overload
    def __getitem__(self, index: int) -> tuple[str, torch.Tensor]: ...
    @overload
    def __getitem__(self, index: slice) -> Pairs: ...
    def __getitem__(self, index: int | slice) -> tuple[str, torch.Tensor] | Pairs:
        if isinstance(index, slice):
            return Pairs(self.specs[index], self.tensors[index])
        return self.specs[index].name, self.tensors[index]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for spec, tensor in zip(self.specs, self.tensors, strict=True):
            yield spec.name, tensor


class PlannedSource:
    """Tensors that are all known: a mapping or a list.

    Args:
        named_tensors: under the trainer's names; shards are not gathered yet.
        expected: the model's manifest, to find tied tensors and stacked experts; None keeps every
            name.
        tensors: rank 0's tensors, which omit tied tensors, or None on rank 0.
        name_map: see ``NameMap``.
        plans: cached plans of earlier pushes.
        dtype: dtype of float tensors; they are cast before they are gathered.
        is_on_all_ranks: every rank of the trainer gathers its buckets, in the same order.
        gather_timeout_s: for each gather; None leaves it to the process group.
        ties: which tensors may have one memory; by default that is not known.

    Attributes:
        manifest: the checkpoint's tensors that they become.

    Raises:
        WeightMismatch: a value is not a tensor, a name occurs twice, two have one memory and the
            model does not tie them, a tensor is not rank 0's, or is sharded over other ranks, which
            would not take part in its gather.
    """

    def __init__(
        self,
        named_tensors: NamedTensors,
        *,
        expected: Manifest | None = None,
        tensors: TensorList | None = None,
        name_map: NameMap | None = None,
        plans: PushPlanCache | None = None,
        dtype: torch.dtype | None = None,
        is_on_all_ranks: bool = False,
        gather_timeout_s: float | None = None,
        ties: Ties = NO_TIES,
    ) -> None:
        if tensors is not None:
            named_tensors = _in_order(named_tensors, tensors)
        names, own = _columns(named_tensors)
        if not is_on_all_ranks:
            _check_whole(names, own)
        if tensors is None and expected is not None and _keeps_names(name_map):
            known = expected.tensors
            if any(name not in known for name in names):
                names, own = _columns(_without_tied(names, own, expected))
        self._names = names
        self._tensors = own
        name_map = name_map or splitter_of(names, expected)
        self._plan = (plans or PushPlanCache()).of(names, own, name_map, dtype)
        self.manifest = self._plan.manifest
        self._gather_timeout_s = gather_timeout_s
        self._ties = ties
        check_apart(own, self._names_made_of, ties)

    def _names_made_of(self, index: int) -> Sequence[str]:
        return [spec.name for spec in self._plan.parts[index].specs]

    def check_values(
        self, model: Mapping[str, TensorSpec], rank: int, num_ranks: int, bucket_bytes: int
    ) -> None:
        """Check what is made of this rank's part of the whole tensors, and of its shards.

        A user's name map is called for it.  What that makes of shards is known only when they are
        gathered, so of them the values before it are checked.

        Args:
            model: its tensors, in whose types the values must be numbers.
            bucket_bytes: most bytes of a name map's results that are in memory at once.

        Raises:
            WeightMismatch: one is no number; names its tensor.
        """
        if self._is_plain and self._plan.is_checked_in_copies(model):
            mine = slice(rank, None, num_ranks)
            specs = list(self.manifest.tensors.values())[mine]
            if check_in_memory(specs, self._tensors[mine], model):
                return
        # Quantising takes longer than the check, and makes numbers of numbers.
        reads = isinstance(self._plan.name_map, Fp8BlockQuantiser)
        for share in self._plan.shares(bucket_bytes):
            before: list[int] = []
            after: list[int] = []
            for place in range(share.first, share.end):
                if is_shard(self._tensors[place]):
                    before.append(place)
                elif place % num_ranks == rank:
                    (before if reads else after).append(place)
            check_finite([*self._before_map(before, model), *self._after_map(after, model)])

    def can_check_copies(self, model: Mapping[str, TensorSpec]) -> bool:
        """Whether the code that copies tensors in host memory can check all that are sent."""
        return self._plan.is_checked_in_copies(model)

    @property
    def _is_plain(self) -> bool:
        """Whether its tensors are sent as they are."""
        plan = self._plan
        return plan.name_map is None and plan.dtype is None and not has_shards(self._tensors)

    @property
    def is_known_after_gathers(self) -> bool:
        """Whether only the whole tensors show what a name map makes of shards."""
        return not isinstance(self._plan.name_map, _OWN_MAPS) and has_shards(self._tensors)

    def _before_map(
        self, places: Sequence[int], model: Mapping[str, TensorSpec]
    ) -> Iterator[Checked]:
        is_known = isinstance(self._plan.name_map, _OWN_MAPS)
        for place in places:
            part = self._plan.parts[place]
            own: Any = self._tensors[place]
            least = largest_of(dtype_name(cast_dtype(own, self._plan.dtype)))
            limits = (largest_in(model, spec) for spec in part.specs if is_known)
            local = own.to_local() if is_shard(own) else own
            yield part.name, local, min(limits, default=least)

    def _after_map(
        self, places: Sequence[int], model: Mapping[str, TensorSpec]
    ) -> Iterator[Checked]:
        name_map = self._plan.name_map
        own = [self._tensors[place] for place in places]
        if name_map is not None:
            own = gathered_whole(own, self._plan.dtype)  # they are whole, so it only casts
        for place, tensor in zip(places, own, strict=True):
            part = self._plan.parts[place]
            made = [tensor] if name_map is None else part.mapped(name_map, tensor)
            for spec, value in zip(part.specs, made, strict=True):
                yield spec.name, value, largest_in(model, spec)

    def copies(self) -> dict[str, tuple[str, torch.Tensor]]:
        """What other ranks have too, by the trainer's names: which part of the tensor, and it."""
        found: dict[str, tuple[str, torch.Tensor]] = {}
        for name, tensor in zip(self._names, self._tensors, strict=True):
            own: Any = tensor
            if not is_shard(own):
                found[name] = name, own
            elif any(placement.is_replicate() for placement in own.placements):
                places = zip(own.device_mesh.get_coordinate(), own.placements, strict=True)
                cut = [str(place) for place, placement in places if not placement.is_replicate()]
                found[name] = " shard ".join([name, *cut]), own.to_local()
        return found

    def digests_of(self, names: Sequence[str]) -> dict[str, str]:
        """Digests of its copies of these tensors, by tensor and part, computed where they are."""
        copies = self.copies()
        return device_fingerprints(copies[name] for name in names if name in copies)

    @property
    def num_bytes(self) -> int:
        return self._plan.num_bytes

    @property
    def largest_bytes(self) -> int:
        """Size of the largest tensor, which may be more than a bucket should have."""
        return self._plan.largest_bytes

    @property
    def is_on_cuda(self) -> bool:
        return any(tensor.is_cuda for tensor in self._tensors)

    @property
    def tensors(self) -> TensorList:
        """For the other ranks."""
        return [
            [name, str(tensor.dtype), list(tensor.shape)]
            for name, tensor in zip(self._names, self._tensors, strict=True)
        ]

    def buckets(self, bucket_bytes: int) -> Iterator[tuple[Pairs, bool]]:
        """Each bucket's whole tensors, and whether it is the last.

        Delete one (``del``) before taking the next, or both are in memory.

        Args:
            bucket_bytes: size of a bucket, unless a single tensor is larger.
        """
        shares = self._plan.shares(bucket_bytes)
        for share in shares:
            yield self._whole(share), share is shares[-1]

    def _whole(self, share: PlannedBucket) -> Pairs:
        tensors = self._tensors[share.first : share.end]
        whole = gathered_whole(tensors, self._plan.dtype, self._gather_timeout_s)
        if self._plan.name_map is None:
            return Pairs(share.specs, whole)
        # After all gathers: an error of the name map must not leave other ranks in a gather.
        parts = self._plan.parts[share.first : share.end]
        mapped: list[torch.Tensor] = []
        for part in parts:
            mapped += part.mapped(self._plan.name_map, whole.pop(0))
        pairs = Pairs(share.specs, mapped)
        if not isinstance(self._plan.name_map, _OWN_MAPS):
            check_apart(mapped, lambda index: [share.specs[index].name], self._ties)
        return pairs


class StreamedSource:
    """Tensors that a generator gathers one by one, with collectives of its own.

    A tensor that the model does not have is left out if it shares its memory with one that came
    before and that the model has.

    Args:
        ties: which tensors of one bucket may have one memory; by default none.

    Attributes:
        is_on_cuda: whether the first bucket has a tensor on a GPU; False before that.
    """

    def __init__(
        self,
        named_tensors: Iterable[tuple[str, torch.Tensor]],
        *,
        expected: Manifest | None,
        name_map: NameMap | None,
        dtype: torch.dtype | None,
        gather_timeout_s: float | None = None,
        ties: Ties = NO_TIES,
    ) -> None:
        self.is_on_cuda = False
        self._made = UnsentTensors(ties)
        self._waiting = UnsentTensors(ties)  # shards of the bucket that are not gathered yet
        self._num_gathered_bytes = 0  # of whole tensors in the bucket that is made
        self._known: dict[tuple[object, ...], StorageWeakRef] = {}
        self._named = named_tensors
        self._expected = expected
        self._name_map = name_map
        self._dtype = dtype
        self._gather_timeout_s = gather_timeout_s

    def buckets(self, bucket_bytes: int) -> Iterator[tuple[Pairs, bool]]:
        """Each bucket's whole tensors, and whether it is the last."""
        so_far: list[tuple[str, torch.Tensor]] = []
        self._num_gathered_bytes = 0
        for name, tensor in self._mapped(bucket_bytes):
            more = 0 if tensor is None else self._num_bytes(name, tensor)
            if so_far and (tensor is None or self._num_gathered_bytes + more > bucket_bytes):
                yield self._taken(so_far), False
                self._num_gathered_bytes = 0
            if tensor is not None:
                if self._is_in_model(name):  # any other is refused with its bucket
                    self._made.add(name, tensor)
                so_far.append((name, tensor))
                self._num_gathered_bytes += more
            del tensor
        if not so_far:
            raise WeightMismatch("the source of this push has no tensors")
        yield self._taken(so_far), True

    def _taken(self, so_far: list[tuple[str, torch.Tensor]]) -> Pairs:
        """These tensors as a bucket; the list is empty afterwards."""
        self._made.take()
        bucket = Pairs.of(so_far)
        so_far.clear()
        self.is_on_cuda = self.is_on_cuda or any(tensor.is_cuda for tensor in bucket.tensors)
        return bucket

    def _num_bytes(self, name: str, tensor: torch.Tensor) -> int:
        """In its own dtype or the model's, whichever takes more: it is cast inside its bucket."""
        known = None if self._expected is None else self._expected.tensors.get(name)
        own = tensor.numel() * cast_dtype(tensor, self._dtype).itemsize  # of a shard, as a whole
        return max(own, 0 if known is None else known.num_bytes)

    def _mapped(self, bucket_bytes: int) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Whole tensors under the checkpoint's names, or None after those that fill the bucket.

        Shards wait for one another until they fill it: gathers that are started together cost less.
        Whole tensors take memory, so they do not wait.
        """
        shards: list[tuple[str, Any]] = []
        waiting_bytes = 0
        for name, tensor in named_pairs(self._named):
            check_is_tensor(name, tensor)
            if self._is_tied(plain_name(name), tensor):
                del tensor
                continue
            self._check_memory(name, tensor)
            more = self._num_bytes(plain_name(name), tensor)
            is_full = self._num_gathered_bytes + waiting_bytes + more > bucket_bytes
            if shards and (is_full or not is_shard(tensor)):
                yield from self._gathered(shards)
                waiting_bytes = 0
            if is_full:
                yield "", None
            if self._name_map is not None or self._is_in_model(plain_name(name)):
                self._waiting.add(plain_name(name), tensor)
            shards.append((name, tensor))
            waiting_bytes += more
            if not is_shard(tensor):
                del tensor
                yield from self._gathered(shards)
                waiting_bytes = 0
        yield from self._gathered(shards)

    def _is_in_model(self, name: str) -> bool:
        known = self._expected
        return known is None or name in known.tensors or is_stacked(name, known)

    def _check_memory(self, name: str, tensor: Any) -> None:
        """Check that a tensor was not made in the memory of one that is not sent yet."""

        def made() -> Iterable[str]:
            outline = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            return filter(self._is_in_model, dict(self._renamed(name, outline)))

        self._made.check_new(tensor, made)
        self._waiting.check_new(tensor, made)

    def _is_tied(self, name: str, tensor: Any) -> bool:
        """Whether the model has it under the name of an earlier tensor that is still there."""
        if self._expected is None or not _keeps_names(self._name_map):
            return False
        memory = _memory_of(tensor)
        if self._is_in_model(name):
            local = tensor.to_local() if is_shard(tensor) else tensor
            self._known[memory] = StorageWeakRef(local.untyped_storage())
            return False
        # The memory of a tensor that is gone may be another's by now.
        known = self._known.get(memory)
        return bool(tensor.numel()) and known is not None and not known.expired()

    def _gathered(self, shards: list[tuple[str, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
        """These shards as whole tensors, renamed; ``shards`` has none of them any more."""
        names = [name for name, _ in shards]
        tensors = [tensor for _, tensor in shards]
        self._waiting.take()
        shards.clear()
        whole = gathered_whole(tensors, self._dtype, self._gather_timeout_s)
        tensors.clear()
        whole.reverse()
        for name in names:
            yield from self._renamed(name, whole.pop())

    def _renamed(self, name: str, whole: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
        if self._name_map is not None:
            return self._name_map(name, whole)
        name = plain_name(name)
        if self._expected is not None and is_stacked(name, self._expected):
            return split_experts(name, whole)
        return [(name, whole)]


def cast_to(pairs: Pairs, expected: Manifest | None) -> Pairs:
    """The tensors in the dtypes of the model; ``pairs`` has none of them any more."""
    known = {} if expected is None else expected.tensors
    left = list(reversed(pairs.tensors))
    pairs.tensors = []
    cast = []
    for spec in pairs.specs:
        tensor = left.pop()
        dtype = known[spec.name].dtype if spec.name in known else spec.dtype
        cast.append((spec.name, tensor.to(getattr(torch, dtype))))
        del tensor
    return Pairs.of(cast)


def _in_order(named: NamedTensors, tensors: TensorList) -> list[tuple[str, torch.Tensor]]:
    """This rank's tensors in the order of rank 0's; those that rank 0 leaves out are left out."""
    own = {plain_name(name): tensor for name, tensor in named_pairs(named)}
    for name, dtype, shape in tensors:
        if name not in own:
            raise WeightMismatch(f"it has no tensor {name!r}, which rank 0 pushes", tensor=name)
        check_is_tensor(name, own[name])
        found = (str(own[name].dtype), list(own[name].shape))
        if found != (dtype, shape):
            raise WeightMismatch(
                f"its tensor {name!r} is {found[0]} {found[1]}, rank 0's is {dtype} {shape}",
                tensor=name,
            )
    return [(name, own[name]) for name, *_ in tensors]


def plain_name(name: str) -> str:
    """A tensor's name without what torch.compile and activation checkpointing add to it."""
    for added in _ADDED_TO_NAMES:
        name = name.replace(added, "")
    return name


def _keeps_names(name_map: NameMap | None) -> bool:
    """Whether the trainer's names are the checkpoint's, so that tied ones are found by name."""
    return name_map is None or isinstance(name_map, Fp8BlockQuantiser)


def _columns(named: NamedTensors) -> tuple[list[str], list[torch.Tensor]]:
    """Names and tensors in two lists, without an object for each pair.

    A model of experts has tens of thousands, so what is true of all is found by one call.
    """
    if isinstance(named, Mapping) and {str}.issuperset(map(type, named)):
        names, tensors = list(named), list(named.values())
    else:
        names, tensors = [], []
        for name, tensor in named_pairs(named):
            names.append(name)
            tensors.append(tensor)
    text = "\n".join(names)
    if any(added in text for added in _ADDED_TO_NAMES):
        names = [plain_name(name) for name in names]
    return names, tensors


def _check_whole(names: Sequence[str], tensors: Sequence[Any]) -> None:
    if not has_shards(tensors):
        return
    for name, tensor in zip(names, tensors, strict=True):
        if is_shard(tensor) and (num_ranks := tensor.device_mesh.size()) > 1:
            raise WeightMismatch(
                f"tensor {name!r} is sharded over {num_ranks} ranks, and this push gathers on one; "
                "push from every rank: pusher = policy.pusher(), then pusher.push(tensors)",
                tensor=name,
            )


def _without_tied(
    names: Sequence[str], tensors: Sequence[torch.Tensor], expected: Manifest
) -> Iterator[tuple[str, torch.Tensor]]:
    """Omits tensors that the model does not have if they share memory with one that it has."""
    pairs = list(zip(names, tensors, strict=True))
    for pair in pairs:
        check_is_tensor(*pair)
    known = {_memory_of(tensor) for name, tensor in pairs if name in expected.tensors}
    for name, tensor in pairs:
        if name in expected.tensors or not tensor.numel() or _memory_of(tensor) not in known:
            yield name, tensor


def _memory_of(tensor: Any) -> tuple[object, ...]:
    """Equal for tied tensors, but not for a view with the same start."""
    if is_shard(tensor):
        tensor = tensor.to_local()
    # The shard of a rank may be empty, and then it has no address.
    place = tensor.data_ptr() or tensor.untyped_storage()._cdata
    return place, tensor.device, tensor.dtype, tensor.shape, tensor.stride()
