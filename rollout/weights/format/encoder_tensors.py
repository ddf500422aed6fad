"""Which tensors of a checkpoint compute the embeddings of images, sounds and videos.

Engines may keep such embeddings by the hash of an image alone, so a push must not change these.
Models name their language part in few ways, and their encoders and projectors in many: so what is
not known to be of the language model counts as an encoder.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rollout.config import WeightUpdate
from rollout.core.errors import WeightMismatch
from rollout.weights.format.manifest import first_match, read_checkpoint_manifest

_OF_LANGUAGE = re.compile(
    r"(thinker\.)?(model\.)?"
    r"(language_model|text_model|language|llm|layers|embed_tokens|norm|lm_head|mtp)\."
)


def pushed_encoder(model_path: str, update: WeightUpdate, not_pushed: Sequence[str]) -> str:
    """A tensor of an encoder that a push may change, in words, or empty if no push changes one.

    Args:
        not_pushed: patterns of tensors that a full push does not contain.
    """
    if update is WeightUpdate.FROZEN:
        return ""
    try:
        manifest = read_checkpoint_manifest(model_path)
    except WeightMismatch:  # which a push reports
        manifest = None
    if manifest is None:
        return "tensors that are not known"
    return next(
        (
            f"tensor {name!r}"
            for name in manifest.tensors
            if not _OF_LANGUAGE.match(name) and not first_match(name, not_pushed)
        ),
        "",
    )
