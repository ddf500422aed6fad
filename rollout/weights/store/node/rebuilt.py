"""A tensor of one version, made on a node from the version that it keeps and deltas."""

from __future__ import annotations

from collections.abc import Sequence

from engines.tensors.fingerprint import host_fingerprint
from rollout.weights.format.manifest import TensorSpec


def rebuild(
    spec: TensorSpec, old: memoryview, deltas: Sequence[bytes], fingerprint: str, into: memoryview
) -> str:
    """Write a tensor; returns why it is not what the trainer has, or nothing.

    Args:
        old: its bytes in the version that the first delta begins from.
        fingerprint: of what the trainer has.
    """
    into[:] = old
    try:
        if deltas:
            from engines.tensors.delta import apply_all

            apply_all(spec.name, spec.dtype, spec.shape, into, deltas)
    except ValueError as error:
        return f"a delta was not applied: {error}"
    if host_fingerprint(spec.name, spec.dtype, spec.shape, into) != fingerprint:
        return f"{spec.name!r}, made of deltas, is not what the trainer has"
    return ""
