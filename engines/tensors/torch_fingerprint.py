"""Fingerprints of torch tensors, by their bytes or, on a GPU, by sums made where they are.

Always true: the same contents give the same fingerprint on CPU and CUDA, whatever the device's
order of additions: the sums are of 64-bit integers, which wrap around.

What the sums see: a tensor's bytes as 64-bit words, laid out as rows of ``ROW_WORDS``, each
summed, and again as rows of ``COLUMN_WORDS``, summed over the rows.  Any one changed bit changes
one sum of each kind.  What changes in several places is missed only where it cancels in both
layouts at once.  Their widths differ, so that swapping two rows that sum to the same (one-hot
rows) is seen; equal widths miss that.  Plain sums of a whole tensor, or xor, miss any swap.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch

from engines.tensors import bulk_copy
from engines.tensors.fingerprint import head_of, host_fingerprint, sums_fingerprint

# Of sums that are copied to the host at once.
_MOST_TOGETHER = 64 << 20
WORD_BYTES = 8
ROW_WORDS = 16384
# Eight times a prime: words that swap unseen must lie a multiple of 4099 rows (512 MiB) apart.
# Not a power of two, for its rows would share cache lines: that halves the speed on a CPU.
COLUMN_WORDS = 8 * 4099

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_IS_CPU = attrgetter("is_cpu")


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` of ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def bytes_fingerprint(name: str, tensor: torch.Tensor) -> str:
    """``xxh3:...`` of a tensor; one that is on a device is copied to the host."""
    content = _host_bytes(as_bytes(tensor))
    return host_fingerprint(name, dtype_name(tensor.dtype), tuple(tensor.shape), content)


def fingerprints(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """``bytes_fingerprint`` of each, by several threads where there is much to read."""
    names = list(tensors)

    def hashed(part: slice) -> dict[str, str]:
        share = names[part]
        here = [name for name in share if is_in_memory(tensors[name])]
        known = [tensors[name] for name in here]
        heads = [
            head_of(name, dtype_name(tensor.dtype), tuple(tensor.shape))
            for name, tensor in zip(here, known, strict=True)
        ]
        at = [tensor.data_ptr() for tensor in known]
        digests = bulk_copy.copy_and_hash(heads, at, at, [tensor.nbytes for tensor in known])
        found = dict(zip(here, digests, strict=True))
        return {name: found.get(name) or bytes_fingerprint(name, tensors[name]) for name in share}

    parts = bulk_copy.in_threads(hashed, [tensor.nbytes for tensor in tensors.values()])
    return {name: digest for part in parts for name, digest in part.items()}


def device_fingerprint(name: str, tensor: torch.Tensor) -> str:
    """``sums:...`` of a tensor, made on its device; at most 0.5 MiB + 1/16384 of it is copied."""
    return device_fingerprints([(name, tensor)])[name]


def device_fingerprints(pairs: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """``device_fingerprint`` of each, with one copy to the host for all, or for each 64 MiB.

    A copy waits for the device.  One for each sum would cost more time than the sums.
    """
    found: dict[str, str] = {}
    waiting: list[_Sums] = []
    num_bytes = 0
    for name, tensor in pairs:
        sums = _Sums(name, tensor)
        waiting.append(sums)
        num_bytes += sum(part.numel() for _, part in sums.parts)
        if num_bytes >= _MOST_TOGETHER:
            found |= _fingerprinted(waiting)
            waiting, num_bytes = [], 0
    return found | _fingerprinted(waiting)


class _Sums:
    """The sums of one tensor, as bytes on its device."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name = name
        self.dtype = dtype_name(tensor.dtype)
        self.shape = tuple(tensor.shape)
        self.parts = [(part, as_bytes(value)) for part, value in _parts_of(tensor)]


def _parts_of(tensor: torch.Tensor) -> Sequence[tuple[str, torch.Tensor]]:
    content = as_bytes(tensor)
    num_words = content.numel() // WORD_BYTES
    if num_words < COLUMN_WORDS:
        return [("all", content)]
    whole = content[: num_words * WORD_BYTES]
    if whole.data_ptr() % WORD_BYTES:  # a slice of something larger
        whole = whole.clone()
    words = whole.view(torch.int64)
    rows, after_rows = _rows(words, ROW_WORDS)
    columns, after_columns = _rows(words, COLUMN_WORDS)
    return [
        ("rows", rows.sum(1)),
        ("after", after_rows),
        ("columns", columns.sum(0)),
        ("after", after_columns),
        ("tail", content[num_words * WORD_BYTES :]),
    ]


def _fingerprinted(waiting: Sequence[_Sums]) -> dict[str, str]:
    on_device: dict[torch.device, list[torch.Tensor]] = defaultdict(list)
    for sums in waiting:
        for _, part in sums.parts:
            on_device[part.device].append(part)
    host = {device: _host_bytes(torch.cat(parts)) for device, parts in on_device.items()}
    read = dict.fromkeys(host, 0)
    found = {}
    for sums in waiting:
        pieces: list[tuple[str, Any]] = []
        for name, content in sums.parts:
            begin = read[content.device]
            read[content.device] = end = begin + content.numel()
            pieces.append((name, host[content.device][begin:end]))
        found[sums.name] = sums_fingerprint(sums.name, sums.dtype, sums.shape, pieces)
    return found


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's contents as a flat tensor of bytes; a copy only if they are not contiguous."""
    flat = tensor.detach().contiguous().reshape(-1)
    if not flat.numel():
        return flat.new_empty(0, dtype=torch.uint8)
    if flat.stride(0) != 1:  # of one element, which torch calls contiguous with any stride
        flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8)


def is_in_memory(tensor: torch.Tensor) -> bool:
    """Whether its bytes are simply those at ``data_ptr``."""
    return type(tensor) in _PLAIN and tensor.is_cpu and tensor.is_contiguous()


def are_in_memory(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether that is so of all; one call asks all of them for one thing."""
    return (
        _PLAIN.issuperset(map(type, tensors))
        and all(map(_IS_CPU, tensors))
        and all(map(torch.Tensor.is_contiguous, tensors))
    )


def _rows(words: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    whole = words.numel() // width * width
    return words[:whole].view(-1, width), words[whole:]


def _host_bytes(content: torch.Tensor) -> Any:
    array: Any = content.cpu().numpy()  # numpy's types hide that it is a buffer
    return memoryview(array)
