"""Where the copies of a push are that the store reads after the push."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from rollout.weights.format.manifest import Manifest, TensorSpec
from rollout.weights.push.weight_push import WeightPush
from rollout.weights.transports.carriers import ByPath

logger = logging.getLogger(__name__)


class CopiedPush:
    """The copies of one push, bucket by bucket.

    Always true: copies that are not complete are never offered to the store; the push goes on.
    """

    def __init__(self) -> None:
        self._specs: list[TensorSpec] = []
        self._paths: list[str] = []
        self._fingerprints: dict[str, str] = {}
        self._why_not = ""

    def has_tensors(self, specs: Sequence[TensorSpec]) -> None:
        """The next bucket has these."""
        self._specs += specs

    def add(self, path: str, fingerprints: Mapping[str, str]) -> None:
        """A folder with some of the tensors."""
        self._paths.append(path)
        self._fingerprints |= fingerprints

    def give_up(self, why: str) -> None:
        """A bucket could not be copied."""
        self._why_not = why

    def push(self, version: int) -> WeightPush | None:
        """The copies as a push that the store can read; None if they are not complete."""
        if self._why_not:
            logger.warning("store: weight version %d is not kept: %s", version, self._why_not)
            return None
        manifest = Manifest(Manifest.of(self._specs).tensors, self._fingerprints)
        return WeightPush(version, manifest, [{"path": path} for path in self._paths], ByPath())
