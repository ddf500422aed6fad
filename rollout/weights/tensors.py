"""The tensor side of a push: named tensors -> manifest and buckets.

The only file of ``rollout`` that imports torch.  It runs in the trainer's process; what leaves
it is plain bytes, which Ray moves at memory speed where it would move tensors twenty times
slower.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Iterator, Mapping

import torch

from rollout.errors import WeightMismatch
from rollout.weights.manifest import Manifest, TensorSpec
from rollout.weights.push import WeightPush

NamedTensors = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


def make_push(
    named_tensors: NamedTensors,
    *,
    version: int,
    bucket_bytes: int,
    expected: Manifest | None = None,
) -> WeightPush:
    """A push of these tensors, in buckets of about ``bucket_bytes``.

    A tensor under a name the model does not have is left out when it is the same memory as one
    it does have (a tied ``lm_head.weight`` in a ``state_dict``).

    Args:
        named_tensors: full tensors under their checkpoint names, on any device.
        expected: the model's manifest, to recognise tied tensors; None keeps every name.

    Raises:
        WeightMismatch: a value is not a tensor, or a name occurs twice.
    """
    pairs = list(named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors)
    for name, tensor in pairs:
        if not isinstance(tensor, torch.Tensor):
            raise WeightMismatch(
                f"{name!r} is a {type(tensor).__name__}, not a tensor", tensor=str(name)
            )
    if expected is not None:
        known = {_memory_of(tensor) for name, tensor in pairs if name in expected.tensors}
        pairs = [
            (name, tensor)
            for name, tensor in pairs
            if name in expected.tensors or not tensor.nbytes or _memory_of(tensor) not in known
        ]
    manifest = Manifest.of(
        TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in pairs
    )
    buckets = tuple(_serialize(bucket) for bucket in _split(pairs, bucket_bytes))
    return WeightPush(version=version, manifest=manifest, buckets=buckets)


def _memory_of(tensor: torch.Tensor) -> tuple[object, ...]:
    """Equal for tied tensors; not for a view that only starts where another tensor does."""
    return tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride()


def _split(
    pairs: list[tuple[str, torch.Tensor]], bucket_bytes: int
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    bucket: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in pairs:
        if bucket and size + tensor.nbytes > bucket_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


def _serialize(bucket: list[tuple[str, torch.Tensor]]) -> bytes:
    """SGLang's payload: a pickle of ``[(name, tensor)]``, by value and on the CPU."""
    # A view would drag its whole storage into the pickle, hence the contiguous copy of its own.
    plain = [(name, tensor.detach().cpu().contiguous().clone()) for name, tensor in bucket]
    buffer = io.BytesIO()
    pickle.dump(plain, buffer, protocol=pickle.HIGHEST_PROTOCOL)
    return buffer.getvalue()
