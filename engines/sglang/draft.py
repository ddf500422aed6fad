"""The draft model of an SGLang engine, by its options or its own report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engines.protocol.spec import spelled

BACKUP_OPTION = "enable_draft_weights_cpu_backup"
"""The option that keeps a copy of the draft's weights in host memory while they are released."""
_PATHS = ("speculative_draft_model_path", "speculative_draft_model")
# It drafts from the tokens alone.
_WITHOUT_WEIGHTS = ("NGRAM", "NONE")


def draft_of(options: Mapping[str, Any]) -> str:
    """The path of its draft model, or the algorithm that has one, or empty if it has none."""
    named = {spelled(name): value for name, value in options.items()}
    algorithm = str(named.get("speculative_algorithm") or "")
    if not algorithm or algorithm.upper() in _WITHOUT_WEIGHTS:
        return ""
    return next((str(named[path]) for path in _PATHS if named.get(path)), algorithm)
