"""A tensor of one version, made on a node from the version that it keeps and deltas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from engines.tensors.fingerprint import host_fingerprint
from rollout.weights.format.manifest import TensorSpec

_LENGTH_BYTES = 8


def joined(deltas: Sequence[bytes]) -> bytes:
    """The changes of one tensor, the oldest first, as ``rebuild`` takes them."""
    return b"".join(len(delta).to_bytes(_LENGTH_BYTES, "little") + delta for delta in deltas)


def rebuild(
    spec: TensorSpec, old: memoryview, changes: bytes, fingerprint: str, into: memoryview
) -> str:
    """Write a tensor; returns why it is not what the trainer has, or nothing.

    Args:
        old: its bytes in the version that the changes begin from.
        changes: see ``joined``.
        fingerprint: of what the trainer has.
    """
    into[:] = old
    try:
        if changes:
            from engines.tensors.delta import apply_all

            apply_all(spec.name, spec.dtype, spec.shape, into, list(_split(changes)))
    except ValueError as error:
        return f"a delta was not applied: {error}"
    if host_fingerprint(spec.name, spec.dtype, spec.shape, into) != fingerprint:
        return f"{spec.name!r}, made of deltas, is not what the trainer has"
    return ""


def _split(changes: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(changes):
        begin = at + _LENGTH_BYTES
        at = begin + int.from_bytes(changes[at:begin], "little")
        if at > len(changes):
            raise ValueError("the last one is cut")
        yield changes[begin:at]
