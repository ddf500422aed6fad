"""A head that is tied to the embedding, as the checkpoint on this machine has it."""

from __future__ import annotations

from collections.abc import Sequence

from rollout.config import WeightUpdate
from rollout.config.compatibility import TiedHead
from rollout.weights.format.checkpoint_config import is_tied, read_checkpoint_config
from rollout.weights.format.manifest import (
    EMBEDDING,
    HEAD,
    first_match,
    read_checkpoint_manifest,
)


def tied_head(model_path: str, update: WeightUpdate, not_pushed: Sequence[str]) -> TiedHead | None:
    """What is known of it, or None if there is none, or nothing is known."""
    config = read_checkpoint_config(model_path)
    manifest = read_checkpoint_manifest(model_path)
    names = tuple(manifest.tensors) if manifest else ()
    heads = [name for name in names if name.endswith(HEAD)]
    is_headless = not heads and any(name.endswith(EMBEDDING) for name in names)
    if not (is_headless if (known := is_tied(config)) is None else known):
        return None
    is_optional = update is WeightUpdate.PARTIAL or any(
        first_match(name, not_pushed) for name in heads
    )
    model_type = str(config.get("model_type") or "unknown")
    return TiedHead(model_type, may_be_left_out=bool(heads) and is_optional)
