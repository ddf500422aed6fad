"""Decides whether the weight version of a push can be used.

Always true: no two contents serve under one version.  So a version that has served is used again
only for the same contents: samples of it may be in a buffer, an engine that was fenced may run on,
and the store may have it, also when no engine of the server is left.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import index
from typing import Any

from rollout.config import WeightsConfig, WeightUpdate
from rollout.core.errors import WeightMismatch
from rollout.weights.format.manifest import Manifest

MAX_VERSION = 2**63 - 1


@dataclass(frozen=True, slots=True)
class LastPush:
    """The push that the engines were given last.

    Attributes:
        version: 0: the checkpoint that they started from.
        manifest: None for the checkpoint.
        has_served: the gate was open at this version, or may have been.
        adapters: the version of each LoRA adapter that is part of these weights.
        base_version: the version of the base under them; without any, ``version``.
    """

    version: int = 0
    manifest: Manifest | None = None
    has_served: bool = True
    adapters: Mapping[str, int] = field(default_factory=dict)
    base_version: int = 0

    def then(
        self, version: int, manifest: Manifest, contents: WeightUpdate, adapter: str
    ) -> LastPush:
        """After a push of these contents.  Only a push of all base weights ends adapters; the same
        contents pushed again do not take back that their version has served.

        Args:
            adapter: name of the adapter that is pushed, or empty for none.
        """
        has_served = self.has_served and version == self.version
        if contents is WeightUpdate.LORA:
            adapters = {**self.adapters, adapter: version}
            return LastPush(version, manifest, has_served, adapters, self.base_version)
        kept = {} if contents is WeightUpdate.FULL else self.adapters
        return LastPush(version, manifest, has_served, kept, version)


def checked_version(version: Any) -> int:
    """A weight version as an int.

    Raises:
        WeightMismatch: it is no integer, or out of range.
    """
    try:
        number = index(version)
    except TypeError:
        number = -1
    if isinstance(version, bool) or not 0 <= number <= MAX_VERSION:
        raise WeightMismatch(
            f"weight version {_shown(version)} ({type(version).__name__}) is not an integer from "
            f"0 to 2**63 - 1; nothing was sent"
        )
    return number


def _shown(version: Any) -> str:
    text = repr(version)
    return text if len(text) <= 40 else f"{text[:20]}..."


def why_not_newer(version: int, manifest: Manifest, last: LastPush) -> str:
    """Why a push cannot have this version."""
    if version > last.version:
        return ""
    if version < last.version or last.manifest is None:
        return (
            f"weight version {version} is not newer than {last.version}, which the engines were "
            f"given last; push as version {last.version + 1}"
        )
    if not last.has_served:  # a failed call is repeated, and all engines get this push
        return ""
    if not (_is_complete(manifest) and _is_complete(last.manifest)):
        return (
            f"weight version {version} is not newer than {last.version}, which has served, and it "
            "is unknown whether this push has the same contents; push it as version "
            f"{version + 1}, or go on without a push if engines hold it"
        )
    if manifest != last.manifest:
        return (
            f"weight version {version} has served with other contents; push these as version "
            f"{version + 1}"
        )
    return ""


def why_no_path_check(weights: WeightsConfig, pushed: int | None) -> str:
    """Why ``checks.push_path`` cannot check the push path.

    Args:
        pushed: the version pushed last, or None if the engines hold what they loaded.
    """
    if weights.update is not WeightUpdate.FULL:
        return f"it needs pushes of all weights, and weights.update is {weights.update}"
    if weights.not_pushed:
        return (
            "it resets all tensors, and those of weights.not_pushed do not come with a push; leave "
            "weights.not_pushed out for it"
        )
    if pushed is not None:
        # The same path twice gives the same weights, also when it is wrong.
        return (
            f"the engines hold pushed weights, version {pushed}, and a comparison with those shows "
            "nothing; call checks.push_path before the first push"
        )
    return ""


def _is_complete(manifest: Manifest) -> bool:
    return bool(manifest.tensors) and manifest.tensors.keys() == manifest.fingerprints.keys()
