"""Fingerprints of a whole set of weights: made, put together, and compared by name.

How one tensor's is made stands in ``engines.fingerprint``, whose words are these; from torch
tensors they come from ``rollout.weights.tensors``.
"""

from __future__ import annotations

from collections.abc import Mapping

from engines.fingerprint import (
    Buffer,
    Hasher,
    head_of,
    host_fingerprint,
    host_fingerprint_of,
    start,
    way_of,
    whole_fingerprint,
)
from rollout.errors import WeightMismatch


def check_same(expected: Mapping[str, str], found: Mapping[str, str], *, where: str) -> None:
    """Refuse weights that are not the expected ones.

    Args:
        where: what was found where, for the error: ``engine decode-1``.

    Raises:
        WeightMismatch: names a tensor that is missing, too many, or differs, and counts them.
        ValueError: the fingerprints were made in different ways.
    """
    way_of({"expected": _any_of(expected), "found": _any_of(found)} if expected and found else {})
    for what, names in (
        ("lacks", [name for name in expected if name not in found]),
        ("has unexpectedly", [name for name in found if name not in expected]),
        ("differs in", [name for name in expected if found.get(name) != expected[name]]),
    ):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise WeightMismatch(f"{where} {what} tensor {names[0]!r}{more}", tensor=names[0])


def _any_of(fingerprints: Mapping[str, str]) -> str:
    return next(iter(fingerprints.values()))


__all__ = [
    "Buffer",
    "Hasher",
    "check_same",
    "head_of",
    "host_fingerprint",
    "host_fingerprint_of",
    "start",
    "way_of",
    "whole_fingerprint",
]
