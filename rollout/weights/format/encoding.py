"""What is known of how tensors are encoded in a push; ``rank_end`` has what an encoding does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rollout.config import EncodingChoice
from rollout.weights.format.manifest import TensorSpec

FULL = EncodingChoice.FULL.value
"""Whole tensors, in the place of the name of an encoding."""


@dataclass(frozen=True, slots=True)
class EncodingTerms:
    """What decides on the encoding of a push, besides its routes, its engines and those before it.

    Attributes:
        wanted: the setting: the name of an encoding, or ``auto``.
        num_ranks: number of the trainer's ranks.
    """

    wanted: str = FULL
    num_ranks: int = 1

    def wants(self, name: str) -> bool:
        """Whether this encoding may be chosen."""
        return self.wanted in (EncodingChoice.AUTO, name)


@dataclass(frozen=True, slots=True)
class BegunPush:
    """A push of one rank that an encoding has a part in.

    Attributes:
        model: its tensors, by name, or empty if they are not known.
        is_whole: all engines get whole tensors; the encoding may prepare the next push.
        is_stored: what engines get is kept for the store.
    """

    version: int
    model: Mapping[str, TensorSpec]
    is_whole: bool = True
    is_stored: bool = False


@dataclass(frozen=True, slots=True)
class EncodedPush:
    """What engines got of a push, for the store.

    Attributes:
        base: the weight version that it begins from.
        tensors: tensor -> its content, or None for one that was sent whole.  Those that are equal
            to the base's are left out.
    """

    base: int
    tensors: dict[str, bytes | None]
